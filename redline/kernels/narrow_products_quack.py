"""The kernels of `kernels.narrow_products`, by QuACK. Imported only where that package and a Hopper GPU are.

Like `kernels.gelu_products_quack`, but for two vectors more at the ends, which undo the scales of the operands. The
product itself takes about half the time, so that other sizes of its tiles may be the fastest: the first call of a form
times those of TILES. Compiled for sm_90a the tile of 128 x 192 spills up to 66 registers, the others five at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from quack.activation import gelu_tanh_approx
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, RowVecReduce
from quack.gemm_config import GemmConfig
from quack.gemm_sm90 import GemmSm90

from redline.kernels.gelu_products_quack import Key, Pair, fastest, gradient_of


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


TILES = (
    tile(128, 192, in_turns=True, cluster=(1, 2)),
    tile(128, 160, in_turns=True, cluster=(1, 2)),
    tile(128, 256, in_turns=False, cluster=(1, 2)),
)


class Epilogue(EpiMod):  # type: ignore[misc]
    """Without more registers for sums in fp32: QuACK has the tensor core's own for 8 bits only when told so, and no
    argument of its functions tells it."""

    def _mint(self, *words: Any) -> Any:
        kernel = super()._mint(*words)

        def begin(self: Any, *given: Any, **named: Any) -> None:
            GemmSm90.__init__(self, *given, **named, fp8_fast_accum=True)

        kernel.__init__ = begin
        return kernel


SCALES = {"of_row": ColVecLoad("of_row"), "of_column": RowVecLoad("of_column")}


def epilogue(**parts: Any) -> Callable[[Callable[..., dict[str, Any]]], Epilogue]:
    """Of a function of one number `acc` of the product, and of the factors of its row and its column."""
    return lambda end: Epilogue(end, **parts)


@epilogue(outputs=("active",), ops={**SCALES, "bias": RowVecLoad("bias")})
def with_gelu(acc: Any, of_row: Any, of_column: Any, bias: Any) -> dict[str, Any]:
    hidden = acc * of_row * of_column + bias
    return {"D": hidden, "active": gelu_tanh_approx(hidden)}


@epilogue(ops=SCALES, reduces={"sums": RowVecReduce("sums")})
def with_sums_of_columns(acc: Any, c: Any, of_row: Any, of_column: Any) -> dict[str, Any]:
    """`c` is what GELU was given."""
    gradient = gradient_of(acc * of_row * of_column, c)
    return {"D": gradient, "sums": gradient}


@epilogue(ops=SCALES, reduces={"sums": ColVecReduce("sums")})
def with_sums_of_rows(acc: Any, c: Any, of_row: Any, of_column: Any) -> dict[str, Any]:
    gradient = gradient_of(acc * of_row * of_column, c)
    return {"D": gradient, "sums": gradient}


# --- forward ----------------------------------------------------------------------------------------------------------


class Forward:
    """With one tile, for operands of these sizes."""

    def __init__(self, config: GemmConfig, *operands: torch.Tensor) -> None:
        self.config = config
        rows, weight, bias = operands[0], operands[1], operands[-1]
        out = {name: bias.new_empty(rows.size(0), weight.size(0)) for name in ("D", "active")}
        self.plan = with_gelu.plan(rows, weight.t(), out=out, config=config, **self._beside(*operands[2:]))

    @staticmethod
    def _beside(
        rows_inverse: torch.Tensor, weight_inverse: torch.Tensor, bias: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"of_row": rows_inverse.flatten(), "of_column": weight_inverse.flatten(), "bias": bias}

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, *beside: torch.Tensor) -> Pair:
        hidden, active = (beside[-1].new_empty(rows.size(0), weight.size(0)) for _ in range(2))
        self.plan.run(rows, weight.t(), out={"D": hidden, "active": active}, **self._beside(*beside))
        return hidden, active


FORWARD: dict[Key, Forward] = {}


def forward(*operands: torch.Tensor) -> Pair:
    rows, weight, *_, bias = operands
    key = rows.shape, weight.shape, bias.dtype, rows.device
    way = FORWARD.get(key)
    if way is None:
        way = FORWARD[key] = fastest(forward_ways(*operands), operands)
    return way(*operands)


def forward_ways(*operands: torch.Tensor) -> Iterable[Forward]:
    return (Forward(config, *operands) for config in TILES)


# --- backward ---------------------------------------------------------------------------------------------------------


class Backward:
    """With one tile, for operands of these sizes. `turned`: the matmul of the transposed matrices, which finds the
    numbers of a sum in fewer threads."""

    def __init__(self, config: GemmConfig, turned: bool, *operands: torch.Tensor) -> None:
        self.config, self.turned = config, turned
        a, b, c, factors = self._seen(*operands)
        end = with_sums_of_rows if turned else with_sums_of_columns
        self.plan = end.plan(a, b, c, out={"D": torch.empty_like(c)}, config=config, **factors)
        self.parts = self.plan.scratch["sums"].shape
        self.plan.scratch = {}  # every call has its own: they may be in a graph

    def _seen(
        self,
        above: torch.Tensor,
        weight: torch.Tensor,
        above_inverse: torch.Tensor,
        weight_inverse: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        rows, columns = above_inverse.flatten(), weight_inverse.flatten()
        if self.turned:
            return weight, above.t(), hidden.t(), {"of_row": columns, "of_column": rows}
        return above, weight.t(), hidden, {"of_row": rows, "of_column": columns}

    def __call__(self, *operands: torch.Tensor) -> Pair:
        a, b, c, factors = self._seen(*operands)
        gradient = torch.empty_like(c)
        parts = c.new_empty(self.parts, dtype=torch.float32)
        self.plan.run(a, b, c, out={"D": gradient}, scratch={"sums": parts}, **factors)
        return (gradient.t() if self.turned else gradient), parts.sum(dim=1 if self.turned else 0)


BACKWARD: dict[Key, Backward] = {}


def backward(*operands: torch.Tensor) -> Pair:
    above, weight, *_, hidden = operands
    key = above.shape, weight.shape, hidden.dtype, hidden.device
    way = BACKWARD.get(key)
    if way is None:
        way = BACKWARD[key] = fastest(backward_ways(*operands), operands)
    return way(*operands)


def backward_ways(*operands: torch.Tensor) -> Iterable[Backward]:
    return (Backward(config, turned, *operands) for config in TILES for turned in (False, True))
