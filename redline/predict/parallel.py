"""Batch arithmetic over many GPUs: GBS = MBS x DP x GAS, with DP = GPUs / (TP x PP).

    layout = layout_for_batch(gpus=64, tp=4, pp=2, micro_batch=2, global_batch=512, shape=shape)
    layout.dp, layout.accumulation -> 8, 32
    check_layout(shape, layout, gpus=64, gpus_per_node=8)     # refuses what cannot run, and proposes what can

TP cuts every layer among GPUs, PP the stack of layers, DP the batch; GAS (gradient accumulation) does what is left one
micro batch after the other. Ranks count TP fastest, then DP, then PP: tensor-parallel GPUs are neighbours in a node.
Nothing here says what is fast (predict/layouts.py does): only what is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from redline.core.errors import UserError
from redline.core.units import counted
from redline.core.workload import Shape, check_positive

USUAL_NODE = 8  # GPUs on a DGX or HGX board


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
        if self.gpus % (self.tp * self.pp):
            raise _no_whole_replicas(self.gpus, self.tp, self.pp, shape=None)

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
            f"{counted(self.gpus, 'GPU')} / (TP {self.tp} x PP {self.pp}) = DP {self.dp}; "
            f"MBS {self.micro_batch} x DP {self.dp} x GAS {self.accumulation} = "
            f"a global batch of {self.global_batch} sequences."
        )


def layout_for_batch(
    *,
    gpus: int,
    tp: int = 1,
    pp: int = 1,
    micro_batch: int,
    global_batch: int | None = None,
    shape: Shape | None = None,
    gpus_per_node: int | None = None,
) -> Layout:
    """The layout whose accumulation makes exactly this global batch (None: one pass), or an error with the nearest
    possible ones. With a shape they are possible for that model too."""
    if shape is not None:
        _check_cuts(shape, gpus, tp, pp, gpus_per_node)
    once = Layout(gpus=gpus, tp=tp, pp=pp, micro_batch=micro_batch)
    if global_batch is None:
        return once
    check_positive("global_batch", global_batch)
    if global_batch % once.global_batch:
        raise UserError(
            f"a global batch of {global_batch} is not a number of passes of {once.global_batch}",
            f"one pass of all replicas takes MBS {micro_batch} x DP {once.dp} = {once.global_batch} sequences, "
            "and GAS counts whole passes",
            "use a global batch of " + ", or ".join(_batches_near(global_batch, once)),
        )
    return replace(once, accumulation=global_batch // once.global_batch)


def check_layout(shape: Shape, layout: Layout, gpus: int | None = None, gpus_per_node: int | None = None) -> None:
    """Raises a UserError for a layout that cannot run, with the nearest that can; returns nothing for one that can.

    The model must divide (heads, key-value heads and the MLP by TP, layers by PP), the layout must use exactly the
    `gpus` that there are, and a tensor-parallel group must not leave its node. None: not asked."""
    _check_cuts(shape, layout.gpus, layout.tp, layout.pp, gpus_per_node)
    if gpus is not None and layout.gpus != gpus:
        check_positive("gpus", gpus)
        raise UserError(
            f"the layout takes {layout.gpus} GPUs and there are {gpus}",
            f"DP {layout.dp} x TP {layout.tp} x PP {layout.pp} = {layout.gpus}, one rank per GPU",
            f"use {_cuts_near(shape, gpus, layout.tp, layout.pp, gpus_per_node)} on {gpus} GPUs; "
            "DP is what is left of them",
        )


def check_product(gpus: int, *, dp: int, tp: int, pp: int) -> None:
    """Refuses a DP that is not what TP and PP leave of the GPUs."""
    for name, value in (("gpus", gpus), ("dp", dp), ("tp", tp), ("pp", pp)):
        check_positive(name, value)
    if dp * tp * pp == gpus:
        return
    left = f"DP {gpus // (tp * pp)} on these {gpus}, or " if gpus % (tp * pp) == 0 else ""
    raise UserError(
        f"DP {dp} x TP {tp} x PP {pp} takes {dp * tp * pp} GPUs, not {gpus}",
        "every GPU is one rank of one layout",
        f"use {left}{dp * tp * pp} GPUs",
    )


def gpus_in_a_node(gpus: int, nodes: int | None = None) -> int:
    """Of so many nodes; None: nodes of 8 GPUs, or of the largest number up to 8 that divides them."""
    check_positive("gpus", gpus)
    if nodes is None:
        return max(size for size in divisors(gpus) if size <= USUAL_NODE)
    check_positive("nodes", nodes)
    if gpus % nodes:
        near = nearest_two(divisors(gpus), nodes)
        raise UserError(
            f"{gpus} GPUs are not the same number in each of {nodes} nodes",
            "nodes are taken to be alike",
            f"use {_either(near)} nodes, or {_either(_multiples(gpus, nodes))} GPUs",
        )
    return gpus // nodes


def heads_divide(shape: Shape, tp: int) -> bool:
    """Each GPU of a tensor-parallel group holds whole heads. Some trainers copy key-value heads where there are more
    GPUs than those; here that counts as impossible, for memory as for speed."""
    return shape.heads % tp == 0 and shape.key_value_heads % tp == 0


def _check_cuts(shape: Shape, gpus: int, tp: int, pp: int, gpus_per_node: int | None = None) -> None:
    for name, value in (("gpus", gpus), ("tp", tp), ("pp", pp)):
        check_positive(name, value)
    kv = shape.key_value_heads
    for name, parts, what, size, why in (
        ("TP", tp, counted(shape.heads, "head"), shape.heads, "each GPU of a tensor-parallel group holds whole heads"),
        ("TP", tp, counted(kv, "key-value head"), kv, "they are shared out whole, and not copied"),
        ("TP", tp, f"{shape.d_ff} numbers across the MLP", shape.d_ff, "the MLP's width is shared out evenly"),
        ("PP", pp, counted(shape.layers, "layer"), shape.layers, "each pipeline stage holds as many as the others"),
    ):
        if size % parts:
            raise UserError(
                f"{what} cannot be shared by {name} {parts}",
                why,
                f"use {_cuts_near(shape, gpus, tp, pp, gpus_per_node)}",
            )
    if gpus % (tp * pp):
        raise _no_whole_replicas(gpus, tp, pp, shape, gpus_per_node)
    if gpus_per_node is not None and gpus_per_node % tp:
        raise UserError(
            f"TP {tp} does not stay inside a node of {counted(gpus_per_node, 'GPU')}",
            "a tensor-parallel group waits for its activations in every layer, and only links inside a node are "
            "fast enough for that",
            f"use {_cuts_near(shape, gpus, tp, pp, gpus_per_node)}",
        )


def _no_whole_replicas(gpus: int, tp: int, pp: int, shape: Shape | None, gpus_per_node: int | None = None) -> UserError:
    whole = tp * pp
    return UserError(
        f"{gpus} GPUs cannot be cut into replicas of {tp} x {pp}",
        f"one replica takes TP x PP = {whole} GPUs, and DP = GPUs / (TP x PP) counts whole replicas",
        f"use {_either(_multiples(gpus, whole))} GPUs, or {_cuts_near(shape, gpus, tp, pp, gpus_per_node)}",
    )


def _cuts_near(shape: Shape | None, gpus: int, tp: int, pp: int, gpus_per_node: int | None = None) -> str:
    """The two nearest cuts of these GPUs, and of the model if one is given: 'TP 4 x PP 1 or TP 2 x PP 1'."""
    cuts = sorted(
        possible_cuts(shape, gpus, gpus_per_node),
        key=lambda cut: (abs(math.log(cut[0] / tp)) + abs(math.log(cut[1] / pp)), cut[1] != pp, cut),
    )
    return " or ".join(f"TP {t} x PP {p}" for t, p in cuts[:2])


def possible_cuts(shape: Shape | None, gpus: int, gpus_per_node: int | None = None) -> list[tuple[int, int]]:
    """Every (TP, PP) that divides these GPUs, the model if one is given, and stays inside a node if one is given."""
    tp_divides = gpus if shape is None else math.gcd(shape.heads, shape.key_value_heads, shape.d_ff, gpus)
    tp_divides = tp_divides if gpus_per_node is None else math.gcd(tp_divides, gpus_per_node)
    pp_divides = gpus if shape is None else math.gcd(shape.layers, gpus)
    return [(t, p) for t in divisors(tp_divides) for p in divisors(pp_divides) if gpus % (t * p) == 0]


def _batches_near(wanted: int, once: Layout) -> Iterator[str]:
    """The nearest that keep the micro batch; the same with another micro batch; or one nearer than those, with
    another."""
    same = _multiples(wanted, once.global_batch)
    yield _either(same)
    for batch in _multiples(wanted, once.dp):
        nearer = all(abs(batch - wanted) < abs(other - wanted) for other in same)
        if batch == wanted:
            sizes = nearest_two(divisors(batch // once.dp), once.micro_batch)
            yield f"a micro batch of {_either(sizes)}"
            return
        if nearer:
            size = nearest_two(divisors(batch // once.dp), once.micro_batch)[0]
            yield f"{batch} with a micro batch of {size}"


def nearest_two(numbers: Sequence[int], wanted: int) -> list[int]:
    return sorted(sorted(numbers, key=lambda number: (abs(math.log(number / wanted)), number))[:2])


def divisors(number: int) -> tuple[int, ...]:
    check_positive("number", number)
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def _multiples(wanted: int, of: int) -> list[int]:
    """`wanted` if it is a multiple of `of`, or those just below and above it, without zero."""
    below = wanted // of * of
    return [n for n in ((wanted,) if below == wanted else (below, below + of)) if n > 0]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)
