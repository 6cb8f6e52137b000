"""How many cores other programs took from a step on a CPU, by the kernel's own accounts.

neighbours = Neighbours(threads=2); ...; neighbours.cores_missing() -> 0.9

The spread of step times does not show it: a program that is busy all the time makes all steps slow alike, and a row
measured beside it looks as if its rung were at fault. Linux only; elsewhere the answer is None.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from redline.core.host import core_count

LEAST_SECONDS = 0.5  # the accounts are kept in ticks of 10 ms: over 25 ms they once made 1.0 core 1.8
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # per second, of the figures in /proc
IDLE = (3, 4, 8, 9)  # columns of /proc/stat: idle, waiting for disks, and guests, which count as user time already
SESSION, OWN_TIMES = 3, slice(11, 15)  # in /proc/PID/stat behind the name: the session, and times with dead children's


class Neighbours:
    def __init__(self, threads: int, root: Path = Path("/")) -> None:
        self.threads, self.proc, self.quota = threads, root / "proc", root / "sys/fs/cgroup/cpu.max"
        self._before = self._read()

    def cores_missing(self) -> float | None:
        """Return how many of the cores that the step's threads need were taken, on average since the start. None if the
        time was too short, or if the process may use only some of the cores, of which there is no account."""
        now, cores = self._read(), os.cpu_count() or 1
        if now is None or self._before is None or self._is_limited(cores):
            return None
        seconds, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        if seconds < LEAST_SECONDS:
            return None
        return max(0.0, (busy - own) / seconds + min(self.threads, cores) - cores)

    def _is_limited(self, cores: int) -> bool:
        """True under taskset or in a container with fewer cores than the machine has."""
        quota = self.quota.read_text().split() if self.quota.exists() else ["max"]
        return core_count() < cores or quota[:1] != ["max"]

    def _read(self) -> tuple[float, float, float] | None:
        """Return the time, and the CPU seconds of all programs and of this session: a worker's, its loaders' too."""
        try:
            columns = [int(word) for word in (self.proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
            busy = sum(ticks for number, ticks in enumerate(columns) if number not in IDLE)
            return time.monotonic(), busy / TICKS, self._own_ticks() / TICKS
        except (OSError, ValueError, IndexError):
            return None

    def _own_ticks(self) -> int:
        ticks, session = 0, os.getsid(0)
        for path in self.proc.glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(fields[SESSION]) == session:
                ticks += sum(map(int, fields[OWN_TIMES]))
        return ticks
