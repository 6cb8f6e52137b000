"""The loop of the optimizers that are written here: one tensor after another, so that what an update needs for a moment
is needed for one tensor only. A rule says what state a tensor has and what an update does.

Nothing is read back from the device: the counters live on the host.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

State = dict[str, Any]


class PerTensor(torch.optim.Optimizer):
    @abstractmethod
    def new_state(self, weight: torch.Tensor) -> State: ...

    @abstractmethod
    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        """In place. `state["step"]` counts this update already: it is 1 at the first."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(step=torch.tensor(0.0), **self.new_state(weight))
                state["step"] += 1
                self.update(weight, weight.grad, state, group)
