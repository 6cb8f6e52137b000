"""What sharing a step costs where nobody is there to share with, and what one GPU holds of large models.

    python benchmarks/ranks.py --json FILE              # GPT-2: one process, and one rank of DDP and of FSDP2
    python benchmarks/ranks.py --large --json FILE      # GPT-2 XL and a 7B shape: one rank of FSDP2, with what fits

All five ways live in one process and take turns of ten steps, so that the card's temperature is the same for each; a
turn ends as a cycle of the trainer does, with the mean of its losses over the ranks. The ratio is the median over
rounds of a way's turn to the plain process's turn of the same round. *one rank* is what `redline train` builds under
`torchrun --nproc-per-node 1`: the rung's wrapper is left out, with whatever it would undo. *wrapped* is torch's own DDP
and FSDP2 around one rank, whose collectives (NCCL on a GPU, gloo on a CPU) end where they begin.

--large takes FSDP2's way in, wrapped: built without memory, compiled block by block (all of GPT-2 XL as one graph takes
Inductor minutes). Each model is a process of its own, with the first recipe of LARGE_RECIPES that is predicted to hold
8,192 tokens; one that runs out of memory all the same is a row, and the next recipe is tried.

The record is written after every round and every row: whatever ends the benchmark, what was finished is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.values import to_json
from redline.core.workload import Workload
from redline.engine.build import build_step
from redline.engine.clock import Clock
from redline.engine.distributed import Ranks, alone
from redline.engine.memory import is_out_of_memory, peak_bytes, reset_peak
from redline.engine.probe import probe
from redline.engine.step import TrainStep
from redline.predict.efficiency import efficiency
from redline.predict.fitting import Case
from redline.predict.flops import parameters
from redline.predict.parallel import Layout as Cut
from redline.rungs import plan_of
from redline.rungs.ladder import for_layout
from redline.search.launch import probe_machine
from redline.workloads import resolve_shape, resolve_workload

STEPS = 10  # of a turn; a cycle of the trainer has as many
WARM_UPS, LARGE_STEPS = 3, 8
PLAIN = "plain"
LESS_THAN = 0.01  # what one rank may cost more than one process
SHARED = ("tf32", "no-sync", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw")
SHARED += ("fused-loss", "bf16-residual", "sigmoid-gelu")
FAST = (*SHARED, "fused-backward")
SHAPES = Path(__file__).resolve().parent.parent / "records" / "shapes"
LARGE = ("gpt2-xl", "gpt-7b")
LARGE_TOKENS = 8_192  # of a step: enough that every matmul is large
LARGE_RECIPES = (SHARED, (*SHARED, "checkpointing"))
ROOM = 0.92  # of the card, for what is predicted: the rest is for what fragments more than usual
ROW = "row: "  # before what a child has found, among whatever else is printed there


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a small test on a CPU replaces."""

    workload: Workload
    micro_batch: int
    rungs: tuple[str, ...] = FAST
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    rounds: int = 6

    def batch(self) -> torch.Tensor:
        shape = self.workload.decoder
        return torch.randint(shape.vocab, (2, self.micro_batch, shape.sequence), device=self.device)


# --- one rank beside one process --------------------------------------------------------------------------------------


def ways(rungs: Sequence[str]) -> dict[str, Plan]:
    """By name, in the order in which they take turns."""
    alone_with = {way: plan_of(for_layout((*rungs, way), Layout())) for way in ("ddp", "fsdp")}
    return {
        PLAIN: plan_of(rungs),
        **{f"{way}, one rank": plan for way, plan in alone_with.items()},
        **{f"{way}, wrapped": plan_of((*rungs, way)) for way in ("ddp", "fsdp")},
    }


