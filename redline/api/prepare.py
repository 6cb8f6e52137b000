"""Puts a recipe on a user's own module: everything that a plain training loop needs.

    prepared = redline.prepare(model, "runs/mine/best.json", learning_rate=3e-4)
    for batch in loader:
        loss = prepared.step(batch)          # forward, backward, clip, update; a tensor on the device

The module keeps its weights and its code. The step is engine/step.py's, the one that the ladder measures and the
trainer runs. Flags of the process (TF32, the attention kernel) apply to everything else in it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from redline.api.loss import Loss, checked_once, live_loss
from redline.api.raised import explaining_loss
from redline.api.realise import obstacles_of, realise
from redline.core.errors import UserError
from redline.core.plan import BF16_WEIGHTS, Plan
from redline.core.recipe import Recipe, load_recipe, recipe_from
from redline.engine.build import compile_loss, outlive_replays
from redline.engine.memory import is_out_of_memory
from redline.engine.probe import probe
from redline.engine.step import TrainStep
from redline.model.adapter import LossOf
from redline.model.python_adapter import check_dense, check_filled, check_fp32, check_sized
from redline.optim import build_optimizer, settings_for
from redline.rungs import LADDER, find_rung, plan_of
from redline.rungs.ladder import check_alternatives, in_order
from redline.rungs.optimizers import FUSED_ADAMW
from redline.workloads.resolve import BY_SIZE

HOST = "make the model where it is to run"
TO_FP32 = "pass model.float(), and batches of float32"
Rate = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A module with a recipe on it. `step(batch)` is a whole update; the other parts are for your own loop."""

    model: nn.Module
    """The module itself, or its compiled form where the recipe compiles; parameters are the same either way."""
    optimizer: torch.optim.Optimizer
    step: TrainStep
    """step(batch) returns the loss, on the device; `step.gradient_norm` is there too."""
    plan: Plan
    rungs: tuple[str, ...]
    """The rungs that were applied, in the order of the ladder."""
    left_out: dict[str, str]
    """The rungs of the recipe that could not be applied to this module from outside, with the reasons."""
    notes: tuple[str, ...]
    """Choices that were made for you, and what to know about them."""
    loss: LossOf
    """loss(batch) returns the loss, without compiling."""

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of an fp16 recipe. For any other recipe it is disabled and passes everything through."""
        return self.step.scaler

    def autocast(self) -> torch.autocast:
        """Return the context for forward and loss: `with prepared.autocast(): ...`."""
        return self.step.autocast()

    def __str__(self) -> str:
        lines = [f"done       {', '.join(self.rungs) or 'nothing: the recipe is the baseline'}"]
        lines += [f"left out   {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join([*lines, *(f"note       {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Return what was done and what was left out as a table, for a notebook."""
        from redline.report.notebook import in_notebook, render_prepared_page

        page = render_prepared_page(
            name=type(getattr(self.model, "_orig_mod", self.model)).__name__,
            device=str(next(self.model.parameters()).device),
            done=[(name, find_rung(name).title) for name in self.rungs],
            left_out=self.left_out.items(),
            said=self.notes,
        )
        return in_notebook(page)


def prepare(
    model: nn.Module,
    recipe: Path | str | Recipe | Mapping[str, Any] | Iterable[str],
    *,
    learning_rate: Rate | None = None,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    loss: Loss | None = None,
    device: torch.device | str | None = None,
) -> Prepared:
    check_module(model)
    check_unfrozen(model)
    check_filled(model, type(model).__name__, HOST)
    check_fp32(model, type(model).__name__, TO_FP32)
    check_dense(model, type(model).__name__)
    check_rate(learning_rate)
    if device is not None:
        move_to(model, device)
    place = next(model.parameters()).device
    wanted = rungs_of(recipe)
    left_out = obstacles_of(wanted, model, probe(place))
    rungs = tuple(name for name in wanted if name not in left_out)
    if any(name in left_out for name in BF16_WEIGHTS):
        rungs = in_order((*rungs, FUSED_ADAMW))
    plan = replace(plan_of(rungs), read_loss_every=0)  # the loop decides when to read the loss
    rate, notes = choose_rate(learning_rate, model)
    # The order is that of engine/build.py: the process, the module, compiling, the optimizer, the step.
    notes += realise(plan, model)
    plain = live_loss(model, loss)
    optimizer, schedule = build_updates(plan, model, rate, weight_decay)
    step = TrainStep(
        adapter=None,
        model=model,
        loss_of=moved_first(explaining_loss(compiled_loss(plain, model, plan, loss), plain, model, plan), place),
        optimizer=optimizer,
        plan=plan,
        learning_rate=schedule,
        clip_norm=math.inf if clip_norm is None else clip_norm,
    )
    return Prepared(
        model=compile_loss(model, plan) if plan.compile else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        step=step,
        plan=plan,
        rungs=rungs,
        left_out=left_out,
        notes=notes,
        loss=plain,
    )


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"a recipe was put on a {type(model).__name__}",
            "it goes onto a torch.nn.Module",
            "pass the model itself: redline.prepare(model, recipe)",
        )
    if next(model.parameters(), None) is None:
        raise UserError(
            f"{type(model).__name__} has no parameters",
            "there is nothing to train",
            "pass the module that holds the weights, after its layers are made",
        )
    check_sized(model, type(model).__name__, "first")


