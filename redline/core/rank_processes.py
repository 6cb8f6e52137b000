"""What ranks and the process that starts them agree on: environment, marker files, and who writes to screen and log.

    environment = agent_environment(ranks=4, cores=16)          # for torchrun's agent, and thereby for the ranks
    sys.stderr = open_screen()                                  # in rank 0: for redline's own output
    log_to(Path("runs/mine"))                                   # in every rank: for all other output

Descriptor 2 of agent and ranks is a log, written by C++, torch's loggers, Python's warnings and every child. When
`--gpus` starts them, the screen is passed as standard input, which no rank reads: torchrun closes all descriptors of
its ranks but the first three. Under the user's own torchrun, descriptor 2 is the screen until the run directory is
known.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TextIO

from redline.core.checkpoints import CHECKPOINTS_FOLDER, list_checkpoints
from redline.core.training import resume_command

RANKS_LOG = "ranks.log"
"""The log's name in the run directory."""
SCREEN = "REDLINE_SCREEN_IS_STDIN"
RANK_PID_FILE = "REDLINE_RANK_PID_FILE"
"""Environment variable: the file in which rank 0 writes its process id, so that the launcher can ask the ranks to stop.
The marker files below are in the same folder."""
TYPED = "REDLINE_TYPED_WORDS"
"""Environment variable: the user's command-line arguments, as JSON. Ranks are started without its `--gpus N`."""
RUN_NAME = "run"
"""Marker file, in which rank 0 writes its run directory and the options that resume it with as many ranks."""
LEFT_BY_SIGNAL = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that had no signal handler, or installed it too late; the last is the agent's own."""
ASKED, LEFT = "asked", "left"
"""Empty marker files. ASKED: the user has asked the ranks to stop. LEFT: rank 0 has left at once, without a checkpoint
and a summary, as it does when it is asked before it trains, or twice."""

OVER = "over"
"""Marker file: training is over, and the ranks only have to exit. Contains the limit for that in seconds."""
REASON = "reason"
"""Marker file: why the ranks failed, as reported on the screen."""
INSIDE = "inside-{}"
"""Marker file, here or in a measurement's folder: that rank is at work, or has exited in the middle of it."""
INTERRUPTED = "interrupted-{}"
"""Marker file: that rank is leaving because it was interrupted. Contains the signal's name, or OWN_INTERRUPT if it was
the rank's own code."""
OWN_INTERRUPT = KeyboardInterrupt.__name__


@contextmanager
def inside(folder: Path | None, rank: int) -> Iterator[None]:
    """Mark a rank as at work in the block. If its process exits there, even with exit code 0, the file stays."""
    path = None if folder is None else folder / INSIDE.format(rank)
    if path is not None:
        with suppress(OSError):  # a full disk: the work matters more than the mark
            path.touch()
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def leave_inside() -> None:
    """Remove the mark of `inside` before a rank of `redline train` ends its own process for a reason that is reported
    elsewhere."""
    if (path := rank_pid_file()) is not None:
        path.with_name(INSIDE.format(os.environ["RANK"])).unlink(missing_ok=True)


def ranks_inside(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(INSIDE.format("*")))


def mark_over(seconds: float) -> None:
    """Record, in rank 0, that training is over and that ranks have this many seconds to exit."""
    if (path := rank_pid_file()) is not None:
        draft = path.with_name(f"{OVER}.draft")
        draft.write_text(str(seconds), encoding="utf-8")
        draft.rename(path.with_name(OVER))  # so that no reader sees a partial file


def seconds_to_end(pid_file: Path) -> float | None:
    """Return the seconds that `mark_over` recorded; None if training is not over."""
    path = pid_file.with_name(OVER)
    return float(path.read_text(encoding="utf-8")) if path.exists() else None


def mark_left() -> None:
    """Record, in rank 0, that it leaves at once, without a checkpoint and a summary."""
    if (path := rank_pid_file()) is not None:
        path.with_name(LEFT).touch()


