"""Every optimizer on this device: the time of its step and the memory of its state, beside predictions.

    python benchmarks/optimizers.py                      a table: gpt2 on a GPU, tiny on a CPU
    python benchmarks/optimizers.py --json > records/DATE-DEVICE-optimizers.json

Only the optimizer runs, on random gradients that stay the same. *alone*: from an idle device to the end of the update,
including the host's launches. *queued*: the same kernels behind work that keeps the device busy until the host has
launched them all, as in a step without synchronisation. Each sample has one of fused AdamW right beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from made import made
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from redline.core.devices import lookup
from redline.core.errors import UserError
from redline.core.measurement import spread_of
from redline.core.units import UNKNOWN
from redline.core.workload import Workload
from redline.engine.build import optimizer_settings
from redline.engine.clock import Clock
from redline.model.adapter import adapter_of
from redline.optim import OPTIMIZERS, build_optimizer
from redline.predict.activations import Rank
from redline.predict.operations import OPTIMIZER, whole_model
from redline.predict.roofline import TYPICAL, reachable, roofline
from redline.rungs import plan_of
from redline.rungs.ladder import with_optimizer
from redline.search.launch import probe_machine
from redline.workloads import resolve_workload

BESIDE = "adamw-fused"
RUNGS = ("tf32", "bf16", "tied-weights")  # as published; optimizers for bf16 weights need bf16
SAMPLES = {"cuda": 30, "cpu": 10}
WARM = 3  # steps before the first sample: state is created, kernels are loaded or compiled
BURN_SIZE = 8192  # of the square bf16 matmul that keeps a GPU busy
WIDTH = 100  # columns, unless a terminal has another width


@dataclasses.dataclass
class Subject:
    """An optimizer with a model of its own to update."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state_bytes: int
    update_bytes: int | None

    @property
    def step(self) -> Callable[[], None]:
        return self.optimizer.step  # type: ignore[return-value]


