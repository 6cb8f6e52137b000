"""Matmuls with 8-bit operands.

    values, inverse = narrowed(weight)                     # e4m3, and the factor that undoes the scale
    y = narrow_product(rows, values, rows_inverse, inverse, dtype=torch.bfloat16)   # kernels/narrow_products.py
    narrow_layers(model.h, dtype=torch.bfloat16)           # every nn.Linear in it becomes an Fp8Linear

A scale is a power of two, so only the cast rounds; it puts the largest element into the format's last two octaves.
Layers have one scale per row, which the kernel that writes a row finds on the way. For the head one scale per tensor is
enough, since e4m3 has 14 octaves at full precision and its rounding error is relative to each element (docs/fp8.md has
the errors). Zeros stay zeros. Everything that shares a scale with an infinity or a NaN becomes NaN: it reaches the loss
and the gradient norm, where the step checks for it.

Tensor cores accept 8-bit operands only with the summed index last, so a sum over rows needs a transpose first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redline.kernels.cross_entropy import GRADIENT_FACTOR, cross_entropy_narrow
from redline.kernels.narrow_products import narrow_product
from redline.kernels.transpose import transposed
from redline.model.first_order import first_order
from redline.model.tuned import exchange_layers

E4M3 = torch.float8_e4m3fn
LARGEST_SLOPE = 1.13  # the steepest slope of GELU
ROUNDED_UP = (1 + 2.0**-4) ** 2  # rounding both operands to e4m3 may enlarge their product by this factor
SMALLEST_LARGEST = 2.0**-100  # lower bound of the largest element: keeps the scale of a tensor of zeros finite

MANTISSA = 23  # bits of fp32
BEYOND_448 = 2**21 - 1  # adding it to the bits of 1.75 x 2^n fills the mantissa; adding it to anything larger overflows
OCTAVE_OF_448 = 2 * 127 + 8

Narrowed = tuple[torch.Tensor, torch.Tensor]


def narrowed(tensor: torch.Tensor, by_rows: bool = False) -> Narrowed:
    """Cast to e4m3; return also the factors that undo the scale, on the device: one, or with `by_rows` one per row,
    [M, 1]. The largest element is found in fp32. The compiler may compute scale and factor in two kernels, one from the
    value as computed and the other from the value as stored, and in 16 bits the two differ."""
    sizes = tensor.float().abs()
    scale, inverse = scales_of(sizes.amax(dim=1, keepdim=True) if by_rows else sizes.amax())
    return (tensor.float() * scale).to(E4M3), inverse


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings this number into the format's last two octaves."""
    return scales_of(largest)[0]


def scales_of(largest: torch.Tensor) -> Narrowed:
    """Return that scale and its inverse. They are computed from the bits of the number, since logarithms in two kernels
    might round to different sides."""
    bits = largest.float().clamp(min=SMALLEST_LARGEST).view(torch.int32)
    octave = (bits + BEYOND_448) >> MANTISSA  # the exponent, plus one if the mantissa exceeds that of 448
    undefined = 0 * largest.float()  # NaN if the number is not finite
    scale, inverse = ((exponent << MANTISSA).view(torch.float32) for exponent in (OCTAVE_OF_448 - octave, octave - 8))
    return scale + undefined, inverse + undefined


# --- the blocks' layers -----------------------------------------------------------------------------------------------


def operands(rows: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the operands of a row-by-row product: both matrices in 8 bits, then the factors that undo their scales."""
    (values, inverse), (other_values, other_inverse) = narrowed(rows, by_rows=True), narrowed(others, by_rows=True)
    return values.contiguous(), other_values.contiguous(), inverse, other_inverse


def scale_beforehand(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return powers of two [M, 1] that keep every row of rows [M, K] x weight [N, K], and GELU or its gradient of that,
    within e4m3, before the product is known: no element exceeds the product of the norms of its two rows. The largest
    element of a row is some octaves below that bound (sqrt(K) / 4 for random ones), and e4m3 has 14."""
    bound = LARGEST_SLOPE * ROUNDED_UP * rows.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1).amax()
    return scale_of(bound if bias is None else bound + bias.float().abs().amax())


def forward_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Apply a layer [N, K] to rows [M, K]."""
    return narrow_product(*operands(rows, weight), dtype=dtype, fast=True, bias=bias)


def product_of_narrow(
    values: torch.Tensor,
    scale: torch.Tensor,
    others: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows [M, K] that were written in 8 bits by the transpose of others [N, K]."""
    other_values, other_inverse = narrowed(others, by_rows=True)
    return narrow_product(values, other_values, scale.reciprocal(), other_inverse, dtype=dtype, fast=True, bias=bias)


def input_gradient(above: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Propagate the gradient `above` [M, N] back through the layer: [M, K]. Here the weight's columns take the place of
    its rows, and they have scales of their own."""
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
    @first_order
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
    """A linear layer that returns `narrow_dtype` and multiplies 8-bit operands, except for the weight's gradient."""

    narrow_dtype: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x, self.bias)

    def through(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = Layer.apply(x.flatten(0, -2), self.weight, bias, self.narrow_dtype)  # type: ignore[no-untyped-call]
        return y.unflatten(0, x.shape[:-1])


def narrow_layers(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace every nn.Linear below the module, in place."""
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
    """Return the losses [N] of features [N, C] under a head [V, C], and the gradients of features and head without the
    mean's factor 1/N. The loss kernel writes its gradient directly in 8 bits: of these tensors, it alone has a range
    that is known beforehand."""
    rows, inverse = features
    logits = narrow_product(rows, weight[0], inverse, weight[1], dtype=dtype, fast=True)
    losses, gradient = cross_entropy_narrow(logits, labels, vocab)
    del logits  # before the transpose is made
    undo = torch.full_like(inverse, 1 / GRADIENT_FACTOR)
    of_features = narrow_product(gradient, turned_weight, undo, weight[1], dtype=dtype)
    of_weight = narrow_product(transposed(gradient), transposed(rows), undo, inverse, dtype=dtype)
    return losses, of_features, of_weight
