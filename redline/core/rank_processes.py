"""What whoever starts ranks and the ranks agree on: their environment, and that the screen is ours and the log torch's.

    environment = agent_environment(ranks=4, cores=16)          # of torchrun's agent, and with it of the ranks
    sys.stderr = open_screen()                                  # in rank 0: what we say
    log_to(Path("runs/mine"))                                   # in every rank: what anybody else writes

Descriptor 2 of agent and ranks is a log: there C++ writes, torch's loggers, Python's warnings and every child. Where
`--gpus` starts them, the screen comes as standard input, which no rank reads: torchrun closes all descriptors of its
ranks but the first three. Under somebody else's torchrun descriptor 2 is the screen until the run directory is known.
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
"""In the run directory."""
SCREEN = "REDLINE_SCREEN_IS_STDIN"
RANK_PID_FILE = "REDLINE_RANK_PID_FILE"
"""Of the environment: where rank 0 writes its process id, so that whoever started the ranks can ask them to stop."""
TYPED = "REDLINE_TYPED_WORDS"
"""Of the environment: the words of the command, as JSON, of which the ranks get all but `--gpus N`."""
RUN_NAME = "run"
"""Beside that file: rank 0 writes its run directory into it, and the options with which as many ranks go on."""
LEFT_BY_SIGNAL = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a process that had no handler, or whose handler came too late; the last is the agent's own."""
ASKED, LEFT = "asked", "left"
"""Beside it too, and empty: the user has asked the ranks to stop; rank 0 has left at once, without a checkpoint and a
summary, as it does when it is asked before it trains, or twice."""

OVER = "over"
"""Beside it too: the training is over, and ranks have nothing to do but to end. It says within how many seconds."""
REASON = "reason"
"""Beside it too: why the ranks have failed, as the agent has told it on the screen."""
INSIDE = "inside-{}"
"""Beside it too, or in the folder of a measurement: that rank is at work, or has left in the middle of it."""
INTERRUPTED = "interrupted-{}"
"""Beside it too: that rank leaves because it was interrupted, by the signal that it names or by its own code."""
OWN_INTERRUPT = KeyboardInterrupt.__name__


@contextmanager
def inside(folder: Path | None, rank: int) -> Iterator[None]:
    """Around a rank's work: an exit in the middle of it is known by what stays, also one with exit code 0."""
    path = None if folder is None else folder / INSIDE.format(rank)
    if path is not None:
        with suppress(OSError):  # a full disk: the work is worth more than this
            path.touch()
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def leave_inside() -> None:
    """Before a rank of `redline train` ends its process itself, for a reason that is told elsewhere."""
    if (path := rank_pid_file()) is not None:
        path.with_name(INSIDE.format(os.environ["RANK"])).unlink(missing_ok=True)


def ranks_inside(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(INSIDE.format("*")))


def mark_over(seconds: float) -> None:
    """In rank 0."""
    if (path := rank_pid_file()) is not None:
        draft = path.with_name(f"{OVER}.draft")
        draft.write_text(str(seconds), encoding="utf-8")
        draft.rename(path.with_name(OVER))  # whoever sees it can read it


def seconds_to_end(pid_file: Path) -> float | None:
    """None: the training is not over."""
    path = pid_file.with_name(OVER)
    return float(path.read_text(encoding="utf-8")) if path.exists() else None


def mark_left() -> None:
    """In rank 0."""
    if (path := rank_pid_file()) is not None:
        path.with_name(LEFT).touch()


def follows_rank_0() -> bool:
    """One of several ranks, whose launcher ends it when another has left: that one tells why."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def mark_interrupted(by: str) -> bool:
    """In a rank. What comes first stands: a signal is repeated under another name (`cli.repeat_interrupt`). Returns
    whether this was it."""
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
    """By somebody, by their own code, or by the agent because of another rank."""
    return {
        int(path.name.rpartition("-")[2]): Interrupt(path.read_text(encoding="utf-8"), path.stat().st_mtime)
        for path in folder.glob(INTERRUPTED.format("*"))
    }


def rank_pid_file() -> Path | None:
    """None under somebody else's torchrun, which tells of signals and failures in its own way."""
    path = os.environ.get(RANK_PID_FILE)
    return None if path is None else Path(path)


def was_interrupted(pid_file: Path, exit_code: int) -> bool:
    """By the user, and rank 0 has not told of it: whatever the ranks, or their agent, have failed of since is of that.
    The exit code is the agent's, or that of a rank that may be the cause."""
    left = pid_file.with_name(LEFT).exists() or exit_code in LEFT_BY_SIGNAL
    return left and pid_file.with_name(ASKED).exists()


def typed_words() -> list[str]:
    """Of the command that the user gave: this process's own, or in a rank those of whoever started the ranks."""
    typed = os.environ.get(TYPED)
    return sys.argv[1:] if typed is None else list(json.loads(typed))


def agent_environment(ranks: int, cores: int) -> dict[str, str]:
    """Ranks on one machine share its cores. What the user set wins."""
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}


def open_screen() -> TextIO:
    """A file of its own, however descriptors 0 and 2 change."""
    number = os.dup(0 if SCREEN in os.environ else 2)
    return os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def tell_why(pid_file: Path | None, text: str, screen: TextIO) -> None:
    """Why the ranks have ended: to the user, and to whoever started them."""
    over = pid_file is not None and seconds_to_end(pid_file) is not None
    lines = [] if pid_file is None or over else ways_on(pid_file)  # rank 0 has told them
    if pid_file is not None and not over:
        pid_file.with_name(REASON).write_text(text, encoding="utf-8")
    print(f"training {'is over' if over else 'stopped'}: {text}", *lines, sep="\n", file=screen)


def killed_by(number: int) -> str:
    hint = " (the system may be out of memory)" if number == signal.SIGKILL else ""
    named = number in list(signal.Signals)  # most of the real-time signals have no name
    return f"was killed by {signal.Signals(number).name if named else f'signal {number}'}{hint}"


def ways_on(pid_file: Path) -> list[str]:
    """As in the summary that rank 0 did not come to; nothing where there is no checkpoint."""
    try:
        out, layout = json.loads(pid_file.with_name(RUN_NAME).read_text(encoding="utf-8"))
    except OSError:  # rank 0 had no run directory yet
        return []
    saved = list_checkpoints(Path(out) / CHECKPOINTS_FOLDER)
    return [f"saved     {saved[0]}", f"go on     {resume_command(out, layout)}"] if saved else []


def take_screen() -> None:
    """In rank 0. Loggers that were made before keep descriptor 2; what looks for sys.stderr later is led there."""
    sys.stderr = open_screen()
    if os.environ.pop(SCREEN, None):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    logging.lastResort = logging.StreamHandler(sys.__stderr__)
    warnings.showwarning = _write_warning
    sys.excepthook = _write_exception  # a signal may come when nobody catches it any more


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
    """From here on. Ranks append to one file; on a machine that does not see it, their words stay where they were."""
    try:
        number = os.open(run / RANKS_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    os.dup2(number, 2)
    os.close(number)
