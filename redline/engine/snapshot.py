"""The optimizer's state and the random generators of a training run, as named tensors and JSON.

    tensors, values = optimizer_tensors(optimizer, model)        # {"wte.weight.exp_avg": ...} and plain values
    load_optimizer_tensors(optimizer, model, tensors, values)    # in place, bit for bit
    values = capture_rng(device);  restore_rng(values, device)   # last of all: building things draws random numbers

State is stored by the parameter's name, not by its number, so another version may group parameters differently. Works
for every optimizer whose state is tensors and plain values per parameter, fused or not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from redline.core.checkpoints import SHOWN
from redline.core.cut import Cut
from redline.core.errors import UserError
from redline.engine.parts import is_dtensor, parts_of
from redline.engine.shard import put
from redline.engine.tensor_files import SavedTensors

# How an update is computed, not what it is: a run may resume with another implementation of the same optimizer.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
NOT_OPTIONS = ("params", "param_names", *IMPLEMENTATION)


# --- optimizer --------------------------------------------------------------------------------------------------------


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer's own tensors (not copies) by name, and its plain values as JSON."""
    names = _parameter_names(optimizer, model)
    state = {names[p]: _plain_values(entries) for p, entries in optimizer.state.items() if entries}
    groups = [_plain_values(_options(group)) for group in optimizer.param_groups]
    return dict(_tensors_of(optimizer, names)), {"state": state, "groups": groups}


@torch.no_grad()
def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    cuts: Mapping[str, Cut] | None = None,
) -> None:
    """Load an optimizer's state, in place. Names, shapes and dtypes are compared before any element is copied; the
    weights do not change. `cuts`: of the parameters that a tensor group has cut."""
    names = _parameter_names(optimizer, model)
    saved_state, saved_groups = values["state"], values["groups"]
    _check_names("parameters with state", saved_state, [name for name in names.values() if name in saved_state])
    _check_names("groups of options", map(str, range(len(saved_groups))), map(str, range(len(optimizer.param_groups))))
    for parameter, name in names.items():
        if name not in saved_state:
            optimizer.state.pop(parameter, None)  # it had not been updated yet
    new = [p for p, name in names.items() if name in saved_state and not optimizer.state.get(p)]
    if new:
        _make_state(optimizer, new)
    copy_into(parts_of(dict(_tensors_of(optimizer, names)), cuts or {}), tensors, what="optimizer")
    for parameter, name in names.items():
        _set_plain_values(optimizer.state.get(parameter, {}), saved_state.get(name, {}))
    for group, options in zip(optimizer.param_groups, saved_groups, strict=True):
        _set_plain_values(group, options)


def without_state_of(parameters: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's plain values without those of the given parameters, which other ranks hold."""
    return {**values, "state": {name: state for name, state in values["state"].items() if name not in parameters}}


def with_all_states(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the plain values of several optimizers that have their own parameters and the same groups of options."""
    return {**values[0], "state": {name: state for each in values for name, state in each["state"].items()}}


def _make_state(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]) -> None:
    """Create state to copy into in a fresh optimizer. Only the optimizer knows the shape, dtype and device of its state
    (a fused one counts its steps on the device, an 8-bit one packs), so it takes one step with zero gradients. The
    weights are restored, and the caller overwrites the state."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in every]
    chosen = set(parameters)
    for parameter in every:
        parameter.grad = torch.zeros_like(parameter) if parameter in chosen else None
    optimizer.step()
    for parameter, weight, gradient in before:
        parameter.copy_(weight)
        parameter.grad = gradient


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = [tuple(parameter.shape) for parameter in ours if parameter not in names]
    if unknown:
        raise ValueError(f"the optimizer holds tensors that are no parameters of the model: {unknown}")
    return {parameter: names[parameter] for parameter in ours}


def _tensors_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield from _unwrapped(f"{names[parameter]}.{key}", value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in _options(group).items():
            if isinstance(value, torch.Tensor):
                yield from _unwrapped(f"@group{number}.{key}", value)


def _unwrapped(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors inside one that wraps them, as torchao's 8-bit state does (codes, scales, a table)."""
    if is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"):  # a DTensor is saved as it is
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _unwrapped(f"{name}.{part}", getattr(tensor, part))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _plain_values(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}


def _set_plain_values(entries: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        was_tuple = isinstance(entries.get(key), tuple)  # JSON has lists only
        entries[key] = tuple(value) if was_tuple else value


# --- tensors into tensors ---------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_into(targets: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], *, what: str) -> None:
    """Copy in place: compiled code and fused kernels know these tensors by address."""
    _check_names(f"{what} tensors", saved, targets)
    wrong = [
        f"{name}: {_form(saved[name])} there, {_form(target)} here"
        for name, target in targets.items()
        if _form(saved[name]) != _form(target)
    ]
    if wrong:
        raise _does_not_fit(f"{what} tensors", wrong)
    if isinstance(saved, SavedTensors):
        saved.read_into(targets)
        return
    for name, target in targets.items():
        put(target, saved[name])


def _check_names(what: str, saved: Any, here: Any) -> None:
    saved, here = list(saved), list(here)
    missing = [f"{name}: here, not there" for name in here if name not in set(saved)]
    extra = [f"{name}: there, not here" for name in saved if name not in set(here)]
    if missing or extra:
        raise _does_not_fit(what, missing + extra)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _does_not_fit(what: str, found: list[str]) -> UserError:
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return UserError(
        f"the checkpoint's {what} do not fit",
        "; ".join(found[:SHOWN]) + more,
        "resume with the model, the recipe and the optimizer that the checkpoint was made with",
    )


# --- random generators ------------------------------------------------------------------------------------------------


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return the global generators of Python, NumPy (if it is loaded), torch and the device, as JSON."""
    version, numbers, next_gauss = random.getstate()
    values: dict[str, Any] = {
        "python": [version, list(numbers), next_gauss],
        "torch": _to_hex(torch.get_rng_state()),
    }
    if "numpy" in sys.modules:
        values["numpy"] = _numpy_state()
    if device.type == "cuda":
        values["cuda"] = _to_hex(torch.cuda.get_rng_state(device))
    return values


def restore_rng(values: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators. On another kind of device there is no state to restore, and the device keeps its own."""
    version, numbers, next_gauss = values["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    torch.set_rng_state(_from_hex(values["torch"]))
    if "numpy" in values:
        _restore_numpy(values["numpy"])
    if device.type == "cuda" and "cuda" in values:
        torch.cuda.set_rng_state(_from_hex(values["cuda"]), device)


def _numpy_state() -> dict[str, Any]:
    import numpy

    state = numpy.random.get_state(legacy=False)
    inner = {
        key: value.tolist() if isinstance(value, numpy.ndarray) else value for key, value in state["state"].items()
    }
    return {**state, "state": inner}


def _restore_numpy(saved: Mapping[str, Any]) -> None:
    import numpy

    numpy.random.set_state(
        {**saved, "state": {**saved["state"], "key": numpy.array(saved["state"]["key"], numpy.uint32)}}
    )


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
