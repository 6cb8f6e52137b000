"""The loss of an unknown module: the user's own function, or what a call of the model returns.

    loss_of = live_loss(model, None);  loss_of({"input_ids": ids, "labels": ids})

Without a function the rules are those for a user's file (docs/your-model.md): the model is called with the batch, a
tensor as it is, a tuple by its order, a dict by its names, and returns a scalar, or an object or a dict with a `loss`.
A pair of inputs and targets, for a model that takes only inputs, gets cross-entropy. Anything else is refused, with a
description of what was returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from redline.core.errors import UserError
from redline.core.user_code import described
from redline.model.adapter import LossOf
from redline.model.python_adapter import (
    are_logits,
    call_of,
    called,
    check_loss,
    cross_entropy,
    cross_entropy_line,
    has_part,
    is_pair,
    key_of_loss,
    logits_of,
    part,
    takes_inputs_only,
)

Loss = Callable[[Any, Any], torch.Tensor]
"""loss(model, batch) returns a scalar."""


def live_loss(model: nn.Module, loss: Loss | None) -> LossOf:
    if loss is not None:
        return lambda batch: loss(model, batch)
    inputs_only = takes_inputs_only(model)
    return lambda batch: loss_of_call(model, batch, inputs_only)


def name_of(loss: Loss | None) -> str:
    """Return the name for messages: a lambda, a partial or an object has only the argument's, 'loss'."""
    name = getattr(loss, "__name__", "")
    return name if name.isidentifier() else "loss"


def checked_once(loss_of: LossOf, loss: Loss | None) -> LossOf:
    """Check only the first loss that a backward pass may follow: a function returns the same kind of value at every
    step. Nothing is read from the device. Without gradients, as in an evaluation, nothing is checked."""
    name, done = name_of(loss), False
    what = "the loss" if name == "loss" else f"the loss {name}()"

    def look(batch: Any) -> torch.Tensor:
        nonlocal done
        found = loss_of(batch)
        if not done and torch.is_grad_enabled():
            check_loss(found, "the model's loss" if loss is None else what, f"{name}()")
            done = True
        return found

    return look


def loss_of_call(model: nn.Module, batch: Any, inputs_only: bool) -> torch.Tensor:
    if is_pair(batch) and inputs_only:
        return loss_of_logits(logits_of(model(batch[0])), batch[1])
    found = called(model, dict(batch) if isinstance(batch, Mapping) else batch)
    loss = part(found, "loss") if has_part(found, "loss") else found
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    why = f"called with the batch it returned {described(found)}, which is no scalar and has no loss in it"
    raise UserError("the model gives no loss", why, how_to_give(found, batch, call_of(batch)))


def how_to_give(found: Any, batch: Any, call: str) -> str:
    """Return a loss for such a batch as a user would write it: a part of what was returned, one against the targets, or
    that of the next token where it can only be that. `call` is the code that returned `found`."""
    write = "give one: loss=lambda model, batch: "
    if (key := key_of_loss(found)) is not None:
        return f"{write}{call}[{key!r}]"
    if is_pair(batch):
        targets = batch[1]
        line = cross_entropy_line(found, targets, call)
        if line is None and isinstance(found, torch.Tensor) and found.shape == targets.shape:
            line = f"F.mse_loss({call}, batch[1])"
        return f"{write}{line or f'my_loss({call}, batch[1]), one number'}"
    if isinstance(batch, torch.Tensor) and batch.dim() == 2 and are_logits(found, batch):
        return f"{write}F.cross_entropy({call}[:, :-1].flatten(0, 1), batch[:, 1:].flatten())"
    return f"{write}my_loss({call}, ...), one number"


def loss_of_logits(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    if are_logits(logits, targets):
        return cross_entropy(logits, targets)
    why = f"it returned {described(logits)} for targets of {described(targets)}, and cross-entropy takes classes"
    raise UserError("the model gives no loss", why, how_to_give(logits, (None, targets), "model(batch[0])"))
