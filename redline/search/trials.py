"""A trial of the tuner, the time it may take, and where its answer comes from: the nouns of `search/tune.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from redline.core.job import Job, Result
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe
from redline.predict.verdict import Equivalence
from redline.rungs import plan_of


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
    """Bytes a recipe may take; None: nobody knows."""
    check_steps: int = 20
    timed_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    result: Result
    seconds: float
    """What it took, now or then."""
    remembered: bool = False
    counts: bool = True
    """Its seconds are of the search's minutes, now or then: a ladder's are not."""


class Answers(Protocol):
    def recall(self, job: Job, timeout_seconds: float) -> Answer | None:
        """What is known already, and would not come out otherwise with so much time."""

    def adopt(self, job: Job, answer: Answer) -> None:
        """A remembered answer was used."""

    def ask(self, job: Job, timeout_seconds: float) -> Answer:
        """From a worker."""

    def trouble(self) -> str | None:
        """Why no worker can answer any more, or None."""


class View(Protocol):
    def trial_started(self, label: str, number: int) -> None: ...
    def trial_finished(self, trial: Trial) -> None: ...


class OutOfTimeError(Exception):
    """What would come next takes longer than there is time."""


class DeviceLostError(Exception):
    """Whatever comes next would fail."""


class Budget:
    """Minutes of measuring. What a search remembers counts with the time it took then, so that a second run ends where
    the first did instead of going on. What it was given by a ladder (--after) costs nothing."""

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
    """Why its memory rules it out."""

    @property
    def ran(self) -> bool:
        return bool(self.measurements)

    @property
    def checked(self) -> bool:
        """It kept up, so it was held against fp32; a look alone is not."""
        return self.ran and self.measurements[0].gradients is not None

    @property
    def step_seconds(self) -> float:
        return statistics.median(statistics.median(one.step_seconds) for one in self.measurements)

    @property
    def compiled(self) -> bool:
        return plan_of(self.recipe.rungs).compile

    @property
    def compile_seconds(self) -> float | None:
        """Of the first process: later ones find the code compiled."""
        return self.measurements[0].compile_seconds if self.ran else None
