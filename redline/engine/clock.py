"""Step times without disturbing the steps: CUDA events on a GPU, a monotonic clock on a CPU.

clock = Clock(device); clock.mark(); step(); clock.mark(); clock.seconds() -> [0.034]
"""

from __future__ import annotations

import time

import torch


class Clock:
    """Marks in the order of the work. Nothing waits for the device until `seconds` is called."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))  # not the current device's, which may be another
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time between each pair of neighbouring marks."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return [_between(start, end) for start, end in zip(self.marks, self.marks[1:], strict=False)]


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    return start.elapsed_time(end) / 1e3  # type: ignore[union-attr, arg-type]  # elapsed_time is in milliseconds
