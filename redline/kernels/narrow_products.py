"""Matmuls of 8-bit operands, and the two of an MLP beside GELU, each fused with it into one kernel.

    y = narrow_product(rows, others, rows_inverse, others_inverse, dtype=torch.bfloat16)    # [M, K] x [N, K] -> [M, N]
    slope, active = narrow_gelu_product(rows, weight, rows_inverse, weight_inverse, bias)
    of_hidden, sums = narrow_gelu_product_backward(above, turned, above_inverse, turned_inverse, slope)
    slope, active, narrow = narrow_gelu_product_in_both(..., bias, factors)     # GELU's output in 8 bits too

Tensor cores need 8-bit operands with the summed index last, so each operand is a matrix of rows; the inverses undo the
scales of their casts. torch._scaled_mm computes the matmuls, on a CPU too. Those with GELU are the ones of
`kernels/gelu_products.py` with other operands: QuACK multiplies by the inverses before it adds the bias. Without QuACK,
three kernels do the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from redline.kernels.gelu_backward import slope_of, times_slope_
from redline.kernels.gelu_products import is_there
from redline.kernels.products import operator

WHOLE = 16  # alignment of a row, in bytes


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
    """Multiply rows [M, K] by others [N, K] transposed: [M, N]. Both inverses are single numbers, or both have one per
    row. `fast` leaves partial sums in the tensor core's accumulator, which has fewer bits than fp32: suitable for a sum
    over a layer's width, not over a vocabulary or a batch. Operands that are not row-major are copied."""
    rows, others = rows.contiguous(), others.contiguous()
    if rows_inverse.dim() == 2 and not rows.is_cuda:  # a CPU accepts one scale per tensor
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


Tensors = tuple[torch.Tensor, ...]


def _forward_shapes(
    rows: torch.Tensor,
    weight: torch.Tensor,
    rows_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
    *factors: torch.Tensor,
) -> Tensors:
    slope = bias.new_empty(rows.size(0), weight.size(0))
    return slope, torch.empty_like(slope), *(torch.empty_like(slope, dtype=rows.dtype) for _ in factors)


def _through_gelu(
    rows: torch.Tensor,
    weight: torch.Tensor,
    rows_inverse: torch.Tensor,
    weight_inverse: torch.Tensor,
    bias: torch.Tensor,
    *factors: torch.Tensor,
) -> Tensors:
    if is_taken(rows, weight) and bias.data_ptr() % WHOLE == 0 and _lies_well_in_8_bits(weight, *factors):
        from redline.kernels import narrow_products_quack  # takes seconds to import, and may not be installed

        return narrow_products_quack.forward(rows, weight, rows_inverse, weight_inverse, bias, *factors)
    hidden = narrow_product(rows, weight, rows_inverse, weight_inverse, dtype=bias.dtype, fast=True, bias=bias)
    active = F.gelu(hidden, approximate="tanh")
    return slope_of(hidden).to(hidden.dtype), active, *((active * each).to(rows.dtype) for each in factors)


OPERANDS = "Tensor rows, Tensor weight, Tensor rows_inverse, Tensor weight_inverse"


@operator(f"narrow_gelu_product({OPERANDS}, Tensor bias) -> (Tensor, Tensor)", fake=_forward_shapes)
def narrow_gelu_product(*words: torch.Tensor) -> Tensors:
    """Apply a layer [F, C] to rows [M, C], with inverses [F, 1] and [M, 1]; return GELU's slope there, and tanh GELU,
    both in the bias's dtype."""
    return _through_gelu(*words)


@operator(
    f"narrow_gelu_product_in_both({OPERANDS}, Tensor bias, Tensor factors) -> (Tensor, Tensor, Tensor)",
    fake=_forward_shapes,
)
def narrow_gelu_product_in_both(*words: torch.Tensor) -> Tensors:
    """The same, and GELU's output once more in the operands' 8-bit dtype, each row multiplied by its factor [M, 1]."""
    return _through_gelu(*words)


def _backward_shapes(
    above: torch.Tensor,
    turned: torch.Tensor,
    above_inverse: torch.Tensor,
    turned_inverse: torch.Tensor,
    slope: torch.Tensor,
    *factors: torch.Tensor,
) -> Tensors:
    gradient, sums = slope.new_empty(slope.shape), slope.new_empty(slope.size(1), dtype=torch.float32)
    return gradient, sums, *(torch.empty_like(gradient, dtype=above.dtype) for _ in factors)


def _back_through_gelu(
    above: torch.Tensor,
    turned: torch.Tensor,
    above_inverse: torch.Tensor,
    turned_inverse: torch.Tensor,
    slope: torch.Tensor,
    *factors: torch.Tensor,
) -> Tensors:
    lies_well = slope.is_contiguous() and slope.data_ptr() % WHOLE == 0 and _lies_well_in_8_bits(turned, *factors)
    if is_taken(above, turned) and lies_well:
        from redline.kernels import narrow_products_quack

        return narrow_products_quack.backward(above, turned, above_inverse, turned_inverse, slope, *factors)
    gradient = narrow_product(above, turned, above_inverse, turned_inverse, dtype=slope.dtype, fast=True)
    sums = times_slope_(gradient, slope)
    return gradient, sums, *((gradient * each).to(above.dtype) for each in factors)


@operator(f"narrow_gelu_product_backward({OPERANDS}, Tensor slope) -> (Tensor, Tensor)", fake=_backward_shapes)
def narrow_gelu_product_backward(*words: torch.Tensor) -> Tensors:
    """Return the gradient of GELU's input, and the sums [F] of its columns in fp32, given the gradient [M, C] of the
    second layer's output and GELU's slope [M, F]. The weight [F, C] is that layer's, transposed."""
    return _back_through_gelu(*words)


@operator(
    f"narrow_gelu_product_backward_in_both({OPERANDS}, Tensor slope, Tensor factors) -> (Tensor, Tensor, Tensor)",
    fake=_backward_shapes,
)
def narrow_gelu_product_backward_in_both(*words: torch.Tensor) -> Tensors:
    """The same, and the gradient once more in the operands' 8-bit dtype, each row multiplied by its factor [M, 1]."""
    return _back_through_gelu(*words)


def is_taken(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """True if QuACK's kernels can be used."""
    return rows.is_cuda and is_there(rows.device) and lie_well(rows, others)


def lie_well(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """True if sizes and addresses suit QuACK. The result's rows, as long as `others` has rows, hold 16-bit numbers and
    must be aligned too. Matrices with a single row or column do not suit: their layout is ambiguous."""
    sized = rows.size(1) % WHOLE == 0 and others.size(0) % (WHOLE // 2) == 0
    return sized and all(
        one.is_contiguous() and min(one.shape) > 1 and one.data_ptr() % WHOLE == 0 for one in (rows, others)
    )


def _lies_well_in_8_bits(weight: torch.Tensor, *factors: torch.Tensor) -> bool:
    """True if the rows of the additional 8-bit output are aligned, or there is no such output."""
    return not factors or weight.size(0) % WHOLE == 0
