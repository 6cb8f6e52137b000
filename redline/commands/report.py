"""`redline report` redraws the results in a run directory, serves them while the run continues, or compares two runs.

redline report DIR                          the table or summary, and report.html
redline report DIR --serve                  the page on 127.0.0.1, redrawn as the run continues
redline report A B --fail-below 0.95        side by side; exit code 1 if B is slower than that share of A
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.commands.common import add_common, command_line
from redline.core.errors import EXIT_DONE, EXIT_FAILED, UserError, explained


def add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="draw a run's table and page again, serve it, or compare two runs",
        description="Draw what a run directory holds again, on any machine: the table and report.html of a ladder or a "
        "tune, a profile, the summary and report.html of a training run, also while it goes on. With two runs, say "
        "what changed from A to B and whether it is more than noise.",
        epilog="Exit codes: 0 done; 1 B is below --fail-below, or a ladder's row is different; 2 a mistake in the "
        "command, or a figure that --fail-below needs is not known.",
    )
    report.add_argument(
        "directory", metavar="DIR", type=Path, help="a run directory, or a file with the document that --json printed"
    )
    report.add_argument(
        "other",
        metavar="B",
        type=Path,
        nargs="?",
        help="compare: a run directory, or a file that `ladder --json`, `tune --json` or `report DIR --json` printed",
    )
    report.add_argument(
        "--fail-below",
        metavar="SHARE",
        type=float,
        help="with B: exit code 1 when its figure is less than this share of A's, such as 0.95",
    )
    report.add_argument("--rung", metavar="NAME", help="with B: compare this rung (default: the best of each)")
    report.add_argument("--html", metavar="FILE", type=Path, help="with B, or of a file: write the page to FILE")
    report.add_argument(
        "--serve", action="store_true", help="serve the page to this machine alone (127.0.0.1) until Ctrl-C"
    )
    report.add_argument("--port", metavar="N", type=int, help="with --serve (default: 8765; 0: any that is free)")
    add_common(report)
    report.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    check_options(options)
    if options.other is not None:
        return report_comparison(options)
    if options.serve:
        from redline.commands.serve import DEFAULT_PORT, serve

        return serve(options.directory, DEFAULT_PORT if options.port is None else options.port)
    if is_file(options.directory):
        return report_document(options)
    from redline.commands.standing import kind_of_run

    return {
        "ladder": report_ladder,
        "tune": report_tune,
        "train": report_training,
        "profile": report_profile,
    }[kind_of_run(options.directory)](options)


def check_options(options: argparse.Namespace) -> None:
    """Refuse options for a comparison without two runs, --serve with two runs or --json, and --port without --serve."""
    written = () if is_file(options.directory) else ("html",)
    of_two = [name for name in ("fail_below", "rung", *written) if getattr(options, name) is not None]
    if of_two and options.other is None:
        option = "--" + of_two[0].replace("_", "-")
        raise UserError(
            f"{option} with one run",
            "it belongs to a comparison, and --html to a file too",
            "give two: redline report A B",
        )
    if options.serve and (options.other is not None or options.json or is_file(options.directory)):
        other = "two runs" if options.other is not None else "--json" if options.json else "a file"
        raise UserError(f"--serve with {other}", "it shows the page of one run to a browser", "leave one of them out")
    if options.port is not None and not options.serve:
        raise UserError("--port without --serve", "nothing listens", "add --serve, or leave --port out")


def is_file(path: Path) -> bool:
    """False also for what the system refuses to look at: whoever opens it says why."""
    try:
        return path.is_file()
    except OSError:
        return False


# --- two runs ---------------------------------------------------------------------------------------------------------


def report_comparison(options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.commands.common import check_html, write_html
    from redline.report.compare import check_share, compare
    from redline.report.compare_page import render_comparison
    from redline.report.compare_table import print_comparison

    check_share(options.fail_below)
    if options.html is not None:
        check_html(options.html, "compare.html")
    paths = (options.directory, options.other)
    found = compare(
        *map(read_results, paths),
        sources=(str(paths[0]), str(paths[1])),
        rung=options.rung,
        fail_below=options.fail_below,
    )
    found = {**found, "command": command_line()}
    if options.html is not None:  # before the table, whose reader may close the pipe
        write_html(options.html, render_comparison(found))
    if options.json:
        print(json.dumps(found))
    else:
        print_comparison(found, Console())
    return EXIT_FAILED if found["figure"]["passed"] is False else EXIT_DONE


def read_results(path: Path) -> dict[str, Any]:
    """Return the document of a run directory, or the one in a file. Its contents are checked when it is compared."""
    if not path.is_dir():
        return read_document(path)
    from redline.commands.standing import read_standing

    standing = read_standing(path)
    if standing.kind == "profile":
        raise UserError(
            f"{path} is a profile",
            "it says where the time of a step goes; its speed was measured in passing",
            "compare ladders, tunes or training runs",
        )
    assert standing.document is not None
    return standing.document


def read_document(path: Path) -> dict[str, Any]:
    wanted = "give a run directory, or what `redline ladder --json` or `redline report DIR --json` printed"
    try:
        with explained(f"cannot read {path}", wanted):
            document: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no results document", f"it is not JSON: {error}", wanted) from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is no results document", "it holds no JSON object", wanted)
    return document


# --- a document -------------------------------------------------------------------------------------------------------


def report_document(options: argparse.Namespace) -> int:
    """Show the document of a ladder, a tune or a profile that was kept without its run directory."""
    from rich.console import Console

    from redline.commands.common import check_html, write_html

    if options.html is not None:
        check_html(options.html, "report.html")
    document = read_document(options.directory)
    show, render = ways_to_show(document, options.directory)
    try:
        page = render(document)
        if options.html is not None:  # before the table, whose reader may close the pipe
            write_html(options.html, page)
        if options.json:
            print(json.dumps(document))
        else:
            show(document, Console())
    except (KeyError, TypeError, AttributeError) as error:
        raise no_document(options.directory, f"a part of it is missing or of another kind: {error!r}") from error
    rows = document.get("rows") or ()
    different = any((row.get("equivalence") or {}).get("verdict") == "different" for row in rows)
    return EXIT_FAILED if different else EXIT_DONE


def ways_to_show(document: dict[str, Any], path: Path) -> tuple[Callable[..., None], Callable[[dict[str, Any]], str]]:
    """Return what prints such a document and what renders its page."""
    from redline.report import page, profile, profile_page, table, tune, tune_page
    from redline.report.compare import kind_of

    if document.get("kind") == "profile" and document.get("status") == "ok":
        return profile.print_profile, profile_page.render_profile_page
    kind = kind_of(document)
    if kind == "ladder":
        return table.print_ladder, page.render_page
    if kind == "tune":
        return tune.print_tune, tune_page.render_tune_page
    raise no_document(path, "it has the fields of something else")


def no_document(path: Path, why: str) -> UserError:
    fix = "give what `--json` of one of them printed, or a run directory"
    return UserError(f"{path} is no document of a ladder, a tune or a profile", why, fix)


# --- one run ----------------------------------------------------------------------------------------------------------


def report_ladder(options: argparse.Namespace) -> int:
    from redline.commands.ladder import show_ladder
    from redline.search.ladder import read_ladder

    return show_ladder(with_damage(read_ladder(options.directory), options.directory), options.directory, options)


def report_profile(options: argparse.Namespace) -> int:
    from redline.commands.profile import show_profile
    from redline.commands.standing import read_profile

    return show_profile(read_profile(options.directory), options, options.directory)


def report_tune(options: argparse.Namespace) -> int:
    from redline.commands.tune import show_tune
    from redline.search.tune_run import read_tune

    return show_tune(with_damage(read_tune(options.directory), options.directory), options.directory, options)


def with_damage(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the document with the number of result lines that cannot be read, if any: their rows may be missing."""
    from redline.core.job import RunDirectory

    lost = RunDirectory(directory).unreadable_lines()
    return {**document, "unreadable_lines": lost} if lost else document


def report_training(options: argparse.Namespace) -> int:
    from redline.report.history import read_training
    from redline.report.training import summary_lines
    from redline.report.training_page import write_training_page

    document = read_training(options.directory)
    page = write_training_page(options.directory, document)
    if options.json:
        print(json.dumps(document))
        return EXIT_DONE
    shown = {**document, "page": None if page is None else str(page), "out": str(options.directory)}
    shown["why"] = document["reason"]  # `redline train` prints it before its summary
    for line in summary_lines(shown):
        print(line)
    return EXIT_DONE
