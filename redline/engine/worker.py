"""The process behind one row: `python -m redline.engine.worker JOB_FOLDER` reads job.json, writes measurement.json.

Standard output carries progress, one JSON object a line; anything else that a library prints goes to the log. A failure
is written to failure.json with its kind, and its traceback to the log. When the parent dies, its end of standard input
closes and the worker exits, so that no orphan holds the device.

For a job of several ranks the process becomes torchrun's agent, with one worker per rank under it. Rank 0 works as a
single worker does; the others take part in the measurement and report nothing. If one fails, all fail, and failure.json
names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.core.errors import ModelError, UserError
from redline.core.generators import seeded
from redline.core.host import core_count
from redline.core.job import (
    CACHE_FOLDER,
    FAILURE_FILE,
    MEASUREMENT_FILE,
    RANK_FILE,
    STANDING_FILE,
    Job,
    write_atomically,
)
from redline.core.measurement import Failure, Measurement
from redline.core.profile import Profile
from redline.core.rank_processes import agent_environment, inside
from redline.core.user_code import first_line, users_line
from redline.core.values import from_json, to_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from redline.core.workload import Source
    from redline.engine.distributed import Ranks
    from redline.engine.measure import Bench

RANK_FAILURE_FILE = "failure-of-rank-{}.json"


def main(folder: Path) -> int:
    job = from_json(Job, json.loads((folder / "job.json").read_text(encoding="utf-8")))
    if job.processes == 1:
        return work(job, folder, FAILURE_FILE)
    if "RANK" not in os.environ:
        return lead_ranks(job, folder)
    from redline.engine.distributed import join

    rank = int(os.environ["RANK"])
    write_atomically(folder / RANK_FILE.format(rank), str(os.getpid()))
    # --timeout ends a job that hangs, and names the rank that is stuck.
    with inside(folder, rank), join(watches=False) as ranks:
        return work(job, folder, RANK_FAILURE_FILE.format(ranks.rank), ranks)


def work(job: Job, folder: Path, failure_file: str, ranks: Ranks | None = None) -> int:
    report = open_progress()
    leave_with_parent()
    if ranks is not None:
        report = marking(report, ranks, folder)
    report("starting")
    try:
        answer = run(job, folder.parent.parent, report, ranks)
    except Exception as error:  # the process boundary: every failure becomes a row
        traceback.print_exc()
        failure = with_users_line(describe(error), error, folder)
        write_atomically(folder / failure_file, json.dumps(to_json(failure)))
        # Do not close collectives on the way out: the other ranks may be waiting in one.
        return 1 if ranks is None else leave_at_once()
    if ranks is None or ranks.leads:
        write_atomically(folder / MEASUREMENT_FILE, json.dumps(to_json(answer)))
    report("done")
    return 0


def run(job: Job, run_directory: Path, report: Any, ranks: Ranks | None = None) -> Measurement | Profile:
    import torch

    from redline.engine.distributed import alone
    from redline.engine.measure import Bench

    device = torch.device(job.device) if ranks is None else ranks.connect(job.device)
    if ranks is not None:
        ranks.arrange(job.arranged)
    bench = Bench(
        job=job,
        tokens=run_directory / job.tokens,
        device=device,
        report=report,
        ranks=alone() if ranks is None else ranks,
        references=run_directory / CACHE_FOLDER / "references",
    )
    # Without seeds Python's and NumPy's generators start anywhere.
    with without_dropout(job.workload.source), seeded(job.workload.seed):
        return answer_of(bench, run_directory)


def without_dropout(source: Source) -> contextlib.AbstractContextManager[None]:
    """Disable functional dropout in a user's code, where no adapter finds a rate to set to zero."""
    if source.kind != "python" or source.dropout:
        return contextlib.nullcontext()
    from redline.model.python_adapter import functional_dropout_off

    return functional_dropout_off()


def answer_of(bench: Bench, run_directory: Path) -> Measurement | Profile:
    from redline.engine.measure import measure, measure_reference
    from redline.engine.trial import compile_only, look, measure_unless_slower

    job = bench.job
    if job.kind == "profile":
        from redline.engine.profiling import profile_job

        return profile_job(bench, run_directory)
    if job.give_up_seconds is not None:
        return measure_unless_slower(bench)
    kinds = {
        "reference": measure_reference,
        "yardstick": measure_reference,
        "look": look,
        "measure": measure,
        "trial": measure,
        "compile": compile_only,
    }
    return kinds[job.kind](bench)


# --- several ranks ----------------------------------------------------------------------------------------------------


