"""Times matmuls and memory traffic: `python -m redline.engine.matmuls FOLDER` reads task.json and writes answer.json.

    {"device": "cuda", "seconds": 20, "traffic": true, "products":
        [{"dtype": "bf16", "layout": "TN", "m": 16384, "n": 2304, "k": 768, "batch": 1}, ...]}
    -> {"products": [{"median_seconds": 9e-5, "best_seconds": 8.8e-5, "samples": 40}, {"error": "out of memory"}, ...],
        "traffic": {"copy": 4.2e12, "triad": 4.3e12, "read": 4.4e12}}

Layouts are those of a linear layer and its autograd: TN is F.linear(x, w), NN is grad_out @ w (the input's gradient),
NT is grad_out.t() @ x (the weight's gradient). Operands are normal random numbers: on zeros a GPU draws less power and
runs faster than it ever will in training. Samples are taken in rounds over the whole list, so that drift affects all
products alike.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.core.job import write_atomically
from redline.core.values import to_json
from redline.engine.clock import Clock
from redline.engine.memory import is_out_of_memory
from redline.engine.worker import describe, leave_with_parent, open_progress

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE_SECONDS = 0.002  # least length of a sample: events and launches then cost under a percent
PREPARE_SHARE = 0.5  # of the time: products that are not ready by then are left out
WARMUP_SHARE = 0.2  # of the time: the first seconds of a GPU are up to 20 % slow
TRAFFIC_SHARE = 0.1
TRAFFIC_BYTES = {"cuda": 2 * 1024**3, "cpu": 128 * 1024**2}  # per array: many times the size of any cache
TRAFFIC_MEMORY_SHARE = 0.125  # of the free memory, per array, on a small or busy GPU
SEED = 1337

Report = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Product:
    """C[m, n] = A[m, k] B[k, n], `batch` of them in one call."""

    dtype: str
    layout: str
    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two operands as stored in memory."""
        m, n, k = self.m, self.n, self.k
        left, right = {"TN": ((m, k), (n, k)), "NN": ((m, k), (k, n)), "NT": ((k, m), (k, n))}[self.layout]
        return (left, right) if self.batch == 1 else ((self.batch, *left), (self.batch, *right))


def multiply(layout: str, left: Tensor, right: Tensor) -> Tensor:
    """Make the call that training makes for this layout."""
    if layout == "TN":
        return F.linear(left, right) if left.dim() == 2 else left @ right.mT
    return left @ right if layout == "NN" else left.mT @ right


@dataclass
class Timed:
    """One product with its operands and the samples taken so far."""

    product: Product
    operands: tuple[Tensor, Tensor] | None = None
    calls: int = 1
    """Calls per sample."""
    trial: float | None = None
    """A first sample, taken before the device was warm; the answer only if there was no time for another."""
    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    def sample(self, device: torch.device) -> float:
        """Return the seconds per call."""
        assert self.operands is not None
        set_precision(self.product.dtype)
        clock = Clock(device)
        clock.mark()
        for _ in range(self.calls):
            multiply(self.product.layout, *self.operands)
        clock.mark()
        return clock.seconds()[0] / self.calls

    def prepare(self, device: torch.device) -> None:
        """Take two samples: the first loads and selects kernels, the second decides how many calls make a sample."""
        self.sample(device)
        self.trial = self.sample(device)
        self.calls = max(1, math.ceil(SAMPLE_SECONDS / max(self.trial, 1e-7)))

    def answer(self) -> dict[str, Any]:
        seconds = self.seconds or [trial for trial in (self.trial,) if trial is not None]
        if self.error or not seconds:
            return {"error": self.error or "ran out of time"}
        return {"median_seconds": statistics.median(seconds), "best_seconds": min(seconds), "samples": len(seconds)}


