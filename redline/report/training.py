"""A training run in progress: lines about its cycles, a progress bar on a terminal, and metrics.jsonl for everything.

    with TrainingView(Console(stderr=True), budget=budget) as view:
        view("cycle", updates=10, loss=7.1, ...)

What is shown and what is written are the same events: `Trainer` emits them, and the view, the log, the page and any
tracker all receive them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from redline.core.layout import Layout, options_of_ranks
from redline.core.training import Budget, resume_command
from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate, rate_unit
from redline.report import one_line
from redline.report.svg import short_number

LEAST_LINE_SECONDS, MOST_LINE_SECONDS = 2.0, 60.0  # between two lines; evaluations and notes are always shown
LINES = 500  # about as many in a run of hours; a run of days prints one a minute: metrics.jsonl has every cycle
HEADING_EVERY = 20
REDRAWS_PER_SECOND = 2.0  # of the bar: drawing takes time from the thread that feeds the device
SAMPLE_COLUMNS = 500
INDENT = " " * 11  # notes start under the second column


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON has neither, and many of its readers stop there."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


class MetricsLog:
    """metrics.jsonl: one object per event, flushed, so that a killed run loses nothing it has shown.

    A full disk does not stop the run: lines that could not be written are counted in `lost`, and `trouble` has the
    reason.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115  # held for the whole run
        # A killed writer may have left half a line, and so may a full disk: a line break closes it.
        self._whole = ends_whole(path)
        self.lost, self.trouble = 0, ""

    def __call__(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), **fields}).encode() + b"\n"
        data = line if self._whole else b"\n" + line
        try:
            self._whole = self._file.write(data) == len(data)
            self.lost += not self._whole
        except OSError as error:
            self._whole, self.lost, self.trouble = False, self.lost + 1, error.strerror or str(error)

    def close(self) -> None:
        self._file.close()


def ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# --- the line ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of the line. `width` fits the widest value of a large run; wider ones are still shown in full."""

    name: str
    width: int
    text: Callable[[dict[str, Any]], str]
    shed: int = 0
    """Order in which a narrow terminal drops columns; 0 stays."""
    of_text: bool = False
    """True if it says how far into a text a run is; a model that makes its own batches has no text."""


FIELDS = (
    Field(name="batches", width=9, text=lambda cycle: f"{cycle['updates']:,}"),
    Field(name="loss/val", width=13, text=lambda cycle: f"{loss_text(cycle['loss'])}/{loss_text(cycle['validation'])}"),
    Field(name="tokens", width=7, text=lambda cycle: short_number(cycle["tokens"])),
    Field(name="tok/s", width=9, text=lambda cycle: human_rate(cycle["tokens_per_second"])),
    Field(name="MFU", width=6, text=lambda cycle: human_percent(cycle["mfu"]), shed=4),
    Field(name="epoch", width=6, text=lambda cycle: epoch_text(cycle["epoch"]), shed=5, of_text=True),
    Field(name="per epoch", width=9, text=lambda cycle: clock_text(cycle["epoch_seconds"]), shed=2, of_text=True),
    Field(
        name="docs",
        width=7,
        text=lambda cycle: documents_text(cycle["documents"], short=True),
        shed=1,
        of_text=True,
    ),
    Field(name="memory", width=8, text=lambda cycle: human_bytes(cycle["peak_bytes"]), shed=3),
    Field(name="wait", width=6, text=lambda cycle: human_percent(cycle["data_wait"]), shed=6),
    Field(name="ETA", width=9, text=lambda cycle: clock_text(cycle["eta"])),
)


def fields_of(reads_text: bool) -> tuple[Field, ...]:
    return tuple(field for field in FIELDS if reads_text or not field.of_text)


def fitting_fields(width: int, known: tuple[Field, ...] = FIELDS) -> tuple[Field, ...]:
    """Return as many fields as a line of this width holds."""
    layouts = [tuple(field for field in known if not 0 < field.shed <= level) for level in range(len(FIELDS))]
    return next((fields for fields in layouts if line_width(fields) <= width), layouts[-1])


def line_width(fields: tuple[Field, ...]) -> int:
    return sum(field.width for field in fields) + len(fields) - 1


