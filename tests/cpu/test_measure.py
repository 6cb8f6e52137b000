"""A whole measurement in this process: what it reports, when it counts as warm, how many steps it times, and a
reference that fits. Nothing here asserts a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.core.measurement import Measurement
from redline.core.plan import Plan
from redline.engine import measure
from redline.engine.build import build
from redline.engine.measure import BLOCK_STEPS, is_steady, measure_reference, time_steps, warm_until_steady
from redline.rungs import yardstick_rungs

BenchOf = Callable[..., measure.Bench]
seconds = st.floats(1e-4, 10.0)


# --- steady -----------------------------------------------------------------------------------------------------------


@given(step=seconds, count=st.integers(2 * BLOCK_STEPS, 60))
def test_equal_steps_are_steady(step: float, count: int) -> None:
    assert is_steady([step] * count, least_seconds=0.0)


@given(steps=st.lists(seconds, max_size=2 * BLOCK_STEPS - 1))
def test_two_blocks_are_needed(steps: list[float]) -> None:
    assert not is_steady(steps, least_seconds=0.0)


@given(step=seconds, count=st.integers(2 * BLOCK_STEPS, 60))
def test_steps_that_took_too_little_time_are_not_enough(step: float, count: int) -> None:
    assert not is_steady([step] * count, least_seconds=count * step * 1.01)


@given(step=seconds, change=st.floats(-0.5, 0.5), before=st.lists(seconds, max_size=20))
def test_the_last_two_blocks_decide(step: float, change: float, before: list[float]) -> None:
    blocks = [step] * BLOCK_STEPS + [step * (1 + change)] * BLOCK_STEPS
    steady = is_steady(blocks, least_seconds=0.0)
    if abs(abs(change) - 0.02) > 1e-9:
        assert steady == (abs(change) < 0.02)
    assert is_steady([*before, *blocks], least_seconds=0.0) == steady


@given(step=seconds, odd=st.lists(seconds, min_size=2, max_size=2))
def test_two_odd_steps_in_a_block_do_not_matter(step: float, odd: list[float]) -> None:
    assert is_steady([step] * BLOCK_STEPS + [step] * (BLOCK_STEPS - 2) + odd, least_seconds=0.0)


@given(steps=st.lists(seconds, min_size=2 * BLOCK_STEPS, max_size=30), power=st.integers(-6, 6))
def test_the_unit_does_not_matter(steps: list[float], power: int) -> None:
    assert is_steady([step * 2.0**power for step in steps], 0.0) == is_steady(steps, 0.0)


# --- how long ---------------------------------------------------------------------------------------------------------


class Counting:
    """Takes steps and counts them."""

    def __init__(self) -> None:
        self.steps, self.batches, self.step = 0, itertools.count(), self._step

    def _step(self, batch: int) -> None:
        assert batch == self.steps, "a batch was left out"
        self.steps += 1


@pytest.mark.parametrize(
    ("expected_step_seconds", "count"),
    [(1.0, 10), (0.25, 10), (0.125, 20), (0.05, 50), (0.025, 100), (0.001, 100)],
)
def test_timed_steps_fill_a_few_seconds_between_ten_and_a_hundred(
    bench: BenchOf, expected_step_seconds: float, count: int
) -> None:
    training = Counting()
    times = time_steps(bench(timed_steps=None), training, expected_step_seconds)  # type: ignore[arg-type]
    assert training.steps == len(times) == count
    assert all(time >= 0 for time in times)


@pytest.mark.parametrize("asked", [1, 3, 250])
def test_the_user_may_choose_the_timed_steps(bench: BenchOf, asked: int) -> None:
    training = Counting()
    assert len(time_steps(bench(timed_steps=asked), training, 0.1)) == training.steps == asked  # type: ignore[arg-type]


def test_nobody_is_told_anything_while_the_clock_runs(bench: BenchOf) -> None:
    told = []
    training = Counting()
    asked = bench(timed_steps=5, report=lambda phase, **more: told.append((phase, training.steps)))
    time_steps(asked, training, 0.1)  # type: ignore[arg-type]
    assert told == [("timing", 0)]


def test_warming_up_goes_on_until_steady(bench: BenchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "is_steady", lambda steps, least: len(steps) >= 17)
    training = Counting()
    steps = warm_until_steady(bench(), training, [0.1, 0.1])  # type: ignore[arg-type]
    assert len(steps) == 2 + 3 * BLOCK_STEPS
    assert training.steps == 3 * BLOCK_STEPS


def test_noise_does_not_warm_up_for_ever(bench: BenchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "is_steady", lambda steps, least: False)
    monkeypatch.setattr(measure, "WARMUP_LIMIT_SECONDS", 0.05)
    assert len(warm_until_steady(bench(), Counting(), [0.1])) >= 1  # type: ignore[arg-type]


# --- the reference ----------------------------------------------------------------------------------------------------


def memory_for(chunk_that_fits: int, attempts: list[int]) -> Callable[..., Any]:
    """A build on a device that holds so many sequences at a time."""

    def build_if_it_fits(*words: Any, chunk: int | None = None, **where: Any) -> Any:
        assert chunk is not None
        attempts.append(chunk)
        if chunk > chunk_that_fits:
            raise torch.OutOfMemoryError("no more")
        return build(*words, chunk=chunk, **where)

    return build_if_it_fits


@pytest.mark.parametrize(("fits", "tried"), [(6, [6]), (3, [6, 3]), (2, [6, 3, 2]), (1, [6, 3, 2, 1])])
def test_the_reference_halves_until_it_fits_and_stays_the_same(
    bench: BenchOf, monkeypatch: pytest.MonkeyPatch, fits: int, tried: list[int]
) -> None:
    asked = bench(kind="reference", check_steps=4)
    whole = measure_reference(asked)
    attempts: list[int] = []
    monkeypatch.setattr(measure, "build", memory_for(fits, attempts))
    curve = measure_reference(asked).loss_curve
    assert attempts == tried
    assert curve == pytest.approx(whole.loss_curve, abs=1e-5)


def test_a_yardstick_is_plain_code_at_the_recipes_precision(bench: BenchOf) -> None:
    """With the recipe's maths, and with nothing else of it."""
    recipe = ("bf16", "flash", "padded-vocab", "tied-weights", "fused-adamw")
    plain = bench("bf16", "tied-weights", kind="trial", check_steps=4)
    curve = measure_reference(bench(*recipe, kind="yardstick", check_steps=4)).loss_curve
    assert curve == measure.measure(plain).loss_curve
    assert yardstick_rungs(recipe) == ("bf16", "tied-weights")
    assert measure_reference(bench("bf16", "tied-weights", kind="yardstick", check_steps=4)).loss_curve == curve
    assert measure_reference(bench("bf16", "tied-weights", kind="reference", check_steps=4)).loss_curve != curve


