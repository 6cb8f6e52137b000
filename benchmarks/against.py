"""redline's step beside nanoGPT's and transformers', each at its best micro batch, in turns on one device.

    python benchmarks/against.py gpt2 --nanogpt ../nanoGPT --recipe best.json --json > records/DATE-DEVICE-against.json

nanoGPT is a checkout that you provide: its model.py is imported, and its train.py's loop is reproduced with the
settings read there (bf16 autocast, torch.compile, the AdamW of its configure_optimizers, clipping, its warm-up).
`nanogpt` has GPT-2's biases, like every other model here; `nanogpt-no-bias` is what its train.py trains. transformers'
GPT2LMHeadModel has bf16 autocast, SDPA, torch.compile and fused AdamW; both have the padded vocabulary, no dropout and
fp32 weights. Ours is the step of `redline train`. All read the same tokens through the same loader.

Every candidate has its own process and compile cache at every micro batch. The processes compile side by side and are
timed one at a time: a few blocks each to find every candidate's best size, then rounds in which each candidate runs a
block of steps, a different one first in every round. Between blocks a process returns its memory, and each block begins
with untimed steps. A step is forward, backward, clipping, update and zero_grad, timed by the device's own clock; the
loss is not read. A ratio is our rate over theirs in the same round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import contestants
from contestants import CANDIDATES, NANOGPT, NO_BIAS, OURS, OUT_OF_MEMORY, TOKENS_FILE, TRANSFORMERS, Order
from made import made
from politely import politely
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redline.core.errors import UserError, unknown_name
from redline.core.hardware import Hardware
from redline.core.job import Job, RunDirectory, write_atomically
from redline.core.measurement import spread_of
from redline.core.plan import Plan
from redline.core.recipe import Recipe, load_recipe
from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate, human_seconds
from redline.core.values import to_json
from redline.core.workload import Workload, check_positive, other_than_gpt2
from redline.data.tokens import prepare_tokens
from redline.predict.efficiency import efficiency
from redline.rungs import find_rung, plan_of, usual_rungs, why_not
from redline.search.ladder import check_recipe_applies
from redline.search.launch import kill_group, last_line, probe_machine, worker_environment
from redline.workloads import resolve_workload

PUBLISHED = {
    "llm.c": {
        # 524,288 tokens a step (karpathy/llm.c, discussion 481) in 140 ms, shared by 8 H100.
        "tokens_per_second": 524_288 / 0.140 / 8,
        "device": "one of 8 NVIDIA H100 that train together",
        "source": "KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc/README.md",
    }
}
LOOKS = 2  # blocks at every size, before the best is chosen
ANSWER_SECONDS = 300.0  # compiling GPT-2 XL takes two minutes
WIDTH = 100


class Player(Protocol):
    """A candidate that takes turns."""

    order: Order

    def block(self, steps: int) -> dict[str, Any]:
        """Time a block of steps; raise OutError if that fails."""

    def close(self) -> None: ...


class OutError(Exception):
    """A candidate cannot take part, or no longer; the message is the reason in its row."""


Open = Callable[[Order], tuple[Player, dict[str, Any]]]
"""Starts a player and returns it with what it reports about itself; raises OutError."""


def main(words: list[str] | None = None) -> int:
    return politely(run, read_options(words))


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2", help="a GPT-2: a preset (default: gpt2)")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT; left out without this")
    parser.add_argument("--recipe", type=Path, help="of ours (default: all usual rungs that apply here)")
    parser.add_argument("--candidates", metavar="A,B", help=f"among {', '.join(CANDIDATES)} (default: not {NO_BIAS})")
    parser.add_argument("--micro-batches", default="16,32,64", help="to choose from, for all (default: 16,32,64)")
    parser.add_argument("--at", action="append", default=[], metavar="NAME=N,N", help="those of one candidate instead")
    parser.add_argument("--rounds", type=int, default=8, help="in which all of them take turns (default: 8)")
    parser.add_argument("--block", type=int, default=10, help="timed steps in a turn (default: 10)")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="start no round after this many seconds (default: 200)"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="the record, written anew after every round")
    parser.add_argument("--at-once", type=int, default=4, help="processes that compile side by side (default: 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true", help="theirs without torch.compile: to try this script quickly")
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    workload = resolve_workload(options.workload)
    check_gpt2(workload)
    nanogpt = None if options.nanogpt is None else told_of(options.nanogpt)
    for name in ("rounds", "block", "at_once"):
        check_positive(f"--{name.replace('_', '-')}", getattr(options, name))
    names = chosen(options.candidates, options.nanogpt)
    if options.keep is not None and not options.keep.absolute().parent.is_dir():
        raise UserError(
            f"no folder for {options.keep}", "the record is written there", "make it first, or leave --keep out"
        )
    hardware, versions = probe_machine(options.device)
    recipe = load_recipe(options.recipe) if options.recipe else None
    if recipe is not None:
        check_recipe_applies(recipe, workload, hardware)
    rungs = recipe.rungs if recipe else fastest_rungs(workload, hardware)
    base = Order(
        candidate=OURS,
        workload=workload,
        rungs=rungs,
        micro_batch=workload.micro_batch,
        device=hardware.kind,
        compiled=not options.eager,
        nanogpt=None if options.nanogpt is None else str(options.nanogpt.resolve()),
    )
    found = Found(orders=orders_of(base, names, options.micro_batches, options.at))
    with tempfile.TemporaryDirectory() as folder:
        prepare_tokens(workload, Path(folder) / TOKENS_FILE)
        children: list[Child] = []

        def open_child(order: Order) -> tuple[Player, dict[str, Any]]:
            child = Child(order, Path(folder), max(1, hardware.cpu_cores // options.at_once))
            children.append(child)
            return child, child.ready()

        def record() -> dict[str, Any]:
            return {
                "what": "redline beside others that train GPT-2, interleaved on a device, each at its best micro batch",
                "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
                **made(),
                "hardware": to_json(hardware),
                "versions": versions,
                "workload": workload.name,
                "sequence": workload.decoder.sequence,
                "rungs": list(rungs),
                "nanogpt": nanogpt,
                "block_steps": options.block,
                **results(found, hardware),
                "seconds": time.monotonic() - started,
            }

        def keep() -> None:
            if options.keep is not None:
                write_atomically(options.keep, json.dumps(record(), indent=1))

        try:
            compare(found, open_child, options, keep)
        except KeyboardInterrupt:
            print("stopped; what was measured stays", file=sys.stderr)
        finally:
            for child in children:
                child.close()
    whole = record()
    show(whole, Console(file=sys.stderr if options.json else sys.stdout, width=WIDTH))
    if options.json:
        print(json.dumps(whole, indent=1))
    return 0 if whole["finished"] else 1


# candidates and sizes


def told_of(nanogpt: Path) -> dict[str, Any]:
    """Identify the nanoGPT that is measured."""
    settings = contestants.read_settings(nanogpt)
    with contestants.explaining(nanogpt / "model.py"):
        digest = hashlib.sha256((nanogpt / "model.py").read_bytes()).hexdigest()
    return {"settings": settings, "model_sha256": digest}


def check_gpt2(workload: Workload) -> None:
    shape = workload.decoder
    other = [*other_than_gpt2(shape), *(["d_ff"] if shape.d_ff != 4 * shape.d_model else [])]
    if workload.source.kind != "gpt2" or other:
        raise UserError(
            f"{workload.name} is not a GPT-2",
            f"nanoGPT builds no other; here differ: {', '.join(other) or 'whose code it is'}",
            "give a preset, such as gpt2 or gpt2-xl; benchmarks/huggingface.py compares other models",
        )


def fastest_rungs(workload: Workload, hardware: Hardware) -> tuple[str, ...]:
    """Return the usual rungs plus those that are faster on a Hopper card (docs/speed-log.md), as far as they apply."""
    rungs = usual_rungs(workload, hardware)
    for name in ("cudnn-attention", "fused-backward"):
        rung = find_rung(name)
        kept = tuple(one for one in rungs if one not in (rung.instead_of, name))
        if why_not(rung, workload, hardware, plan_of(kept)) is None:
            rungs = (*kept, name)
    return rungs


def chosen(words: str | None, nanogpt: Path | None) -> list[str]:
    names = words.split(",") if words else [NANOGPT, TRANSFORMERS, OURS] if nanogpt else [TRANSFORMERS, OURS]
    for name in names:
        if name not in CANDIDATES:
            raise unknown_name("candidate", name, CANDIDATES)
        if name in (NANOGPT, NO_BIAS) and nanogpt is None:
            raise UserError(f"{name} has no code", "redline ships none of nanoGPT", "give a checkout: --nanogpt DIR")
    if OURS not in names:
        raise UserError(f"{OURS} is not among the candidates", "the others are compared with it", f"add {OURS}")
    return names


def orders_of(base: Order, names: list[str], micro_batches: str, at: list[str]) -> list[Order]:
    """Return all orders, the largest sizes first: they take longest to get ready."""
    sizes = dict.fromkeys(names, sizes_in(micro_batches))
    for word in at:
        name, _, own = word.partition("=")
        if name not in sizes:
            raise unknown_name("candidate", name, names)
        sizes[name] = sizes_in(own)
    pairs = sorted(((size, name) for name in names for size in sizes[name]), key=lambda pair: -pair[0])
    return [replace(base, candidate=name, micro_batch=size) for size, name in pairs]


def sizes_in(words: str) -> list[int]:
    try:
        sizes = [int(word) for word in words.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(f"{words!r} is no list of micro batches", "a size counts sequences", "write 16,32,64")
    return sizes


# the comparison


@dataclass
class Found:
    """The results so far, which an interrupted comparison keeps."""

    orders: list[Order]
    ready: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each process reported about itself, by the order's name."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why an order has no figures, by its name."""
    looks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    rounds: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """Blocks by candidate; a round is added when all have taken their turn."""
    best: dict[str, Order] = field(default_factory=dict)
    finished: bool = False


