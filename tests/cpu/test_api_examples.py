"""The examples train, and agree with one another; the docstrings' examples run; the factory reaches a worker."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import redline
import redline.api.meter
from redline.engine import profiling

STEPS = 6


@pytest.fixture(scope="module")
def example(repository: Path):
    """example("own_loop") -> the module, with its neighbours importable as they are for `python examples/...`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "examples"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def known() -> dict[str, list[float]]:
    return {}


@pytest.fixture
def losses(example, known) -> list[float]:
    """Of the own loop, run once; inside a test, where conftest.py undoes what a recipe switches in the process."""
    if not known:
        known["losses"] = example("own_loop").main(steps=STEPS)
    return known["losses"]


def test_the_own_loop_learns_and_shows_its_meter(losses, capsys, example) -> None:
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    example("own_loop").main(steps=4, recipe=("fused-adamw", "loader-workers"))
    shown = capsys.readouterr().out
    assert "done       fused-adamw" in shown
    assert "left out   loader-workers: the loader is yours" in shown
    assert "tokens/s" in shown


def test_a_recipe_file_is_an_argument(example, tmp_path, losses) -> None:
    recipe = tmp_path / "best.json"
    recipe.write_text('{"rungs": ["bf16", "flash", "fused-adamw"], "micro_batch": 8}')
    assert example("own_loop").main(steps=STEPS, recipe=str(recipe)) == losses


def test_accelerate_gives_the_same_losses(example, losses) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert example("accelerate_loop").main(steps=STEPS) == losses


@pytest.mark.filterwarnings("ignore::Warning:lightning")  # it uses what torch deprecates, and advises on loaders
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_lightning_gives_the_same_losses(example, losses) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    assert example("lightning_module").main(steps=STEPS) == losses
    own = example("own_loop").main(steps=4, recipe=("lion",))  # an optimizer of redline's own
    assert example("lightning_module").main(steps=4, recipe=("lion",)) == own


@pytest.mark.parametrize("module", [redline, redline.api.meter], ids=["redline", "redline.api.meter"])
def test_examples_in_docstrings_run(module, monkeypatch) -> None:
    monkeypatch.setattr(profiling, "WARMUP_STEPS_BETWEEN", (1, 2))
    monkeypatch.setattr(profiling, "TIMED_STEPS_BETWEEN", (2, 2))
    found = doctest.testmod(module)
    assert found.attempted > 3
    assert found.failed == 0
