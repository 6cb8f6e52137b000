"""Explains what a step of a user's own module raised, if the cause can be recognised.

    loss_of = explaining_loss(loss_of, plain, model, plan)  # autocast breaks it: a UserError

Everything else is raised as it came. Nothing is examined until something is raised.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.user_code import described, first_line, is_numpy, users_line
from redline.engine.inspect_model import kept_buffers
from redline.engine.memory import is_out_of_memory
from redline.model.adapter import LossOf

NO_KERNEL = "No available kernel"  # torch's words, for every backend


def explaining_loss(loss_of: LossOf, plain: LossOf, model: nn.Module, plan: Plan) -> LossOf:
    """Return a loss that raises a UserError if the cause of an exception can be recognised: a batch without tensors,
    attention that the pinned kernel does not take, or code that autocast breaks."""

    def run(batch: Any) -> torch.Tensor:
        try:
            return loss_of(batch)
        except UserError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            mistake = (
                no_batch(error, batch)
                or no_kernel(error, model, plan)
                or broken_by_autocast(error, plain, batch, model, plan)
            )
            if mistake is None:
                raise
            raise mistake from error

    return run


def no_batch(error: Exception, batch: Any) -> UserError | None:
    """Explain a batch without tensors. This is checked only after an exception: a user's own objects may hold tensors,
    and a model may read strings."""
    leaves = tree_leaves(batch)
    if not all(leaf is None or isinstance(leaf, (str, bytes, int, float)) or is_numpy(leaf) for leaf in leaves):
        return None
    return UserError(
        f"the step was given {described(batch)}, with no tensor in it",
        f"the model was called with it and raised {type(error).__name__}: {first_line(error)}",
        "pass what the model is called with: a tensor, or tuples and dicts of tensors",
    )


def no_kernel(error: Exception, model: nn.Module, plan: Plan) -> UserError | None:
    """Explain that torch has no kernel: the recipe leaves one for attention, which does not take every call."""
    if plan.attention == "naive" or NO_KERNEL not in str(error):
        return None
    line = users_line(error, file_of(type(model)), anywhere=True)
    return UserError(
        f"no kernel of {plan.attention} attention takes this call",
        f"{f'it is at {line}; ' if line else ''}a dropout_p above zero (on a CPU), some masks and types are beyond it",
        "leave flash and cudnn-attention out of the recipe, or call it without those",
    )


def broken_by_autocast(error: Exception, plain: LossOf, batch: Any, model: nn.Module, plan: Plan) -> UserError | None:
    """Explain an exception that autocast caused; None if the same batch also raises without autocast."""
    if plan.autocast is None:
        return None
    device = next(model.parameters()).device.type
    try:
        with kept_buffers(model), torch.no_grad(), torch.autocast(device, enabled=False):
            plain(batch)
    except Exception:  # whatever that is, the user gets the first error
        return None
    line = users_line(error, file_of(type(model)), anywhere=True)
    return UserError(
        f"a step under {plan.autocast} autocast raised {type(error).__name__}: {first_line(error).rstrip('.')}",
        f"{f'it happened at {line}; ' if line else ''}without autocast the same batch goes through",
        f"leave {plan.autocast} out of the recipe, or cast there to the type that is wanted: y.to(x.dtype)",
    )


def file_of(kind: type) -> str:
    """Return the file with the code; for a class that was typed in and has none, the name of its module."""
    try:
        return str(Path(inspect.getfile(kind)))
    except (TypeError, OSError):
        return kind.__module__
