"""Groups of parameters: those that decay, and the matrices of layers.

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
    """Return the matrices inside lists of layers, without embedding and head, which are outside the lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {parameter: None for layers in lists for parameter in layers.parameters()}  # each once, in their order
    return [parameter for parameter in inside if parameter.dim() == 2]
