"""Other tensors in the place of a module's own, for a while.

    with replaced(model, fake.from_tensor) as used:     # sizes without numbers, copies in another type, ...
        loss = loss_of(batch)

Place by place and not name by name, as torch.func.functional_call does it: a module that is registered under two names
is one place, and would get back what was put there first as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def replaced(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters and buffers are converted, a shared one once; gives what takes their place."""
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
    """Where torch keeps each tensor: a table of its module, and a name in it."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _second_lists(module: nn.RNNBase) -> dict[str, Any]:
    """nn.LSTM and its kin list their weights a second time, and list them anew, in other memory on a GPU, once they see
    that these are others: put back as they were, nothing of that happens to the real ones."""
    return {name: module.__dict__[name] for name in ("_flat_weights", "_flat_weight_refs") if name in module.__dict__}
