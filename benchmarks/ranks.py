"""What DDP and FSDP2 cost with a single rank, and how fast large models run on one GPU.

    python benchmarks/ranks.py --json FILE              # GPT-2: one process, and one rank of DDP and of FSDP2
    python benchmarks/ranks.py --ways plain "fsdp-whole, wrapped" --json FILE          # some of the ways
    python benchmarks/ranks.py --large --json FILE      # GPT-2 XL and a 7B shape: one rank of FSDP2, with what fits

Each way has a process that keeps its compiled step and takes turns of ten steps on request, so that the card's
temperature is the same for all; a turn ends as a cycle of the trainer does, with the mean of its losses over the ranks.
(In one process they would share compiled code: Dynamo would reuse the plain model's graph for DDP, which torch splits
where a bucket is full.) The ratio is the median over rounds of a way's turn over the plain process's turn of the same
round. *one rank* is what `redline train` builds under `torchrun --nproc-per-node 1`: the rung's wrapper is left out,
together with whatever it would undo. *wrapped* is torch's own DDP or FSDP2 around one rank, whose collectives (NCCL on
a GPU, gloo on a CPU) end where they begin. *plain, by blocks* is one process without what `fsdp` and `fsdp-keep` undo,
compiled block by block as those are: the remaining difference is FSDP2's own. `fsdp-whole` undoes nothing and is
compiled as a whole, so that all it costs beyond *plain* is FSDP2's own.

--large builds models as FSDP2 does, wrapped: without allocating them first, compiled block by block (all of GPT-2 XL as
one graph takes Inductor minutes). Each model has its own process, with the first recipe of LARGE_RECIPES that is
predicted to hold 8,192 tokens, and with as many as fit, up to 32,768 (with 8,192 GPT-2 XL reached 27 % of an H200's
peak). One that runs out of memory all the same is a row, and the next recipe is tried.

The record is written after every round and every row: however the benchmark ends, what was finished is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from made import made
from torch.distributed import TCPStore

from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.engine.build import build_step, compile_blocks
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
SETTLING = 2  # steps before a turn is timed
AT_ONCE = 3  # processes that compile: each holds the activations of a whole step, 28 GB for GPT-2 at 64
WARM_UPS, LARGE_STEPS = 3, 8
PLAIN, BY_BLOCKS = "plain", "plain, by blocks"
SHARDING = ("fsdp", "fsdp-keep", "fsdp-whole")
LESS_THAN = 0.01  # what one rank may cost beyond one process
SHARED = ("tf32", "no-sync", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw")
SHARED += ("fused-loss", "bf16-residual", "sigmoid-gelu")
FAST = (*SHARED, "fused-backward")
SHAPES = Path(__file__).resolve().parent.parent / "records" / "shapes"
LARGE = ("gpt2-xl", "gpt-7b")
LEAST_TOKENS, MOST_TOKENS = 8_192, 32_768  # of a large model's step
LARGE_RECIPES = (SHARED, (*SHARED, "checkpointing"))
ROOM = 0.92  # of the card, for predicted memory: the rest is for unusual fragmentation
ROW = "row: "  # marks a child's results among whatever else it prints


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a process builds."""

    model: str
    micro_batch: int
    rungs: tuple[str, ...] = FAST
    device: str = "cuda"
    way: str | None = None
    """One of `ways`; None: a large model."""

    @property
    def workload(self) -> Workload:
        """A shape of records/shapes with its whole context, or a preset."""
        own = SHAPES / f"{self.model}.json"
        if not own.exists():
            return resolve_workload(self.model)
        return resolve_workload(str(own), sequence=resolve_shape(str(own)).shape.sequence)

    def batch(self, device: torch.device) -> torch.Tensor:
        shape = self.workload.decoder
        return torch.randint(shape.vocab, (2, self.micro_batch, shape.sequence), device=device)


# --- one rank beside one process --------------------------------------------------------------------------------------