def compare(
    found: Found, open_player: Open, options: argparse.Namespace, keep: Callable[[], None] = lambda: None
) -> None:
    """Look at every size, then run rounds at the best ones. `keep` is called whenever there are new results."""
    players = look_at_all(found, open_player, options)
    found.best = best_of(found)
    keep()
    playing = [player for player in players if player.order in found.best.values()]
    for player in players:
        if player not in playing:
            player.close()
    until = time.monotonic() + options.seconds
    while len(found.rounds) < options.rounds and not (found.rounds and time.monotonic() > until):
        first = len(found.rounds) % max(1, len(playing))
        blocks = {one.order.candidate: turn(found, one, options.block) for one in playing[first:] + playing[:first]}
        found.rounds.append({name: block for name, block in blocks.items() if block is not None})
        keep()
    everybody = {order.candidate for order in found.orders}
    found.finished = len(found.rounds) == options.rounds and everybody <= found.rounds[-1].keys()
    keep()


def look_at_all(found: Found, open_player: Open, options: argparse.Namespace) -> list[Player]:
    """Time a few blocks of every player, there and back, so that none benefits from a card that warms up."""
    players = open_all(found, open_player, options.at_once)
    for number in range(LOOKS):
        for player in players if number % 2 == 0 else reversed(players):
            block = turn(found, player, options.block)
            if block is not None:
                found.looks.setdefault(player.order.name, []).append(block)
    return players


