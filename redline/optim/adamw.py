"""AdamW as torch and torchao have it: a loop over tensors, multi-tensor calls, one fused kernel, 8-bit moments.

build_adamw(model, learning_rate=6e-4, weight_decay=0.1, fused=True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redline.optim.groups import decay_groups

BETAS = (0.9, 0.95)  # GPT-3's; the second is lower than Adam's default because language-model gradients drift


def build_adamw(model: nn.Module, *, learning_rate: float, weight_decay: float, **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=BETAS, **how)


def build_adamw_8bit(model: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build AdamW with 8-bit moments, 256 to a scale (arXiv 2110.02861). Its first step compiles a kernel per shape."""
    from torchao.optim import AdamW8bit  # an optional dependency, and takes seconds to import

    optimizer: torch.optim.Optimizer = AdamW8bit(decay_groups(model, weight_decay), lr=learning_rate, betas=BETAS)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    keep_float_rates(optimizer)
    return optimizer


def keep_float_rates(optimizer: torch.optim.Optimizer) -> None:
    """Make learning rates tensors during a step only. torchao requires tensors, since it would compile a float in as a
    constant; everyone else sets and reads floats."""
    rates = [0.0] * len(optimizer.param_groups)

    def to_tensors(*_: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            rates[number] = float(group["lr"])
            group["lr"] = torch.tensor(rates[number])

    def to_floats(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(to_tensors)
    optimizer.register_step_post_hook(to_floats)
