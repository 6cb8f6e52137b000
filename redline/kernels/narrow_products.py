"""Products of 8-bit operands, and the two of an MLP that have GELU behind them, each as one kernel.

    y = narrow_product(rows, others, rows_inverse, others_inverse, dtype=torch.bfloat16)    # [M, K] x [N, K] -> [M, N]
    hidden, active = narrow_gelu_product(rows, weight, rows_inverse, weight_inverse, bias)
    of_hidden, sums = narrow_gelu_product_backward(above, turned, above_inverse, turned_inverse, hidden)

Tensor cores take 8-bit operands with the summed index last, so each is a matrix of rows; the inverses undo the scales
of their casts. torch._scaled_mm does the products, on a CPU too. Those with GELU are `kernels/gelu_products.py`'s with
other operands: QuACK multiplies by the inverses before it adds the bias, and where it is not, three kernels do it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redline.kernels.gelu_backward import gelu_backward_
from redline.kernels.gelu_products import is_there
from redline.kernels.products import operator

WHOLE = 16  # bytes at which a row must begin


def narrow_product(
    rows: torch.Tensor,
    others: torch.Tensor,
    rows_inverse: torch.Tensor,
    others_inverse: torch.Tensor,
    *,
    dtype: torch.dtype,
    fast: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows [M, K] times others [N, K] transposed: [M, N]; both inverses are one number, or both one per row. `fast`
    leaves partial sums in the tensor core's accumulator, which has fewer bits than fp32: fit for a sum over a layer's
    width, not for one over a vocabulary or a batch. What does not lie in rows is copied."""
    rows, others = rows.contiguous(), others.contiguous()
    if rows_inverse.dim() == 2 and not rows.is_cuda:  # a CPU takes one scale per tensor
        one = torch.ones((), device=rows.device)
        wide: torch.Tensor = torch._scaled_mm(rows, others.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        wide = wide * rows_inverse * others_inverse.t()
        return (wide if bias is None else wide + bias).to(dtype)
    result: torch.Tensor = torch._scaled_mm(
        rows,
        others.t(),
        scale_a=rows_inverse,
        scale_b=others_inverse.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


def _forward_shapes(
    rows: torch.Tensor,
    weight: torch.Tensor,
    rows_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = bias.new_empty(rows.size(0), weight.size(0))
    return hidden, torch.empty_like(hidden)


@operator(
    "narrow_gelu_product(Tensor rows, Tensor weight, Tensor rows_inverse, Tensor weight_inverse, Tensor bias)"
    " -> (Tensor, Tensor)",
    fake=_forward_shapes,
)
def narrow_gelu_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    rows_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [M, C] through a layer [F, C], with inverses [M, 1] and [F, 1], and tanh GELU of that; both have the bias's
    type."""
    if is_taken(rows, weight) and bias.data_ptr() % WHOLE == 0:
        from redline.kernels.narrow_products_quack import (
            forward,
        )  # takes seconds to import, and is not there everywhere

        return forward(rows, weight, rows_inverse, weight_inverse, bias)
    hidden = narrow_product(rows, weight, rows_inverse, weight_inverse, dtype=bias.dtype, fast=True, bias=bias)
    return hidden, F.gelu(hidden, approximate="tanh")


def _backward_shapes(
    above: torch.Tensor,
    turned: torch.Tensor,
    above_inverse: torch.Tensor,
    turned_inverse: torch.Tensor,
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.size(1), dtype=torch.float32)


@operator(
    "narrow_gelu_product_backward(Tensor above, Tensor turned, Tensor above_inverse, Tensor turned_inverse,"
    " Tensor hidden) -> (Tensor, Tensor)",
    fake=_backward_shapes,
)
def narrow_gelu_product_backward(
    above: torch.Tensor,
    turned: torch.Tensor,
    above_inverse: torch.Tensor,
    turned_inverse: torch.Tensor,
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """above [M, C] back through the second layer and through GELU, whose input was `hidden` [M, F], with the sums [F]
    of its columns in fp32. `turned` [F, C] is the layer's weight, transposed."""
    if is_taken(above, turned) and hidden.is_contiguous() and hidden.data_ptr() % WHOLE == 0:
        from redline.kernels.narrow_products_quack import backward

        return backward(above, turned, above_inverse, turned_inverse, hidden)
    gradient = narrow_product(above, turned, above_inverse, turned_inverse, dtype=hidden.dtype, fast=True)
    return gradient, gelu_backward_(gradient, hidden)


def is_taken(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """By QuACK, here."""
    return rows.is_cuda and is_there(rows.device) and lie_well(rows, others)


def lie_well(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """What comes out has rows as well, of 16-bit numbers: as many as `others` has rows. Of a single row nobody can tell
    whether it is one."""
    sized = rows.size(1) % WHOLE == 0 and others.size(0) % (WHOLE // 2) == 0
    return sized and all(
        one.is_contiguous() and min(one.shape) > 1 and one.data_ptr() % WHOLE == 0 for one in (rows, others)
    )