def follows_rank_0() -> bool:
    """True for ranks other than 0. The launcher ends such a rank when another has left, which then reports why."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def mark_interrupted(by: str) -> bool:
    """Record what interrupted this rank. The first record stands, since a signal may be repeated under another name
    (`cli.repeat_interrupt`). Return whether this was the first."""
    if (path := rank_pid_file()) is None:
        return False
    mine = path.with_name(INTERRUPTED.format(os.environ["RANK"]))
    with suppress(OSError), open(mine, "x", encoding="utf-8") as file:
        file.write(by)
        return True
    return False


class Interrupt(NamedTuple):
    by: str
    when: float


def interrupted_ranks(folder: Path) -> dict[int, Interrupt]:
    """Return the ranks that were interrupted: by the user, their own code, or the agent because of another rank."""
    return {
        int(path.name.rpartition("-")[2]): Interrupt(path.read_text(encoding="utf-8"), path.stat().st_mtime)
        for path in folder.glob(INTERRUPTED.format("*"))
    }


def rank_pid_file() -> Path | None:
    """Return the path in RANK_PID_FILE; None under the user's own torchrun, which reports signals and failures in its
    own way."""
    path = os.environ.get(RANK_PID_FILE)
    return None if path is None else Path(path)


def was_interrupted(pid_file: Path, exit_code: int) -> bool:
    """True if the user interrupted the run and rank 0 did not report it; any later failure of ranks or agent is then a
    consequence. `exit_code` is the agent's, or that of the rank that may be the cause."""
    left = pid_file.with_name(LEFT).exists() or exit_code in LEFT_BY_SIGNAL
    return left and pid_file.with_name(ASKED).exists()


def typed_arguments() -> list[str]:
    """Return the arguments that the user typed: this process's, or in a rank those of the process that started it."""
    typed = os.environ.get(TYPED)
    return sys.argv[1:] if typed is None else list(json.loads(typed))


def agent_environment(ranks: int, cores: int) -> dict[str, str]:
    """Return an environment in which ranks on one machine share its cores. What the user has set wins."""
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}


def open_screen() -> TextIO:
    """Open the screen as a file of its own, so that later changes to descriptors 0 and 2 do not affect it."""
    number = os.dup(0 if SCREEN in os.environ else 2)
    return os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def report_why(pid_file: Path | None, text: str, screen: TextIO) -> None:
    """Report why the ranks have ended, to the user and to the process that started them."""
    over = pid_file is not None and seconds_to_end(pid_file) is not None
    lines = [] if pid_file is None or over else ways_on(pid_file)  # when it is over, rank 0 has shown them
    if pid_file is not None and not over:
        pid_file.with_name(REASON).write_text(text, encoding="utf-8")
    print(f"training {'is over' if over else 'stopped'}: {text}", *lines, sep="\n", file=screen)


def killed_by(number: int) -> str:
    hint = " (the system may be out of memory)" if number == signal.SIGKILL else ""
    named = number in list(signal.Signals)  # most of the real-time signals have no name
    return f"was killed by {signal.Signals(number).name if named else f'signal {number}'}{hint}"


def ways_on(pid_file: Path) -> list[str]:
    """Return the last lines of the summary that rank 0 did not get to print; none if there is no checkpoint."""
    try:
        out, layout = json.loads(pid_file.with_name(RUN_NAME).read_text(encoding="utf-8"))
    except OSError:  # rank 0 had no run directory yet
        return []
    saved = list_checkpoints(Path(out) / CHECKPOINTS_FOLDER)
    return [f"saved     {saved[0]}", f"go on     {resume_command(out, layout)}"] if saved else []


def take_screen() -> None:
    """Make the screen rank 0's `sys.stderr`. Existing loggers keep descriptor 2; code that looks up `sys.stderr` later
    (last-resort logging, warnings, tracebacks) is sent there too."""
    sys.stderr = open_screen()
    if os.environ.pop(SCREEN, None):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    logging.lastResort = logging.StreamHandler(sys.__stderr__)
    warnings.showwarning = _write_warning
    sys.excepthook = _write_exception  # a signal may arrive when nothing catches it any more


def _write_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.__stderr__)


def _write_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)


def log_to(run: Path) -> None:
    """Send descriptor 2 to the run's log, one file that all ranks append to. Where it cannot be opened, as on another
    machine, output stays where it was."""
    try:
        number = os.open(run / RANKS_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    os.dup2(number, 2)
    os.close(number)
