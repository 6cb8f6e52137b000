"""`redline` with a fault: at one step one rank is killed, alone or with its agent, raises, runs out of memory, hangs or
is frozen. Once, if a file says so.

python -m redline.engine.agent --standalone --nproc-per-node 2 rank_fault.py KIND STEP FLAG train gpt2 ...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from redline.cli import main
from redline.engine.step import TrainStep


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("the planted fault")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def hang() -> None:
    time.sleep(600)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_the_node() -> None:
    """The agent first: it must not tell anybody."""
    os.kill(os.getppid(), signal.SIGKILL)
    kill()


FAULTS = {
    "node": lose_the_node,
    "kill": kill,
    "raise": fail,
    "memory": run_out_of_memory,
    "hang": hang,
    "freeze": freeze,
}


def plant(kind: str, at_step: int, flag: Path) -> None:
    real = TrainStep.__call__

    def step(self: TrainStep, batch: Any) -> torch.Tensor:
        if self.steps_taken == at_step and not flag.exists():
            flag.touch()
            FAULTS[kind]()
        return real(self, batch)

    TrainStep.__call__ = step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        plant(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    raise SystemExit(main(sys.argv[4:]))
