"""Ranks with NCCL between them are one process, on as many GPUs as there are here: one, which they share.

`shared/sitecustomize.py` lets them. What they send goes through a socket, so nothing here is about speed; what is
computed, saved, traced, refused and told is what several GPUs would see. The same on a CPU, with more cases:
tests/cpu/test_ranks.py, test_tensor_parallel.py, test_ranks_pipeline.py, test_ranks_measure.py, test_ranks_faults.py.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import load_from
from redline.engine.session import TrainOrder, train

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "tests" / "cpu"
SAME = runpy.run_path(str(CPU / "same_weights.py"))
STEPS = 4
SMALL = {"layers": 4, "heads": 4, "d_model": 128, "d_ff": 256, "vocab": 257, "sequence": 64}
WORKLOAD = Workload(name="shared", shape=Shape(**SMALL), tokenizer="bytes", micro_batch=2, learning_rate=1e-3)
TIED = ("tied-weights", "fused-adamw")
PAIR, STAGES = Layout(ranks=2, tensor=2), Layout(ranks=2, pipeline=2)
SHARED = {"ddp", "fsdp", "fsdp-keep", "fsdp-whole", "tensor-parallel", "pipeline-parallel", "pipeline-gpipe"}
CASES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "ddp": (Layout(ranks=2), ("ddp", *TIED)),
    "ddp-compiled": (Layout(ranks=2), ("ddp", "compile", "checkpointing", *TIED)),
    "fsdp": (Layout(ranks=2), ("fsdp", "checkpointing", *TIED)),
    "fsdp-keep": (Layout(ranks=2), ("fsdp-keep", *TIED)),
    "fsdp-whole": (Layout(ranks=2), ("fsdp-whole", *TIED)),
    "tensor": (PAIR, ("tensor-parallel",)),
    "tensor-padded": (PAIR, ("tensor-parallel", "padded-vocab", *TIED)),
    "1f1b": (STAGES, ("ddp", "pipeline-parallel", *TIED)),
    "gpipe": (STAGES, ("ddp", "pipeline-gpipe")),
    "tensor-fsdp": (Layout(ranks=4, tensor=2), ("tensor-parallel", "fsdp")),
    "hybrid": (Layout(ranks=4, replicas=2), ("fsdp", *TIED)),
    "stages-of-tensor": (
        Layout(ranks=4, tensor=2, pipeline=2),
        ("ddp", "tensor-parallel", "pipeline-parallel", *TIED),
    ),
    "stages-of-fsdp": (Layout(ranks=4, pipeline=2), ("fsdp", "pipeline-parallel", *TIED)),
}
# AdamW makes a step of a gradient's rounding where that is next to nothing: a step is 1e-3.
BOUND = 5e-5


def environment(ranks: int, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parent / "shared"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "SHARED_GPU": str(ranks), "PLANTED_HASTE": "1", **more}


@dataclass(frozen=True)
class Runs:
    folder: Path
    data: Path
    alone: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def order(self, name: str, rungs: tuple[str, ...], layout: Layout | None, steps: int = STEPS) -> TrainOrder:
        settings = TrainSettings(
            micro_batch=1,
            global_batch=8,
            learning_rate=1e-3,
            budget=Budget(steps=steps),
            schedule_steps=STEPS,
            warmup_steps=1,
            cycle_steps=2,
            eval_every=2,
            eval_batches=2,
            checkpoint_every=2,
            keep_last=9,
        )
        return TrainOrder(
            workload=WORKLOAD,
            recipe=Recipe(rungs=rungs, micro_batch=1),
            settings=settings,
            device="cuda",
            data=str(self.data),
            out=str(self.folder / name),
            layout=layout,
        )

    def start(self, orders: list[TrainOrder]) -> None:
        """By ranks, one after the other."""
        layout = orders[0].layout
        assert layout is not None
        place = self.folder / f"start-{Path(orders[0].out).name}"
        place.mkdir()
        (place / "cases.json").write_text(json.dumps({"orders": [to_json(order) for order in orders], "held": []}))
        words = [sys.executable, str(CPU / "rank_cases.py"), str(layout.ranks), str(place)]
        done = subprocess.run(words, env=environment(layout.ranks), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]

    def one_process(self, rungs: tuple[str, ...]) -> Path:
        key = tuple(name for name in rungs if name not in SHARED)
        if key not in self.alone:
            order = self.order(f"alone-{len(self.alone)}", rungs, None)
            train(order, lambda *_, **__: None)
            self.alone[key] = Path(order.out)
        return self.alone[key]


@pytest.fixture(scope="module")
def runs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("shared")
    text = folder / "text.jsonl"
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    prepare(Preparation(sources=(str(text),), out=folder / "data", tokenizer="bytes", val_fraction=0.2, processes=1))
    return Runs(folder=folder, data=folder / "data")


def worst_difference(run: Path, reference: Path) -> float:
    ours, theirs = (load_from(each / "checkpoints" / f"step-{STEPS:08d}").tensors() for each in (run, reference))
    return float(max(SAME["differences"](ours, theirs).values()))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # asked for: both sides are fp32
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_what_one_process_trains(
    runs: Runs, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    cases = {name: case for name, case in CASES.items() if case[0].ranks == ranks}
    runs.start([runs.order(name, rungs, layout) for name, (layout, rungs) in cases.items()])
    apart = {name: worst_difference(runs.folder / name, runs.one_process(case[1])) for name, case in cases.items()}
    record_property("apart", apart)  # --junitxml keeps it
    assert max(apart.values()) < BOUND, apart


def test_one_process_goes_on_from_what_ranks_saved_and_they_from_its(runs: Runs) -> None:
    half = [runs.order(f"half-{name}", CASES[name][1], CASES[name][0], steps=2) for name in ("fsdp", "1f1b")]
    alone = runs.order("one-as-tensor-begun", CASES["tensor"][1], None, steps=2)  # rank_cases.py goes on with -begun
    train(alone, lambda *_, **__: None)
    runs.start([*half, runs.order("one-as-tensor", CASES["tensor"][1], PAIR)])
    for order in half:
        train(replace(order, settings=runs.order("x", (), None).settings, layout=None), lambda *_, **__: None)
        assert worst_difference(Path(order.out), runs.one_process(order.recipe.rungs)) < BOUND, order.out
    assert worst_difference(runs.folder / "one-as-tensor", runs.one_process(CASES["tensor"][1])) < BOUND


@dataclass(frozen=True)
class Command:
    folder: Path

    def __call__(self, name: str, *words: str, ranks: int = 2, **more: str) -> dict[str, Any]:
        done = self.run(name, *words, "--json", ranks=ranks, **more)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run(self, name: str, *words: str, ranks: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
        model = self.folder / "small.json"
        model.write_text(json.dumps(SMALL))
        common = [sys.executable, "-m", "redline", name, str(model), "--gpus", str(ranks), "--device", "cuda"]
        return subprocess.run(
            [*common, "--out", str(self.folder / "run"), *words],
            env=environment(ranks, XDG_CACHE_HOME=str(self.folder / "cache"), **more),
            capture_output=True,
            text=True,
            timeout=280,
        )


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.mark.parametrize("layout", [("--tensor", "1"), ("--tensor", "2")], ids=["data", "tensor"])
def test_a_ladder_of_ranks_is_held_against_one_process(command: Command, layout: tuple[str, ...]) -> None:
    rungs = "bf16,fsdp" if layout[1] == "1" else "bf16,flash"  # a row is half a minute and more
    document = command("ladder", *layout, "--rungs", rungs, "--micro-batch", "2", "--keep", "all", "--check-steps", "6")
    rows = {row["rung"]: row for row in document["rows"]}
    assert list(rows)[1:] == rungs.split(",")
    for row in rows.values():
        assert (row["status"], row["equivalence"]["verdict"]) == ("ok", "rounding"), row
        assert 0 < row["sharing"]["exposed_seconds"] <= row["sharing"]["communication_seconds"]
    assert document["hardware"]["ranks"] == 2


def test_a_profile_of_four_tells_the_communication_of_each_group(command: Command) -> None:
    document = command("profile", "--tensor", "2", "--rungs", "bf16,flash", "--micro-batch", "2", ranks=4)
    assert document["recipe"]["rungs"] == ["bf16", "flash", "tensor-parallel", "ddp"]
    seconds = {each["group"]: each["seconds"] for each in document["groups"]}
    assert sum(seconds.values()) == pytest.approx(document["step_seconds"]["median"])
    assert seconds["communication"] > 0
    sharing = document["sharing"]
    assert set(sharing["by_group"]) == {"tensor", "data"}
    assert all(0 < each <= sharing["communication_seconds"] for each in sharing["by_group"].values())
    assert sum(sharing["by_group"].values()) >= 0.99 * sharing["communication_seconds"]
    assert len(sharing["compute_seconds"]) == 4
    assert {each["group"] for each in document["kernels"] if "nccl" in each["name"].lower()} == {"communication"}
    assert document["memory"]["peak_bytes"] > 0


def test_tune_finds_a_recipe_that_ranks_train(command: Command) -> None:
    words = ("--rungs", "bf16,fused-adamw,fsdp", "--minutes", "2", "--check-steps", "6", "--global-batch", "8")
    best = command("tune", *words)["best"]
    assert best["verdict"] in ("same", "rounding")
    assert {"ddp", "fsdp"} & set(best["rungs"])
    recipe = str(command.folder / "run" / "best.json")
    done = command.run("train", "--recipe", recipe, "--global-batch", "8", "--steps", "2", "--out", f"{recipe}-trained")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("memory", "rank 1: out of memory: planted"),
        ("hang", "rank 1 is in hang, sitecustomize.py"),
    ],
)
def test_what_one_rank_meets_is_the_row_of_all_and_the_ladder_goes_on(command: Command, fault: str, text: str) -> None:
    more = ("--timeout", "60") if fault == "hang" else ()
    words = ("--rungs", "bf16,flash,fused-adamw", "--micro-batch", "2", "--check-steps", "4", "--keep", "all", *more)
    first, bf16, failed, last = command("ladder", *words, PLANTED_FAULT=fault)["rows"]
    for row in (first, bf16):
        assert (row["status"], row["equivalence"]["verdict"]) == ("ok", "rounding")
    assert (failed["rung"], failed["status"]) == ("flash", "failed")
    assert text in failed["reason"]
    assert (last["recipe"], last["status"]) == (["ddp", "bf16", "fused-adamw"], "ok")


@pytest.mark.parametrize("fault", ["kill", "hang", "memory"])
def test_training_goes_on_from_its_checkpoint_after_a_rank_is_lost(runs: Runs, tmp_path: Path, fault: str) -> None:
    """In the midst of NCCL's collectives, under torchrun: it stops, and starts again by itself."""
    (tmp_path / "recipe.json").write_text(json.dumps(to_json(Recipe(rungs=("fsdp",), micro_batch=1))))
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [str(CPU / "rank_fault.py"), fault, "5", str(tmp_path / "flag")]
    words = ["train", str(tmp_path / "small.json"), "--recipe", str(tmp_path / "recipe.json"), "--data", str(runs.data)]
    words += ["--device", "cuda", "--steps", "8", "--global-batch", "4", "--checkpoint-every", "2", "--cycle", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *agent, *script, *words, "--rank-timeout", "45", "--out", str(tmp_path / "run")],
        env=environment(2),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (note,) = [line["text"] for line in metrics if "started all ranks again" in line.get("text", "")]
    said = {
        "kill": "rank 1 ended without saying why (killed, or its machine is gone)",
        "hang": "no rank has made progress for 45 s, at step 5, in the step: rank 1 is in hang, rank_fault.py",
        "memory": "rank 1 failed: out of memory with micro batches of 1 sequence",
    }
    assert note.startswith(f"torchrun has started all ranks again: {said[fault]}"), note
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").exists()
