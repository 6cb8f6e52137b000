"""AdamW for weights that exist in bf16 only: gradients and both moments are bf16 too, and no fp32 copy is kept.

    BF16AdamW(decay_groups(model.bfloat16(), 0.1), lr=6e-4, rounding="stochastic")      8 bytes per parameter in all

A bf16 number has 8 bits of mantissa. Rounded to the nearest, an update below 1/512 of its weight is lost, and most are,
so training stops. Two remedies (arXiv 2010.06192), both with the update computed in fp32:

stochastic  rounds up or down at random, in proportion: right on average, at no cost in memory
kahan       keeps what rounding cut off in a second bf16 tensor and adds it next time: 2 more bytes, 16 mantissa bits

The random numbers are seeded by the step and the tensor. So a step can be repeated, resuming needs no generator state,
and replicas of a model stay equal.
"""

from __future__ import annotations

from typing import Any

import torch

from redline.optim.adamw import BETAS
from redline.optim.groups import Groups
from redline.optim.per_tensor import PerTensor, State

EPS = 1e-8
LOWER_HALF = 0xFFFF  # the bits of an fp32 number that bf16 does not have


class BF16AdamW(PerTensor):
    def __init__(self, groups: Groups, *, lr: float, rounding: str, betas: tuple[float, float] = BETAS) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self.keeps_rest = {"stochastic": False, "kahan": True}[rounding]
        every = [weight for group in self.param_groups for weight in group["params"]]
        self.numbers = {weight: number for number, weight in enumerate(every)}

    def new_state(self, weight: torch.Tensor) -> State:
        names = ("first", "second", "rest") if self.keeps_rest else ("first", "second")
        return {name: torch.zeros_like(weight) for name in names}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        exact = weight.float()
        if self.keeps_rest:
            exact += state["rest"]
        exact.mul_(1 - group["lr"] * group["weight_decay"])
        exact.sub_(adamw_change(gradient.float(), state, group["betas"]), alpha=group["lr"])
        if self.keeps_rest:
            weight.copy_(exact)  # rounds to nearest
            state["rest"].copy_(exact.sub_(weight))
        else:
            weight.copy_(round_by_chance(exact, seed=(int(state["step"]) << 20) + self.numbers[weight]))


def adamw_change(gradient: torch.Tensor, state: State, betas: tuple[float, float]) -> torch.Tensor:
    """Return AdamW's update for a learning rate of 1, in fp32; the moments are rounded when they are stored."""
    beta1, beta2 = betas
    step = state["step"].item()
    first: torch.Tensor = state["first"].float().lerp_(gradient, 1 - beta1)
    second = state["second"].float().lerp_(gradient.square_(), 1 - beta2)
    state["first"].copy_(first)
    state["second"].copy_(second)
    return first.div_(1 - beta1**step).div_(second.div_(1 - beta2**step).sqrt_().add_(EPS))


def round_by_chance(exact: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Round fp32 in place to one of the two neighbours in bf16, the nearer the likelier: random bits are added below
    those that bf16 has, which carry with the right probability, and the rest is cut off."""
    generator = torch.Generator(exact.device).manual_seed(seed)
    bits = exact.view(torch.int32)
    noise = torch.randint(0, LOWER_HALF + 1, bits.shape, generator=generator, device=bits.device, dtype=bits.dtype)
    noise.mul_(exact.isfinite())  # a GPU's NaN is 0x7FFFFFFF: adding 1 would make it -0.0
    bits.add_(noise).bitwise_and_(~LOWER_HALF)
    return exact
