"""redline finds out how fast a machine can train a model, gets it there, and proves that nothing broke on the way.

The commands are also functions, which return the document that `--json` prints:

    redline.ladder("tiny")["best"]
    redline.tune("tiny", minutes=2)["best"]
    redline.estimate("gpt2", gpu="H200")["memory"]["total"]
    redline.lint("gpt2", gpu="A100-80")["findings"]
    redline.hardware("NVIDIA L40S")["known"]["peak_tflops"]
    redline.profile("tiny", rungs="none")["advice"]

Importing redline imports nothing heavy. A mistake raises `redline.core.errors.UserError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "estimate", "hardware", "ladder", "lint", "profile", "tune"]


def ladder(
    workload: str | None = None,
    *,
    rungs: str | None = None,
    without: str | None = None,
    start: Path | str | None = None,
    micro_batch: int | None = None,
    data: str | None = None,
    device: str | None = None,
    keep: str | None = None,
    repeats: int | None = None,
    aa: bool = False,
    steps: int | None = None,
    check_steps: int | None = None,
    rebatch: bool = False,
    headroom: float | None = None,
    global_batch: int | None = None,
    out: Path | str | None = None,
    timeout_seconds: float = 600.0,
) -> dict[str, Any]:
    """Measure the ladder and return its document, the same one `redline ladder --json` prints.

    The arguments are the command's options (`redline ladder --help`); `start` is `--from`. Progress goes to standard
    error, results to the run directory `out`. A mistake raises `redline.core.errors.UserError`.
    """
    from rich.console import Console

    from redline.core.job import REPORT_FILE
    from redline.report.live import LiveLadder
    from redline.report.page import render_page
    from redline.search.ladder import check_timeout, prepare_ladder

    check_timeout(timeout_seconds)
    run = prepare_ladder(
        workload=workload,
        rungs=rungs,
        without=without,
        start=None if start is None else Path(start),
        micro_batch=micro_batch,
        data=data,
        device=device,
        keep=keep,
        repeats=repeats,
        aa=aa,
        steps=steps,
        check_steps=check_steps,
        rebatch=rebatch,
        headroom=headroom,
        global_batch=global_batch,
        out=None if out is None else Path(out),
    )
    with LiveLadder(Console(stderr=True)) as view:
        document = run.climb(timeout_seconds=timeout_seconds, view=view)
    with run.directory.explaining():
        run.directory.write(REPORT_FILE, render_page(document))
    return document


def tune(
    workload: str | None = None,
    *,
    minutes: float | None = None,
    allow: str | None = None,
    rungs: str | None = None,
    without: str | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    memory_limit: str | None = None,
    data: str | None = None,
    device: str | None = None,
    steps: int | None = None,
    check_steps: int | None = None,
    timeout: float | None = None,
    fresh: bool = False,
    out: Path | str | None = None,
) -> dict[str, Any]:
    """Search for the fastest recipe that still trains right: the document of `redline tune --json`.

    The arguments are the command's options (`redline tune --help`), with its defaults; the recipe is best.json in the
    run directory `out`. Progress goes to standard error.
    """
    from redline.commands.common import options_of
    from redline.commands.tune import add_tune
    from redline.commands.tune import tune as document_of

    given = {
        "workload": workload,
        "minutes": minutes,
        "allow": allow,
        "rungs": rungs,
        "without": without,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "memory_limit": memory_limit,
        "data": data,
        "device": device,
        "steps": steps,
        "check_steps": check_steps,
        "timeout": timeout,
        "fresh": fresh or None,
        "out": None if out is None else Path(out),
    }
    return document_of(options_of(add_tune, "tune", given), _call("tune", given))[0]


def estimate(
    workload: str | None = None,
    *,
    gpu: str | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    rungs: str | None = None,
    recipe: Path | str | None = None,
    optimizer: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    zero: int | None = None,
    global_batch: int | None = None,
    inference: bool | str = False,
) -> dict[str, Any]:
    """Parameters, FLOPs, memory and speed of a step, worked out: the document of `redline estimate --json`.

    The arguments are the command's options (`redline estimate --help`), with its defaults; `recipe` is `--from`, and
    `inference` is True or a precision.
    """
    from redline.commands.common import options_of
    from redline.commands.estimate import AS_THE_PLAN, add_estimate
    from redline.commands.estimate import estimate as document_of

    given = {
        "workload": workload,
        "gpu": gpu,
        "micro_batch": micro_batch,
        "sequence": sequence,
        "rungs": rungs,
        "recipe": recipe,
        "optimizer": optimizer,
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "zero": zero,
        "global_batch": global_batch,
        "inference": AS_THE_PLAN if inference is True else inference or None,
    }
    return {**document_of(options_of(add_estimate, "estimate", given)), "command": _call("estimate", given)}


def lint(
    workload: str | None = None,
    *,
    gpu: str | None = None,
    dtype: str | None = None,
    tp: int | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    ignore: str | None = None,
    measure: bool = False,
    seconds: float | None = None,
    fix: Path | str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """The sizes of a model that cost speed, and the nearest good ones: the document of `redline lint --json`.

    The arguments are the command's options (`redline lint --help`), with its defaults. Nothing is timed without
    `measure`, and nothing written unless `fix` names a file.
    """
    from redline.commands.common import options_of
    from redline.commands.lint import add_lint
    from redline.commands.lint import lint as document_of

    given = {
        "workload": workload,
        "gpu": gpu,
        "dtype": dtype,
        "tp": tp,
        "micro_batch": micro_batch,
        "sequence": sequence,
        "ignore": ignore,
        "measure": measure or None,
        "seconds": seconds,
        "fix": None if fix is None else str(fix),
        "overwrite": overwrite or None,
    }
    return {**document_of(options_of(add_lint, "lint", given)), "command": _call("lint", given)}


def hardware(
    name: str | None = None,
    *,
    measure: bool | str = False,
    micro_batch: int | None = None,
    seconds: float | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """This machine, or the device of that name, beside its data sheet: the document of `redline hardware --json`.

    `measure`: True, or a workload: time its products here, and keep the result.
    """
    from redline.commands.common import options_of
    from redline.commands.hardware import DEFAULT_WORKLOAD, add_hardware
    from redline.commands.hardware import hardware as document_of

    given = {
        "name": name,
        "measure": DEFAULT_WORKLOAD if measure is True else measure or None,
        "micro_batch": micro_batch,
        "seconds": seconds,
        "device": device,
    }
    return document_of(options_of(add_hardware, "hardware", {**given, "command": _call("hardware", given)}))


def profile(
    workload: str | None = None,
    *,
    recipe: Path | str | None = None,
    rungs: str | None = None,
    micro_batch: int | None = None,
    data: str | None = None,
    device: str | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Where a step's time and memory go, and what to do first: the document of `redline profile --json`.

    The arguments are the command's options (`redline profile --help`), with its defaults. A worker that failed is a
    document too: its "status" is "failed", its "reason" says why.
    """
    from redline.commands.common import options_of
    from redline.commands.profile import add_profile
    from redline.commands.profile import profile as document_of

    given = {
        "workload": workload,
        "recipe": None if recipe is None else Path(recipe),
        "rungs": rungs,
        "micro_batch": micro_batch,
        "data": data,
        "device": device,
        "steps": steps,
        "out": None if out is None else Path(out),
        "timeout": timeout,
    }
    return document_of(options_of(add_profile, "profile", {**given, "command": _call("profile", given)}))


def _call(function: str, given: dict[str, Any]) -> str:
    """As it would be written, for documents that say how they came about."""
    words = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    return f"redline.{function}({words})"
