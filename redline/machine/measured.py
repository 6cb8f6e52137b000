"""What `redline hardware --measure` found on this machine, kept for estimates and tables.

    save_measured(peaks) -> ~/.cache/redline/peaks/nvidia-h200--580.159.04.json;  load_measured("NVIDIA H200") -> peaks

One file per device and driver, written whole or not at all. A file that is damaged, or is not what its name says, is
passed over with a note: a cache must never stop a command.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from redline.core.hardware import MeasuredPeaks
from redline.core.job import write_atomically
from redline.core.values import from_json, to_json


def peaks_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # the XDG rule: a relative path is ignored
    return root / "redline" / "peaks"


def save_measured(peaks: MeasuredPeaks) -> Path:
    """Raises OSError where the folder cannot be written; the caller knows whether that matters."""
    folder = peaks_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_slug(peaks.name)}--{_slug(peaks.driver or 'no-driver')}.json"
    return write_atomically(path, json.dumps(to_json(peaks), indent=2) + "\n")


def load_measured(name: str, driver: str | None = None) -> MeasuredPeaks | None:
    """The newest measurement of a device; with `driver`, one made with that driver where there is one."""
    return find_measured(name, driver)[0]


def find_measured(name: str, driver: str | None = None) -> tuple[MeasuredPeaks | None, tuple[str, ...]]:
    """As load_measured, and a note for every file that had to be passed over."""
    found, notes = [], []
    for path in sorted(peaks_folder().glob(f"{_slug(name)}--*.json")):
        try:
            peaks = _read(path)
            if peaks.name == name:
                found.append(peaks)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            notes.append(f"{path} is passed over: {type(error).__name__}: {error} (measure again to replace it)")
    found.sort(key=lambda peaks: (peaks.driver == driver, peaks.date))
    return (found[-1] if found else None), tuple(notes)


def _read(path: Path) -> MeasuredPeaks:
    peaks = from_json(MeasuredPeaks, json.loads(path.read_text(encoding="utf-8")))
    seconds = [time for rate in peaks.rates for time in (rate.median_seconds, rate.best_seconds)]
    numbers = [peaks.bandwidth, *peaks.bandwidths.values(), *peaks.matmul_tflops.values(), *seconds]
    if not all(isinstance(number, (int, float)) and 0 < number < float("inf") for number in numbers):
        raise ValueError("a rate in it is not a positive number")
    return peaks


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.casefold()).strip("-.") or "unnamed"
