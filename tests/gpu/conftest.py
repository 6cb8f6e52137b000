"""What the tests on a CUDA device share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.predict.verdict import judge
from redline.rungs import Maths, find_rung, plan_of
from redline.search.launch import launch

Rounds = Callable[[Workload, tuple[str, ...]], Measurement]
KERNELS = {"cudnn": "cudnn", "flash": "flash_fwd"}


@pytest.fixture
def only_rounds(tmp_path: Path) -> Rounds:
    """Measure a recipe in a worker as a ladder does, and assert that its verdict is *rounding* and that the attention
    kernel it names ran. The token file, if the workload reads one, is in tmp_path."""

    def check(workload: Workload, rungs: tuple[str, ...]) -> Measurement:
        assert not set(rungs) & set(workload.cannot)
        recipe = Recipe(rungs=rungs, micro_batch=workload.micro_batch)
        job = Job(workload=workload, recipe=recipe, device="cuda", tokens="tokens.npy", timed_steps=10, check_steps=10)
        changing = tuple(name for name in rungs if find_rung(name).maths is Maths.CHANGES)
        reference = replace(job, kind="reference", recipe=replace(recipe, rungs=changing))
        run = RunDirectory(tmp_path)
        expected, found = (launch(run, one, 300, lambda *_, **__: None) for one in (reference, job))
        assert isinstance(expected, Measurement), expected
        assert isinstance(found, Measurement), found
        plan = plan_of(rungs)
        verdict = judge(
            maths=Maths.ROUNDING.value,
            precision=plan.precision,
            measurement=found,
            reference=expected.loss_curve,
            base=None,
            plain=expected.loss_curve,
            ln_vocab=workload.shape.ln_vocab,
        )
        assert verdict.verdict == "rounding", verdict.detail
        assert KERNELS.get(plan.attention, "") in (found.proof.attention or ""), found.proof
        return found

    return check
