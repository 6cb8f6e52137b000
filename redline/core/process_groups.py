"""Killing a process and everything it has started.

kill_all_but_trackers(process.pid)      # the process must lead a group, as one with a session of its own does
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_all_but_trackers(group: int) -> None:
    """Kill a process group except for multiprocessing's resource tracker, which removes the semaphores that the others
    leave in /dev/shm and then exits by itself. All are stopped first, so that none can start another process."""
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
    """Return the processes of a group, and whether each is a resource tracker. Empty on systems without /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == group:
                found[int(folder.name)] = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
    return found
