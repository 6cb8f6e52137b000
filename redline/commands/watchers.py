"""The listeners of a training run: metrics.jsonl, the live view, the page, and a tracker if one was chosen.

    with Watchers(order, session, console, tracker="tensorboard") as watchers:
        summary = train(order, watchers.emit)
        watchers.end(summary)

All of them get the same events. None may stop the training: what one could not write is reported at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from redline.commands.common import command_line
from redline.core.host import timestamp
from redline.core.job import REPORT_FILE, RUN_FILE, RunDirectory
from redline.core.training import METRICS_FILE
from redline.core.values import to_json
from redline.engine.trackers import TrackerFeed, open_tracker
from redline.predict.efficiency import Efficiency, efficiency
from redline.report.history import read_history
from redline.report.training import MetricsLog, TrainingView, without_nan
from redline.report.training_page import LivePage
from redline.rungs import plan_of

if TYPE_CHECKING:
    from rich.console import Console

    from redline.core.hardware import Hardware
    from redline.engine.session import TrainOrder


@dataclass(frozen=True, kw_only=True)
class Session:
    """The machine and versions of this part of a run: a run may continue on another machine than it began on."""

    hardware: Hardware
    versions: dict[str, str | None]


class Watchers:
    def __init__(self, order: TrainOrder, session: Session, console: Console, *, tracker: str | None) -> None:
        self._order, self._session = order, session
        self.trained = False
        """True once a cycle of updates is over in this session."""
        out = Path(order.out)
        run = json.loads((out / RUN_FILE).read_text(encoding="utf-8"))
        # Only earlier sessions: it is read before this one writes its own events.
        self._history = history = read_history(out / METRICS_FILE)
        self._feed = TrackerFeed(open_tracker(tracker, out)) if tracker is not None else None
        self._log = MetricsLog(out / METRICS_FILE)
        self._page = LivePage(RunDirectory(out), run, history)
        budget, workload = order.settings.budget, order.workload
        self._view = TrainingView(console, budget=budget, unit=workload.unit, reads_text=workload.reads_text)
        self._listeners: list[Callable[..., None]] = [self._log, self._view, history]
        self._listeners += [self._feed] if self._feed is not None else []
        self._listeners.append(self._page)  # last: it draws the history, which must have the event first
        self._closing = ExitStack()

    def __enter__(self) -> Watchers:
        self._closing.callback(self._log.close)
        if self._feed is not None:
            self._closing.callback(self._feed.close)
        self._closing.enter_context(self._view)
        self.emit(
            "session",
            command=command_line(),
            date=timestamp(),
            hardware=to_json(self._session.hardware),
            versions=self._session.versions,
            mfu_convention=self._efficiency(0.0).convention,
            layout=None if self._order.layout is None else to_json(self._order.layout),
            parallel=self._order.parallel,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # Ctrl-C leaves at once
            self.emit("end", ended="failed", reason=str(error), checkpoint=None)
        self._closing.close()
        for text in self.troubles():
            print(f"warning: {text}", file=sys.stderr)

    def emit(self, kind: str, **fields: Any) -> None:
        if kind == "cycle":
            self.trained = True
            fields["mfu"] = self.mfu(fields["tokens_per_second"])
        told = without_nan(fields)
        for listener in self._listeners:
            listener(kind, **told)

    def end(self, summary: dict[str, Any]) -> None:
        self.emit("end", **{name: summary[name] for name in ("ended", "reason", "checkpoint")})

    def mfu(self, tokens_per_second: float | None) -> float | None:
        return None if tokens_per_second is None else self._efficiency(tokens_per_second).mfu

    @property
    def speed(self) -> dict[str, float | None]:
        """The rates of the summary, as `redline report` shows them."""
        told = self._history.summary()
        return {name: told[name] for name in ("tokens_per_second", "mfu")}

    @property
    def page(self) -> str | None:
        """The path of the page; None if it could not be written."""
        return None if self._page.trouble else str(Path(self._order.out) / REPORT_FILE)

    def troubles(self) -> list[str]:
        out = Path(self._order.out)
        texts = []
        if self._log.lost:
            why = self._log.trouble or "the disk took a part of them"
            texts.append(f"{self._log.lost} lines are missing in {out / METRICS_FILE}: {why}")
        if self._page.trouble:
            why = self._page.trouble
            texts.append(f"cannot draw {out / REPORT_FILE}: {why}; draw it later with `redline report {out}`")
        if self._feed is not None and self._feed.trouble:
            texts.append(f"the tracker was dropped: {self._feed.trouble}; {out / METRICS_FILE} has everything")
        return texts

    def _efficiency(self, tokens_per_second: float) -> Efficiency:
        order = self._order
        hardware = self._session.hardware
        return efficiency(
            order.workload.shape, plan_of(order.recipe.rungs), hardware, tokens_per_second / hardware.ranks
        )
