"""Marks hand-written backward passes, whose own gradients nobody wrote.

@staticmethod
@first_order
def backward(ctx, above): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise where the gradient would itself be differentiated (`create_graph=True`): what these functions save is cut
    off from its graph, so a gradient penalty would silently count as a constant. torch's own `once_differentiable`
    raises only if the incoming gradient needs one, and a loss's is a plain 1. Compiled code is not asked: there
    torch.compile itself refuses a second derivative."""

    @functools.wraps(backward)
    def once(ctx: Any, *above: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this gradient cannot be differentiated again (create_graph=True): its backward pass is written by "
                "hand, for the rungs fused-loss, chunked-loss, fused-backward, tuned-matmuls and those in 8 bits; "
                "leave them out for a loss that contains gradients"
            )
        return backward(ctx, *above)

    return once
