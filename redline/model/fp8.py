"""Matrix products whose operands have 8 bits.

    values, inverse = narrowed(weight)                     # e4m3, and the factor that undoes the scale
    y = narrow_product(rows, values, rows_inverse, inverse, dtype=torch.bfloat16)   # kernels/narrow_products.py
    narrow_layers(model.h, dtype=torch.bfloat16)           # every nn.Linear in it becomes an Fp8Linear

A scale is a power of two, so that the cast is all that rounds: with it the largest number ends in the format's last two
octaves. Layers have one scale per row, which the kernel that writes a row finds on the way. For the head one for a
whole tensor is enough, since e4m3 has 14 octaves at full precision and rounds a number by its own size (docs/fp8.md has
the errors). Zeros stay zeros. What shares a scale with an infinity or a NaN becomes NaN: that reaches the loss and the
gradients' norm, where the step looks for it.

Tensor cores take 8-bit operands with the summed index last, so what is summed over rows is transposed first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redline.kernels.cross_entropy import GRADIENT_FACTOR, cross_entropy_narrow
from redline.kernels.narrow_products import narrow_product
from redline.kernels.transpose import transposed
from redline.model.tuned import exchange_layers

E4M3 = torch.float8_e4m3fn
LARGEST_SLOPE = 1.13  # of GELU
ROUNDED_UP = (1 + 2.0**-4) ** 2  # by so much a product of e4m3 numbers may exceed that of what they were made of
SMALLEST_LARGEST = 2.0**-100  # the largest number of a tensor of zeros is taken for this: its scale stays finite

MANTISSA = 23  # bits of fp32
BEYOND_448 = (
    2**21 - 1
)  # added to the bits of 1.75 x 2^n it fills the mantissa, to those of anything larger it overflows
OCTAVE_OF_448 = 2 * 127 + 8

Narrowed = tuple[torch.Tensor, torch.Tensor]


def narrowed(tensor: torch.Tensor, by_rows: bool = False) -> Narrowed:
    """In e4m3, with the factors that undo the scale, on the device: one, or one for each row [M, 1]. The largest number
    is found in fp32: the compiler may make scale and factor in two kernels, of which one has the number as it was found
    and the other as it was stored, and in 16 bits those are two numbers."""
    sizes = tensor.float().abs()
    scale, inverse = scales_of(sizes.amax(dim=1, keepdim=True) if by_rows else sizes.amax())
    return (tensor.float() * scale).to(E4M3), inverse


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that takes this number into the format's last two octaves."""
    return scales_of(largest)[0]


def scales_of(largest: torch.Tensor) -> Narrowed:
    """That, and its inverse. By the bits of the number: logarithms of two kernels might round to either side."""
    bits = largest.float().clamp(min=SMALLEST_LARGEST).view(torch.int32)
    octave = (bits + BEYOND_448) >> MANTISSA  # the exponent, one more beyond 448's mantissa
    undefined = 0 * largest.float()  # NaN of what is no finite number
    scale, inverse = ((exponent << MANTISSA).view(torch.float32) for exponent in (OCTAVE_OF_448 - octave, octave - 8))
    return scale + undefined, inverse + undefined


# --- the blocks' layers -----------------------------------------------------------------------------------------------


def operands(rows: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a product by rows: both in 8 bits, then what undoes their scales."""
    (values, inverse), (other_values, other_inverse) = narrowed(rows, by_rows=True), narrowed(others, by_rows=True)
    return values.contiguous(), other_values.contiguous(), inverse, other_inverse


def scale_beforehand(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Powers of two [M, 1] that keep every row of rows [M, K] x weight [N, K], and GELU of it or its gradient, inside
    e4m3, whatever will come out: no sum of products is larger than the lengths of its two rows multiplied. A row's
    largest number is some octaves below that (sqrt(K) / 4 for random ones), of which e4m3 has 14."""
    bound = LARGEST_SLOPE * ROUNDED_UP * rows.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1).amax()
    return scale_of(bound if bias is None else bound + bias.float().abs().amax())


def forward_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """rows [M, K] through a layer [N, K]."""
    return narrow_product(*operands(rows, weight), dtype=dtype, fast=True, bias=bias)


def product_of_narrow(
    values: torch.Tensor,
    scale: torch.Tensor,
    others: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of rows [M, K] that were written in 8 bits, times others [N, K] transposed."""
    other_values, other_inverse = narrowed(others, by_rows=True)
    return narrow_product(values, other_values, scale.reciprocal(), other_inverse, dtype=dtype, fast=True, bias=bias)


def input_gradient(above: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """above [M, N] back through the layer: [M, K]. The weight's rows are its columns now, and have scales of their
    own."""
    return narrow_product(*operands(above, weight.t()), dtype=dtype, fast=True)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        rows = x if x.dtype == dtype else x.to(dtype)
        ctx.save_for_backward(rows, weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return forward_product(rows, weight, None if bias is None else bias.to(dtype), dtype)

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_x, of_bias = ctx.dtypes
        return (
            input_gradient(above, weight, above.dtype).to(of_x),
            (above.t() @ rows).to(weight.dtype),
            above.sum(dim=0, dtype=torch.float32).to(of_bias) if ctx.needs_input_grad[2] else None,
            None,
        )


class Fp8Linear(nn.Linear):
    """A linear layer whose products take 8-bit operands, but for the weight's gradient, and give `narrow_dtype`."""

    narrow_dtype: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x, self.bias)

    def through(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = Layer.apply(x.flatten(0, -2), self.weight, bias, self.narrow_dtype)  # type: ignore[no-untyped-call]
        return y.unflatten(0, x.shape[:-1])


def narrow_layers(module: nn.Module, dtype: torch.dtype) -> None:
    """Exchanges every nn.Linear below the module, in place."""
    for layer in exchange_layers(module, Fp8Linear):
        layer.narrow_dtype = dtype


# --- the head ---------------------------------------------------------------------------------------------------------


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
    logits = narrow_product(rows, weight[0], inverse, weight[1], dtype=dtype, fast=True)
    losses, gradient = cross_entropy_narrow(logits, labels, vocab)
    del logits  # before the transpose is made
    undo = torch.full_like(inverse, 1 / GRADIENT_FACTOR)
    of_features = narrow_product(gradient, turned_weight, undo, weight[1], dtype=dtype)
    of_weight = narrow_product(transposed(gradient), transposed(rows), undo, inverse, dtype=dtype)
    return losses, of_features, of_weight
