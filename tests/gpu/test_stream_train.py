"""Streamed text on a CUDA device: no update waits for it, and going on is exact though a batch is always ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Shape, Workload
from redline.data.survey import Survey, survey
from redline.data.text import sample_documents
from redline.engine.checkpoint import latest_checkpoint
from redline.engine.session import TrainOrder, train
from redline.engine.train import Trainer

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sample_documents()))
    fields = {"tokenizer": "bytes", "val_fraction": 0.05, "val_tokens": 20_000}
    survey(Survey(sources=(str(folder / "a.jsonl"),), out=folder / "text", **fields))
    return folder / "text"


def order(text: Path, out: Path, *rungs: str, steps: int, cycle: int = 10) -> TrainOrder:
    out.mkdir(exist_ok=True)
    settings = TrainSettings(
        micro_batch=8,
        global_batch=16,
        learning_rate=1e-3,
        budget=Budget(steps=steps),
        schedule_steps=40,
        warmup_steps=5,
        cycle_steps=cycle,
        checkpoint_every=None,
        eval_every=None,
    )
    recipe = Recipe(rungs=rungs, micro_batch=8)
    return TrainOrder(workload=WORKLOAD, recipe=recipe, settings=settings, device="cuda", data=str(text), out=str(out))


def run(asked: TrainOrder) -> list[float]:
    losses: list[float] = []
    train(asked, lambda kind, **fields: losses.extend(fields["losses"]) if kind == "cycle" else None)
    return losses


def test_no_update_waits_for_the_device(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    losses = run(order(text, tmp_path / "run", "tf32", "no-sync", "bf16", "fused-adamw", steps=27, cycle=9))
    assert cycles == [0, 9, 18]
    assert losses[-1] < losses[0] - 1


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_stopping_and_going_on_is_never_having_stopped(text: Path, tmp_path: Path) -> None:
    rungs = ("tf32", "bf16", "fused-adamw")
    whole = run(order(text, tmp_path / "whole", *rungs, steps=14))
    parts = run(order(text, tmp_path / "parts", *rungs, steps=9)) + run(
        order(text, tmp_path / "parts", *rungs, steps=14)
    )
    assert parts == whole
    one, other = (latest_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("whole", "parts"))
    assert one is not None
    assert other is not None
    assert one.state["data"] == other.state["data"]
    theirs = other.tensors()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.tensors().items())
