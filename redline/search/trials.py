"""The data types of `search/tune.py`: a trial, the time a search may take, and where its answers come from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from redline.core.job import Job, Result
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe
from redline.predict.noise import UNSEEN_RUN_TO_RUN
from redline.predict.verdict import Equivalence
from redline.rungs import plan_of

AGREE = 3.0  # times the spread between processes: two looks at a recipe that are further apart do not agree


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What the user chose. Stored in run.json, so that a resumed run asks the same questions."""

    device: str
    minutes: float
    allow: str = "rounding"
    rungs: tuple[str, ...] | None = None
    """Only these are choices; None: all that apply."""
    without: tuple[str, ...] = ()
    micro_batch: int | None = None
    """None: searched."""
    global_batch: int | None = None
    memory_limit: int | None = None
    """Bytes a recipe may take; None if unknown."""
    check_steps: int = 20
    timed_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    result: Result
    seconds: float
    """What the answer took, now or when it was first given."""
    remembered: bool = False
    counts: bool = True
    """True if the seconds count against the search's minutes; those of a ladder's answers do not."""


class Answers(Protocol):
    def recall(self, job: Job, timeout_seconds: float) -> Answer | None:
        """Return a known answer that this much time would not change, or None."""

    def adopt(self, job: Job, answer: Answer) -> None:
        """Record that a remembered answer was used."""

    def ask(self, job: Job, timeout_seconds: float) -> Answer:
        """Get the answer from a worker."""

    def trouble(self) -> str | None:
        """Return why no worker can answer any more, or None."""


class View(Protocol):
    def trial_started(self, label: str, number: int) -> None: ...
    def trial_finished(self, trial: Trial) -> None: ...


class OutOfTimeError(Exception):
    """What would come next takes longer than the time that is left."""


class DeviceLostError(Exception):
    """The device is gone: whatever comes next would fail."""


class Budget:
    """The time of a search. A remembered answer counts with the time it took originally, so that a second run ends
    where the first did instead of going further. Answers given by a ladder (--after) cost nothing."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock, self.started = seconds, clock, clock()
        self.remembered = 0.0

    @property
    def spent(self) -> float:
        return self.clock() - self.started + self.remembered

    @property
    def left(self) -> float:
        return self.seconds - self.spent


@dataclass
class Trial:
    number: int
    recipe: Recipe
    label: str
    """What was changed, such as 'cudnn-attention instead of flash'."""
    onto: Trial | None
    """The trial whose recipe was changed."""
    job: Job
    measurements: list[Measurement] = field(default_factory=list)
    failure: Failure | None = None
    equivalence: Equivalence | None = None
    reference_curve: tuple[float, ...] | None = None
    seconds: list[float] = field(default_factory=list)
    """What each of its processes took."""
    remembered: bool = False
    over_limit: str | None = None
    """Why its memory use rules it out; None if it does not."""

    @property
    def ran(self) -> bool:
        return bool(self.measurements)

    @property
    def checked(self) -> bool:
        """True if it kept up and was therefore compared with fp32; a look alone is not."""
        return self.ran and self.measurements[0].gradients is not None

    @property
    def verdict(self) -> str | None:
        return None if self.equivalence is None else self.equivalence.verdict

    @property
    def steady(self) -> list[Measurement]:
        """The measurements that agree with the quickest one. Disturbances only slow steps down, so a slower one shows
        what else ran on the machine, and would make the recipe look both slow and uncertain."""
        slowest = (1 + AGREE * UNSEEN_RUN_TO_RUN[self.job.device]) * min(map(median_of, self.measurements))
        return [one for one in self.measurements if median_of(one) <= slowest]

    @property
    def step_seconds(self) -> float:
        return statistics.median(map(median_of, self.steady))

    @property
    def compiled(self) -> bool:
        return plan_of(self.recipe.rungs).compile

    @property
    def compile_seconds(self) -> float | None:
        """Compile time of the first process; later ones find the code compiled."""
        return self.measurements[0].compile_seconds if self.ran else None


def median_of(measurement: Measurement) -> float:
    return statistics.median(measurement.step_seconds)
