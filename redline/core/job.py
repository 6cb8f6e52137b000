"""A job is one question to one worker process; a run directory keeps the questions and their answers.

    run.json        what was asked, where, with which versions
    results.jsonl   one line per finished job, appended and flushed: an interrupted run loses nothing
    jobs/NAME/      job.json, measurement.json or failure.json, log.txt
    report.html     drawn from the two files above, at any time, anywhere

Results are looked up by the job's key, so resuming means asking the same questions and finding most of them answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.core.layout import Layout
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload

RUN_FILE, RESULTS_FILE, REPORT_FILE, BEST_FILE = "run.json", "results.jsonl", "report.html", "best.json"
REBATCHED_FILE = "best-rebatched.json"
CACHE_FOLDER = "cache"  # what workers share; removed when the run ends
# In a job's folder: the answer, or why there is none; for several ranks, their process ids and which of them is stuck.
MEASUREMENT_FILE, FAILURE_FILE = "measurement.json", "failure.json"
RANK_FILE, STANDING_FILE = "rank-{}.pid", "standing.txt"


# What a run directory is, by the command that made it.
KINDS = {"ladder": "a ladder", "tune": "a tune", "train": "a training run", "profile": "a profile"}


def check_kind(path: Path, run: dict[str, Any], wanted: str) -> None:
    """Raise a UserError if another command made this run, naming the command that resumes it. The oldest ladders do not
    record their kind."""
    kind = run.get("kind")
    if not isinstance(kind, str) or kind == wanted or kind not in KINDS:
        return
    goes_on = "".join(f"`{command}` goes on with it, and " for command in _resuming(path, run))
    raise UserError(
        f"{path} is {KINDS[kind]}, not {KINDS[wanted]}",
        f"its {RUN_FILE} says that `redline {kind}` made it",
        f"{goes_on}`redline report {path}` shows it",
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a worker needs to know. Two jobs with equal fields have equal answers, up to noise."""

    workload: Workload
    recipe: Recipe
    device: str
    """'cuda' or 'cpu'."""
    ranks: int = 1
    """Processes that share the step, with `recipe.micro_batch` sequences each. A reference or yardstick is always one
    process, which runs that step on the whole batch."""
    layout: Layout | None = None
    """How they share it; None: they differ only in their data. The ranks of a tensor group have the same sequences."""
    tokens: str
    """Path of the token file, relative to the run directory."""
    kind: str = "measure"
    """'measure'; 'reference': only the loss curve, in plain fp32, in chunks small enough to fit; 'yardstick': the same
    at the recipe's precision; 'look': only the time, unchecked; 'trial': a measurement with half the timing and no
    profile, to rank batch sizes; 'compile': only fill the compile cache; 'profile': where the time goes, with
    `timed_steps` steps under the profiler."""
    check_steps: int = 20
    """Length of the loss curve that is compared."""
    timed_steps: int | None = None
    """None: as many as fill a few seconds, between 10 and 100."""
    bit_exact_rung: str | None = None
    """Also prove that this rung changes no bit: deterministic steps with and without it."""
    repeat: int = 0
    give_up_seconds: float | None = None
    """For a measurement: if a first look finds steps slower than this, return the look. Not part of the key: it decides
    how long the job runs, not what it asks."""

    @property
    def key(self) -> str:
        asked = {name: value for name, value in to_json(self).items() if name != "give_up_seconds"}
        if self.ranks == 1:
            del asked["ranks"]  # as before jobs had ranks, so that finished runs keep their answers
        if self.layout is None:
            del asked["layout"]  # likewise
        text = json.dumps(asked, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def global_batch(self) -> int:
        """Sequences per step, over all ranks."""
        return self.arranged.data * self.recipe.micro_batch

    @property
    def arranged(self) -> Layout:
        return self.layout or Layout(ranks=self.ranks)

    @property
    def processes(self) -> int:
        return 1 if self.kind in ("reference", "yardstick") else self.ranks

    @property
    def folder_name(self) -> str:
        last = self.recipe.rungs[-1] if self.recipe.rungs else "baseline"
        return f"{self.kind}-{last}-{self.key[:8]}"


Result = Measurement | Failure


def default_directory(kind: str, workload: Workload) -> Path:
    """Return the directory of a run without --out."""
    return Path("runs") / f"{kind}-{workload.name}-{datetime.now():%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    def job_folder(self, job: Job) -> Path:
        return self.path / "jobs" / job.folder_name

    def read_run(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))
        return document

    def write(self, name: str, text: str) -> Path:
        return write_atomically(self.path / name, text)

    def append(self, job: Job, result: Result, seconds: float | None = None) -> None:
        """Append one line and flush it to disk. `seconds`: how long the answer took, if that was recorded."""
        ok = isinstance(result, Measurement)
        record = {"key": job.key, "ok": ok, "job": to_json(job), "result": to_json(result), "seconds": seconds}
        with self.explaining(), open(self.path / RESULTS_FILE, "ab") as file:
            if file.tell() and not _ends_with_newline(self.path / RESULTS_FILE):
                file.write(b"\n")  # a killed writer left half a line: close it, so that ours stays whole
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn an OSError, such as a full or missing disk, into a UserError that says how to resume the run."""
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(
                f"the run in {self.path} had to stop",
                f"{error.strerror or error}{where}",
                f"free some space or fix what it names, then use --resume {self.path}: finished rows are kept",
            ) from error

    def results(self) -> dict[str, Result]:
        """Return the result of every finished job by its key. A line cut short (the machine died) or written by another
        version is no result: that job runs again."""
        return {key: result for key, (result, _) in self.answers().items()}

    def answers(self) -> dict[str, tuple[Result, float]]:
        """Return the same, with the seconds each took; 0 if not recorded."""
        return dict(filter(None, map(_answer_in, self._lines())))

    def jobs(self) -> list[Job]:
        """Return the job of every answer."""
        readable = (line for line in self._lines() if _answer_in(line) is not None)
        return [from_json(Job, json.loads(line)["job"]) for line in readable]

    def unreadable_lines(self) -> int:
        """Count the lines of the results that are no answer: cut short, damaged, or of another version."""
        return sum(bool(line.strip()) and _answer_in(line) is None for line in self._lines())

    def _lines(self) -> list[str]:
        path = self.path / RESULTS_FILE
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _answer_in(line: str) -> tuple[str, tuple[Result, float]] | None:
    try:
        record = json.loads(line)
        kind: type[Measurement] | type[Failure] = Measurement if record["ok"] else Failure
        return record["key"], (from_json(kind, record["result"]), float(record.get("seconds") or 0.0))
    except (ValueError, KeyError, TypeError):
        return None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def write_atomically(path: Path, text: str) -> Path:
    """Write a file so that readers see the old one or the new one, never half of it. A failure leaves no draft."""
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):  # never created, or the disk is gone
            draft.unlink()
        raise
    return path


def user_cache() -> Path:
    """Return redline's folder for disposable data: $XDG_CACHE_HOME/redline, or ~/.cache/redline. A relative path in the
    variable is ignored, as the XDG specification requires."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "redline"


