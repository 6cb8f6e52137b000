"""How large a difference between two rows must be before it means anything.

Each measurement gives a few independent samples of its own step time: the medians of repeats if there are repeats,
otherwise of four stretches of the one run. Their scatter, propagated to the ratio of two rows at two standard errors,
is the noise of that comparison. One run cannot show what differs between processes (clocks, memory layout), so without
repeats the noise is never taken to be less than the spread seen between runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from redline.core.measurement import Measurement, spread_of
from redline.predict.noise import MOST_SWING, noise_of_ratio

STRETCHES = 4
QUIET = 0.01  # below this scatter of a ratio the machine is quiet
MOST_NOISE = 0.25  # on any machine, a row slower than its rival by more has lost


def looks_of(measurements: Sequence[Measurement]) -> list[float]:
    """Return independent medians of the step time, in seconds."""
    if len(measurements) > 1:
        return [statistics.median(measurement.step_seconds) for measurement in measurements]
    steps = measurements[0].step_seconds
    size = max(len(steps) // STRETCHES, 1)
    return [
        statistics.median(steps[start : start + size]) for start in range(0, size * STRETCHES, size) if steps[start:]
    ]


def standard_error(measurements: Sequence[Measurement]) -> float:
    """Return the standard error of the median step time, as a fraction of it."""
    looks = looks_of(measurements)
    if len(looks) < 2:
        return 0.0
    return statistics.stdev(looks) / statistics.mean(looks) / math.sqrt(len(looks))


def noise_between(one: Sequence[Measurement], other: Sequence[Measurement], device: str = "cuda") -> float:
    """Return the noise of a comparison: ratios closer to 1 than this mean nothing."""
    fewest = min(len(one), len(other))
    return noise_of_ratio(standard_error(one), standard_error(other), device=device, repeats=fewest)


def scatter_between(one: Sequence[Measurement], other: Sequence[Measurement]) -> float:
    """Return the part of that noise that was seen in these steps; 0 on a quiet machine."""
    scatter = 2 * math.hypot(standard_error(one), standard_error(other))
    return scatter if scatter >= QUIET else 0.0


def tolerated_noise(one: Sequence[Measurement], other: Sequence[Measurement], device: str) -> float:
    """Return the noise for decisions, bounded so that a machine that swings by half does not make all rivals equal."""
    return min(noise_between(one, other, device), MOST_NOISE)


def is_disturbed(measurement: Measurement) -> bool:
    """True if something else ran on the machine: the slow steps took more than twice as long as the quick ones."""
    if not measurement.step_seconds:  # a reference has only a loss curve
        return False
    spread = spread_of(measurement.step_seconds)
    return spread.p90 > MOST_SWING * spread.p10
