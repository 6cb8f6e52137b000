"""`redline ladder` measures each optimisation on this machine."""

from __future__ import annotations

import argparse
import json
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
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED


def add_ladder(commands: Any) -> None:
    ladder = commands.add_parser(
        "ladder",
        help="measure each optimisation on this machine, one rung at a time",
        description="Measure each optimisation on this machine, one rung at a time; check that training stays right.",
        epilog="Exit codes: 0 done; 1 a rung's verdict is different or nothing could be measured; 2 a mistake in the "
        "command; 130 interrupted (continue with --resume).",
    )
    ladder.add_argument(
        "workload",
        nargs="?",
        metavar="WORKLOAD",
        help=WORKLOAD_HELP,
    )
    ladder.add_argument(
        "--rungs", metavar="A,B,...", help="climb only these, on top of the baseline ('none': the first row alone)"
    )
    ladder.add_argument(
        "--also",
        metavar="A,B,...",
        help="climb these as well, such as those that are climbed only when named (--list-rungs)",
    )
    ladder.add_argument("--without", metavar="A,B,...", help="leave these out")
    ladder.add_argument("--list-rungs", action="store_true", help="print the rungs and what they do, and exit")
    ladder.add_argument(
        "--from",
        dest="start",
        metavar="RECIPE",
        type=Path,
        help="start from a recipe file, such as best.json of a run, instead of the baseline",
    )
    ladder.add_argument(
        "--micro-batch",
        metavar="N",
        type=int,
        help="sequences per step (default: the workload's; of a preset on a GPU, the most up to four times that with "
        "which the baseline is predicted to fit)",
    )
    add_subject(ladder, "measure with N ranks, one GPU each; the first row is then ddp, or what --tensor makes of it")
    ladder.add_argument(
        "--keep",
        choices=("faster", "all"),
        help="faster (default): a rung that slows training is shown, not climbed on; all: every rung that works stays, "
        "and of two that exclude each other the faster",
    )
    ladder.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        help="measure every rung N times, interleaved, and mark what is inside the noise (default: 1)",
    )
    ladder.add_argument(
        "--aa", action="store_true", help="measure the finished recipe once more: the difference is the noise floor"
    )
    ladder.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="timed steps per measurement (default: a few seconds' worth, 10 to 100)",
    )
    ladder.add_argument(
        "--check-steps", metavar="K", type=int, help="training steps whose losses are compared with fp32 (default: 20)"
    )
    ladder.add_argument(
        "--rebatch",
        action="store_true",
        help="a second view: measure every rung at the micro batch that is fastest for it as well",
    )
    ladder.add_argument(
        "--headroom",
        metavar="SHARE",
        type=float,
        help="with --rebatch: the share of the memory that stays free (default: 0.05)",
    )
    ladder.add_argument(
        "--global-batch",
        metavar="N",
        type=int,
        help="with --rebatch: sequences per update; only micro batches that divide it are tried",
    )
    ladder.add_argument(
        "--compile-ahead",
        metavar="N",
        type=int,
        help="compile the code of N rows at a time before the first is measured: for machines with many cores",
    )
    ladder.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="longest time for one measurement (default: 600)",
    )
    ladder.add_argument(
        "--out", metavar="DIR", type=Path, help="run directory (default: runs/ladder-WORKLOAD-DATE-TIME)"
    )
    ladder.add_argument(
        "--resume", metavar="DIR", type=Path, help="continue an interrupted run; finished rows are not repeated"
    )
    add_common(ladder)
    ladder.set_defaults(run=run_ladder)


def run_ladder(options: argparse.Namespace) -> int:
    if options.list_rungs:
        return list_rungs(options)
    document, directory = ladder(options, command_line())
    return show_ladder(document, directory, options)


def ladder(options: argparse.Namespace, command: str) -> tuple[dict[str, Any], Path]:
    """Climb, and return the document and the run directory. Progress goes to standard error."""
    from rich.console import Console

    from redline.report.live import LiveLadder
    from redline.search.ladder import check_timeout, prepare_ladder, resume_ladder

    check_timeout(options.timeout)
    check_sizes(options, ("gpus",))
    console = Console(stderr=True)
    choices = {name: getattr(options, name) for name in CHOICES}
    run = (
        resume_ladder(options.resume, {**choices, "out": options.out})
        if options.resume
        else prepare_ladder(**choices, out=options.out, command=command)
    )
    for note in run.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    with LiveLadder(console) as view:
        document = run.climb(timeout_seconds=options.timeout, view=view)
    return document, run.directory.path


# The options that define a ladder. With --resume they come from the run directory and may not be given again, except
# for the ranks that it has.
CHOICES = (
    "workload",
    "rungs",
    "also",
    "without",
    "start",
    "micro_batch",
    "sequence",
    "data",
    "device",
    "gpus",
    "tensor",
    "replicas",
    "keep",
    "repeats",
    "aa",
    "steps",
    "check_steps",
    "rebatch",
    "headroom",
    "global_batch",
    "compile_ahead",
)


def show_ladder(document: dict[str, Any], directory: Path, options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.core.job import BEST_FILE, REBATCHED_FILE
    from redline.report.page import render_page
    from redline.report.table import print_ladder

    # The page is written before the table is shown, whose reader may close the pipe; its error waits until after.
    page, trouble = try_page(document, directory, render_page)
    if options.json:
        print(json.dumps(document))
    else:
        print_ladder(document, Console())
        print_paths(
            page=page,
            recipe=directory / BEST_FILE if document["best"] is not None else None,
            rebatch=directory / REBATCHED_FILE if document["best_rebatched"] is not None else None,
        )
    if not document["finished"]:
        print(f"interrupted; continue with: redline ladder --resume {directory}", file=sys.stderr)
    if trouble is not None and options.run is run_ladder:
        raise trouble
    if trouble is not None:  # `redline report` has shown the table; its run may lie where nothing can be written
        warn_of(trouble)
    if not document["finished"]:
        return EXIT_INTERRUPTED if options.run is run_ladder else EXIT_DONE
    broken = any(row["equivalence"]["verdict"] == "different" for row in document["rows"])
    return EXIT_FAILED if broken or document["best"] is None else EXIT_DONE


def print_paths(**paths: Path | None) -> None:
    for name, path in paths.items():
        if path is not None and path.exists():  # a full disk may have prevented it
            print(f"{name:8} {path}")


def list_rungs(options: argparse.Namespace) -> int:
    from redline.rungs import LADDER

    if options.json:
        print(json.dumps([{"rung": rung.name, "class": rung.maths.value, "title": rung.title} for rung in LADDER]))
        return EXIT_DONE
    width = max(len(rung.name) for rung in LADDER)
    for rung in LADDER:
        named = "  (when --also or --rungs names it)" if rung.when_named else ""
        print(f"{rung.name:{width}} {rung.maths.value:14} {rung.title}{named}")
    return EXIT_DONE
