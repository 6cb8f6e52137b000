"""The form of a rung: why it exists, where it applies, what it promises about the maths, which fields it changes.

A rung is data about one optimisation. It changes a Plan and runs nothing: `engine/build.py` does what the plan says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Workload


class Maths(str, Enum):
    """What a rung promises; the equivalence check holds it to that."""

    BIT_EXACT = "bit-exact"
    ROUNDING = "rounding-only"
    CHANGES = "changes-maths"


class Rung(ABC):
    """One optimisation. Subclasses are final; their docstring is the page in docs/rungs."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What it does, in a few words."""
    maths: ClassVar[Maths]
    instead_of: ClassVar[str | None] = None
    """This rung takes the place of that one in a recipe: both are measured on the same base."""
    stand_in: ClassVar[bool] = False
    """Keep it only where the rung it replaces does not apply, however fast it is."""
    least_learning: ClassVar[float | None] = None
    """Of the nats that the unchanged maths sheds over the compared steps, the share that this one must shed; None: what
    predict/verdict.py asks of every changed model."""
    when_named: ClassVar[bool] = False
    """Not part of the plain ladder: taken when --also or --rungs names it, and weighed by `tune`. It gives up speed for
    memory, or pays only sometimes."""
    when_measured: ClassVar[bool] = False
    """Part of the plain ladder, which keeps it where it is faster beyond the noise; no recipe has it unmeasured."""
    compile_factor: ClassVar[float] = 1.0
    """How many times as long as plain torch.compile it compiles, so that `tune` starts nothing it cannot finish."""

    @property
    def is_usual(self) -> bool:
        """Fit for a recipe that nobody measured."""
        return not (self.when_named or self.when_measured)

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        """The reason it does not apply on top of this plan here, or None when it does."""
        return None

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """The plan with this optimisation in it."""


def why_not(rung: Rung, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
    """The reason a rung does not apply to this model on this machine on top of this plan; None when it does."""
    return workload.refusal(rung.name, hardware.kind) or rung.needs(workload, hardware, plan)


def missing(hardware: Hardware, feature: str) -> str | None:
    """The reason a machine lacks a feature, or None when it has it."""
    if feature in hardware.features:
        return None
    return hardware.missing.get(feature, f"{hardware.name} has no {feature}")
