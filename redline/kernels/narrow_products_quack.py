"""The kernels of `kernels.narrow_products`, by QuACK. Imported only if that package and a Hopper GPU are available.

Like `kernels.gelu_products_quack`, except that the epilogues read two more vectors, which undo the scales of the
operands. The matmul itself takes about half the time, so other tile sizes may be the fastest: the first call of a form
times those of TILES. Compiled for sm_90a, the tile of 128 x 192 spills up to 66 registers (300 with the additional
8-bit output), the others five at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, RowVecReduce
from quack.gemm_config import GemmConfig
from quack.gemm_sm90 import GemmSm90

from redline.kernels.gelu_products_quack import Key, fastest, slope_and_gelu, tile
from redline.kernels.on_device import on_its_device

TILES = (
    tile(128, 160, in_turns=True, cluster=(1, 2)),
    tile(128, 192, in_turns=True, cluster=(1, 2)),
    tile(128, 256, in_turns=False, cluster=(1, 2)),
)


class Epilogue(EpiMod):  # type: ignore[misc]
    """An epilogue without additional registers for fp32 sums. QuACK uses the tensor core's own accumulator alone for
    8-bit operands only if told so, and none of its functions has an argument for that."""

    def _mint(self, *words: Any) -> Any:
        kernel = super()._mint(*words)

        def begin(self: Any, *given: Any, **named: Any) -> None:
            GemmSm90.__init__(self, *given, **named, fp8_fast_accum=True)

        kernel.__init__ = begin
        return kernel


SCALES = {"of_row": ColVecLoad("of_row"), "of_column": RowVecLoad("of_column")}
TO_NARROW = {"to_narrow": ColVecLoad("to_narrow")}
BIAS = {"bias": RowVecLoad("bias")}


def epilogue(**parts: Any) -> Callable[[Callable[..., dict[str, Any]]], Epilogue]:
    """Make an epilogue of a function of one element `acc` of the product, and of the factors of its row and column."""
    return lambda end: Epilogue(end, **parts)


@epilogue(outputs=("active",), ops=SCALES | BIAS)
def with_gelu(acc: Any, of_row: Any, of_column: Any, bias: Any) -> dict[str, Any]:
    slope, active = slope_and_gelu(acc * of_row * of_column + bias)
    return {"D": slope, "active": active}


@epilogue(outputs=("active", "narrow"), ops=SCALES | BIAS | TO_NARROW)
def with_gelu_in_both(acc: Any, of_row: Any, of_column: Any, bias: Any, to_narrow: Any) -> dict[str, Any]:
    slope, active = slope_and_gelu(acc * of_row * of_column + bias)
    return {"D": slope, "active": active, "narrow": active * to_narrow}


@epilogue(ops=SCALES, reduces={"sums": RowVecReduce("sums")})
def with_sums_of_columns(acc: Any, c: Any, of_row: Any, of_column: Any) -> dict[str, Any]:
    """`c` is GELU's slope."""
    gradient = acc * of_row * of_column * c
    return {"D": gradient, "sums": gradient}


@epilogue(ops=SCALES, reduces={"sums": ColVecReduce("sums")})
def with_sums_of_rows(acc: Any, c: Any, of_row: Any, of_column: Any) -> dict[str, Any]:
    gradient = acc * of_row * of_column * c
    return {"D": gradient, "sums": gradient}


@epilogue(outputs=("narrow",), ops=SCALES | TO_NARROW, reduces={"sums": RowVecReduce("sums")})
def with_sums_in_both(acc: Any, c: Any, of_row: Any, of_column: Any, to_narrow: Any) -> dict[str, Any]:
    gradient = acc * of_row * of_column * c
    return {"D": gradient, "sums": gradient, "narrow": gradient * to_narrow}


Tensors = tuple[torch.Tensor, ...]


# --- forward ----------------------------------------------------------------------------------------------------------


