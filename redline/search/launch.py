"""One job, one process: start a worker, follow its progress, and bring back a measurement or the reason there is none.

    launch(run, job, timeout_seconds=600, on_phase=view.phase) -> Measurement | Failure

A process per measurement keeps flags, allocator state, compile caches and crashes from leaking between rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import redline
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.host import thread_environment
from redline.core.job import (
    CACHE_FOLDER,
    FAILURE_FILE,
    MEASUREMENT_FILE,
    RANK_FILE,
    STANDING_FILE,
    Job,
    Result,
    RunDirectory,
    write_atomically,
)
from redline.core.measurement import Failure, Measurement
from redline.core.process_groups import kill_all_but_trackers
from redline.core.profile import Profile
from redline.core.rank_processes import INSIDE, killed_by
from redline.core.values import from_json, to_json

PROBE_SECONDS = 300.0  # torch's first import from a cold network disk takes a minute or two
Answer = TypeVar("Answer", Measurement, Profile)
OnPhase = Callable[..., None]
"""on_phase(name, done=None, total=None, seconds=None)"""


def launch(
    run: RunDirectory, job: Job, timeout_seconds: float, on_phase: OnPhase, *, compile_cache: str | None = None
) -> Result:
    """Run a job in a worker. `compile_cache`: the name of a cache for jobs that compile the same code."""
    return _launch(Measurement, run, job, timeout_seconds, on_phase, compile_cache)


def launch_profile(run: RunDirectory, job: Job, timeout_seconds: float, on_phase: OnPhase) -> Profile | Failure:
    """Like `launch`, for a job of kind 'profile'."""
    return _launch(Profile, run, job, timeout_seconds, on_phase, None)


def _launch(
    kind: type[Answer],
    run: RunDirectory,
    job: Job,
    timeout_seconds: float,
    on_phase: OnPhase,
    compile_cache: str | None,
) -> Answer | Failure:
    folder = clean_folder(run, job)
    with open(folder / "log.txt", "wb") as log:
        process = start_worker(run, job, log, compile_cache)
        try:
            phase, in_time = follow(process, timeout_seconds, on_phase)
        finally:
            kill_ranks(folder)
    if not in_time:
        who = standing_in(folder)
        reason = f"stopped after {timeout_seconds:g} s while {phase}{f' ({who})' if who else ''}; --timeout allows more"
        return Failure(kind="timeout", reason=reason)
    return answer_of(kind, folder, process.returncode, phase)


def clean_folder(run: RunDirectory, job: Job) -> Path:
    """Return the job's folder, with job.json in it and nothing that an earlier worker wrote."""
    folder = run.job_folder(job)
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (MEASUREMENT_FILE, "failure*.json", STANDING_FILE, RANK_FILE.format("*"), INSIDE.format("*")):
        for path in folder.glob(leftover):
            path.unlink()  # from an interrupted attempt
    write_atomically(folder / "job.json", json.dumps(to_json(job), indent=2))
    return folder


