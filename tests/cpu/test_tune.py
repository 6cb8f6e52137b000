"""A trial in this process, and `redline tune` as a user runs it: workers, a recipe, and a second run without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.core.recipe import load_recipe
from redline.engine import measure, trial
from redline.engine.session import training_plan
from redline.search import tune, tune_run
from redline.search.launch import probe_machine

Bench = Callable[..., measure.Bench]


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


class Quiet:
    """A view that shows nothing."""

    def row_started(self, *_: object) -> None: ...
    def row_finished(self, *_: object) -> None: ...
    def phase(self, *_: object, **__: object) -> None: ...
    def message(self, *_: object) -> None: ...


@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
def test_tune_finds_a_recipe_and_remembers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers; test_tune_run.py has the command around made-up ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "MOST_REPEATS", 0)
    machine = probe_machine("cpu")
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: machine)

    def run(out: str) -> dict[str, Any]:
        words: dict[str, Any] = {"workload": "tiny", "rungs": "flash", "device": "cpu", "micro_batch": 2}
        prepared = tune_run.prepare_tune(**words, steps=3, check_steps=3, minutes=4, out=tmp_path / out)
        return prepared.tune(timeout_seconds=200, view=Quiet())

    document = run("run")
    assert document["best"]["verdict"] in ("same", "rounding")
    assert {row["status"] for row in document["rows"]} == {"ok"}
    assert all(row["reference_curve"] is not None for row in document["rows"] if row["loss_curve"])
    recipe = load_recipe(tmp_path / "run" / "best.json")
    assert list(recipe.rungs) == document["best"]["rungs"]
    assert training_plan(recipe).tied  # what `train --recipe` makes of it; test_train.py trains with recipe files

    again = run("again")
    assert again["best"] == document["best"]
    assert again["budget"]["remembered_trials"] == again["budget"]["trials"]
    assert not (tmp_path / "again" / "jobs").exists()  # no worker was started