class Forward:
    """The forward with one tile, for operands of these sizes: rows, weight, their inverses, the bias and, optionally,
    factors."""

    def __init__(self, config: GemmConfig, *operands: torch.Tensor) -> None:
        self.config = config
        a, b, out, beside = self._seen(*operands)
        end = with_gelu_in_both if "narrow" in out else with_gelu
        self.plan = end.plan(a, b, out=out, config=config, **beside)

    @staticmethod
    def _seen(rows: torch.Tensor, weight: torch.Tensor, *beside: torch.Tensor) -> tuple[Any, ...]:
        given = dict(zip(("of_row", "of_column", "bias", "to_narrow"), map(torch.flatten, beside), strict=False))
        out = {name: given["bias"].new_empty(rows.size(0), weight.size(0)) for name in ("D", "active")}
        if "to_narrow" in given:
            out["narrow"] = torch.empty_like(out["D"], dtype=rows.dtype)
        return rows, weight.t(), out, given

    def __call__(self, *operands: torch.Tensor) -> Tensors:
        a, b, out, beside = self._seen(*operands)
        self.plan.run(a, b, out=out, **beside)
        return tuple(out.values())


FORWARD: dict[Key, Forward] = {}


@on_its_device
def forward(*operands: torch.Tensor) -> Tensors:
    key = key_of(*operands)
    way = FORWARD.get(key)
    if way is None:
        way = FORWARD[key] = fastest(forward_ways(*operands), operands)
    return way(*operands)


def forward_ways(*operands: torch.Tensor) -> Iterable[Forward]:
    return (Forward(config, *operands) for config in TILES)


def key_of(*operands: torch.Tensor) -> Key:
    return operands[0].shape, operands[1].shape, operands[4].dtype, operands[0].device, len(operands)


# --- backward ---------------------------------------------------------------------------------------------------------


class Backward:
    """The backward with one tile, for operands of these sizes: rows, weight, their inverses, GELU's slope and,
    optionally, factors. `turned`: multiply the transposed matrices, so that the numbers of a sum are in fewer threads.
    This variant writes no 8-bit output, since no instruction transposes 8-bit numbers on their way out."""

    def __init__(self, config: GemmConfig, turned: bool, *operands: torch.Tensor) -> None:
        self.config, self.turned = config, turned
        a, b, c, out, beside = self._seen(*operands)
        end = with_sums_in_both if "narrow" in out else with_sums_of_rows if turned else with_sums_of_columns
        self.plan = end.plan(a, b, c, out=out, config=config, **beside)
        self.parts = self.plan.scratch["sums"].shape
        self.plan.scratch = {}  # allocated by every call: it may belong to a CUDA graph

    def _seen(
        self,
        above: torch.Tensor,
        weight: torch.Tensor,
        above_inverse: torch.Tensor,
        weight_inverse: torch.Tensor,
        slope: torch.Tensor,
        *factors: torch.Tensor,
    ) -> tuple[Any, ...]:
        rows, columns = above_inverse.flatten(), weight_inverse.flatten()
        if self.turned:
            out = {"D": torch.empty_like(slope).t()}
            return weight, above.t(), slope.t(), out, {"of_row": columns, "of_column": rows}
        out, beside = {"D": torch.empty_like(slope)}, {"of_row": rows, "of_column": columns}
        if factors:
            out["narrow"], beside["to_narrow"] = torch.empty_like(slope, dtype=above.dtype), factors[0].flatten()
        return above, weight.t(), slope, out, beside

    def __call__(self, *operands: torch.Tensor) -> Tensors:
        a, b, c, out, beside = self._seen(*operands)
        parts = c.new_empty(self.parts, dtype=torch.float32)
        self.plan.run(a, b, c, out=out, scratch={"sums": parts}, **beside)
        gradient, *narrow = out.values()
        return (gradient.t() if self.turned else gradient), parts.sum(dim=1 if self.turned else 0), *narrow


BACKWARD: dict[Key, Backward] = {}


@on_its_device
def backward(*operands: torch.Tensor) -> Tensors:
    key = key_of(*operands)
    way = BACKWARD.get(key)
    if way is None:
        way = BACKWARD[key] = fastest(backward_ways(*operands), operands)
    return way(*operands)


def backward_ways(*operands: torch.Tensor) -> Iterable[Backward]:
    ways = (False,) if len(operands) == 6 else (False, True)
    return (Backward(config, turned, *operands) for config in TILES for turned in ways)
