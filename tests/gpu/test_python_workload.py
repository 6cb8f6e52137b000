"""A user's own module on a CUDA device: trees of tensors travel ahead of the step, and the recipe keeps its promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from redline.core.measurement import Measurement
from redline.core.workload import Workload
from redline.search.inspect import find_workload

Rounds = Callable[[Workload, tuple[str, ...]], Measurement]

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
def test_a_recipe_on_a_users_module(words: str, rungs: tuple[str, ...], only_rounds: Rounds) -> None:
    found = only_rounds(find_workload(str(EXAMPLES / words)), rungs)
    if {"no-sync", "loader-workers"} <= set(rungs):
        assert found.proof.syncs_per_step == pytest.approx(0.1)  # one read in ten steps, and no copy that waits