def open_all(found: Found, open_player: Open, at_once: int) -> list[Player]:
    """Open players side by side. One that ran out of memory tries again alone, once the others have freed theirs."""
    players: dict[str, Player] = {}

    def start(order: Order) -> str | None:
        began = time.monotonic()
        try:
            players[order.name], found.ready[order.name] = open_player(order)
        except OutError as error:
            return str(error)
        say(f"{order.name}: ready after {time.monotonic() - began:.0f} s")
        return None

    pool = ThreadPoolExecutor(at_once)
    try:
        answers = list(pool.map(start, found.orders))
    finally:  # not `with`, which would wait for all of them after an interrupt
        pool.shutdown(wait=False, cancel_futures=True)
    for order, reason in zip(found.orders, answers, strict=True):
        again = start(order) if reason == OUT_OF_MEMORY else reason
        if again is not None:
            put_out(found, order, again)
    return [players[order.name] for order in found.orders if order.name in players]


def turn(found: Found, player: Player, steps: int) -> dict[str, Any] | None:
    """Return the player's block; None if the player is out."""
    if player.order.name in found.reasons:
        return None
    try:
        block = player.block(steps)
    except OutError as error:
        put_out(found, player.order, str(error))
        return None
    say(f"{player.order.name}: {human_rate(player.order.tokens / statistics.median(block['seconds']))} tokens/s")
    return block


