"""The machine around the device, by the standard library alone: its CPU, its cores, its clock, what is installed."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def cpu_name() -> str:
    """What is measured is stored under this name."""
    names = (line.split(":", 1)[1].strip() for line in cpuinfo() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def core_count() -> int:
    """Cores this process may use, which a container or taskset can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timestamp() -> str:
    """The `date` of a record: now, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    from importlib import metadata  # 40 ms, which few commands need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
