"""The two products of an MLP that have GELU behind them, forward and backward, each as one kernel.

    slope, active = gelu_product(rows, weight, bias)                      # GELU of the layer, and its slope there
    of_hidden, sums = gelu_product_backward(above, weight, slope)         # sums [F] in fp32: the bias's gradient

On the way back, one kernel would write the gradient [M, F] of what GELU gave, and another read it, read what GELU was
given and write it again. QuACK's matmuls for Hopper (quack-kernels) do with a number what they are told before they
write it. What they do takes longer than the product itself, and on the way out the tanh is there: so that is where the
slope is computed, and kept instead of what GELU was given; on the way back a multiplication is left of it.
Where QuACK is not, or does not take the sizes, `kernels/products.py` and `kernels/gelu_backward.py` do it.
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
    """rows [M, C] through a layer [F, C]: tanh GELU of that, which reads it before it is rounded to 16 bits, behind
    its slope there."""
    if is_taken(rows, weight) and bias.dtype == rows.dtype and bias.data_ptr() % 16 == 0:
        from redline.kernels.gelu_products_quack import forward  # takes seconds to import, and is not there everywhere

        return forward(rows, weight, bias)
    hidden, active = product_and_gelu(rows, weight, bias)
    return slope_of(hidden).to(hidden.dtype), active


@operator("gelu_product_backward(Tensor above, Tensor weight, Tensor slope) -> (Tensor, Tensor)", fake=_backward_shapes)
def gelu_product_backward(
    above: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """above [M, C] back through the second layer [C, F] and through GELU, which had this slope."""
    if is_taken(above, weight, slope):
        from redline.kernels.gelu_products_quack import backward

        return backward(above, weight, slope)
    gradient = product(above, weight, above.dtype)
    return gradient, times_slope_(gradient, slope)


def is_taken(*matrices: torch.Tensor) -> bool:
    """By QuACK, here."""
    return matrices[0].is_cuda and is_there(matrices[0].device) and lie_well(*matrices)


def lie_well(*matrices: torch.Tensor) -> bool:
    """Of a single row nobody can tell whether it is one."""
    return takes(*matrices) and all(one.is_contiguous() and min(one.shape) > 1 for one in matrices)


@functools.cache
def is_there(device: torch.device) -> bool:
    """QuACK, and the kind of GPU that this was tried on."""
    return is_installed() and torch.cuda.get_device_capability(device) == HOPPER


def is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True
