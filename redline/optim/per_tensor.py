"""The loop of the optimizers that are written here: one tensor after another, so that what an update needs for a moment
is needed for one tensor only. A rule says what state a tensor has and what an update does.

Nothing is read back from the device: the counters live on the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
Closure = Callable[[], Any] | None
"""Forward and backward pass, which a loop such as Lightning's leaves to `step`."""


def loss_of(closure: Closure) -> Any:
    """What it gives. It is run before the update, with gradients on, as torch's own optimizers run it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class PerTensor(torch.optim.Optimizer):
    @abstractmethod
    def new_state(self, weight: torch.Tensor) -> State: ...

    @abstractmethod
    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        """In place. `state["step"]` counts this update already: it is 1 at the first."""

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
