"""What `fp8-linears` brings beside `fused-matmuls`, kernel by kernel: the part of benchmarks/fp8.py behind --gelu.

    python benchmarks/fp8.py --gelu [--workload gpt2] [--micro-batch 64] [--json]   # two minutes, mostly compiling

Each matmul of a block runs in 16 bits as in `tuned-matmuls` and `fused-matmuls`, in 8 bits by torch, and in 8 bits by
QuACK with every tile below: milliseconds, medians of calls in turns, with operands cast beforehand. `cast` is the cast
of the larger operand, by itself; in a step the compiler fuses it into the norm's kernel, except for the gradient's.
`off` is the relative error of the result's first rows against the fp64 product of the same 8-bit numbers, and
`from 16 bits` against that of the numbers they were cast from. A call that fails reports why; the others still run.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from kernels import random

from redline.core.workload import Shape
from redline.kernels.gelu_backward import slope_of
from redline.kernels.gelu_products import gelu_product, gelu_product_backward
from redline.kernels.narrow_products import narrow_product
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.model.fp8 import narrowed, operands, scale_beforehand

LOOKS, WARM_UPS, BUSY_CYCLES = 20, 3, 200_000
LOOKED_AT = 2048  # rows whose error is computed
TILES = ((128, 192, True, (1, 2)), (128, 160, True, (1, 2)), (128, 128, True, (1, 2)))
TILES += ((128, 256, False, (1, 2)), (256, 128, False, (2, 1)))

Words = tuple[torch.Tensor, ...]
Call = Callable[[], Any]
Found = dict[str, dict[str, Any]]


def time_gelu(shape: Shape, tokens: int) -> Found:
    found: Found = {}
    for make in (time_first, time_second, time_qkv, time_after_gelu):
        found |= make(shape, tokens)
        torch.cuda.empty_cache()
    return found


def time_first(shape: Shape, tokens: int) -> Found:
    x, weight = random(tokens, shape.d_model), random(shape.d_ff, shape.d_model) * 0.03
    bias, words = random(shape.d_ff) * 0.1, operands(x, weight)
    calls: dict[str, Call] = {
        "16 bits, QuACK": lambda: gelu_product(x, weight, bias),
        "16 bits, cuBLASLt": lambda: product_and_gelu(x, weight, bias)[0],  # keeps GELU's input, the others its slope
        "8 bits, torch, no GELU": lambda: narrow_product(*words, dtype=torch.bfloat16, fast=True, bias=bias),
        "cast": lambda: compiled_cast(x),
    }
    calls |= by_quack(lambda module, tile: module.Forward(tile, *words, bias), (*words, bias))
    both = (*words, bias, scale_beforehand(x, weight, bias))
    made = by_quack(lambda module, tile: module.Forward(tile, *both), both)
    calls |= {f"{name} and 8 bits out": call for name, call in made.items()}
    wanted = {name: before + bias.double() for name, before in in_fp64(x, weight, words).items()}

    def error(result: Any) -> dict[str, float]:
        first, *rest = result if isinstance(result, tuple) else (result,)
        told = {name: off(first, slope_of(one) if rest else one) for name, one in wanted.items()}
        gelu = F.gelu(wanted["off"], approximate="tanh")
        for name, one in zip(("GELU off", "8 bits off"), rest, strict=False):
            told[name] = off(one if name == "GELU off" else one[:LOOKED_AT].double() / both[-1][:LOOKED_AT], gelu)
        return told

    return {f"up + GELU: {name}": told for name, told in measured(calls, error).items()}


def time_second(shape: Shape, tokens: int) -> Found:
    above, weight = random(tokens, shape.d_model), random(shape.d_model, shape.d_ff) * 0.03
    slope, words = random(tokens, shape.d_ff), operands(above, weight.t())

    calls: dict[str, Call] = {
        "16 bits, QuACK": lambda: gelu_product_backward(above, weight, slope),
        "8 bits, torch, no GELU": lambda: narrow_product(*words, dtype=torch.bfloat16, fast=True),
        "cast": lambda: compiled_cast(above),
    }
    for turned in (False, True):
        made = by_quack(
            lambda module, tile, turned=turned: module.Backward(tile, turned, *words, slope), (*words, slope)
        )
        calls |= {f"{name}{', turned' if turned else ''}": call for name, call in made.items()}
    both = (*words, slope, scale_beforehand(above, weight.t()))
    made = by_quack(lambda module, tile: module.Backward(tile, False, *both), both)
    calls |= {f"{name} and 8 bits out": call for name, call in made.items()}
    products = in_fp64(above, weight.t(), words)
    wanted = {name: one * slope[:LOOKED_AT].double() for name, one in products.items()}
    sums = gelu_product_backward(above, weight, slope)[1].double()

    def error(result: Any) -> dict[str, float]:
        if isinstance(result, torch.Tensor):
            return {name: off(result, one) for name, one in products.items()}
        told = {name: off(result[0], one) for name, one in wanted.items()} | {"sums from 16 bits": off(result[1], sums)}
        if len(result) == 3:
            told["8 bits off"] = off(result[2][:LOOKED_AT].double() / both[-1][:LOOKED_AT], wanted["off"])
        return told

    return {f"down dgrad + GELU': {name}": told for name, told in measured(calls, error).items()}


def time_qkv(shape: Shape, tokens: int) -> Found:
    x, weight = random(tokens, shape.d_model), random(3 * shape.d_model, shape.d_model) * 0.03
    bias, words = random(3 * shape.d_model) * 0.1, operands(x, weight)
    calls: dict[str, Call] = {
        "16 bits, cuBLASLt": lambda: product_and_bias(x, weight, bias),
        "8 bits, torch": lambda: narrow_product(*words, dtype=torch.bfloat16, fast=True, bias=bias),
    }
    wanted = {name: before + bias.double() for name, before in in_fp64(x, weight, words).items()}
    found = measured(calls, lambda result: {name: off(result, one) for name, one in wanted.items()})
    return {f"qkv: {name}": told for name, told in found.items()}


def time_after_gelu(shape: Shape, tokens: int) -> Found:
    """Time the matmuls that read the extra 8-bit outputs: the second layer's forward and the first layer's input
    gradient, which have the same sizes."""
    x, weight = random(tokens, shape.d_ff), random(shape.d_model, shape.d_ff) * 0.03
    words = operands(x, weight)
    calls: dict[str, Call] = {
        "16 bits, cuBLASLt": lambda: product(x, weight.t(), torch.bfloat16),
        "8 bits, torch": lambda: narrow_product(*words, dtype=torch.bfloat16, fast=True),
        "cast": lambda: compiled_cast(x),
    }
    wanted = in_fp64(x, weight, words)
    found = measured(calls, lambda result: {name: off(result, one) for name, one in wanted.items()})
    return {f"down, or up dgrad: {name}": told for name, told in found.items()}


compiled_cast = torch.compile(lambda tensor: narrowed(tensor, by_rows=True), dynamic=False)


def by_quack(make: Callable[[Any, Any], Callable[..., Any]], words: Words) -> dict[str, Call]:
    """Return a call for every tile. Its first use compiles the kernel, so that a failure affects that tile alone."""

    def call_of(rows: int, columns: int, in_turns: bool, cluster: tuple[int, int]) -> Call:
        @functools.cache
        def kernel() -> Callable[..., Any]:
            from redline.kernels import narrow_products_quack as module

            return make(module, module.tile(rows, columns, in_turns=in_turns, cluster=cluster))

        return lambda: kernel()(*words)

    return {f"8 bits, QuACK {one[0]}x{one[1]}{' in turns' if one[2] else ''}": call_of(*one) for one in TILES}


def in_fp64(rows: torch.Tensor, others: torch.Tensor, words: Words) -> dict[str, torch.Tensor]:
    """Return the first rows of two products: of the 8-bit numbers, and of the numbers they were cast from."""
    values, other_values, inverse, other_inverse = words
    some = slice(0, LOOKED_AT)
    narrow = (values[some].double() * inverse[some]) @ (other_values.double() * other_inverse).t()
    return {"off": narrow, "from 16 bits": rows[some].double() @ others.double().t()}


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    mine = found[:LOOKED_AT].double() if found.dim() == 2 else found.double()
    return float((mine - wanted).norm() / wanted.norm())


def measured(calls: Mapping[str, Call], error: Callable[[Any], dict[str, float]]) -> Found:
    """Time the calls in turns and compute their errors; a call that fails gets its reason instead."""
    found: Found = {}
    for name, call in calls.items():
        try:
            for _ in range(WARM_UPS):
                result = call()
            torch.cuda.synchronize()
            found[name] = {} if name == "cast" else error(result)
        except Exception as failure:  # noqa: BLE001 (of one kernel, and the others are still wanted)
            found[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    works = {name: call for name, call in calls.items() if "failed" not in found[name]}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(LOOKS):
        for name, call in works.items():
            times[name].append(milliseconds_of(call))
    return {name: ({"ms": statistics.median(times[name])} if name in times else {}) | found[name] for name in calls}


def milliseconds_of(call: Call) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)  # otherwise the launch would be timed
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)
