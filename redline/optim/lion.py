"""Lion: the sign of a moment, with one moment as the only state (arXiv 2302.06675, algorithm 2).

Lion(decay_groups(model, 0.5), lr=1.2e-4)

Every weight moves by the learning rate, so it must be smaller than AdamW's, and the decay larger.
"""

from __future__ import annotations

from typing import Any

import torch

from redline.optim.groups import Groups
from redline.optim.per_tensor import PerTensor, State

BETAS = (0.95, 0.98)  # the paper's for language models


class Lion(PerTensor):
    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float] = BETAS) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def new_state(self, weight: torch.Tensor) -> State:
        return {"moment": torch.zeros_like(weight)}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        direction = state["moment"].lerp(gradient, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        state["moment"].lerp_(gradient, 1 - beta2)