def heading(fields: tuple[Field, ...] = FIELDS, unit: str = "token") -> str:
    names = {"tokens": f"{unit}s", "tok/s": rate_unit(unit)}
    return " ".join(names.get(field.name, field.name).rjust(field.width) for field in fields)


def cycle_line(cycle: dict[str, Any], fields: tuple[Field, ...] = FIELDS) -> str:
    """Format one line. `cycle` is the event with `validation` (the last loss or None), `mfu` and `eta` (seconds)."""
    return " ".join(field.text(cycle).rjust(field.width) for field in fields)


def loss_text(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.3f}"


def documents_text(documents: int | None, short: bool = False) -> str:
    return UNKNOWN if documents is None else short_number(documents) if short else f"{documents:,}"


def epoch_text(epoch: float | None) -> str:
    """Return how many epochs have passed: 1.50 is half-way through the second. An integer (from a stream of unknown
    length) becomes the current epoch: '2nd' after one has passed."""
    if epoch is None:
        return UNKNOWN
    if isinstance(epoch, float):
        return f"{epoch:.2f}"
    number = epoch + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def clock_text(seconds: float | None) -> str:
    """Format as h:mm:ss, or as m:ss below an hour."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def share_done(budget: Budget, cycle: dict[str, Any]) -> float:
    """Return the share that is done of the limit closest to being reached."""
    shares = [
        cycle["updates"] / budget.steps if budget.steps else 0.0,
        cycle["tokens"] / budget.tokens if budget.tokens else 0.0,
        cycle["total_seconds"] / (60 * budget.minutes) if budget.minutes else 0.0,
    ]
    return min(1.0, max(shares))


def eta_seconds(budget: Budget, cycle: dict[str, Any]) -> float:
    """Return the seconds until the first limit is reached at the speed of this cycle; an average over the run would
    count the first cycle's compiling again."""
    rate, each = cycle["tokens_per_second"], cycle["tokens"] / cycle["updates"]
    limits = [
        (budget.steps - cycle["updates"]) * each / rate if budget.steps else math.inf,
        (budget.tokens - cycle["tokens"]) / rate if budget.tokens else math.inf,
        60 * budget.minutes - cycle["total_seconds"] if budget.minutes else math.inf,
    ]
    return max(0.0, min(limits))


# --- the view ---------------------------------------------------------------------------------------------------------


class TrainingView:
    """Prints lines on any stream; on a terminal also a bar below them, and only the columns that fit."""

    def __init__(
        self,
        console: Console,
        *,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "token",
        reads_text: bool = True,
    ) -> None:
        """`unit` is what the rates count; `reads_text` is False for a model that makes its own batches."""
        self._console, self._budget, self._clock, self._unit = console, budget, clock, unit
        fields = fields_of(reads_text)
        self._fields = fitting_fields(console.width, fields) if console.is_terminal else fields
        self._validation: float | None = None
        self._last_line, self._lines, self._skipped = -math.inf, 0, 0
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:.1f} %"),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=REDRAWS_PER_SECOND,
            redirect_stdout=False,  # it may be the --json document, and this console is standard error
        )
        self._task = self._bar.add_task("", total=1.0, eta="")

    def __enter__(self) -> TrainingView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, kind: str, **fields: Any) -> None:
        show = {
            "cycle": self._cycle,
            "validation": self._show_validation,
            "sample": self._show_sample,
            "checkpoint": self._show_checkpoint,
            "note": self._show_note,
        }.get(kind)
        if show is not None:  # how a session began and ended is shown elsewhere
            show(fields)

    def _cycle(self, fields: dict[str, Any]) -> None:
        share, eta = share_done(self._budget, fields), eta_seconds(self._budget, fields)
        self._bar.update(self._task, completed=share, eta=f"ETA {clock_text(eta)}")
        if fields["skipped"] > self._skipped:
            self._print(f"{fields['updates']:>9,}  {skipped_text(fields)}")
        self._skipped = fields["skipped"]
        now = self._clock()
        if now - self._last_line >= line_seconds(fields["total_seconds"]) or share >= 1:
            self._last_line = now
            if self._lines % HEADING_EVERY == 0:
                self._print(heading(self._fields, self._unit))
            self._lines += 1
            shown = {**fields, "validation": self._validation, "mfu": fields.get("mfu"), "eta": eta}
            self._print(cycle_line(shown, self._fields))

    def _show_validation(self, fields: dict[str, Any]) -> None:
        self._validation = fields["loss"]
        loss = UNKNOWN if fields["loss"] is None else f"{fields['loss']:.4f}"
        self._print(f"{fields['updates']:>9,}  validation loss {loss}")

    def _show_sample(self, fields: dict[str, Any]) -> None:
        self._print(f"{fields['updates']:>9,}  sample: {one_line(fields['text'])[:SAMPLE_COLUMNS]}")

    def _show_checkpoint(self, fields: dict[str, Any]) -> None:
        self._print(f"{fields['updates']:>9,}  checkpoint")

    def _show_note(self, fields: dict[str, Any]) -> None:
        self._print(INDENT + one_line(fields["text"]))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def skipped_text(fields: dict[str, Any]) -> str:
    return f"{updates_text(len(fields['skipped_at']))} skipped, gradients not finite ({fields['skipped']:,} in all)"


