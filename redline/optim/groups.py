"""Which parameters are treated alike: what decays, and what is a matrix of a layer.

decay_groups(model, 0.1) -> [{"params": [matrices], "weight_decay": 0.1}, {"params": [vectors], "weight_decay": 0.0}]
"""

from __future__ import annotations

from typing import Any

from torch import nn

Groups = list[dict[str, Any]]


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Matrices decay, embeddings among them; biases and LayerNorm gains do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Matrices inside a list of layers: neither embedding nor head, which stand beside the list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {parameter: None for layers in lists for parameter in layers.parameters()}  # each once, in their order
    return [parameter for parameter in inside if parameter.dim() == 2]
