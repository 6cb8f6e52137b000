"""`redline tune` searches for the fastest recipe that trains as fp32 does, within a number of minutes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from redline.commands.common import (
    WORKLOAD_HELP,
    add_common,
    add_subject,
    check_sizes,
    command_line,
    try_page,
    warn_of,
)
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError

DEFAULT_MINUTES = 8.0
UNITS = {"": 1024**3, "gib": 1024**3, "gb": 10**9, "mib": 1024**2, "mb": 10**6}  # a bare number is GiB
# The options that define a search. With --resume they come from the run directory and may not be given again, except
# for the ranks that it has.
CHOICES = (
    "workload",
    "allow",
    "rungs",
    "without",
    "micro_batch",
    "global_batch",
    "memory_limit",
    "sequence",
    "data",
    "device",
    "gpus",
    "tensor",
    "replicas",
    "steps",
    "check_steps",
)


def add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="search for the fastest recipe that still trains right",
        description="Search for the fastest recipe: precision, attention, compiling, loss, optimizer, memory and micro "
        "batch, as far as they apply here. The winner has passed the same check as a ladder's row.",
        epilog="Exit codes: 0 a recipe was found; 1 none was; 2 a mistake in the command; 130 interrupted (continue "
        "with --resume).",
    )
    tune.add_argument(
        "workload",
        nargs="?",
        metavar="WORKLOAD",
        help=WORKLOAD_HELP,
    )
    tune.add_argument(
        "--minutes",
        metavar="M",
        type=float,
        help=f"time limit; remembered results count with the time they took (default: {DEFAULT_MINUTES:g})",
    )
    tune.add_argument(
        "--allow",
        choices=("bit-exact", "rounding", "changes-maths"),
        help="what the winner may do to the maths of the published model (default: rounding)",
    )
    tune.add_argument("--rungs", metavar="A,B,...", help="search only these rungs (default: all that apply)")
    tune.add_argument("--without", metavar="A,B,...", help="exclude these rungs")
    tune.add_argument("--micro-batch", metavar="N", type=int, help="sequences per step (default: searched)")
    tune.add_argument(
        "--global-batch", metavar="N", type=int, help="sequences per update; the micro batch then divides it"
    )
    tune.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="the most memory a recipe may use, such as 40GiB (default: 95 %% of the device)",
    )
    add_subject(tune, "search for N ranks, one GPU each; --micro-batch is then that of a rank")
    tune.add_argument("--steps", metavar="N", type=int, help="timed steps per trial (default: a few seconds' worth)")
    tune.add_argument(
        "--check-steps", metavar="K", type=int, help="training steps whose losses are compared with fp32 (default: 20)"
    )
    tune.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="longest time for one trial (default: 600)"
    )
    tune.add_argument(
        "--after",
        metavar="DIR",
        type=Path,
        help="a ladder of the same workload on this machine: what it measured is not measured again; its --steps and "
        "--check-steps are taken over, unless they are given",
    )
    tune.add_argument("--fresh", action="store_true", help="measure anew what earlier runs remember")
    tune.add_argument("--out", metavar="DIR", type=Path, help="run directory (default: runs/tune-WORKLOAD-DATE-TIME)")
    tune.add_argument(
        "--resume", metavar="DIR", type=Path, help="continue an interrupted run; --minutes may be given to go on longer"
    )
    add_common(tune)
    tune.set_defaults(run=run_tune)


def run_tune(options: argparse.Namespace) -> int:
    document, directory = tune(options, command_line())
    return show_tune(document, directory, options)


def tune(options: argparse.Namespace, command: str) -> tuple[dict[str, Any], Path]:
    """Search, and return the document and the run directory. Progress goes to standard error."""
    from rich.console import Console

    from redline.report.live import LiveLadder
    from redline.search.ladder import check_timeout
    from redline.search.tune_run import prepare_tune, resume_tune

    check_timeout(options.timeout)
    check_sizes(options, ("gpus",))
    console = Console(stderr=True)
    if options.resume:
        given = {name: getattr(options, name) for name in (*CHOICES, "out", "after")}
        run = resume_tune(options.resume, given, options.minutes, fresh=options.fresh)
    else:
        choices = {name: getattr(options, name) for name in CHOICES}
        choices["memory_limit"] = None if options.memory_limit is None else bytes_of(options.memory_limit)
        minutes = DEFAULT_MINUTES if options.minutes is None else options.minutes
        run = prepare_tune(
            **choices, minutes=minutes, fresh=options.fresh, after=options.after, out=options.out, command=command
        )
    for note in run.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    with LiveLadder(console) as view:
        document = run.tune(timeout_seconds=options.timeout, view=view)
    return document, run.directory.path


def bytes_of(text: str) -> int:
    """Return '40GiB', '40 GB' or '40' as bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.casefold())
    if found is None or found[2] not in UNITS:
        raise UserError(
            f"--memory-limit is {text!r}",
            "it is a size in GiB, GB, MiB or MB",
            "write it as 40GiB; a bare number counts GiB",
        )
    return round(float(found[1]) * UNITS[found[2]])


def show_tune(document: dict[str, Any], directory: Path, options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.core.job import BEST_FILE
    from redline.report.next_steps import train_command
    from redline.report.tune import print_tune
    from redline.report.tune_page import render_tune_page

    page, trouble = try_page(document, directory, render_tune_page)
    if options.json:
        print(json.dumps(document))
    else:
        print_tune(document, Console())
        if page is not None:
            print(f"page     {page}")
        if document["best"] is not None and (directory / BEST_FILE).exists():  # a full disk may have prevented it
            print(f"recipe   {directory / BEST_FILE}")
            print(f"train it {train_command(document, str(directory / BEST_FILE))}")
    if trouble is not None:
        warn_of(trouble)
    if document["stopped"]["why"] == "interrupted":
        print(f"interrupted; continue with: redline tune --resume {directory}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE if document["best"] is not None else EXIT_FAILED
