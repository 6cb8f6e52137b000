"""Which line of Python is to blame: the innermost frame that is neither torch's, nor the profiler's, nor generated.

here()  ->  Frame(file="/home/me/model.py", line=57, function="forward")
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OPTIMIZERS = (os.path.join(_TORCH, "optim") + os.sep, str(Path(__file__).parents[1] / "optim") + os.sep)
_WATCHERS = (
    warnings.__file__,  # reports synchronisations
    *(
        str(Path(__file__).parent / name)
        for name in (
            "findings.py",
            "inspect_random.py",
            "inspect_trace.py",
            "memory_snapshot.py",
            "profiling.py",
            "profiling_frames.py",
        )
    ),
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


def here() -> Frame | None:
    """Return the user's innermost frame on the calling thread; None if there is none, as in autograd's own threads."""
    return users_frame(_stack(sys._getframe(1)))


def users_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the user's innermost frame. `frames` begin with the innermost."""
    return next((frame for frame in frames if is_users(frame.file)), None)


def is_users(file: str) -> bool:
    if file.startswith((_TORCH, "<")) or file in _WATCHERS or "torchinductor" in file:
        return False
    # Inductor writes its code here; by default to .../torchinductor_USER, which is covered above.
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return not generated or not file.startswith(generated)


def in_optimizer() -> bool:
    """True if an optimizer, torch's or redline's, is on the stack: optimizers read their own step counters, which are
    on the host."""
    return any(frame.file.startswith(_OPTIMIZERS) for frame in _stack(sys._getframe(1)))


def _stack(frame: FrameType | None) -> Iterable[Frame]:
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
