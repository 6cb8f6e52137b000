"""A redline recipe against transformers as it comes, each at its best micro batch, in one run on one machine.

    python benchmarks/huggingface.py records/shapes/llama-160m.json --recipe runs/.../best.json --micro-batches 16,32,64

Theirs is what a careful user of transformers runs: bf16 autocast, SDPA, torch.compile(model), fused AdamW and clipping
as Trainer has them by default, labels passed so that the model computes its own loss. Ours is the step that `redline
train` runs with the recipe. Both have fp32 weights, no dropout, the same tokens, and a process of their own for each
measurement. First every micro batch once, the sides in turns; then rounds of both at their best, where each begins
every other round. The ratio is the median over the rounds of one side's rate over the other's right beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from redline.core.job import Job, RunDirectory
from redline.core.recipe import Recipe, load_recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.data.batches import TokenBatches, stream_batches
from redline.data.tokens import prepare_tokens
from redline.engine import memory
from redline.engine.build import build
from redline.engine.clock import Clock
from redline.predict.flops import parameters
from redline.rungs import plan_of, usual_rungs
from redline.search.launch import probe_machine, worker_environment
from redline.workloads import resolve_workload

THEIRS, OURS = SIDES = ("transformers", "redline")
WARM_SECONDS, WARM_STEPS = {"cuda": 3.0, "cpu": 0.2}, 5
TRAINER = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # TrainingArguments' defaults
CLIP_NORM = 1.0  # its max_grad_norm
TOKENS_FILE = "tokens.npy"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One measurement: what a child process reads."""

    side: str
    workload: Workload
    recipe: Recipe
    """Of theirs only the micro batch counts."""
    device: str
    steps: int
    compiled: bool
    """Theirs; ours compiles if the recipe says so."""


Ask = Callable[[Order, Path], dict[str, Any]]


def main(words: list[str] | None = None, ask: Ask | None = None) -> int:
    options = read_options(words)
    if options.child is not None:
        print(json.dumps(measure(from_json(Order, json.loads(options.child.read_text())), options.child.parent)))
        return 0
    hardware, versions = probe_machine(options.device)
    workload = resolve_workload(options.workload, sequence=options.sequence)
    rungs = load_recipe(options.recipe).rungs if options.recipe else usual_rungs(workload, hardware)
    sizes = [int(size) for size in options.micro_batches.split(",")]
    orders = {
        side: Order(
            side=side,
            workload=workload,
            recipe=Recipe(rungs=rungs, micro_batch=sizes[0]),
            device=hardware.kind,
            steps=options.steps,
            compiled=not options.eager,
        )
        for side in SIDES
    }
    with tempfile.TemporaryDirectory() as folder:
        prepare_tokens(workload, Path(folder) / TOKENS_FILE)
        result = compare(orders, sizes, options.rounds, lambda order: (ask or ask_child)(order, Path(folder)))
    record = {
        "what": "a redline recipe beside transformers' defaults",
        "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": to_json(hardware),
        "versions": versions,
        "workload": workload.name,
        "config": workload.source.config,
        "parameters": parameters(workload.decoder).total,
        "sequence": workload.decoder.sequence,
        "rungs": list(rungs),
        "compiled": {THEIRS: not options.eager, OURS: plan_of(rungs).compile},
        **result,
    }
    print(json.dumps(record, indent=1))
    return 0 if record["ratio"] is not None else 1


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="a Hugging Face config, model folder or cached name")
    parser.add_argument("--recipe", type=Path, help="best.json of a ladder or a tune (default: all rungs that apply)")
    parser.add_argument("--micro-batches", default="8,16,32", help="to choose from, for both (default: 8,16,32)")
    parser.add_argument("--sequence", type=int, help="tokens per sequence (default: the config's, 1024 at most)")
    parser.add_argument("--rounds", type=int, default=3, help="of both at their best, interleaved (default: 3)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per measurement (default: 30)")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true", help="theirs without torch.compile: to try this script quickly")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child is None and options.workload is None:
        parser.error("which model? a config.json, a folder, or a name in the local cache")
    return options


# the comparison


def compare(
    orders: dict[str, Order], sizes: list[int], rounds: int, ask: Callable[[Order], dict[str, Any]]
) -> dict[str, Any]:
    looks: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for size in sizes:
        for side in SIDES:
            looks[side].append(ask(sized(orders[side], size)))
    best = {side: max(looks[side], key=lambda look: look["tokens_per_second"] or 0.0) for side in SIDES}
    sides: dict[str, Any] = {side: {**best[side], "sizes": looks[side], "rounds": []} for side in SIDES}
    if any(best[side]["tokens_per_second"] is None for side in SIDES):
        return {"ratio": None, "ratios": [], "sides": sides}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            sides[side]["rounds"].append(ask(sized(orders[side], best[side]["micro_batch"])))
    return {**ratios_of(sides), "sides": sides}


