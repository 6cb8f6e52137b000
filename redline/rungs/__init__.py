"""The optimisations, one class each, in the one table everything reads. Importing it needs no torch.

plan_of(Recipe(rungs=("tf32", "bf16"), micro_batch=16).rungs) -> Plan(matmul_precision="high", autocast="bf16", ...)
"""

from redline.rungs.ladder import (
    LADDER,
    find_rung,
    group_of,
    own_rungs,
    plain_at_precision,
    plan_of,
    published_rungs,
    reference_plan,
    usual_rungs,
    with_own,
    yardstick_rungs,
)
from redline.rungs.rung import Maths, Rung, why_not

__all__ = [
    "LADDER",
    "Maths",
    "Rung",
    "find_rung",
    "group_of",
    "own_rungs",
    "plain_at_precision",
    "plan_of",
    "published_rungs",
    "reference_plan",
    "usual_rungs",
    "why_not",
    "with_own",
    "yardstick_rungs",
]
