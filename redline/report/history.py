"""The results of a training run so far: collects its events one by one into a document of bounded size for the page.

    history = read_history(run / "metrics.jsonl")          # what earlier sessions wrote; an incomplete line is skipped
    history("cycle", updates=10, tokens=655_360, ...)      # from here on, each event as it happens
    history.document(run_json, run)                        # curves over tokens, summary, samples, sessions

A week of training is 100,000 cycles. Curves are thinned as they grow, by `thin`, which keeps the extremes: a spike that
lasted one update stays visible. A run that was killed repeats what came after its last checkpoint; the repetition
replaces what was recorded first.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redline.core.checkpoints import CHECKPOINTS_FOLDER, newest_checkpoint
from redline.core.errors import UserError
from redline.core.job import RUN_FILE
from redline.core.traced import TOKEN
from redline.core.training import METRICS_FILE
from redline.report import Document
from redline.report.table import unit_of

Point = tuple[float, float]
"""(tokens trained on, value)"""

MOST_POINTS = 600  # per curve: more than one per pixel of a wide chart would show nothing new
MOST_SAMPLES, MOST_NOTES, MOST_MARKS = 12, 40, 200
PER_CYCLE = ("learning_rate", "tokens_per_second", "mfu", "peak_bytes", "data_wait")
CURVES = ("loss", "validation_loss", "gradient_norm", *PER_CYCLE)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points (at least 4) in order: the first, the last, and the lowest and highest of each of
    several equal stretches of tokens."""
    if len(points) <= most:
        return list(points)
    first, last = points[0], points[-1]
    stretches = (most - 2) // 2
    width = (last[0] - first[0]) / stretches or 1.0
    extremes: dict[int, tuple[int, int]] = {}
    for place in range(1, len(points) - 1):
        stretch = min(int((points[place][0] - first[0]) / width), stretches - 1)
        low, high = extremes.get(stretch, (place, place))
        value = points[place][1]
        extremes[stretch] = (place if value < points[low][1] else low, place if value > points[high][1] else high)
    kept = sorted({place for pair in extremes.values() for place in pair})
    return [first, *(points[place] for place in kept), last]


class Cycle(NamedTuple):
    """What medians and sums are computed from. All cycles are kept, since thinned points have another median."""

    session: int
    updates: int
    tokens_per_second: float
    mfu: float | None
    seconds: float
    waited_seconds: float


