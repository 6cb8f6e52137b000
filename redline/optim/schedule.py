"""Learning rates over time. Plain functions of the step, so that resuming needs no state."""

from __future__ import annotations


def warm_up(step: int, *, peak: float, warmup_steps: int) -> float:
    """Linear from peak / warmup_steps at step 0 to the peak, then constant. Without it GPT-2's first steps overshoot
    (its loss goes 11, 8, 13) and rounding grows into visibly other curves, which no equivalence check could use."""
    return peak * min((step + 1) / warmup_steps, 1.0)
