"""A user's own module on a CUDA device: trees of tensors travel ahead of the step, and the recipe keeps its promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.predict.memory import predict_memory
from redline.predict.verdict import judge
from redline.rungs import plan_of
from redline.search.inspect import find_workload
from redline.search.launch import launch

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAST = ("tf32", "no-sync", "bf16", "compile", "fused-adamw", "loader-workers")


@pytest.mark.parametrize(
    ("words", "rungs"),
    [
        ("mlp.py:mlp", FAST),
        ("vit.py:vit", (*FAST, "cudnn-attention")),
        ("vit.py:vit", ("bf16", "flash")),
        ("naive_gpt.py:gpt", FAST),
    ],
    ids=["mlp", "vit-cudnn", "vit-flash", "naive-gpt"],
)
def test_a_recipe_on_a_users_module(words: str, rungs: tuple[str, ...], tmp_path: Path) -> None:
    workload = find_workload(str(EXAMPLES / words))
    assert not set(rungs) & set(workload.cannot)
    run = RunDirectory(tmp_path)
    recipe = Recipe(rungs=rungs, micro_batch=workload.micro_batch)
    job = Job(workload=workload, recipe=recipe, device="cuda", tokens="tokens.npy", timed_steps=10, check_steps=10)
    reference = replace(job, kind="reference", recipe=replace(recipe, rungs=()))
    expected, found = (launch(run, one, 300, lambda *_, **__: None) for one in (reference, job))
    assert isinstance(expected, Measurement), expected
    assert isinstance(found, Measurement), found
    verdict = judge(
        maths="rounding-only",
        precision=plan_of(rungs).precision,
        measurement=found,
        reference=expected.loss_curve,
        base=None,
        plain=expected.loss_curve,
        ln_vocab=workload.shape.ln_vocab,
    )
    assert verdict.verdict == "rounding", verdict.detail
    assert found.proof.syncs_per_step == pytest.approx(0.1) if "loader-workers" in rungs else True
    if "flash" in rungs or "cudnn-attention" in rungs:
        assert ("cudnn" if "cudnn-attention" in rungs else "flash_fwd") in (found.proof.attention or ""), found.proof
    assert predict_memory(workload.shape, plan_of(rungs), micro_batch=recipe.micro_batch).allocated > 0
