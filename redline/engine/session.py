"""One session of a training run: from a checked order to a trained model in a run directory.

summary = train(order, emit)          # order: what run.json holds

run.json         what was asked, where, with which versions; a resumed session reads it
metrics.jsonl    one line per cycle, evaluation, sample, checkpoint, note and session
report.html      curves and summary, drawn from the two above
checkpoints/     the newest and the best
sample.jsonl     the prose that ships with Python, as one text, if no other data was given
data/            token shards, if a text was given instead of a prepared folder
text/            the description of a streamed text, and its held-out documents
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.core.checkpoints import CHECKPOINTS_FOLDER, STATE_FILE, newest_checkpoint
from redline.core.errors import FailedRunError, UserError
from redline.core.generators import seed_generators
from redline.core.hardware import Hardware
from redline.core.known_fixes import DEVICE_ASSERT, known_fix
from redline.core.layout import Layout, options_of_ranks
from redline.core.plan import ADAMWS, Plan
from redline.core.rank_processes import rank_pid_file
from redline.core.recipe import Recipe
from redline.core.traced import Traced
from redline.core.training import TrainSettings, resume_command
from redline.core.units import counted
from redline.core.user_code import raised_in
from redline.core.values import from_json, to_json
from redline.core.workload import BUILT_IN, Shape, Source, Workload
from redline.data.batches import BatchSource
from redline.data.loader import Loader, WindowBatches
from redline.data.made import MadeData, MadeLoader
from redline.data.made import validation_batches as made_validation
from redline.data.shards import Dataset, open_dataset
from redline.data.share import Share
from redline.data.stream import TextStream
from redline.data.survey import TEXT_FILE, StreamedText, open_text
from redline.data.tokenizer import tokenizer
from redline.engine.build import build_step
from redline.engine.checkpoint import CheckpointStore, Loaded, latest_checkpoint, load_from
from redline.engine.distributed import RANK_0, Ranks, alone
from redline.engine.export import CONFIG_FILE, load_weights
from redline.engine.last_words import last_words
from redline.engine.memory import is_out_of_memory
from redline.engine.rank_stores import FollowingStore, LeadingStore, ShardedStore, Store
from redline.engine.sample import sample
from redline.engine.shard import is_cut
from redline.engine.step import TrainStep
from redline.engine.train import DivergedError, Emit, NotSavedError, Trainer
from redline.model.adapter import Adapter, adapter_of
from redline.optim.schedule import make_schedule
from redline.rungs import find_rung, plan_of, why_not
from redline.rungs.ladder import Checkpointing, for_layout
from redline.rungs.parallel import DDP, FSDP, TENSOR_PARALLEL, WAYS
from redline.workloads import resolve_workload

SAMPLE_TOKENS = 60
STREAM_WORKERS = 2  # tokenising in the training process itself would stall the device
LOST_WORKER = "DataLoader worker"  # torch's message: raised in a signal handler, wherever the code happens to be
SMALLER = "a smaller --micro-batch makes the same updates"


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    workload: Workload
    recipe: Recipe
    settings: TrainSettings
    device: str
    data: str
    """A folder of token shards, or one that describes a text to stream (`data/survey.py`)."""
    out: str
    init: str | None = None
    """Hugging Face folder with the initial weights; None: drawn from the seed."""
    layout: Layout | None = None
    """Layout of this session's ranks; a resumed session has its own. None: the ranks differ only in their data."""
    parallel: str | None = None
    """How a resumed session was asked to share its steps, which run.json does not record."""

    @property
    def options_of_ranks(self) -> str:
        """Options with which another session shares its steps as this one does."""
        return options_of_ranks(self.layout, self.parallel)

    @property
    def micro_batches(self) -> int:
        """Micro batches per update, on each of the ranks that take different data."""
        data = 1 if self.layout is None else self.layout.data
        return self.settings.global_batch // (self.settings.micro_batch * data)


