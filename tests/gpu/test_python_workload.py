"""A user's own module on a CUDA device: trees of tensors travel ahead of the step, and the recipe keeps its promise."""

from __future__ import annotations

import subprocess
import sys
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


OUT_OF_RANGE_LATE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))

def make_batch(size, seed):
    ids = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(1, 1)

calls = 0

def loss(model, batch):
    global calls
    calls += 1
    ids, targets = batch
    return nn.functional.cross_entropy(model(ids + (60 if calls > 40 else 0)).flatten(0, 1), targets.flatten())
"""


def test_a_gpu_that_is_lost_under_way_ends_in_three_lines(tmp_path: Path) -> None:
    """Whether Python is told of it or torch's destructors call abort() first: that is a race."""
    (tmp_path / "late.py").write_text(OUT_OF_RANGE_LATE)
    (tmp_path / "recipe.json").write_text('{"rungs": ["no-sync", "loader-workers"], "micro_batch": 4}')
    words = "train late.py:net --steps 100 --cycle 5 --checkpoint-every 5 --recipe recipe.json --out run"
    line = [sys.executable, "-m", "redline", *words.split()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    told = [text for text in done.stderr.splitlines() if text.startswith(("problem:", "why:", "fix:"))]
    assert len(told) == 3, done.stderr
    assert "training late.py:net" in told[0]
    assert "was saved before" in told[1]
    assert "index out of range: CUDA_LAUNCH_BLOCKING=1" in told[2]
