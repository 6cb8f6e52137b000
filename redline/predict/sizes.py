"""The nearest good sizes: multiples, numbers of ranks, and widths with their heads at constant parameters.

next(widths_nearby(PRESETS["gpt2-xl"].shape, multiple=64, head_multiple=64, tp=1, keep_width=False))
-> {"d_model": 1536, "heads": 24, "d_ff": 6144, "layers": 52}

Only nearness counts here; predict/lint_rules.py asks which of them is fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from redline.core.workload import Shape
from redline.predict.flops import parameters
from redline.predict.parallel import heads_divide
from redline.predict.tiles import power_of_two

WIDEST_HEAD = 256  # the widest that flash kernels are built for
SAME_PARAMETERS = 0.01
Change = dict[str, Any]  # fields of Shape, `micro_batch` or `tp` -> the new value


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def most_ranks(shape: Shape, tp: int) -> int:
    """Return `tp` if the heads divide among so many ranks, else the largest power of two below for which they do: GPUs
    come in powers of two."""
    sizes = (tp, *(1 << power for power in range(tp.bit_length() - 1, -1, -1)))
    return next(size for size in sizes if heads_divide(shape, size))


def widths_nearby(
    shape: Shape, *, multiple: int, head_multiple: int, tp: int, keep_width: bool, keep_tp: bool = True
) -> Iterator[Change]:
    """Yield good d_model, heads and d_ff, the nearest first, at constant parameters if a whole number of layers gives
    that. Yield nothing if no heads fit; without `keep_tp`, use fewer ranks then."""
    options = list(_widths(shape, multiple, head_multiple, tp, keep_width))
    if not options and not keep_tp:
        options = list(_widths(shape, multiple, head_multiple, 1, keep_width))
    for _, d_model, heads in sorted(options):
        change = _whole_change(shape, d_model, heads, multiple, tp)
        if change:
            yield change


def _whole_change(shape: Shape, d_model: int, heads: int, multiple: int, tp: int) -> Change:
    """Return everything that follows from another width or number of heads; only fields that differ."""
    change: Change = {"d_model": d_model, "heads": heads}
    if shape.kv_heads is not None:
        change["kv_heads"] = kv_heads_nearby(heads, heads * shape.kv_heads / shape.heads, tp)[0]
    if d_model != shape.d_model:
        change["d_ff"] = nearest_multiple(shape.d_ff * d_model / shape.d_model, multiple * tp)
    change = {name: value for name, value in change.items() if value != getattr(shape, name)}
    if "d_model" in change:
        change = _at_constant_parameters(shape, change)
    ranks = most_ranks(replace(shape, **change), tp)
    return change if ranks == tp else {**change, "tp": ranks}


def _widths(
    shape: Shape, multiple: int, head_multiple: int, tp: int, keep_width: bool
) -> Iterator[tuple[float, int, int]]:
    """Yield (distance, d_model, heads) of shapes about an eighth away at most, with aligned widths and an even number
    of heads."""
    first, steps = shape.d_model // multiple, math.ceil(shape.d_model / 8 / multiple)
    sizes = range(max(1, first - steps) * multiple, (first + steps + 1) * multiple + 1, multiple)
    for d_model in [shape.d_model] if keep_width else sizes:
        for width, heads in _splits(shape, d_model, head_multiple, math.lcm(2, tp)):
            yield _distance(shape, d_model, width, heads), d_model, heads


def _splits(shape: Shape, d_model: int, head_multiple: int, even: int) -> Iterator[tuple[int, int]]:
    """Yield (width, heads): the good numbers of heads below and above if the shape sets the head width, else all good
    widths that divide d_model."""
    if shape.head_dim is not None:
        below, above = shape.heads // even * even, round_up(shape.heads, even)
        yield from ((shape.head_dim, heads) for heads in dict.fromkeys((below, above)) if heads)
        return
    for width in range(head_multiple, max(WIDEST_HEAD, head_multiple) + 1, head_multiple):
        if d_model % (width * even) == 0:
            yield width, d_model // width


def _distance(shape: Shape, d_model: int, width: int, heads: int) -> float:
    """Return a distance. d_model weighs most, since it decides the parameters. Narrower heads have more scores, so they
    count as further away than wider ones. GPUs come in powers of two, so few factors of two in the number of heads add
    a little."""
    away = math.log(width / shape.head_width)
    twos = math.log2(8 / min(8, power_of_two(heads)))
    more = abs(math.log(heads / shape.heads)) if shape.head_dim is not None else 0.0
    return 10 * abs(math.log(d_model / shape.d_model)) + max(away, -4 * away) + 0.2 * twos + more


def kv_heads_nearby(heads: int, wanted: float, tp: int) -> list[int]:
    """Return the numbers of key-value heads that divide the heads and divide among the ranks, and are one or even, the
    nearest to `wanted` first; if there are none, the number of heads."""
    fit = [kv for kv in range(1, heads + 1) if heads % kv == 0 and kv % tp == 0 and (kv == 1 or kv % 2 == 0)]
    return sorted(fit or [heads], key=lambda kv: (abs(math.log(kv / wanted)), -kv))


def nearest_multiple(size: float, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)


def _at_constant_parameters(shape: Shape, change: Change) -> Change:
    """Add the number of layers that keeps the parameters within 1 %, if there is one. A shape with windowed layers
    keeps its layers."""
    wanted, other = parameters(shape).total, replace(shape, **change)
    one, two = (parameters(replace(other, layers=layers, windowed_layers=None)).total for layers in (1, 2))
    layers = max(1, round((wanted - one) / (two - one)) + 1)
    if layers == shape.layers or shape.windowed_layers is not None:
        return change
    total = one + (layers - 1) * (two - one)
    return {**change, "layers": layers} if abs(total / wanted - 1) <= SAME_PARAMETERS else change
