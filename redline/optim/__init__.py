"""The table of optimizers, and learning rates over time.

build_optimizer("lion", model, **settings_for("lion", learning_rate=6e-4, weight_decay=0.1))

What needs torch is imported on access: schedules are plain arithmetic, and a command may use them without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redline.optim.schedule import SCHEDULES, make_schedule, warm_up

if TYPE_CHECKING:
    from redline.optim.table import OPTIMIZERS, build_optimizer, reset_optimizer, settings_for

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "build_optimizer",
    "make_schedule",
    "reset_optimizer",
    "settings_for",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from redline.optim import table

    return getattr(table, name)
