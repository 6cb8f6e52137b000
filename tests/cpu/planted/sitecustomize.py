"""What is planted from outside into processes that redline starts: Python imports this by itself when its folder is on
PYTHONPATH. A fault in rank 1 of every job, or no warm-up in the worker of a measurement.

PLANTED_FAULT=memory PYTHONPATH=tests/cpu/planted redline ladder tiny --gpus 2 --rungs flash,fused-adamw

PLANTED_HASTE=1 PYTHONPATH=tests/cpu/planted redline ladder tiny

Rows with flash attention meet the fault at their first step; others do not. Warming up ends at once: nobody reads the
times, and on a busy machine, where steps are never steady, it takes fifteen seconds a row.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("the planted fault")


def run_out_of_memory() -> None:
    raise MemoryError("planted: out of memory")


def hang() -> None:
    time.sleep(600)


def leave() -> None:
    os._exit(7)


FAULTS = {"kill": kill, "raise": fail, "memory": run_out_of_memory, "hang": hang, "leave": leave}


def hurry() -> None:
    from redline.engine import measure

    measure.WARMUP_LIMIT_SECONDS = 0.0


def plant(kind: str) -> None:
    from redline.engine.step import TrainStep

    hurry()
    real = TrainStep.compute_gradients

    def compute_gradients(self: TrainStep, batch: Any) -> Any:
        if self.plan.attention == "flash" and self.plan.parallel != "none":
            FAULTS[kind]()
        return real(self, batch)

    TrainStep.compute_gradients = compute_gradients  # type: ignore[method-assign]


if os.environ.get("RANK") == "1" and "PLANTED_FAULT" in os.environ:
    plant(os.environ["PLANTED_FAULT"])
elif "PLANTED_HASTE" in os.environ and "redline.engine.worker" in sys.orig_argv:
    hurry()
