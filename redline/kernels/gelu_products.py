"""The two matmuls of an MLP beside GELU, one forward and one backward, each fused with it into one kernel.

    slope, active = gelu_product(rows, weight, bias)                      # GELU of the layer's output, after its slope
    of_hidden, sums = gelu_product_backward(above, weight, slope)         # sums [F] in fp32: the bias's gradient

Without fusion, one kernel of the backward would write the gradient [M, F] of GELU's output, and another would read it
and GELU's input and write it again. QuACK's matmuls for Hopper (quack-kernels) apply an epilogue to each number before
they write it. The epilogue takes longer than the matmul itself, and the forward computes the tanh anyway. So the
forward computes the slope and saves it instead of GELU's input, which leaves the backward one multiplication. Without
QuACK, or for sizes that it does not accept, `kernels/products.py` and `kernels/gelu_backward.py` are used.
"""

from __future__ import annotations

import functools
from importlib import metadata

import torch

from redline.kernels.cublaslt import takes
from redline.kernels.gelu_backward import slope_of, times_slope_
from redline.kernels.products import operator, product, product_and_gelu

PACKAGE = "quack-kernels"
HOPPER = (9, 0)


def _forward_shapes(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slope = rows.new_empty(rows.size(0), weight.size(0))
    return slope, torch.empty_like(slope)


def _backward_shapes(
    above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(slope.dtype, torch.float32)
    return slope.new_empty(slope.shape), slope.new_empty(slope.size(1), dtype=wide)


@operator("gelu_product(Tensor rows, Tensor weight, Tensor bias) -> (Tensor, Tensor)", fake=_forward_shapes)
def gelu_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a layer [F, C] to rows [M, C]; return GELU's slope there, and tanh GELU. A fused kernel applies GELU before
    the layer's output is rounded to 16 bits."""
    if is_taken(rows, weight) and bias.dtype == rows.dtype and bias.data_ptr() % 16 == 0:
        from redline.kernels.gelu_products_quack import forward  # takes seconds to import, and may not be installed

        return forward(rows, weight, bias)
    hidden, active = product_and_gelu(rows, weight, bias)
    return slope_of(hidden).to(hidden.dtype), active


@operator("gelu_product_backward(Tensor above, Tensor weight, Tensor slope) -> (Tensor, Tensor)", fake=_backward_shapes)
def gelu_product_backward(
    above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of GELU's input and the sums of its columns, given the gradient `above` [M, C] of the second
    layer's output, that layer's weight [C, F] and GELU's slope."""
    if is_taken(above, weight, slope):
        from redline.kernels.gelu_products_quack import backward

        return backward(above, weight, slope)
    gradient = product(above, weight, above.dtype)
    return gradient, times_slope_(gradient, slope)


def is_taken(*matrices: torch.Tensor) -> bool:
    """True if QuACK's kernels can be used."""
    return matrices[0].is_cuda and is_there(matrices[0].device) and lie_well(*matrices)


def lie_well(*matrices: torch.Tensor) -> bool:
    """True if sizes and addresses suit QuACK. A single row or column does not: its layout is ambiguous."""
    return takes(*matrices) and all(one.is_contiguous() and min(one.shape) > 1 for one in matrices)


@functools.cache
def is_there(device: torch.device) -> bool:
    """True if QuACK is installed and the GPU is of the kind on which this was tried."""
    return is_installed() and torch.cuda.get_device_capability(device) == HOPPER


def is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True
