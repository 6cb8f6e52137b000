"""A redline recipe against transformers' defaults, each at its best micro batch, in one run on one machine.

    python benchmarks/huggingface.py records/shapes/llama-160m.json --recipe runs/.../best.json --micro-batches 16,32,64

Theirs is what a careful user of transformers runs: bf16 autocast, SDPA, torch.compile(model), fused AdamW and clipping
as Trainer has them by default, labels passed so that the model computes its own loss. Ours is the step that `redline
train` runs with the recipe. Both have fp32 weights, no dropout, the same tokens and the same initial weights. Each side
has its own process at each micro batch. All of them compile side by side, take one step and return what memory they
can; after that only one of them steps at a time. First every micro batch is measured once, the sides in turns, and the
process of a size that has lost ends. A side whose best size is the largest continues with twice that, and one whose
best is the smallest with half, until its best lies between a smaller and a larger size that are slower or do not fit
(--fixed: only the sizes named). A size that finds no room beside resting processes is measured again after they have
ended; they start again when they are needed. Then follow rounds of both sides at their best, each going first in every
other round. The ratio is the median over the rounds of our rate over theirs in the same round. Losses show that both
sides learn and are not to be compared: theirs trains with the learning rate of TrainingArguments, 5e-5, and ours with
the workload's own, which warms up; sides at different micro batches read different batches, and transformers leaves the
last token of each sequence out of its loss.

Every measurement is written to --out at once, so that an interrupted run keeps its rounds; a run that is finished there
is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from redline.core.host import core_count, timestamp
from redline.core.job import Job, RunDirectory, write_atomically
from redline.core.recipe import Recipe, load_recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.data.batches import TokenBatches, stream_batches
from redline.data.tokens import prepare_tokens
from redline.engine import memory
from redline.engine.build import build
from redline.engine.clock import Clock
from redline.engine.fit import free_memory
from redline.predict.flops import parameters
from redline.rungs import plan_of, usual_rungs
from redline.search.launch import probe_machine, worker_environment
from redline.workloads import resolve_workload

THEIRS, OURS = SIDES = ("transformers", "redline")
WARM_SECONDS, WARM_STEPS = {"cuda": 2.0, "cpu": 0.2}, 5  # the seconds apply before the first timing only
TRAINER = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # TrainingArguments' defaults
CLIP_NORM = 1.0  # TrainingArguments' max_grad_norm
TOKENS_FILE = "tokens.npy"
OUT_OF_MEMORY = "out of memory"
CORES_EACH = 4  # for a process that compiles: itself, and the compilers it starts
END_SECONDS = 20.0  # for a process to end by itself
UNKNOWN = dict.fromkeys(("tokens_per_second", "step_seconds", "peak_bytes", "loss_first", "loss_last"))


@dataclass(frozen=True, kw_only=True)
class Order:
    """One side at one micro batch: what a child process reads."""

    side: str
    workload: Workload
    recipe: Recipe
    """For theirs only the micro batch and the number of loader workers count."""
    device: str
    steps: int
    compiled: bool
    """True to compile theirs; ours compiles if the recipe says so."""

    @property
    def name(self) -> str:
        return f"{self.side}-{self.recipe.micro_batch}"


class Contestant(Protocol):
    order: Order

    def prepare(self) -> str | None:
        """Build, compile and take a step, unless done already. Return the reason for a failure: others may hold the
        memory just now."""

    def measure(self) -> dict[str, Any]:
        """Measure while all others rest."""

    def close(self) -> None: ...


Enter = Callable[[Order, Path], Contestant]


def main(words: list[str] | None = None, enter: Enter | None = None) -> int:
    options = read_options(words)
    if options.child is not None:
        return be_child(options.child)
    if options.out is not None and is_finished(options.out):
        print(f"{options.out} is finished: kept", file=sys.stderr)
        print(options.out.read_text(encoding="utf-8"), end="")
        return 0
    hardware, versions = probe_machine(options.device)
    workload = resolve_workload(options.workload, sequence=options.sequence)
    recipe = load_recipe(options.recipe) if options.recipe else None
    rungs = recipe.rungs if recipe else usual_rungs(workload, hardware)
    sizes = {THEIRS: numbers(options.micro_batches), OURS: numbers(options.ours or options.micro_batches)}
    if recipe is not None and options.ours is None:
        sizes[OURS] = [recipe.micro_batch]

    def order(side: str, size: int) -> Order:
        return Order(
            side=side,
            workload=workload,
            recipe=Recipe(rungs=rungs, micro_batch=size),
            device=hardware.kind,
            steps=options.steps,
            compiled=not options.eager,
        )

    orders = {side: [order(side, size) for size in sizes[side]] for side in SIDES}
    record = {
        "what": "a redline recipe beside transformers' defaults",
        "how": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "command": shlex.join(["python", *sys.argv]),
        "date": timestamp(),
        "hardware": to_json(hardware),
        "versions": versions,
        "workload": workload.name,
        "config": workload.source.config,
        "parameters": parameters(workload.decoder).total,
        "sequence": workload.decoder.sequence,
        "rungs": list(rungs),
        "compiled": {THEIRS: not options.eager, OURS: plan_of(rungs).compile},
    }

    def keep(result: dict[str, Any], *, finished: bool) -> None:
        record.update(result, finished=finished)
        if options.out is not None:
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        prepare_tokens(workload, Path(folder) / TOKENS_FILE)
        contest = Contest(
            orders, lambda order: (enter or Child)(order, Path(folder)), lambda now: keep(now, finished=False)
        )
        keep(contest.run(options.rounds, options.at_once, grow=not options.fixed), finished=True)
    print(json.dumps(record, indent=1))
    return 0 if record["ratio"] is not None else 1


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="a Hugging Face config, model folder or cached name")
    parser.add_argument("--recipe", type=Path, help="best.json of a ladder or a tune (default: all rungs that apply)")
    parser.add_argument("--micro-batches", default="8,16,32", help="theirs, to choose from (default: 8,16,32)")
    parser.add_argument("--ours", help="ours, to choose from (default: the recipe's; without a recipe, as theirs)")
    parser.add_argument("--fixed", action="store_true", help="no other micro batches than those")
    parser.add_argument("--sequence", type=int, help="tokens per sequence (default: the config's, 1024 at most)")
    parser.add_argument("--rounds", type=int, default=5, help="of both at their best, interleaved (default: 5)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per measurement (default: 30)")
    parser.add_argument("--at-once", type=int, default=max(1, core_count() // CORES_EACH), help="to compile")
    parser.add_argument(
        "--out", type=Path, help="where the record grows; standard output has it at the end in any case"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true", help="theirs without torch.compile: to try this script quickly")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child is None and options.workload is None:
        parser.error("which model? a config.json, a folder, or a name in the local cache")
    return options


def numbers(text: str) -> list[int]:
    return sorted({int(size) for size in text.split(",")})


def is_finished(path: Path) -> bool:
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["finished"])


# the comparison


class Contest:
    def __init__(
        self,
        orders: dict[str, list[Order]],
        enter: Callable[[Order], Contestant],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.orders, self.enter, self.keep = orders, enter, keep
        self.open: dict[str, Contestant] = {}
        self.best: dict[str, Order] = {}
        self.sides: dict[str, Any] = {
            side: {"micro_batch": None, **UNKNOWN, "bracketed": False, "sizes": [], "rounds": []} for side in SIDES
        }

    def run(self, rounds: int, at_once: int, *, grow: bool = False) -> dict[str, Any]:
        """Find each side's best size and race them. A process ends once it is not needed, to free its memory."""
        try:
            waiting = {side: list(self.orders[side]) for side in SIDES}
            while any(waiting.values()):
                self._prepare([order for side in SIDES for order in waiting[side]], at_once)
                self._choose(waiting)
                waiting = {side: list(self._beyond(side)) if grow else [] for side in SIDES}
            if len(self.best) == len(SIDES):
                self._race(rounds)
            return self._result()
        finally:
            self._close()

    def _beyond(self, side: str) -> Iterator[Order]:
        size, like = next_size(self.sides[side]["sizes"]), self.orders[side][0]
        if size is not None:
            yield replace(like, recipe=replace(like.recipe, micro_batch=size))

    def _prepare(self, orders: list[Order], at_once: int) -> None:
        """Prepare all of them, then those that found no room again, fewer at once. `_measured` handles what fits alone
        only."""
        for order in orders:
            self.open[order.name] = self.enter(order)
        short = self._side_by_side([self.open[order.name] for order in orders], at_once)
        self._side_by_side(short, max(1, at_once // 2))

    def _side_by_side(self, contestants: list[Contestant], at_once: int) -> list[Contestant]:
        """Prepare contestants side by side; return those that are not ready."""
        with ThreadPoolExecutor(at_once) as threads:
            try:
                reasons = list(threads.map(lambda one: one.prepare(), contestants))
                return [one for one, reason in zip(contestants, reasons, strict=True) if reason is not None]
            except BaseException:  # an interrupt: the threads wait for processes that compile
                threads.shutdown(wait=False, cancel_futures=True)
                self._close()
                raise

    def _close(self, but: str | None = None) -> None:
        for name in [name for name in self.open if name != but]:
            self.open.pop(name).close()

    def _measured(self, order: Order) -> dict[str, Any]:
        """Measure an order, alone on the device if it has no room beside resting processes, which hold weights and
        optimizer state. A process that was ended for another starts again here; its compiled code is in the cache."""
        if order.name not in self.open:
            self._prepare([order], 1)
        one = self.open[order.name]
        found = one.measure()
        if found["reason"] == OUT_OF_MEMORY and len(self.open) > 1:
            self._close(but=order.name)
            found = one.measure()
        return found

    def _choose(self, waiting: dict[str, list[Order]]) -> None:
        """Find each side's fastest size, smallest sizes first; a side where nothing fits has none."""
        while any(waiting.values()):
            for side in SIDES:
                if waiting[side]:
                    self._look(side, waiting[side].pop(0))

    def _look(self, side: str, challenger: Order) -> None:
        found, own = self._measured(challenger), self.sides[side]
        own["sizes"].append(found)
        own["bracketed"] = is_bracketed(own["sizes"])
        loser: Order | None = challenger
        if (found["tokens_per_second"] or 0.0) > (own["tokens_per_second"] or 0.0):
            loser, self.best[side] = self.best.get(side), challenger
            own.update(found)
        if loser is not None and loser.name in self.open:
            self.open.pop(loser.name).close()
        self.keep(self._result())

    def _race(self, rounds: int) -> None:
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                self.sides[side]["rounds"].append(self._measured(self.best[side]))
            self.keep(self._result())

    def _result(self) -> dict[str, Any]:
        return {**ratios_of(self.sides), "sides": self.sides}


def next_size(measured: list[dict[str, Any]]) -> int | None:
    """Return the size to try next, so that a side's best lies between two that are slower or do not fit. None if it
    does, or if the missing size was tried and failed."""
    missing = missing_size(measured)
    return None if missing in {each["micro_batch"] for each in measured} else missing


def missing_size(measured: list[dict[str, Any]]) -> int | None:
    """Return the size that is missing around the best one, if any. Sizes that failed for another reason than memory are
    ignored, and half of one sequence is never tried."""
    said = [each for each in measured if each["reason"] in (None, OUT_OF_MEMORY)]
    if not said:
        return None
    rates = {each["micro_batch"]: each["tokens_per_second"] for each in said}
    known = {size: rate for size, rate in rates.items() if rate is not None}
    best = max(known, key=lambda size: known[size], default=0)  # 0: nothing fits, so only smaller sizes can
    if best == max(rates):
        return 2 * best
    smallest = min(rates)
    return smallest // 2 if best in (0, smallest) and smallest > 1 else None


def is_bracketed(measured: list[dict[str, Any]]) -> bool:
    return any(each["reason"] is None for each in measured) and missing_size(measured) is None


def ratios_of(sides: dict[str, Any]) -> dict[str, Any]:
    """Return each round's ratio and their median, and set each side's rate to the median of its rounds. If a round
    failed, all of them stay unknown."""
    rates = {side: [one["tokens_per_second"] for one in sides[side]["rounds"]] for side in SIDES}
    if not rates[OURS] or None in rates[OURS] + rates[THEIRS]:
        return {"ratio": None, "ratios": []}
    for side in SIDES:
        sides[side]["tokens_per_second"] = statistics.median(rates[side])
        sides[side]["step_seconds"] = statistics.median(one["step_seconds"] for one in sides[side]["rounds"])
        sides[side].update({name: sides[side]["rounds"][-1][name] for name in ("peak_bytes", "loss_last")})
    ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


class Child:
    """A contestant in its own process, with its own compile cache. The process obeys its standard input and leaves when
    that closes."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.order, self.folder = order, folder
        self.process: subprocess.Popen[str] | None = None

    def prepare(self) -> str | None:
        if self.process is None:
            self._start()
        else:
            self._say("prepare")
        reason: str | None = self._answer()["reason"]
        self._tell(f"prepared, {reason or 'with a step'}")
        return reason

    def _start(self) -> None:
        path = self.folder / f"{self.order.name}.json"
        path.write_text(json.dumps(to_json(self.order)))
        job = Job(workload=self.order.workload, recipe=self.order.recipe, device=self.order.device, tokens=TOKENS_FILE)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(path)],
            env=worker_environment(RunDirectory(self.folder), job, self.order.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through the parent
        )

    def measure(self) -> dict[str, Any]:
        self._say("measure")
        found = self._answer()
        self._tell(found["reason"] or f"{found['tokens_per_second']:,.0f} tokens/s")
        return found

    def _say(self, order: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says how
            self.process.stdin.write(f"{order}\n")
            self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return failed(self.order, f"exit code {self.process.wait()}")

    def _tell(self, words: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.order.name}: {words}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def failed(order: Order, reason: str) -> dict[str, Any]:
    return {"micro_batch": order.recipe.micro_batch, **UNKNOWN, "reason": reason}


# one contestant


def be_child(path: Path) -> int:
    """Send answers to the real standard output, everything else to standard error. When the parent is gone, standard
    input closes, which ends this process whatever it is doing."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=listen, args=(sys.stdin, orders), daemon=True).start()
    contestant = Here(from_json(Order, json.loads(path.read_text())), path.parent)
    orders.put("prepare")
    while order := orders.get().strip():
        answer = {"reason": contestant.prepare()} if order == "prepare" else contestant.measure()
        answers.write(json.dumps(answer) + "\n")
    return 0


def listen(stream: IO[str], orders: queue.Queue[str]) -> None:
    for line in stream:
        orders.put(line)
    os._exit(0)


Step = Callable[[torch.Tensor], torch.Tensor]


class Here:
    """A contestant in this process."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.order, self.tokens, self.device = order, folder / TOKENS_FILE, torch.device(order.device)
        self.made: tuple[Step, Iterator[torch.Tensor]] | None = None
        self.first: float | None = None
        self.warm = False

    def prepare(self) -> str | None:
        return self._unless_full(self._first_step)

    def measure(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        reason = self._unless_full(lambda: found.update(self._timed()))
        return failed(self.order, reason) if reason else found

    def _unless_full(self, work: Callable[[], None]) -> str | None:
        """Do the work, and say if memory ran out. Afterwards only weights and optimizer state are held."""
        try:
            work()
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            return OUT_OF_MEMORY
        finally:
            free_memory(self.device)
        return None

    def _first_step(self) -> None:
        if self.made is None:
            self.made = (their_step if self.order.side == THEIRS else our_step)(self.order, self.tokens, self.device)
        if self.first is None:
            step, batches = self.made
            self.first = step(next(batches)).item()

    def _timed(self) -> dict[str, Any]:
        """Warm up, then time steps; the host waits for the device only before and after these."""
        self._first_step()  # if there was no room for it before
        assert self.made is not None
        (step, batches), order = self.made, self.order
        started, steps = time.perf_counter(), 0
        least_seconds = 0.0 if self.warm else WARM_SECONDS[self.device.type]
        while steps < WARM_STEPS or time.perf_counter() - started < least_seconds:
            step(next(batches)).item()
            steps += 1
        self.warm = True
        memory.reset_peak(self.device)
        clock = Clock(self.device)
        clock.mark()
        for _ in range(order.steps):
            loss = step(next(batches))
            clock.mark()
        median = statistics.median(clock.seconds())
        recorded = order.side == OURS and plan_of(order.recipe.rungs).cuda_graphs
        return {
            "micro_batch": order.recipe.micro_batch,
            "tokens_per_second": order.recipe.micro_batch * order.workload.decoder.sequence / median,
            "step_seconds": median,
            "peak_bytes": memory.peak_bytes(self.device, recorded),
            "loss_first": self.first,
            "loss_last": loss.item(),
            "reason": None,
        }

    def close(self) -> None:
        if self.made is not None:
            self.made[1].close()  # type: ignore[attr-defined]


def our_step(order: Order, tokens: Path, device: torch.device) -> tuple[Step, Iterator[torch.Tensor]]:
    plan, size = plan_of(order.recipe.rungs), order.recipe.micro_batch
    training = build(order.workload, plan, micro_batch=size, tokens=tokens, device=device)
    return training.step, training.batches


def their_model(workload: Workload, device: torch.device) -> torch.nn.Module:
    """Build their model from our seed, so that both start from the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(workload.source.config or {})
    config = AutoConfig.for_model(settings.pop("model_type"), **settings).get_text_config()
    config.use_cache = False  # as Trainer sets it
    torch.manual_seed(workload.seed)
    with device:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
    return model.train()


def their_step(order: Order, tokens: Path, device: torch.device) -> tuple[Step, Iterator[torch.Tensor]]:
    """Return their step, with nothing of ours but the tokens, from as many loader workers as ours has."""
    model = their_model(order.workload, device)
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


if __name__ == "__main__":
    raise SystemExit(main())
