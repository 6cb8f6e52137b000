"""How large a difference between two rows must be before it means anything.

Each measurement gives a few independent samples of its own step time: the medians of repeats if there are repeats,
otherwise of four stretches of the one run. Their scatter, propagated to the ratio of two rows, is the noise of that
comparison (`predict/noise.py`). A few repeats may agree by chance, so how much they scatter is also asked of all rows
of the run together. One run cannot show what differs between processes (clocks, memory layout), so without repeats the
noise is never taken to be less than the spread seen between runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from redline.core.measurement import Measurement, spread_of
from redline.predict.noise import MEDIAN_TO_MEAN, MOST_SWING, MOST_TAKEN, seen_noise, unseen_noise

Runs = Sequence[Measurement]
"""The runs of one recipe: one, or several repeats."""

STRETCHES = 4
QUIET = 0.01  # below this scatter of a ratio the machine is quiet
MOST_NOISE = 0.25  # on any machine, a row slower than its rival by more has lost
MEDIAN_OF_FEW = (0.0, 1.0, 1.0, 1.16, 1.09, 1.20)  # MEDIAN_TO_MEAN for the median of 1 to 5 values


def looks_of(runs: Runs) -> list[float]:
    """Return independent medians of the step time, in seconds."""
    if len(runs) > 1:
        return [statistics.median(measurement.step_seconds) for measurement in runs]
    steps = runs[0].step_seconds
    size = max(len(steps) // STRETCHES, 1)
    return [
        statistics.median(steps[start : start + size]) for start in range(0, size * STRETCHES, size) if steps[start:]
    ]


def deviation_of(looks: Sequence[float]) -> float:
    """Return their standard deviation as a fraction of their mean; 0 for a single one, which has none."""
    return statistics.stdev(looks) / statistics.mean(looks) if len(looks) > 1 else 0.0


def standard_error(runs: Runs) -> float:
    """Return the standard error of the step time, as a fraction of it."""
    looks = looks_of(runs)
    return 0.0 if not looks else deviation_of(looks) * median_to_mean(len(runs)) / math.sqrt(len(looks))


def median_to_mean(runs: int) -> float:
    """Return by which factor the median of so many runs, which is a row's figure, scatters more than their mean."""
    return MEDIAN_OF_FEW[runs] if runs < len(MEDIAN_OF_FEW) else MEDIAN_TO_MEAN


def noise_between(one: Runs, other: Runs, device: str = "cuda", rows: Sequence[Runs] = ()) -> float:
    """Return the noise of a comparison: ratios closer to 1 than this mean nothing. `rows`: all of the run. If they say
    less than the two rows alone, they are believed, down to two of the rows' own standard errors."""
    degrees_of_freedom = sum(max(len(looks_of(runs)) - 1, 0) for runs in (one, other))
    own = seen_noise(standard_error(one), standard_error(other), degrees_of_freedom)
    seen = max(min(own, noise_of_all(one, other, rows)), two_errors(one, other))
    return max(seen, unseen_noise(device, min(len(one), len(other))))


def noise_of_all(one: Runs, other: Runs, rows: Sequence[Runs]) -> float:
    """Return what was seen of the noise if the repeats of every row scatter alike; infinite if there are none."""
    repeated = [looks_of(runs) for runs in rows if len(runs) > 1]
    degrees_of_freedom = sum(len(looks) - 1 for looks in repeated)
    if not degrees_of_freedom:
        return math.inf
    squares = sum((len(looks) - 1) * deviation_of(looks) ** 2 for looks in repeated)
    deviation = math.sqrt(squares / degrees_of_freedom)
    mine, theirs = (deviation * median_to_mean(len(runs)) / math.sqrt(len(runs)) for runs in (one, other))
    return seen_noise(mine, theirs, degrees_of_freedom)


def two_errors(one: Runs, other: Runs) -> float:
    return 2 * math.hypot(standard_error(one), standard_error(other))


def scatter_between(one: Runs, other: Runs) -> float:
    """Return two standard errors of the ratio, as seen in these steps; 0 on a quiet machine."""
    scatter = two_errors(one, other)
    return scatter if scatter >= QUIET else 0.0


def tolerated_noise(one: Runs, other: Runs, device: str) -> float:
    """Return the noise for decisions, which are no claims: two standard errors, since the width that two repeats need
    to claim anything would make rivals equal that are 4 % apart. It is bounded, so that a machine that swings by half
    does not make all rivals equal."""
    return min(max(two_errors(one, other), unseen_noise(device, min(len(one), len(other)))), MOST_NOISE)


def is_crowded(measurement: Measurement) -> bool:
    """True if other programs had cores that the step needed."""
    return (measurement.cores_missing or 0.0) > MOST_TAKEN


def is_disturbed(measurement: Measurement) -> bool:
    """True if something else ran on the machine: by the kernel's accounts, or because the slow steps took more than
    twice as long as the quick ones."""
    if not measurement.step_seconds:  # a reference has only a loss curve
        return False
    if is_crowded(measurement):
        return True
    spread = spread_of(measurement.step_seconds)
    return spread.p90 > MOST_SWING * spread.p10
