"""benchmarks/tune_enumerate.py: what is enumerated, what counts as tried, the verdict."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.core.hardware import Hardware
from redline.core.recipe import Recipe
from redline.data.tokens import prepare_tokens
from redline.search.space import Space, open_space
from redline.workloads import PRESETS

CPU = Hardware(kind="cpu", name="a CPU", cpu_cores=2, features=("flash",))
RUNGS = ("flash", "padded-vocab", "fused-adamw")


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        import tune_enumerate
    return tune_enumerate


@pytest.fixture
def space() -> Space:
    tiny = PRESETS["tiny"]
    small = replace(tiny, shape=replace(tiny.shape, layers=1, d_model=16, d_ff=32, heads=2, sequence=8))
    return open_space(small, CPU, rungs=RUNGS, micro_batch=2)


def test_layers_are_cut_and_the_name_says_so(bench: Any) -> None:
    found = bench.chosen_workload(Namespace(workload="gpt2", layers=4))
    assert (found.name, found.shape.layers, found.shape.d_model) == ("gpt2 cut to 4 layers", 4, 768)
    assert bench.chosen_workload(Namespace(workload="gpt2", layers=None)) == PRESETS["gpt2"]


def test_fixed_rungs_are_in_every_recipe(bench: Any, space: Space) -> None:
    assert len(space.recipes(2)) == 8
    fixed = bench.with_fixed(space, ("flash",))
    assert len(fixed.recipes(2)) == 4
    assert all("flash" in recipe.rungs for recipe in fixed.recipes(2))


def test_a_step_is_built_and_timed(bench: Any, space: Space, tmp_path: Path) -> None:
    prepare_tokens(space.workload, tmp_path / "tokens.npy")
    assert bench.step_seconds(space, space.recipes(2)[-1], tmp_path / "tokens.npy", 2) > 0


def enumerated(bench: Any, space: Space, monkeypatch: pytest.MonkeyPatch, answers: list[Any], rounds: int) -> Any:
    """`answers` one by one: seconds, or what is raised."""
    left = iter(answers)

    def answer(*_: object) -> float:
        found = next(left)
        if isinstance(found, BaseException):
            raise found
        return float(found)

    monkeypatch.setattr(bench, "step_seconds", answer)
    return bench.enumerate_all(Path("tokens.npy"), space, space.recipes(2)[:3], Namespace(rounds=rounds, steps=1))


def test_recipes_take_turns_and_one_that_fails_is_left_out(
    bench: Any, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, third = space.recipes(2)[:3]
    found = enumerated(bench, space, monkeypatch, [1, RuntimeError("out of memory"), 3, 5, 7], rounds=2)
    assert found == {first: [1, 5], third: [3, 7]}
    assert bench.rates_of(found, 6) == {first: 2.0, third: 1.2}


def test_an_interrupt_keeps_whole_rounds(bench: Any, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    found = enumerated(bench, space, monkeypatch, [1, 2, 3, 4, KeyboardInterrupt()], rounds=3)
    assert list(found.values()) == [[1], [2], [3]]
    with pytest.raises(KeyboardInterrupt):
        enumerated(bench, space, monkeypatch, [1, 2, KeyboardInterrupt()], rounds=3)


@pytest.mark.parametrize(
    ("rate", "tried", "words"),
    [
        (99.0, 2, "99.0% of the best, after 2 of 8 recipes: within 2%, at a quarter of the trials or fewer"),
        (97.0, 2, "97.0% of the best, after 2 of 8 recipes: NOT within 2%, at a quarter of the trials or fewer"),
        (99.0, 3, "99.0% of the best, after 3 of 8 recipes: within 2%, NOT at a quarter of the trials or fewer"),
    ],
)
def test_the_verdict_counts_recipes_of_the_space(bench: Any, space: Space, rate: float, tried: int, words: str) -> None:
    recipes = space.recipes(2)
    rates = {**dict.fromkeys(recipes, 50.0), recipes[0]: 100.0, recipes[1]: rate}
    plain = Recipe(rungs=("tf32",), micro_batch=2)  # none of the space's
    tuner = SimpleNamespace(
        trials=dict.fromkeys([plain, *recipes[1 : 1 + tried]]),
        best=SimpleNamespace(recipe=recipes[1]),
        space=space,
        asked=9,
    )
    assert bench.verdict(bench.compare(rates, tuner)) == words