def main() -> int:
    options = read_options()
    hardware, versions = probe_machine(options.device)
    device = torch.device(hardware.kind)
    workload = resolve_workload(options.workload or ("gpt2" if hardware.kind == "cuda" else "tiny"))
    samples = options.samples or SAMPLES[hardware.kind]
    beside = prepare(BESIDE, workload, device)
    rows = []
    with suppress(KeyboardInterrupt):  # what was measured is still reported
        for name in options.only or OPTIMIZERS:
            rows.append(row_of(name, workload, device, beside, samples, hardware.name))
            print(f"{name}: {rows[-1]['reason'] or 'done'}", file=sys.stderr, flush=True)
    record = {
        "what": "optimizer steps and state",
        "how": " ".join(__doc__.split("\n\n")[-1].split()),
        **made(),
        "workload": workload.name,
        "parameters": sum(parameter.numel() for parameter in beside.model.parameters()),
        "hardware": {"kind": hardware.kind, "name": hardware.name, "driver": hardware.driver},
        "versions": versions,
        "optimizers": rows,
    }
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        show(record, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="a preset (default: gpt2 on a GPU, tiny on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=list(OPTIMIZERS), metavar="NAME", help="these, not all")
    parser.add_argument("--samples", type=int, help="steps that are timed (default: 30 on a GPU, 10 on a CPU)")
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    return parser.parse_args()


# what is measured


def prepare(name: str, workload: Workload, device: torch.device) -> Subject:
    """Build a model, gradients and an optimizer with its state, and measure the bytes of the state and an update."""
    plan = plan_of(with_optimizer(RUNGS, name))
    model = adapter_of(workload).build(plan, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.grad = noise.mul_(1e-3).to(parameter.dtype)
        del noise
    before = allocated(device)
    optimizer = build_optimizer(name, model, **optimizer_settings(workload, plan))
    for _ in range(WARM):
        optimizer.step()
    after = allocated(device)
    if before is None or after is None:
        return Subject(name, model, optimizer, state_bytes=sum(state_sizes(optimizer)), update_bytes=None)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    wait(device)
    return Subject(
        name, model, optimizer, state_bytes=after - before, update_bytes=torch.cuda.max_memory_allocated() - after
    )


def allocated(device: torch.device) -> int | None:
    """Return the bytes held by torch's allocator; None on a CPU, which has none."""
    gc.collect()
    wait(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else None


def state_sizes(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yield the bytes of each tensor of the state; an 8-bit one wraps several. Step counters are left out."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if key == "step":
                continue
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else None
            yield value.nbytes if inner is None else sum(getattr(value, part).nbytes for part in inner)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def row_of(
    name: str, workload: Workload, device: torch.device, beside: Subject, samples: int, device_name: str
) -> dict[str, Any]:
    """Return one row of the record. An optimizer that cannot be built, say for a missing package, is a row with the
    reason."""
    plan = plan_of(with_optimizer(RUNGS, name))
    whole = whole_model(workload.shape, plan)
    row: dict[str, Any] = {
        "optimizer": name,
        "reason": None,
        "state_bytes": None,
        "predicted_state_bytes": whole.optimizer_bytes,
        "update_bytes": None,
        "predicted_update_bytes": whole.update_bytes,
        "predicted_seconds": predicted_seconds(whole, device_name),
        "alone": None,
        "queued": None,
    }
    try:
        subject = prepare(name, workload, device)
    except UserError as error:
        return {**row, "reason": error.problem}
    except Exception as error:  # a package that does not suit this torch, no memory, no compiler: still a row
        return {**row, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    row |= {"state_bytes": subject.state_bytes, "update_bytes": subject.update_bytes}
    row["alone"] = interleaved(subject, beside, samples, device, busy=None)
    if device.type == "cuda":
        row["queued"] = interleaved(subject, beside, samples, device, busy=burner(subject, device))
    return row


def interleaved(
    subject: Subject, beside: Subject, samples: int, device: torch.device, busy: Callable[[], None] | None
) -> dict[str, Any]:
    """Time both optimizers in turns, so that a drifting clock affects both."""
    seconds: dict[str, list[float]] = {"own": [], "beside": []}
    for _ in range(samples):
        for key, step in (("own", subject.step), ("beside", beside.step)):
            wait(device)
            if busy is not None:
                busy()
            clock = Clock(device)
            clock.mark()
            step()
            clock.mark()
            seconds[key] += clock.seconds()
    own, other = (dataclasses.asdict(spread_of(values)) for values in seconds.values())
    ratio = statistics.median(one / two for one, two in zip(*seconds.values(), strict=True))
    return {"seconds": own, BESIDE: other, "ratio": ratio}


def burner(subject: Subject, device: torch.device) -> Callable[[], None]:
    """Return a function that queues matmuls which take longer than the host needs to launch the step behind them."""
    square = torch.randn(BURN_SIZE, BURN_SIZE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(square)
    clock = Clock(device)
    for work in (lambda: torch.mm(square, square, out=out), subject.step) * 2:
        clock.mark()
        work()
    clock.mark()
    *_, one, launching = clock.seconds()  # from an idle device the step takes as long as its launching, or longer
    count = math.ceil(1.5 * launching / one)

    def burn() -> None:
        for _ in range(count):
            torch.mm(square, square, out=out)

    return burn


def predicted_seconds(whole: Rank, device_name: str) -> float | None:
    """Predict the seconds of the update alone; None if the device is unknown."""
    device = lookup(device_name)
    peaks = None if device is None else reachable(whole.plan, device)
    if peaks is None:
        return None
    step = roofline(whole.shape, whole.plan, micro_batch=1, peaks=peaks, assumptions=TYPICAL)
    updates = (row for row in step.rows if row.operation.group == OPTIMIZER and row.operation.name != "clip")
    return sum(row.seconds for row in updates)


# what is shown


def show(record: dict[str, Any], console: Console) -> None:
    count = record["parameters"]
    console.print(f"{record['workload']}, {count:,} parameters, {record['hardware']['name']}, ms and MB", markup=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("optimizer", no_wrap=True)
    for heading in ("alone", "p10-p90", "queued", "pred.", "x fused", "state", "pred.", "update", "pred."):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in record["optimizers"]:
        table.add_row(row["optimizer"], *cells(row))
    console.print(table)
    for row in record["optimizers"]:
        if row["reason"] is not None:
            console.print(f"{row['optimizer']}: {row['reason']}", markup=False)


def cells(row: dict[str, Any]) -> list[str]:
    alone, queued = row["alone"], row["queued"]
    best = queued or alone  # without a queue there is only one time
    spread = (
        None if alone is None else f"{milliseconds(alone['seconds']['p10'])}-{milliseconds(alone['seconds']['p90'])}"
    )
    return [
        milliseconds(alone and alone["seconds"]["median"]),
        spread or UNKNOWN,
        milliseconds(queued and queued["seconds"]["median"]),
        milliseconds(row["predicted_seconds"]),
        UNKNOWN if best is None else f"{best['ratio']:.2f}",
        *(
            UNKNOWN if row[key] is None else f"{row[key] / 1e6:,.1f}"
            for key in ("state_bytes", "predicted_state_bytes", "update_bytes", "predicted_update_bytes")
        ),
    ]


def milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.2f}"


if __name__ == "__main__":
    sys.exit(main())