def start_worker(
    run: RunDirectory,
    job: Job,
    log: IO[bytes],
    compile_cache: str | None,
    *,
    stdout: int = subprocess.PIPE,
    more: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the worker of a job. `more`: environment variables to set where the user has not set them."""
    return subprocess.Popen(
        [sys.executable, "-m", "redline.engine.worker", str(run.job_folder(job))],
        stdin=subprocess.PIPE,  # held open: the worker exits when it closes
        stdout=stdout,
        stderr=log,
        env={**(more or {}), **worker_environment(run, job, compile_cache)},
        start_new_session=True,  # a Ctrl-C reaches the worker through us, with its compiler processes
    )


def worker_environment(run: RunDirectory, job: Job, compile_cache: str | None = None) -> dict[str, str]:
    """Return a worker's environment. Each recipe has its own compile caches, because a shared one has served graphs
    that were compiled for another backend. Only repeats of the very same job share one, and jobs whose caller knows
    that they compile the same code."""
    cache = cache_folder(run) / (compile_cache or replace(job, repeat=0).key)
    return {
        # For every new cache Inductor compiles a test program per vector instruction set: ten seconds on two cores to
        # learn what the CPU's own flags say. The user's setting wins.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        # Without this setting, every process traces graphs that contain an autograd.Function anew, and fused-loss and
        # later rungs contain one. torch's authors consider caching them safe but not tested enough
        # (pytorch/pytorch#149751); here each recipe has a cache and a verdict. With full caches, such rows of GPT-2
        # took 13 to 22 s to compile on an H200, and the rows before them 4 to 7 s; how much of that was due to this has
        # not been measured.
        "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",
        **thread_environment(),
        **os.environ,
        **import_environment(),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def cache_folder(run: RunDirectory) -> Path:
    return run.path.resolve() / CACHE_FOLDER


def remove_caches(run: RunDirectory) -> None:
    """Remove compiled kernels and the plain model's first step, which are large and worthless once every row is in."""
    shutil.rmtree(cache_folder(run), ignore_errors=True)


def follow(process: subprocess.Popen[bytes], timeout_seconds: float, on_phase: OnPhase) -> tuple[str, bool]:
    """Pass progress on until the worker ends. Return the last phase, and False if the worker had to be stopped."""
    last = {"phase": "starting"}
    assert process.stdout is not None
    reader = threading.Thread(target=_read_progress, args=(process.stdout, last, on_phase), daemon=True)
    in_time = True
    try:
        reader.start()
        process.wait(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:  # also on Ctrl-C: nothing of the worker outlives this call
        kill_group(process)
        if reader.ident is not None:  # a Ctrl-C may come before it started
            reader.join(timeout=5)
    return last["phase"], in_time


def _read_progress(stream: IO[bytes], last: dict[str, str], on_phase: OnPhase) -> None:
    with stream:
        for line in stream:
            event = _progress_in(line)
            if event is not None:
                last["phase"] = event["phase"]
                on_phase(event["phase"], done=event.get("done"), total=event.get("total"), seconds=event.get("seconds"))


def _progress_in(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line, or None for whatever else was written to our pipe before the worker took it over. The
    reader must never stop reading, or the pipe fills and the worker waits forever."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("phase"), str) else None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and whatever it started: loader workers and compiler processes share its session."""
    with contextlib.suppress(ProcessLookupError):  # all gone already
        kill_all_but_trackers(process.pid)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def kill_ranks(folder: Path) -> None:
    """Kill the ranks of a job, if it has several: torchrun gives each its own session, which outlives the agent's."""
    for path in folder.glob(RANK_FILE.format("*")):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or the pid is another process's by now
            kill_all_but_trackers(int(path.read_text(encoding="utf-8")))
        path.unlink()


def standing_in(folder: Path) -> str:
    """Return which rank stood still when the time was up; '' if none did, or if there was only one."""
    path = folder / STANDING_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def answer_of(kind: type[Answer], folder: Path, returncode: int, phase: str) -> Answer | Failure:
    if (folder / MEASUREMENT_FILE).exists():
        return from_json(kind, json.loads((folder / MEASUREMENT_FILE).read_text(encoding="utf-8")))
    if (folder / FAILURE_FILE).exists():
        return from_json(Failure, json.loads((folder / FAILURE_FILE).read_text(encoding="utf-8")))
    log = folder / "log.txt"
    if returncode < 0:
        said = "" if returncode == -signal.SIGKILL else last_words_of_c(log)
        return Failure(kind="killed", reason=f"the worker {killed_by(-returncode)}{said} while {phase}; see {log}")
    return Failure(kind="error", reason=f"the worker left with exit code {returncode} while {phase}: {last_line(log)}")


def last_words_of_c(log: Path) -> str:
    """Return what C++ wrote about an uncaught exception, or '' if the process ended for another reason."""
    found = re.findall(r"^ *what\(\): *(\S.*)$", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return f" ({found[-1][:200]})" if found else ""


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"nothing was written to {log}"


def probe_machine(device: str | None) -> tuple[Hardware, dict[str, str | None]]:
    """Ask torch about this machine, in a process of its own."""
    command = [sys.executable, "-m", "redline.engine.probe", *([device] if device else [])]
    environment = {**os.environ, **import_environment()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            "torch does not answer about this machine",
            f"nothing came within {PROBE_SECONDS:.0f} s: a driver that hangs looks like this",
            "run `nvidia-smi`; a device that is lost needs a reset or a restart",
        ) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            "torch could not describe this machine" if device is None else f"no {device} device on this machine",
            reason,
            "run `python -c 'import torch; print(torch.cuda.is_available())'`; --device cpu takes the CPU",
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return from_json(Hardware, answer["hardware"]), answer["versions"]


def import_environment() -> dict[str, str]:
    """Return variables under which a child imports this package. `python -m` would look into the current folder first,
    which may hold another checkout or a user's random.py."""
    return {"PYTHONPATH": worker_path(), "PYTHONSAFEPATH": "1"}


def worker_path() -> str:
    """Return a PYTHONPATH under which a child finds this very package, even in a checkout that was never installed."""
    package_parent = str(Path(redline.__file__).resolve().parent.parent)
    return os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH", "")) if part)
