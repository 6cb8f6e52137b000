"""A recipe of another machine: `redline train` leaves out what does not apply here, says so, and nothing else."""

from __future__ import annotations

import json

import pytest

from redline.commands.train_recipe import without_refused
from redline.core.hardware import Hardware
from redline.core.recipe import Recipe, load_recipe
from redline.workloads import resolve_workload

CPU = Hardware(
    kind="cpu", name="a CPU", count=1, features=("bf16", "flash", "compile"), missing={"tf32": "no tensor cores here"}
)


@pytest.fixture
def left_out():
    def fit(*rungs):
        said = []
        recipe = Recipe(rungs=rungs, micro_batch=4)
        return without_refused(recipe, resolve_workload("tiny"), CPU, said.append), said

    return fit


def test_what_does_not_apply_here_is_left_out_with_its_reason(left_out):
    found, said = left_out("tf32", "bf16", "fused-adamw")
    assert found == Recipe(rungs=("bf16", "fused-adamw"), micro_batch=4)
    assert said == ["the recipe's tf32 is left out: no tensor cores here"]


def test_what_rests_on_it_goes_too(left_out):
    found, said = left_out("bf16", "compile", "fused-backward", "tuned-matmuls", "fused-matmuls")
    assert found.rungs == ("bf16", "compile")
    assert [line.split()[2] for line in said] == ["fused-backward", "tuned-matmuls", "fused-matmuls"]


def test_ways_for_ranks_and_other_maths_are_never_left_out(left_out):
    rungs = ("bf16", "tied-weights", "fp8-head", "fsdp")
    assert left_out(*rungs) == (Recipe(rungs=rungs, micro_batch=4), [])


def test_the_recipes_of_an_h200_train_on_a_cpu(repository):
    for path in (repository / "benchmarks" / "recipes").glob("hopper*.json"):
        recipe = load_recipe(path)
        said = []
        kept = without_refused(recipe, resolve_workload("tiny"), CPU, said.append)
        assert len(said) == len(recipe.rungs) - len(kept.rungs) > 0
        assert json.loads(path.read_text(encoding="utf-8"))["micro_batch"] == kept.micro_batch
