"""Adafactor: Adam with a matrix's second moment kept as one number per row and one per column (arXiv 1804.04235).

Adafactor(decay_groups(model, 0.1), lr=6e-4)

It has a first moment and an absolute learning rate, so that AdamW's schedule works for it: `transformers.Adafactor`
with beta1, without scale_parameter and relative_step. torch's own has no first moment, scales its rate by the size of
each tensor, and waits for the device three times per tensor. The first moment is taken of updates before they are
scaled by the learning rate, so that a falling rate acts at once (in the paper's code it acts ten steps late).
"""

from __future__ import annotations

from typing import Any

import torch

from redline.optim.groups import Groups
from redline.optim.per_tensor import PerTensor, State

BETA1 = 0.9
DECAY_RATE = 0.8  # of the second moment: beta2 is 1 - step^-0.8
EPS = 1e-30  # added to squared gradients, so that a row of zeros has a finite inverse
LARGEST_UPDATE = 1.0  # root mean square of a tensor's update, above which it is scaled down


class Adafactor(PerTensor):
    def __init__(self, groups: Groups, *, lr: float, beta1: float = BETA1) -> None:
        super().__init__(groups, {"lr": lr, "beta1": beta1, "weight_decay": 0.0})

    def new_state(self, weight: torch.Tensor) -> State:
        second = (
            {"rows": weight.new_zeros(weight.shape[:-1]), "columns": weight.new_zeros(weight.shape[1:])}
            if weight.dim() == 2
            else {"second": torch.zeros_like(weight)}
        )
        return {"first": torch.zeros_like(weight), **second}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        change = normalised(gradient, state, share=state["step"].item() ** -DECAY_RATE)
        rms = change.norm() / change.numel() ** 0.5
        change.div_((rms / LARGEST_UPDATE).clamp_(min=1.0))
        state["first"].lerp_(change, 1 - group["beta1"])
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["first"], alpha=group["lr"])


def normalised(gradient: torch.Tensor, state: State, share: float) -> torch.Tensor:
    """Divide a gradient by the root of its second moment, which first takes in the gradient's square by `share`."""
    squared = gradient.square().add_(EPS)
    if "second" in state:
        second: torch.Tensor = state["second"].lerp_(squared, share)
        return second.rsqrt().mul_(gradient)
    rows, columns = state["rows"].lerp_(squared.mean(1), share), state["columns"].lerp_(squared.mean(0), share)
    del squared
    # The moment is the outer product of rows and columns over the mean of the rows; its inverse root has two factors.
    return torch.outer((rows / rows.mean()).rsqrt_(), columns.rsqrt()).mul_(gradient)