def lead_ranks(job: Job, folder: Path) -> int:
    """Run the ranks as torchrun's agent. Standard output is left to rank 0."""
    from redline.engine.agent import left_with_zero, run_ranks

    os.environ.update(agent_environment(job.ranks, core_count()))
    with tempfile.TemporaryDirectory(prefix="redline-ranks-") as logs:
        words = ["--standalone", f"--nproc-per-node={job.ranks}", f"--log-dir={logs}"]
        failures = run_ranks([*words, "-m", "redline.engine.worker", str(folder)])
    failures = {**failures, **left_with_zero(failures, folder)}
    if not failures:
        return 0
    failure = failure_of_ranks(failures, folder)
    write_atomically(folder / FAILURE_FILE, json.dumps(to_json(failure)))
    return 1


def failure_of_ranks(failures: Mapping[int, ProcessFailure], folder: Path) -> Failure:
    """Return one failure for all ranks. Ranks fail because one of them did: the cause is a rank that was killed, or
    that exited without recording a failure, or else the first that recorded one; torchrun's own order is by seconds."""
    from redline.engine.agent import cause_of, describe_exit, describe_failure

    written = {rank: folder / RANK_FAILURE_FILE.format(rank) for rank in failures}
    quiet = {rank for rank, failure in failures.items() if failure.exitcode >= 0 and not written[rank].exists()}
    rank, cause = cause_of(failures, quiet)
    if cause.exitcode < 0:
        return Failure(kind="killed", reason=describe_failure(rank, cause) or f"rank {rank} was killed")
    if rank in quiet:
        return Failure(kind="error", reason=describe_exit(rank, cause))
    first = min(
        (rank for rank, path in written.items() if path.exists()), key=lambda rank: written[rank].stat().st_mtime_ns
    )
    failure = from_json(Failure, json.loads(written[first].read_text(encoding="utf-8")))
    return replace(failure, reason=f"rank {first}: {failure.reason}")


def marking(report: Any, ranks: Ranks, folder: Path) -> Any:
    """Return a report function that also marks how far this rank has come, so that a rank that is stuck at the time
    limit can be named (`search/launch.py`). Only rank 0 reports."""

    def write_standing(words: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the heartbeat must continue
            (folder / STANDING_FILE).write_text(words, encoding="utf-8")

    def marked(phase: str, done: int | None = None, total: int | None = None, seconds: float | None = None) -> None:
        ranks.mark(done or 0, phase)
        if ranks.leads:
            report(phase, done, total, seconds)

    ranks.on_standing = write_standing if ranks.leads else None
    return marked


def leave_at_once() -> int:
    sys.stderr.flush()
    os._exit(1)


# --- one process ------------------------------------------------------------------------------------------------------


def open_progress() -> Any:
    """Keep the real standard output for progress, point all other output at the log, and return `report`."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started, last = time.monotonic(), ""

    def report(phase: str, done: int | None = None, total: int | None = None, seconds: float | None = None) -> None:
        nonlocal last
        if phase != last:
            print(f"{time.monotonic() - started:7.1f} s  {phase}", file=sys.stderr, flush=True)
            last = phase
        stream.write(json.dumps({"phase": phase, "done": done, "total": total, "seconds": seconds}) + "\n")

    return report


def leave_with_parent() -> None:
    """Exit when the parent closes standard input, and give all other code an empty one: input() or a debugger would
    wait for an answer until the time limit."""
    pipe = os.dup(0)  # not inherited by child processes
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.read(pipe, 1024):  # empty when the parent's end closes, which happens only when it exits
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def with_users_line(failure: Failure, error: Exception, folder: Path) -> Failure:
    """For a failure in a user's own model, add the user's line that was running, if any."""
    text = (folder / "job.json").read_text(encoding="utf-8")
    file = json.loads(text)["workload"].get("source", {}).get("file")
    line = None if file is None or isinstance(error, UserError) else users_line(error, file)
    return failure if line is None else replace(failure, reason=f"{failure.reason} (at {line})")


def describe(error: Exception) -> Failure:
    """Classify a failure by what raised it, with one line for the table."""
    from redline.engine.memory import is_out_of_memory

    text = first_line(error, type(error).__name__)
    if is_out_of_memory(error):
        return Failure(kind="oom", reason=f"out of memory: {text}")
    if isinstance(error, ModelError):
        return Failure(
            kind="error", reason=f"{error.problem}: {error.why}", mistake=(error.problem, error.why, error.fix)
        )
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return Failure(kind="compile", reason=f"torch.compile failed: {type(error).__name__}: {text}")
    return Failure(kind="error", reason=f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
