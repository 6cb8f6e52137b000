"""Products of two matrices in 16 bits, by the algorithm that is fastest here (`kernels/cublaslt.py`), or by torch.

    y = product(rows, weight.t(), rows.dtype)                     # forward; without a bias
    y = product_and_bias(rows, weight, bias)
    of_weight = product(above.t(), rows, torch.float32)           # straight into fp32: no cast afterwards
    hidden, active = product_and_gelu(rows, weight, bias)         # GELU on the way out, and what it was given

torch does them on a CPU, of sizes that have no fast kernels to choose from, and where algorithms must be deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels.cublaslt import BIAS, DEFAULT, GELU_AUX_BIAS, Library, library, takes

# Not torch.library.custom_op: what that does around a call takes 15 us of the host, this takes 5. It would refuse to
# differentiate them, which only hand-written backward passes do here.
LIBRARY = torch.library.Library("redline", "FRAGMENT")
Operator = Callable[..., Any]


def operator(schema: str, fake: Operator) -> Callable[[Operator], Operator]:
    """The function as an operator that the compiler calls and does not look into; `fake` gives the shapes alone."""
    name = schema.partition("(")[0]

    def register(run: Operator) -> Operator:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # opcheck holds them to it
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
    """a [M, K] b [K, N] in `dtype`, fp32 or the operands'; either may lie transposed."""
    lt = _chosen(a, b) if dtype in (a.dtype, torch.float32) else None
    return (a @ b).to(dtype, copy=False) if lt is None else lt.product(a, b, out_dtype=dtype, epilogue=DEFAULT)


@operator("product_and_bias(Tensor rows, Tensor weight, Tensor bias) -> Tensor", fake=_like_a_layers)
def product_and_bias(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """rows [M, K] through a layer [N, K]."""
    lt = _chosen(rows, weight, bias)
    if lt is None:
        return torch.addmm(bias, rows, weight.t())
    return lt.product(rows, weight.t(), bias=bias, epilogue=BIAS)


@operator(
    "product_and_gelu(Tensor rows, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
    fake=lambda *given: (_like_a_layers(*given), _like_a_layers(*given)),
)
def product_and_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [M, K] through a layer [N, K], and tanh GELU of that, which reads it before it is rounded to 16 bits."""
    lt = _chosen(rows, weight, bias)
    if lt is None:
        hidden = torch.addmm(bias, rows, weight.t())
        return hidden, F.gelu(hidden, approximate="tanh")
    hidden = rows.new_empty(rows.size(0), weight.size(0))
    return hidden, lt.product(rows, weight.t(), bias=bias, epilogue=GELU_AUX_BIAS, aux=hidden)


def _chosen(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Library | None:
    if not a.is_cuda or torch.are_deterministic_algorithms_enabled() or not takes(a, b):
        return None
    if bias is not None and (bias.dtype != a.dtype or bias.data_ptr() % 16):
        return None
    return library()
