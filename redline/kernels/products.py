"""Matmuls in 16 bits, by the algorithm that is fastest on this device (`kernels/cublaslt.py`), or by torch.

    y = product(rows, weight.t(), rows.dtype)                     # forward; without a bias
    y = product_and_bias(rows, weight, bias)
    of_weight = product(above.t(), rows, torch.float32)           # straight into fp32: no cast afterwards
    hidden, active = product_and_gelu(rows, weight, bias)         # GELU's input, and GELU as the epilogue

torch computes them on a CPU, for sizes without fast kernels to choose from, and if algorithms must be deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels.cublaslt import BIAS, DEFAULT, GELU_AUX_BIAS, Library, library, takes

# Not torch.library.custom_op, which adds 15 us of host time to a call; this adds 5. custom_op also refuses to
# differentiate an operator, but here only hand-written backward passes do that.
LIBRARY = torch.library.Library("redline", "FRAGMENT")
Operator = Callable[..., Any]


def operator(schema: str, fake: Operator) -> Callable[[Operator], Operator]:
    """Register a function as an operator that the compiler calls without tracing it; `fake` returns only the shapes."""
    name = schema.partition("(")[0]

    def register(run: Operator) -> Operator:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # verified by opcheck
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"redline::{name}", fake, lib=LIBRARY)
        found: Operator = getattr(torch.ops.redline, name).default
        return found

    return register


def _like_a_layers(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.size(0), weight.size(0))


@operator(
    "product(Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    fake=lambda a, b, dtype: a.new_empty(a.size(0), b.size(1), dtype=dtype),
)
def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] by b [K, N] into `dtype`, fp32 or the operands' own; either may be transposed."""
    lt = _chosen(a, b) if dtype in (a.dtype, torch.float32) else None
    found = None if lt is None else lt.product(a, b, out_dtype=dtype, epilogue=DEFAULT)
    return (a @ b).to(dtype, copy=False) if found is None else found


@operator("product_and_bias(Tensor rows, Tensor weight, Tensor bias) -> Tensor", fake=_like_a_layers)
def product_and_bias(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Apply a layer [N, K] to rows [M, K]."""
    lt = _chosen(rows, weight, bias)
    found = None if lt is None else lt.product(rows, weight.t(), bias=bias, epilogue=BIAS)
    return torch.addmm(bias, rows, weight.t()) if found is None else found


@operator(
    "product_and_gelu(Tensor rows, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
    fake=lambda *given: (_like_a_layers(*given), _like_a_layers(*given)),
)
def product_and_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a layer [N, K] to rows [M, K]; return its output, and tanh GELU of it. cuBLASLt applies GELU before the
    output is rounded to 16 bits."""
    lt = _chosen(rows, weight, bias)
    if lt is not None:
        hidden = rows.new_empty(rows.size(0), weight.size(0))
        active = lt.product(rows, weight.t(), bias=bias, epilogue=GELU_AUX_BIAS, aux=hidden)
        if active is not None:
            return hidden, active
    hidden = torch.addmm(bias, rows, weight.t())
    return hidden, F.gelu(hidden, approximate="tanh")


def _chosen(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Library | None:
    if not a.is_cuda or torch.are_deterministic_algorithms_enabled():
        return None
    if not (a.numel() and b.numel() and takes(a, b)):
        return None
    if bias is not None and (bias.dtype != a.dtype or bias.data_ptr() % 16):
        return None
    return library(a.device)
