"""A training run while it goes on: a line per cycle, a progress bar on a terminal, and metrics.jsonl for everything.

    view = TrainingView(console, budget=budget, mfu=lambda rate: ...);  view("cycle", updates=10, loss=7.1, ...)

What is shown and what is written are the same events: `Trainer` emits them, both are told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from redline.core.training import Budget
from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate
from redline.report import one_line

LINE_SECONDS = 2.0  # between two lines of a fast run; evaluations, checkpoints and notes are always shown
SAMPLE_COLUMNS = 500


class MetricsLog:
    """metrics.jsonl: one object per event, flushed, so that a killed run loses nothing it has shown."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115  # held for the whole run

    def __call__(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TrainingView:
    """Lines on any stream; on a terminal a bar below them. `mfu` turns tokens per second into a share of the peak."""

    def __init__(self, console: Console, *, budget: Budget, mfu: Callable[[float], float | None]) -> None:
        self._console, self._budget, self._mfu = console, budget, mfu
        self._validation: float | None = None
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:.1f} %"),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, eta="")

    def __enter__(self) -> TrainingView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, kind: str, **fields: Any) -> None:
        show = getattr(self, f"_show_{kind}")
        show(fields)

    def _show_cycle(self, fields: dict[str, Any]) -> None:
        share = share_done(self._budget, fields)
        self._bar.update(self._task, completed=share, eta=f"ETA {clock_text(eta_seconds(share, fields))}")
        now = time.monotonic()
        if now - self._last_line >= LINE_SECONDS or share >= 1:
            self._last_line = now
            self._print(cycle_line(fields, self._validation, self._mfu(fields["tokens_per_second"]), share))

    def _show_validation(self, fields: dict[str, Any]) -> None:
        self._validation = fields["loss"]
        self._print(f"step {fields['updates']:>7,} | validation loss {fields['loss']:.4f}")

    def _show_sample(self, fields: dict[str, Any]) -> None:
        self._print(f"step {fields['updates']:>7,} | sample: {one_line(fields['text'])[:SAMPLE_COLUMNS]}")

    def _show_checkpoint(self, fields: dict[str, Any]) -> None:
        self._print(f"step {fields['updates']:>7,} | checkpoint")

    def _show_note(self, fields: dict[str, Any]) -> None:
        self._print(fields["text"])

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def cycle_line(fields: dict[str, Any], validation: float | None, mfu: float | None, share: float) -> str:
    losses = " / ".join(UNKNOWN if loss is None else f"{loss:.3f}" for loss in (fields["loss"], validation))
    parts = [
        f"step {fields['updates']:>7,}",
        f"loss {losses}",
        f"tok {fields['tokens']:,}",
        f"{human_rate(fields['tokens_per_second'])} tok/s",
        f"MFU {human_percent(mfu)}",
        f"peak {human_bytes(fields['peak_bytes'])}",
        f"data wait {human_percent(fields['data_wait'])}",
    ]
    if fields.get("documents") is not None:
        parts.append(f"docs {fields['documents']:,}")
    if fields["skipped"]:
        parts.append(f"skipped {fields['skipped']}")
    parts.append(f"ETA {clock_text(eta_seconds(share, fields))}")
    return " | ".join(parts)


def share_done(budget: Budget, fields: dict[str, Any]) -> float:
    """Of the limit that will be reached first."""
    shares = [
        fields["updates"] / budget.steps if budget.steps else 0.0,
        fields["tokens"] / budget.tokens if budget.tokens else 0.0,
        fields["total_seconds"] / (60 * budget.minutes) if budget.minutes else 0.0,
    ]
    return min(1.0, max(shares))


def eta_seconds(share: float, fields: dict[str, Any]) -> float | None:
    return fields["total_seconds"] * (1 - share) / share if share else None


def clock_text(seconds: float | None) -> str:
    """h:mm:ss, or m:ss."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """What a run came to, for people."""
    tokens = summary["tokens"]
    best = summary["best_validation_loss"]
    lines = [
        ("ended", f"{summary['ended']} after {summary['updates']:,} updates, {clock_text(summary['seconds'])}"),
        ("tokens", f"{tokens['train']:,} train, {tokens['validation']:,} validation, {tokens['total']:,} total"),
        ("documents", f"{summary['documents']:,}"),
        ("speed", f"{human_rate(summary['tokens_per_second'])} tokens/s (median of the cycles)"),
        ("loss", UNKNOWN if summary["loss"] is None else f"{summary['loss']:.4f}, best validation "
         + (UNKNOWN if best is None else f"{best:.4f}")),
        ("saved", summary["checkpoint"] or UNKNOWN),
        ("go on", f"redline train --resume {summary['out']}"),
    ]  # fmt: skip
    if summary["skipped"]:
        lines.insert(4, ("skipped", f"{summary['skipped']} updates whose gradients were not finite"))
    return [f"{name:10}{text}" for name, text in lines]
