"""The kernels of `kernels.gelu_products`, by QuACK. Imported only if that package and a Hopper GPU are available.

QuACK compiles the scalar functions below into the epilogues of its matmuls. That takes some seconds of the first call
of a form (sizes and dtype), and QuACK caches the code in a folder of its own (QUACK_CACHE_DIR).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from quack.activation import tanh
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecReduce, RowVecLoad, RowVecReduce
from quack.gemm_config import GemmConfig

from redline.kernels.cublaslt import BUSY_CYCLES, LOOKS
from redline.kernels.gelu_backward import CUBE, SLOPE
from redline.kernels.on_device import on_its_device


def tile(rows: int, columns: int, *, in_turns: bool, cluster: tuple[int, int]) -> GemmConfig:
    return GemmConfig(
        tile_m=rows,
        tile_n=columns,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        pingpong=in_turns,
        is_dynamic_persistent=False,
        device_capacity=9,
    )


# Two groups of warps take turns: while one multiplies, the other computes GELU and writes. The fastest of 25
# configurations on an H200, at 65,536 x 768 x 3,072; for the backward, the fastest of eight has another cluster.
TILE = tile(128, 192, in_turns=True, cluster=(1, 2))
BACK = tile(128, 192, in_turns=True, cluster=(2, 1))
Pair = tuple[torch.Tensor, torch.Tensor]


def slope_and_gelu(x: Any) -> tuple[Any, Any]:
    """GELU is x share with share = (1 + tanh(z)) / 2 and 2 z = SLOPE (x + CUBE x^3). This takes as few operations as
    possible, since each of them runs 201 M times here."""
    square = x * x
    share = tanh(x * (SLOPE / 2 + SLOPE / 2 * CUBE * square)) * 0.5 + 0.5
    active = x * share
    return share + (active * (-share) + active) * (SLOPE + 3 * SLOPE * CUBE * square), active


@gemm_epilogue(outputs=("active",), ops={"bias": RowVecLoad("bias")})  # type: ignore[untyped-decorator]
def with_gelu(acc: Any, bias: Any) -> dict[str, Any]:
    """`acc` is an element of the product in fp32; `D`, GELU's slope, and `active` are written."""
    slope, active = slope_and_gelu(acc + bias)
    return {"D": slope, "active": active}


@gemm_epilogue(reduces={"sums": RowVecReduce("sums")})  # type: ignore[untyped-decorator]
def with_sums_of_columns(acc: Any, c: Any) -> dict[str, Any]:
    """`c` is GELU's slope; `D` is written, and `sums` accumulated."""
    gradient = acc * c
    return {"D": gradient, "sums": gradient}


@gemm_epilogue(reduces={"sums": ColVecReduce("sums")})  # type: ignore[untyped-decorator]
def with_sums_of_rows(acc: Any, c: Any) -> dict[str, Any]:
    gradient = acc * c
    return {"D": gradient, "sums": gradient}


# --- forward ----------------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]
FORWARD: dict[Key, Any] = {}


@on_its_device
def forward(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Pair:
    slope, active = (rows.new_empty(rows.size(0), weight.size(0)) for _ in range(2))
    out = {"D": slope, "active": active}
    key = rows.shape, weight.shape, rows.dtype, rows.device
    plan = FORWARD.get(key)  # with a plan a call costs 2 us of host time, without one 28
    if plan is None:
        plan = FORWARD[key] = with_gelu.plan(rows, weight.t(), out=out, config=TILE, bias=bias)
    plan.run(rows, weight.t(), out=out, bias=bias)
    return slope, active


# --- backward ---------------------------------------------------------------------------------------------------------


class Backward:
    """One of two variants, for operands of these sizes. `turned`: multiply the transposed matrices, so that the numbers
    of a sum are in fewer threads."""

    def __init__(self, turned: bool, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> None:
        self.turned = turned
        a, b, c = self._seen(above, weight, slope)
        end = with_sums_of_rows if turned else with_sums_of_columns
        self.plan = end.plan(a, b, c, out={"D": torch.empty_like(c)}, config=BACK)
        self.parts = self.plan.scratch["sums"].shape
        self.plan.scratch = {}  # allocated by every call: it may belong to a CUDA graph

    def _seen(self, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight.t(), above.t(), slope.t()) if self.turned else (above, weight, slope)

    def __call__(self, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> Pair:
        gradient = torch.empty_like(slope)
        parts = slope.new_empty(self.parts, dtype=torch.float32)
        a, b, c = self._seen(above, weight, slope)
        self.plan.run(a, b, c, out={"D": gradient.t() if self.turned else gradient}, scratch={"sums": parts})
        return gradient, parts.sum(dim=1 if self.turned else 0)


BACKWARD: dict[Key, Backward] = {}


@on_its_device
def backward(above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> Pair:
    key = above.shape, weight.shape, slope.dtype, slope.device
    way = BACKWARD.get(key)
    if way is None:
        ways = (Backward(turned, above, weight, slope) for turned in (False, True))
        way = BACKWARD[key] = fastest(ways, (above, weight, slope))
    return way(above, weight, slope)


Way = TypeVar("Way", bound=Callable[..., tuple[torch.Tensor, ...]])


def fastest(ways: Iterable[Way], operands: tuple[torch.Tensor, ...]) -> Way:
    """Return the variant that is fastest here; always the first if algorithms must be deterministic."""
    if torch.are_deterministic_algorithms_enabled():
        return next(iter(ways))
    made = list(ways)
    times: list[list[float]] = [[] for _ in made]
    for _ in range(1 + LOOKS):
        for seconds, way in zip(times, made, strict=True):
            seconds.append(seconds_of(lambda way=way: way(*operands)))  # type: ignore[misc]
    medians = [statistics.median(seconds[1:]) for seconds in times]  # the first call loads the code
    return made[medians.index(min(medians))]


def seconds_of(call: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)  # otherwise the launch would be timed
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
