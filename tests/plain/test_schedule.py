"""Learning rates over time: ends and middles by hand, and what holds at every step of every schedule."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.optim.schedule import SCHEDULES, make_schedule, warm_up

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@st.composite
def settings(draw: st.DrawFn) -> dict:
    steps = draw(st.integers(2, 5000))
    return {
        "peak": draw(st.floats(1e-6, 1.0)),
        "warmup_steps": draw(st.integers(1, steps - 1)),
        "steps": steps,
    }


def test_warm_up_is_linear_then_constant():
    rates = [warm_up(step, peak=2.0, warmup_steps=4) for step in range(7)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


@given(step=st.integers(0, 10**6), warmup_steps=st.integers(1, 10**4), peak=st.floats(1e-6, 1.0))
def test_warm_up_never_falls_never_passes_the_peak_and_never_starts_at_nothing(step, warmup_steps, peak):
    now, later = (warm_up(at, peak=peak, warmup_steps=warmup_steps) for at in (step, step + 1))
    assert 0 < now <= later <= peak


def test_cosine_by_hand():
    rate = make_schedule("cosine", peak=1.0, warmup_steps=10, steps=110, floor=0.2)
    assert [rate(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert rate(60) == pytest.approx(0.6)  # half way: the middle of 1 and 0.2
    assert rate(10 + 25) == pytest.approx(0.2 + 0.8 * (0.5 + math.sqrt(0.125)))  # a quarter: cos 45 degrees
    assert rate(110) == rate(10**6) == pytest.approx(0.2)


def test_wsd_by_hand():
    rate = make_schedule("wsd", peak=1.0, warmup_steps=10, steps=100, floor=0.1, decay_share=0.4)
    assert [rate(step) for step in (0, 4, 9, 10, 60)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert rate(70) == pytest.approx(0.1 + 0.9 * (1 - 0.5))  # a quarter of the fall, whose root is a half
    assert rate(100) == rate(10**6) == pytest.approx(0.1)


def test_defaults_end_at_a_tenth_and_at_nothing():
    assert make_schedule("cosine", peak=1.0, warmup_steps=1, steps=9)(9) == pytest.approx(0.1)
    falling = make_schedule("wsd", peak=1.0, warmup_steps=1, steps=100)
    assert (falling(80), falling(100)) == (1.0, 0.0)
    assert falling(81) < 1.0


@every_schedule
@given(given_settings=settings())
def test_rises_to_the_peak_and_never_rises_again(name, given_settings):
    warmup, steps, peak = (given_settings[key] for key in ("warmup_steps", "steps", "peak"))
    rate = make_schedule(name, **given_settings)
    rates = [rate(step) for step in range(steps + 3)]
    assert rates[:warmup] == [warm_up(step, peak=peak, warmup_steps=warmup) for step in range(warmup)]
    assert rates[warmup - 1] == peak == max(rates)
    assert all(later <= now for now, later in zip(rates[warmup - 1 :], rates[warmup:], strict=False))
    assert rates[steps:] == [rates[steps]] * 3
    assert all(value > 0 for value in rates[:steps])  # every step that is taken does something


@every_schedule
@given(given_settings=settings())
def test_has_no_jumps(name, given_settings):
    """Between two steps it moves no further than its steepest part allows: the warm-up's line, the cosine's middle,
    the first step of 1 - sqrt(x)."""
    warmup, steps, peak = (given_settings[key] for key in ("warmup_steps", "steps", "peak"))
    rate = make_schedule(name, **given_settings)
    rates = [rate(step) for step in range(steps + 2)]
    rest = steps - warmup
    falling = {"constant": 0.0, "cosine": math.pi / 2 / rest, "wsd": math.sqrt(min(1, 1 / min(0.2 * steps, rest)))}
    assert max(now - later for now, later in zip(rates, rates[1:], strict=False)) <= peak * falling[name] * (1 + 1e-9)
    assert max(later - now for now, later in zip(rates, rates[1:], strict=False)) <= peak / warmup * (1 + 1e-9)


@every_schedule
@given(given_settings=settings(), scale=st.sampled_from([0.5, 2.0, 4.0]), step=st.integers(0, 6000))
def test_is_proportional_to_its_peak(name, given_settings, scale, step):
    other = {**given_settings, "peak": scale * given_settings["peak"]}
    assert make_schedule(name, **other)(step) == scale * make_schedule(name, **given_settings)(step)


def test_until_the_fall_wsd_does_not_know_how_long_it_runs():
    short, long = (make_schedule("wsd", peak=1.0, warmup_steps=10, steps=steps) for steps in (100, 1000))
    assert [short(step) for step in range(81)] == [long(step) for step in range(81)]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("cosin", {}, "unknown schedule 'cosin'"),
        ("cosine", {"warmup_steps": 100}, "100 steps of warm-up do not fit into 100 steps"),
        ("wsd", {"warmup_steps": 0}, "0 steps of warm-up do not fit into 100 steps"),
        ("cosine", {"floor": 1.5}, "floor is 1.5"),
        ("wsd", {"decay_share": -0.1}, "decay_share is -0.1"),
        ("wsd", {"decay_share": 0.0}, "decay_share is 0.0"),
        ("constant", {"floor": 0.1}, "constant has no floor"),
        ("cosine", {"decay_share": 0.1}, "cosine has no decay_share"),
    ],
)
def test_mistakes(name, changes, problem):
    with pytest.raises(UserError) as caught:
        make_schedule(name, **{"peak": 1.0, "warmup_steps": 10, "steps": 100, **changes})
    assert caught.value.problem == problem


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from redline.optim import SCHEDULES, make_schedule
print(make_schedule("constant", peak=3.0, warmup_steps=1, steps=2)(0), *SCHEDULES)
"""


def test_schedules_need_no_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "3.0 constant cosine wsd\n"
