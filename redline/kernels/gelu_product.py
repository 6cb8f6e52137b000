"""A product with GELU's gradient on its way out, and the sums over its rows, which are the bias's gradient.

    of_hidden, sums = product_and_gelu_backward(above, weight, hidden)     # sums in fp32

The gradient of an MLP's second layer is one kernel that writes [M, F], and GELU's is another that reads it, reads what
GELU was given and writes it again. QuACK's matmuls for Hopper (quack-kernels) take what is to be done with an element
before it is written, so here it is one kernel. `above` [M, C] is the gradient of what the second layer [C, F] gives,
`hidden` [M, F] what GELU was given. Where QuACK is not, the two kernels.
"""

from __future__ import annotations

import functools
from importlib import metadata

import torch

from redline.kernels.cublaslt import takes
from redline.kernels.gelu_backward import gelu_backward_
from redline.kernels.products import operator, product

PACKAGE = "quack-kernels"
HOPPER = (9, 0)


def _shapes(above: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.size(1), dtype=wide)


@operator(
    "product_and_gelu_backward(Tensor above, Tensor weight, Tensor hidden) -> (Tensor, Tensor)",
    fake=_shapes,
)
def product_and_gelu_backward(
    above: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What GELU was given gets above [M, C] weight [C, F] times GELU's slope there; all contiguous."""
    if above.is_cuda and is_there(above.device) and _lie_well(above, weight, hidden):
        from redline.kernels.gelu_product_quack import launch  # takes seconds to import, and is not there everywhere

        return launch(above, weight, hidden)
    gradient = product(above, weight, above.dtype)
    return gradient, gelu_backward_(gradient, hidden)


def _lie_well(*matrices: torch.Tensor) -> bool:
    return takes(*matrices) and all(one.is_contiguous() for one in matrices)


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
