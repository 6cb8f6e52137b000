"""What `redline hardware --measure` found on this machine, kept for estimates and tables.

    save_measured(peaks) -> ~/.cache/redline/peaks/nvidia-h200--580.159.04.json
    find_measured(["NVIDIA H200"]) -> (peaks, notes)

One file per device and driver, written whole or not at all. A file that is damaged, or has rates that the device cannot
reach, is passed over with a note: a cache must never stop a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from redline.core.devices import lookup
from redline.core.hardware import MeasuredPeaks, beyond_the_data_sheet
from redline.core.job import user_cache, write_atomically
from redline.core.values import from_json, to_json


def peaks_folder() -> Path:
    return user_cache() / "peaks"


def save_measured(peaks: MeasuredPeaks) -> Path:
    """Save a measurement and return its path. Raises OSError if that fails; the caller decides whether it matters."""
    folder = peaks_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_slug(peaks.name)}--{_slug(peaks.driver or 'no-driver')}.json"
    return write_atomically(path, json.dumps(to_json(peaks), indent=2) + "\n")


def find_measured(names: Collection[str], driver: str | None = None) -> tuple[MeasuredPeaks | None, tuple[str, ...]]:
    """Return the newest measurement of a device under any of its driver names, preferably one made with `driver`, and a
    note for every file that was passed over."""
    found, notes = [], []
    for path in sorted({path for name in names for path in peaks_folder().glob(f"{_slug(name)}--*.json")}):
        try:
            peaks = _read(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            notes.append(f"{path} is passed over: {type(error).__name__}: {error} (measure again to replace it)")
            continue
        reason = _unbelievable(peaks)
        if reason is not None:
            notes.append(f"{path} is passed over: {reason} (measure again to replace it)")
        elif peaks.name in names:
            found.append(peaks)
    found.sort(key=lambda peaks: (peaks.driver == driver, peaks.date))
    return (found[-1] if found else None), tuple(notes)


def _unbelievable(peaks: MeasuredPeaks) -> str | None:
    device = lookup(peaks.name)
    return None if device is None else beyond_the_data_sheet(peaks, device)


def _read(path: Path) -> MeasuredPeaks:
    peaks = from_json(MeasuredPeaks, json.loads(path.read_text(encoding="utf-8")))
    seconds = [time for rate in peaks.rates for time in (rate.median_seconds, rate.best_seconds)]
    numbers = [peaks.bandwidth, *peaks.bandwidths.values(), *peaks.matmul_tflops.values(), *seconds]
    if not all(isinstance(number, (int, float)) and 0 < number < float("inf") for number in numbers):
        raise ValueError("a rate in it is not a positive number")
    return peaks


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.casefold()).strip("-.") or "unnamed"
