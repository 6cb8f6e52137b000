"""One session of a training run: from words that were checked to a trained model in a run directory.

summary = train(order, emit)          # order: what run.json holds

run.json         what was asked, where, with which versions; a resumed session reads it
metrics.jsonl    one line per cycle, evaluation, checkpoint
checkpoints/     the newest and the best
data/            token shards, where a text was given and not a prepared folder
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from redline.core.checkpoints import STATE_FILE
from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.training import TrainSettings
from redline.core.values import from_json, to_json
from redline.core.workload import Shape, Workload
from redline.data.loader import Loader, WindowBatches
from redline.data.shards import Dataset, open_dataset
from redline.data.tokenizer import tokenizer
from redline.engine.build import build_step
from redline.engine.checkpoint import CheckpointStore, Loaded, latest_checkpoint, load_from
from redline.engine.sample import sample
from redline.engine.step import TrainStep
from redline.engine.train import Emit, Trainer
from redline.model.gpt import GPT
from redline.optim.schedule import make_schedule
from redline.rungs import plan_of

SAMPLE_TOKENS = 60
SAME_ADAMW = ("adamw-loop", "adamw-foreach", "adamw-fused")  # one rule, three implementations: a run may change them


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    workload: Workload
    recipe: Recipe
    settings: TrainSettings
    device: str
    data: str
    """A folder of token shards."""
    out: str


def train(order: TrainOrder, emit: Emit) -> dict[str, Any]:
    device, settings = torch.device(order.device), order.settings
    plan = training_plan(order.recipe)
    data = open_dataset(Path(order.data), vocab=order.workload.shape.vocab, say=lambda text: emit("note", text=text))
    step = build_step(order.workload, plan, device=device, chunk=settings.micro_batch, learning_rate=rate_of(settings))
    store = CheckpointStore(Path(order.out) / "checkpoints")
    trainer = Trainer(
        step=step,
        settings=settings,
        open_loader=lambda position: open_loader(order, data, plan, device, position),
        validation=lambda: validation_batches(order, data, device),
        store=store,
        identity=identity_of(order, data),
        emit=emit,
        sample=lambda: sampled_text(step, order.workload),
    )
    trainer.resume()
    why = trainer.run()
    return summary_of(trainer, why)


def training_plan(recipe: Recipe) -> Plan:
    """The recipe's, with the loss left to the trainer, who reads it once per cycle. A plan that reads it at every step
    keeps doing so: that is what its row in the ladder measured."""
    plan = plan_of(recipe.rungs)
    return plan if plan.read_loss_every == 1 else replace(plan, read_loss_every=0)


def rate_of(settings: TrainSettings) -> Any:
    # A constant schedule has no end; any number of steps beyond the warm-up says the same.
    steps = settings.schedule_steps or settings.warmup_steps + 1
    name = settings.schedule if settings.schedule_steps else "constant"
    return make_schedule(name, peak=settings.learning_rate, warmup_steps=settings.warmup_steps, steps=steps)


def open_loader(order: TrainOrder, data: Dataset, plan: Plan, device: torch.device, position: int) -> Loader:
    return Loader(
        data.train,
        seed=order.workload.seed,
        micro_batch=order.settings.global_batch,
        sequence=order.workload.shape.sequence,
        device=device,
        workers=plan.loader_workers,
        position=position,
    )


def validation_batches(order: TrainOrder, data: Dataset, device: torch.device) -> Iterator[torch.Tensor]:
    """The first batches of the held-out documents, in their own order; none where no document was held out."""
    if data.val is None or data.val.tokens <= order.workload.shape.sequence:
        return
    batches = WindowBatches(
        split=data.val,
        seed=order.workload.seed,
        micro_batch=order.settings.micro_batch,
        sequence=order.workload.shape.sequence,
    )
    enough = max(1, batches.windows // order.settings.micro_batch)  # a smaller set is seen once, not again and again
    for index in range(min(order.settings.eval_batches, enough)):
        yield batches[index].to(device)


def identity_of(order: TrainOrder, data: Dataset) -> dict[str, Any]:
    """What must be the same for a checkpoint to go on: the maths of the run. Speed may change."""
    plan, settings = plan_of(order.recipe.rungs), order.settings
    return {
        "model": {**to_json(order.workload.shape), "tied head": plan.tied},
        "tokenizer": to_json(data.tokenizer),
        "data": data.fingerprint,
        "seed": order.workload.seed,
        "global_batch": settings.global_batch,
        "vocabulary rows": plan.vocab_rows(order.workload.shape.vocab),
        "optimizer": "adamw" if plan.optimizer in SAME_ADAMW else plan.optimizer,
    }


def sampled_text(step: TrainStep, workload: Workload) -> str:
    encoder = tokenizer(workload.tokenizer)
    ids = sample(step.model, [encoder.end_of_text], count=SAMPLE_TOKENS, temperature=0.8, seed=workload.seed)
    return encoder.decode(ids)


def summary_of(trainer: Trainer, why: str) -> dict[str, Any]:
    progress, store = trainer.progress, trainer.store
    return {
        "ended": why,
        "updates": progress.updates,
        "tokens": {
            "train": progress.tokens,
            "validation": progress.validation_tokens,
            "total": progress.tokens + progress.validation_tokens,
        },
        "documents": progress.documents,
        "seconds": progress.seconds,
        "tokens_per_second": statistics.median(progress.rates) if progress.rates else None,
        "skipped": progress.skipped,
        "loss": trainer.last_loss,
        "validation_loss": trainer.validation_loss,
        "best_validation_loss": progress.best_validation,
        "checkpoint": None if store.last_saved is None else str(store.folder),
        "peak_bytes": trainer.peak_bytes,
    }


def load_model(path: Path) -> tuple[GPT, str]:
    """The model of a run directory's newest whole checkpoint, or of one checkpoint, and its tokenizer's name. A
    checkpoint says itself what model it holds."""
    loaded = load_from(path) if (path / STATE_FILE).exists() else newest_of(path)
    about = dict(loaded.identity["model"])
    tied = about.pop("tied head")
    model = GPT(from_json(Shape, about), tied=tied, vocab_rows=loaded.identity["vocabulary rows"])
    tensors = loaded.tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    return model, loaded.identity["tokenizer"]["name"]


def newest_of(run: Path) -> Loaded:
    loaded, notes = latest_checkpoint(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
    if loaded is None:
        raise UserError(
            f"{run} holds no whole checkpoint",
            "; ".join(notes) or "nothing was saved there",
            "give a run directory of `redline train`, or one of its checkpoints/step-... folders",
        )
    return loaded
