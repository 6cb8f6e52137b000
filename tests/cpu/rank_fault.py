"""`redline` with a fault: at one step one rank is killed, alone or with its agent, raises, finds a mistake of the
user's, runs out of memory, leaves, is interrupted by its own code, hangs or is frozen. Once, if a file says so. Or it
is frozen before the first step, or after the last, until rank 0 is gone; or asked to stop before the first step.

python -m redline.engine.agent --standalone --nproc-per-node 2 rank_fault.py KIND STEP FLAG train gpt2 ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from redline.cli import main
from redline.core.errors import FailedRunError
from redline.core.rank_processes import RANK_PID_FILE
from redline.engine.distributed import Ranks
from redline.engine.step import TrainStep


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("the planted fault")


def find_a_mistake() -> None:
    raise FailedRunError("training my.py:model raised ValueError: odd\nand more", "my.py:7 in forward", "mend it")


def leave() -> None:
    os._exit(7)


def leave_as_if_done() -> None:
    os._exit(0)


def leave_as_if_told() -> None:
    os._exit(1)


def interrupt() -> None:
    raise KeyboardInterrupt


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
    "mistake": find_a_mistake,
    "leave": leave,
    "leave-as-if-done": leave_as_if_done,
    "leave-as-if-told": leave_as_if_told,
    "interrupt": interrupt,
    "memory": run_out_of_memory,
    "hang": hang,
    "freeze": freeze,
}


THAW = """
tries=0
while [ $tries -lt 200 ] && { [ ! -s "$1" ] || kill -0 $(cat "$1"); }; do sleep 0.2; tries=$((tries + 1)); done
kill -CONT $2
"""


def freeze_while_rank_0_is_there() -> None:
    """The agent's SIGTERM ends it then, and nobody waits for the 30 s after which it kills."""
    nothing = subprocess.DEVNULL
    words = ["sh", "-c", THAW, "thaw", os.environ[RANK_PID_FILE], str(os.getpid())]
    subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    freeze()


def freeze_at(moment: str) -> None:
    """When its process has just begun, when it is to meet the others, or when it waits for the last word."""
    connect, hear = Ranks.connect, Ranks.hear

    def frozen_connect(self: Ranks, kind: str) -> torch.device:
        freeze_while_rank_0_is_there()
        return connect(self, kind)

    def frozen_hear(self: Ranks, key: str, speaker: int = 0) -> Any:
        if key == "over":
            freeze_while_rank_0_is_there()
        return hear(self, key, speaker)

    if moment == "begun":
        freeze_while_rank_0_is_there()
    elif moment == "connect":
        Ranks.connect = frozen_connect  # type: ignore[method-assign]
    else:
        Ranks.hear = frozen_hear  # type: ignore[method-assign]


def ask_at(moment: str, number: signal.Signals) -> None:
    """Before redline has handlers, or when it is to meet the others. There out of a text that is executed, as the
    fields of a dataclass are: Python ends a process by SIGINT then, though the interrupt was caught further out."""

    def asked_connect(self: Ranks, kind: str) -> torch.device:
        exec(f"import signal; signal.raise_signal({int(number)})")
        raise AssertionError("nobody was interrupted")

    if moment == "begun":
        signal.raise_signal(number)
    else:
        Ranks.connect = asked_connect  # type: ignore[method-assign]


def plant(kind: str, at_step: int, flag: Path) -> None:
    real = TrainStep.__call__

    def step(self: TrainStep, batch: Any) -> torch.Tensor:
        if self.steps_taken == at_step and not flag.exists():
            flag.touch()
            FAULTS[kind]()
        return real(self, batch)

    TrainStep.__call__ = step  # type: ignore[method-assign]


if __name__ == "__main__":
    words, at_step, flag = sys.argv[1:4]
    rank, _, kind = words.rpartition(":")
    if os.environ["RANK"] == (rank or "1"):
        if kind in ("begun", "connect", "over"):
            freeze_at(kind)
        elif kind.startswith("SIG"):
            name, _, moment = kind.partition("-")
            ask_at(moment, signal.Signals[name])
        else:
            plant(kind, int(at_step), Path(flag))
    raise SystemExit(main(sys.argv[4:]))