def put_out(found: Found, order: Order, reason: str) -> None:
    found.reasons[order.name] = reason
    say(f"{order.name}: {reason}")


def best_of(found: Found) -> dict[str, Order]:
    """Return each candidate's fastest order, except those that were put out since."""
    best: dict[str, Order] = {}
    for order in sorted(found.orders, key=lambda one: rate_of(one, found.looks.get(one.name, [])) or 0.0):
        if order.name in found.looks and order.name not in found.reasons:
            best[order.candidate] = order
    return best


def rate_of(order: Order, blocks: list[dict[str, Any]]) -> float | None:
    seconds = [one for block in blocks for one in block["seconds"]]
    return order.tokens / statistics.median(seconds) if seconds else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# results


def results(found: Found, hardware: Hardware) -> dict[str, Any]:
    sides = {name: side_of(found, name, hardware) for name in dict.fromkeys(order.candidate for order in found.orders)}
    ours = sides[OURS]["tokens_per_second"]
    published = {
        name: {**figure, "measured_here": False, "ratio": None if ours is None else ours / figure["tokens_per_second"]}
        for name, figure in PUBLISHED.items()
        if found.orders[0].workload.name == "gpt2"
    }
    ratios = {name: ratio_to(found, name) for name in sides if name != OURS}
    return {"finished": found.finished, "sides": sides, "ratios": ratios, "published": published}


def side_of(found: Found, name: str, hardware: Hardware) -> dict[str, Any]:
    """Return a candidate's figures over all rounds; None for each if it took part in none."""
    order = found.best.get(name)
    blocks = [blocks[name] for blocks in found.rounds if name in blocks]
    seconds = [one for block in blocks for one in block["seconds"]]
    rate = None if order is None else rate_of(order, blocks)
    # The model's FLOPs are the same for every candidate; what the others execute is unknown.
    share = None if order is None or rate is None else efficiency(order.workload.decoder, Plan(), hardware, rate)
    return {
        "micro_batch": None if order is None else order.micro_batch,
        "tokens_per_second": rate,
        "step_seconds": to_json(spread_of(seconds)) if seconds else None,
        "mfu": None if share is None else share.mfu,
        "mfu_convention": None if share is None else share.convention,
        "peak_bytes": blocks[-1]["peak_bytes"] if blocks else None,
        "loss_last": blocks[-1]["loss"] if blocks else None,
        "rounds": [statistics.median(block["seconds"]) for block in blocks],
        "sizes": [size_of(found, one) for one in found.orders if one.candidate == name],
    }


