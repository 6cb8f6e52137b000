"""One training step. The ladder times this object and the trainer runs it: there is no second copy of the loop.

step = TrainStep(model=model, loss_of=loss_of, optimizer=optimizer, plan=plan, learning_rate=..., clip_norm=1.0)
loss = step(batch)        # a tensor on the device; reading it makes the host wait
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from redline.core.plan import Plan
from redline.engine.shard import Shared, autocast_of
from redline.model.adapter import Adapter, LossOf

INITIAL_LOSS_SCALE = 2.0**14  # low enough that GPT-2's first gradients do not overflow, so no update is lost


class TrainStep:
    def __init__(
        self,
        *,
        adapter: Adapter | None,
        model: nn.Module,
        loss_of: LossOf,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        learning_rate: Callable[[int], float] | None,
        clip_norm: float,
        chunk: int | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`chunk`: split a batch into pieces of that many sequences, whose gradients are added up. Without an adapter,
        `loss_of` receives the batch as it is; without a learning rate, the optimizer's groups keep their own. `shared`:
        how several ranks share the step."""
        self.shared = Shared(loss_of) if shared is None else shared
        self._adapter, self.model, self.loss_of, self.optimizer, self.plan = adapter, model, loss_of, optimizer, plan
        self.learning_rate, self.clip_norm, self.chunk = learning_rate, clip_norm, chunk
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.may_wait = False
        """Let the host wait for the gradient norm at every step, for optimizers that cannot skip by themselves."""
        self.gradient_norm = torch.zeros((), device=self.device)
        self.last_read_loss = math.nan
        self.reset()

    @property
    def adapter(self) -> Adapter:
        assert self._adapter is not None, "a step of somebody's own module has no workload"
        return self._adapter

    @property
    def skips_on_device(self) -> bool:
        """True if the optimizer accepts a flag on the device that skips the update. GradScaler tests it alike."""
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def reset(self) -> None:
        """Forget the steps taken. Weights and optimizer are restored by `Training.restore`."""
        self.steps_taken = 0
        # A disabled scaler passes everything through untouched: one code path for all precisions.
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=INITIAL_LOSS_SCALE, enabled=self.plan.loss_scaling
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take a step on a batch in the adapter's form ([2, B, T] of inputs and targets), and return the mean loss."""
        loss = self.compute_gradients(batch)
        self.apply_gradients()
        self.steps_taken += 1
        if self.plan.read_loss_every and self.steps_taken % self.plan.read_loss_every == 0:
            self.last_read_loss = loss.item()  # the host waits here for everything queued so far
        return loss

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Leave unscaled, unclipped gradients of the mean loss in every parameter's .grad, and return the loss."""
        pieces = [(batch, 1.0)] if self.chunk is None else self.adapter.pieces(batch, self.chunk)
        loss = self.shared.gradients(pieces, self._backward)
        self.scaler.unscale_(self.optimizer)
        return loss

    def _backward(self, piece: Any, share: float) -> torch.Tensor:
        """Add a piece's gradients, weighted by its share of the batch, and return its share of the loss."""
        loss = self.loss(piece)
        loss = loss if share == 1 else loss * share
        self.scaler.scale(loss).backward()  # outside autocast: the backward follows the forward's dtypes
        return loss.detach()

    def loss(self, piece: Any) -> torch.Tensor:
        """Return the loss of a batch or a piece of one, with the graph for a backward pass."""
        with self.autocast():
            return self.loss_of(*((piece,) if self._adapter is None else self._adapter.arguments(piece)))

    def apply_gradients(self) -> None:
        """Clip and update. `gradient_norm` stays on the device. A NaN or infinite norm skips the update if the
        optimizer accepts a flag on the device (fused), or if `may_wait` lets the host check."""
        if self.learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.steps_taken)
        self.gradient_norm = self.shared.clip(self.parameters, self.clip_norm)
        if self.plan.loss_scaling:
            self.scaler.step(self.optimizer)  # has its own test for infinities
            self.scaler.update()
        elif self.skips_on_device:
            self.optimizer.found_inf = (~self.gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not self.may_wait or self.gradient_norm.isfinite().item():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skipped_updates(self) -> int:
        """Count the updates skipped because of overflow: each halves the scale, and growth needs 2,000 clean steps."""
        return round(math.log2(INITIAL_LOSS_SCALE / self.scaler.get_scale())) if self.plan.loss_scaling else 0

    def autocast(self) -> torch.autocast:
        """Return the plan's autocast context, for forward and loss; it does nothing if the plan has none."""
        return autocast_of(self.plan, self.device)
