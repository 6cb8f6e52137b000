"""Matrix products whose operands have 8 bits.

    values, inverse = narrowed(weight)                     # e4m3, and the factor that undoes the scale
    y = product(rows, values, rows_inverse, inverse, dtype=torch.bfloat16)      # [M, K] x [N, K] -> [M, N]

A scale is a power of two, so that the cast is all that rounds: with it a tensor's largest number ends in the format's
last two octaves. One for a whole tensor is enough, since e4m3 has 15 octaves below them at full precision and rounds
a number by its own size (docs/fp8.md has the errors). A tensor of zeros stays zeros. One with an infinity or a NaN
becomes all NaN, in the loss and in the gradient's norm, where the step looks for them.

Tensor cores take 8-bit operands with the summed index last, so each operand is a matrix of rows, and what is summed
over rows is transposed first. torch._scaled_mm does the products, on a CPU too.
"""

from __future__ import annotations

import torch

from redline.kernels.cross_entropy import GRADIENT_FACTOR, cross_entropy_narrow
from redline.kernels.transpose import transposed

E4M3 = torch.float8_e4m3fn
LARGEST_OF_E4M3 = 448.0
SMALLEST_LARGEST = 2.0**-100  # the largest number of a tensor of zeros is taken for this: its scale stays finite

Narrowed = tuple[torch.Tensor, torch.Tensor]


def narrowed(tensor: torch.Tensor) -> Narrowed:
    """In e4m3, with the factor that undoes the scale, on the device."""
    largest = tensor.abs().amax().float().clamp(min=SMALLEST_LARGEST)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST_OF_E4M3 / largest)))
    return (tensor.float() * scale).to(E4M3), scale.reciprocal()


def product(
    rows: torch.Tensor,
    others: torch.Tensor,
    rows_inverse: torch.Tensor,
    others_inverse: torch.Tensor,
    *,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """rows [M, K] times others [N, K] transposed: [M, N]. `fast` leaves partial sums in the tensor core's accumulator,
    which has fewer bits than fp32: fit for a sum over a layer's width, not for one over a vocabulary or a batch."""
    result: torch.Tensor = torch._scaled_mm(
        rows, others.t(), scale_a=rows_inverse, scale_b=others_inverse, out_dtype=dtype, use_fast_accum=fast
    )
    return result


def head_gradients(
    features: Narrowed,
    weight: Narrowed,
    turned_weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses [N] of features [N, C] and a head [V, C], and what they give either, up to the mean's 1/N. The loss kernel
    writes its gradient in 8 bits at once; it is the only one of the tensors whose range is known beforehand."""
    rows, inverse = features
    logits = product(rows, weight[0], inverse, weight[1], dtype=dtype, fast=True)
    losses, gradient = cross_entropy_narrow(logits, labels, vocab)
    del logits  # before the transpose is made
    undo = torch.full_like(inverse, 1 / GRADIENT_FACTOR)
    of_features = product(gradient, turned_weight, undo, weight[1], dtype=dtype)
    of_weight = product(transposed(gradient), transposed(rows), undo, inverse, dtype=dtype)
    return losses, of_features, of_weight