def ways(rungs: Sequence[str]) -> dict[str, Plan]:
    """Return the plans by name, in the order in which they take turns."""
    alone_with = {way: plan_of(for_layout((*rungs, way), Layout())) for way in ("ddp", "fsdp")}
    return {
        PLAIN: plan_of(rungs),
        BY_BLOCKS: replace(plan_of((*rungs, "fsdp")), parallel="none", compile=False),  # compiled after it is built
        **{f"{way}, one rank": plan for way, plan in alone_with.items()},
        **{f"{way}, wrapped": plan_of((*rungs, way)) for way in ("ddp", *SHARDING)},
    }


@contextmanager
def one_rank(kind: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Enter a job of one rank, with collectives. `join` would do so too, but also end this process with its parent."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    with Ranks(rank=0, count=1, store=store) as ranks:
        yield ranks, ranks.connect(kind)


@contextmanager
def no_rank(kind: str) -> Iterator[tuple[Ranks, torch.device]]:
    yield alone(), torch.device(kind)


def serve_turns(setting: Setting, orders: Iterable[str], answer: Callable[[Any], None]) -> None:
    """In the child: answer with the time to build and compile, and then take a turn for every line that arrives."""
    assert setting.way is not None
    started = time.perf_counter()
    with no_rank(setting.device) if setting.way.startswith(PLAIN) else one_rank(setting.device) as (ranks, device):
        plan = ways(setting.rungs)[setting.way]
        step, batch = build_step(setting.workload, plan, device=device, ranks=ranks), setting.batch(device)
        if setting.way == BY_BLOCKS and "compile" in setting.rungs:
            compile_blocks(step.adapter.blocks(step.model), plan)
        take_turn(step, batch, ranks)
        answer({"build_seconds": time.perf_counter() - started})
        for _ in orders:
            answer({"times": take_turn(step, batch, ranks)})


def take_turn(step: TrainStep, batch: torch.Tensor, ranks: Ranks) -> list[float]:
    """Return the seconds of each step and of the end of the cycle. Between turns the card is free for the others."""
    for _ in range(SETTLING):  # memory that was returned is allocated again
        step(batch)
    clock, losses = Clock(step.device), []
    clock.mark()
    for number in range(STEPS):
        ranks.mark(number, "in the step")
        losses.append(step(batch))
        clock.mark()
    ranks.mean(torch.stack(losses)).tolist()
    ranks.gather({"stop": False})
    clock.mark()
    seconds = clock.seconds()
    if step.device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


class Seat:
    """A child that takes turns."""

    def __init__(self, setting: Setting) -> None:
        words = [sys.executable, __file__, "--child", json.dumps(to_json(setting))]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the parent handles Ctrl-C and keeps what was finished
        )

    def answer(self) -> dict[str, Any]:
        """Return the next row; raise RuntimeError if the child is gone or reports a failure."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ROW):
                row: dict[str, Any] = json.loads(line.removeprefix(ROW))
                if row.get("failed") is not None:
                    raise RuntimeError(row["failed"])
                return row
        raise RuntimeError(f"exit code {self.process.wait()}")

    def take_turn(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        times: list[float] = self.answer()["times"]
        return times

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Taken:
    """The times of a way so far."""

    build_seconds: float
    """Including the first turn, which compiles."""
    steps: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)


Rows = list[dict[str, Any]]
Keep = Callable[[Rows], object]


def compare(
    setting: Setting,
    rounds: int,
    keep: Keep,
    seat: Callable[[Setting], Seat] = Seat,
    some: Collection[str] | None = None,
) -> Rows:
    """Time the ways in turns. `keep` gets the rows after every round. `some`: the ways that take part; None: all."""
    names = [name for name in ways(setting.rungs) if some is None or name in some]
    rows: dict[str, dict[str, Any]] = {}
    seats: dict[str, Seat] = {}
    taken: dict[str, Taken] = {}
    tokens = setting.micro_batch * setting.workload.decoder.sequence

    def in_order() -> Rows:
        return [rows[name] for name in names if name in rows]

    def drop(name: str, error: Exception) -> None:
        """Turn a failed way into a row with what it had finished; the others continue."""
        one = taken.pop(name, None)
        finished = figures(name, one, taken.get(PLAIN), tokens) if one is not None and one.turns else {"way": name}
        rows[name] = {**finished, "failed": str(error)}
        seats.pop(name).close()
        say(f"{name} failed: {error}")

    try:
        for together in (names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)):
            seats |= {name: seat(replace(setting, way=name)) for name in together}
            for name in together:
                try:
                    taken[name] = Taken(build_seconds=seats[name].answer()["build_seconds"])
                    say(f"{name}: built and compiled in {taken[name].build_seconds:.1f} s")
                except RuntimeError as error:
                    drop(name, error)
        for number in range(rounds):
            for name in list(seats) if number % 2 == 0 else list(reversed(seats)):  # no way always comes first
                try:
                    times = seats[name].take_turn()
                except (RuntimeError, OSError) as error:
                    drop(name, error)
                    continue
                taken[name].steps += times[:STEPS]
                taken[name].turns.append(sum(times))
            rows |= {name: figures(name, one, taken.get(PLAIN), tokens) for name, one in taken.items()}
            keep(in_order())
    finally:
        for one in seats.values():
            one.close()
    return in_order()


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
        "ratios": ratios,
        "slowest_step_seconds": ordered[-1],
        "build_seconds": taken.build_seconds,
        "failed": None,
    }


def first_words(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {text}"[:300]


def line_of(row: dict[str, Any]) -> str:
    if row["failed"] is not None:
        return f"{row['way']:20} failed: {row['failed'][:80]}"
    step = row["step_seconds"]
    times = "  ".join(f"{name} {1e3 * step[name]:7.2f}" for name in ("median", "p10", "p90"))
    ratio = "—" if row["ratio"] is None else f"{row['ratio']:.4f}"
    return f"{row['way']:20} {times} ms  {row['tokens_per_second']:10,.0f} tok/s  x{ratio} of plain"


def verdict(rows: Sequence[dict[str, Any]]) -> bool | None:
    """True if one rank of each way costs less than it may; None if that was not measured."""
    ratios = [row.get("ratio") for row in rows if row["way"].endswith("one rank")]
    if len(ratios) < 2 or None in ratios:
        return None
    return all(ratio < 1 + LESS_THAN for ratio in ratios)


# --- large models -----------------------------------------------------------------------------------------------------


def large_case(workload: Workload, rungs: Sequence[str]) -> Case:
    """Describe FSDP on one GPU for predict/."""
    return Case(shape=workload.decoder, plan=plan_of((*rungs, "fsdp")), layout=Cut(gpus=1), zero=3)


def choose_recipes(workload: Workload, memory_bytes: int) -> list[tuple[tuple[str, ...], int]]:
    """Return the recipes that are predicted to hold enough tokens, each with its micro batch; if there is none, the
    most frugal one with what it holds, if anything."""
    least, most = (max(1, tokens // workload.decoder.sequence) for tokens in (LEAST_TOKENS, MOST_TOKENS))
    largest = {rungs: large_case(workload, rungs).largest(int(ROOM * memory_bytes)) for rungs in LARGE_RECIPES}
    enough = [(rungs, min(size, most)) for rungs, size in largest.items() if size >= least]
    last = LARGE_RECIPES[-1]
    return enough or [(last, largest[last])] * (largest[last] > 0)


def time_large(
    setting: Setting, hardware: Hardware, ranks: Ranks, device: torch.device, steps: int = LARGE_STEPS
) -> dict[str, Any]:
    """Time a large model, in the child."""
    workload = setting.workload
    plan = plan_of((*setting.rungs, "fsdp"))
    started = time.perf_counter()
    step = build_step(workload, plan, device=device, ranks=ranks)
    built = time.perf_counter() - started
    batch, clock = setting.batch(device), Clock(device)
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
        "failed": None,
    }


def describe(setting: Setting) -> dict[str, Any]:
    workload = setting.workload
    memory = large_case(workload, setting.rungs).memory(setting.micro_batch)
    return {
        "model": setting.model,
        "parameters": parameters(workload.decoder).total,
        "shape": to_json(workload.decoder),
        "rungs": [*setting.rungs, "fsdp"],
        "micro_batch": setting.micro_batch,
        "sequence": workload.decoder.sequence,
        "predicted_bytes": memory.allocated,
        "predicted_total_bytes": memory.total,
        "moment": memory.moment,
    }


def run_large(models: Sequence[str], hardware: Hardware, keep: Keep, seat: Callable[[Setting], Seat] = Seat) -> Rows:
    """Run each model in its own process: one that ran out of memory leaves nothing on the card."""
    rows: Rows = []
    assert hardware.memory_bytes is not None
    for model in models:
        workload = Setting(model=model, micro_batch=1).workload
        for rungs, micro_batch in choose_recipes(workload, hardware.memory_bytes):
            setting = Setting(model=model, micro_batch=micro_batch, rungs=rungs, device=hardware.kind)
            child = seat(setting)
            try:
                found = child.answer()
            except RuntimeError as error:
                found = {"failed": str(error)}
            finally:
                child.close()
            rows.append({**describe(setting), **found})
            keep(rows)
            say(large_line(rows[-1]))
            if found["failed"] is None:
                break
    return rows


def child(setting: Setting) -> int:
    """Answer with rows on standard output. The child leaves when its parent's end of the pipe closes."""

    def answer(row: dict[str, Any]) -> None:
        print(ROW + json.dumps(row), flush=True)

    try:
        if setting.way is not None:
            serve_turns(setting, sys.stdin, answer)
        else:
            with one_rank(setting.device) as (ranks, device):
                answer(time_large(setting, probe(setting.device), ranks, device))
    except Exception as error:
        answer({"failed": first_words(error)})
        return 1
    return 0


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