def updates_text(count: int) -> str:
    return "1 update" if count == 1 else f"{count:,} updates"


def line_seconds(total_seconds: float) -> float:
    """Return the seconds between two lines: longer runs print less often."""
    return min(max(total_seconds / LINES, LEAST_LINE_SECONDS), MOST_LINE_SECONDS)


# --- the end ----------------------------------------------------------------------------------------------------------


ENDS = {
    "steps": "all steps are done",
    "tokens": "all tokens are seen",
    "minutes": "the time is up",
    "interrupted": "interrupted",
    "diverged": "diverged",
    "failed": "failed",
    None: "still running, or killed",
}
SPEED_IS = "median of the last session's cycles"
"""The last session that trained: a resumed one may have other GPUs, and its own summary says the same."""


def pipeline_text(pipeline: Mapping[str, Any] | None) -> str:
    if pipeline is None:
        return ""
    pieces = pipeline["micro_batches"]
    per_update = f"{pieces:,} micro batch{'' if pieces == 1 else 'es'} per update"
    return f"{pipeline['stages']} stages, {per_update}: a bubble of {human_percent(pipeline['bubble'])}"


def layout_options(summary: dict[str, Any]) -> str | None:
    """Return the options for the same ranks as before; None if another version wrote the layout."""
    try:
        layout = Layout(**(summary.get("layout") or {}))
    except (TypeError, ValueError):
        return None
    return options_of_ranks(layout, summary.get("parallel"))


def way_on(summary: dict[str, Any]) -> str:
    """Return the command that resumes the run. Empty if nothing was saved, since the run would start over and end the
    same way, or if the layout is unknown, since the model would start uncut."""
    options = layout_options(summary)
    return resume_command(summary["out"], options) if summary["checkpoint"] and options is not None else ""


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return the results of a run as lines for the terminal."""
    tokens, loss, best = summary["tokens"], summary["loss"], summary["best_validation_loss"]
    unit = summary.get("unit") or "token"
    median = f"{human_rate(summary['tokens_per_second'])} {unit}s/s ({SPEED_IS})"
    lines = [
        ("ended", f"{ENDS[summary['ended']]}: {updates_text(summary['updates'])}, {clock_text(summary['seconds'])}"),
        ("why", " ".join((summary.get("why") or "").splitlines())),
        (f"{unit}s", f"{tokens['train']:,} train, {tokens['validation']:,} validation, {tokens['total']:,} total"),
        ("documents", documents_text(summary["documents"]) if summary["documents"] else ""),
        ("speed", f"{median}, MFU {human_percent(summary['mfu'])}"),
        ("pipeline", pipeline_text(summary.get("pipeline"))),
        (
            "skipped",
            f"{updates_text(summary['skipped'])} whose gradients were not finite" if summary["skipped"] else "",
        ),
        ("loss", f"{loss_text(loss)} train, best validation {loss_text(best)}"),
        ("saved", summary["checkpoint"] or UNKNOWN),
        ("page", summary["page"] or ""),
        ("go on", way_on(summary)),
    ]
    return [f"{name:10}{text}" for name, text in lines if text]
