"""Learning rates over time, as plain functions of the step, so that resuming needs no state.

    rate = make_schedule("cosine", peak=6e-4, warmup_steps=700, steps=20_000)
    rate(0), rate(699), rate(20_000)  ->  8.6e-07, 6e-4, 6e-5

Steps count from 0. Every schedule warms up first. Those that decay reach their floor at `steps`, the first step that is
not taken, so that no update is spent at the lowest rate, which may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from redline.core.errors import UserError, unknown_name
from redline.core.units import counted

Schedule = Callable[[int], float]


def warm_up(step: int, *, peak: float, warmup_steps: int) -> float:
    """Linear from peak / warmup_steps at step 0 to the peak, then constant. Without it GPT-2's first steps overshoot
    (its loss goes 11, 8, 13) and rounding grows into visibly different curves, which no equivalence check could use."""
    return peak * min((step + 1) / warmup_steps, 1.0)


def cosine(step: int, *, peak: float, warmup_steps: int, steps: int, floor: float = 0.1) -> float:
    """Half a cosine from the peak to `floor` of it (a tenth: GPT-3, arXiv 2005.14165), then constant."""
    if step < warmup_steps:
        return warm_up(step, peak=peak, warmup_steps=warmup_steps)
    done = min((step - warmup_steps) / (steps - warmup_steps), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def wsd(
    step: int, *, peak: float, warmup_steps: int, steps: int, floor: float = 0.0, decay_share: float = 0.2
) -> float:
    """Warm-up, stable, decay: the peak until the last `decay_share` of all steps, which fall as 1 - sqrt(x) to `floor`
    of the peak (form and share from arXiv 2405.18392). Before the decay nothing depends on `steps`, so a run can be
    extended from a checkpoint before it."""
    decay_steps = min(decay_share * steps, steps - warmup_steps)
    left = max((steps - step) / decay_steps, 0.0)
    if left >= 1:
        return warm_up(step, peak=peak, warmup_steps=warmup_steps)
    return peak * (floor + (1 - floor) * (1 - math.sqrt(1 - left)))


def constant(step: int, *, peak: float, warmup_steps: int, steps: int) -> float:
    """Warm-up only: what the ladder's rows run with, whatever the number of steps."""
    return warm_up(step, peak=peak, warmup_steps=warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Form:
    rate: Callable[..., float]
    shares: tuple[str, ...] = ()
    """Its optional arguments, each a share of the whole."""


SCHEDULES = {
    "constant": Form(rate=constant),
    "cosine": Form(rate=cosine, shares=("floor",)),
    "wsd": Form(rate=wsd, shares=("floor", "decay_share")),
}


def make_schedule(name: str, *, peak: float, warmup_steps: int, steps: int, **shares: float) -> Schedule:
    """Return a function step -> learning rate. `shares`: `floor` for cosine and wsd, `decay_share` for wsd."""
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    if not 1 <= warmup_steps < steps:
        raise UserError(
            f"{counted(warmup_steps, 'step')} of warm-up {'does' if warmup_steps == 1 else 'do'} not fit into "
            f"{counted(steps, 'step')}",
            "the warm-up takes at least one step, and something must be left after it",
            f"choose a warm-up from 1 to {counted(steps - 1, 'step')}" if steps > 1 else "train for two steps at least",
        )
    for key, value in shares.items():
        check_share(name, key, value)
    return partial(SCHEDULES[name].rate, peak=peak, warmup_steps=warmup_steps, steps=steps, **shares)


def check_share(name: str, key: str, value: float) -> None:
    known = SCHEDULES[name].shares
    if key not in known:
        listed = ", ".join(known) or "nothing beside peak, warm-up and steps"
        raise UserError(f"{name} has no {key}", "each schedule has its own form", f"it takes: {listed}")
    if not 0 <= value <= 1 or (key == "decay_share" and value == 0):
        raise UserError(f"{key} is {value}", "it is a share of the whole", "choose from 0 (decay_share: above 0) to 1")
