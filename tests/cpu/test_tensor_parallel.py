"""Layers that are cut, and models that are cut and copied, are one process: tensor parallel alone, with DDP and with
FSDP2, and hybrid sharding. As in test_ranks.py, one start of real gloo processes runs many cases.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import load_from
from redline.engine.session import TrainOrder, load_model, train
from redline.predict.flops import parameters
from redline.predict.memory import predict_memory
from redline.predict.parallel import Layout as Cut
from redline.rungs import plan_of

HERE = Path(__file__).resolve().parent
STEPS = 4
ALONE = {"ddp", "fsdp", "fsdp-keep", "tensor-parallel"}  # what one process does without
TWO = Layout(ranks=2, tensor=2)
SQUARE = Layout(ranks=4, tensor=2)
HYBRID = Layout(ranks=4, replicas=2)
# (layout, rungs): a global batch of 8 in micro batches of 1, so that every rank adds several up. 257 rows of the
# vocabulary do not divide: ranks differ by one, and padded-vocab's hidden rows lie on the last of them.
CASES = {
    "tp2": (TWO, ("tensor-parallel",)),
    "tp2-tied": (TWO, ("tensor-parallel", "tied-weights", "flash", "padded-vocab", "fused-adamw")),
    "tp2-ddp": (SQUARE, ("tensor-parallel", "ddp", "tied-weights", "checkpointing")),
    "tp2-fsdp": (SQUARE, ("tensor-parallel", "fsdp", "tied-weights", "fused-adamw")),
    "tp2-fsdp-padded": (SQUARE, ("tensor-parallel", "fsdp-keep", "padded-vocab", "foreach-adamw")),
    "hybrid": (HYBRID, ("fsdp", "tied-weights")),
    "tp2-bf16": (TWO, ("tensor-parallel", "bf16")),
    "tp2-fsdp-bf16": (SQUARE, ("tensor-parallel", "fsdp", "bf16")),
}
# What one layout began another goes on with: (begun by, gone on with, rungs).
FURTHER = {
    "dp4-as-tp2-dp2": (Layout(ranks=4), SQUARE, ("ddp", "tied-weights"), ("tensor-parallel", "ddp", "tied-weights")),
    "tp2-fsdp-as-hybrid": (SQUARE, HYBRID, ("tensor-parallel", "fsdp"), ("fsdp",)),
    "hybrid-as-tp2-fsdp": (HYBRID, SQUARE, ("fsdp",), ("tensor-parallel", "fsdp")),
    "one-as-tp2": (None, TWO, (), ("tensor-parallel",)),
    "tp2-fsdp-as-tp2": (SQUARE, TWO, ("tensor-parallel", "fsdp"), ("tensor-parallel",)),
}
WORKLOAD = Workload(
    name="cut",
    shape=Shape(layers=2, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=1,
    learning_rate=3e-3,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Runs:
    folder: Path
    data: Path
    told: dict[int, list[dict[str, Any]]]
    """By number of ranks: what each of them reported."""

    def order(self, name: str, rungs: tuple[str, ...], layout: Layout | None, steps: int = STEPS) -> TrainOrder:
        settings = TrainSettings(
            micro_batch=1,
            global_batch=8,
            learning_rate=3e-3,
            budget=Budget(steps=steps),
            schedule_steps=STEPS,
            warmup_steps=1,
            cycle_steps=3,
            eval_every=2,
            eval_batches=3,
            checkpoint_every=2,
            sample_every=2 if name in ("tp2-tied", "tp2-fsdp") else None,
            keep_last=9,
        )
        return TrainOrder(
            workload=WORKLOAD,
            recipe=Recipe(rungs=rungs, micro_batch=1),
            settings=settings,
            device="cpu",
            data=str(self.data),
            out=str(self.folder / name),
            layout=layout,
        )

    def events(self, name: str, rank: int = 0) -> list[tuple[str, dict[str, Any]]]:
        ranks = next(told for told in self.told.values() if str(self.folder / name) in told[0])
        found: list[tuple[str, dict[str, Any]]] = ranks[rank][str(self.folder / name)]["events"]
        return found


def start(folder: Path, ranks: int, orders: list[TrainOrder], held: list[TrainOrder]) -> list[dict[str, Any]]:
    folder.mkdir()
    cases = {"orders": [to_json(order) for order in orders], "held": [to_json(order) for order in held]}
    (folder / "cases.json").write_text(json.dumps(cases))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [*words, str(HERE / "rank_cases.py"), str(folder)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[:4000]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def runs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    text = folder / "text.jsonl"
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    data = folder / "data"
    prepare(Preparation(sources=(str(text),), out=data, tokenizer="bytes", val_fraction=0.2, processes=1))
    runs = Runs(folder=folder, data=data, told={})
    for count in (4, 2):
        orders = [runs.order(name, rungs, layout) for name, (layout, rungs) in CASES.items() if layout.ranks == count]
        held = [orders[0], orders[1], runs.order("hybrid", *reversed(CASES["hybrid"]))] if count == 4 else orders[:1]
        for name, (begun, gone_on, before, after) in FURTHER.items():
            first = runs.order(f"{name}-begun", before, begun, steps=2)
            if begun is None and count == 2:
                train(first, quiet)
            elif begun is not None and begun.ranks == count:
                orders.append(first)
            if gone_on.ranks == count:
                orders.append(runs.order(name, after, gone_on))
        runs.told[count] = start(folder / f"of-{count}", count, orders, held)
    return runs


@pytest.fixture(scope="module")
def one_process(runs: Runs) -> Callable[[tuple[str, ...]], Path]:
    """one_process(rungs) -> a run directory: the case's own recipe without ranks."""
    made: dict[tuple[str, ...], Path] = {}

    def train_alone(rungs: tuple[str, ...]) -> Path:
        key = tuple(sorted(set(rungs) - ALONE))
        if key not in made:
            order = runs.order(f"alone-{len(made)}", rungs, None)
            train(order, quiet)
            made[key] = Path(order.out)
        return made[key]

    return train_alone


def quiet(*_: object, **__: object) -> None:
    pass


def last_of(run: Path) -> Any:
    return load_from(run / "checkpoints" / f"step-{STEPS:08d}")


def differences(run: Path, reference: Path) -> dict[str, float]:
    """Of every weight and every moment, the largest."""
    ours, theirs = last_of(run).tensors(), last_of(reference).tensors()
    assert set(ours) == set(theirs)
    return {name: (ours[name].float() - theirs[name].float()).abs().max().item() for name in ours}


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("bf16")])
def test_ranks_train_what_one_process_trains(
    runs: Runs, one_process: Callable[[tuple[str, ...]], Path], name: str
) -> None:
    found = differences(runs.folder / name, one_process(CASES[name][1]))
    assert max(found.values()) < 1e-5, found
