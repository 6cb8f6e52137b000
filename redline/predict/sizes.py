"""The nearest good sizes: multiples, numbers of ranks, and widths with their heads at constant parameters.

nearest_width(PRESETS["gpt2-xl"].shape, multiple=64, tp=1, keep_width=False)
-> {"d_model": 1536, "heads": 24, "d_ff": 6144, "layers": 52}
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from redline.core.workload import Shape
from redline.predict.flops import parameters
from redline.predict.tiles import power_of_two

WIDEST_HEAD = 256  # what flash kernels are built for
SAME_PARAMETERS = 0.01
Change = dict[str, Any]  # fields of Shape, `micro_batch` or `tp` -> the new value


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def ranks_fit(shape: Shape, tp: int) -> bool:
    """Whole heads for each; key-value heads fewer than ranks are copied, evenly."""
    kv = shape.key_value_heads
    return shape.heads % tp == 0 and shape.d_model % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def most_ranks(shape: Shape, tp: int) -> int:
    """As many as asked for, or the largest power of two below: GPUs come in twos."""
    sizes = (tp, *(1 << power for power in range(tp.bit_length() - 1, -1, -1)))
    return next(size for size in sizes if ranks_fit(shape, size))


def nearest_width(shape: Shape, *, multiple: int, tp: int, keep_width: bool, keep_tp: bool = True) -> Change | None:
    """The nearest good d_model, heads and d_ff, at constant parameters where a whole number of layers gives that. None
    where no heads fit; without `keep_tp` the ranks give way then."""
    options = list(_widths(shape, multiple, tp, keep_width))
    if not options and not keep_tp:
        options = list(_widths(shape, multiple, 1, keep_width))
    if not options:
        return None
    _, d_model, heads = min(options)
    change: Change = {"d_model": d_model, "heads": heads}
    if shape.kv_heads is not None:
        change["kv_heads"] = _kv_heads(shape, heads, tp)
    if d_model != shape.d_model:
        change["d_ff"] = nearest_multiple(shape.d_ff * d_model / shape.d_model, multiple * tp)
    change = {name: value for name, value in change.items() if value != getattr(shape, name)}
    if "d_model" in change:
        change = _at_constant_parameters(shape, change)
    ranks = most_ranks(replace(shape, **change), tp)
    return change if ranks == tp else {**change, "tp": ranks}


def _widths(shape: Shape, multiple: int, tp: int, keep_width: bool) -> Iterator[tuple[float, int, int]]:
    """(distance, d_model, heads) of shapes at most an eighth away, with aligned widths and an even number of heads."""
    first, steps = shape.d_model // multiple, math.ceil(shape.d_model / 8 / multiple)
    sizes = range(max(1, first - steps) * multiple, (first + steps + 1) * multiple + 1, multiple)
    for d_model in [shape.d_model] if keep_width else sizes:
        for width in _head_widths(shape, multiple):
            if shape.head_dim is not None:
                heads = nearest_multiple(shape.heads, math.lcm(2, tp))
            elif d_model % width:
                continue
            else:
                heads = d_model // width
            if heads % 2 == 0 and heads % tp == 0:
                yield _distance(shape, d_model, width, heads), d_model, heads


def _distance(shape: Shape, d_model: int, width: int, heads: int) -> float:
    """d_model weighs most, since it decides the parameters. Narrower heads have more scores, so they count as further
    away than wider ones. GPUs come in twos: few twos in the number of heads count a little."""
    away = math.log(width / shape.head_width)
    twos = math.log2(8 / min(8, power_of_two(heads)))
    return 10 * abs(math.log(d_model / shape.d_model)) + max(away, -4 * away) + 0.2 * twos


def _kv_heads(shape: Shape, heads: int, tp: int) -> int:
    """As many query heads per key-value head as before, or as near to it as divides."""
    wanted = heads * shape.key_value_heads / shape.heads
    fit = [kv for kv in range(1, heads + 1) if heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)]
    return min(fit, key=lambda kv: abs(math.log(kv / wanted)))


def _head_widths(shape: Shape, multiple: int) -> list[int]:
    if shape.head_dim is not None:
        return [shape.head_dim]
    return list(range(multiple, max(WIDEST_HEAD, multiple) + 1, multiple))


def nearest_multiple(size: float, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)


def _at_constant_parameters(shape: Shape, change: Change) -> Change:
    """With the layers that keep the parameters within 1 %; where no number of layers does, with those it has."""
    wanted, other = parameters(shape).total, replace(shape, **change)
    one, two = (parameters(replace(other, layers=layers, windowed_layers=None)).total for layers in (1, 2))
    layers = max(1, round((wanted - one) / (two - one)) + 1)
    if layers == shape.layers or shape.windowed_layers is not None:
        return change
    total = one + (layers - 1) * (two - one)
    return {**change, "layers": layers} if abs(total / wanted - 1) <= SAME_PARAMETERS else change
