"""The table of optimizers."""

from redline.optim.adamw import OPTIMIZERS, build_optimizer, reset_optimizer

__all__ = ["OPTIMIZERS", "build_optimizer", "reset_optimizer"]
