"""One self-contained HTML page of a training run, in the ladder's own style, and when to draw it.

    Path("report.html").write_text(render_training_page(history.document(run_json, run)), encoding="utf-8")

The document comes from `report/history.py`. `LivePage` receives the run's events, as every other view does, and draws
after evaluations and at the end: between cycles, never inside one.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from redline.core.job import REPORT_FILE, RunDirectory
from redline.core.traced import TOKEN
from redline.core.units import GIB, MIB, UNKNOWN, human_bytes, human_percent, human_rate
from redline.core.workload import NO_TOKENIZER
from redline.report import Document, one_line
from redline.report.curves import Panel, curve_chart
from redline.report.history import TrainingHistory
from redline.report.page import WIDE_PX, date_text, drawings, fact_groups, render, table_row
from redline.report.svg import plain_tick, short_number
from redline.report.table import device_name, unit_of, workload_text
from redline.report.training import (
    SPEED_IS,
    clock_text,
    documents_text,
    epoch_text,
    layout_options,
    loss_text,
    updates_text,
)

PLOT_WIDE_PX = 440  # two side by side
LOSS_PX = 300
REDRAW_SECONDS = 30.0  # between two pages of a run that evaluates often: drawing takes a tenth of a second
SESSION_COLUMNS = ("begun", "from step", "ended", "machine", "command")


def render_training_page(document: Document) -> str:
    return render("training.html.j2", view_of(document))


def write_training_page(run: Path, document: Document) -> Path | None:
    """Write the page; warn and return None if it cannot be written, since the run may lie in a read-only place."""
    try:
        return RunDirectory(run).write(REPORT_FILE, render_training_page(document))
    except OSError as error:
        print(f"warning: cannot write {run / REPORT_FILE}: {error.strerror or error}", file=sys.stderr)
        return None


class LivePage:
    """Draws report.html while the run continues. A page that cannot be written does not stop it: `trouble` keeps the
    reason."""

    def __init__(
        self,
        directory: RunDirectory,
        run: Document,
        history: TrainingHistory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._run, self._history, self._clock = directory, run, history, clock
        self._drawn_at = -math.inf
        self.trouble = ""

    def __call__(self, kind: str, **_: Any) -> None:
        often = self._clock() - self._drawn_at < REDRAW_SECONDS
        if kind == "end" or (kind == "validation" and not often):
            self.draw()

    def draw(self) -> None:
        try:
            document = self._history.document(self._run, self._directory.path)
            self._directory.write(REPORT_FILE, render_training_page(document))
            self.trouble = ""
        except Exception as error:  # a full disk, a bug of ours: a week of training must not end over a picture
            self.trouble = str(error) or type(error).__name__
        self._drawn_at = self._clock()


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    document = {**document, "workload": workload_as_trained(document)}
    shape = (document.get("workload") or {}).get("shape") or {}
    name = one_line((document.get("workload") or {}).get("name") or "unknown workload")
    loss, health = loss_panel(document, shape.get("vocab")), health_panels(document)
    plots = [
        (panel.title, meaning, curve_drawings(panel, document, PLOT_WIDE_PX))
        for panel, meaning in health
        if not panel.is_empty
    ]
    return {
        "title": f"Training {name}",
        "workload": workload_text(document),
        "device": device_name(document),
        "date": date_text(document),
        "headline": headline_figures(document),
        "alarms": list(alarms(document)),
        "loss": curve_drawings(loss, document, WIDE_PX, LOSS_PX),
        "items": items_of(document),
        "held_out": "batches of other seeds" if makes_batches(document) else "the held-out documents",
        "loss_note": "Short lines at the bottom are updates that were skipped." if document["skipped_at"] else "",
        "plots": plots,
        "sections": list(sections(document, bool(plots))),
        "curves": curve_table([loss, *(panel for panel, _ in health)]),
        "summary": summary_facts(document) if document.get("updates") else [],
        "samples": [(f"{sample['updates']:,}", printable_lines(sample["text"])) for sample in document["samples"]],
        "session_columns": SESSION_COLUMNS,
        "sessions": [session_cells(session) for session in document["sessions"]],
        "notes": [one_line(note) for note in document["notes"]],
        "facts": fact_groups({**document, "settings": setting_facts(document)}),
        "command": one_line(document.get("command") or ""),
        "recipe": json.dumps(document["recipe"]) if document.get("recipe") else "",
    }


def sections(document: Document, has_plots: bool) -> Iterator[tuple[str, str]]:
    """Yield (id, words) of each section, for the line of links at the top of the page."""
    yield "loss", "Loss"
    parts = (
        ("health", "Speed and health", has_plots),
        ("summary", "What it came to", document.get("updates")),
        ("samples", "Samples", document["samples"]),
        ("sessions", "Sessions", document["sessions"]),
    )
    yield from ((name, words) for name, words, there in parts if there)
    yield "machine", "Machine"
    if document.get("command"):
        yield "again", "Do it again"


# --- figures ----------------------------------------------------------------------------------------------------------


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of each headline."""
    if not document.get("updates"):
        return []
    tokens, best, loss = document["tokens"], document["best_validation_loss"], document["loss"]
    mfu = document["mfu"]
    of_session = "" if len(document["sessions"]) < 2 else " of the last session"
    speed = f"median of {document['cycles']:,} cycles{of_session}" + (
        "" if mfu is None else f"; MFU {human_percent(mfu)}"
    )
    losses = (
        (loss_text(loss), "train loss", "mean of the last cycle; no document was held out")
        if best is None
        else (loss_text(best), "best validation loss", f"train {loss_text(loss)} in the last cycle")
    )
    return [
        losses,
        (human_rate(document["tokens_per_second"]), f"{items_of(document)} per second", speed),
        (
            short_number(tokens["train"]),
            f"{items_of(document)} trained on",
            f"in {clock_text(document['seconds'])} of training",
        ),
    ]


