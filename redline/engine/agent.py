"""torchrun's agent with an ending of our own: one message that names the rank that failed, and why.

    python -m redline.engine.agent --standalone --nproc-per-node 4 -m redline train gpt2

The words are those of `python -m torch.distributed.run`, which this is. Its own report is a page of process ids; what
it knows of each rank (exit code, signal, the file in which a rank records its exception) makes one sentence here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from redline.core.rank_processes import open_screen
from redline.engine.distributed import LostRankError, leave_with_parent

NO_FILE = "<N/A>"  # torch's word for a rank that recorded nothing


def main(words: Sequence[str]) -> int:
    try:
        failures = run_ranks(words)
    except SignalException as error:
        return 128 + error.sigval.value
    if not failures:
        return 0
    rank, cause = cause_of(failures)
    if (text := words_of(rank, cause)) is not None:
        print(f"training stopped: {text}", file=open_screen())
    return cause.exitcode if 0 < cause.exitcode < 256 else 1


def run_ranks(words: Sequence[str]) -> Mapping[int, ProcessFailure]:
    """This process is the agent until all ranks have ended. Returns those that failed."""
    leave_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # its handler ends the ranks
    try:
        run(parse_args(list(words)))
    except ChildFailedError as error:
        return error.failures
    return {}


def cause_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Others fail because one did: a rank that was killed is the cause, or else the first that recorded a failure.
    Those that ended by SIGTERM were ended by the agent."""
    killed = [pair for pair in failures.items() if pair[1].exitcode < 0 and pair[1].exitcode != -signal.SIGTERM]
    recorded = [pair for pair in failures.items() if pair[1].error_file != NO_FILE]
    return min(killed or recorded or failures.items(), key=lambda pair: pair[1].timestamp)


def words_of(rank: int, failure: ProcessFailure) -> str | None:
    """None where the rank has said itself what was wrong: rank 0 does when it leaves of its own accord."""
    who = f"rank {rank}"
    if failure.exitcode < 0:
        hint = " (the system may be out of memory)" if failure.exitcode == -signal.SIGKILL else ""
        return f"{who} was killed by {failure.signal_name()}{hint}"
    if failure.error_file == NO_FILE:
        return None
    told = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    text = next(iter(str(told).strip().splitlines()), "without a message")
    lost = f"{LostRankError.__name__}: "  # said by the rank that watched, of another
    return text.removeprefix(lost) if text.startswith(lost) else f"{who} failed: {text}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