def train(order: TrainOrder, emit: Emit, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train, and return a summary. Its `ended` says why training ended: 'steps', 'tokens', 'minutes', 'interrupted',
    'diverged' or 'failed' (out of memory, a loader process that died, a last checkpoint that was not saved). `ranks`:
    the ranks that train together; each of them must call this."""
    ranks = ranks or alone()
    trainer, plan = made_ready(order, emit, ranks)
    who = ""
    try:
        # An abort() of a rank is reported by the agent.
        with nullcontext() if ranks.joined else last_words(lambda: end_in_c(order, trainer)):
            why, reason = trainer.run(), None
    except DivergedError as error:
        why, reason = "diverged", str(error)
    except NotSavedError as error:
        why, reason = "failed", str(error)
    except (Exception, SystemExit) as error:
        if (mistake := mistake_in_file(error, order, trainer)) is not None:
            raise (ranks.named(mistake) if ranks.leads else mistake) from error  # before a failure is recorded
        why, reason = "failed", known_failure(error, order, plan)
        if reason is None:
            raise
        if ranks.count > 1 and ranks.leads:  # another rank's message already names it
            who = RANK_0
    if reason is not None:  # before it is shown, which may take a while: meanwhile other ranks fail because of it
        ranks.report_failure(f"rank {ranks.rank} failed: {reason}" if why == "failed" else f"training {why}: {reason}")
        reason = f"{who}{reason}"
    return {**summary_of(trainer, why), "reason": reason}


def made_ready(order: TrainOrder, emit: Emit, ranks: Ranks) -> tuple[Trainer, Plan]:
    """Build the trainer and its plan, and resume from the run's newest checkpoint, if there is one."""
    ranks.arrange(order.layout or Layout(ranks=ranks.count))
    device, settings = ranks.connect(order.device), order.settings
    plan = training_plan(order.recipe, ranks.layout)
    for note in notes_of_ranks(order, plan, ranks):
        emit("note", text=note)
    if settings.deterministic:
        be_deterministic()
    data = open_data(order, emit)
    ranks.mark(0, "building the model")
    step = build_step(
        order.workload,
        plan,
        device=device,
        chunk=settings.micro_batch,
        learning_rate=rate_of(settings),
        ranks=ranks,
    )
    store = open_store(order, plan, ranks)
    trainer = Trainer(
        step=step,
        settings=settings,
        open_loader=lambda position, state: open_loader(
            order, data, plan, step.adapter, device, position, state, ranks
        ),
        validation=lambda: validation_batches(order, data, device),
        store=store,
        identity=identity_of(order, data),
        emit=emit,
        sample=(lambda: sampled_text(step, order.workload)) if order.workload.reads_text else None,
        ranks=ranks,
    )
    # For dropout. A checkpoint restores the generators' states.
    seed = order.workload.seed + ranks.place.data
    seed_generators(seed)
    torch.manual_seed(seed)  # the device's generator too
    ranks.mark(0, "looking for a checkpoint")
    if not trainer.resume() and order.init is not None:
        load_weights(step.adapter, step.model, Path(order.init))
    return trainer, plan


def notes_of_ranks(order: TrainOrder, plan: Plan, ranks: Ranks) -> Iterator[str]:
    """Yield notes on how the ranks share the work, and on what ended those that torchrun had started before."""
    if (lost := ranks.lost_before()) is not None:
        yield lost
    if ranks.count > 1:
        yield ranks.layout.words(plan.parallel)
    if ranks.layout.pipeline > 1:
        yield ranks.layout.describe_bubble(order.micro_batches)
    way = next((name for name in order.recipe.rungs if name in WAYS), DDP)
    if ranks.joined and ranks.count == 1:
        yield "one rank: nothing is gathered or averaged"
    elif ranks.layout.data == 1 and way != DDP:
        yield f"{way} does nothing here: no two ranks take different data"


def mistake_in_file(error: BaseException, order: TrainOrder, trainer: Trainer) -> FailedRunError | None:
    """Return the error that a user's own file raised, with its line; None if it is nobody's mistake, or ours."""
    source = order.workload.source
    if source.file is None or is_out_of_memory(error) or LOST_WORKER in str(error):
        return None
    mistake = error if isinstance(error, UserError) else raised_in(source.file, error, training_of(order))
    return None if mistake is None else failed_run(mistake, order, trainer)


def training_of(order: TrainOrder) -> str:
    source = order.workload.source
    return f"training {order.workload.name if source.file is None else f'{Path(source.file).name}:{source.factory}'}"


def end_in_c(order: TrainOrder, trainer: Trainer) -> FailedRunError:
    """Return the error for code that called abort(). What C++ wrote is on the screen; what called it is unknown."""
    gpu = known_fix(RuntimeError(DEVICE_ASSERT)) if order.device == "cuda" else None
    mistake = UserError(
        f"{training_of(order)} ended in C++ code, which called abort()",
        "its own message stands above" + (f"; a {DEVICE_ASSERT} is an index out of range" if gpu else ""),
        gpu or "fix what it complains about",
    )
    return failed_run(mistake, order, trainer)


def failed_run(mistake: UserError, order: TrainOrder, trainer: Trainer) -> FailedRunError:
    """Add what is left of the run, and how to resume it. For a rank other than 0 the agent of `--gpus` prints that.
    Only rank 0, which may still be writing it, knows the last checkpoint."""
    if not trainer.ranks.leads and rank_pid_file() is not None:
        return FailedRunError(mistake.problem, mistake.why, mistake.fix)
    saved = newest_checkpoint(trainer.store.folder, trainer.progress.updates)
    stays = f"; {saved} was saved before" if saved and trainer.ranks.leads else ""
    command = resume_command(order.out, order.options_of_ranks)
    go_on = f"; if the cause lies elsewhere, go on: {command}" if saved else ""
    return FailedRunError(mistake.problem, f"{mistake.why}{stays}", f"{mistake.fix}, and start a new run{go_on}")


def known_failure(error: BaseException, order: TrainOrder, plan: Plan) -> str | None:
    """Describe a failure that is nobody's mistake; None for everything else."""
    if is_out_of_memory(error):
        size, thing = order.settings.micro_batch, "sequence" if order.workload.reads_text else "sample"
        ways = [SMALLER] if size > 1 else ways_to_less_memory(order, plan)
        told = f" ({'; '.join(ways)})" if ways else ""
        return f"out of memory with micro batches of {counted(size, thing)}{told}"
    if isinstance(error, (ConnectionError, EOFError)) or LOST_WORKER in str(error):
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"a loader process died ({text}): killed, or out of memory on the host"
    return None


def ways_to_less_memory(order: TrainOrder, plan: Plan) -> list[str]:
    """Return the options that save memory when the micro batch cannot be smaller: those that the recipe allows and does
    not use yet. Ranks on one CPU share its memory, so cutting the model saves nothing there."""
    machine = Hardware(kind=order.device, name="a machine", ranks=2)

    def allows(rung: str) -> bool:
        return why_not(find_rung(rung), order.workload, machine, plan) is None

    cuts = {"--parallel fsdp": (FSDP, plan.parallel != FSDP), "--tensor N": (TENSOR_PARALLEL, not plan.tensor_parallel)}
    new = [words for words, (rung, lacks) in cuts.items() if lacks and allows(rung)]
    ways = [f"{' or '.join(new)} with several GPUs holds a part on each"] if new and order.device == "cuda" else []
    if plan.checkpointing != "full" and allows(Checkpointing.name):
        ways.append(f"a --recipe with {Checkpointing.name} keeps less for the backward pass")
    if isinstance(order.workload.shape, Shape):
        ways.append("a new run can have a shorter --sequence")
    return ways


def be_deterministic() -> None:
    """Turn every non-deterministic kernel into an error. cuBLAS needs its variable set before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def training_plan(recipe: Recipe, layout: Layout | None = None) -> Plan:
    """Return the recipe's plan for these ranks (None: one process). It leaves reading the loss to the trainer, once per
    cycle, unless the recipe reads it at every step: that is what its row in the ladder measured."""
    plan = plan_of(for_layout(recipe.rungs, layout or Layout()))
    return plan if plan.read_loss_every == 1 else replace(plan, read_loss_every=0)


def open_store(order: TrainOrder, plan: Plan, ranks: Ranks) -> Store:
    folder, settings = Path(order.out) / CHECKPOINTS_FOLDER, order.settings
    keep = {"keep_last": settings.keep_last, "keep_best": settings.keep_best}
    if not ranks.joined:
        return CheckpointStore(folder, **keep)
    own = LeadingStore(folder, ranks, **keep) if ranks.leads else FollowingStore(folder, ranks)
    return ShardedStore(own, ranks) if is_cut(plan) else own


def rate_of(settings: TrainSettings) -> Any:
    # A constant schedule has no end: any number of steps beyond the warm-up gives the same rates.
    steps = settings.schedule_steps or settings.warmup_steps + 1
    name = settings.schedule if settings.schedule_steps else "constant"
    return make_schedule(name, peak=settings.learning_rate, warmup_steps=settings.warmup_steps, steps=steps)


Data = Dataset | StreamedText | MadeData


def open_data(order: TrainOrder, emit: Emit) -> Data:
    """Open the data, and check before anything is built that they are whole, unchanged and of the right tokenizer."""
    folder, workload = Path(order.data), order.workload
    if isinstance(workload.shape, Traced):
        traced = workload.shape
        return MadeData(source=workload.source, imports=traced.imports, classes=traced.classes)
    opened = open_text if (folder / TEXT_FILE).exists() else open_dataset
    return opened(
        folder,
        vocab=workload.decoder.vocab,
        tokenizer_name=workload.tokenizer,
        say=lambda text: emit("note", text=text),
    )


def open_loader(
    order: TrainOrder,
    data: Data,
    plan: Plan,
    adapter: Adapter,
    device: torch.device,
    position: int,
    state: dict[str, Any] | None,
    ranks: Ranks,
) -> BatchSource:
    """Open this rank's share of every global batch. The same sequences make the same updates, however many ranks there
    are. Ranks that hold one model together read the same data."""
    parts, part = ranks.layout.data, ranks.place.data
    each = order.settings.global_batch // parts
    if isinstance(data, Dataset):
        return Loader(
            data.train,
            seed=order.workload.seed,
            micro_batch=each,
            sequence=order.workload.shape.sequence,
            device=device,
            workers=plan.loader_workers,
            rank=part,
            ranks=parts,
            position=position,
        )
    whole = open_whole(order, data, plan, device, position, state)
    if parts == 1:
        return whole
    return Share(whole, cut=lambda batch: adapter.pieces(batch, each)[part][0], counts=part == 0)


def open_whole(
    order: TrainOrder,
    data: StreamedText | MadeData,
    plan: Plan,
    device: torch.device,
    position: int,
    state: dict[str, Any] | None,
) -> BatchSource:
    """Open a source of whole global batches."""
    if isinstance(data, MadeData):
        return MadeLoader(
            data,
            seed=order.workload.seed,
            global_batch=order.settings.global_batch,
            device=device,
            workers=plan.loader_workers,
            position=position,
        )
    stream = TextStream(
        data.source,
        seed=order.workload.seed,
        micro_batch=order.settings.global_batch,
        sequence=order.workload.shape.sequence,
        device=device,
        workers=max(plan.loader_workers, STREAM_WORKERS),
    )
    if state is not None:
        stream.resume(state)
    return stream


def validation_batches(order: TrainOrder, data: Data, device: torch.device) -> Iterator[Any]:
    """Yield the first batches of the held-out documents, in a fixed order; none if no document was held out. A Python
    file makes them from separate seeds. They do not depend on the session's micro batch: the trainer splits them."""
    size, count = order.settings.eval_batch, order.settings.eval_batches
    if isinstance(data, MadeData):
        yield from made_validation(data, seed=order.workload.seed, micro_batch=size, count=count, device=device)
        return
    if data.val is None or data.val.tokens <= order.workload.shape.sequence:
        return
    batches = WindowBatches(
        split=data.val,
        seed=order.workload.seed,
        micro_batch=size,
        sequence=order.workload.shape.sequence,
    )
    enough = max(1, batches.windows // size)  # a smaller set is used once, not repeatedly
    for index in range(min(count, enough)):
        yield batches[index].to(device)


def identity_of(order: TrainOrder, data: Data) -> dict[str, Any]:
    """Return what must stay the same to resume from a checkpoint: the maths of the run. Speed may change."""
    plan, settings = plan_of(order.recipe.rungs), order.settings
    return {
        **(made_identity(data) if isinstance(data, MadeData) else text_identity(order, data, plan)),
        "seed": order.workload.seed,
        "global_batch": settings.global_batch,
        "optimizer": "adamw" if plan.optimizer in ADAMWS else plan.optimizer,
    }


def made_identity(data: MadeData) -> dict[str, Any]:
    return {"model": {"kind": "python", **data.identity}}


def text_identity(order: TrainOrder, data: Dataset | StreamedText, plan: Plan) -> dict[str, Any]:
    source = order.workload.source
    return {
        "model": {**to_json(order.workload.shape), "tied head": plan.tied},
        **({} if source == BUILT_IN else {"source": to_json(source)}),
        "tokenizer": to_json(data.tokenizer),
        "data": data.identity,
        "vocabulary rows": plan.vocab_rows(order.workload.decoder.vocab),
    }


def uncompiled(plan: Plan) -> AbstractContextManager[object]:
    """Run compiled blocks in eager mode: they would be recompiled for every length that a sample passes through."""
    return torch.compiler.set_stance("force_eager") if plan.compile else nullcontext()


def sampled_text(step: TrainStep, workload: Workload) -> str:
    encoder = tokenizer(workload.tokenizer)
    with (
        uncompiled(step.plan),
        step.shared.whole(),
        step.autocast(),
        step.adapter.evaluating(step.model),
    ):
        ids = sample(
            step.shared.whole_model(step.model),
            [encoder.end_of_text],
            shape=workload.decoder,
            count=SAMPLE_TOKENS,
            temperature=0.8,
            seed=workload.seed,
            known=encoder.vocab,
        )
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
        "epoch": trainer.epoch,
        "checkpoint": newest_checkpoint(store.folder, progress.updates),
        "peak_bytes": trainer.peak_bytes,
    }


def load_model(path: Path) -> tuple[Adapter, nn.Module]:
    """Load, on the host, the model of a run directory's newest whole checkpoint, of one checkpoint, or of an exported
    folder. A checkpoint records what model it holds."""
    if (path / CONFIG_FILE).exists():
        return exported_model(path)
    loaded = load_from(path) if (path / STATE_FILE).exists() else newest_of(path)
    about = dict(loaded.identity["model"])
    if about.get("kind") == "python":
        raise UserError(
            f"{path} holds a model of a Python file ({about['factory']})",
            "its checkpoint has the weights by their names in that file, and no tokenizer: there is no text to sample "
            "and no config to export",
            "load model.safetensors into the module: safetensors.torch.load_file(...), then load_state_dict",
        )
    plan = Plan(tied=about.pop("tied head"))
    workload = Workload(
        name=path.name,
        shape=from_json(Shape, about),
        tokenizer=loaded.identity["tokenizer"]["name"],
        micro_batch=1,
        learning_rate=0.0,
        source=from_json(Source, loaded.identity.get("source", {})),
    )
    adapter = adapter_of(workload)
    model, tensors = adapter.build(plan, torch.device("cpu")), loaded.tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"][: parameter.size(0)])  # without the padding rows of the vocabulary
    return adapter, model.eval()


def exported_model(folder: Path) -> tuple[Adapter, nn.Module]:
    """Load a Hugging Face folder with its own config and weights."""
    workload = resolve_workload(str(folder))
    adapter = adapter_of(workload)
    model = adapter.build(Plan(tied=workload.shape.tied), torch.device("cpu"))
    load_weights(adapter, model, folder)
    return adapter, model


def newest_of(run: Path) -> Loaded:
    inside = run / CHECKPOINTS_FOLDER
    loaded, notes = latest_checkpoint(inside if inside.is_dir() else run)
    if loaded is None:
        raise UserError(
            f"{run} holds no whole checkpoint",
            "; ".join(notes) or "nothing was saved there",
            "give a run directory of `redline train`, or one of its checkpoints/step-... folders",
        )
    return loaded
