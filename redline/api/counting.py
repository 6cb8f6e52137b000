"""Counts the FLOPs of a step of any module, on tensors without contents.

    count_flops(lambda batch: loss(model, batch), model, (batch,))  ->  Count(flops=6_690_816, uncounted=())

torch's FlopCounterMode observes forward and backward on fake tensors: no memory, no device, no effect on the module.
Code that reads values runs on real tensors instead, which leaves no trace either. Matmuls and convolutions are counted,
a multiply-add as two; attention counts as the full square, and its backward as twice its forward. What checkpointing
computes again is not counted. That is the convention of MFU (docs/flops.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from redline.engine import flop_counter
from redline.engine.replaced import replaced

CONVENTION = "matmuls of forward and backward as counted, full attention square, nothing that is computed again"
aten = torch.ops.aten


@dataclass(frozen=True)
class Count:
    flops: int
    uncounted: tuple[str, ...] = ()
    """Operators that ran and have no formula; if there are any, `flops` is too low."""


@dataclass(frozen=True)
class Blank:
    """What is kept of a tensor without its contents."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _attention_flops(query: Any, key: Any, value: Any) -> int:
    """Count both matmuls, [heads, T, d] x [heads, d, S] and [heads, T, S] x [heads, S, v]; the arguments are shapes."""
    *batch, tokens, width = query
    heads = 1
    for size in batch:
        heads *= size
    return int(2 * heads * tokens * key[-2] * (width + value[-1]))


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _attention_flops(query, key, value)


def _backward(_above: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count four matmuls, not the five that a fused kernel runs, which computes the scores again."""
    return 2 * _attention_flops(query, key, value)


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
FORMULAS = {getattr(aten, f"_scaled_dot_product_{name}"): _forward for name in _KERNELS} | {
    getattr(aten, f"_scaled_dot_product_{name}_backward"): _backward for name in _KERNELS
}


class Counter(flop_counter.Counter):
    def __init__(self) -> None:
        super().__init__(dict(FORMULAS))

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # The backward pass does not record gradients; an operator in it that does is recomputation.
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def count_flops(function: Callable[..., Any], model: nn.Module, arguments: Any, named: Any = None) -> Count:
    """Count function(*arguments, **named), which calls the module, and the backward pass of all it returns. Tensors may
    be given as `Blank`."""
    given = (arguments, named or {})
    try:
        return _count_on_sizes(function, model, given)
    except Exception:
        # The code reads values, or an operator cannot infer its sizes (cuDNN's recurrent backward): the real pass
        # works, or raises the model's own error.
        if any(isinstance(leaf, Blank) for leaf in tree_leaves(given)):
            raise
        return _count_on_values(function, model, given)


def _count_on_sizes(function: Callable[..., Any], model: nn.Module, given: tuple[Any, Any]) -> Count:
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(leaf: Any) -> Any:
        if isinstance(leaf, Blank):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return fake.from_tensor(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf

    with fake:
        return _count(function, model, given, faked)


def _count_on_values(function: Callable[..., Any], model: nn.Module, given: tuple[Any, Any]) -> Count:
    """Count on real tensors: weights where they are, and copies of buffers and inputs, which code may write to."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, nn.Parameter):
            return leaf.detach()
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    devices = {tensor.device for tensor in tree_leaves((given, list(model.parameters()))) if _is_on_gpu(tensor)}
    with torch.random.fork_rng(devices=devices):
        return _count(function, model, given, own)


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _count(function: Callable[..., Any], model: nn.Module, given: tuple[Any, Any], convert: Any) -> Count:
    def own(tensor: torch.Tensor) -> torch.Tensor:
        """Return a stand-in that receives the gradients in place of the model's tensor."""
        found = convert(tensor)
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found

    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        inputs, words = tree_map(convert, given)
        with replaced(model, own), Counter() as counter:
            result = function(*inputs, **words)
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if outputs:
                torch.autograd.backward([output.sum() for output in outputs])
        return Count(int(counter.get_total_flops()), counter.uncounted)
