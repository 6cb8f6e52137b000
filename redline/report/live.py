"""The ladder while it is being climbed: the table as it grows and one line for what the worker is doing now.

    with LiveLadder(Console(stderr=True)) as live:
        live.row_started("tf32", "TF32 matmuls", 2, 12)
        live.phase("timing", seconds=4.0)
        live.row_finished(row)

It shares the cores with the thing being measured, so it redraws twice a second at most and once a second while the
clock runs. Without a terminal it prints one line when a row starts and one when it is finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, human_rate, human_ratio, rate_unit
from redline.report import Row, one_line, reason_of, rung_name, status_of, verdict_of
from redline.report.table import ladder_table, milliseconds, notes_grid, row_notes

REDRAW_SECONDS = 0.5
REDRAW_SECONDS_TIMED = 1.0  # a redraw is work for a core that the timed step may want
BAR_COLUMNS = 24
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
CHROME_LINES = 8  # heading, rule, reason of the last row, progress line, prompt: not for rows


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What the worker is doing. The viewer's clock advances it, since a worker stays silent while it is timed."""

    name: str
    started: float
    done: int | None = None
    total: int | None = None
    seconds: float | None = None
    """How long it is expected to take."""

    @property
    def redraw_seconds(self) -> float:
        return REDRAW_SECONDS_TIMED if self.name == "timing" else REDRAW_SECONDS

    def share(self, now: float) -> float | None:
        """Return how much is done, from 0 to 1; None if unknown."""
        if self._shown_by_clock:
            return min(1.0, (now - self.started) / (self.seconds or 1.0))
        return min(1.0, (self.done or 0) / self.total) if self.total else None

    def progress_text(self, now: float) -> str:
        elapsed = now - self.started
        if self._shown_by_clock:
            what = f"{self.total} steps, " if self.total else ""
            return f"{what}{elapsed:.0f} of about {self.seconds:.0f} s"
        return f"{self.done or 0}/{self.total}" if self.total else f"{elapsed:.0f} s"

    @property
    def _shown_by_clock(self) -> bool:
        return self.done is None and bool(self.seconds)