def check_unfrozen(model: nn.Module) -> None:
    count = sum(1 for _ in model.parameters())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"{type(model).__name__} has no parameters to train",
            f"none of its {count} parameters takes a gradient: it is frozen",
            "call requires_grad_(True) first, on the part that is to be trained",
        )


def check_rate(rate: object) -> None:
    if rate is None or callable(rate):
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
        raise UserError(
            f"learning_rate is {rate!r}",
            "it is a number above 0, or a function of the steps taken",
            "write it as learning_rate=3e-4",
        )


def move_to(model: nn.Module, device: torch.device | str) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        if is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0]
        raise UserError(f"the model cannot go to {device}", why, "choose a device that torch sees") from error


def rungs_of(recipe: Path | str | Recipe | Mapping[str, Any] | Iterable[str]) -> tuple[str, ...]:
    """Return the recipe's rungs in the order of the ladder. Unknown names, repeated ones, and two that exclude each
    other, are mistakes."""
    if isinstance(recipe, str) and is_names(recipe):
        recipe = [] if recipe == "none" else [name.strip() for name in recipe.split(",")]
    if isinstance(recipe, (str, Path)):
        recipe = load_recipe(Path(recipe))
    if isinstance(recipe, Mapping):  # what json.load returns for a recipe file
        recipe = recipe_from(recipe, "the recipe given")
    recipe = recipe if isinstance(recipe, Recipe) or not isinstance(recipe, Iterable) else list(recipe)
    if not isinstance(recipe, (Recipe, list)) or (
        isinstance(recipe, list) and not all(isinstance(name, str) for name in recipe)
    ):
        raise UserError(
            f"the recipe is {recipe!r}",
            "it is the path of a recipe file, a Recipe, or a list of rungs",
            'write "best.json" or ["bf16", "compile"]',
        )
    names = tuple(recipe.rungs if isinstance(recipe, Recipe) else recipe)
    plan_of(names)  # raises for an unknown name, with the list
    check_alternatives(names)
    return in_order(name for name in names if name != LADDER[0].name)


def is_names(text: str) -> bool:
    """True for rung names with commas between them, not for a file's path: they have no suffix and no folder."""
    return text == "none" or {name.strip() for name in text.split(",")} <= {rung.name for rung in LADDER}


def choose_rate(given: Rate | None, model: nn.Module) -> tuple[Rate, tuple[str, ...]]:
    if given is not None:
        return given, ()
    count = sum(parameter.numel() for parameter in model.parameters())
    rate = next(rate for most, rate, _ in BY_SIZE if count <= most)
    return rate, (f"learning rate {rate:g}: GPT-3's for {count:,} parameters (learning_rate=...)",)


def build_updates(
    plan: Plan, model: nn.Module, rate: Rate, weight_decay: float
) -> tuple[torch.optim.Optimizer, Callable[[int], float] | None]:
    """Return the optimizer and, if `rate` is a function, the learning rate by steps taken. Rates are AdamW's: an
    optimizer that needs another has its own factor on it. A plain number stays in the parameter groups, where torch's
    schedulers find it."""
    if not callable(rate):
        settings = settings_for(plan.optimizer, learning_rate=rate, weight_decay=weight_decay)
        return build_optimizer(plan.optimizer, model, **settings), None
    factor = settings_for(plan.optimizer, learning_rate=1.0, weight_decay=0.0)["learning_rate"]
    own = settings_for(plan.optimizer, learning_rate=rate(0), weight_decay=weight_decay)
    return build_optimizer(plan.optimizer, model, **own), lambda steps: factor * rate(steps)


def compiled_loss(plain: LossOf, model: nn.Module, plan: Plan, loss: Loss | None) -> LossOf:
    """Return `plain` as the plan runs it, with a check outside the compiled code. `loss` is the user's own function, if
    `plain` was made from one."""
    loss_of = checked_once(compile_loss(plain, plan) if plan.compile else plain, loss)
    return outlive_replays(loss_of, model, accumulates=False) if plan.cuda_graphs else loss_of


def moved_first(loss_of: LossOf, device: torch.device) -> LossOf:
    """Move the batch to the device first: it may come from a loader on the host. This is outside the compiled code, and
    free for a batch that is there already."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        # transformers' batches are mappings that move themselves, and torch does not know their parts
        return leaf.to(device) if isinstance(leaf, Mapping) and hasattr(leaf, "to") else leaf

    return lambda batch: loss_of(tree_map(move, batch))
