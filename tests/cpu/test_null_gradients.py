"""Gradients that are zero but for rounding: correct code is not called wrong for them, and wrong code still is.

Softmax cancels the keys' bias, batch norm the bias of the layer before it. Rows are judged in process, as in
test_equivalence.py; the compiled ones are a worker's of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from redline.core.job import Job, RunDirectory
from redline.core.measurement import GradientCheck, Measurement
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.engine import equivalence, inspect_model, measure
from redline.engine.build import Training
from redline.engine.equivalence import (
    NUDGES,
    STANDS_OUT,
    gradients_of,
    nudge,
    reference_gradients,
    relative_errors,
    rounding_noise,
    stands_out,
)
from redline.predict.verdict import NULL_NOISE, Equivalence, is_null, judge
from redline.rungs import plan_of
from redline.search.launch import launch
from redline.workloads.python_file import find_python_file, python_workload

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"check_steps": 4, "micro_batch": 8}
JudgeRow = Callable[..., Any]
Plant = Callable[..., None]
Nets = Callable[[str], Workload]
NETS = """
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        widths = (32, 64) if fused else (32, 32, 32)
        self.parts = nn.ModuleDict(zip("qp" if fused else "qkv", (nn.Linear(32, width) for width in widths)))
        self.o = nn.Linear(32, 32)

    def forward(self, x):
        parts = torch.cat([part(x) for part in self.parts.values()], -1).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in parts)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def keys(fused=False):
    return nn.Sequential(nn.Embedding(61, 32), Attention(fused), nn.LayerNorm(32), nn.Linear(32, 61))


def pair():
    return keys(fused=True)


