"""What a rung is: why it exists, where it applies, what it promises about the maths, which plan fields it changes.

A rung is data about one optimisation. It changes a Plan and runs nothing: `engine/build.py` carries out the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Workload


class Maths(str, Enum):
    """What a rung promises about the mathematics; the equivalence check holds it to that promise."""

    BIT_EXACT = "bit-exact"
    ROUNDING = "rounding-only"
    CHANGES = "changes-maths"


class Rung(ABC):
    """One optimisation. The docstring of a concrete rung is its page in docs/rungs."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What it does, in a few words."""
    maths: ClassVar[Maths]
    instead_of: ClassVar[str | None] = None
    """The rung that this one replaces in a recipe; both are measured on the same base."""
    stand_in: ClassVar[bool] = False
    """Keep this rung only where the rung it replaces does not apply, however fast it is."""
    least_learning: ClassVar[float | None] = None
    """The share of the unchanged model's loss reduction, in nats over the compared steps, that this rung must reach.
    None: the default for changed models in predict/verdict.py."""
    when_named: ClassVar[bool] = False
    """Not part of the plain ladder: climbed when --also or --rungs names it, and considered by `tune`. Such a rung
    gives up speed for memory, or pays off only sometimes."""
    when_measured: ClassVar[bool] = False
    """Part of the plain ladder, which keeps it where it is faster beyond the noise; never in an unmeasured recipe."""
    compile_factor: ClassVar[float] = 1.0
    """Compile time as a multiple of plain torch.compile's, so that `tune` starts nothing it cannot finish."""

    @property
    def is_usual(self) -> bool:
        """True if the rung belongs in a recipe that nobody has measured."""
        return not (self.when_named or self.when_measured)

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        """Return why the rung does not apply on top of this plan here, or None if it does."""
        return None

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan with this optimisation in it."""


def why_not(rung: Rung, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
    """Return why a rung does not apply to this model on this machine on top of this plan, or None if it does."""
    return workload.refusal(rung.name, hardware.kind) or rung.needs(workload, hardware, plan)


def missing(hardware: Hardware, feature: str) -> str | None:
    """Return why a machine lacks a feature, or None if it has the feature."""
    if feature in hardware.features:
        return None
    return hardware.missing.get(feature, f"{hardware.name} has no {feature}")
