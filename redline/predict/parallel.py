"""Batch arithmetic over many GPUs: GBS = MBS x DP x GAS, with DP = GPUs / (TP x PP).

    layout = layout_for_batch(gpus=64, tp=4, pp=2, micro_batch=2, global_batch=512)
    layout.dp, layout.accumulation -> 8, 32
    check_layout(layout, shape)     # refuses what cannot be cut that way, and proposes what can

TP cuts every layer among GPUs, PP the stack of layers, DP the batch; GAS (gradient accumulation) does what is left one
micro batch after the other. Nothing here says what is fast: only what is possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from redline.core.errors import UserError
from redline.core.workload import Shape, check_positive


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How GPUs share a step. Making one checks that the GPUs can be cut that way."""

    gpus: int
    tp: int = 1
    """Tensor parallel: GPUs that hold one layer together."""
    pp: int = 1
    """Pipeline parallel: groups of GPUs that hold the layers one after the other."""
    micro_batch: int = 1
    """Sequences that pass through at once (MBS)."""
    accumulation: int = 1
    """Micro batches per step and replica (GAS)."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "micro_batch", "accumulation"):
            check_positive(name, getattr(self, name))
        whole = self.tp * self.pp
        if self.gpus % whole:
            raise UserError(
                f"{self.gpus} GPUs cannot be cut into replicas of {self.tp} x {self.pp}",
                f"one replica takes TP x PP = {whole} GPUs, and DP = GPUs / (TP x PP) counts whole replicas",
                f"use {_either(_multiples(self.gpus, whole))} GPUs, or a TP x PP of "
                f"{_either(_divisors_near(whole, self.gpus))}",
            )

    @property
    def dp(self) -> int:
        """Data parallel: copies of the model, each with its own part of the batch."""
        return self.gpus // (self.tp * self.pp)

    @property
    def global_batch(self) -> int:
        """Sequences per step (GBS)."""
        return self.micro_batch * self.dp * self.accumulation

    def explain(self) -> str:
        return (
            f"{self.gpus} GPUs / (TP {self.tp} x PP {self.pp}) = DP {self.dp}; "
            f"MBS {self.micro_batch} x DP {self.dp} x GAS {self.accumulation} = "
            f"a global batch of {self.global_batch} sequences."
        )


def layout_for_batch(*, gpus: int, tp: int = 1, pp: int = 1, micro_batch: int, global_batch: int) -> Layout:
    """The layout whose accumulation makes exactly this global batch, or an error with the nearest ones possible."""
    check_positive("global_batch", global_batch)
    once = Layout(gpus=gpus, tp=tp, pp=pp, micro_batch=micro_batch)
    if global_batch % once.global_batch:
        raise UserError(
            f"a global batch of {global_batch} is not a number of passes of {once.global_batch}",
            f"one pass of all replicas takes MBS {micro_batch} x DP {once.dp} = {once.global_batch} sequences, "
            "and GAS counts whole passes",
            f"use a global batch of {_either(_multiples(global_batch, once.global_batch))}"
            + _other_micro_batch(global_batch, once),
        )
    return Layout(gpus=gpus, tp=tp, pp=pp, micro_batch=micro_batch, accumulation=global_batch // once.global_batch)


def _other_micro_batch(global_batch: int, once: Layout) -> str:
    """Where the replicas divide the batch, another micro batch may do instead."""
    if global_batch % once.dp:
        return ""
    return f", or a micro batch of {_either(_divisors_near(once.micro_batch, global_batch // once.dp))}"


def check_layout(layout: Layout, shape: Shape) -> None:
    """Refuses a layout that this model cannot be cut into, with the nearest that both it and the GPUs can."""
    cut_by_tp = {
        "heads": (shape.heads, "each GPU of a tensor-parallel group holds whole heads"),
        "key-value heads": (shape.key_value_heads, "key-value heads are shared out whole, or they would be copied"),
        "numbers across the MLP": (shape.d_ff, "the MLP's width is shared out evenly"),
    }
    tp_divides = math.gcd(*(size for size, _ in cut_by_tp.values()), layout.gpus // layout.pp)
    for what, (size, why) in cut_by_tp.items():
        _check_cut(what, size, "TP", layout.tp, tp_divides, why)
    pp_divides = math.gcd(shape.layers, layout.gpus // layout.tp)
    _check_cut("layers", shape.layers, "PP", layout.pp, pp_divides, "each pipeline stage holds as many as the others")


def _check_cut(what: str, size: int, name: str, parts: int, possible: int, why: str) -> None:
    """`possible`: every number of parts that would do divides it."""
    if size % parts:
        raise UserError(
            f"{size} {what} cannot be shared by {name} {parts}",
            why,
            f"use {name} {_either(_divisors_near(parts, possible))}",
        )


def _divisors_near(wanted: int, size: int) -> list[int]:
    """The largest divisor of `size` below `wanted` and the smallest above, of which one at least exists."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    divisors = sorted({*small, *(size // d for d in small)})
    return [*[d for d in divisors if d < wanted][-1:], *[d for d in divisors if d > wanted][:1]]


def _multiples(wanted: int, of: int) -> list[int]:
    """The multiples of `of` just below and above `wanted`, without zero."""
    below = wanted // of * of
    return [n for n in (below, below + of) if n > 0]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)