def make_batch(size, seed):
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (size, 17), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def norms():
    layers = [[nn.Conv2d(3 if not i else 8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()] for i in range(2)]
    return nn.Sequential(*layers[0], *layers[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def norms_batch(size, seed):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 12, 12, generator=made), torch.randint(10, (size,), generator=made)
"""
NULL = {"keys": {"1.parts.k.bias"}, "norms": {"0.bias", "3.bias"}, "pair": set()}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Nets:
    """nets("keys") -> the workload of that function."""
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS, encoding="utf-8")

    def workload(name: str) -> Workload:
        found = find_python_file(f"{path}:{name}")
        assert found is not None
        return python_workload(found, inspect_model.inspect_model(found.source, seed=1337))

    return workload


def null_of(measurement: Measurement) -> set[str]:
    assert measurement.gradients is not None
    return {name for name in measurement.gradients.tensor_errors if is_null(measurement.gradients, name)}


@pytest.mark.parametrize(
    ("net", "rungs"),
    [
        ("keys", ("flash",)),
        ("keys", ("bf16", "flash")),
        ("norms", ("fused-adamw",)),
        ("norms", ("bf16",)),
        ("pair", ("bf16", "flash")),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_correct_code_is_not_different_for_rounding(
    judge_row: JudgeRow, nets: Nets, net: str, rungs: tuple[str, ...]
) -> None:
    row = judge_row(*rungs, workload=nets(net), **QUICK)
    assert row.verdict in ("same", "rounding"), row.detail
    assert null_of(row.measurement) == NULL[net]
    assert ("no gradient but rounding" in row.detail) == bool(NULL[net])
    others = {name: share for name, share in row.measurement.gradients.tensor_noise.items() if name not in NULL[net]}
    assert max(others.values()) < NULL_NOISE / 5, "nothing is near the line"


@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
@pytest.mark.parametrize(
    ("net", "rungs"),
    [
        ("norms", ("compile",)),
        # Its attention is one kernel with either: what is compiled around it is test_equivalence.py's too.
        pytest.param("keys", ("compile", "flash"), marks=pytest.mark.long),
    ],
    ids=["norms", "keys"],
)
def test_compiled_code_is_not_different_for_rounding(
    bench: Callable[..., measure.Bench], nets: Nets, tokens: Path, net: str, rungs: tuple[str, ...]
) -> None:
    """In a worker of its own: a compiler leaves state and processes behind."""
    workload = nets(net)
    job = Job(workload=workload, recipe=Recipe(rungs=rungs, micro_batch=8), device="cpu", tokens=tokens.name)
    job = replace(job, timed_steps=2, check_steps=QUICK["check_steps"])
    reference = measure.measure_reference(bench(workload=workload, kind="reference", **QUICK)).loss_curve
    answer = launch(RunDirectory(tokens.parent), job, 250, lambda *_, **__: None)
    assert isinstance(answer, Measurement), answer
    row = verdict_on(answer, reference)
    assert row.verdict in ("same", "rounding"), row.detail
    assert null_of(answer) == NULL[net]


def verdict_on(measurement: Measurement, reference: tuple[float, ...]) -> Equivalence:
    return judge(
        maths="rounding-only",
        precision="fp32",
        measurement=measurement,
        reference=reference,
        base=None,
        plain=reference,
        ln_vocab=None,
    )


# --- faults in exactly such a tensor ----------------------------------------------------------------------------------


def after_backward(name: str, gradient: Callable[[nn.Module], torch.Tensor]) -> Callable[[Training], None]:
    """A fault: this parameter's gradient is another one."""

    def fault(training: Training) -> None:
        compute = training.step.compute_gradients

        def compute_and_change(batch: Any) -> torch.Tensor:
            loss = compute(batch)
            training.model.get_parameter(name).grad = gradient(training.model).clone()
            return loss

        training.step.compute_gradients = compute_and_change  # type: ignore[method-assign]

    return fault


def gradient_of(name: str) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model.get_parameter(name).grad  # type: ignore[return-value]


WRONG = {
    "keys": ("1.parts.k.bias", gradient_of("1.parts.q.bias")),  # as large as a key's bias could have one
    "norms": ("0.bias", gradient_of("1.bias")),  # batch norm's own bias
}


@pytest.mark.parametrize("precision", [(), ("bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("net", WRONG)
def test_a_gradient_where_there_is_none_is_different(
    judge_row: JudgeRow, plant: Plant, nets: Nets, net: str, precision: tuple[str, ...]
) -> None:
    name, gradient = WRONG[net]
    rungs = (*precision, "fused-adamw")
    plant(after_backward(name, gradient), on=rungs)
    row = judge_row(*rungs, workload=nets(net), **QUICK)
    assert row.verdict == "different", row.detail
    assert f"gradient of {name} is" in row.detail
    assert "which is rounding alone" in row.detail


def test_a_gradient_that_is_missing_is_different_and_one_of_zeros_is_right(
    judge_row: JudgeRow, plant: Plant, nets: Nets
) -> None:
    """A kernel that knows of the cancellation writes zeros; a parameter without a gradient was forgotten."""
    name = "1.parts.k.bias"
    plant(after_backward(name, lambda model: torch.zeros_like(model.get_parameter(name))), on=("fused-adamw",))
    row = judge_row("fused-adamw", workload=nets("keys"), **QUICK)
    assert row.verdict == "rounding", row.detail
    plant(lambda training: training.model.get_parameter(name).requires_grad_(False), on=("fused-adamw",))
    row = judge_row("fused-adamw", workload=nets("keys"), **QUICK)
    assert row.verdict == "different", row.detail
    assert f"gradient of {name} is inf" in row.detail


# --- a tensor that has some of both -----------------------------------------------------------------------------------


def test_updates_are_compared_where_there_is_a_gradient(
    judge_row: JudgeRow, plant: Plant, nets: Nets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values from one layer: half of its bias has no gradient, and Adam moves that half by chance."""
    name = "1.parts.p.bias"

    def update_error(*rungs: str) -> float:
        errors: dict[str, float] = judge_row(*rungs, workload=nets("pair"), **QUICK).measurement.gradients.update_errors
        return errors[name]

    assert update_error("bf16", "flash") < 0.5
    with monkeypatch.context() as everywhere:
        everywhere.setattr(equivalence, "STANDS_OUT", 0.0)
        assert update_error("bf16", "flash") > 0.8, "the root of a half times two, but for chance"

    def left_out(training: Training) -> None:
        kept = training.model.get_parameter(name)
        for group in training.step.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one is not kept]

    plant(left_out, on=("bf16", "flash"))
    assert update_error("bf16", "flash") == pytest.approx(1.0)


def test_elements_stand_out_by_hand() -> None:
    """Noise of norm 2 in four elements is 1 in each: from 10 on a gradient is one. Zeros and NaN are never hidden."""
    gradient = torch.tensor([9.9, -10.1, 0.0, math.nan])
    assert STANDS_OUT == 10
    assert stands_out(gradient, 2.0).tolist() == [False, True, True, True]
    assert stands_out(gradient, 0.0).all()


# --- the noise --------------------------------------------------------------------------------------------------------


def test_a_nudge_moves_the_last_bits_and_its_opposite_the_other_way() -> None:
    weights = torch.cat([torch.zeros(10), torch.logspace(-6, 6, 1000), -torch.ones(1000)])
    moved = []
    for amount in NUDGES:
        parameter, whole_number = nn.Parameter(weights.clone()), torch.ones(3, dtype=torch.int64)
        nudge([parameter, whole_number], amount)
        moved.append((parameter.detach() - weights)[10:] / weights[10:] * 2**23)
        assert torch.equal(parameter[:10], weights[:10])
        assert (moved[-1].abs() - 16).abs().max() <= 1, "rounded to a last bit"
        assert 0.4 < (moved[-1] > 0).float().mean() < 0.6
    assert torch.equal(moved[0] > 0, moved[1] < 0)


def test_a_nudge_that_breaks_the_model_excuses_nothing(
    nets: Nets, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are no numbers from weights that are almost the same: they would be noise of any size."""

    def breaks(parameters: Any, amount: float) -> None:
        with torch.no_grad():
            next(iter(parameters)).fill_(math.nan)

    monkeypatch.setattr(equivalence, "nudge", breaks)
    found = reference_gradients(nets("keys"), Plan(), plan_of(("flash",)), micro_batch=8, tokens=tokens, device=CPU)
    assert set(found.noise.values()) == {0.0}
    assert all(found.sizes[name] == pytest.approx(gradient.norm().item()) for name, gradient in found.gradients.items())


class Cancelling(nn.Module):
    """Attention of one head with a keys' bias, and a loss that can be scaled."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 8, generator=made)) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(8, generator=made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.q) @ (x @ self.k + self.bias).mT
        return (scores.softmax(-1) @ (x @ self.v)).square().mean()


class Scaled:
    """As much of a Training as is asked for its gradients."""

    def __init__(self, factor: float) -> None:
        self.model, self.factor = Cancelling(), factor
        self.step = SimpleNamespace(shared=SimpleNamespace(cuts={}), compute_gradients=self.compute_gradients)
        self.adapter = SimpleNamespace(unpadded=lambda model, name, tensor: tensor)

    def restore(self) -> None:
        self.model = Cancelling()

    def compute_gradients(self, batch: torch.Tensor) -> None:
        (self.factor * self.model(batch)).backward()


def checked(factor: float, name: str, error: float) -> Measurement:
    """A row whose gradients are the reference's, but for one tensor that is off by so much of its size."""
    batch = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    training: Any = Scaled(factor)
    training.compute_gradients(batch)
    expected = {key: value.clone() for key, value in gradients_of(training).items()}
    sizes, noise = rounding_noise(training, batch, expected)
    off = {
        key: value + (error * sizes[key] / math.sqrt(value.numel()) if key == name else 0)
        for key, value in expected.items()
    }
    errors, overall = relative_errors(off, expected, sizes)
    check = GradientCheck(
        loss=1.0,
        reference_loss=1.0,
        error=overall,
        yardstick=0.0,
        tensor_errors=errors,
        tensor_yardsticks=dict.fromkeys(errors, 0.0),
        tensor_noise=noise,
    )
    return Measurement(loss_curve=(1.0,), gradients=check)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(min_value=-40, max_value=40),
    st.sampled_from(["q", "k", "v", "bias"]),
    st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 30.0, 1e3]),
)
def test_the_scale_of_the_gradients_changes_no_verdict(exponent: int, name: str, error: float) -> None:
    """By powers of two, which round nothing: what is rounding is decided by no size of its own."""
    found = [verdict_on(checked(factor, name, error), (1.0,)).verdict for factor in (1.0, 2.0**exponent)]
    allowed = 100 if name == "bias" else 1e-4
    assert found == (["rounding" if error else "same"] if error <= allowed else ["different"]) * 2
