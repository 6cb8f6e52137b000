"""redline finds out how fast a machine can train a model, gets it there, and proves that nothing broke on the way.

The commands are also functions: `redline.ladder("tiny")["best"]`. Importing redline imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "ladder"]


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
        out=None if out is None else Path(out),
    )
    with LiveLadder(Console(stderr=True)) as view:
        document = run.climb(timeout_seconds=timeout_seconds, view=view)
    with run.directory.explaining():
        run.directory.write(REPORT_FILE, render_page(document))
    return document
