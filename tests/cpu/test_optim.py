"""AdamW three ways is one AdamW: against the formula written out, against each other, and back to step 0 in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from redline.core.workload import Shape
from redline.model.gpt import GPT, initialise
from redline.optim import OPTIMIZERS, build_optimizer, reset_optimizer, warm_up
from redline.optim.adamw import BETAS

SHAPE = Shape(layers=1, heads=2, d_model=16, d_ff=64, vocab=61, sequence=8)
LEARNING_RATE, WEIGHT_DECAY, EPS = 1e-2, 0.1, 1e-8
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def model_of(*, tied: bool = True) -> GPT:
    model = GPT(SHAPE, tied=tied)
    initialise(model, seed=3)
    return model


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(name, model, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """With gradients drawn from a seed: the optimizer alone is under test."""
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@every_optimizer
def test_each_is_the_formula_of_adamw(name: str) -> None:
    model, expected = model_of(), model_of()
    take_steps(model, optimizer_of(name, model), 4)
    beta1, beta2 = BETAS
    first = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in expected.parameters()]
    second = [torch.zeros_like(moment) for moment in first]
    weights = [weight.double() for weight in weights_of(expected)]
    for step in range(1, 5):
        generator = torch.Generator().manual_seed(step - 1)
        for weight, m, v in zip(weights, first, second, strict=True):
            gradient = torch.randn(weight.shape, generator=generator).double()
            m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            v.mul_(beta2).add_(gradient**2, alpha=1 - beta2)
            decay = WEIGHT_DECAY if weight.dim() >= 2 else 0.0
            update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + EPS)
            weight.sub_(LEARNING_RATE * (update + decay * weight))  # decoupled: the decay never meets the moments
    for mine, theirs in zip(weights_of(model), weights, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused"])
def test_fast_ones_agree_with_the_loop(name: str) -> None:
    loop, fast = model_of(), model_of()
    take_steps(loop, optimizer_of("adamw-loop", loop), 10)
    take_steps(fast, optimizer_of(name, fast), 10)
    for one, other in zip(weights_of(loop), weights_of(fast), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_the_name_decides_the_implementation(name: str) -> None:
    defaults = optimizer_of(name, model_of()).defaults
    assert bool(defaults["fused"]) == (name == "adamw-fused")
    assert bool(defaults["foreach"]) == (name == "adamw-foreach")


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_and_vectors_do_not(tied: bool) -> None:
    model = model_of(tied=tied)
    decaying, others = optimizer_of("adamw-loop", model).param_groups
    assert decaying["weight_decay"] == WEIGHT_DECAY
    assert others["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decaying["params"]} == {
        n for n in names.values() if "ln_" not in n and "bias" not in n
    }
    every = [id(parameter) for group in (decaying, others) for parameter in group["params"]]
    assert sorted(every) == sorted(names)  # each once, a tied weight too


@every_optimizer
def test_reset_is_a_new_optimizer_in_the_old_tensors(name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 5)
    first_run = weights_of(model)
    places = [(key, value.data_ptr()) for state in optimizer.state.values() for key, value in state.items()]

    initialise(model, seed=3)
    reset_optimizer(optimizer)
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    take_steps(model, optimizer, 5)
    assert all(map(torch.equal, weights_of(model), first_run))
    assert places == [(key, value.data_ptr()) for state in optimizer.state.values() for key, value in state.items()]


def test_reset_before_the_first_step_does_nothing() -> None:
    reset_optimizer(optimizer_of("adamw-loop", model_of()))


def test_warm_up_is_linear_then_constant() -> None:
    rates = [warm_up(step, peak=2.0, warmup_steps=4) for step in range(7)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


@given(step=st.integers(0, 10**6), warmup_steps=st.integers(1, 10**4), peak=st.floats(1e-6, 1.0))
def test_warm_up_never_falls_never_passes_the_peak_and_never_starts_at_nothing(
    step: int, warmup_steps: int, peak: float
) -> None:
    now, later = (warm_up(at, peak=peak, warmup_steps=warmup_steps) for at in (step, step + 1))
    assert 0 < now <= later <= peak
