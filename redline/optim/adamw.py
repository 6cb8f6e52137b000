"""AdamW three ways: the same maths as a loop over tensors, as multi-tensor calls, and as one fused kernel.

build_optimizer("adamw-fused", model, learning_rate=6e-4, weight_decay=0.1)
"""

from __future__ import annotations

import torch
from torch import nn

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "adamw-loop": {"foreach": False, "fused": False},
    "adamw-foreach": {"foreach": True, "fused": False},
    "adamw-fused": {"fused": True},
}
BETAS = (0.9, 0.95)  # GPT-3's; the second is lower than Adam's default because language-model gradients drift


def build_optimizer(name: str, model: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Matrices decay; biases and LayerNorm gains do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, **OPTIMIZERS[name])


@torch.no_grad()
def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Back to step 0 in place: the tensors stay where compiled code and fused kernels know them."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
