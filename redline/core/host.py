"""The host machine, from the standard library alone: its CPU, its cores, its clock, installed packages."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def cpu_name() -> str:
    """Return the CPU's name, under which its measurements are stored."""
    names = (line.split(":", 1)[1].strip() for line in cpuinfo() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def core_count() -> int:
    """Return how many cores this process may use; a container or taskset can allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_environment() -> dict[str, str]:
    """Return settings for a process that is about to import torch; empty if the user has chosen. OpenMP's threads spin
    while they wait for one another. If anything else uses the cores, they spin for whole time slices: on two cores
    beside two busy processes, a step of 26 ms took 1,516 ms, and 56 ms with this limit. On the idle machine one run of
    each could not be told apart."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": "1000"}


def timestamp() -> str:
    """Return the current time in UTC, to the second, for the `date` of a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    from importlib import metadata  # takes 40 ms, and few commands need it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