Machine = tuple[Hardware, dict[str, str | None]]  # with the versions of its software


def record_of(what: str, machine: Machine, rows: Rows, *, finished: bool) -> dict[str, Any]:
    record = {
        "what": what,
        **made(),
        "hardware": to_json(machine[0]),
        "versions": machine[1],
        "finished": finished,
        "rows": rows,
    }
    if rows and "way" in rows[0]:
        record |= {"limit": LESS_THAN, "within_limit": verdict(rows)}
    return record


def write_record(path: str, record: dict[str, Any]) -> None:
    """Replace the file in one move, so that readers always see a whole one."""
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="of ten steps for each way (default 6)")
    parser.add_argument("--ways", nargs="+", metavar="WAY", choices=ways(FAST), help="these of the ways (default: all)")
    parser.add_argument("--large", nargs="*", metavar="MODEL", help="large models instead: gpt2-xl, gpt-7b, or these")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the record; a FILE grows with the rows")
    parser.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def measure(options: argparse.Namespace, machine: Machine, seat: Callable[[Setting], Seat] = Seat) -> dict[str, Any]:
    """Return the record, whatever ends the benchmark."""
    what = "one rank of DDP and FSDP2 beside one process" if options.large is None else "large models, one rank of FSDP"
    rows: Rows = []

    def keep(found: Rows, finished: bool = False) -> dict[str, Any]:
        rows[:] = found
        record = record_of(what, machine, rows, finished=finished)
        if options.json not in (None, "-"):
            write_record(options.json, record)
        return record

    try:
        if options.large is not None:
            run_large(options.large or LARGE, machine[0], keep, seat)
        else:
            setting = Setting(model="gpt2", micro_batch=options.micro_batch, device=machine[0].kind)
            keep(compare(setting, options.rounds, keep, seat, options.ways))
    except KeyboardInterrupt:
        say("interrupted: what was finished is in the record")
        return keep(list(rows))
    return keep(list(rows), finished=True)


def main() -> int:
    options = parse()
    if options.child is not None:
        return child(from_json(Setting, json.loads(options.child)))
    if not torch.cuda.is_available():
        say("there is no CUDA device here")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps what was finished too
    # Another process probes the card: this one, which only waits, must hold nothing on it.
    record = measure(options, probe_machine("cuda"))
    for row in record["rows"]:
        say(line_of(row) if "way" in row else large_line(row))
    if options.json == "-":
        print(json.dumps(record, indent=1))
    return int(not record["finished"])


if __name__ == "__main__":
    sys.exit(main())
