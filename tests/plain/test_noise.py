"""The noise of a comparison: what a few looks at a step time allow to say."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.measurement import Measurement
from redline.predict.noise import UNSEEN_RUN_TO_RUN, exceeds
from redline.search.noise import looks_of, noise_between, standard_error

SECONDS = st.floats(min_value=1e-5, max_value=1e3)
quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test
STEPS = st.lists(SECONDS, min_size=1, max_size=40)


def run(*steps):
    return Measurement(loss_curve=(1.0,), step_seconds=tuple(steps))


def repeats(*medians):
    return [run(median, median, median) for median in medians]


STEADY = [run(*[0.1] * 40)]


# looks


def test_one_run_is_looked_at_in_four_stretches():
    steps = [1.0] * 10 + [2.0] * 10 + [3.0] * 10 + [4.0] * 10
    assert looks_of([run(*steps)]) == [1.0, 2.0, 3.0, 4.0]


def test_a_remainder_that_fills_no_stretch_is_left_out():
    assert looks_of([run(1, 1, 2, 2, 3, 3, 4, 4, 100)]) == [1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_short_runs_are_looked_at_step_by_step(count):
    assert looks_of([run(*range(1, count + 1))]) == list(range(1, min(count, 4) + 1))


def test_repeats_are_one_look_each():
    assert looks_of([run(1, 2, 9), run(3, 4, 5)]) == [2, 4]


# standard error


def test_the_standard_error_by_hand():
    """Looks 0.9, 1.0, 1.1: deviation 0.1, mean 1, three looks."""
    assert standard_error(repeats(0.9, 1.0, 1.1)) == pytest.approx(0.1 / math.sqrt(3))


@pytest.mark.parametrize("steps", [(), (0.1,)])
def test_one_look_or_none_has_no_scatter(steps):
    assert standard_error([run(*steps)]) == 0.0


def test_it_is_a_share_and_so_has_no_unit():
    assert standard_error(repeats(0.9, 1.0, 1.1)) == pytest.approx(standard_error(repeats(900, 1000, 1100)))


def test_an_odd_step_does_not_make_a_run_noisy():
    """A stretch is taken by its median: one hiccup of ten times the step disappears."""
    steps = [0.1] * 40
    steps[13] = 1.0
    assert standard_error([run(*steps)]) == 0.0


# noise


def test_single_runs_are_never_quieter_than_what_is_seen_between_processes():
    assert UNSEEN_RUN_TO_RUN == {"cuda": 0.02, "cpu": 0.10}
    assert noise_between(STEADY, STEADY, "cpu") == 0.10
    assert noise_between(STEADY, STEADY) == 0.02


def test_one_repeated_row_does_not_lift_the_floor_of_the_other():
    assert noise_between(STEADY, repeats(0.1, 0.1)) == 0.02
    assert noise_between(repeats(0.1, 0.1), STEADY) == 0.02


def test_repeats_without_scatter_still_have_a_floor_that_shrinks_with_their_number():
    """Two may agree by chance."""
    assert noise_between(repeats(0.1, 0.1), repeats(0.2, 0.2)) == pytest.approx(0.01)
    assert noise_between(repeats(0.1, 0.1, 0.1, 0.1), repeats(*[0.2] * 4)) == pytest.approx(0.005)


def test_noise_is_two_standard_errors_of_the_ratio():
    one, other = repeats(0.9, 1.0, 1.1), repeats(4.9, 5.0, 5.1)
    expected = 2 * math.hypot(0.1 / math.sqrt(3), 0.02 / math.sqrt(3))
    assert noise_between(one, other) == pytest.approx(expected)


def test_noisier_repeats_have_more_noise():
    quiet, loud = repeats(0.099, 0.1, 0.101), repeats(0.08, 0.1, 0.12)
    assert 0 < noise_between(quiet, quiet) < noise_between(quiet, loud) < noise_between(loud, loud)


def test_a_run_that_drifts_is_noisier_than_the_floor():
    drifting = [run(*(0.1 + 0.002 * step for step in range(40)))]
    assert noise_between(drifting, STEADY) > 0.02


def test_more_repeats_see_finer_differences():
    few, many = repeats(0.09, 0.11), repeats(*[0.09, 0.11] * 8)
    assert noise_between(many, many) < noise_between(few, few)


@quick
@given(STEPS, STEPS)
def test_any_two_runs_give_a_number(one, other):
    """Also of one, two or three steps."""
    noise = noise_between([run(*one)], [run(*other)])
    assert math.isfinite(noise)
    assert noise >= 0.02
    assert noise == noise_between([run(*other)], [run(*one)])


@quick
@given(st.lists(STEPS, min_size=2, max_size=5))
def test_any_repeats_give_a_number(runs):
    noise = noise_between([run(*steps) for steps in runs], [run(*steps) for steps in reversed(runs)])
    assert math.isfinite(noise)
    assert noise >= 0
    medians = [statistics.median(steps) for steps in runs]
    assert (noise == 0) == (len(set(medians)) == 1) or statistics.stdev(medians) < 1e-12 * max(medians)


@given(ratio=st.floats(0.01, 100.0), noise=st.floats(0.0, 5.0))
def test_noise_is_a_factor_either_way(ratio, noise):
    assert exceeds(ratio, noise) == exceeds(1 / ratio, noise) or max(ratio, 1 / ratio) == pytest.approx(1 + noise)


def test_a_slowdown_counts_on_a_machine_that_swings_by_more_than_its_speed():
    assert exceeds(0.17, 1.1)
    assert not exceeds(0.6, 1.1)
    assert exceeds(1.03, 0.02)
    assert not exceeds(0.99, 0.02)
