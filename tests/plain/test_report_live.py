"""The live view: plain lines without a terminal, a table and one progress line with one, few redraws, no markup."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.report.live import REDRAW_SECONDS, REDRAW_SECONDS_TIMED, LiveLadder, Phase, progress_line

DOCUMENTS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_documents.py")))
ROWS: list[dict[str, Any]] = DOCUMENTS["twelve_rows"]()


class Clock:
    """Time that only moves when a test says so."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False, color_system=None)


def terminal(height: int = 40) -> Console:
    return Console(
        file=io.StringIO(),
        width=100,
        height=height,
        force_terminal=True,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def picture(live: LiveLadder, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=100, height=height, color_system=None)
    console.print(live._picture())
    return output(console).splitlines()


def test_without_a_terminal_a_row_is_two_lines() -> None:
    console = plain_console()
    with LiveLadder(console) as live:
        live.phase("reference", done=1, total=20)
        live.phase("reference", done=2, total=20)
        for number, row in enumerate(ROWS, 1):
            live.row_started(row["rung"], "a title", number, 12)
            live.phase("compiling")
            live.phase("timing", seconds=4.0)
            live.row_finished(row)
        live.message("done")
    lines = output(console).splitlines()
    assert len(lines) == 1 + 2 * 12 + 1, "a long reason stays on its line"
    assert lines[0] == "reference"
    assert lines[3:5] == ["[2/12] tf32: a title", "  tf32 72.3 ms/step, 226,611 tok/s, 1.92x total, rounding"]
    assert lines[10].endswith("rounding; not kept: slower than bf16: 0.98x")
    assert lines[16] == "  cudnn-attention failed: " + DOCUMENTS["LONG_REASON"]
    assert "DIFFERENT" in lines[20]


@pytest.mark.parametrize("make", [plain_console, terminal])
def test_text_from_outside_is_printed_as_it_is(make: Any) -> None:
    console = make()
    evil = "[bold]x[/bold] [/] \x1b]0;title\x07"
    with LiveLadder(console, keep=True) as live:
        live.row_started(evil, evil, 1, 1)
        live.phase(evil)
        live.message(evil)
        live.row_finished({"rung": "tf32", "status": "failed", "reason": evil})
    text = output(console)
    assert "[bold]x[/bold] [/] ]0;title" in text
    assert "\x1b]0;" not in text


def test_on_a_terminal_the_table_grows_above_one_progress_line() -> None:
    clock = Clock()
    live = LiveLadder(terminal(), clock=clock)
    for row in ROWS[:3]:
        live.row_finished(row)
    live.row_started("bf16", "bf16 autocast", 4, 12)
    live.phase("compiling")
    clock.seconds += 7
    lines = picture(live)
    assert [line.split()[0] for line in lines[2:5]] == ["baseline", "tf32", "no-sync"]
    assert lines[-1].startswith("[4/12] bf16: bf16 autocast compiling")
    assert lines[-1].rstrip().endswith("7 s")


def test_progress_line_survives_a_low_window() -> None:
    live = LiveLadder(terminal(height=12))
    for row in ROWS:
        live.row_finished(row)
    live.row_started("bf16", "again", 12, 12)
    lines = picture(live, height=12)
    assert len(lines) < 12
    assert lines[0] == "... 8 rows above"
    assert lines[-1].startswith("[12/12] bf16: again starting")


def test_a_clean_end_takes_the_table_away_and_an_exception_leaves_it() -> None:
    def run(fail: bool) -> str:
        console = terminal()
        try:
            with LiveLadder(console) as live:
                live.row_finished(ROWS[7])
                if fail:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        return output(console)

    erase_line = "\x1b[2K"
    assert erase_line in run(fail=False)
    assert erase_line not in run(fail=True)
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\s", "", run(fail=True))
    assert "thelogofthejobisinjobs/x" in words


def test_expected_seconds_move_the_bar_by_the_viewers_clock() -> None:
    phase = Phase(name="timing", started=10.0, seconds=4.0)
    assert [phase.share(now) for now in (10.0, 12.0, 14.0, 30.0)] == [0.0, 0.5, 1.0, 1.0]
    assert phase.progress_text(12.0) == "2 of about 4 s"


def test_counted_steps_and_unknown_lengths() -> None:
    counted = Phase(name="proving", started=0.0, done=5, total=20)
    assert (counted.share(99.0), counted.progress_text(99.0)) == (0.25, "5/20")
    unknown = Phase(name="compiling", started=0.0)
    assert (unknown.share(99.0), unknown.progress_text(99.0)) == (None, "99 s")


@pytest.mark.parametrize("phase", ["starting", "building", "compiling", "proving"])
def test_a_phase_of_unknown_length_shows_its_seconds(phase: str) -> None:
    clock = Clock()
    live = LiveLadder(terminal(), clock=clock)
    live.row_started("compile", "torch.compile", 6, 12)
    live.phase(phase)
    for seconds in (0, 12, 75):
        clock.seconds = 100.0 + seconds
        live.phase(phase)  # the worker says "building" twice
        assert picture(live)[-1].rstrip().endswith(f" {seconds} s")


def compiling(live: LiveLadder, rung: str) -> str:
    live.row_started(rung, "a title", 7, 12)
    live.phase("compiling")
    return picture(live)[-1].rstrip()


def test_compiling_is_expected_to_take_what_the_row_before_took() -> None:
    """ROWS[5] is compile with 48.2 s, ROWS[6] flash with 41 s, ROWS[7] failed."""
    clock = Clock()
    live = LiveLadder(terminal(), clock=clock)
    for row in ROWS[:5]:
        live.row_finished(row)
    assert compiling(live, "compile").endswith(" 0 s"), "nothing has compiled yet"
    live.row_finished(ROWS[5])
    assert compiling(live, "flash").endswith(" 0 of about 48 s")
    live.row_finished(ROWS[6])
    live.row_finished(ROWS[7])
    compiling(live, "padded-vocab")
    clock.seconds += 20.5
    assert picture(live)[-1].rstrip().endswith(" 20 of about 41 s")
    assert live._phase is not None
    assert live._phase.share(clock()) == pytest.approx(0.5)


def test_a_repeat_finds_its_cache_filled_and_expects_nothing() -> None:
    live = LiveLadder(terminal(), clock=Clock())
    for row in ROWS[:7]:
        live.row_finished(row)
    assert compiling(live, "flash").endswith(" 0 s")
    assert compiling(live, "padded-vocab").endswith(" 0 of about 41 s")


def test_the_same_phase_told_again_keeps_its_clock() -> None:
    clock = Clock()
    live = LiveLadder(terminal(), clock=clock)
    live.phase("warming up", 1, 3)
    clock.seconds += 5
    live.phase("warming up", 2, 3)
    assert live._phase == Phase(name="warming up", started=100.0, done=2, total=3)
    live.phase("timing", seconds=4.0)
    assert live._phase == Phase(name="timing", started=105.0, seconds=4.0)


def test_redraws_are_rare_and_rarer_while_the_clock_runs() -> None:
    assert Phase(name="compiling", started=0.0).redraw_seconds == REDRAW_SECONDS >= 0.5
    assert Phase(name="timing", started=0.0).redraw_seconds == REDRAW_SECONDS_TIMED >= 1.0
    console = terminal()
    with LiveLadder(console) as live:
        for step in range(2000):
            live.phase("proving", step, 2000)
    assert output(console).count("proving") <= 2, "telling is not drawing"


def test_progress_line_fits_one_line() -> None:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    phase = Phase(name="timing", started=0, seconds=9)
    console.print(progress_line("[1/12] cudnn-attention: " + "long " * 20, phase, 3.0, width=60))
    lines = output(console).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("[1/12] ")
    assert "timing" in lines[0]
    assert "3 of about 9 s" in lines[0]


def test_importing_the_report_is_light() -> None:
    code = (
        "import sys, redline.report.page, redline.report.live\n"
        "heavy = {'torch', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('redline.')}\n"
        "assert not heavy and own <= {'api', 'core', 'predict', 'report'}, (heavy, own)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_timing_bar_moves_by_the_clock_although_the_worker_tells_its_steps() -> None:
    """The worker's own event: it says how many steps and how long, and then nothing until the last is done."""
    phase = Phase(name="timing", started=10.0, done=None, total=40, seconds=4.0)
    assert [phase.share(now) for now in (10.0, 12.0, 14.0, 99.0)] == [0.0, 0.5, 1.0, 1.0]
    assert phase.progress_text(12.0) == "40 steps, 2 of about 4 s"
