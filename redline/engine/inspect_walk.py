"""Walks a user's module: where its layers are made, its longest list of blocks, its embeddings, what it shares.

    with noting_places() as made:
        model = factory()
    walked(model, made)

Nothing but the factory is run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from redline.core.traced import Blocks, Embedding, Place, Recurrent, Tensors, Unlisted
from redline.engine.inspect_trace import place
from redline.model.python_adapter import is_tanh_gelu
from redline.optim.groups import layer_matrices

LISTS = (nn.ModuleList, nn.Sequential)
Made = dict[nn.Module, Place]
"""Modules, each with the line that made it."""


@contextmanager
def noting_places() -> Iterator[Made]:
    """Note where modules are made. A module registers its parameters in its constructor, while the line that creates it
    is on the stack."""
    made: Made = {}

    def note(module: nn.Module) -> None:
        where = place()
        if where is not None:
            made.setdefault(module, where)

    hooks = (
        register_module_parameter_registration_hook(lambda module, name, parameter: note(module)),
        # A module without parameters of its own gets the line that registers it under a name.
        register_module_module_registration_hook(lambda module, name, child: None if child is None else note(child)),
    )
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def walked(model: nn.Module, made: Made) -> dict[str, Any]:
    """Return the fields of a `Traced` that need no pass."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if parameter.dtype is not torch.float32]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable": sum(parameter.numel() for parameter in trainable),
        "other_numbers": sum(parameter.numel() for parameter in others),
        "other_bytes": sum(parameter.nbytes for parameter in others),
        "tensors": tuple(tensors(model)),
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "blocks": (blocks := longest_list(model)),
        "unlisted": side_by_side(model, made) if blocks is None else None,
        "embeddings": tuple(embeddings(model, made)),
        "recurrent": tuple(dict.fromkeys(recurrent(model))),
        "shared": tuple(shared(model)),
        "tanh_gelus": sum(map(is_tanh_gelu, model.modules())),
    }


def tensors(model: nn.Module) -> Iterator[Tensors]:
    of_layers = set(layer_matrices(model))
    trained = [each for each in model.parameters() if each.requires_grad]
    found = Counter((tuple(each.shape), each in of_layers) for each in trained)
    for (sizes, of_layer), count in found.items():
        yield Tensors(sizes=sizes, of_layer=of_layer, count=count)


def longest_list(model: nn.Module) -> Blocks | None:
    found = [
        Blocks(name=name, kind=type(module[0]).__name__, count=len(module))
        for name, module in model.named_modules()
        if isinstance(module, LISTS) and len(module) > 1 and _alike(module)
    ]
    return max(found, key=lambda blocks: blocks.count, default=None)


def _alike(modules: nn.ModuleList | nn.Sequential) -> bool:
    """True for modules of one class, with parameters: a list of activations is not worth recomputing."""
    return len({type(module) for module in modules}) == 1 and any(True for _ in modules[0].parameters())


def side_by_side(model: nn.Module, made: Made) -> Unlisted | None:
    """Return the group of equal modules under one parent that holds the most parameters."""
    groups: dict[Any, list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        for child in module.children():
            if sizes := tuple(each.shape for each in child.parameters()):
                groups[name, type(child), sizes].append(child)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return None
    largest = max(several, key=lambda group: sum(each.numel() for module in group for each in module.parameters()))
    lines = dict.fromkeys(made[module] for module in largest if module in made)
    return Unlisted(kind=type(largest[0]).__name__, count=len(largest), made=tuple(lines))


def embeddings(model: nn.Module, made: Made) -> Iterator[Embedding]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield Embedding(name=name, rows=module.num_embeddings, width=module.embedding_dim, made=made.get(module))


def recurrent(model: nn.Module) -> Iterator[Recurrent]:
    names = starred(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            weight, width = next(module.parameters()), module.hidden_size
            yield Recurrent(where=names[name], width=width, gates=weight.size(0) // width)


def shared(model: nn.Module) -> Iterator[str]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    yield from (" = ".join(alike) for alike in names.values() if len(alike) > 1)


def starred(model: nn.Module) -> dict[str, str]:
    """Map every module's name, as blocks.3.mlp -> blocks.*.mlp: equal layers share a name, and only they."""
    lists = {name for name, module in model.named_modules() if isinstance(module, LISTS) and _equal(module)}
    found = {"": ""}
    for name, _ in model.named_modules():
        if name:
            parent, _, own = name.rpartition(".")
            shown = "*" if parent in lists else own
            found[name] = f"{found[parent]}.{shown}" if parent else shown
    return found


def _equal(modules: nn.ModuleList | nn.Sequential) -> bool:
    """True for modules of one class with parameters of the same sizes."""
    return len({(type(module), *(each.shape for each in module.parameters())) for module in modules}) == 1
