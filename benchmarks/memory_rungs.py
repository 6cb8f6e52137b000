"""What the rungs that save memory cost and gain: a recipe with each of them, at one micro batch and at its best one.

    python benchmarks/memory_rungs.py gpt2 --recipe fast.json --micro-batch 64 --sizes 128,256 --json > records/DATE-...

The rows are the recipe; with chunked loss; with every block recomputed; with both; with half of the bytes kept, by the
compiler's choice; with naive attention instead of a fused kernel; and with the core of naive attention recomputed,
which saves memory only there. MFU counts what the model requires, HFU what is executed: recomputation lowers the first
but not the second. Sizes whose predicted memory does not fit are not run. Steps are timed as in against.py: the
processes of one size compile side by side, as many as fit by prediction, and then take turns. The common size comes
first, then the others in ascending order: a run that is stopped keeps the sizes it has reached.
There are no verdicts here: `redline ladder --from fast.json --rungs chunked-loss,checkpointing` gives them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from against import Child, Found, OutError, Player, look_at_all, rate_of, sizes_in
from contestants import OURS, TOKENS_FILE, Order
from made import made
from politely import politely
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redline.core.errors import unknown_name
from redline.core.hardware import Hardware
from redline.core.recipe import load_recipe
from redline.core.units import human_bytes, human_percent, human_rate
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.data.tokens import prepare_tokens
from redline.predict.efficiency import efficiency, trusted_hfu
from redline.predict.memory import predict_memory
from redline.rungs import plan_of
from redline.search.ladder import check_recipe_applies
from redline.search.launch import probe_machine
from redline.workloads import resolve_workload

USABLE = 0.9  # of the device: contexts, fragmentation and the weights of resting processes need the rest
FUSED_ATTENTION = ("flash", "cudnn-attention", "packed-attention", "flash4-backward")
WIDTH = 100


def main(words: list[str] | None = None) -> int:
    return politely(run, read_options(words))


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2", help="a preset or a config (default: gpt2)")
    parser.add_argument("--recipe", type=Path, required=True, help="the rungs that all rows share")
    parser.add_argument("--micro-batch", type=int, default=64, help="that all rows have at first (default: 64)")
    parser.add_argument("--sizes", default="128,256", help="to choose each row's best from, too (default: 128,256)")
    parser.add_argument("--rows", metavar="A,B", help="these, not all")
    parser.add_argument("--block", type=int, default=8, help="timed steps in a turn (default: 8)")
    parser.add_argument("--at-once", type=int, default=4, help="processes that compile side by side (default: 4)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where compiled code stays, for the next time")
    parser.add_argument(
        "--room", type=float, metavar="GIB", help="memory for those side by side (default: 0.9 of the device's)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    started, workload = time.monotonic(), resolve_workload(options.workload)
    for name in ("micro_batch", "block", "at_once"):
        check_positive(f"--{name.replace('_', '-')}", getattr(options, name))
    sizes = [options.micro_batch, *sorted({*sizes_in(options.sizes)} - {options.micro_batch})]
    recipe = load_recipe(options.recipe)
    rows = rows_of(recipe.rungs)
    rows = {name: rows[name] for name in chosen(options.rows, rows)}
    hardware, versions = probe_machine(options.device)
    for rungs in rows.values():
        check_recipe_applies(replace(recipe, rungs=rungs), workload, hardware)
    every = [
        Order(
            candidate=OURS,
            workload=workload,
            rungs=rungs,
            micro_batch=size,
            device=hardware.kind,
            compiled=True,
            label=name,
        )
        for size in sizes
        for name, rungs in rows.items()
    ]
    room = Room(int(options.room * 2**30 if options.room else USABLE * (hardware.memory_bytes or 0)))
    # The prediction is not of a CPU's resident set, and nothing is ruled out there.
    unfit = {one.name: too_large(one, room.total) for one in every} if hardware.kind == "cuda" else {}
    found = Found(orders=[one for one in every if unfit.get(one.name) is None])
    with kept_in(options.keep) as folder:
        prepare_tokens(workload, Path(folder) / TOKENS_FILE)
        children: list[Child] = []

        def open_child(order: Order) -> tuple[Player, dict[str, Any]]:
            with room.taken(predicted_bytes(order) if hardware.kind == "cuda" else 0):
                child = Child(order, Path(folder), max(1, hardware.cpu_cores // options.at_once))
                children.append(child)
                return child, child.ready()

        try:
            for size in sizes:
                look_at_all(only_at(size, found), open_child, options)
                while children:
                    children.pop().close()
            found.finished = True
        except KeyboardInterrupt:
            print("stopped; what was measured stays", file=sys.stderr)
        finally:
            room.close()
            for child in children:
                child.close()
    found.reasons |= {name: reason for name, reason in unfit.items() if reason is not None}
    record = {
        "what": "rungs that save memory: throughput and memory at one micro batch and at each row's best",
        "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
        **made(),
        "hardware": to_json(hardware),
        "versions": versions,
        "workload": workload.name,
        "micro_batch": options.micro_batch,
        "finished": found.finished,
        "rows": results(found, every, rows, options.micro_batch, hardware),
        "seconds": time.monotonic() - started,
    }
    show(record, Console(file=sys.stderr if options.json else sys.stdout, width=WIDTH))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0 if found.finished else 1


def kept_in(keep: Path | None) -> contextlib.AbstractContextManager[str]:
    if keep is None:
        return tempfile.TemporaryDirectory()
    keep.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(str(keep))


# the rows


def rows_of(rungs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    chunked = (*(name for name in rungs if name != "fused-loss"), "chunked-loss")
    naive = tuple(name for name in rungs if name not in FUSED_ATTENTION)
    return {
        "recipe": rungs,
        "chunked-loss": chunked,
        "checkpointing": (*rungs, "checkpointing"),
        "both": (*chunked, "checkpointing"),
        "budget": (*rungs, "budget-checkpointing"),
        "naive-attention": naive,
        "selective": (*naive, "selective-checkpointing"),
    }


def chosen(words: str | None, rows: dict[str, Any]) -> list[str]:
    names = words.split(",") if words else list(rows)
    for name in names:
        if name not in rows:
            raise unknown_name("row", name, rows)
    return names


def only_at(size: int, found: Found) -> Found:
    """Return a copy with the orders of that size only; their results are collected in the same place."""
    return replace(found, orders=[order for order in found.orders if order.micro_batch == size])


def predicted_bytes(order: Order) -> int:
    found = predict_memory(order.workload.decoder, plan_of(order.rungs), micro_batch=order.micro_batch)
    return int(found.total)


def too_large(order: Order, room: int) -> str | None:
    need = predicted_bytes(order)
    return f"not run: {human_bytes(need)} by prediction, and {human_bytes(room)} are there" if need > room else None


class Room:
    """The device's memory, for processes that start side by side: one that does not fit beside the others waits."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._changed, self._closed = threading.Condition(), False

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: size <= self.free or self._closed)
            if self._closed:
                raise OutError("stopped before it began")
            self.free -= size
        try:
            yield
        finally:
            with self._changed:
                self.free += size
                self._changed.notify_all()

    def close(self) -> None:
        """Let none of those that wait begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# results


def results(
    found: Found, orders: list[Order], rows: dict[str, tuple[str, ...]], fixed: int, hardware: Hardware
) -> dict[str, Any]:
    """Return for each row: `fixed`, `rebatched` (the fastest size) and `sizes`, all that were requested."""
    answer = {}
    for name, rungs in rows.items():
        sizes = [size_of(found, one, hardware) for one in orders if one.label == name]
        ran = [size for size in sizes if size["tokens_per_second"] is not None]
        answer[name] = {
            "rungs": list(rungs),
            "fixed": next(size for size in sizes if size["micro_batch"] == fixed),
            "rebatched": max(ran, key=lambda size: size["tokens_per_second"], default=None),
            "sizes": sizes,
        }
    return answer


def size_of(found: Found, order: Order, hardware: Hardware) -> dict[str, Any]:
    blocks, plan = found.looks.get(order.name, []), plan_of(order.rungs)
    rate = rate_of(order, blocks)
    share = None if rate is None else efficiency(order.workload.decoder, plan, hardware, rate)
    peak = blocks[-1]["peak_bytes"] if blocks else None
    predicted = predict_memory(order.workload.decoder, plan, micro_batch=order.micro_batch).allocated
    return {
        "micro_batch": order.micro_batch,
        "tokens_per_second": rate,
        "mfu": None if share is None else share.mfu,
        "hfu": trusted_hfu(share, plan, peak, predicted),
        "mfu_convention": None if share is None else share.convention,
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "seconds": [one for block in blocks for one in block["seconds"]],
        "reason": found.reasons.get(order.name),
    }


def show(record: dict[str, Any], console: Console) -> None:
    where = f"{record['workload']}, {record['hardware']['name']}"
    lines = [f"{where}: rows at {record['micro_batch']} and at other sizes; * is a row's fastest"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("row", no_wrap=True)
    for heading in ("batch", "tok/s", "MFU", "HFU", "peak", "predicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in record["rows"].items():
        for size in sorted(row["sizes"], key=lambda size: size["micro_batch"]):
            mark = " *" if size == row["rebatched"] else "  "
            table.add_row(name, f"{size['micro_batch']}{mark}", *cells(size))
            if size["reason"] is not None:
                lines.append(f"{name} at {size['micro_batch']}: {size['reason']}")
    console.print(lines[0], table, *lines[1:], sep="\n", markup=False, highlight=False)


def cells(size: dict[str, Any]) -> list[str]:
    shares = [human_percent(size[key]) for key in ("mfu", "hfu")]
    peaks = [human_bytes(size[key]) for key in ("peak_bytes", "predicted_peak_bytes")]
    return [human_rate(size["tokens_per_second"]), *shares, *peaks]


if __name__ == "__main__":
    raise SystemExit(main())
