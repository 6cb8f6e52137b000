"""torchrun's agent with redline's own ending: one message that names the rank that failed, and why.

    python -m redline.engine.agent --standalone --nproc-per-node 4 -m redline train gpt2

It accepts the arguments of `python -m torch.distributed.run`, which it calls. torchrun's own report is a page of
process ids; here, what it knows of each rank (exit code, signal, the file in which a rank records its exception)
becomes one sentence.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import parse_args, run

from redline.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE
from redline.core.process_groups import kill_all_but_trackers
from redline.core.rank_processes import (
    OWN_INTERRUPT,
    Interrupt,
    interrupted_ranks,
    killed_by,
    open_screen,
    rank_pid_file,
    ranks_inside,
    report_why,
    seconds_to_end,
    was_interrupted,
)
from redline.engine.distributed import (
    BEAT_SECONDS,
    LostRankError,
    MistakeOfRankError,
    leave_with_parent,
)

NO_FILE = "<N/A>"  # torch's marker for a rank that recorded nothing
LOST = f"{LostRankError.__name__}: "  # recorded by the watching rank about another rank
MISTAKE = f"{MistakeOfRankError.__name__}: "  # our own class name: means nothing to a user
LATE = "rank 0 did not exit in time"
BEFORE_HANDLERS = (-signal.SIGINT, -signal.SIGTERM)  # exit codes of a process signalled before it had handlers
GRACE_SECONDS = 30  # how long torch's agent waits between SIGTERM and SIGKILL


def main(words: Sequence[str]) -> int:
    pid_file, late, ended = rank_pid_file(), threading.Event(), threading.Event()
    if pid_file is not None:
        threading.Thread(target=limit_the_end, args=(pid_file, late, ended), name="limit-the-end", daemon=True).start()
    try:
        failures = run_ranks(words)
    except SignalException as error:
        if not late.is_set():
            return 128 + error.sigval.value
        print(f"training is over: {LATE}", file=open_screen())
        return 1
    finally:
        ended.set()
    if pid_file is not None:
        failures = {**failures, **left_with_zero(failures, pid_file.parent)}
    if not failures:
        return 0
    interrupts = {} if pid_file is None else interrupted_ranks(pid_file.parent)
    quiet = quiet_ranks(failures, [] if pid_file is None else ranks_inside(pid_file.parent))
    rank, cause = cause_of(failures, quiet, interrupts)
    if pid_file is not None and was_interrupted(pid_file, cause.exitcode):
        return 128 + signal.SIGTERM  # as above: whoever interrupted us reports the rest
    if pid_file is not None and (asked := asked_rank(failures, interrupts)) is not None:
        report_why(pid_file, describe_request(asked, failures[asked], interrupts), open_screen())
        return EXIT_INTERRUPTED
    if (text := describe_exit(rank, cause) if rank in quiet else describe_failure(rank, cause)) is not None:
        report_why(pid_file, text, open_screen())
    is_ours = text is None or cause.error_file != NO_FILE  # any other code has a meaning only to the user's code
    return cause.exitcode if is_ours and 0 < cause.exitcode < 256 else 1


def limit_the_end(pid_file: Path, late: threading.Event, ended: threading.Event) -> None:
    """Limit how long rank 0 may take to end; runs in a thread. It waits for the others, but none waits for it."""
    while (seconds := seconds_to_end(pid_file)) is None:
        if ended.wait(BEAT_SECONDS):
            return
    if not ended.wait(2 * seconds + GRACE_SECONDS):  # its limit, the time to end another rank, and its limit again
        late.set()
        os.kill(os.getpid(), signal.SIGTERM)  # its handler ends the ranks


def run_ranks(words: Sequence[str]) -> Mapping[int, ProcessFailure]:
    """Run as the agent until all ranks have ended. Return the failures by rank."""
    leave_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # its handler ends the ranks
    try:
        with trackers_outlive_ranks():
            run(parse_args(list(words)))
    except ChildFailedError as error:
        return error.failures
    return {}


@contextmanager
def trackers_outlive_ranks() -> Iterator[None]:
    """Spare multiprocessing's trackers when torch's agent kills a rank. After the grace period the agent sends SIGKILL
    to the rank's process group. The tracker is in that group, and nothing else cleans up /dev/shm after the rank."""
    close = SubprocessHandler.close

    def close_sparing(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGKILL:
            kill_all_but_trackers(handler.proc.pid)
            death_sig = signal.SIGCONT  # nothing is left to kill; torch still has files to close
        close(handler, death_sig)

    SubprocessHandler.close = close_sparing  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        SubprocessHandler.close = close  # type: ignore[method-assign]


def left_with_zero(failures: Mapping[int, ProcessFailure], folder: Path) -> dict[int, ProcessFailure]:
    """Return ranks that left in the middle of their work with exit code 0, which torch's agent counts as success."""
    early = [rank for rank in ranks_inside(folder) if rank not in failures]
    return {rank: ProcessFailure(local_rank=rank, pid=0, exitcode=0, error_file=NO_FILE) for rank in early}


def quiet_ranks(failures: Mapping[int, ProcessFailure], inside: Collection[int] = ()) -> set[int]:
    """Return the ranks of `redline train` that left with an exit code and no explanation, as user code does when it
    ends its process. `inside`: ranks that left in the middle of their work, whatever their exit code."""
    leader = failures.get(0)
    told = leader.exitcode if leader is not None and 0 not in inside and was_reported(0, leader) else None

    def leaves_it_to_others(rank: int, failure: ProcessFailure) -> bool:
        return rank not in inside and (was_reported(rank, failure) or failure.exitcode == told)

    left = {rank: one for rank, one in failures.items() if one.exitcode >= 0 and one.error_file == NO_FILE}
    return {rank for rank, failure in left.items() if not leaves_it_to_others(rank, failure)}


def was_reported(rank: int, failure: ProcessFailure) -> bool:
    """True if the exit code says that the cause is reported elsewhere: rank 0 reports mistakes and failures itself and
    records nothing, and an interrupted rank was interrupted by the user, or by the agent because of another rank."""
    told = (EXIT_INTERRUPTED, EXIT_MISTAKE, EXIT_FAILED) if rank == 0 else (EXIT_INTERRUPTED,)
    return failure.error_file == NO_FILE and failure.exitcode in told


def asked_rank(failures: Mapping[int, ProcessFailure], interrupts: Mapping[int, Interrupt]) -> int | None:
    """Return the rank that a signal or its own code interrupted; None if another failure came first. That rank leaves
    first, and the agent then interrupts the others. `failures` are in the order in which the agent saw them."""
    for rank, failure in failures.items():
        if failure.error_file == NO_FILE:
            return rank if rank in interrupts or failure.exitcode in BEFORE_HANDLERS else None
        failed = Path(failure.error_file).stat().st_mtime
        if not any(interrupt.when < failed for interrupt in interrupts.values()):
            return None  # otherwise it failed because the interrupted rank had left
    return None


def describe_request(rank: int, failure: ProcessFailure, interrupts: Mapping[int, Interrupt]) -> str:
    by = interrupts[rank].by if rank in interrupts else failure.signal_name()
    return f"rank {rank} was {'interrupted' if by == OWN_INTERRUPT else 'asked to stop'} ({by})"


def cause_of(
    failures: Mapping[int, ProcessFailure], quiet: Collection[int], interrupted: Collection[int] = ()
) -> tuple[int, ProcessFailure]:
    """Return the rank whose failure made the others fail, and that failure. A watching rank's report of a lost rank
    comes first. Then come ranks that were killed or are `quiet`: others may have failed because of them before the
    agent saw that they were gone. Then comes the first rank that recorded a failure. Ranks that ended by SIGTERM, or
    were killed after the grace period, were ended by the agent. Python may end `interrupted` ranks by SIGINT."""
    first = min(failure.timestamp for failure in failures.values())
    lost = [pair for pair in failures.items() if recorded_line(pair[1]).startswith(LOST)]
    killed = [
        pair
        for pair in failures.items()
        if pair[1].exitcode < 0
        and pair[1].exitcode != -signal.SIGTERM
        and not (pair[1].exitcode == -signal.SIGINT and pair[0] in interrupted)
        and pair[1].timestamp - first < GRACE_SECONDS
    ]
    gone = [*(pair for pair in failures.items() if pair[0] in quiet), *killed]
    recorded = [pair for pair in failures.items() if pair[1].error_file != NO_FILE]
    told = [pair for pair in failures.items() if was_reported(*pair)]
    spoke = [pair for pair in told if pair[1].exitcode != EXIT_INTERRUPTED]
    return min(lost or gone or recorded or spoke or told or failures.items(), key=lambda pair: pair[1].timestamp)


def recorded_line(failure: ProcessFailure) -> str:
    """Return the first line of what the rank recorded; '' if it recorded nothing."""
    if failure.error_file == NO_FILE:
        return ""
    told = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    return next(iter(str(told).strip().splitlines()), "without a message")


def describe_failure(rank: int, failure: ProcessFailure) -> str | None:
    """Describe the failure; None if the rank has reported it, or if whoever interrupted the rank does."""
    who = f"rank {rank}"
    if failure.exitcode < 0 and failure.error_file == NO_FILE:  # otherwise the agent ended a rank that had failed
        return f"{who} {killed_by(-failure.exitcode)}"
    if failure.error_file == NO_FILE:
        return None if was_reported(rank, failure) else describe_exit(rank, failure)
    text = recorded_line(failure)
    return text.removeprefix(LOST) if text.startswith(LOST) else f"{who} failed: {text.removeprefix(MISTAKE)}"


def describe_exit(rank: int, failure: ProcessFailure) -> str:
    early = "" if failure.exitcode else " before the end"
    return f"rank {rank} left with exit code {failure.exitcode}{early}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
