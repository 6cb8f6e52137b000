"""The loop of the optimizers that are written here: one tensor after another, so that an update's temporaries exist for
one tensor only. A subclass says what state a tensor has and what an update does.

Nothing is read back from the device: the counters live on the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
Closure = Callable[[], Any] | None
"""Runs forward and backward, for loops such as Lightning's that leave this to `step`."""


def loss_of(closure: Closure) -> Any:
    """Run the closure with gradients enabled, before the update, as torch's own optimizers do, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class PerTensor(torch.optim.Optimizer):
    @abstractmethod
    def new_state(self, weight: torch.Tensor) -> State: ...

    @abstractmethod
    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        """Update the weight in place. `state["step"]` already counts this update: it is 1 at the first."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(step=torch.tensor(0.0), **self.new_state(weight))
                state["step"] += 1
                self.update(weight, weight.grad, state, group)
        return loss
