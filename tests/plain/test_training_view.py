"""The line of a cycle has everything, fits, and is not said too often; metrics.jsonl stays readable in any case."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.core.training import Budget
from redline.report.training import (
    FIELDS,
    HEADING_EVERY,
    MetricsLog,
    TrainingView,
    clock_text,
    cycle_line,
    epoch_text,
    eta_seconds,
    fields_of,
    fitting_fields,
    heading,
    line_seconds,
    line_width,
    share_done,
    summary_lines,
    without_nan,
)


def cycle(**changes: Any) -> dict[str, Any]:
    """The second cycle of a run of 256 tokens an update."""
    fields = {
        "updates": 20,
        "tokens": 5120,
        "losses": [5.0] * 10,
        "gradient_norms": [1.0] * 10,
        "loss": 5.0,
        "learning_rate": 1e-3,
        "seconds": 2.0,
        "total_seconds": 4.0,
        "tokens_per_second": 1280.0,
        "data_wait": 0.25,
        "skipped": 0,
        "skipped_at": [],
        "peak_bytes": 3 << 30,
        "documents": 7,
        "epoch": 0.5,
        "epoch_seconds": 40.0,
        "mfu": 0.413,
    }
    return {**fields, **changes}


LARGE = {
    "updates": 1_234_567,
    "loss": 10.9631,
    "tokens": 987_654_321_000,
    "tokens_per_second": 1_234_567.0,
    "mfu": 0.567,
    "epoch": 123.456,
    "epoch_seconds": 570_204.0,
    "documents": 123_456_789,
    "peak_bytes": 137.5 * 2**30,
    "data_wait": 0.999,
}


def test_the_line_has_everything_of_the_lecture_and_fits_in_100_columns() -> None:
    line = cycle_line({**cycle(**LARGE), "validation": 10.9201, "eta": 359_999.0})
    assert line.split() == [
        *("1,234,567", "10.963/10.920", "987.7G", "1,234,567", "56.7", "%", "123.46", "158:23:24", "123.5M"),
        *("138", "GiB", "99.9", "%", "99:59:59"),
    ]
    names = "batches loss/val tokens tok/s MFU epoch per epoch docs memory wait ETA"
    assert heading().split() == names.split()
    assert len(line) == len(heading()) == line_width(FIELDS) <= 100


def test_what_is_not_known_is_a_dash() -> None:
    unknown = dict.fromkeys(("loss", "mfu", "epoch", "epoch_seconds", "documents", "peak_bytes"))
    line = cycle_line({**cycle(**unknown), "validation": None, "eta": 0.0})
    assert line.split() == ["20", "—/—", "5.12k", "1,280", "—", "—", "—", "—", "—", "25.0", "%", "0:00"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_narrow_terminal_gives_columns_up(width: int) -> None:
    names = [field.name for field in fitting_fields(width)]
    assert {"batches", "loss/val", "tokens", "tok/s", "ETA"} <= set(names)
    assert line_width(fitting_fields(width)) <= max(width, 51)  # those five
    assert (names == [field.name for field in FIELDS]) == (width >= 100)


def test_a_model_that_makes_its_batches_has_no_columns_of_a_text() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    with TrainingView(console, budget=Budget(steps=20), unit="sample", reads_text=False) as view:
        view("cycle", **cycle())
    shown, line = out.getvalue().splitlines()
    assert shown.split() == ["batches", "loss/val", "samples", "samples/s", "MFU", "memory", "wait", "ETA"]
    assert len(line) == len(shown)
    assert not {"epoch", "docs"} & {field.name for field in fitting_fields(80, fields_of(False))}


@pytest.mark.parametrize(
    ("epoch", "text"), [(0.031, "0.03"), (1.0, "1.00"), (0, "1st"), (1, "2nd"), (10, "11th"), (20, "21st"), (None, "—")]
)
def test_epochs(epoch: float | None, text: str) -> None:
    assert epoch_text(epoch) == text


@pytest.mark.parametrize(
    ("budget", "share", "eta"),
    [
        (Budget(steps=100), 0.2, 80 * 256 / 1280),
        (Budget(tokens=10240), 0.5, 5120 / 1280),
        (Budget(minutes=1), 4 / 60, 56.0),
        (Budget(steps=100, minutes=0.1), 4 / 6, 2.0),  # the time is up long before the steps are
        (Budget(steps=20), 1.0, 0.0),
        (Budget(minutes=0.01), 1.0, 0.0),
    ],
)
def test_what_is_done_and_what_is_left(budget: Budget, share: float, eta: float) -> None:
    assert share_done(budget, cycle()) == pytest.approx(share)
    assert eta_seconds(budget, cycle()) == pytest.approx(eta)


def test_the_eta_is_of_the_speed_now_and_not_of_the_first_cycle_that_compiled() -> None:
    assert eta_seconds(Budget(steps=40), cycle(total_seconds=600.0)) == pytest.approx(20 * 256 / 1280)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (None, "—")]
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock_text(seconds) == text


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def plain_view(steps: int = 1000) -> tuple[TrainingView, Clock, io.StringIO]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=60, force_terminal=False, color_system=None)
    return TrainingView(console, budget=Budget(steps=steps), clock=clock), clock, out


def test_without_a_terminal_there_are_plain_lines_and_no_more_than_one_in_two_seconds() -> None:
    view, clock, out = plain_view()
    with view:
        for number in range(1, 101):
            clock.seconds += 0.5
            view("cycle", **cycle(updates=number))
    lines = out.getvalue().splitlines()
    shown = [int(line.split()[0]) for line in lines if line != heading()]
    assert shown == list(range(1, 101, 4))
    assert [place for place, line in enumerate(lines) if line == heading()] == [0, HEADING_EVERY + 1]
    assert "\x1b" not in out.getvalue()


def test_a_long_run_speaks_once_a_minute() -> None:
    assert [line_seconds(seconds) for seconds in (0, 5000, 1e6)] == [2.0, 10.0, 60.0]


def test_the_last_line_is_always_shown() -> None:
    view, _, out = plain_view(steps=30)
    with view:
        view("cycle", **cycle(updates=20))
        view("cycle", **cycle(updates=30))
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["batches", "20", "30"]


def test_everything_else_is_said_at_once() -> None:
    view, _, out = plain_view()
    with view:
        view("session", command="redline train", hardware={})
        view("cycle", **cycle())
        view("validation", updates=20, tokens=5120, loss=4.56789)
        view("cycle", **cycle(updates=30, skipped=2, skipped_at=[25, 26]))
        view("cycle", **cycle(updates=40, skipped=2))
        view("sample", updates=40, text="one\n\x1b[31mtwo")
        view("checkpoint", updates=40)
        view("note", text="passed over step-00000010: [bold]cut short")
        view("end", ended="steps")
    assert [line.strip() for line in out.getvalue().splitlines()[2:]] == [
        "20  validation loss 4.5679",
        "30  2 updates skipped, gradients not finite (2 in all)",
        "40  sample: one [31mtwo",
        "40  checkpoint",
        "passed over step-00000010: [bold]cut short",
    ]


def test_the_line_shows_the_last_validation_loss() -> None:
    view, clock, out = plain_view()
    with view:
        view("cycle", **cycle())
        view("validation", updates=20, tokens=5120, loss=4.5)
        clock.seconds += 10
        view("cycle", **cycle(updates=30))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "loss/val",
        "5.000/—",
        "validation",
        "5.000/4.500",
    ]


def test_on_a_terminal_a_bar_says_how_much_is_done() -> None:
    out = io.StringIO()
    environment = {"TERM": "xterm"}
    console = Console(file=out, width=100, height=30, force_terminal=True, legacy_windows=False, _environ=environment)
    with TrainingView(console, budget=Budget(steps=80)) as view:
        view("cycle", **cycle())
        view._bar.refresh()
    assert "25.0 %" in out.getvalue()
    assert "ETA 0:12" in out.getvalue()


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_what_is_no_number_is_null_for_every_reader(tmp_path: Path) -> None:
    fields = without_nan({"losses": [1.0, math.nan], "loss": math.inf, "deep": {"x": (-math.inf, 2)}, "text": "NaN"})
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log("cycle", **fields)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    found = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert found["losses"] == [1.0, None]
    assert (found["loss"], found["deep"], found["text"]) == (None, {"x": [None, 2]}, "NaN")


def test_half_a_line_of_a_killed_run_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "note", "text": "a"}\n{"kind": "cyc')
    for text in ("b", "c"):
        log = MetricsLog(path)
        log("note", text=text)
        log.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line)["text"] for line in (lines[0], *lines[2:])] == ["a", "b", "c"]


def test_a_full_disk_does_not_stop_the_run() -> None:
    log = MetricsLog(Path("/dev/full"))
    log("note", text="a")
    log("note", text="b")
    log.close()
    assert (log.lost, log.trouble) == (2, "No space left on device")


# --- the end ----------------------------------------------------------------------------------------------------------

SUMMARY = {
    "ended": "minutes",
    "updates": 1200,
    "tokens": {"train": 31_391_744, "validation": 2_621_440, "total": 34_013_184},
    "documents": 337,
    "seconds": 292.0,
    "tokens_per_second": 147_366.79,
    "mfu": 0.4,
    "skipped": 0,
    "loss": 6.276,
    "best_validation_loss": None,
    "checkpoint": "run/checkpoints/step-00001200",
    "page": "run/report.html",
    "out": "run",
}


def test_the_summary_says_what_the_lecture_s_did_and_where_things_are() -> None:
    assert summary_lines(SUMMARY) == [
        "ended     the time is up: 1,200 updates, 4:52",
        "tokens    31,391,744 train, 2,621,440 validation, 34,013,184 total",
        "documents 337",
        "speed     147,367 tokens/s (median of the last session's cycles), MFU 40.0 %",
        "loss      6.276 train, best validation —",
        "saved     run/checkpoints/step-00001200",
        "page      run/report.html",
        "go on     redline train --resume run",
    ]
    worse = summary_lines({**SUMMARY, "skipped": 3, "ended": None, "page": None})
    assert worse[0].startswith("ended     still running, or killed")
    assert "skipped   3 updates whose gradients were not finite" in worse
    assert not any(line.startswith("page") for line in worse)
    nothing = summary_lines({**SUMMARY, "ended": "failed", "checkpoint": None})
    assert nothing[-2:] == ["saved     —", "page      run/report.html"], "to go on would be to fail again"
    ranked = summary_lines({**SUMMARY, "layout": {"ranks": 4, "tensor": 2, "pipeline": 1, "replicas": 1}})
    assert ranked[-1] == "go on     redline train --resume run --gpus 4 --tensor 2"
    again = summary_lines({**SUMMARY, "layout": {"ranks": 2}, "parallel": "fsdp"})
    assert again[-1] == "go on     redline train --resume run --gpus 2 --parallel fsdp", "run.json has another way"
    unknown = summary_lines({**SUMMARY, "layout": {"ranks": 2, "experts": 2}})
    assert unknown[-1] == "page      run/report.html", "of another version: it would start whole"
