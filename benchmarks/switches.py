"""What the compiler's own switches bring to a recipe's step, each in a process of its own, in turns on one device.

    python benchmarks/switches.py gpt2 --recipe fast.json --micro-batch 64 --json > records/DATE-DEVICE-switches.json
    python benchmarks/switches.py gpt2 --recipe fast.json --rows early-launch,joined-kernels

The first rows are compared with the recipe: kernels that start before the previous one has ended (programmatic
dependent launch), small kernels joined into one, tile sizes found by coordinate descent. The others are about matmuls.
They leave out `tuned-matmuls` and `fused-matmuls`, whose matmuls Inductor never sees, and are compared with
`torch-matmuls`, which leaves them out too: matmuls chosen by timing; in addition, persistent kernels that load through
the tensor memory accelerator; or in addition, matmuls with K split (decompose-K) from K = 8 * M on, where Inductor
begins at 32 * M.

A switch is a setting of `torch._inductor.config`. A row's process sets it before it builds its step and has its own
compile cache: in one shared process Dynamo would reuse the first row's code for all of them. Rows compile side by side
(kernels chosen by timing may then be chosen badly: use --at-once 1) and are timed one at a time, a different one first
in every round. A ratio is a row's rate over its base's in the same round. A row that fails has its reason. This
measures speed only; the switches change rounding at most, and `redline ladder` gives verdicts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor
from against import Child, Found, Player, open_all, rate_of, turn
from contestants import OURS, TOKENS_FILE, Order
from made import made
from politely import politely
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redline.core.errors import UserError, unknown_name
from redline.core.measurement import spread_of
from redline.core.recipe import load_recipe
from redline.core.units import UNKNOWN, human_bytes, human_rate, human_seconds
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.data.tokens import prepare_tokens
from redline.rungs import plan_of
from redline.search.ladder import check_recipe_applies
from redline.search.launch import probe_machine
from redline.workloads import resolve_workload

RECIPE, TORCHS = "recipe", "torch-matmuls"
NOT_TORCHS = ("tuned-matmuls", "fused-matmuls")
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    switches: dict[str, Any] = field(default_factory=dict)
    """Settings by their names in torch._inductor.config."""
    base: str = RECIPE
    """The row that this one is compared with."""

    @property
    def leaves_out(self) -> tuple[str, ...]:
        return NOT_TORCHS if self.base == TORCHS else ()


CHOSEN = {"max_autotune_gemm": True}
ROWS = {
    RECIPE: Row(),
    "early-launch": Row(switches={"triton.enable_pdl": True}),
    "joined-kernels": Row(switches={"combo_kernels": True, "benchmark_combo_kernel": True}),
    "coordinate-descent": Row(switches={"coordinate_descent_tuning": True}),
    TORCHS: Row(base=TORCHS),
    "chosen-matmuls": Row(switches=CHOSEN, base=TORCHS),
    "tma-matmuls": Row(switches=CHOSEN | {"triton.enable_persistent_tma_matmul": True}, base=TORCHS),
    "decompose-k": Row(switches=CHOSEN | {"triton.decompose_k_threshold": 8}, base=TORCHS),
}


def main(words: list[str] | None = None) -> int:
    return politely(run, read_options(words))


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2", help="a preset or a config (default: gpt2)")
    parser.add_argument("--recipe", type=Path, required=True, help="the rungs that all rows share; it must compile")
    parser.add_argument("--micro-batch", type=int, help="sequences (default: the recipe's)")
    parser.add_argument("--rows", metavar="A,B", help=f"these and their bases, not all of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=4, help="turns of everybody (default: 4)")
    parser.add_argument("--block", type=int, default=10, help="timed steps in a turn (default: 10)")
    parser.add_argument("--at-once", type=int, default=4, help="processes that compile side by side (default: 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    started, workload = time.monotonic(), resolve_workload(options.workload)
    for name in ("rounds", "block", "at_once"):
        check_positive(f"--{name.replace('_', '-')}", getattr(options, name))
    names = chosen(options.rows)
    recipe = load_recipe(options.recipe)
    if not plan_of(recipe.rungs).compile:
        raise UserError("the recipe does not compile", "these are switches of the compiler", "add the rung compile")
    check_positive("--micro-batch", micro_batch := options.micro_batch or recipe.micro_batch)
    hardware, versions = probe_machine(options.device)
    orders = []
    for name in names:
        rungs = tuple(rung for rung in recipe.rungs if rung not in ROWS[name].leaves_out)
        check_recipe_applies(replace(recipe, rungs=rungs), workload, hardware)
        order = Order(
            candidate=OURS,
            workload=workload,
            rungs=rungs,
            micro_batch=micro_batch,
            device=hardware.kind,
            compiled=True,
            label=name,
            switches=ROWS[name].switches,
        )
        orders.append(order)
    found = Found(orders=orders)
    with tempfile.TemporaryDirectory() as folder:
        prepare_tokens(workload, Path(folder) / TOKENS_FILE)
        children: list[Child] = []

        def open_child(order: Order) -> tuple[Player, dict[str, Any]]:
            child = Child(order, Path(folder), max(1, hardware.cpu_cores // options.at_once))
            children.append(child)
            return child, child.ready()

        leave_out_unknown(found)
        try:
            take_turns(found, open_all(found, open_child, options.at_once), options)
            found.finished = True
        except KeyboardInterrupt:
            print("stopped; what was measured stays", file=sys.stderr)
        finally:
            for child in children:
                child.close()
    record = {
        "what": "the compiler's switches on a recipe's step, each in a process of its own, in turns",
        "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
        **made(),
        "hardware": to_json(hardware),
        "versions": versions,
        "workload": workload.name,
        "micro_batch": micro_batch,
        "block_steps": options.block,
        "finished": found.finished,
        "rows": results(found, orders),
        "seconds": time.monotonic() - started,
    }
    show(record, Console(file=sys.stderr if options.json else sys.stdout, width=WIDTH))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0 if found.finished else 1


def chosen(words: str | None) -> list[str]:
    """Return the rows in the order of the table, including those that they are compared with."""
    names = words.split(",") if words else list(ROWS)
    for name in names:
        if name not in ROWS:
            raise unknown_name("row", name, ROWS)
    wanted = {*names, *(ROWS[name].base for name in names)}
    return [name for name in ROWS if name in wanted]


def leave_out_unknown(found: Found) -> None:
    known = inductor.get_config_copy()
    for order in found.orders:
        lacks = [name for name in order.switches if name not in known]
        if lacks:
            found.reasons[order.name] = f"this torch has no {', '.join(lacks)}"
    found.orders = [order for order in found.orders if order.name not in found.reasons]


def take_turns(found: Found, players: list[Player], options: argparse.Namespace) -> None:
    for number in range(options.rounds):
        first = number % max(1, len(players))
        blocks = {player.order.name: turn(found, player, options.block) for player in players[first:] + players[:first]}
        found.rounds.append({name: block for name, block in blocks.items() if block is not None})


# results


def results(found: Found, orders: list[Order]) -> dict[str, Any]:
    names = {order.label: order.name for order in orders}
    return {order.label: row_of(found, order, names[ROWS[order.label].base]) for order in orders if order.label}


def row_of(found: Found, order: Order, base: str) -> dict[str, Any]:
    """Return a row's figures over all rounds; None for each if there was none."""
    blocks = [blocks[order.name] for blocks in found.rounds if order.name in blocks]
    seconds = [one for block in blocks for one in block["seconds"]]
    both = [[blocks[name] for name in (order.name, base)] for blocks in found.rounds if {order.name, base} <= {*blocks}]
    ratios = [(rate_of(order, [own]) or 0.0) / (rate_of(order, [its]) or 1.0) for own, its in both]
    return {
        "switches": order.switches,
        "rungs": list(order.rungs),
        "base": ROWS[order.label].base if order.label else None,
        "tokens_per_second": rate_of(order, blocks),
        "step_seconds": to_json(spread_of(seconds)) if seconds else None,
        "ratio": to_json(spread_of(ratios)) if ratios and order.name != base else None,
        "peak_bytes": blocks[-1]["peak_bytes"] if blocks else None,
        "ready_seconds": found.ready.get(order.name, {}).get("ready_seconds"),
        "reason": found.reasons.get(order.name),
    }


def show(record: dict[str, Any], console: Console) -> None:
    where = f"{record['workload']}, {record['hardware']['name']}, torch {record['versions']['torch']}"
    lines = [f"{where}, micro batch {record['micro_batch']}; a ratio is to its base's rate, round by round"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("row", no_wrap=True)
    for heading in ("tok/s", "step", "p10", "p90", "ratio", "p10", "p90", "peak", "ready"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in record["rows"].items():
        table.add_row(name, *cells(row))
        if row["reason"] is not None:
            lines.append(f"{name}: {row['reason']}")
    console.print(lines[0], table, *lines[1:], sep="\n", markup=False, highlight=False)


def cells(row: dict[str, Any]) -> Iterator[str]:
    nothing = dict.fromkeys(("median", "p10", "p90"))
    step, ratio = row["step_seconds"] or nothing, row["ratio"] or nothing
    yield human_rate(row["tokens_per_second"])
    yield from (human_seconds(step[key]) for key in nothing)
    yield from (UNKNOWN if ratio[key] is None else f"{ratio[key]:.3f}" for key in nothing)
    yield human_bytes(row["peak_bytes"])
    yield human_seconds(row["ready_seconds"])


if __name__ == "__main__":
    raise SystemExit(main())
