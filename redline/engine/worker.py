"""The process behind one row: `python -m redline.engine.worker JOB_FOLDER` reads job.json, writes measurement.json.

Standard output carries progress, one JSON object a line; everything else any library prints goes to the log. Whatever
goes wrong is written to failure.json with its kind, and the traceback to the log. When the parent dies, its end of
standard input closes and the worker leaves, so that no orphan holds the device.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.core.job import Job, write_atomically
from redline.core.measurement import Failure, Measurement
from redline.core.profile import Profile
from redline.core.user_code import users_line
from redline.core.values import from_json, to_json


def main(folder: Path) -> int:
    report = open_progress()
    threading.Thread(target=leave_with_parent, daemon=True).start()
    report("starting")
    try:
        job = from_json(Job, json.loads((folder / "job.json").read_text(encoding="utf-8")))
        measurement = run(job, folder.parent.parent, report)
    except Exception as error:  # the boundary of the process: every failure becomes a row
        traceback.print_exc()
        write_atomically(folder / "failure.json", json.dumps(to_json(with_users_line(describe(error), error, folder))))
        return 1
    write_atomically(folder / "measurement.json", json.dumps(to_json(measurement)))
    report("done")
    return 0


def run(job: Job, run_directory: Path, report: Any) -> Measurement | Profile:
    import torch

    from redline.engine.measure import Bench, measure, measure_reference
    from redline.engine.trial import look, measure_unless_slower

    bench = Bench(job=job, tokens=run_directory / job.tokens, device=torch.device(job.device), report=report)
    if job.kind == "profile":
        from redline.engine.profiling import profile_job

        return profile_job(bench, run_directory)
    if job.give_up_seconds is not None:
        return measure_unless_slower(bench)
    return {"reference": measure_reference, "look": look, "measure": measure, "trial": measure}[job.kind](bench)


def open_progress() -> Any:
    """Keep the real standard output for progress and point everybody else's at the log."""
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
    while os.read(0, 1024):  # empty when the parent closes the pipe, which it does only by ending
        pass
    os._exit(1)


def with_users_line(failure: Failure, error: Exception, folder: Path) -> Failure:
    """Of a user's own model: the line of theirs that was running, if one was."""
    text = (folder / "job.json").read_text(encoding="utf-8")
    file = json.loads(text)["workload"].get("source", {}).get("file")
    line = None if file is None or isinstance(error, UserError) else users_line(error, file)
    return failure if line is None else replace(failure, reason=f"{failure.reason} (at {line})")


def describe(error: Exception) -> Failure:
    """The kind of a failure, by what raised it, and one line for the table."""
    from redline.engine.memory import is_out_of_memory

    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if is_out_of_memory(error):
        return Failure(kind="oom", reason=f"out of memory: {text}")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return Failure(kind="compile", reason=f"torch.compile failed: {type(error).__name__}: {text}")
    return Failure(kind="error", reason=f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