@contextmanager
def one_rank(device: torch.device) -> Iterator[Ranks]:
    """A job of one, with collectives. `join` would do it too, and end this process together with its parent."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    try:
        with Ranks(rank=0, count=1, store=store) as ranks:
            ranks.connect(device.type)
            yield ranks
    finally:
        if dist.is_initialized():  # after an interrupt: nobody waits for this one
            dist.destroy_process_group()


@dataclass
class Taken:
    """What a way has taken so far."""

    build_seconds: float
    """With the first turn, which compiles."""
    steps: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)


def compare(setting: Setting, ranks: Ranks, keep: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    """`keep` gets the rows after every round."""
    batch, rows = setting.batch(), dict[str, dict[str, Any]]()
    steps: dict[str, tuple[TrainStep, Ranks]] = {}
    taken: dict[str, Taken] = {}
    for name, plan in ways(setting.rungs).items():
        members = alone() if name == PLAIN else ranks
        started = time.perf_counter()
        try:
            step = build_step(setting.workload, plan, device=setting.device, ranks=members)
            take_turn(step, batch, members)
        except Exception as error:  # one that cannot be built is a row, and the others go on
            rows[name] = failed(name, error)
            say(f"{name}: {rows[name]['failed']}")
            continue
        steps[name], taken[name] = (step, members), Taken(build_seconds=time.perf_counter() - started)
        say(f"{name}: built and compiled in {taken[name].build_seconds:.1f} s")
    tokens = setting.micro_batch * setting.workload.decoder.sequence
    for number in range(setting.rounds):
        order = list(steps) if number % 2 == 0 else list(reversed(steps))  # who comes first is not always the same
        for name in order:
            step, members = steps[name]
            times = take_turn(step, batch, members)
            taken[name].steps += times[:STEPS]
            taken[name].turns.append(sum(times))
        rows |= {name: figures(name, one, taken.get(PLAIN), tokens) for name, one in taken.items()}
        keep([rows[name] for name in ways(setting.rungs) if name in rows])
    return [rows[name] for name in ways(setting.rungs) if name in rows]


def take_turn(step: TrainStep, batch: torch.Tensor, ranks: Ranks) -> list[float]:
    """Seconds of each step, and of the end of the cycle."""
    clock, losses = Clock(step.device), []
    clock.mark()
    for number in range(STEPS):
        ranks.mark(number, "in the step")
        losses.append(step(batch))
        clock.mark()
    ranks.mean(torch.stack(losses)).tolist()
    ranks.gather({"stop": False})
    clock.mark()
    return clock.seconds()


def figures(name: str, taken: Taken, plain: Taken | None, tokens: int) -> dict[str, Any]:
    ordered = sorted(taken.steps)
    tenth = len(ordered) // 10
    median = statistics.median(ordered)
    ratios = [] if plain is None else [a / b for a, b in zip(taken.turns, plain.turns, strict=False)]
    return {
        "way": name,
        "rounds": len(taken.turns),
        "step_seconds": {"median": median, "p10": ordered[tenth], "p90": ordered[-1 - tenth], "n": len(ordered)},
        "tokens_per_second": tokens / median,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_least": min(ratios, default=None),
        "ratio_most": max(ratios, default=None),
        "build_seconds": taken.build_seconds,
        "failed": None,
    }


def failed(name: str, error: BaseException) -> dict[str, Any]:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return {"way": name, "failed": f"{type(error).__name__}: {text}"[:300]}


def line_of(row: dict[str, Any]) -> str:
    if row["failed"] is not None:
        return f"{row['way']:16} failed: {row['failed'][:80]}"
    step = row["step_seconds"]
    times = "  ".join(f"{name} {1e3 * step[name]:8.3f}" for name in ("median", "p10", "p90"))
    ratio = "—" if row["ratio"] is None else f"{row['ratio']:.4f}"
    return f"{row['way']:16} {times} ms  {row['tokens_per_second']:10,.0f} tok/s  x{ratio} of plain"


def verdict(rows: Sequence[dict[str, Any]]) -> bool | None:
    """Whether one rank of each way costs less than it may; None where that was not measured."""
    ratios = [row.get("ratio") for row in rows if row["way"].endswith("one rank")]
    if len(ratios) < 2 or None in ratios:
        return None
    return all(ratio < 1 + LESS_THAN for ratio in ratios)


# --- large models -----------------------------------------------------------------------------------------------------


def large_workload(name: str) -> Workload:
    """A shape of records/shapes in the whole of its context, or a preset."""
    own = SHAPES / f"{name}.json"
    if not own.exists():
        return resolve_workload(name)
    return resolve_workload(str(own), sequence=resolve_shape(str(own)).shape.sequence)


def large_case(workload: Workload, rungs: Sequence[str]) -> Case:
    """FSDP around one GPU, as predict/ has it."""
    return Case(shape=workload.decoder, plan=plan_of((*rungs, "fsdp")), layout=Cut(gpus=1), zero=3)


def choose_recipes(workload: Workload, memory_bytes: int) -> list[tuple[tuple[str, ...], int]]:
    """Those that are predicted to hold enough tokens, each with its micro batch; where none is, the most frugal one
    with what it holds."""
    wanted = max(1, LARGE_TOKENS // workload.decoder.sequence)
    largest = {rungs: large_case(workload, rungs).largest(int(ROOM * memory_bytes)) for rungs in LARGE_RECIPES}
    enough = [(rungs, wanted) for rungs, size in largest.items() if size >= wanted]
    last = LARGE_RECIPES[-1]
    return enough or [(last, largest[last])] * (largest[last] > 0)


def time_large(setting: Setting, hardware: Hardware, ranks: Ranks, steps: int = LARGE_STEPS) -> dict[str, Any]:
    """In the child."""
    device, workload = setting.device, setting.workload
    plan = plan_of((*setting.rungs, "fsdp"))
    started = time.perf_counter()
    step = build_step(workload, plan, device=device, ranks=ranks)
    built = time.perf_counter() - started
    batch, clock = setting.batch(), Clock(device)
    losses = [step(batch).item() for _ in range(WARM_UPS)]
    compiled = time.perf_counter() - started - built
    reset_peak(device)
    clock.mark()
    for _ in range(steps):
        losses.append(step(batch).item())
        clock.mark()
    ordered = sorted(clock.seconds())
    median = statistics.median(ordered)
    rate = setting.micro_batch * workload.decoder.sequence / median
    share = efficiency(workload.decoder, plan, hardware, rate)
    return {
        "step_seconds": {"median": median, "p10": ordered[0], "p90": ordered[-1], "n": len(ordered)},
        "tokens_per_second": rate,
        "mfu": share.mfu,
        "hfu": share.hfu,
        "convention": share.convention,
        "peak_bytes": peak_bytes(device),
        "build_seconds": built,
        "first_steps_seconds": compiled,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def describe(name: str, workload: Workload, rungs: tuple[str, ...], micro_batch: int) -> dict[str, Any]:
    memory = large_case(workload, rungs).memory(micro_batch)
    return {
        "model": name,
        "parameters": parameters(workload.decoder).total,
        "shape": to_json(workload.decoder),
        "rungs": [*rungs, "fsdp"],
        "micro_batch": micro_batch,
        "sequence": workload.decoder.sequence,
        "predicted_bytes": memory.allocated,
        "predicted_total_bytes": memory.total,
        "moment": memory.moment,
    }


def child(name: str, rungs: str, micro_batch: int, device: str) -> int:
    """One model with one recipe: prints a row."""
    setting = Setting(
        workload=large_workload(name),
        micro_batch=micro_batch,
        rungs=tuple(rungs.split(",")),
        device=torch.device(device),
    )
    with one_rank(setting.device) as ranks:
        try:
            row = {**time_large(setting, probe(device), ranks), "failed": None}
        except Exception as error:
            kind = "out of memory" if is_out_of_memory(error) else None
            row = {"failed": kind or failed(name, error)["failed"], "peak_bytes": peak_bytes(setting.device)}
    print(ROW + json.dumps(row), flush=True)
    return 0


def run_large(
    names: Sequence[str], hardware: Hardware, keep: Callable[[list[dict[str, Any]]], object], timeout_seconds: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in names:
        workload = large_workload(name)
        assert hardware.memory_bytes is not None
        for rungs, micro_batch in choose_recipes(workload, hardware.memory_bytes):
            words = [name, ",".join(rungs), str(micro_batch), hardware.kind]
            row = {**describe(name, workload, rungs, micro_batch), **ask_child(words, timeout_seconds)}
            rows.append(row)
            keep(rows)
            say(large_line(row))
            if row["failed"] is None:
                break
    return rows


def ask_child(words: list[str], timeout_seconds: float) -> dict[str, Any]:
    """Its row. A process of its own: nothing is left on the card of one that ran out of memory."""
    command = [sys.executable, __file__, "--child", *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"nothing within {timeout_seconds:g} s"}
    told = [line.removeprefix(ROW) for line in done.stdout.splitlines() if line.startswith(ROW)]
    return json.loads(told[-1]) if told else {"failed": f"exit code {done.returncode}"}


def large_line(row: dict[str, Any]) -> str:
    what = f"{row['model']:8} B={row['micro_batch']:<3} {row['rungs'][-2]:16}"
    if row["failed"] is not None:
        return f"{what} failed: {row['failed'][:60]}"
    mfu = "—" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peak, off = row["peak_bytes"], "—"
    if peak is not None:
        off = f"{peak / 2**30:.1f} GiB, predicted {row['predicted_bytes'] / peak - 1:+.1%}"
    return f"{what} {row['tokens_per_second']:9,.0f} tok/s  MFU {mfu}  peak {off}"


# --- the record -------------------------------------------------------------------------------------------------------


Machine = tuple[Hardware, dict[str, str | None]]  # with the versions of what runs on it


def record_of(what: str, machine: Machine, rows: list[dict[str, Any]], *, finished: bool) -> dict[str, Any]:
    record = {
        "what": what,
        "command": shlex.join(["python", "benchmarks/ranks.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": to_json(machine[0]),
        "versions": machine[1],
        "finished": finished,
        "rows": rows,
    }
    if rows and "way" in rows[0]:
        record |= {"limit": LESS_THAN, "within_limit": verdict(rows)}
    return record


def write_record(path: str, record: dict[str, Any]) -> None:
    """In one move: a file that is read meanwhile is whole."""
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="of ten steps for each way (default 6)")
    parser.add_argument("--large", nargs="*", metavar="MODEL", help="large models instead: gpt2-xl, gpt-7b, or these")
    parser.add_argument("--timeout", type=float, default=110.0, help="seconds for one large model (default 110)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the record; a FILE grows with the rows")
    parser.add_argument("--child", nargs=4, metavar=("MODEL", "RUNGS", "MICRO_BATCH", "DEVICE"), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def measure(options: argparse.Namespace, machine: Machine, setting: Setting | None = None) -> dict[str, Any]:
    """The record, whatever ends it. `setting`: of the comparison, where it is not GPT-2 on a GPU."""
    what = "one rank of DDP and FSDP2 beside one process" if options.large is None else "large models, one rank of FSDP"
    rows: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]], finished: bool = False) -> dict[str, Any]:
        rows[:] = found
        record = record_of(what, machine, rows, finished=finished)
        if options.json not in (None, "-"):
            write_record(options.json, record)
        return record

    try:
        if options.large is not None:
            run_large(options.large or LARGE, machine[0], keep, options.timeout)
        else:
            workload = resolve_workload("gpt2")
            setting = setting or Setting(workload=workload, micro_batch=options.micro_batch, rounds=options.rounds)
            with one_rank(setting.device) as ranks:
                compare(setting, ranks, keep)
    except KeyboardInterrupt:
        say("interrupted: what was finished is in the record")
        return keep(list(rows))
    return keep(list(rows), finished=True)


def main() -> int:
    options = parse()
    if options.child is not None:
        name, rungs, micro_batch, device = options.child
        return child(name, rungs, int(micro_batch), device)
    if not torch.cuda.is_available():
        say("there is no CUDA device here")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps what was finished too
    # Asked by another process: the parent of large models must hold nothing on the card.
    record = measure(options, probe_machine("cuda"))
    for row in record["rows"]:
        say(line_of(row) if "way" in row else large_line(row))
    if options.json == "-":
        print(json.dumps(record, indent=1))
    return int(not record["finished"])


if __name__ == "__main__":
    sys.exit(main())