class TrainingHistory:
    """Collects the events of all sessions of a run, in the order of metrics.jsonl."""

    def __init__(self) -> None:
        self.curves: dict[str, list[Point]] = {name: [] for name in CURVES}
        self.sessions: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.skipped_at: list[float] = []
        """Token counts at the updates that were skipped."""
        self.last: dict[str, Any] = {}
        """The newest cycle."""
        self.validation: list[tuple[int, float | None, int | None]] = []
        """(updates, loss, validation tokens so far)"""
        self.cycles: list[Cycle] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        record = {
            "cycle": self._cycle,
            "validation": self._validation,
            "sample": self._sample,
            "note": self._note,
            "session": self._session,
            "end": self._end,
        }.get(kind)
        if record is not None:  # checkpoints are found in their folder; a later version may emit more kinds
            record(fields)

    # --- events -------------------------------------------------------------------------------------------------------

    def _session(self, fields: dict[str, Any]) -> None:
        told = ("command", "date", "hardware", "versions", "mfu_convention", "layout", "parallel")
        self.sessions.append({name: fields.get(name) for name in told} | {"from_updates": None, "ended": None})

    def _cycle(self, fields: dict[str, Any]) -> None:
        losses, norms, skipped = fields["losses"], fields["gradient_norms"], fields["skipped_at"]
        updates, tokens, seconds = fields["updates"], fields["tokens"], fields["seconds"]
        rate, waited = fields["tokens_per_second"], fields["data_wait"] * seconds
        cycle = Cycle(len(self.sessions), updates, rate, fields.get("mfu"), seconds, waited)
        # Every required field was read above, so that an event counts as a whole or not at all.
        before, each = updates - len(losses), tokens / updates
        self._rewind(before, before * each)
        if self.sessions and self.sessions[-1]["from_updates"] is None:
            self.sessions[-1]["from_updates"] = before
        self._add("loss", [(each * (before + number), loss) for number, loss in enumerate(losses, 1)])
        self._add("gradient_norm", [(each * (before + number), norm) for number, norm in enumerate(norms, 1)])
        for name in PER_CYCLE:
            self._add(name, [(tokens, fields.get(name))])
        self.skipped_at += [each * update for update in skipped]
        self.cycles.append(cycle)
        self.last = fields

    def _validation(self, fields: dict[str, Any]) -> None:
        self.validation = [seen for seen in self.validation if seen[0] < fields["updates"]]
        self.validation.append((fields["updates"], fields["loss"], fields.get("validation_tokens")))
        self.curves["validation_loss"] = [p for p in self.curves["validation_loss"] if p[0] < fields["tokens"]]
        self._add("validation_loss", [(fields["tokens"], fields["loss"])])

    def _sample(self, fields: dict[str, Any]) -> None:
        """Keep the first sample, which shows where training started, and the newest ones."""
        self.samples.append({"updates": fields["updates"], "text": fields["text"]})
        if len(self.samples) > MOST_SAMPLES:
            del self.samples[1]

    def _note(self, fields: dict[str, Any]) -> None:
        self.notes = [*self.notes, fields["text"]][-MOST_NOTES:]

    def _end(self, fields: dict[str, Any]) -> None:
        if self.sessions:
            self.sessions[-1] |= {name: fields.get(name) for name in ("ended", "reason", "checkpoint")}

    def _add(self, name: str, points: Iterable[tuple[float, float | None]]) -> None:
        curve = self.curves[name]
        curve += [(place, value) for place, value in points if value is not None and math.isfinite(value)]
        if len(curve) >= 2 * MOST_POINTS:
            self.curves[name] = thin(curve)

    def _rewind(self, updates: int, tokens: float) -> None:
        """Drop what was recorded after this update: the cycle that starts here replaces it."""
        if not self.last or self.last["updates"] <= updates:
            return
        limit = tokens + 0.5  # token counts are whole numbers, up to rounding
        self.curves = {name: [point for point in curve if point[0] <= limit] for name, curve in self.curves.items()}
        self.skipped_at = [place for place in self.skipped_at if place <= limit]
        self.samples = [sample for sample in self.samples if sample["updates"] <= updates]
        self.validation = [seen for seen in self.validation if seen[0] <= updates]
        self.cycles = [cycle for cycle in self.cycles if cycle.updates <= updates]

    # --- what they come to --------------------------------------------------------------------------------------------

    def document(self, run: Document, directory: Path | None = None) -> Document:
        """Return plain JSON: what was requested (run.json) and the results so far; unknown numbers are None. Given the
        run directory, `checkpoint` is the newest one there: a killed session did not report what it had saved."""
        order = run.get("order") or {}
        newest = self.sessions[-1] if self.sessions else {}
        summary = self.summary()
        if directory is not None:
            summary["checkpoint"] = checkpoint_in(directory, self.last.get("updates"))
        return {
            "kind": "train",
            **{name: order.get(name) for name in ("workload", "recipe", "settings", "data")},
            "unit": unit_of(order) or TOKEN,
            # From the newest session, since a resumed one has its own; run.json has those of the first.
            **{name: newest.get(name) or order.get(name) for name in ("layout", "parallel")},
            **{name: newest.get(name) or run.get(name) for name in ("hardware", "versions")},
            **{name: run.get(name) for name in ("command", "date")},
            **summary,
            "mfu_convention": newest.get("mfu_convention"),
            "curves": {name: thin(curve) for name, curve in self.curves.items()},
            "skipped_at": [place for place, _ in thin([(place, 0.0) for place in self.skipped_at], MOST_MARKS)],
            "samples": self.samples,
            "sessions": self.sessions,
            "notes": self.notes,
        }

    def summary(self) -> Document:
        """Summarise all sessions, except that speed, MFU and `cycles` cover only the last one that trained: a resumed
        session may have other GPUs. `ended` is None for a run that still trains or was killed."""
        newest = self.sessions[-1] if self.sessions else {}
        seconds = sum(cycle.seconds for cycle in self.cycles)
        last = [cycle for cycle in self.cycles if cycle.session == self.cycles[-1].session]
        rates, shares = [cycle.tokens_per_second for cycle in last], [c.mfu for c in last if c.mfu is not None]
        losses = [loss for _, loss, _ in self.validation if loss is not None and math.isfinite(loss)]
        validated = next((count for _, _, count in reversed(self.validation) if count is not None), 0)
        trained = self.last.get("tokens", 0)
        return {
            **{name: newest.get(name) for name in ("ended", "reason", "checkpoint")},
            **{name: self.last.get(name) for name in ("documents", "epoch", "epoch_seconds", "loss")},
            "updates": self.last.get("updates", 0),
            "tokens": {"train": trained, "validation": validated, "total": trained + validated},
            "seconds": self.last.get("total_seconds"),
            "skipped": self.last.get("skipped", 0),
            "cycles": len(last),
            "tokens_per_second": statistics.median(rates) if rates else None,
            "mfu": statistics.median(shares) if shares else None,
            "data_wait": sum(cycle.waited_seconds for cycle in self.cycles) / seconds if seconds else None,
            "peak_bytes": max((value for _, value in self.curves["peak_bytes"]), default=None),
            "validation_loss": self.validation[-1][1] if self.validation else None,
            "best_validation_loss": min(losses, default=None),
        }


def checkpoint_in(directory: Path, updates: int | None) -> str | None:
    """Return the newest checkpoint of a run that has made this many updates; None also if the folder cannot be read,
    since the run cannot be resumed from here then."""
    try:
        return newest_checkpoint(directory / CHECKPOINTS_FOLDER, updates)
    except UserError:
        return None


def read_history(metrics: Path) -> TrainingHistory:
    """Read metrics.jsonl, if it exists. A line that was cut short (the machine died) or that another version wrote is
    skipped."""
    history = TrainingHistory()
    if not metrics.exists():
        return history
    with open(metrics, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
                history(event.pop("kind"), **event)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
    return history


def read_training(directory: Path) -> Document:
    """Return the document of a run directory of `redline train`. Parts missing from run.json are not shown."""
    run = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    return read_history(directory / METRICS_FILE).document(run, directory)