def check_run_directory(path: Path) -> None:
    """Raise a UserError if the path is in use: a run never overwrites another."""
    try:
        in_use = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise _unwritable(path, error) from error
    if in_use:
        raise UserError(
            f"{path} is already in use",
            "a run never overwrites another",
            "choose another --out" + "".join(f", or go on with it: `{one}`" for one in _resuming(path, _run_in(path))),
        )


def _run_in(path: Path) -> object:
    """Return what the run.json there contains; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    return None


def _resuming(path: Path, run: object) -> Iterator[str]:
    """Yield the command that resumes the run, if there is one."""
    kind = run.get("kind") if isinstance(run, dict) else None
    if kind in KINDS and kind != "profile":
        yield shlex.join(["redline", kind, "--resume", str(path)])


def create_run_directory(path: Path) -> RunDirectory:
    """Create an empty, writable directory, or raise a UserError and leave nothing behind."""
    check_run_directory(path)
    made: list[Path] = []
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        for folder in made:
            with contextlib.suppress(OSError):  # never created
                folder.rmdir()
        raise _unwritable(path, error) from error
    return RunDirectory(path)


@contextlib.contextmanager
def begin_run_directory(path: Path) -> Iterator[RunDirectory]:
    """Create a run directory to be filled in the block; if that fails, remove it, so that nothing looks like a run."""
    directory = create_run_directory(path)
    try:
        yield directory
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"cannot begin the run in {path}",
                error.strerror or str(error),
                "if the disk is full or not yours to write to, free some space or choose another --out",
            ) from error
        raise


def _unwritable(path: Path, error: OSError) -> UserError:
    why = error.strerror or str(error)
    return UserError(f"cannot write the run directory {path}", why, "choose a folder you may write to with --out DIR")


def open_run_directory(path: Path) -> RunDirectory:
    """Open an existing run, whose run.json must parse."""
    try:
        if not isinstance(json.loads((path / RUN_FILE).read_text(encoding="utf-8")), dict):
            raise ValueError("it holds no JSON object")
    except OSError as error:
        raise UserError(
            f"{path} is not a run directory",
            f"its {RUN_FILE} cannot be read ({error.strerror})",
            "give the directory that the command named at its end, such as runs/ladder-tiny-20261115-101500",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path / RUN_FILE} is damaged", str(error), "start a new run; results.jsonl still holds every finished row"
        ) from error
    return RunDirectory(path)
