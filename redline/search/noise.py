"""How large a difference between two rows must be before it means anything.

Each measurement gives a few independent looks at its own step time: the medians of repeats where there are repeats,
otherwise of four stretches of the one run. Their scatter, carried through to the ratio of two rows at two standard
errors, is the noise of that comparison. One run cannot see what differs between processes (clocks, memory layout), so
without repeats the noise is never taken for less than the spread we have seen between runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from redline.core.measurement import Measurement, spread_of
from redline.predict.noise import MOST_SWING, noise_of_ratio

STRETCHES = 4
QUIET = 0.01  # scatter of a ratio below this is a quiet machine's
MOST_NOISE = 0.25  # however noisy the machine: what is slower than its rival by more has lost


def looks_of(measurements: Sequence[Measurement]) -> list[float]:
    """Independent medians of the step time, in seconds."""
    if len(measurements) > 1:
        return [statistics.median(measurement.step_seconds) for measurement in measurements]
    steps = measurements[0].step_seconds
    size = max(len(steps) // STRETCHES, 1)
    return [
        statistics.median(steps[start : start + size]) for start in range(0, size * STRETCHES, size) if steps[start:]
    ]


def standard_error(measurements: Sequence[Measurement]) -> float:
    """Of the median step time, as a fraction of it."""
    looks = looks_of(measurements)
    if len(looks) < 2:
        return 0.0
    return statistics.stdev(looks) / statistics.mean(looks) / math.sqrt(len(looks))


def noise_between(one: Sequence[Measurement], other: Sequence[Measurement], device: str = "cuda") -> float:
    """Ratios of the two closer to 1 than this are noise."""
    fewest = min(len(one), len(other))
    return noise_of_ratio(standard_error(one), standard_error(other), device=device, repeats=fewest)


def scatter_between(one: Sequence[Measurement], other: Sequence[Measurement]) -> float:
    """The part of that noise that was seen in these steps; 0 on a quiet machine."""
    scatter = 2 * math.hypot(standard_error(one), standard_error(other))
    return scatter if scatter >= QUIET else 0.0


def tolerated_noise(one: Sequence[Measurement], other: Sequence[Measurement], device: str) -> float:
    """The same, where something is decided: a machine that swings by half of itself must not make all rivals equal."""
    return min(noise_between(one, other, device), MOST_NOISE)


def is_disturbed(measurement: Measurement) -> bool:
    """Something else ran on the machine: its slow steps took more than twice its quick ones."""
    if not measurement.step_seconds:  # a reference is a curve alone
        return False
    spread = spread_of(measurement.step_seconds)
    return spread.p90 > MOST_SWING * spread.p10
