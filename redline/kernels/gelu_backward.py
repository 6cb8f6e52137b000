"""GELU's gradient and its sums over rows, which are the bias's gradient, in one pass.

    sums = gelu_backward_(gradient, x)          # gradient [N, F] is now that of x; sums [F] in fp32

The compiler writes the gradient in one kernel and reads it again in another for the sums. Here a block of columns is
summed while it is written; the sums of the blocks of rows are added up afterwards, in a fixed order.
"""

from __future__ import annotations

import math

import torch

SLOPE = 2 * math.sqrt(2 / math.pi)  # tanh GELU is x sigmoid(SLOPE (x + CUBE x^3)): (1 + tanh u) / 2 is sigmoid(2u)
CUBE = 0.044715


@torch.library.custom_op("redline::gelu_backward_", mutates_args=("gradient",))
def gelu_backward_(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Turn `gradient` of tanh GELU's output into that of its input `x`; return its column sums. Both are contiguous."""
    if gradient.is_cuda:
        from redline.kernels.gelu_backward_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(gradient, x)
    return plain_gelu_backward_(gradient, x)


@gelu_backward_.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(gradient.size(1), dtype=torch.float32)


def plain_gelu_backward_(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the kernel computes, in torch; in fp32 unless the input is wider."""
    return times_slope_(gradient, slope_of(x))


def slope_of(x: torch.Tensor) -> torch.Tensor:
    """Return the slope of tanh GELU at `x`; in fp32 unless `x` is wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    share = torch.sigmoid(SLOPE * (wide + CUBE * wide**3))
    return share + wide * share * (1 - share) * SLOPE * (1 + 3 * CUBE * wide**2)


def times_slope_(gradient: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Turn `gradient` into that of GELU's input, and return the sums of its columns."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    product = gradient.to(wide) * slope.to(wide)
    gradient.copy_(product)
    return product.sum(dim=0)
