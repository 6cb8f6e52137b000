"""`redline watch` shows another process's run in this terminal as its own command would, until the run ends.

    redline watch runs/ladder-gpt2-...      the table as it grows;  Ctrl-C leaves, and the run continues

Everything comes from the run directory: rows from results.jsonl, the current job from its folder, a training run from
metrics.jsonl. Nothing is written, and watching costs the measured machine some milliseconds of one core a second.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import add_common
from redline.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from rich.console import Console

    from redline.commands.standing import Standing
    from redline.core.training import Budget
    from redline.report.live import LiveLadder

POLL_SECONDS = 1.0
SILENT_SECONDS = 180.0  # without news of a training run: an evaluation or a checkpoint may take that long
SHOWN_EVENTS = 40  # from before the watching began: the page has all of them


def add_watch(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="follow a run in progress, from another terminal",
        description="Follow a ladder, a tune, a training run or a profile that another process makes, until it ends. "
        "Of a run that has ended, show what it came to.",
        epilog="Ctrl-C leaves; the run goes on. Exit codes: 0 seen; 2 a mistake in the command.",
    )
    watch.add_argument("directory", metavar="DIR", type=Path, help="a run directory")
    add_common(watch)
    watch.set_defaults(run=run_watch)


def run_watch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.commands.standing import kind_of_run, print_standing

    path, console = options.directory, Console(stderr=True)
    follow = follow_training if kind_of_run(path) == "train" else follow_rows
    try:
        standing = follow(path, console)
    except KeyboardInterrupt:
        console.print("stopped watching; the run goes on", style="dim")
        return EXIT_DONE
    if options.json:
        print(json.dumps(standing.document))
    else:
        print_standing(standing, path)
    return EXIT_DONE


# --- ladders, tunes and profiles --------------------------------------------------------------------------------------


def follow_rows(path: Path, console: Console) -> Standing:
    """Show rows as they come, and the current job; return when nobody measures there any more."""
    from redline.commands.standing import read_standing, stamp_of
    from redline.report.live import LiveLadder

    with LiveLadder(console) as view:
        shown = StandingView(view)
        while True:
            stamp = stamp_of(path)  # taken before reading: what arrives in between is a reason to read again
            standing = read_standing(path)
            shown.update(standing)
            if not standing.under_way:
                return standing
            while stamp_of(path) == stamp:
                time.sleep(POLL_SECONDS)


class StandingView:
    """What the view has been given. A row is given again only when it has more measurements, another status or reason,
    or its own micro batch."""

    def __init__(self, view: LiveLadder) -> None:
        self._view = view
        self._rows: dict[str, object] = {}
        self._doing: object = None

    def update(self, standing: Standing) -> None:
        rows = rows_to_show(standing)
        for row in rows:
            known = [row.get(name) for name in ("status", "reason", "step_seconds", "rebatched")]
            if self._rows.get(row["rung"]) != known:
                self._rows[row["rung"]] = known
                self._view.row_finished(row)
                self._doing = None  # the view drops the job when a row is finished
        doing = standing.doing
        if doing is not None and doing != self._doing:
            self._doing = doing
            self._view.row_started(doing.what, doing.recipe, len(rows) + 1, 0)
            self._view.phase(f"since {doing.since}")
        elif standing.document is None and self._doing is None:
            self._doing = "profile"
            self._view.phase("no result yet")


def rows_to_show(standing: Standing) -> list[dict[str, Any]]:
    """Return a ladder's own rows; for a tune, each trial in order, named by its change and the leader marked 'kept'."""
    from redline.search.tune_run import named_row

    document = standing.document or {}
    if standing.kind != "tune":
        return list(document.get("rows") or [])
    best = (document["best"] or {}).get("number")
    rows = sorted(document["rows"], key=lambda row: row["number"])
    return [named_row(row, leads=row["number"] == best) for row in rows]


# --- training ---------------------------------------------------------------------------------------------------------


def follow_training(path: Path, console: Console) -> Standing:
    """Show a training run's lines as they come; return when the newest session has recorded how it ended."""
    from redline.commands.standing import read_standing
    from redline.core.training import METRICS_FILE
    from redline.report.table import unit_of
    from redline.report.training import TrainingView
    from redline.report.training_page import makes_batches

    clock = EventClock()
    tail = Tail(path / METRICS_FILE)
    standing, events = read_standing(path), tail.events()
    if not standing.under_way:
        return standing
    order = standing.record.get("order") or {}
    budget, unit = budget_of(standing.record), unit_of(order) or "token"
    with TrainingView(console, budget=budget, clock=clock, unit=unit, reads_text=not makes_batches(order)) as view:
        show(view, clock, events[-SHOWN_EVENTS:])
        heard = time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            if events := tail.events():
                show(view, clock, events)
                heard = time.monotonic()
                if any(event["kind"] == "end" for event in events):
                    standing = read_standing(path)
                    if not standing.under_way:
                        return standing
            elif time.monotonic() - heard > SILENT_SECONDS:
                view("note", text=f"nothing new for {SILENT_SECONDS:.0f} s: it is busy, or it was killed")
                heard = time.monotonic()


def show(view: Any, clock: EventClock, events: list[dict[str, Any]]) -> None:
    for event in events:
        clock.now = event.get("time") or clock.now
        fields = {name: value for name, value in event.items() if name not in ("kind", "time")}
        try:
            view(event["kind"], **fields)
        except (KeyError, TypeError):  # an event of another version
            continue


class EventClock:
    """The time of the event that is shown. The view thins its lines by time, and lines that are read at once were
    written at different times."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Tail:
    """The lines that a file has gained. An incomplete line waits until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def events(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:  # the first line is still to come
            return []
        whole = data.rfind(b"\n") + 1
        self._read += whole
        return [event for line in data[:whole].splitlines() if (event := event_in(line)) is not None]


def event_in(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def budget_of(record: dict[str, Any]) -> Budget:
    """Return the budget in run.json."""
    from redline.core.errors import UserError
    from redline.core.training import Budget
    from redline.core.values import from_json

    try:
        return from_json(Budget, record["order"]["settings"]["budget"])
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            "this is not a training run this version can watch",
            f"run.json: {error}",
            "use the version that made it, or draw it with `redline report`",
        ) from error
