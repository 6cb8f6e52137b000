"""Every optimizer of the table: against its formula or another implementation, its bytes against predict/optimizers.py,
back to step 0 in place, through a state dict, under a gradient scaler, and on the small model beside AdamW.

torchao compiles its update, for a minute on two cores; here the same function runs uncompiled.
"""

from __future__ import annotations

import importlib.util
import io
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline import optim
from redline.commands.common import options_of
from redline.commands.train import add_train
from redline.commands.train_order import settings_of
from redline.commands.train_recipe import other_optimizer
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget
from redline.core.workload import Shape, Workload
from redline.data.batches import TokenBatches, stream_batches
from redline.engine.build import build_step, optimizer_settings
from redline.model.gpt import GPT, initialise
from redline.optim import OPTIMIZERS, build_optimizer, make_schedule, reset_optimizer, settings_for
from redline.optim.adamw import BETAS
from redline.optim.bf16 import round_by_chance
from redline.optim.groups import layer_matrices
from redline.optim.lion import BETAS as LION_BETAS
from redline.optim.table import MOMENTUM
from redline.predict import optimizers as predicted
from redline.rungs import plan_of
from redline.rungs.ladder import with_optimizer

SHAPE = Shape(layers=2, heads=2, d_model=64, d_ff=256, vocab=61, sequence=8)
LEARNING_RATE, WEIGHT_DECAY, EPS = 1e-2, 0.1, 1e-8
ADAMWS = ("adamw-loop", "adamw-foreach", "adamw-fused")
HARDWARE = Hardware(kind="cuda", name="a GPU", cpu_cores=2, features=("bf16", "compile"), missing={})
has_torchao = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not has_torchao, reason="torchao, an extra, is not installed")
NAMES = [pytest.param(name, marks=[needs_torchao] if row.needs else []) for name, row in OPTIMIZERS.items()]
FP32_NAMES = [
    pytest.param(name, marks=[needs_torchao] if row.needs else [])
    for name, row in OPTIMIZERS.items()
    if row.weights is torch.float32
]
every_optimizer = pytest.mark.parametrize("name", NAMES)
every_adamw = pytest.mark.parametrize("name", ADAMWS)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module", autouse=True)
def torchao_is_imported() -> None:
    """Its import warns of its own syntax where nothing has compiled it yet, as pip does."""
    if has_torchao:
        with warnings.catch_warnings(action="ignore"):
            import torchao.optim  # noqa: F401


