"""What the processes that read text have in common: they end with the process that started them.

    Process(target=work, ...)          # work() begins with end_with_parent(); a trainer's also with outlive_signals()

No torch here: `data prepare` has no use for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

OUTLIVED_SECONDS = 30.0  # a trainer's update may take this long


def end_with_parent() -> None:
    """In a worker: exit when the process that asked for it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()  # the one that asked, not a server that forked us
    assert parent is not None

    def leave_after(parent: Any) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_after, args=(parent,), daemon=True).start()


def outlive_signals() -> None:
    """In a worker of a trainer: survive Ctrl-C, and SIGTERM for OUTLIVED_SECONDS. Both reach every process of a
    terminal or a job, but the trainer needs its workers to finish an update and write a checkpoint. It ends them
    itself."""

    def leave_later(*_: object) -> None:
        timer = threading.Timer(OUTLIVED_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave_later)


def how_it_ended(process: Any) -> str:
    """Say how a process ended that left no message: 'SIGKILL', or 'exit code 3'."""
    process.join()
    code = process.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