class LiveLadder:
    """Draws what its caller reports on the given console; it decides nothing.

    On a clean exit the live table is removed, because print_ladder follows; after an exception, or with `keep`, it
    stays.
    """

    def __init__(self, console: Console, *, keep: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._keep, self._clock = console, keep, clock
        self._rows: list[Row] = []
        self._heading: str | None = None
        self._rung: str | None = None
        self._phase: Phase | None = None
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="redline-live", daemon=True)
        on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._live = self._make_live() if on_terminal else None

    def _make_live(self) -> Live:
        # standard output is left alone: it may be the --json document, and this console is standard error
        return Live(console=self._console, auto_refresh=False, redirect_stdout=False, get_renderable=self._picture)

    def __enter__(self) -> LiveLadder:
        if self._live:
            self._live.start()
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._live:
            return
        self._stop.set()
        self._ticker.join()
        self._heading = self._phase = None
        stays = self._keep or kind is not None
        self._live.transient = not stays
        self._live.stop()
        if stays and self._rows:
            self._console.print(notes_grid(row_notes({"rows": self._rows})))

    def row_started(self, rung: str, title: str, number: int, total: int) -> None:
        count = f"{number}/{total}" if total else f"{number}"  # a search does not know how many there will be
        self._heading, self._rung = f"[{count}] {one_line(rung)}: {one_line(title)}", rung
        self._phase = Phase(name="starting", started=self._clock())
        if not self._live:
            self._print(Text(self._heading))

    def phase(self, name: str, done: int | None = None, total: int | None = None, seconds: float | None = None) -> None:
        """Show a phase. Repeating its name keeps its clock and only updates the progress."""
        name, before = one_line(name), self._phase
        again = before is not None and before.name == name
        if not again and not self._live and self._heading is None:
            self._print(Text(name))  # work before the first row, such as the reference
        started = before.started if before and again else self._clock()
        if name == "compiling" and done is None and seconds is None:
            seconds = self._compile_seconds()
        self._phase = Phase(name=name, started=started, done=done, total=total, seconds=seconds)

    def _compile_seconds(self) -> float | None:
        """Return what the last row that compiled took: each row compiles the whole model from an empty cache, so the
        next takes about as long, or less if it finds its code compiled. None for a repeat, which is unpredictable."""
        if any(row["rung"] == self._rung for row in self._rows):
            return None
        return next((row["compile_seconds"] for row in reversed(self._rows) if row.get("compile_seconds")), None)

    def row_finished(self, row: Row) -> None:
        places = [place for place, known in enumerate(self._rows) if known["rung"] == row["rung"]]
        if places:
            self._rows[places[0]] = row  # a repeat: the same row with more measurements
        else:
            self._rows.append(row)
        self._heading = self._phase = None
        if not self._live:
            self._print(finished_line(row))

    def message(self, text: str) -> None:
        self._print(Text(one_line(text)))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _tick(self) -> None:
        """Redraw on a clock of its own; events in between wait for the next tick."""
        while not self._stop.wait(self._phase.redraw_seconds if self._phase else REDRAW_SECONDS):
            if self._live:
                self._live.refresh()

    def _picture(self) -> ConsoleRenderable:
        """Return the last rows that fit the window, so that the progress line is never cut off."""
        room = max(1, self._console.height - CHROME_LINES)
        parts: list[ConsoleRenderable] = []
        if len(self._rows) > room:
            parts.append(Text(f"... {len(self._rows) - room} rows above", style="dim"))
        if self._rows:
            parts += [ladder_table({"rows": self._rows[-room:]}, self._console.width), self._last_reason()]
        if self._phase:
            parts.append(progress_line(self._heading, self._phase, self._clock(), self._console.width))
        return Group(*parts)

    def _last_reason(self) -> Text:
        """Return the newest row's reason, if it has one; the full list follows at the end."""
        row = self._rows[-1]
        text = f"{rung_name(row)}: {reason_of(row)}" if row.get("reason") else ""
        return Text(text, style="red" if status_of(row) == "failed" else "dim", no_wrap=True, overflow="ellipsis")


def progress_line(heading: str | None, phase: Phase, now: float, width: int) -> Table:
    """Return a bar if progress is known or expected, else a spinner; the heading is shortened if space is tight."""
    share, figure = phase.share(now), phase.progress_text(now)
    frame = SPINNER[int((now - phase.started) / REDRAW_SECONDS) % len(SPINNER)]
    mark = Text(frame, style="cyan") if share is None else ProgressBar(total=1.0, completed=share, width=BAR_COLUMNS)
    taken = len(phase.name) + len(figure) + (1 if share is None else BAR_COLUMNS) + 4
    title = Text(heading or "", style="bold")
    title.truncate(max(8, width - taken), overflow="ellipsis")
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(title, Text(phase.name, style="cyan"), mark, Text(figure))
    return line


def finished_line(row: Row) -> Text:
    """Return a row as one line, for logs."""
    if status_of(row) != "ok":
        return Text(f"  {rung_name(row)} {status_of(row)}: {reason_of(row)}{own_batch_text(row)}")
    step = milliseconds((row.get("step_seconds") or {}).get("median")) or UNKNOWN
    unit = rate_unit(row.get("unit"))
    speed = f"{human_rate(row.get('tokens_per_second'))} {unit}, {human_ratio(row.get('speedup_total'))} total"
    notes = "".join(f"; {note.text}" for note in row_notes({"rows": [row]}))
    return Text(f"  {rung_name(row)} {step} ms/step, {speed}, {verdict_of(row)}{notes}{own_batch_text(row)}")


def own_batch_text(row: Row) -> str:
    """Return the row's result at its own micro batch, once that is known."""
    own = row.get("rebatched") or {}
    if not own:
        return ""
    if own.get("micro_batch") is None:
        return f"; no micro batch of its own: {reason_of(own)}"
    return (
        f"; at micro batch {own['micro_batch']} {human_rate(own.get('tokens_per_second'))} {rate_unit(row.get('unit'))}"
    )
