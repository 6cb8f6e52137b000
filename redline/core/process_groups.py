"""The end of a process and of all that it has started.

kill_all_but_trackers(process.pid)      # of a process that leads a group, as one with a session of its own does
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_all_but_trackers(group: int) -> None:
    """multiprocessing's resource tracker removes the semaphores that others leave in /dev/shm, and then ends by itself:
    it has to outlive them. Stopped first, nobody starts another process meanwhile."""
    os.killpg(group, signal.SIGSTOP)
    members = processes_of(group)
    if not any(is_tracker for is_tracker in members.values()):
        os.killpg(group, signal.SIGKILL)
        return
    for process in [process for process, is_tracker in members.items() if not is_tracker]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os.killpg(group, signal.SIGCONT)


def processes_of(group: int) -> dict[int, bool]:
    """Those in it, and whether each is a resource tracker. Nothing where the system has no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == group:
                found[int(folder.name)] = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
    return found
