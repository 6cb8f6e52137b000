"""CUDA graphs and growing segments on a real device: what a graph overwrites is not read, and the allocator listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from redline.data.tokens import prepare_tokens
from redline.workloads import resolve_workload

pytestmark = pytest.mark.gpu

# One process per plan, as everywhere: flags and graphs must not leak.
STEPS = """
import json, sys
from pathlib import Path
import torch
from redline.core.plan import Plan
from redline.engine.build import build
from redline.rungs import plan_of
from redline.workloads import resolve_workload

tokens, chunk, *rungs = sys.argv[1:]
training = build(
    resolve_workload("tiny"),
    plan_of(rungs),
    micro_batch=8,
    tokens=Path(tokens),
    device=torch.device("cuda"),
    chunk=int(chunk) or None,
)
losses = [training.step(next(training.batches)) for _ in range(8)]
training.close()
expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
print(json.dumps({"losses": torch.stack(losses).tolist(), "expandable": expandable}))
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    prepare_tokens(resolve_workload("tiny"), path)
    return path


def steps(tokens: Path, chunk: int, *rungs: str) -> dict:
    import json

    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(tokens), str(chunk), *rungs], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("chunk", [0, 4], ids=["whole", "accumulated"])
def test_replayed_steps_learn_as_launched_ones_do(tokens: Path, chunk: int) -> None:
    rungs = ("bf16", "compile", "fused-adamw")
    launched, replayed = steps(tokens, chunk, *rungs), steps(tokens, chunk, *rungs, "cuda-graphs")
    assert replayed["losses"] == pytest.approx(launched["losses"], abs=1e-2)
    assert len(set(replayed["losses"])) == 8  # eight copies of the last one would be a graph's own memory


@pytest.mark.parametrize("grows", [False, True])
def test_segments_grow_when_they_are_asked_to(tokens: Path, grows: bool) -> None:
    assert steps(tokens, 0, *(["expandable-segments"] if grows else []))["expandable"] == grows