def sized(order: Order, micro_batch: int) -> Order:
    return replace(order, recipe=replace(order.recipe, micro_batch=micro_batch))


def ratios_of(sides: dict[str, Any]) -> dict[str, Any]:
    """Of each round; and each side's rate as the median of its rounds. A round that failed leaves both unknown."""
    rates = {side: [one["tokens_per_second"] for one in sides[side]["rounds"]] for side in SIDES}
    if not rates[OURS] or None in rates[OURS] + rates[THEIRS]:
        return {"ratio": None, "ratios": []}
    for side in SIDES:
        sides[side]["tokens_per_second"] = statistics.median(rates[side])
        sides[side]["peak_bytes"] = sides[side]["rounds"][-1]["peak_bytes"]
    ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def ask_child(order: Order, folder: Path) -> dict[str, Any]:
    """In a process of its own, with a compile cache that only the same measurement shares."""
    started = time.monotonic()
    name = f"{order.side}-{order.recipe.micro_batch}"
    (folder / f"{name}.json").write_text(json.dumps(to_json(order)))
    job = Job(workload=order.workload, recipe=order.recipe, device=order.device, tokens=TOKENS_FILE)
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder / f"{name}.json")],
        env=worker_environment(RunDirectory(folder), job, name),
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else failed(order, f"exit code {done.returncode}")
    rate = found["reason"] or f"{found['tokens_per_second']:,.0f} tokens/s"
    print(f"{name}: {rate} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
    return found


def failed(order: Order, reason: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("tokens_per_second", "step_seconds", "peak_bytes", "loss_first", "loss_last"))
    return {"micro_batch": order.recipe.micro_batch, **nothing, "reason": reason}


# one measurement


def measure(order: Order, folder: Path) -> dict[str, Any]:
    device = torch.device(order.device)
    try:
        step, batches = (their_step if order.side == THEIRS else our_step)(order, folder / TOKENS_FILE, device)
        return timed(order, step, batches, device)
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        return failed(order, "out of memory")


Step = Callable[[torch.Tensor], torch.Tensor]


def our_step(order: Order, tokens: Path, device: torch.device) -> tuple[Step, Iterator[torch.Tensor]]:
    plan, size = plan_of(order.recipe.rungs), order.recipe.micro_batch
    training = build(order.workload, plan, micro_batch=size, tokens=tokens, device=device)
    return training.step, training.batches


def their_step(order: Order, tokens: Path, device: torch.device) -> tuple[Step, Iterator[torch.Tensor]]:
    """Nothing of ours but the tokens, from as many loader workers as ours has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(order.workload.source.config or {})
    config = AutoConfig.for_model(settings.pop("model_type"), **settings).get_text_config()
    config.use_cache = False  # as Trainer sets it
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), **TRAINER, fused=True)
    run = torch.compile(model) if order.compiled else model

    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = run(input_ids=batch[0], labels=batch[0]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    workload, workers = order.workload, plan_of(order.recipe.rungs).loader_workers
    shape, size = workload.decoder, order.recipe.micro_batch
    batches = TokenBatches(path=tokens, micro_batch=size, sequence=shape.sequence, seed=workload.seed)
    return step, stream_batches(batches, device, workers)


def timed(order: Order, step: Step, batches: Iterator[torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Compile, warm up, then the clock; the host waits for the device only before and after."""
    first, started, steps = step(next(batches)).item(), time.perf_counter(), 0
    while steps < WARM_STEPS or time.perf_counter() - started < WARM_SECONDS[device.type]:
        step(next(batches)).item()
        steps += 1
    memory.reset_peak(device)
    clock = Clock(device)
    clock.mark()
    for _ in range(order.steps):
        loss = step(next(batches))
        clock.mark()
    seconds = clock.seconds()
    batches.close()  # type: ignore[attr-defined]
    median = statistics.median(seconds)
    return {
        "micro_batch": order.recipe.micro_batch,
        "tokens_per_second": order.recipe.micro_batch * order.workload.decoder.sequence / median,
        "step_seconds": median,
        "peak_bytes": memory.peak_bytes(device),
        "loss_first": first,
        "loss_last": loss.item(),
        "reason": None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
