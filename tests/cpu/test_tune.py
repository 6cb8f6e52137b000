"""A trial in this process, and `redline tune` as a user runs it: workers, a recipe, and a run that trains it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.core.recipe import load_recipe
from redline.engine import measure, trial
from redline.search.launch import worker_path

Bench = Callable[..., measure.Bench]
LIMIT_SECONDS = 240


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the whole measurements, which are test_measure.py's business."""
    asked: list[str] = []
    monkeypatch.setattr(
        trial,
        "measure",
        lambda bench: asked.append("whole") or measure.Measurement(loss_curve=(5.5,), step_seconds=(1.0,)),
    )
    monkeypatch.setattr(trial, "BRIEF_SECONDS", 0.0)
    return asked


def test_a_recipe_that_cannot_keep_up_is_only_looked_at(bench: Bench, whole: list[str]) -> None:
    found = trial.measure_unless_slower(bench("flash", give_up_seconds=1e-9))
    assert whole == []
    assert found.gradients is None
    assert found.loss_curve == ()
    assert found.step_seconds
    assert found.compile_seconds is None


def test_a_recipe_that_keeps_up_is_measured_as_a_whole(bench: Bench, whole: list[str]) -> None:
    found = trial.measure_unless_slower(bench("flash", give_up_seconds=1e9))
    assert whole == ["whole"]
    assert found.loss_curve == (5.5,)


def test_a_look_takes_the_steps_it_was_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trial.WARMUP_SECONDS, "cpu", 0.0)
    found = trial.look(bench("flash", kind="look", timed_steps=3))
    assert len(found.step_seconds) == 3
    assert found.gradients is None


@pytest.mark.parametrize(("seconds", "count"), [(1e-6, 50), (0.7 / 20, 20), (10.0, 8)])
def test_a_brief_look_has_no_more_steps_than_time(bench: Bench, seconds: float, count: int) -> None:
    brief = trial.briefly(bench(timed_steps=None), seconds)
    assert brief.job.timed_steps == count
    assert trial.briefly(bench(timed_steps=3), seconds).job.timed_steps == 3


def redline(folder: Path, *words: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "redline", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": worker_path(), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_tune_finds_a_recipe_that_trains_and_remembers_it(tmp_path: Path) -> None:
    words = (
        "tune",
        "tiny",
        "--rungs",
        "flash",
        "--micro-batch",
        2,
        "--steps",
        3,
        "--check-steps",
        3,
        "--device",
        "cpu",
    )
    code, stdout, stderr = redline(tmp_path, *words, "--minutes", 3, "--json", "--out", "run")
    assert code == 0, stderr
    document: dict[str, Any] = json.loads(stdout)
    assert document["best"]["verdict"] in ("same", "rounding")
    assert {row["status"] for row in document["rows"]} == {"ok"}
    recipe = load_recipe(tmp_path / "run" / "best.json")
    assert list(recipe.rungs) == document["best"]["rungs"]
    assert "tied-weights" in recipe.rungs
    checked = [row for row in document["rows"] if row["loss_curve"]]
    assert all(row["reference_curve"] is not None for row in checked)

    code, stdout, stderr = redline(tmp_path, *words, "--minutes", 3, "--json", "--out", "again")
    assert code == 0, stderr
    again = json.loads(stdout)
    assert again["best"] == document["best"]
    assert again["budget"]["remembered_trials"] == again["budget"]["trials"]
    assert not (tmp_path / "again" / "jobs").exists()  # no worker was started

    code, _, stderr = redline(
        tmp_path, "train", "tiny", "--recipe", "run/best.json", "--steps", 2, "--device", "cpu", "--out", "trained"
    )
    assert code == 0, stderr
