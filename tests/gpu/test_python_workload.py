"""A user's own module on a CUDA device: trees of tensors travel ahead of the step, and the recipe keeps its promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from redline.core.measurement import Measurement
from redline.core.workload import Workload
from redline.search.inspect import find_workload

Rounds = Callable[[Workload, tuple[str, ...]], Measurement]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hasty_workers")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAST = ("tf32", "no-sync", "bf16", "compile", "fused-adamw", "loader-workers")


@pytest.mark.parametrize(
    ("words", "rungs", "syncs"),
    [
        ("mlp.py:mlp", FAST, 0.1),  # one read in ten steps, and no copy that waits
        ("vit.py:vit", (*FAST, "cudnn-attention"), 0.1),
        ("vit.py:vit", ("bf16", "flash"), None),
        ("naive_gpt.py:gpt", FAST, 1.1),  # its own, in every step, which no rung can take away
    ],
    ids=["mlp", "vit-cudnn", "vit-flash", "naive-gpt"],
)
def test_a_recipe_on_a_users_module(
    words: str, rungs: tuple[str, ...], syncs: float | None, only_rounds: Rounds
) -> None:
    found = only_rounds(find_workload(str(EXAMPLES / words)), rungs)
    assert syncs is None or found.proof.syncs_per_step == pytest.approx(syncs)