def size_of(found: Found, order: Order) -> dict[str, Any]:
    ready = found.ready.get(order.name, {})
    return {
        "micro_batch": order.micro_batch,
        "tokens_per_second": rate_of(order, found.looks.get(order.name, [])),
        "ready_seconds": ready.get("ready_seconds"),
        "parameters": ready.get("parameters"),
        "loss_first": ready.get("loss_first"),
        "reason": found.reasons.get(order.name),
    }


def ratio_to(found: Found, name: str) -> dict[str, Any] | None:
    """Return the spread of our rate over theirs, taken round by round."""
    whole = [blocks for blocks in found.rounds if name in blocks and OURS in blocks]
    rates = [[rate_of(found.best[side], [blocks[side]]) or 0.0 for side in (OURS, name)] for blocks in whole]
    return to_json(spread_of([ours / theirs for ours, theirs in rates])) if rates else None


def show(record: dict[str, Any], console: Console) -> None:
    where = f"{record['workload']}, {record['hardware']['name']}, torch {record['versions']['torch']}"
    console.print(f"{where}, sequences of {record['sequence']}", markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("candidate", no_wrap=True)
    for heading in ("batch", "tok/s", "step", "p10", "p90", "MFU", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in record["sides"].items():
        table.add_row(name, *cells(side))
    console.print(table)
    for line in notes(record):
        console.print(line, markup=False, highlight=False)


def cells(side: dict[str, Any]) -> list[str]:
    step = side["step_seconds"] or dict.fromkeys(("median", "p10", "p90"))
    return [
        UNKNOWN if side["micro_batch"] is None else str(side["micro_batch"]),
        human_rate(side["tokens_per_second"]),
        *(human_seconds(step[key]) for key in ("median", "p10", "p90")),
        human_percent(side["mfu"]),
        human_bytes(side["peak_bytes"]),
    ]


def notes(record: dict[str, Any]) -> Iterator[str]:
    for name, ratio in record["ratios"].items():
        middle = UNKNOWN if ratio is None else f"{ratio['median']:.3f}"
        spread = "" if ratio is None else f" (p10 {ratio['p10']:.3f}, p90 {ratio['p90']:.3f}, {ratio['n']} rounds)"
        yield f"{OURS} / {name}: {middle}{spread}"
    for name, figure in record["published"].items():
        ratio = UNKNOWN if figure["ratio"] is None else f"{figure['ratio']:.3f}"
        where = f"as published for {figure['device']}, {human_rate(figure['tokens_per_second'])} tok/s"
        yield f"{OURS} / {name}: {ratio} ({where})"
    for name, side in record["sides"].items():
        for size in side["sizes"]:
            if size["reason"] is not None:
                yield f"{name} at {size['micro_batch']}: {size['reason']}"


# a process that takes turns


class Child:
    """The parent's end of a process: it sends a line with a number of steps and receives a line of JSON."""

    def __init__(self, order: Order, folder: Path, threads: int) -> None:
        self.order, self.log = order, folder / f"{order.name}.log"
        path = folder / f"{order.name}.json"
        path.write_text(json.dumps(to_json(order)), encoding="utf-8")
        recipe = Recipe(rungs=order.rungs, micro_batch=order.micro_batch)
        job = Job(workload=order.workload, recipe=recipe, device=order.device, tokens=TOKENS_FILE)
        environment = worker_environment(RunDirectory(folder), job, order.name)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, contestants.__file__, str(path)],
                env={**environment, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # the parent handles Ctrl-C
            )

    def ready(self) -> dict[str, Any]:
        return self._answer()

    def block(self, steps: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{steps}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise OutError(last_line(self.log)) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise OutError(f"no answer within {ANSWER_SECONDS:.0f} s")
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"reason": last_line(self.log)}
        if "reason" in answer:
            raise OutError(answer["reason"])
        return answer

    def close(self) -> None:
        if self.process.returncode is None:
            kill_group(self.process)
            assert self.process.stdout is not None
            self.process.stdout.close()


if __name__ == "__main__":
    raise SystemExit(main())
