"""Sends the curves of a run to an experiment tracker. A new one needs a `Tracker` class and a row in TRACKERS.

    feed = TrackerFeed(open_tracker("tensorboard", run_directory))
    feed("cycle", updates=10, loss=7.1, ...)          # the same events that metrics.jsonl gets

Trackers are called between cycles, with numbers that the trainer has already read, so no tracker makes the device wait.
If one fails, it is dropped and training continues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from redline.core.errors import UserError, unknown_name

SCALARS = {  # field of a cycle -> name in the tracker, which groups names by what precedes the slash
    "loss": "loss/train",
    "learning_rate": "training/learning_rate",
    "skipped": "training/skipped_updates",
    "tokens": "training/tokens",
    "documents": "training/documents",
    "epoch": "training/epoch",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "data_wait": "speed/data_wait",
    "peak_bytes": "memory/peak_bytes",
}


class Tracker(ABC):
    """Writes below the run directory, or to a service that it finds itself."""

    package: str
    """The package that must be installed."""

    @abstractmethod
    def __init__(self, run: Path) -> None: ...

    @abstractmethod
    def begin(self, updates: int) -> None:
        """Begin a session after this update. What a killed session has logged for later updates is void."""

    @abstractmethod
    def scalars(self, figures: Mapping[str, float], updates: int) -> None: ...

    @abstractmethod
    def text(self, name: str, text: str, updates: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


@final
class TensorBoard(Tracker):
    """`tensorboard --logdir runs` shows every run below it."""

    package = "tensorboard"

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def begin(self, updates: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=updates + 1)

    def scalars(self, figures: Mapping[str, float], updates: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, updates)

    def text(self, name: str, text: str, updates: int) -> None:
        self._writer.add_text(name, text, updates)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard}


def check_tracker(name: str) -> None:
    """Raise a UserError if there is no such tracker, or it is not installed; called before anything is written."""
    if name not in TRACKERS:
        raise unknown_name("tracker", name, TRACKERS)
    package = TRACKERS[name].package
    if find_spec(package) is None:
        raise UserError(
            f"--tracker {name} needs the package {package}",
            "it is not installed: redline trains without it",
            f"pip install {name}, or leave --tracker out: report.html has the curves too",
        )


def open_tracker(name: str, run: Path) -> Tracker:
    check_tracker(name)
    return TRACKERS[name](run)


@final
class TrackerFeed:
    """Passes the events of a run on to a tracker. Values that are not known (None) are left out."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker
        self._begun = False
        self.trouble = ""
        """Why the tracker was dropped, if it was."""

    def __call__(self, kind: str, **fields: Any) -> None:
        if self._tracker is None or kind not in ("cycle", "validation", "sample"):
            return
        try:
            self._tell(self._tracker, kind, fields)
        except Exception as error:  # a full disk, a lost connection, whatever a service may raise
            self._tracker, self.trouble = None, str(error) or type(error).__name__

    def _tell(self, tracker: Tracker, kind: str, fields: dict[str, Any]) -> None:
        updates = fields["updates"]
        if not self._begun:
            tracker.begin(updates - len(fields.get("losses", ())))
            self._begun = True
        if kind == "cycle":
            norms = {"training/gradient_norm": fields["gradient_norms"][-1]}
            figures = {SCALARS[name]: fields.get(name) for name in SCALARS} | norms
            tracker.scalars({name: value for name, value in figures.items() if value is not None}, updates)
        elif kind == "validation" and fields["loss"] is not None:
            tracker.scalars({"loss/validation": fields["loss"]}, updates)
        elif kind == "sample":
            tracker.text("sample", fields["text"], updates)

    def close(self) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self.trouble = str(error) or type(error).__name__