def alarms(document: Document) -> Iterable[tuple[str, str]]:
    """Yield (kind, text) of what a reader must know before any number."""
    ended = document.get("ended")
    if ended in ("diverged", "failed"):
        yield "different", f"Training stopped: {one_line(document.get('reason') or 'no reason was given')}."
    if ended is None:
        yield "unfinished", "This run has no end yet: it was still going on when the page was drawn, or it was killed."
    if ended == "interrupted":
        options = layout_options(document)
        words = f"--resume, its folder and {options}" if options else "--resume and its folder"
        yield "unfinished", f"This run was interrupted. It goes on with redline train {words}."
    if document["skipped"]:
        yield "unfinished", f"{updates_text(document['skipped'])} skipped: the gradients were not finite."


def summary_facts(document: Document) -> list[tuple[str, str]]:
    tokens, best, items = document["tokens"], document["best_validation_loss"], items_of(document)
    return [
        ("updates", f"{document['updates']:,}"),
        (items, f"{tokens['train']:,} train, {tokens['validation']:,} validation, {tokens['total']:,} total"),
        *(() if makes_batches(document) else text_facts(document)),
        ("time", f"{clock_text(document['seconds'])}, evaluations and checkpoints not counted"),
        (f"{items}/s", f"{human_rate(document['tokens_per_second'])}, {SPEED_IS}"),
        ("MFU", mfu_text(document)),
        ("data wait", f"{human_percent(document['data_wait'])} of the time"),
        ("peak memory", human_bytes(document["peak_bytes"])),
        ("skipped updates", f"{document['skipped']:,}"),
        ("train loss", loss_text(document["loss"])),
        ("validation loss", f"{loss_text(document['validation_loss'])}, best {loss_text(best)}"),
        ("checkpoint", one_line(document.get("checkpoint") or UNKNOWN)),
    ]  # fmt: skip


def text_facts(document: Document) -> Iterator[tuple[str, str]]:
    yield "documents", documents_text(document["documents"])
    yield "epochs", epoch_text(document["epoch"])
    yield "time per epoch", clock_text(document["epoch_seconds"])


def items_of(document: Document) -> str:
    """Return what is trained on: tokens, or the samples of a user's own model."""
    return f"{unit_of(document) or TOKEN}s"


def makes_batches(document: Document) -> bool:
    """True if a user's file makes the batches, which then come from no text."""
    return (document.get("workload") or {}).get("tokenizer") == NO_TOKENIZER


def mfu_text(document: Document) -> str:
    convention = one_line(document.get("mfu_convention") or "convention not stated")
    return convention if document["mfu"] is None else f"{human_percent(document['mfu'])} ({convention})"


