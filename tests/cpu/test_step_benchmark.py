"""benchmarks/step.py: which recipes are made, which may share a process, and what is made of the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.values import to_json
from redline.core.workload import Workload

BASE = Recipe(rungs=("tied-weights", "flash", "fused-adamw"), micro_batch=2)


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports
        patch.syspath_prepend(str(repository / "benchmarks"))
        import step
    return step


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(to_json(BASE)))
    return path


@pytest.fixture
def quiet(bench: Any, monkeypatch: pytest.MonkeyPatch, tiny: Workload) -> None:
    """The smallest workload, and two steps a turn."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(bench, "resolve_workload", lambda _: tiny)
    monkeypatch.setattr(bench, "STEPS", 2)


def test_recipes_are_the_base_and_one_for_each_choice(bench: Any) -> None:
    made = bench.varied(BASE, ["padded-vocab", "padded-vocab,fused-loss"], ["fused-adamw", "flash,fused-adamw"])
    assert {name: recipe.rungs for name, recipe in made.items()} == {
        "base": BASE.rungs,
        "+ padded-vocab": (*BASE.rungs, "padded-vocab"),
        "+ padded-vocab,fused-loss": (*BASE.rungs, "padded-vocab", "fused-loss"),
        "without fused-adamw": ("tied-weights", "flash"),
        "without flash,fused-adamw": ("tied-weights",),
    }


@pytest.mark.usefixtures("quiet")
def test_steps_are_taken_in_turns(
    bench: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order, own = [], bench.build_step

    def watched(workload: Workload, plan: Any, **words: Any) -> Any:
        step = own(workload, plan, **words)
        return lambda batch: (order.append(plan.vocab_multiple), step(batch))[1]

    monkeypatch.setattr(bench, "build_step", watched)
    words = ["tiny", "--recipe", str(recipe), "--micro-batch", "3", "--device", "cpu", "--rounds", "2"]
    out = tmp_path / "steps.json"
    assert bench.main([*words, "--add", "padded-vocab", "--json", str(out)]) == 0
    assert order == [1, 1, 128, 128] * 3, "the first of three warms up"
    found = json.loads(out.read_text())
    assert (found["micro_batch"], found["steps"]) == (3, 2)
    assert list(found["recipes"]) == ["base", "+ padded-vocab"]
    for row in found["recipes"].values():
        assert row["tokens_per_second"] == pytest.approx(1e3 * 3 * 16 / row["median_ms"])
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["peak_gb"] is None
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table] == ["GB", "—", "—"]
    assert "+0.00%" in table[1]
    assert max(map(len, table)) <= 100


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("calls", "code"), [(10, 0), (7, 2)], ids=["in-a-second-round", "in-the-first"])
def test_a_time_limit_keeps_the_turns_that_all_have_taken(
    bench: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, code: int
) -> None:
    """Two recipes and two steps a turn: four calls warm up, four are the first round."""
    own, left = bench.build_step, iter(range(calls))

    def limited(*words: Any, **more: Any) -> Any:
        step = own(*words, **more)

        def call(batch: torch.Tensor) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return step(batch)

        return call

    monkeypatch.setattr(bench, "build_step", limited)
    words = ["tiny", "--recipe", str(recipe), "--device", "cpu", "--rounds", "3", "--add", "padded-vocab"]
    out = tmp_path / "steps.json"
    assert bench.main([*words, "--json", str(out)]) == code
    assert out.exists() == (code == 0)
    if code == 0:
        assert [row["timed_steps"] for row in json.loads(out.read_text())["recipes"].values()] == [4, 2]


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        (["--without", "fused-loss"], "--without fused-loss: the recipe does not have it"),
        (["--add", "fsldp"], "unknown rung 'fsldp'"),
        (["--without", "flash"], "base and without flash differ in attention: flash and naive"),
        (["--add", "fp8-linears"], "the recipe's fp8-linears does not apply here"),
        (["--add", "flash"], "flash was given twice"),
    ],
    ids=["not there", "unknown", "a switch", "not here", "twice"],
)
@pytest.mark.usefixtures("quiet")
def test_mistakes_are_told(
    bench: Any, recipe: Path, choice: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["tiny", "--recipe", str(recipe), "--device", "cpu", *choice]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("graphs", "peak"), [(False, 150 / 1e9), (True, None)], ids=["allocates", "replays"])
def test_a_peak_is_a_recipes_own(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tiny: Workload, graphs: bool, peak: float | None
) -> None:
    """Of a device that tells: 100 bytes are others', 30 its own, and a turn reaches 250 and then 240."""
    now = iter((100, 130, 130, 130))
    peaks = iter((250, 240))
    monkeypatch.setattr(bench, "build_step", lambda *_, **__: None)
    monkeypatch.setattr(bench, "milliseconds", lambda *_: [1.0, 3.0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(now))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))

    class OnDevice:
        device = torch.device("cuda")

        def __getitem__(self, _: int) -> torch.Tensor:
            return torch.zeros(4)

    turns = bench.Turns(tiny, Plan(cuda_graphs=graphs), OnDevice())
    turns.take()
    turns.take()
    assert turns.figures() == {
        "timed_steps": 4,
        "median_ms": 2.0,
        "p10_ms": 1.0,
        "p90_ms": 3.0,
        "tokens_per_second": 2000.0,
        "peak_gb": peak,
    }
