"""Temporarily replaces a module's parameters and buffers by other tensors.

    with replaced(model, fake.from_tensor) as used:     # fake tensors, copies in another dtype, ...
        loss = loss_of(batch)

Tensors are replaced by place, not by name as torch.func.functional_call does it: a module that is registered under two
names is one place. By name, it would be restored to the replacement that was put there under its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def replaced(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Replace each parameter and buffer by `convert(tensor)`, a shared one once, and yield the replacements."""
    converted: dict[int, Any] = {}
    recurrent = [(each, _second_lists(each)) for each in model.modules() if isinstance(each, nn.RNNBase)]
    places = list(_places(model))
    for _, _, tensor in places:
        if id(tensor) not in converted:
            converted[id(tensor)] = convert(tensor)
    try:
        for table, name, tensor in places:
            table[name] = converted[id(tensor)]
        yield list(converted.values())
    finally:
        for table, name, tensor in places:
            table[name] = tensor
        for module, lists in recurrent:
            module.__dict__.update(lists)


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield where torch keeps each tensor: a table of its module, the name in it, and the tensor."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _second_lists(module: nn.RNNBase) -> dict[str, Any]:
    """nn.LSTM and the other RNNs keep a second list of their weights. Once they notice other weights, they rebuild it,
    on a GPU in new memory. Restoring the list keeps this from happening to the real weights."""
    return {name: module.__dict__[name] for name in ("_flat_weights", "_flat_weight_refs") if name in module.__dict__}
