"""The kernels of `kernels.gelu_products`, by QuACK. Imported only where that package and a Hopper GPU are.

QuACK compiles the functions of one number below into the ends of its matmuls. That takes some seconds of a form's first
call (sizes and type), and QuACK keeps the code in a folder of its own (QUACK_CACHE_DIR).
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


# Two groups of warps in turns: while one multiplies, the other does GELU and writes. Of 25 sets of sizes the fastest on
# an H200, at 65,536 x 768 x 3,072; on the way back it was first among eight with another cluster.
TILE = tile(128, 192, in_turns=True, cluster=(1, 2))
BACK = tile(128, 192, in_turns=True, cluster=(2, 1))
Pair = tuple[torch.Tensor, torch.Tensor]


def slope_and_gelu(x: Any) -> tuple[Any, Any]:
    """GELU is x share with share = (1 + tanh(z)) / 2 and 2 z = SLOPE (x + CUBE x^3); of what follows as little as can
    be, since every operation is one of 201 M here."""
    square = x * x
    share = tanh(x * (SLOPE / 2 + SLOPE / 2 * CUBE * square)) * 0.5 + 0.5
    active = x * share
    return share + (active * (-share) + active) * (SLOPE + 3 * SLOPE * CUBE * square), active


@gemm_epilogue(outputs=("active",), ops={"bias": RowVecLoad("bias")})  # type: ignore[untyped-decorator]
def with_gelu(acc: Any, bias: Any) -> dict[str, Any]:
    """`acc` is a number of the product in fp32; `D`, GELU's slope, and `active` are written."""
    slope, active = slope_and_gelu(acc + bias)
    return {"D": slope, "active": active}


@gemm_epilogue(reduces={"sums": RowVecReduce("sums")})  # type: ignore[untyped-decorator]
def with_sums_of_columns(acc: Any, c: Any) -> dict[str, Any]:
    """`c` is GELU's slope; `D` is written, `sums` added up."""
    gradient = acc * c
    return {"D": gradient, "sums": gradient}


@gemm_epilogue(reduces={"sums": ColVecReduce("sums")})  # type: ignore[untyped-decorator]
def with_sums_of_rows(acc: Any, c: Any) -> dict[str, Any]:
    gradient = acc * c
    return {"D": gradient, "sums": gradient}


# --- forward ----------------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]
FORWARD: dict[Key, Any] = {}


def forward(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Pair:
    slope, active = (rows.new_empty(rows.size(0), weight.size(0)) for _ in range(2))
    out = {"D": slope, "active": active}
    key = rows.shape, weight.shape, rows.dtype, rows.device
    plan = FORWARD.get(key)  # with a plan QuACK needs 2 us of the host for a call, without one 28
    if plan is None:
        plan = FORWARD[key] = with_gelu.plan(rows, weight.t(), out=out, config=TILE, bias=bias)
    plan.run(rows, weight.t(), out=out, bias=bias)
    return slope, active


# --- backward ---------------------------------------------------------------------------------------------------------


class Backward:
    """One of two ways, for operands of these sizes. `turned`: the matmul of the transposed matrices, which finds the
    numbers of a sum in fewer threads."""

    def __init__(self, turned: bool, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> None:
        self.turned = turned
        a, b, c = self._seen(above, weight, slope)
        end = with_sums_of_rows if turned else with_sums_of_columns
        self.plan = end.plan(a, b, c, out={"D": torch.empty_like(c)}, config=BACK)
        self.parts = self.plan.scratch["sums"].shape
        self.plan.scratch = {}  # every call has its own: they may be in a graph

    def _seen(self, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight.t(), above.t(), slope.t()) if self.turned else (above, weight, slope)

    def __call__(self, above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> Pair:
        gradient = torch.empty_like(slope)
        parts = slope.new_empty(self.parts, dtype=torch.float32)
        a, b, c = self._seen(above, weight, slope)
        self.plan.run(a, b, c, out={"D": gradient.t() if self.turned else gradient}, scratch={"sums": parts})
        return gradient, parts.sum(dim=1 if self.turned else 0)


BACKWARD: dict[Key, Backward] = {}


def backward(above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> Pair:
    key = above.shape, weight.shape, slope.dtype, slope.device
    way = BACKWARD.get(key)
    if way is None:
        ways = (Backward(turned, above, weight, slope) for turned in (False, True))
        way = BACKWARD[key] = fastest(ways, (above, weight, slope))
    return way(above, weight, slope)


Way = TypeVar("Way", bound=Callable[..., tuple[torch.Tensor, ...]])


def fastest(ways: Iterable[Way], operands: tuple[torch.Tensor, ...]) -> Way:
    """The one that is here, or always the first where two runs must agree."""
    if torch.are_deterministic_algorithms_enabled():
        return next(iter(ways))
    made = list(ways)
    times: list[list[float]] = [[] for _ in made]
    for _ in range(1 + LOOKS):
        for seconds, way in zip(times, made, strict=True):
            seconds.append(seconds_of(lambda way=way: way(*operands)))  # type: ignore[misc]
    medians = [statistics.median(seconds[1:]) for seconds in times]  # the first loads the code
    return made[medians.index(min(medians))]


def seconds_of(call: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)  # else the launch would be timed
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