def test_a_reference_that_never_fits_is_an_out_of_memory(bench: BenchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "build", memory_for(0, attempts := []))
    with pytest.raises(torch.OutOfMemoryError):
        measure_reference(bench(kind="reference", check_steps=4))
    assert attempts[-1] == 1


def test_an_out_of_memory_in_the_middle_halves_too(bench: BenchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of AdamW makes its state: it can be the one that does not fit."""

    def build_short_of_memory(*words: Any, chunk: int | None = None, **where: Any) -> Any:
        training = build(*words, chunk=chunk, **where)
        if chunk == 6:
            training.step.apply_gradients = raise_out_of_memory  # type: ignore[method-assign]
        return training

    def raise_out_of_memory() -> None:
        raise torch.OutOfMemoryError("no more")

    asked = bench(kind="reference", check_steps=3)
    whole = measure_reference(asked).loss_curve
    monkeypatch.setattr(measure, "build", build_short_of_memory)
    assert measure_reference(asked).loss_curve == pytest.approx(whole, abs=1e-5)


def test_the_reference_takes_only_the_maths_of_the_recipe(bench: BenchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(
        measure, "build", lambda workload, plan, **where: (plans.append(plan), build(workload, plan, **where))[1]
    )
    measure_reference(bench("bf16", "flash", "tied-weights", "fused-adamw", kind="reference", check_steps=1))
    assert plans == [Plan(tied=True)]


# --- end to end -------------------------------------------------------------------------------------------------------


def test_a_measurement_of_a_plain_row(bench: BenchOf, small: Any) -> None:
    phases = []
    asked = bench(check_steps=12, timed_steps=3, report=lambda phase, **more: phases.append(phase))
    found = measure.measure(asked)
    assert isinstance(found, Measurement)
    assert len(found.loss_curve) == 12
    assert found.loss_curve[0] == pytest.approx(math.log(257), abs=0.2)
    assert found.loss_curve[-1] < found.loss_curve[0] - 0.5, "it learns"
    assert len(found.step_seconds) == 3
    assert all(step > 0 for step in found.step_seconds)
    assert found.warmup_steps >= 12
    assert found.compile_seconds is None
    assert found.outside_bytes is None, "a CPU has no memory outside the allocator"
    assert found.peak_bytes is None or found.peak_bytes > 1 << 20
    assert found.pair_bitwise is None
    assert found.skipped_updates == 0
    assert found.gradients is not None
    # The reference takes the batch in chunks of four and so adds in another order.
    assert found.gradients.loss == pytest.approx(found.loss_curve[0], abs=1e-6)
    assert found.gradients.reference_loss == pytest.approx(found.gradients.loss, abs=1e-5)
    assert found.gradients.error < 1e-5
    assert found.gradients.yardstick == 0.0
    assert set(found.gradients.tensor_errors) == set(found.gradients.tensor_yardsticks)
    assert len(found.gradients.tensor_errors) == 12 * small.shape.layers + 5  # with the untied head
    assert found.proof.attention == "bmm + softmax"
    assert found.proof.matmul_dtypes == ("fp32",)
    assert found.proof.graph_breaks is None
    assert [phase for phase, _ in itertools.groupby(phases)] == [
        "reference",
        "building",
        "warming up",
        "timing",
        "proving",
    ]


def test_the_timed_steps_start_from_the_initial_weights(
    bench: BenchOf, no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(steps_taken=None, loss=None)

    def look(asked: measure.Bench, training: Any, expected: float) -> list[float]:
        seen.steps_taken = training.step.steps_taken
        seen.loss = training.step(next(training.batches)).item()
        return [1.0]

    monkeypatch.setattr(measure, "time_steps", look)
    measure.measure(bench(check_steps=10))
    assert seen.steps_taken == 0
    assert seen.loss == pytest.approx(math.log(257), abs=0.2)


def test_the_curve_does_not_depend_on_loader_workers(bench: BenchOf, no_waiting: None) -> None:
    settings = {"check_steps": 5, "timed_steps": 1}
    alone, helped = (measure.measure(bench(*rungs, **settings)) for rungs in ((), ("loader-workers",)))
    assert helped.loss_curve == alone.loss_curve


def test_the_curve_repeats_itself(bench: BenchOf, no_waiting: None) -> None:
    one, other = (measure.measure(bench("flash", "fused-adamw", check_steps=5)) for _ in range(2))
    assert one.loss_curve == other.loss_curve
    assert one.gradients == other.gradients


def test_skipped_updates_are_brought_back(bench: BenchOf, plant: Callable[..., None], no_waiting: None) -> None:
    def overflow_once(training: Any) -> None:
        calls = itertools.count()  # the first call is the check of step 0, which scales too and must stay clean

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            return torch.full_like(gradient, torch.inf) if next(calls) == 2 else gradient

        training.model.wpe.weight.register_hook(poison)

    rungs = ("fp16",)
    plant(overflow_once, on=rungs)
    assert measure.measure(bench(*rungs, check_steps=3, micro_batch=2)).skipped_updates == 1
