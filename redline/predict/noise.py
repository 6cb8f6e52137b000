"""How large a ratio of two speeds must be before it means anything, from the scatter of each.

    noise_of_ratio(0.002, 0.003, device="cuda", repeats=1) -> 0.02, the spread between runs
    spread_error({"median": 0.1, "p10": 0.098, "p90": 0.102, "n": 50}) -> 0.0028, of the median

`search/noise.py` knows every step and computes errors from them; a document has only a summary, which `spread_error`
reads. Both ask `seen_noise` and `unseen_noise`, so that a ladder and a comparison of two ladders mean the same by
noise: of differences that mean nothing, one in twenty exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Spread seen between processes: 1 to 3 % on an H200; on two shared CPU cores 10 % and more.
UNSEEN_RUN_TO_RUN = {"cuda": 0.02, "cpu": 0.10}
P90_SIGMAS = 1.2816  # the 90th percentile of a normal distribution, in standard deviations
MOST_TAKEN = 0.25  # cores of a step's own that other programs may have: an eighth of what two threads need
MOST_SWING = 2.0  # p90 over p10: on a quiet machine steps differ by some per cent, so above this something else ran
MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)  # by this factor the median of many normal values scatters more than their mean
STUDENTS_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Within how many standard errors 95 % of all differences lie, for 1 to 10 degrees of freedom: an error that was
computed from a few values may be far too small by chance (NIST/SEMATECH e-Handbook, 1.3.6.7.2, column 0.975)."""


def noise_of_ratio(
    one_error: float, other_error: float, *, device: str, repeats: int, degrees_of_freedom: float = math.inf
) -> float:
    return max(seen_noise(one_error, other_error, degrees_of_freedom), unseen_noise(device, repeats))


def seen_noise(one_error: float, other_error: float, degrees_of_freedom: float) -> float:
    """Return as many standard errors of the ratio as chance stays within in 19 of 20 cases. `degrees_of_freedom`: how
    many values both errors were computed from, less one for each mean."""
    known = len(STUDENTS_T)
    few = 1 <= degrees_of_freedom <= known
    # Above the table t falls to 1.96; this is at most 0.04 more.
    t = STUDENTS_T[int(degrees_of_freedom) - 1] if few else 2 + 2.3 / max(degrees_of_freedom, known)
    return t * math.hypot(one_error, other_error)


def unseen_noise(device: str, repeats: int) -> float:
    """Return the least noise of any ratio. One run cannot show what differs between processes (clocks, memory layout),
    so this is the spread seen between runs, divided by `repeats`: two repeats may still agree by chance."""
    return UNSEEN_RUN_TO_RUN[device] / repeats


def exceeds(ratio: float, noise: float) -> bool:
    """True if two speeds differ by more than the noise, a factor either way: on a machine that swings by more than its
    own speed a slowdown of 80 % must still be one."""
    return max(ratio, 1 / ratio) > 1 + noise


def spread_error(spread: Mapping[str, Any] | None) -> float | None:
    """Return the standard error of a median as a fraction of it, from p10, p90 and n as if the values were normal; None
    if the spread lacks one of them."""
    median, p10, p90, count = ((spread or {}).get(name) for name in ("median", "p10", "p90", "n"))
    if not median or p10 is None or p90 is None or not count:
        return None
    sigma = (p90 - p10) / (2 * P90_SIGMAS)
    return float(MEDIAN_TO_MEAN * sigma / median / math.sqrt(count))
