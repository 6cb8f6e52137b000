"""Linear layers whose matmuls use the algorithm that is fastest here (`kernels/products.py`).

tune_layers(model.h, dtype=torch.bfloat16)      # every nn.Linear in it becomes a TunedLinear
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from redline.kernels.products import product, product_and_bias
from redline.model.first_order import first_order


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, narrow = (one if one.dtype == dtype else one.to(dtype) for one in (x, weight))
        ctx.save_for_backward(rows, narrow)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        if bias is None:
            return product(rows, narrow.t(), dtype)
        return product_and_bias(rows, narrow, bias.to(dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, narrow = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        above = above.contiguous()
        return (
            product(above, narrow, above.dtype).to(of_x),
            product(above.t(), rows, of_weight),
            above.sum(dim=0, dtype=torch.float32).to(of_bias) if ctx.needs_input_grad[2] else None,
            None,
        )


class TunedLinear(nn.Linear):
    """A linear layer that computes in `dtype`, whatever autocast says."""

    dtype: torch.dtype
    fused: bool = False
    """An MLP that begins with this layer has GELU and its gradient as epilogues of QuACK's matmuls (model/fused.py)."""
    narrow: bool = False
    """The matmuls of a block that gain by it take 8-bit operands (core/plan.py, PAYING; model/fused.py)."""
    narrow_mlp: bool = False
    """So do all matmuls of an MLP that begins with this layer, except for the weights' gradients (MLPS)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # every length of a growing text would be a form with algorithms to time
            bias = None if self.bias is None else self.bias.to(self.dtype)
            with torch.autocast(x.device.type, enabled=False):
                return F.linear(x.to(self.dtype), self.weight.to(self.dtype), bias)
        return self.through(x, self.bias)

    def through(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = Layer.apply(x.flatten(0, -2), self.weight, bias, self.dtype)  # type: ignore[no-untyped-call]
        return y.unflatten(0, x.shape[:-1])


def tune_layers(
    module: nn.Module, dtype: torch.dtype, *, fused: bool = False, narrow: bool = False, narrow_mlp: bool = False
) -> None:
    """Replace every nn.Linear below the module, in place."""
    for layer in exchange_layers(module, TunedLinear):
        layer.dtype, layer.fused, layer.narrow, layer.narrow_mlp = dtype, fused, narrow, narrow_mlp


Kind = TypeVar("Kind", bound=nn.Linear)


def exchange_layers(module: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Replace every nn.Linear below the module by one of this kind, with the same parameters and names."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    layer = kind(child.in_features, child.out_features, bias=child.bias is not None)
                layer.weight, layer.bias = child.weight, child.bias
                setattr(parent, name, layer)
                yield layer
