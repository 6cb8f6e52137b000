"""Profiles a user's own step with the machinery of `redline profile`, in the process that is already running.

    profile_callable(prepared.step, batches=loader)
    profile_callable(lambda: train_once(model, batch), model=model)

It warms up, times without a profiler, profiles, looks for lines that cost time, and looks at the memory: some dozens of
steps, all of which train. If model and optimizer are known, they are put back as they were.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from redline.api.document import Document
from redline.commands.profile import anatomy_json, figures
from redline.core.errors import UserError, explained
from redline.core.host import timestamp
from redline.core.places import with_short_places
from redline.core.plan import Plan
from redline.core.profile import Profile
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.engine.findings import compiler_log
from redline.engine.probe import probe, versions
from redline.engine.profiling import PROFILED_STEPS, TRACE_FILE, profile_step
from redline.engine.step import TrainStep
from redline.machine import find_measured

STARVATION = "loader-starvation"


def profile_callable(
    step: Callable[..., Any],
    *,
    batches: Iterable[Any] | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int | None = None,
    out: Path | None = None,
    command: str,
) -> Document:
    if isinstance(step, nn.Module):
        raise UserError(
            f"{type(step).__name__} is a module and not a step",
            "what is profiled is a whole step of training: forward, backward and update",
            "pass a function that does one: redline.profile(lambda: train_once(batch), model=model)",
        )
    check_positive("steps", PROFILED_STEPS if steps is None else steps)
    plan = step.plan if isinstance(step, TrainStep) else Plan()
    if isinstance(step, TrainStep):
        model, optimizer = model or step.model, optimizer or step.optimizer
    module = model if model is not None else nn.Module()  # then nothing is told apart by module
    device = place_of(model)
    trace = None if out is None else trace_in(out)
    with as_it_was(step, model, optimizer), compiler_log() as log:
        found = profile_step(
            *fed(step, batches),
            module=module,
            device=device,
            optimizer=optimizer,
            steps=steps or PROFILED_STEPS,
            compiled=plan.compile or is_compiled(model),
            trace=trace,
            log=log,
        )
    if batches is None:  # without batches there is no loader to wait for
        found = replace(found, findings=tuple(each for each in found.findings if each.kind != STARVATION))
    return document(found, plan, name=name_of(step), command=command, trace=trace, known=model is not None)


def place_of(model: nn.Module | None) -> torch.device:
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_compiled(model: nn.Module | None) -> bool:
    return model is not None and any(hasattr(module, "_orig_mod") for module in model.modules())


def trace_in(folder: Path) -> Path:
    with explained(f"cannot write into {folder}", "choose another out"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / TRACE_FILE


def name_of(step: Callable[..., Any]) -> str:
    return "a step" if isinstance(step, TrainStep) else getattr(step, "__qualname__", type(step).__name__)


# --- batches ----------------------------------------------------------------------------------------------------------


def fed(step: Callable[..., Any], batches: Iterable[Any] | None) -> tuple[Callable[[Any], Any], Iterator[Any]]:
    """Return a step that takes a batch, and an endless supply of batches."""
    if batches is not None:
        return step, again_and_again(batches)
    if wants_batch(step):
        raise UserError(
            "the step takes a batch and there are none",
            f"{name_of(step)} is called with one batch after the other",
            "give batches=loader, or batches=[batch]; or pass a function without arguments",
        )
    return (lambda _: step()), itertools.repeat(None)


def wants_batch(step: Callable[..., Any]) -> bool:
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is empty and each.kind in kinds for each in inspect.signature(step).parameters.values())


def again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    """Start again when the batches end. An iterator, which can be read only once, must be long enough."""
    while True:
        count = 0
        for count, batch in enumerate(batches, start=1):  # noqa: B007  how many there were is asked below
            yield batch
        if count == 0 and iter(batches) is not batches:
            raise UserError("there are no batches", "batches is empty", "give it one at least: batches=[batch]")
        if iter(batches) is batches:
            raise UserError(
                "the batches came to an end",
                "a profile takes some dozens of steps, and these can be read once only",
                "give a list or a DataLoader, which start again: batches=list(...)",
            )


# --- as it was --------------------------------------------------------------------------------------------------------


@contextmanager
def as_it_was(
    step: Callable[..., Any], model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Put weights, buffers, optimizer and random numbers back, from copies on the host: a profile must not train."""
    weights = {} if model is None else {name: tensor.to("cpu", copy=True) for name, tensor in held(model)}
    state = None if optimizer is None else on_the_host(optimizer.state_dict())
    own = step if isinstance(step, TrainStep) else None
    taken, scale = (0, {}) if own is None else (own.steps_taken, on_the_host(own.scaler.state_dict()))
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if model is not None:
            put_back(model, weights)
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
        if own is not None:
            own.steps_taken = taken
            own.scaler.load_state_dict(scale)


def on_the_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that takes no memory of the device."""
    copied: dict[str, Any] = tree_map(
        lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, state
    )
    return copied


@torch.no_grad()
def put_back(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in held(model):
        tensor.copy_(weights[name])
    model.zero_grad(set_to_none=True)


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    yield from model.named_buffers()


# --- the document -----------------------------------------------------------------------------------------------------


def document(found: Profile, plan: Plan, *, name: str, command: str, trace: Path | None, known: bool) -> Document:
    """Return the document of `redline profile`, without what needs a workload: advice, predictions, tokens/s."""
    hardware, found = probe(found.device), with_short_places(found)
    device = hardware.device
    measured, notes = find_measured((hardware.name,) if device is None else device.names, hardware.driver)
    told = () if known else ("modules were not told apart, and the steps have trained: give model and optimizer",)
    return Document(
        {
            "status": "ok",
            "kind": "profile",
            "command": command,
            "date": timestamp(),
            "versions": versions(),
            "workload": {"name": name, "shape": None},
            "hardware": to_json(hardware),
            "recipe": None,
            **figures(found, plan, device, measured),
            "tokens_per_second": None,
            "roofline": None,
            "rates": None,
            "advice": None,
            "memory": None if found.memory is None else memory_json(found),
            "notes": [*found.notes, *notes, *told],
            "trace": None if trace is None else str(trace),
            "directory": None,
        },
        kind="profile",
    )


def memory_json(found: Profile) -> dict[str, Any]:
    return {**anatomy_json(found), "predicted": None}