def session_cells(session: Document) -> list[str]:
    begun, first = session.get("from_updates"), session.get("hardware") or {}
    return [
        date_text(session) or UNKNOWN,
        UNKNOWN if begun is None else f"{begun:,}",
        one_line(session.get("ended") or UNKNOWN),
        one_line(first.get("name") or UNKNOWN),
        one_line(session.get("command") or UNKNOWN),
    ]


def workload_as_trained(document: Document) -> Document:
    """Return the workload with the micro batch, learning rate, ... of this run in place of its own."""
    settings = document.get("settings") or {}
    return {name: settings.get(name, value) for name, value in (document.get("workload") or {}).items()}


def setting_facts(document: Document) -> Document:
    """Return the settings of run.json with the budget in words, and the run's rungs and data."""
    settings = dict(document.get("settings") or {})
    budget = settings.pop("budget", None) or {}
    return {
        **settings,
        "budget": ", ".join(f"{value:,} {name}" for name, value in budget.items() if value is not None),
        "rungs": (document.get("recipe") or {}).get("rungs"),
        "data": document.get("data"),
    }


def printable_lines(text: object) -> str:
    """Return a sample with its line breaks; other unprintable characters become spaces."""
    return "\n".join(one_line(line) for line in str(text).splitlines()).strip() or "(nothing)"


# --- curves -----------------------------------------------------------------------------------------------------------


def loss_panel(document: Document, vocab: int | None) -> Panel:
    curves = document["curves"]
    start = math.log(vocab) if vocab else None
    return Panel(
        title=f"Loss over {items_of(document)}",
        **below(document),
        curves=(("train", curves["loss"]), ("validation", curves["validation_loss"])),
        show=loss_text,
        tick=plain_tick,
        high=2 * start if start else None,
        level=("ln V: knows nothing", start) if start else None,
        marks=document["skipped_at"],
    )


def health_panels(document: Document) -> list[tuple[Panel, str]]:
    """Return each panel with what it means."""
    curves = document["curves"]
    size, unit = (GIB, "GiB") if (document["peak_bytes"] or 0) >= GIB else (MIB, "MiB")
    memory = [(place, value / size) for place, value in curves["peak_bytes"]]

    def panel(title: str, points: Any, show: Callable[[float], str]) -> Panel:
        return Panel(title=title, curves=((title, points),), show=show, from_zero=True, **below(document))

    return [
        (
            panel(f"{items_of(document)} per second", curves["tokens_per_second"], short_number),
            "of each cycle, evaluations left out",
        ),
        (panel("MFU", curves["mfu"], human_percent), one_line(document.get("mfu_convention") or "")),
        (panel("learning rate", curves["learning_rate"], lambda rate: f"{rate:.2g}"), "of the last update of a cycle"),
        (panel("gradient norm", curves["gradient_norm"], lambda norm: f"{norm:.3g}"), "before clipping"),
        (panel("peak memory", memory, lambda amount: f"{amount:.4g} {unit}"), "of each cycle"),
        (panel("data wait", curves["data_wait"], human_percent), "share of a cycle spent waiting for the loader"),
    ]


def below(document: Document) -> dict[str, Any]:
    """Return the fields that all panels share: what the axis counts."""
    items = items_of(document)
    return {"axis": items, "place": lambda place: f"{place:,.0f} {items}"}


def curve_drawings(panel: Panel, document: Document, wide_px: int, height_px: int = 150) -> list[tuple[str, Any]]:
    end = document["tokens"]["train"]
    return drawings(lambda px: curve_chart(panel, end=end, width_px=px, height_px=height_px), wide_px)


def curve_table(panels: Iterable[Panel]) -> dict[str, Any]:
    """Tabulate every curve by its ends and extremes, for readers who cannot see the charts."""
    columns = [("curve", "words"), *((name, "number") for name in ("first", "last", "lowest", "highest", "points"))]
    rows = []
    for panel in panels:
        for name, points in panel.curves:
            if points:
                values = [value for _, value in points]
                ends = (values[0], values[-1], min(values), max(values))
                title = name if name == panel.title else f"{name} loss"
                rows.append(table_row([title, *map(panel.show, ends), f"{len(points):,}"]))
    return {"label": "curves", "columns": columns, "rows": rows}
