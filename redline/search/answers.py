"""Where a tuner's answers come from: the run directory, the user's cache, or a worker.

    cache, note = open_cache(context_of(hardware, versions, tokens))
    answers = TrialAnswers(directory, cache=cache, device="cuda", timeout_seconds=600, on_phase=view.phase)
    answers.recall(job, 600) or answers.ask(job, 600)

Every answer is stored twice: in the run directory, so that an interrupted run continues where it stopped, and in
~/.cache/redline/trials, so that the same question costs nothing next week. A remembered answer belongs to exactly the
same job, text, device, driver, versions, code and environment settings: whatever can change a time is part of its
folder's name. Results that depend on the machine's load are not shared with other runs: killed workers, trials that
--minutes cut short, and disturbed steps are measured again. A cache that cannot be read or written counts as absent,
never as an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import redline
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import Job, Result, RunDirectory, user_cache, write_atomically
from redline.core.measurement import Failure, Measurement
from redline.core.values import to_json
from redline.search.launch import OnPhase, launch, probe_machine
from redline.search.noise import is_disturbed
from redline.search.space import compiled_part
from redline.search.trials import Answer

CONTEXT_FILE = "context.json"
FROM_OUTSIDE = ("killed", "error")  # failures that the same recipe may not meet again
MORE_TIME = 1.25  # retry a time-out only with more than this times the seconds it had
# Environment variables that affect kernels, compilers, threads or the choice of a device.
PREFIXES = ("TORCH", "PYTORCH", "TRITON", "CUDA", "CUDNN", "CUBLAS", "NVIDIA", "HIP", "ROCR", "OMP", "MKL", "CXX")
MEASURING = ("core", "data", "engine", "kernels", "model", "optim", "rungs")  # folders whose code affects timings


class TrialAnswers:
    def __init__(
        self,
        directory: RunDirectory,
        *,
        cache: RunDirectory | None,
        device: str,
        timeout_seconds: float,
        on_phase: OnPhase,
        check: Callable[[Result], None] = lambda _: None,
    ) -> None:
        """`check` is called with each worker's result before it is stored, and may raise."""
        self.directory, self.cache, self.device = directory, cache, device
        self.timeout_seconds, self.on_phase, self.check = timeout_seconds, on_phase, check
        self.here = directory.answers()
        self.cached = {} if cache is None else cache.answers()
        self.given: dict[str, tuple[Result, float]] = {}
        """Answers of a ladder (--after), by job key."""

    def recall(self, job: Job, timeout_seconds: float) -> Answer | None:
        """Return the known answer to a job, unless it is a failure from outside the recipe: a killed worker may have
        more luck, a stopped one may have more time, and a lost device may be back."""
        known = self.here.get(job.key)
        if known is None:
            known = self.cached.get(job.key) or self.given.get(job.key)
            if known is None or not self._outlasts_its_run(*known):
                return None
        result, seconds = known
        if isinstance(result, Failure):
            allowed = min(timeout_seconds, self.timeout_seconds)
            if result.kind in FROM_OUTSIDE or (result.kind == "timeout" and allowed > MORE_TIME * seconds):
                return None
        return self._remembered(job, result, seconds)

    def _remembered(self, job: Job, result: Result, seconds: float) -> Answer:
        return Answer(result=result, seconds=seconds, remembered=True, counts=job.key not in self.given)

    def _outlasts_its_run(self, result: Result, seconds: float) -> bool:
        """True if a quieter machine would give the same result, so that other runs may use it. A time-out counts only
        if the worker had the whole --timeout."""
        if isinstance(result, Measurement):
            return not is_disturbed(result)
        return result.kind not in FROM_OUTSIDE and (result.kind != "timeout" or seconds >= self.timeout_seconds)

    def adopt(self, job: Job, answer: Answer) -> None:
        """Store a remembered answer in this run's directory when it is used, since a report reads nothing else."""
        if job.key not in self.here:
            self.directory.append(job, answer.result, answer.seconds)
            self.here[job.key] = (answer.result, answer.seconds)

    def ask(self, job: Job, timeout_seconds: float) -> Answer:
        started, allowed = time.monotonic(), min(timeout_seconds, self.timeout_seconds)
        with self.directory.explaining():  # a worker's folder takes disk space too
            result = launch(self.directory, job, allowed, self.on_phase, compile_cache=graph_key(job))
        if isinstance(result, Failure) and result.kind == "timeout" and allowed < self.timeout_seconds:
            result = replace(result, reason=f"stopped after {allowed:.0f} s: --minutes allows no more")
        seconds = time.monotonic() - started
        self.check(result)
        self.directory.append(job, result, seconds)
        self.here[job.key] = (result, seconds)
        if self.cache is not None and self._outlasts_its_run(result, allowed):
            try:
                self.cache.append(job, result, seconds)
            except UserError:  # disk full: the run directory has the answer
                self.cache = None
        return Answer(result=result, seconds=seconds)

    def trouble(self) -> str | None:
        try:
            probe_machine(self.device)
        except UserError as error:
            return f"{error.problem}: {error.why}"
        return None


def graph_key(job: Job) -> str:
    """Return the name of a job's compile cache. Jobs with the same name compile the same code. The attention backend is
    part of it, because Inductor's own key does not suffice there (docs/sources.md 6)."""
    degrees = [] if job.layout is None else [to_json(job.layout)]  # they set the sizes of a rank's tensors
    return f"graph-{_digest([to_json(job.workload.shape), job.device, compiled_part(job.recipe), *degrees])}"


def context_of(hardware: Hardware, versions: dict[str, str | None], tokens: Path) -> dict[str, Any]:
    """Return everything except the job that a measured time depends on."""
    return {"hardware": to_json(hardware), "versions": versions, **surroundings_of(tokens)}


def surroundings_of(tokens: Path) -> dict[str, Any]:
    """Return what a measured time depends on besides the job, the versions and the device."""
    return {
        "code": code_fingerprint(),
        "tokens": hashlib.sha256(tokens.read_bytes()).hexdigest() if tokens.exists() else None,  # none for files
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def code_fingerprint() -> str:
    """Hash the files that run in a worker: a version number says nothing in a checkout under development."""
    package = Path(redline.__file__).resolve().parent
    paths = sorted(path for folder in MEASURING for path in (package / folder).rglob("*.py"))
    return _digest([(str(path.relative_to(package)), path.read_text(encoding="utf-8")) for path in paths])


def open_cache(context: dict[str, Any]) -> tuple[RunDirectory | None, str | None]:
    """Return the cache folder of this context, or None and the reason."""
    path = user_cache() / "trials" / _digest(context)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / CONTEXT_FILE, json.dumps(context, indent=2) + "\n")
    except OSError as error:
        return None, f"trials are not remembered beyond this run: {path}: {error.strerror or error}"
    return RunDirectory(path), None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
