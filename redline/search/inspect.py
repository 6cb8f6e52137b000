"""Resolve what the user named, which may be their own Python file, to a workload.

    find_workload("gpt2");  find_workload("models/llama/config.json", sequence=2048);  find_workload("my_model.py:vit")

A Python file runs once, in a process of its own (`engine/inspect_model.py`): the parent has no torch, and whatever the
file does to its process should stay there. Mistakes in it come back as problem, why and fix, with the user's own line.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from redline.core.errors import UserError
from redline.core.traced import Traced
from redline.core.user_code import check_unchanged, read
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.search.launch import import_environment, last_line
from redline.workloads import resolve_workload
from redline.workloads.python_file import PythonFile, find_python_file, for_training, python_workload

INSPECT_SECONDS = 600.0


def find_workload(
    words: str, corpus: str | None = None, sequence: int | None = None, *, trained_on: str | None = None
) -> Workload:
    """Like `workloads.resolve_workload`, but for Python files too."""
    found = find_python_file(words)
    if found is None:
        return resolve_workload(words, corpus, sequence, trained_on=trained_on)
    for option, value in (("--data", corpus), ("--sequence", sequence)):
        if value is not None:
            raise UserError(
                f"{option} with {found.words}", "its make_batch says what a batch is", f"leave {option} out"
            )
    workload = replace(python_workload(found, inspect_file(found)), words=words)
    return workload if trained_on is None else for_training(workload, trained_on)


def check_unchanged_file(workload: Workload) -> None:
    """Refuse to resume a run whose Python file has changed: its rows belong to the file as it was."""
    source = workload.source
    if source.file is not None and source.digest is not None:
        path = Path(source.file)
        check_unchanged(path, read(path), source.digest)


@functools.cache  # a command asks twice: to check its options, and for the run
def inspect_file(found: PythonFile) -> Traced:
    with tempfile.TemporaryDirectory(prefix="redline-inspect-") as folder:
        order, answer, log = (Path(folder) / name for name in ("order.json", "answer.json", "log.txt"))
        order.write_text(json.dumps({"source": to_json(found.source), "seed": Workload.seed}), encoding="utf-8")
        with open(log, "wb") as file:
            left = _run(["redline.engine.inspect_model", str(order), str(answer)], file, found)
        if not answer.exists():
            raise UserError(
                f"{found.words} crashed the process that inspected it",
                f"{_left(left)}: {last_line(log) if log.read_bytes().strip() else 'it wrote nothing'}",
                "run its factory and make_batch by themselves; a large model needs memory on the host too",
            )
        said = json.loads(answer.read_text(encoding="utf-8"))
    if "mistake" in said:
        raise UserError(*said["mistake"])
    return from_json(Traced, said["traced"])


def _left(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by signal {-code} ({signal.strsignal(-code)})"


def _run(arguments: list[str], log: BinaryIO, found: PythonFile) -> int:
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, **import_environment()}
    # The pipe stays open as long as we live. The process exits when it closes, so none is left behind.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
    try:
        return process.wait(timeout=INSPECT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{found.words} takes too long to inspect",
            f"building it and a few passes of four samples took more than {INSPECT_SECONDS:.0f} s",
            "let make_batch return smaller samples, or the factory a smaller model",
        ) from error
    finally:
        process.kill()
        process.communicate()  # closes the pipe and reaps the process: no zombie
