"""A recipe of another machine: `redline train` leaves out what does not apply here, says so, and nothing else."""

from __future__ import annotations

import pytest

from redline.commands.train_recipe import without_refused
from redline.core.errors import UserError
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


def test_what_only_stood_in_the_way_of_another_rung_goes_first(left_out):
    """Flash keeps no scores that could be recomputed; without it there are some."""
    found, said = left_out("bf16", "compile", "cudnn-attention", "selective-checkpointing")
    assert found.rungs == ("bf16", "compile", "selective-checkpointing")
    assert len(said) == 1


def test_ways_for_ranks_are_not_judged_here(left_out):
    rungs = ("bf16", "tied-weights", "fsdp")
    assert left_out(*rungs) == (Recipe(rungs=rungs, micro_batch=4), [])


def test_other_maths_is_refused_and_never_left_out(left_out):
    with pytest.raises(UserError, match="the recipe's fp8-head does not apply here"):
        left_out("bf16", "fused-loss", "fp8-head")


@pytest.mark.parametrize("name", ["hopper.json", "hopper-256.json"])
def test_the_recipes_of_an_h200_go_on_a_cpu(left_out, repository, name):
    found, said = left_out(*load_recipe(repository / "benchmarks" / "recipes" / name).rungs)
    assert {"bf16", "compile", "tied-weights", "fused-adamw"} <= set(found.rungs)
    assert not {"tf32", "cudnn-attention", "fused-matmuls"} & set(found.rungs)
    assert len(said) == len(set(said)) >= 8
