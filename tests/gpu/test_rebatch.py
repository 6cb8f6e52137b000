"""A trial of a size on a CUDA device: retries are counted, losers are looked at only, and too much is a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Failure, Measurement, Proof
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.data.tokens import prepare_tokens
from redline.search.launch import launch

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    prepare_tokens(WORKLOAD, directory.path / "tokens.npy")
    return directory


def trial(run: RunDirectory, size: int, *rungs: str, **changes: object) -> Measurement | Failure:
    recipe = Recipe(rungs=rungs, micro_batch=size)
    job = Job(workload=WORKLOAD, recipe=recipe, device="cuda", tokens="tokens.npy", kind="trial", check_steps=5)
    return launch(run, replace(job, **changes), 300, lambda *_, **__: None)  # type: ignore[arg-type]


def test_a_trial_counts_retries_and_needs_no_profile(run: RunDirectory) -> None:
    found = trial(run, 8, "bf16", "flash")
    assert isinstance(found, Measurement), found
    assert found.alloc_retries == 0
    assert found.proof == Proof()
    assert found.gradients is not None


def test_a_trial_that_cannot_keep_up_is_a_look(run: RunDirectory) -> None:
    found = trial(run, 8, "bf16", give_up_seconds=1e-9)
    assert isinstance(found, Measurement), found
    assert (found.loss_curve, found.gradients) == ((), None)
    assert found.alloc_retries == 0


def test_far_too_many_sequences_are_out_of_memory(run: RunDirectory) -> None:
    found = trial(run, 2**18, "bf16", give_up_seconds=1e9)  # the look comes before the reference, which is slow here
    assert isinstance(found, Failure), found
    assert found.kind == "oom"
