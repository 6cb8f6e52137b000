"""Training on a CUDA device: no update waits for it, and a deterministic run goes on bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.data.text import sample_documents
from redline.engine.checkpoint import latest_checkpoint
from redline.engine.session import TrainOrder, train
from redline.engine.train import Trainer
from redline.kernels import flash4_attention

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)
FAST = (
    "tf32",
    "no-sync",
    "bf16",
    "flash",
    "padded-vocab",
    "tied-weights",
    "fused-adamw",
    "loader-workers",
    "fused-loss",
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sample_documents()))
    prepare(
        Preparation(sources=(str(folder / "text.jsonl"),), out=folder / "data", tokenizer="bytes", val_fraction=0.05)
    )
    return folder / "data"


def order(shards: Path, out: Path, *rungs: str, steps: int, **changes: Any) -> TrainOrder:
    out.mkdir(exist_ok=True)
    settings = TrainSettings(
        micro_batch=8,
        global_batch=16,
        learning_rate=1e-3,
        budget=Budget(steps=steps),
        schedule_steps=40,
        warmup_steps=5,
        checkpoint_every=None,
        eval_every=None,
    )
    return TrainOrder(
        workload=WORKLOAD,
        recipe=Recipe(rungs=rungs, micro_batch=8),
        settings=replace(settings, **changes),
        device="cuda",
        data=str(shards),
        out=str(out),
    )


def run(asked: TrainOrder) -> list[float]:
    losses: list[float] = []
    train(asked, lambda kind, **fields: losses.extend(fields["losses"]) if kind == "cycle" else None)
    return losses


def test_no_update_waits_for_the_device(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cycle may: it allocates and loads kernels. From then on a synchronisation is an error."""
    real, cycles = Trainer._queue_updates, []

    def watched(self: Trainer, *words: Any) -> Any:
        cycles.append(self.progress.updates)
        torch.cuda.set_sync_debug_mode("error" if len(cycles) > 1 else "default")
        try:
            return real(self, *words)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_queue_updates", watched)
    losses = run(order(shards, tmp_path / "run", *FAST, steps=27, cycle_steps=9))
    assert cycles == [0, 9, 18]
    assert losses[-1] < losses[0] - 1


@pytest.fixture
def switched_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """--deterministic is for the process; cuBLAS reads its variable before CUDA starts, so it is set here already."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("switched_back")
def test_stopping_and_going_on_is_never_having_stopped(shards: Path, tmp_path: Path) -> None:
    rungs = ("tf32", "bf16", "padded-vocab", "tied-weights", "fused-adamw")
    whole, first, rest = (
        run(order(shards, tmp_path / name, *rungs, steps=steps, deterministic=True))
        for name, steps in (("whole", 14), ("parts", 9), ("parts", 14))
    )
    parts = first + rest
    assert parts == whole
    one, other = (latest_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("whole", "parts"))
    assert one is not None
    assert other is not None
    theirs = other.tensors()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("more", [(), ("tuned-matmuls", "flash4-backward")], ids=["pinned", "packed"])
def test_validation_samples_and_checkpoints_between_cycles_with_kernels_for_the_step(
    more: tuple[str, ...], shards: Path, tmp_path: Path
) -> None:
    """Samples begin with one token, which the step's own attention kernel does not take, and grow through lengths for
    which nothing should be planned or timed."""
    if "flash4-backward" in more and not flash4_attention.is_there():
        pytest.skip("flash-attn-4 is not installed")
    told: list[tuple[str, int]] = []

    def note(kind: str, **fields: Any) -> None:
        if kind in ("validation", "sample", "checkpoint"):
            told.append((kind, fields["updates"]))

    rungs = tuple("cudnn-attention" if rung == "flash" else rung for rung in FAST)
    every = {"eval_every": 4, "sample_every": 4, "checkpoint_every": 4, "cycle_steps": 4}
    train(order(shards, tmp_path / "run", *rungs, "bf16-residual", "fused-backward", *more, steps=8, **every), note)
    assert sorted(told) == [(kind, updates) for kind in ("checkpoint", "sample", "validation") for updates in (4, 8)]
