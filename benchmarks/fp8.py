"""8-bit matmuls beside bf16 at a model's sizes on a CUDA device, and the whole step with and without them.

    python benchmarks/fp8.py [--workload gpt2] [--micro-batch 64] [--json]       # a minute: single matmuls
    python benchmarks/fp8.py --gelu                                              # with GELU epilogues (fp8_gelu.py)
    python benchmarks/fp8.py --step [--gelu] [--rounds 5]                        # the step, five recipes in turns

For every matmul of a layer and of the head: bf16, 8 bits with operands cast beforehand, 8 bits including the casts, and
what a cast or a transpose takes by itself, in milliseconds (median of events around single calls, random numbers).
`gain` is what 8 bits with their casts save in a whole step, over all layers; below zero they do not pay. The rungs
leave the layers' weight gradients in bf16; they are timed all the same. Casts are compiled alone here; in a step the
compiler fuses some of them into the preceding kernel, so a step can gain more than the sum. With --step the recipes
share one process and take turns of ten steps, so that the card's temperature is the same for all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fp8_gelu import time_gelu
from kernels import FAST, milliseconds, random
from made import made
from step import time_recipes

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.engine.probe import versions
from redline.kernels.cross_entropy import GRADIENT_FACTOR, cross_entropy_, cross_entropy_narrow
from redline.kernels.narrow_products import narrow_product
from redline.kernels.transpose import transposed
from redline.model.fp8 import narrowed
from redline.predict.gemms import Gemm, linear_gemms
from redline.rungs import plan_of
from redline.workloads import resolve_workload

BASE = (*FAST, "fused-backward")
RECIPES = {
    "bf16": BASE,
    "fp8-head": (*BASE, "fp8-head"),
    "fp8-linears": (*BASE, "fp8-linears"),
    "both": (*BASE, "fp8-head", "fp8-linears"),
    "both, without fused-backward": (*FAST, "fp8-head", "fp8-linears"),
}
FUSED = (*BASE, "flash4-backward", "tuned-matmuls", "fused-matmuls")
FUSED_RECIPES = {
    "bf16": FUSED,
    "fp8-head": (*FUSED, "fp8-head"),
    "and fp8-linears": (*FUSED, "fp8-head", "fp8-linears"),
    "and fp8-mlps": (*FUSED, "fp8-head", "fp8-linears", "fp8-mlps"),
    "and cuda-graphs": (*FUSED, "cuda-graphs", "fp8-head", "fp8-linears", "fp8-mlps"),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Milliseconds of one matmul."""

    bf16: float
    fp8: float
    """In 8 bits, with operands cast beforehand."""
    whole: float
    """In 8 bits, including the casts, and transposes where the sum runs over rows."""
    gain: float
    """Saved in a whole step: (bf16 - whole) * calls."""
    calls: int


def time_products(shape: Shape, plan: Plan, micro_batch: int) -> dict[str, dict[str, Any]]:
    """Time every matmul. Layers have a scale per row of their operands, the head and all weight gradients one scale.
    Weight gradients need both operands transposed."""
    found = {}
    for gemm in linear_gemms(shape, plan, micro_batch=micro_batch):
        found[f"{gemm.where} {gemm.direction}"] = vars(time_product(gemm))
        torch.cuda.empty_cache()
    return found