def model_for(name: str, *, tied: bool = True, shape: Shape = SHAPE) -> GPT:
    model = GPT(shape, tied=tied).to(OPTIMIZERS[name].weights)
    initialise(model, seed=3)
    return model


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(name, model, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def gradients_at(step: int, model: nn.Module) -> list[torch.Tensor]:
    """Drawn from a seed: the optimizer alone is under test."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        for parameter, gradient in zip(model.parameters(), gradients_at(step, model), strict=True):
            parameter.grad = gradient
        optimizer.step()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def exact_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """With what Kahan summation keeps beside them: how the two share a number may change at a tie."""
    return [p.detach().float() + optimizer.state[p].get("rest", 0.0) for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def parts(value: Any) -> dict[str, torch.Tensor]:
    """The plain tensors a value is made of: an 8-bit moment has three."""
    if hasattr(value, "__tensor_flatten__"):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    return {"": value}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    return [(f"{key}.{part}", tensor) for key, value in states for part, tensor in parts(value).items()]


# the formulas

Reference = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int], torch.Tensor]


def follow(reference: Reference, model: nn.Module, steps: int) -> list[torch.Tensor]:
    """The weights in fp64 after steps of weight -= rate * (reference's update + decay * weight)."""
    weights = [weight.double() for weight in weights_of(model)]
    states: list[dict[str, torch.Tensor]] = [{} for _ in weights]
    for step in range(steps):
        for weight, gradient, state in zip(weights, gradients_at(step, model), states, strict=True):
            update = reference(weight, gradient.double(), state, step + 1)
            decay = WEIGHT_DECAY if weight.dim() == 2 else 0.0  # decoupled: the decay never meets the moments
            weight.sub_(LEARNING_RATE * (update + decay * weight))
    return weights


def adamw_reference(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
) -> torch.Tensor:
    (beta1, beta2), zero = BETAS, torch.zeros_like(weight)
    m = beta1 * state.get("m", zero) + (1 - beta1) * gradient
    v = beta2 * state.get("v", zero) + (1 - beta2) * gradient**2
    state.update(m=m, v=v)
    return (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + EPS)


def rounded_adamw_reference(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
) -> torch.Tensor:
    """The same with moments that are stored in bf16."""
    update = adamw_reference(weight, gradient, state, step)
    state.update({name: moment.float().bfloat16().double() for name, moment in state.items()})
    return update


def lion_reference(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
) -> torch.Tensor:
    beta1, beta2 = LION_BETAS
    m = state.get("m", torch.zeros_like(weight))
    state["m"] = beta2 * m + (1 - beta2) * gradient
    return torch.sign(beta1 * m + (1 - beta1) * gradient)


@pytest.mark.parametrize(
    ("name", "reference"), [*((name, adamw_reference) for name in ADAMWS), ("lion", lion_reference)]
)
def test_each_is_its_formula(name: str, reference: Reference) -> None:
    model = model_for(name)
    expected = follow(reference, model, 4)
    take_steps(model, optimizer_of(name, model), 4)
    for mine, theirs in zip(weights_of(model), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


def test_sgd_is_its_formula() -> None:
    """The decay goes with the gradient here, a tenth of it because momentum adds up ten."""
    model = model_for("sgd-momentum")
    weights = [weight.double() for weight in weights_of(model)]
    moments = [torch.zeros_like(weight) for weight in weights]
    for step in range(4):
        for weight, moment, gradient in zip(weights, moments, gradients_at(step, model), strict=True):
            decay = 0.1 * WEIGHT_DECAY if weight.dim() == 2 else 0.0
            moment.mul_(MOMENTUM).add_(gradient.double() + decay * weight)
            weight.sub_(LEARNING_RATE * moment)
    take_steps(model, optimizer_of("sgd-momentum", model), 4)
    for mine, theirs in zip(weights_of(model), weights, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused"])
def test_fast_ones_agree_with_the_loop(name: str) -> None:
    loop, fast = model_for("adamw-loop"), model_for(name)
    take_steps(loop, optimizer_of("adamw-loop", loop), 10)
    take_steps(fast, optimizer_of(name, fast), 10)
    for one, other in zip(weights_of(loop), weights_of(fast), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@every_adamw
def test_the_name_decides_the_implementation(name: str) -> None:
    defaults = optimizer_of(name, model_for(name)).defaults
    assert bool(defaults["fused"]) == (name == "adamw-fused")
    assert bool(defaults["foreach"]) == (name == "adamw-foreach")


def test_adafactor_is_that_of_transformers() -> None:
    from transformers.optimization import Adafactor as Theirs

    mine, theirs = model_for("adafactor"), model_for("adafactor")
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    fixed = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    take_steps(mine, optimizer_of("adafactor", mine), 10)
    take_steps(theirs, Theirs(groups, lr=LEARNING_RATE, beta1=0.9, **fixed), 10)
    for one, other in zip(weights_of(mine), weights_of(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_is_torchs_for_the_layers_and_adamw_for_the_rest(tied: bool) -> None:
    mine, theirs = model_for("muon", tied=tied), model_for("muon", tied=tied)
    names = [name for name, p in theirs.named_parameters() if name.startswith("h.") and p.dim() == 2]
    of_muon = [theirs.get_parameter(name) for name in names]
    tables = [p for name, p in theirs.named_parameters() if not name.startswith("h.") and p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(of_muon, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": tables, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    for step in range(5):
        take_steps(theirs, muon, 1, first=step)
        adamw.step()
    take_steps(mine, optimizer_of("muon", mine), 5)
    assert same(weights_of(mine), weights_of(theirs))


def test_muon_moves_a_matrix_by_as_much_as_adamw_would_in_every_direction() -> None:
    """Singular values of the first update: equal within the tolerance of five Newton-Schulz steps (0.5 to 1.5 of their
    mean), whatever those of the gradient, and 0.2 of the learning rate per number in the root mean square."""
    model = model_for("muon")
    matrix = model.h[0].mlp.c_fc.weight
    optimizer = build_optimizer("muon", model, learning_rate=LEARNING_RATE, weight_decay=0.0)
    before = matrix.detach().clone()
    take_steps(model, optimizer, 1)
    moved = matrix.detach() - before
    values = torch.linalg.svdvals(moved)
    assert values.max() < 3 * values.min()
    assert moved.square().mean().sqrt() == pytest.approx(0.2 * LEARNING_RATE, rel=0.25)


@needs_torchao
def test_8bit_adamw_starts_as_adamw_and_stays_near_it() -> None:
    """The first update uses the moments before they are rounded; later ones differ by rounding of the moments."""
    exact, rounded = model_for("adamw-loop"), model_for("adamw-8bit")
    start = weights_of(exact)
    optimizers = optimizer_of("adamw-loop", exact), optimizer_of("adamw-8bit", rounded)
    for model, optimizer in zip((exact, rounded), optimizers, strict=True):
        take_steps(model, optimizer, 1)
    for one, other in zip(weights_of(exact), weights_of(rounded), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for model, optimizer in zip((exact, rounded), optimizers, strict=True):
        take_steps(model, optimizer, 9, first=1)
    for one, other, first in zip(weights_of(exact), weights_of(rounded), start, strict=True):
        assert (one - other).norm() < 0.1 * (one - first).norm()
    quantised = optimizers[1].state[rounded.h[0].mlp.c_fc.weight]["exp_avg"]
    moment = optimizers[0].state[exact.h[0].mlp.c_fc.weight]["exp_avg"]
    assert 0 < (quantised.dequantize() - moment).norm() < 0.05 * moment.norm()


# weights in bf16 only


def test_kahan_is_adamw_in_double_precision_but_for_the_moments() -> None:
    """Weight and rest have 16 bits together: 20 updates agree with fp64 to 20 times half the last of them."""
    model = model_for("adamw-bf16-kahan")
    expected = follow(rounded_adamw_reference, model, 20)
    optimizer = optimizer_of("adamw-bf16-kahan", model)
    take_steps(model, optimizer, 20)
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        both = parameter.detach().double() + optimizer.state[parameter]["rest"].double()
        torch.testing.assert_close(both, theirs, rtol=20 * 2.0**-17, atol=2e-6)
        torch.testing.assert_close(parameter.detach().double(), theirs, rtol=2.0**-8, atol=2e-6)


def test_stochastic_rounding_is_adamw_on_average() -> None:
    model = model_for("adamw-bf16")
    expected = follow(rounded_adamw_reference, model, 20)
    take_steps(model, optimizer_of("adamw-bf16", model), 20)
    for mine, theirs in zip(weights_of(model), expected, strict=True):
        error = mine.double() - theirs
        assert error.abs().max() <= 20 * 2.0**-7 * theirs.abs().max()
        assert error.mean().abs() <= 4 * error.std() / math.sqrt(error.numel()) + 1e-6  # no drift


@pytest.mark.parametrize(("name", "tolerance"), [("adamw-bf16-kahan", 2.0**-8), ("adamw-bf16", 3e-4)])
def test_updates_below_the_last_bit_are_not_lost(name: str, tolerance: float) -> None:
    """A hundred steps of 1e-4 from 1.0, where bf16's next number down is 1 - 2^-8: rounded to the nearest, nothing
    would ever move. Over 10,000 weights the mean of chance is sharp."""
    model = nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(name, model, learning_rate=1e-4, weight_decay=0.0)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert model.weight.double().mean().item() == pytest.approx(0.99, abs=tolerance)


def test_rounding_by_chance_takes_a_neighbour_in_proportion() -> None:
    low, high = 1.0, 1.0 + 2.0**-7  # neighbours in bf16
    for sign, share in ((1, 0.25), (-1, 0.25), (1, 0.9)):
        exact = torch.full((40_000,), sign * (low + share * (high - low)))
        rounded = round_by_chance(exact.clone(), seed=5)
        assert set(rounded.tolist()) == {sign * low, sign * high}
        assert (rounded == sign * high).double().mean().item() == pytest.approx(share, abs=0.01)


def test_rounding_by_chance_repeats_itself_and_leaves_bf16_numbers_and_what_is_no_number() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(round_by_chance(exact.clone(), seed=5), round_by_chance(exact.clone(), seed=5))
    assert not torch.equal(round_by_chance(exact.clone(), seed=5), round_by_chance(exact.clone(), seed=6))
    narrow = exact.bfloat16().float()
    assert torch.equal(round_by_chance(narrow.clone(), seed=5), narrow)
    nan_of_a_gpu = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    odd = torch.cat([nan_of_a_gpu.repeat(100), torch.tensor([math.inf, -math.inf, 0.0])])
    assert torch.equal(round_by_chance(odd.clone(), seed=5).isnan(), odd.isnan())
    assert round_by_chance(odd.clone(), seed=5)[100:].tolist() == [math.inf, -math.inf, 0.0]


# what all of them promise


@pytest.mark.parametrize("tied", [True, False])
@every_optimizer
def test_matrices_decay_and_vectors_do_not(name: str, tied: bool) -> None:
    model = model_for(name, tied=tied)
    optimizer = optimizer_of(name, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decaying == {name for name in names.values() if "ln_" not in name and "bias" not in name}
    every = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(every) == sorted(names)  # each once, a tied weight too


@every_optimizer
def test_the_share_that_decays_is_rate_times_decay(name: str) -> None:
    """Without gradients; SGD's needs its momentum to settle, and is then 4 % more."""
    model = model_for(name)
    optimizer = build_optimizer(name, model, learning_rate=0.04, weight_decay=0.1)
    vectors = [parameter.clone() for parameter in model.parameters() if parameter.dim() == 1]

    def shrink(steps: int) -> list[float]:
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return [parameter.double().norm().item() for parameter in model.parameters() if parameter.dim() == 2]

    settled = shrink(40)
    for before, after in zip(settled, shrink(10), strict=True):
        assert 1 - after / before == pytest.approx(1 - (1 - 0.004) ** 10, rel=0.06)
    assert same([p.detach() for p in model.parameters() if p.dim() == 1], vectors)


@every_optimizer
def test_a_closure_is_run_before_the_update_with_gradients_on(name: str) -> None:
    """Lightning leaves forward and backward pass to the optimizer so."""
    by_hand, by_closure = model_for(name), model_for(name)
    take_steps(by_hand, optimizer_of(name, by_hand), 1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        for parameter, gradient in zip(by_closure.parameters(), gradients_at(0, by_closure), strict=True):
            parameter.grad = gradient
        return 2.5

    assert optimizer_of(name, by_closure).step(closure) == 2.5
    assert same(weights_of(by_hand), weights_of(by_closure))


@every_optimizer
def test_the_rate_can_be_set_before_each_step(name: str) -> None:
    model = model_for(name)
    optimizer = optimizer_of(name, model)
    assert {group["lr"] for group in optimizer.param_groups} == {LEARNING_RATE}
    take_steps(model, optimizer, 2)
    assert {group["lr"] for group in optimizer.param_groups} == {LEARNING_RATE}
    before = exact_weights(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(model, optimizer, 1, first=2)
    assert same(exact_weights(model, optimizer), before)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    take_steps(model, optimizer, 1, first=3)
    assert not any(map(torch.equal, exact_weights(model, optimizer), before))


@every_optimizer
def test_a_row_without_gradients_stays_a_number(name: str) -> None:
    """A token that never came up; before the first step everything divides by its moments."""
    model = model_for(name, tied=False)
    optimizer = optimizer_of(name, model)
    for step in range(3):
        for parameter, gradient in zip(model.parameters(), gradients_at(step, model), strict=True):
            parameter.grad = gradient
        model.wte.weight.grad[7] = 0.0
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    kept = (1 - LEARNING_RATE * WEIGHT_DECAY) ** 3
    start = model_for(name, tied=False).wte.weight[7]
    torch.testing.assert_close(model.wte.weight[7], kept * start, rtol=3 * 2.0**-7, atol=1e-7)


@every_optimizer
def test_reset_is_a_new_optimizer_in_the_old_tensors(name: str) -> None:
    model = model_for(name)
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 1)
    fresh_moments = {key for key, tensor in state_tensors(optimizer) if tensor.any()}
    initialise(model, seed=3)
    reset_optimizer(optimizer)
    take_steps(model, optimizer, 4)
    first_run = weights_of(model)
    places = [(key, tensor.data_ptr()) for key, tensor in state_tensors(optimizer)]

    initialise(model, seed=3)
    reset_optimizer(optimizer)
    left = {key for key, tensor in state_tensors(optimizer) if tensor.any()}
    assert left == {key for key in fresh_moments if key.endswith(".qmap")}  # what 8-bit codes stand for
    take_steps(model, optimizer, 4)
    assert same(weights_of(model), first_run)
    assert places == [(key, tensor.data_ptr()) for key, tensor in state_tensors(optimizer)]

    model = model_for(name)
    take_steps(model, optimizer_of(name, model), 4)
    assert same(weights_of(model), first_run)  # and the same as one that was never used


def test_reset_before_the_first_step_does_nothing() -> None:
    reset_optimizer(optimizer_of("adamw-loop", model_for("adamw-loop")))


@every_optimizer
def test_a_state_dict_goes_on_bit_for_bit(name: str) -> None:
    model = model_for(name)
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    other = model_for(name)
    other.load_state_dict(saved["model"])
    resumed = build_optimizer(name, other, learning_rate=1.0, weight_decay=0.0)  # the saved groups replace these
    resumed.load_state_dict(saved["optimizer"])
    assert {group["lr"] for group in resumed.param_groups} == {LEARNING_RATE}
    take_steps(model, optimizer, 3, first=3)
    take_steps(other, resumed, 3, first=3)
    assert same(weights_of(other), weights_of(model))
    for (key, mine), (other_key, theirs) in zip(state_tensors(resumed), state_tensors(optimizer), strict=True):
        assert (key, mine.dtype) == (other_key, theirs.dtype)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", FP32_NAMES)
def test_a_gradient_scaler_changes_nothing_and_skips_what_overflowed(name: str) -> None:
    """bf16 weights need no scaler: their gradients have the range of fp32."""
    plain, scaled = model_for(name), model_for(name)
    alone, beside = optimizer_of(name, plain), optimizer_of(name, scaled)
    take_steps(plain, alone, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(torch.zeros(1))  # makes the scale
    for step in (99, 0, 1, 99, 2):  # at the very first step there is no state yet
        for parameter, gradient in zip(scaled.parameters(), gradients_at(step, scaled), strict=True):
            parameter.grad = gradient * scaler.get_scale()  # a power of two: exact
        if step == 99:
            scaled.h[0].mlp.c_fc.weight.grad[0, 0] = math.inf
        scaler.unscale_(beside)
        scaler.step(beside)
        scaler.update()
    assert scaler.get_scale() == 2.0**12
    assert same(weights_of(scaled), weights_of(plain))


# bytes


def test_both_tables_have_the_same_rows() -> None:
    assert set(predicted.OPTIMIZERS) == set(OPTIMIZERS)
    for name, row in OPTIMIZERS.items():
        assert row.weights.itemsize == predicted.OPTIMIZERS[name].weights


@pytest.mark.parametrize("tied", [True, False])
@every_optimizer
def test_the_state_has_the_bytes_of_the_table(name: str, tied: bool) -> None:
    model = model_for(name, tied=tied)
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 2)
    row = predicted.OPTIMIZERS[name]
    inside = set(layer_matrices(model))
    for parameter in model.parameters():
        held = [
            tensor
            for key, value in optimizer.state[parameter].items()
            if key != "step"
            for tensor in parts(value).values()
        ]
        expected = row.state_bytes(tuple(parameter.shape), of_layer=parameter in inside)
        assert sum(tensor.nbytes for tensor in held) == expected
        assert parameter.nbytes == parameter.grad.nbytes == row.weights * parameter.numel()


class Alive(TorchDispatchMode):
    """Adds up the storages that exist, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.now)
        return result


@pytest.mark.parametrize("vocab", [512, 4096], ids=["layers", "vocabulary"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw-8bit"])  # uncompiled it says nothing
def test_what_an_update_needs_for_a_moment(name: str, vocab: int) -> None:
    model = model_for(name, tied=False, shape=Shape(layers=2, heads=4, d_model=128, d_ff=512, vocab=vocab, sequence=8))
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 1)
    alive = Alive()
    for tensor in (
        *model.parameters(),
        *(p.grad for p in model.parameters()),
        *(t for _, t in state_tensors(optimizer)),
    ):
        alive.watch(tensor)
    before = alive.now
    with alive:
        optimizer.step()
    row, sizes = predicted.OPTIMIZERS[name], [p.numel() for p in model.parameters()]
    expected = row.of_all * sum(sizes) + row.of_largest * max(sizes) + row.of_previous * 128 * 512
    assert alive.peak - before == pytest.approx(expected, rel=0.04)


# what an update moves


class Moved(TorchDispatchMode):
    """Bytes that each operator reads and writes, a tensor that it takes twice once; and how many ran on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.elementwise = self.of_matmuls = self.matmul_flops = 0
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if func.is_view or not name.startswith("aten.") or name in ("aten.detach", "aten._local_scalar_dense"):
            return out
        read = {id(t): t.nbytes for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        if name == "aten.copy_":
            del read[id(args[0])]
        written = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        if args and isinstance(args[0], torch.Tensor) and name == "aten.add_" and args[0].numel() == 1:
            return out  # the counter of steps, on the host
        self.kernels += 1
        if name in ("aten.mm", "aten.addmm"):
            left, right = args[-2:]
            self.matmul_flops += 2 * left.size(0) * left.size(1) * right.size(1)
            # X and its transpose are two tensors over one memory.
            shared = left.nbytes if left.data_ptr() == right.data_ptr() and left is not right else 0
            self.of_matmuls += sum(read.values()) + written - shared
        else:
            self.elementwise += sum(read.values()) + written
        return out


BY_OPERATORS = [name for name, row in predicted.OPTIMIZERS.items() if row.kernels_per_matrix and name != "adamw-8bit"]


@pytest.mark.parametrize("name", BY_OPERATORS)
def test_an_update_moves_the_bytes_of_the_table_in_as_many_kernels(name: str) -> None:
    """Of those that are made of torch's operators. Fused kernels show their arguments and not what they do."""
    model = model_for(name, tied=False, shape=Shape(layers=2, heads=4, d_model=128, d_ff=512, vocab=512, sequence=8))
    optimizer = optimizer_of(name, model)
    take_steps(model, optimizer, 1)
    rest = set() if name != "muon" else set(model.parameters()) - set(layer_matrices(model))
    for parameter in rest:
        parameter.grad = None  # the fused AdamW's
    with Moved() as moved:
        optimizer.step()
    row, inside = predicted.OPTIMIZERS[name], set(layer_matrices(model))
    updates = [row.update(tuple(p.shape), of_layer=p in inside) for p in model.parameters() if p not in rest]
    assert moved.elementwise == pytest.approx(sum(one.bytes for one in updates), rel=0.01)  # rows, columns, scalars
    assert moved.kernels == sum(one.kernels for one in updates)
    assert moved.matmul_flops == sum(one.matmul_flops for one in updates)
    assert moved.of_matmuls == sum(one.matmul_bytes for one in updates)


# training

ADAMW_STEPS = 120
SEEDS_DIFFER = 0.2
"""Nats between two seeds of AdamW itself on this model: nearer than that is as near as one can say."""
# Steps, and nats that the loss may lie above AdamW's.
BANDS = {
    "adamw-foreach": (ADAMW_STEPS, 1e-3),  # the same rule, other rounding
    "adamw-fused": (ADAMW_STEPS, 1e-3),
    "adamw-8bit": (ADAMW_STEPS, SEEDS_DIFFER / 2),  # the same but for the moments' rounding: 0.04 below
    "adamw-bf16": (ADAMW_STEPS, SEEDS_DIFFER / 2),  # the same but for the weights' rounding: within 0.03
    "adamw-bf16-kahan": (ADAMW_STEPS, SEEDS_DIFFER / 2),
    "adafactor": (ADAMW_STEPS, 0.0),  # other rules, and 0.2 better here
    "muon": (ADAMW_STEPS, 0.0),
    "sgd-momentum": (ADAMW_STEPS, 0.3),  # one rate for all tensors: 0.18 above
    # Its moment remembers fifty steps and every step is of one size: this model and batch take four times as many.
    "lion": (500, SEEDS_DIFFER),
}
# The same rule as the loop's (test_fast_ones_agree_with_the_loop, test_8bit_adamw_starts_as_adamw_and_stays_near_it),
# or four times as many steps.
LONG = ("adamw-foreach", "adamw-fused", "adamw-8bit", "lion")
TRAINED = [
    pytest.param(name, marks=[*([pytest.mark.long] if name in LONG else []), *([needs_torchao] if row.needs else [])])
    for name, row in OPTIMIZERS.items()
    if name != "adamw-loop"
]


def loss_after(name: str, steps: int, workload: Workload, tokens: Path) -> float:
    """The mean of the last ten, through the rung, with a cosine that ends there and the optimizer's own peak."""
    plan = plan_of(("tied-weights", *with_optimizer((), name)))
    peak = optimizer_settings(workload, plan)["learning_rate"]
    rate = make_schedule("cosine", peak=peak, warmup_steps=workload.warmup_steps, steps=steps)
    step = build_step(workload, plan, device=torch.device("cpu"), learning_rate=rate)
    source = TokenBatches(path=tokens, micro_batch=6, sequence=workload.shape.sequence, seed=workload.seed)
    batches = stream_batches(source, torch.device("cpu"), 0)
    losses = [step(next(batches)).item() for _ in range(steps)]
    batches.close()
    assert losses[0] == pytest.approx(workload.shape.ln_vocab, abs=0.1)
    return sum(losses[-10:]) / 10


@pytest.fixture(scope="module")
def adamw_loss(small: Workload, tokens: Path) -> float:
    loss = loss_after("adamw-loop", ADAMW_STEPS, small, tokens)
    assert loss < 2.8  # from 5.5: below what frequencies of single bytes give, 3.1
    return loss


@pytest.mark.parametrize("name", TRAINED)
def test_each_trains_the_small_model(name: str, small: Workload, tokens: Path, adamw_loss: float) -> None:
    steps, nats = BANDS[name]
    assert loss_after(name, steps, small, tokens) < adamw_loss + nats


# as rungs

HALF = ("bf16", "flash", "padded-vocab", "tied-weights", "chunked-loss")


@pytest.mark.parametrize(
    "rungs",
    [("sgd-momentum",), ("muon",), (*HALF, "adamw-bf16"), (*HALF, "adamw-bf16-kahan")],
    ids=lambda rungs: rungs[-1],
)
def test_a_row_with_another_optimizer_is_changed_and_learns(
    judge_row: Callable[..., Any], rungs: tuple[str, ...]
) -> None:
    """Held against the same optimizer in plain fp32: weights stored in bf16 are widened there, with a result that
    differs from autocast's by what autocast costs with fp32 weights."""
    row = judge_row(*rungs)
    assert row.verdict == "changed", row.detail
    if "bf16" in rungs:
        assert 1e-4 < row.measurement.gradients.yardstick < 1e-2
        assert max(abs(mine - fp32) for mine, fp32 in zip(row.measurement.loss_curve, row.reference, strict=True)) > 0


# on the command line


def test_train_takes_another_optimizer_as_its_rung(small: Workload) -> None:
    """With the optimizer's own peak, unless the user gives one, which is the optimizer's too."""
    asked = {"optimizer": "lion", "steps": 50}
    rungs = other_optimizer("lion", ("bf16", "fused-adamw"), small, HARDWARE)
    assert rungs == ("bf16", "lion")
    recipe, budget = Recipe(rungs=rungs, micro_batch=6), Budget(steps=50)
    settings = settings_of(options_of(add_train, "train", asked), small, recipe, budget, Layout())
    assert settings.learning_rate == pytest.approx(0.1 * small.learning_rate)
    given = settings_of(
        options_of(add_train, "train", {**asked, "learning_rate": 1e-4}), small, recipe, budget, Layout()
    )
    assert given.learning_rate == 1e-4
    with pytest.raises(UserError, match=r"--optimizer adamw-bf16 does not apply here.*add bf16"):
        other_optimizer("adamw-bf16", ("fused-adamw",), small, HARDWARE)
    assert other_optimizer("adamw-bf16", ("fused-adamw", "bf16"), small, HARDWARE) == ("bf16", "adamw-bf16")


# the benchmark


@pytest.fixture(scope="module")
def benchmark(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("optimizers", repository / "benchmarks" / "optimizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        spec.loader.exec_module(module)
    return module


def test_the_benchmark_measures_a_row(benchmark: ModuleType, small: Workload) -> None:
    cpu = torch.device("cpu")
    beside = benchmark.prepare("adamw-fused", small, cpu)
    row = benchmark.row_of("adamw-bf16-kahan", small, cpu, beside, 3, "some CPU")
    assert row["reason"] is None
    assert row["state_bytes"] == row["predicted_state_bytes"] > 0
    assert row["alone"]["seconds"]["n"] == 3
    assert row["queued"] is row["predicted_seconds"] is row["update_bytes"] is None


def test_the_benchmark_shows_what_it_cannot_measure_in_100_columns(
    benchmark: ModuleType, small: Workload, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    cpu = torch.device("cpu")
    beside = benchmark.prepare("adamw-fused", small, cpu)
    rows = [benchmark.row_of(name, small, cpu, beside, 2, "NVIDIA H200") for name in ("adamw-8bit", "adamw-fused")]
    assert rows[0]["reason"] == "adamw-8bit needs the package torchao"
    assert rows[1]["predicted_seconds"] > 0
    count = sum(parameter.numel() for parameter in beside.model.parameters())
    record = {"workload": "small", "parameters": count, "hardware": {"name": "a CPU"}, "optimizers": rows}
    benchmark.show(record, Console(width=benchmark.WIDTH))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    assert lines[-1] == "adamw-8bit: adamw-8bit needs the package torchao"


# settings and mistakes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_settings_decay_as_adamws_do(name: str) -> None:
    settings = settings_for(name, learning_rate=6e-4, weight_decay=0.1)
    assert settings["learning_rate"] == 6e-4 * OPTIMIZERS[name].learning_rate_factor
    assert settings["learning_rate"] * settings["weight_decay"] == pytest.approx(6e-5)


def refusal(name: str, model: nn.Module) -> str:
    with pytest.raises(UserError) as caught:
        optimizer_of(name, model)
    return str(caught.value)


def test_an_unknown_name_lists_the_known() -> None:
    assert "did you mean 'lion'? known: adamw-loop" in refusal("lyon", nn.Linear(2, 2))


def test_weights_of_the_wrong_width_are_refused() -> None:
    found = refusal("adamw-fused", nn.Linear(2, 2).bfloat16())
    assert "adamw-fused wants float32 weights and got bfloat16" in found
    assert "adamw-bf16-kahan with model.bfloat16()" in found
    assert "16 bits" in found
    assert "16 bits" not in refusal("adamw-fused", nn.Linear(2, 2).double())
    assert "convert the model first: model.bfloat16()" in refusal("adamw-bf16", nn.Linear(2, 2))


def test_muon_without_layers_is_refused() -> None:
    assert "muon found no matrix of a layer" in refusal("muon", nn.Sequential(nn.Linear(2, 2)))


def test_8bit_without_torchao_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    found = refusal("adamw-8bit", model_for("adamw-8bit"))
    assert "adamw-8bit needs the package torchao" in found
    assert "pip install torchao" in found


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'adagrad'"):
        optim.adagrad  # noqa: B018
