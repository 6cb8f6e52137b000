"""The noise of a comparison: what a few looks at a step time allow to say."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.measurement import Measurement
from redline.predict.noise import UNSEEN_RUN_TO_RUN, exceeds, seen_noise
from redline.search.noise import (
    MOST_NOISE,
    is_disturbed,
    looks_of,
    median_to_mean,
    noise_between,
    standard_error,
    tolerated_noise,
)

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
    """Looks 0.9, 1.0, 1.1: deviation 0.1, mean 1, three looks, whose median scatters 1.16 times as much as their
    mean."""
    assert standard_error(repeats(0.9, 1.0, 1.1)) == pytest.approx(1.16 * 0.1 / math.sqrt(3))
    assert standard_error(repeats(0.9, 1.1)) == pytest.approx(0.1), "the median of two is their mean"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_median_of_few_scatters_as_it_is_said_to(count):
    dice = random.Random(count)
    medians = [statistics.median(dice.gauss(0, 1) for _ in range(count)) for _ in range(20_000)]
    assert median_to_mean(count) == pytest.approx(statistics.pstdev(medians) * math.sqrt(count), rel=0.02)
    assert median_to_mean(count) <= median_to_mean(6), "more are taken for very many, whose median scatters most"


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


def test_noise_is_as_many_standard_errors_of_the_ratio_as_so_few_repeats_need():
    """Three repeats each leave four degrees of freedom: t is 2.78."""
    one, other = repeats(0.9, 1.0, 1.1), repeats(4.9, 5.0, 5.1)
    expected = 2.78 * 1.16 * math.hypot(0.1 / math.sqrt(3), 0.02 / math.sqrt(3))
    assert noise_between(one, other) == pytest.approx(expected)


def t_of(degrees):
    return seen_noise(1.0, 0.0, degrees)


def test_t_falls_towards_two():
    """t itself falls to 1.96."""
    assert t_of(math.inf) == 2.0
    every = [t_of(degrees) for degrees in range(1, 100)]
    assert every == sorted(every, reverse=True)
    assert all(t > 2.0 for t in every)


@pytest.mark.parametrize("degrees", [1, 2, 4, 8, 15, 40])
def test_nineteen_of_twenty_means_are_within_t(degrees):
    dice, count, draws = random.Random(degrees), degrees + 1, 8_000
    values = [[dice.gauss(0, 1) for _ in range(count)] for _ in range(draws)]
    errors = [statistics.stdev(each) / math.sqrt(count) for each in values]
    inside = sum(
        abs(statistics.fmean(each)) < t_of(degrees) * error for each, error in zip(values, errors, strict=True)
    )
    assert inside / draws == pytest.approx(0.95, abs=0.009)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("alone", [False, True])
def test_one_of_twenty_rungs_that_do_nothing_is_beyond_the_noise(count, alone):
    """Rows of one speed, whose processes differ by 2 %: also where the rows of the run are not asked."""
    dice, claimed, compared = random.Random(count), 0, 0
    for _ in range(300):
        rows = [repeats(*(math.exp(dice.gauss(0, 0.02)) for _ in range(count))) for _ in range(7)]
        for one, other in itertools.pairwise(rows):
            noise = noise_between(one, other, rows=() if alone else rows)
            claimed += exceeds(figure(one) / figure(other), noise)
            compared += 1
    assert 0.02 < claimed / compared < 0.075


def figure(runs):
    return statistics.median(statistics.median(one.step_seconds) for one in runs)


def test_rows_that_agree_make_the_repeats_of_two_worth_more():
    """Two repeats of two rows leave two degrees of freedom, and t is 4.3; those of twenty rows leave twenty."""
    rows = [repeats(0.995, 1.005)] * 20
    alone, together = noise_between(*rows[:2]), noise_between(*rows[:2], rows=rows)
    assert together / alone == pytest.approx(t_of(20) / t_of(2))


def test_rows_that_swing_do_not_make_two_quiet_ones_noisier_nor_quiet_ones_two_that_swing_quiet():
    quiet, loud = repeats(0.995, 1.005), repeats(0.9, 1.1)
    assert noise_between(quiet, quiet, rows=[quiet, quiet, loud, loud]) == noise_between(quiet, quiet)
    least = 2 * math.hypot(standard_error(loud), standard_error(loud))
    assert noise_between(loud, loud, rows=[loud, loud, *[quiet] * 50]) == pytest.approx(least)


def test_rows_without_repeats_say_nothing_about_repeats():
    drifting = [run(*(0.1 + 0.002 * step for step in range(40)))]
    assert noise_between(drifting, STEADY, rows=[drifting, STEADY]) == noise_between(drifting, STEADY)


def test_decisions_take_two_standard_errors_and_a_bound():
    """A claim about two repeats needs 4.3: for a decision, that would make rivals equal that are 4 % apart."""
    one, other = repeats(0.99, 1.01), repeats(0.98, 1.02)
    assert tolerated_noise(one, other, "cuda") == pytest.approx(2 * math.hypot(0.01, 0.02))
    assert noise_between(one, other) > 2 * tolerated_noise(one, other, "cuda")
    assert tolerated_noise(repeats(0.5, 1.5), other, "cuda") == MOST_NOISE


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


def test_a_measurement_beside_a_busy_program_is_disturbed_however_even_its_steps():
    even = Measurement(loss_curve=(), step_seconds=(0.1,) * 8)
    assert not is_disturbed(even)
    assert not is_disturbed(replace(even, cores_missing=0.1))
    assert is_disturbed(replace(even, cores_missing=0.9))
    assert not is_disturbed(Measurement(loss_curve=(1.0,), cores_missing=0.9)), "nothing was timed"