class Pool:
    """Random numbers shared by all products of a dtype: two arrays, each as long as the longest operand on its side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arrays: dict[tuple[torch.dtype, int], Tensor] = {}

    def operands(self, product: Product) -> tuple[Tensor, Tensor]:
        dtype = DTYPES[product.dtype]
        left, right = (self._array(dtype, side, shape) for side, shape in enumerate(product.shapes))
        return left, right

    def _array(self, dtype: torch.dtype, side: int, shape: tuple[int, ...]) -> Tensor:
        length = math.prod(shape)
        held = self.arrays.get((dtype, side))
        if held is None or held.numel() < length:
            held = self.arrays[dtype, side] = torch.randn(length, device=self.device, dtype=dtype)
        return held[:length].view(shape)


def time_products(products: list[Product], device: torch.device, seconds: float, report: Report) -> list[Timed]:
    """Warm up, then sample all in rounds until the time is up. A product that fails is left out and says why."""
    started = time.monotonic()
    timed = lay_out(products, device)
    prepare(timed, device, started + PREPARE_SHARE * seconds, report)
    go_round(timed, device, started + WARMUP_SHARE * seconds)
    for one in timed:
        one.seconds.clear()
    while time.monotonic() < started + seconds:
        go_round(timed, device, started + seconds)
        share = min(1.0, (time.monotonic() - started) / seconds)
        report("timing", done=round(100 * share), total=100)
    return timed


def lay_out(products: list[Product], device: torch.device) -> list[Timed]:
    """Allocate all operands, the longest first, so that no array of the pool has to grow."""
    pool, timed = Pool(device), [Timed(product=product) for product in products]
    for one in sorted(timed, key=lambda one: max(map(math.prod, one.product.shapes)), reverse=True):
        with failures_kept(one):
            one.operands = pool.operands(one.product)
    return timed


def prepare(timed: list[Timed], device: torch.device, deadline: float, report: Report) -> None:
    for number, one in enumerate(timed):
        report("loading kernels", done=number, total=len(timed))
        if one.error is None and time.monotonic() < deadline:
            with failures_kept(one):
                one.prepare(device)


def go_round(timed: list[Timed], device: torch.device, deadline: float) -> None:
    """Take one sample of each product that runs, stopping at the deadline."""
    for one in timed:
        if time.monotonic() >= deadline:
            return
        if one.error is None and one.trial is not None:
            with failures_kept(one):
                one.seconds.append(one.sample(device))


@contextlib.contextmanager
def failures_kept(one: Timed) -> Iterator[None]:
    """Record a product's failure as its answer, so that the others are still timed."""
    try:
        yield
    except RuntimeError as error:
        one.error = _why(error)


def _why(error: RuntimeError) -> str:
    return "out of memory" if is_out_of_memory(error) else (str(error).splitlines() or ["it failed"])[0][:200]


def set_precision(dtype: str) -> None:
    """fp32 means true fp32: only a 'tf32' product may use TF32."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def time_traffic(device: torch.device, seconds: float, report: Report) -> dict[str, float]:
    """Return the median bytes per second of a copy, a triad a = b + s c, and a sum."""
    report("memory", seconds=seconds)
    length = traffic_bytes(device) // 4
    a, b, c = (torch.randn(length, device=device) for _ in range(3))
    array_bytes = 4 * length
    moves: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * array_bytes, lambda: a.copy_(b)),
        "triad": (3 * array_bytes, lambda: torch.add(b, c, alpha=0.5, out=a)),
        "read": (array_bytes, lambda: c.sum()),
    }
    taken: dict[str, list[float]] = {name: [] for name in moves}
    deadline = time.monotonic() + seconds
    for _, move in moves.values():
        move()  # the first call of each loads its kernel
    while not taken["read"] or time.monotonic() < deadline:
        for name, (_, move) in moves.items():
            clock = Clock(device)
            clock.mark()
            move()
            clock.mark()
            taken[name] += clock.seconds()
    return {name: moved / statistics.median(taken[name]) for name, (moved, _) in moves.items()}


def traffic_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return TRAFFIC_BYTES[device.type]
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return min(TRAFFIC_BYTES["cuda"], int(TRAFFIC_MEMORY_SHARE * free))


def run(task: dict[str, Any], report: Report) -> dict[str, Any]:
    device = torch.device(task["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    torch.manual_seed(SEED)
    products = [Product(**fields) for fields in task["products"]]
    traffic_seconds = TRAFFIC_SHARE * task["seconds"] if task["traffic"] else 0.0
    timed = time_products(products, device, task["seconds"] - traffic_seconds, report)
    answers = [one.answer() for one in timed]
    del timed  # frees the operands too
    return {"products": answers, "traffic": time_traffic(device, traffic_seconds, report) if task["traffic"] else None}


def main(folder: Path) -> int:
    report = open_progress()
    leave_with_parent()
    try:
        answer = run(json.loads((folder / "task.json").read_text(encoding="utf-8")), report)
    except Exception as error:  # the boundary of the process: every failure becomes an answer
        traceback.print_exc()
        write_atomically(folder / "failure.json", json.dumps(to_json(describe(error))))
        return 1
    write_atomically(folder / "answer.json", json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