def time_product(gemm: Gemm) -> Timed:
    torch._dynamo.reset()  # Dynamo compiles a function for a few shapes only, and then runs it eagerly
    by_rows = gemm.where != "head" and gemm.direction != "wgrad"
    fast = gemm.direction == "forward" or by_rows
    turned = gemm.direction == "wgrad"  # both operands come with the summed index first
    sizes = [(gemm.k, side) if turned else (side, gemm.k) for side in (gemm.m, gemm.n)]
    rows, others = (large_random(*size) for size in sizes)
    wide = milliseconds((lambda a, b: a.t() @ b) if turned else (lambda a, b: a @ b.t()), (rows, others))
    if gemm.where == "head" and gemm.direction != "forward":
        rows = rows.to(torch.float8_e5m2)  # as the loss kernel writes it

    def prepared(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_narrow = tensor.dtype != torch.bfloat16
        values, inverse = (tensor, torch.ones((), device=tensor.device)) if is_narrow else cast(tensor, by_rows)
        return (transposed(values) if turned else values), inverse

    def multiply(a: torch.Tensor, b: torch.Tensor, a_inverse: torch.Tensor, b_inverse: torch.Tensor) -> torch.Tensor:
        return narrow_product(a, b, a_inverse, b_inverse, dtype=torch.bfloat16, fast=fast)

    def whole(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (values, inverse), (other, other_inverse) = prepared(a), prepared(b)
        return multiply(values, other, inverse, other_inverse)

    with_casts = milliseconds(whole, (rows, others))
    (values, inverse), (other, other_inverse) = prepared(rows), prepared(others)
    narrow = milliseconds(multiply, (values, other, inverse, other_inverse))
    return Timed(bf16=wide, fp8=narrow, whole=with_casts, gain=gemm.count * (wide - with_casts), calls=gemm.count)


cast = torch.compile(narrowed, dynamic=False)


def large_random(rows: int, columns: int) -> torch.Tensor:
    """Draw bf16 numbers without an fp32 copy of the whole tensor."""
    made = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for piece in made.split(4096):
        piece.copy_(random(*piece.shape))
    return made


def time_passes(shape: Shape, plan: Plan, tokens: int) -> dict[str, dict[str, Any]]:
    """Time what runs between matmuls: the head's loss kernels, the transpose of their gradient, an MLP's casts."""
    torch._dynamo.reset()
    logits = large_random(tokens, plan.vocab_rows(shape.vocab))
    targets = torch.randint(shape.vocab, (tokens,), device="cuda")
    found: dict[str, dict[str, Any]] = {
        "loss kernel": {
            "in place, bf16": milliseconds(cross_entropy_, (logits, targets, shape.vocab)),
            "e5m2": milliseconds(cross_entropy_narrow, (logits, targets, shape.vocab)),
        }
    }
    gradient = (logits[: tokens // 2] * (1 / GRADIENT_FACTOR)).to(torch.float8_e5m2)
    del logits
    turn = torch.compile(lambda matrix: matrix.t().contiguous(), dynamic=False)
    found["transpose, half of the gradient"] = {
        "kernel": milliseconds(transposed, (gradient,)),
        "compiled": milliseconds(turn, (gradient,)),
        "floor (clone)": milliseconds(torch.clone, (gradient,)),
    }
    del gradient
    x = random(tokens, shape.d_ff)
    casts: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("one scale", lambda t: cast(t, False)),
        ("by rows", lambda t: cast(t, True)),
        ("floor (clone)", torch.clone),
    )
    found[f"cast of [{tokens}, {shape.d_ff}]"] = {name: milliseconds(run, (x,)) for name, run in casts}
    return found


def lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, figures in found.items():
        told = (f"{figure:,.4f}" if isinstance(figure, float) else str(figure) for figure in figures.values())
        yield f"{name:52}" + "".join(f"  {what} {figure}" for what, figure in zip(figures, told, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="gpt2", help="a preset (default gpt2)")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--gelu", action="store_true", help="a block's products beside fused-matmuls' kernels")
    parser.add_argument("--step", action="store_true", help="the whole step instead of single products")
    parser.add_argument("--rounds", type=int, default=5, help="of ten steps each (default 5)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("there is no CUDA device with fp8 tensor cores here", file=sys.stderr)
        return 2
    workload, plan = resolve_workload(asked.workload), plan_of(BASE)
    shape = workload.decoder
    if asked.step:
        found: dict[str, dict[str, Any]]
        recipes = FUSED_RECIPES if asked.gelu else RECIPES
        found = time_recipes(workload, recipes, asked.micro_batch, asked.rounds, torch.device("cuda"))
    elif asked.gelu:
        found = time_gelu(shape, asked.micro_batch * shape.sequence)
    else:
        found = time_products(shape, plan, asked.micro_batch)
        found |= time_passes(shape, plan, asked.micro_batch * shape.sequence)
    if asked.json:
        print(json.dumps({**made(), "device": torch.cuda.get_device_name(), "versions": versions(), "found": found}))
        return 0
    for line in lines(found):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
