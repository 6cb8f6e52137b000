"""The current state of a run directory, finished or not: what `report --serve` and `watch` show.

    standing = read_standing(Path("runs/ladder-gpt2-..."))
    standing.under_way, standing.doing, standing.document
    page_of(standing, path)      the HTML page;  print_standing(standing, path) the table

This module only reads: a run under way is neither slowed down nor changed by looking at it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.core.errors import UserError
from redline.core.job import KINDS, MEASUREMENT_FILE, RESULTS_FILE, RUN_FILE, Job, RunDirectory, open_run_directory
from redline.core.training import METRICS_FILE
from redline.core.values import from_json

if TYPE_CHECKING:
    from redline.core.recipe import Recipe

MEASURED = ("ladder", "tune")
"""Kinds whose process holds a lock, which shows whether they are under way."""
KIND_OF_JOB = {
    "reference": "fp32 reference",
    "yardstick": "plain code at its precision",
    "look": "a look",
    "trial": "another micro batch",
    "measure": "measuring",
    "compile": "compiling ahead",
}


@dataclass(frozen=True, kw_only=True)
class Doing:
    """The job that is running now."""

    what: str
    recipe: str
    since: str
    """Time of day at which it started."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    kind: str
    record: dict[str, Any]
    """The contents of run.json."""
    document: dict[str, Any] | None
    """None for a profile that has no result yet."""
    under_way: bool
    """For a training run or a profile, True if no end has been recorded."""
    doing: Doing | None = None


def kind_of_run(path: Path) -> str:
    """Return the kind in run.json; the oldest ladders do not state theirs."""
    record: object = open_run_directory(path).read_run()
    kind = record.get("kind") if isinstance(record, dict) else None
    return kind if isinstance(kind, str) and kind in KINDS else "ladder"


def read_standing(path: Path) -> Standing:
    kind = kind_of_run(path)
    return {"ladder": _ladder, "tune": _tune, "train": _training, "profile": _profile}[kind](path)


def _ladder(path: Path) -> Standing:
    from redline.search.ladder import is_measuring, read_ladder

    live = is_measuring(path)  # checked first: a run that ends in between has a complete document
    document = read_ladder(path)
    under_way = live and not document["finished"]
    document = {**document, "under_way": under_way}
    return _standing("ladder", path, document, under_way)


def _tune(path: Path) -> Standing:
    from redline.report.tune import UNDER_WAY
    from redline.search.ladder import is_measuring
    from redline.search.tune_run import open_tune, read_tune

    if not is_measuring(path):
        return _standing("tune", path, read_tune(path), False)
    document = open_tune(path).replay()  # a resumed run still has the document of its first part
    return _standing("tune", path, {**document, "stopped": {"why": UNDER_WAY, "detail": None}}, True)


def _training(path: Path) -> Standing:
    from redline.report.history import read_training

    document = read_training(path)
    return _standing("train", path, document, document["ended"] is None)


def _profile(path: Path) -> Standing:
    document = read_profile(path) if has_profile(path) else None
    return _standing("profile", path, document, document is None)


def _standing(kind: str, path: Path, document: dict[str, Any] | None, under_way: bool) -> Standing:
    run = RunDirectory(path)
    doing = running(run) if under_way and kind in MEASURED else None
    return Standing(kind=kind, record=run.read_run(), document=document, under_way=under_way, doing=doing)


def has_profile(path: Path) -> bool:
    from redline.commands.profile import PROFILE_FILE

    return (path / PROFILE_FILE).exists()


def read_profile(path: Path) -> dict[str, Any]:
    from redline.commands.profile import PROFILE_FILE

    try:
        found: dict[str, Any] = json.loads((path / PROFILE_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} holds no finished profile",
            f"{PROFILE_FILE}: {error.strerror or error}: it goes on, or was interrupted",
            f"wait for it with `redline watch {path}`, or profile again",
        ) from error
    except ValueError as error:
        raise UserError(f"{path / PROFILE_FILE} is damaged", str(error), "profile again") from error
    return found


def running(run: RunDirectory) -> Doing | None:
    """Return the newest job without an answer, from its folder; None between two jobs."""
    answered = run.results()
    started = [(_changed(file), file) for file in (run.path / "jobs").glob("*/job.json")]
    for moment, file in sorted(started, reverse=True):
        try:
            job = from_json(Job, json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):  # written by another version, or gone
            continue
        compiled = job.kind == "compile" and (file.parent / MEASUREMENT_FILE).exists()  # no row: its file is its answer
        if job.key not in answered and not compiled:
            since = f"{datetime.fromtimestamp(moment / 1e9):%H:%M:%S}"
            return Doing(what=KIND_OF_JOB.get(job.kind, job.kind), recipe=recipe_text(job.recipe), since=since)
    return None


def recipe_text(recipe: Recipe) -> str:
    """Return the newest rung, the number of rungs below it, and the micro batch."""
    if not recipe.rungs:
        return f"no rung, micro batch {recipe.micro_batch}"
    below = len(recipe.rungs) - 1
    onto = f" on {below} more" if below else ""
    return f"{recipe.rungs[-1]}{onto}, micro batch {recipe.micro_batch}"


def stamp_of(path: Path) -> tuple[object, ...]:
    """Return a value that changes when there is something new to read."""
    from redline.commands.profile import PROFILE_FILE
    from redline.search.ladder import is_measuring
    from redline.search.tune_run import DOCUMENT_FILE

    files = (RUN_FILE, RESULTS_FILE, METRICS_FILE, DOCUMENT_FILE, PROFILE_FILE)
    jobs = path / "jobs"
    return (is_measuring(path), *(_size_and_time(path / name) for name in files), _size_and_time(jobs))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _changed(path: Path) -> int:
    found = _size_and_time(path)
    return 0 if found is None else found[1]


# --- shown ------------------------------------------------------------------------------------------------------------


def page_of(standing: Standing, path: Path) -> str:
    """Render the page. `path` is the run directory, which the page's commands name."""
    if standing.document is None:
        from redline.report.waiting_page import render_waiting_page

        return render_waiting_page(standing.record)
    if standing.kind == "train":
        from redline.report.training_page import render_training_page as render
    elif standing.kind == "tune":
        from redline.report.tune_page import render_tune_page as render
    elif standing.kind == "profile":
        from redline.report.profile_page import render_profile_page as render
    else:
        from redline.report.page import render_page as render
    return render({**standing.document, "directory": str(path)})


def print_standing(standing: Standing, path: Path) -> None:
    """Print the results as the run's own command shows them at its end."""
    from rich.console import Console

    document = standing.document
    if document is None:
        return
    if standing.kind == "train":
        from redline.report.training import summary_lines

        for line in summary_lines({**document, "page": None, "out": str(path)}):
            print(line)
    elif standing.kind == "tune":
        from redline.report.tune import print_tune

        print_tune(document, Console())
    elif standing.kind == "profile":
        from redline.report.profile import print_profile

        if document["status"] == "ok":
            print_profile(document, Console())
        else:
            print(f"nothing was profiled: {document['reason']}")
    else:
        from redline.report.table import print_ladder

        print_ladder(document, Console())
