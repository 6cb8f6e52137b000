"""`redline report` draws what a run directory holds again: a ladder's table and page, a training run's, a profile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from redline.commands.common import EXIT_DONE, add_common


def add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="draw a run's table or curves and its page again",
        description="Draw what a run directory holds again, on any machine: the table and report.html of a ladder, "
        "the summary and report.html of a training run, also while it goes on.",
    )
    report.add_argument("directory", metavar="DIR", type=Path, help="a run directory")
    add_common(report)
    report.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    from redline.core.job import open_run_directory

    record: object = open_run_directory(options.directory).read_run()
    kind = record.get("kind") if isinstance(record, dict) else None
    return {"train": report_training, "profile": report_profile, "tune": report_tune}.get(str(kind), report_ladder)(
        options
    )


def report_ladder(options: argparse.Namespace) -> int:
    from redline.commands.ladder import show_ladder
    from redline.search.ladder import read_ladder

    return show_ladder(read_ladder(options.directory), options.directory, options)


def report_profile(options: argparse.Namespace) -> int:
    from redline.commands.profile import PROFILE_FILE, show_profile

    return show_profile(json.loads((options.directory / PROFILE_FILE).read_text(encoding="utf-8")), options)


def report_tune(options: argparse.Namespace) -> int:
    from redline.commands.tune import show_tune
    from redline.search.tune_run import read_tune

    return show_tune(read_tune(options.directory), options.directory, options)


def report_training(options: argparse.Namespace) -> int:
    from redline.core.job import REPORT_FILE, RunDirectory
    from redline.report.history import read_training
    from redline.report.training import summary_lines
    from redline.report.training_page import render_training_page

    document, page = read_training(options.directory), None
    try:
        page = RunDirectory(options.directory).write(REPORT_FILE, render_training_page(document))
    except OSError as error:  # shown all the same: the run may lie where nothing can be written
        why = error.strerror or str(error)
        print(f"warning: cannot write {options.directory / REPORT_FILE}: {why}", file=sys.stderr)
    if options.json:
        print(json.dumps(document))
        return EXIT_DONE
    shown = {**document, "page": None if page is None else str(page), "out": str(options.directory)}
    for line in summary_lines(shown):
        print(line)
    return EXIT_DONE
