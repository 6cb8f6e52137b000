"""Every optimizer by name. To add one: a row here, and one in predict/optimizers.py for its bytes.

    build_optimizer("adamw-fused", model, learning_rate=6e-4, weight_decay=0.1)
    build_optimizer("lion", model, **settings_for("lion", learning_rate=6e-4, weight_decay=0.1))

The second converts AdamW's settings, which a workload states. What each optimizer is for: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from redline.core.errors import UserError, unknown_name
from redline.optim.adafactor import Adafactor
from redline.optim.adamw import build_adamw, build_adamw_8bit
from redline.optim.bf16 import BF16AdamW
from redline.optim.groups import Groups, decay_groups
from redline.optim.lion import Lion
from redline.optim.muon import build_muon

MOMENTUM = 0.9  # of SGD


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    build: Callable[..., torch.optim.Optimizer]
    """(model, learning_rate=, weight_decay=) -> the optimizer. The share of a matrix that decays in a step is the
    product of the two, whatever the optimizer."""
    learning_rate_factor: float = 1.0
    """Its learning rate over AdamW's, as a starting point. Found on a small model (docs/optimizers.md)."""
    weights: torch.dtype = torch.float32
    """Dtype of the weights it updates."""
    needs: str | None = None
    """A package that it needs and that redline does not install."""


def _from_groups(rule: Callable[..., torch.optim.Optimizer], **settings: str) -> Callable[..., torch.optim.Optimizer]:
    def build(model: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        return rule(decay_groups(model, weight_decay), lr=learning_rate, **settings)

    return build


def _sgd(groups: Groups, *, lr: float) -> torch.optim.Optimizer:
    """Build SGD with a decay that allows for the momentum: torch adds the decay to the gradient, where the momentum
    multiplies it by 1 / (1 - momentum)."""
    for group in groups:
        group["weight_decay"] *= 1 - MOMENTUM
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, fused=True)
    # torch creates the momentum at the first step, and leaves it uninitialised if that step is skipped for an overflow.
    for weight in (weight for group in groups for weight in group["params"]):
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


OPTIMIZERS = {
    "adamw-loop": OptimizerRow(build=partial(build_adamw, foreach=False, fused=False)),
    "adamw-foreach": OptimizerRow(build=partial(build_adamw, foreach=True, fused=False)),
    "adamw-fused": OptimizerRow(build=partial(build_adamw, fused=True)),
    "adamw-8bit": OptimizerRow(build=build_adamw_8bit, needs="torchao"),
    "adamw-bf16": OptimizerRow(build=_from_groups(BF16AdamW, rounding="stochastic"), weights=torch.bfloat16),
    "adamw-bf16-kahan": OptimizerRow(build=_from_groups(BF16AdamW, rounding="kahan"), weights=torch.bfloat16),
    "adafactor": OptimizerRow(build=_from_groups(Adafactor)),
    "lion": OptimizerRow(build=_from_groups(Lion), learning_rate_factor=0.1),
    "sgd-momentum": OptimizerRow(build=_from_groups(_sgd), learning_rate_factor=50.0),
    "muon": OptimizerRow(build=build_muon),
}


def find_row(name: str) -> OptimizerRow:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def build_optimizer(name: str, model: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build an optimizer by name. Matrices decay; biases and LayerNorm gains do not. The settings are the optimizer's
    own: see `settings_for`."""
    row = find_row(name)
    check_package(name, row.needs)
    check_weights(name, model, row.weights)
    return row.build(model, learning_rate=learning_rate, weight_decay=weight_decay)


def settings_for(name: str, *, learning_rate: float, weight_decay: float) -> dict[str, float]:
    """Convert AdamW's settings for another optimizer: the rate times its factor, with the same decay per step."""
    factor = find_row(name).learning_rate_factor
    return {"learning_rate": learning_rate * factor, "weight_decay": weight_decay / factor}


def check_package(name: str, package: str | None) -> None:
    if package is not None and find_spec(package) is None:
        raise UserError(
            f"{name} needs the package {package}",
            "that package provides it; it is not installed, and redline does not install it",
            f"pip install {package}, or use an optimizer that needs no package, such as adamw-bf16",
        )


def check_weights(name: str, model: nn.Module, wanted: torch.dtype) -> None:
    wrong = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} - {wanted}
    if not wrong:
        return
    found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wrong))
    if wanted is torch.bfloat16:
        why, fix = "it is made for weights without an fp32 copy", "convert the model first: model.bfloat16()"
    else:
        why = "it is made for fp32 weights"
        if all(dtype.itemsize < wanted.itemsize for dtype in wrong):
            why = "rounded to 16 bits, most updates are smaller than the last bit of their weight and are lost"
        fix = "keep fp32 weights and use autocast, or take adamw-bf16 or adamw-bf16-kahan with model.bfloat16()"
    raise UserError(f"{name} wants {str(wanted).removeprefix('torch.')} weights and got {found}", why, fix)


@torch.no_grad()
def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Reset to step 0 in place: the tensors stay where compiled code and fused kernels expect them."""
    for state in optimizer.state.values():
        for value in state.values():
            for tensor in _changing(value):
                tensor.zero_()


def _changing(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that steps write to. An 8-bit moment has codes, scales, and a map from codes to numbers, which
    must stay."""
    if hasattr(value, "codes") and hasattr(value, "scale"):
        yield from (value.codes, value.scale)
    elif isinstance(value, torch.Tensor):
        yield value
