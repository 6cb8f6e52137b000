"""The table of optimizers, and learning rates over time."""

from redline.optim.adamw import OPTIMIZERS, build_optimizer, reset_optimizer
from redline.optim.schedule import warm_up

__all__ = ["OPTIMIZERS", "build_optimizer", "reset_optimizer", "warm_up"]
