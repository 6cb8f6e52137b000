"""One rank is one process: no wrapper, what a way to share undoes stays, equal bits. And benchmarks/ranks.py, which
times that, with a model that takes no time."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.hardware import Hardware
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.engine.build import build_step
from redline.engine.distributed import Ranks
from redline.engine.session import training_plan
from redline.engine.shard import Replicated, Sharded, Shared
from redline.engine.step import TrainStep
from redline.predict.memory import predict_memory
from redline.rungs import plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RUNGS = ("tied-weights", "fused-adamw", "fused-loss")
WORKLOAD = Workload(
    name="one",
    shape=Shape(layers=2, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=2,
    learning_rate=3e-3,
)
H200 = Hardware(kind="cuda", name="NVIDIA H200", memory_bytes=139 * 1024**3)


@pytest.fixture(scope="module")
def benchmark(repository: Path) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("ranks_benchmark", repository / "benchmarks" / "ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def few(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the benchmark sets is gone afterwards
    monkeypatch.setattr(benchmark, "STEPS", 2)
    return benchmark


@pytest.fixture
def one(few: Any) -> Iterator[Ranks]:
    with few.one_rank(CPU) as ranks:
        yield ranks


@pytest.fixture
def setting(benchmark: Any) -> Any:
    return benchmark.Setting(workload=WORKLOAD, micro_batch=2, rungs=RUNGS, device=CPU, rounds=2)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp-keep"])
def test_one_rank_trains_what_one_process_trains_bit_for_bit(one: Ranks, setting: Any, way: str) -> None:
    batch = setting.batch()
    recipe = Recipe(rungs=(*RUNGS, way), micro_batch=2)
    plain = trained(build_step(WORKLOAD, plan_of(RUNGS), device=CPU), batch)
    step = build_step(WORKLOAD, training_plan(recipe, one.layout), device=CPU, ranks=one)
    assert type(step.shared) is Shared
    ours = trained(step, batch)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_what_is_wrapped_trains_the_same_too(one: Ranks, few: Any, setting: Any) -> None:
    batch, found = setting.batch(), {}
    for name, plan in few.ways(RUNGS).items():
        step = build_step(WORKLOAD, plan, device=CPU, ranks=one)
        kind = {"ddp, wrapped": Replicated, "fsdp, wrapped": Sharded}.get(name, Shared)
        assert type(step.shared) is kind, name
        found[name] = trained(step, batch)
    for name, weights in found.items():
        for key, weight in weights.items():
            assert (weight - found["plain"][key]).abs().max() < 1e-6, (name, key)


def trained(step: TrainStep, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(3):
        step(batch)
    whole = {
        name: getattr(weight, "full_tensor", lambda w=weight: w)() for name, weight in step.model.named_parameters()
    }
    return {name: weight.detach().clone() for name, weight in whole.items()}


# --- the benchmark ----------------------------------------------------------------------------------------------------


def test_ways_take_turns_and_are_held_against_plain(few: Any, setting: Any, one: Ranks) -> None:
    kept: list[list[dict[str, Any]]] = []
    rows = few.compare(setting, one, lambda rows: kept.append(list(rows)))
    assert [row["way"] for row in rows] == list(few.ways(RUNGS))
    assert [row["rounds"] for row in kept[0]] == [1] * 5
    assert kept[-1] == rows
    for row in rows:
        assert row["step_seconds"]["n"] == 2 * 2
        assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_seconds"]["median"])
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
        assert len(few.line_of(row)) <= 100
    assert rows[0]["ratio"] == 1


def test_a_ratio_is_of_turns_of_the_same_round(few: Any) -> None:
    """A card that slows down slows both: 3 % more in each round are 3 %."""
    plain = few.Taken(build_seconds=1.0, steps=[1.0, 2.0], turns=[10.0, 20.0, 40.0])
    other = few.Taken(build_seconds=1.0, steps=[1.0, 2.0], turns=[10.3, 20.6, 41.2])
    row = few.figures("ddp, one rank", other, plain, tokens=32)
    assert (row["ratio"], row["ratio_least"], row["ratio_most"]) == pytest.approx((1.03, 1.03, 1.03))
    assert few.figures("x", other, None, tokens=32)["ratio"] is None
    cheap = {**row, "way": "fsdp, one rank", "ratio": 1.004}
    assert few.verdict([row, cheap]) is False
    assert few.verdict([{**row, "ratio": 1.009}, cheap]) is True
    assert few.verdict([row]) is None


def test_what_was_finished_is_in_the_record(
    few: Any, setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the second round, with a way that cannot be built."""
    turns: list[int] = []
    real, building = few.take_turn, few.build_step

    def take_turn(*words: Any) -> Any:
        turns.append(1)
        if len(turns) == 4 + 4 + 2:  # four ways are built, one round of them, and into the next
            raise KeyboardInterrupt
        return real(*words)

    def build(workload: Workload, plan: Any, **more: Any) -> Any:
        if plan.parallel == "fsdp":
            raise RuntimeError("no such collective\nand a trace")
        return building(workload, plan, **more)

    monkeypatch.setattr(few, "take_turn", take_turn)
    monkeypatch.setattr(few, "build_step", build)
    path = tmp_path / "record.json"
    record = few.measure(few.parse(["--json", str(path)]), (H200, {"torch": "2.13"}), setting)
    assert json.loads(path.read_text()) == record
    assert record["finished"] is False
    assert {row["way"]: row.get("rounds") for row in record["rows"]} == {
        **dict.fromkeys(("plain", "ddp, one rank", "fsdp, one rank", "ddp, wrapped"), 1),
        "fsdp, wrapped": None,
    }
    assert record["rows"][-1]["failed"] == "RuntimeError: no such collective"
    assert len(few.line_of(record["rows"][-1])) <= 100
    assert (record["hardware"]["name"], record["versions"], record["limit"]) == ("NVIDIA H200", {"torch": "2.13"}, 0.01)


def test_large_models_take_the_first_recipe_that_is_predicted_to_fit(few: Any) -> None:
    for name, sequence in (("gpt2-xl", 1024), ("gpt-7b", 2048)):
        workload = few.large_workload(name)
        chosen = few.choose_recipes(workload, H200.memory_bytes)
        assert [rungs for rungs, _ in chosen] == list(few.LARGE_RECIPES), "both of them, the faster first"
        assert workload.decoder.sequence == sequence
        assert {size for _, size in chosen} == {8_192 // sequence}
        assert few.describe(name, workload, *chosen[0])["predicted_total_bytes"] < 0.92 * H200.memory_bytes
    C = 4096  # by hand: a block's matrices, biases and norms; tokens and positions; the last norm
    assert few.describe(name, workload, *chosen[0])["parameters"] == 32 * (12 * C**2 + 13 * C) + (50257 + 2048 + 2) * C
    tight = few.choose_recipes(few.large_workload("gpt2-xl"), 30 * 1024**3)
    assert [rungs[-1] for rungs, _ in tight] == ["checkpointing"]
    assert few.choose_recipes(few.large_workload("gpt-7b"), 48 * 1024**3) == []


def test_fsdp_around_one_gpu_holds_whole_tensors_and_casts_of_a_block_at_a_time(few: Any) -> None:
    """By hand: not 16-bit copies of all matrices, but of two blocks and of what lies outside them."""
    workload, rungs = few.large_workload("gpt2-xl"), few.SHARED
    plain = predict_memory(workload.shape, plan_of(rungs), micro_batch=16)
    wrapped = few.large_case(workload, rungs).memory(16)
    assert wrapped.moment == plain.moment == "forward of the loss"
    assert (wrapped.weights, wrapped.optimizer, wrapped.autocast_cache) == (plain.weights, plain.optimizer, 0)
    C, layers, rows = 1600, 48, 50304
    copies = 2 * (layers * 12 * C**2 + rows * C)
    gathered = 2 * (2 * (12 * C**2 + 13 * C) + (rows + 1024 + 2) * C)
    assert plain.autocast_cache == copies
    assert plain.allocated - wrapped.allocated == copies - gathered


def test_a_large_model_is_timed_and_its_peak_held_against_the_prediction(few: Any, setting: Any, one: Ranks) -> None:
    found = few.time_large(setting, H200, one, steps=2)
    described = few.describe("one", WORKLOAD, RUNGS, 2)
    row = {**described, **found, "failed": None}
    assert row["step_seconds"]["n"] == 2
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_seconds"]["median"])
    assert row["loss_last"] < row["loss_first"]
    assert row["mfu"] is not None
    assert row["rungs"] == [*RUNGS, "fsdp"]
    assert len(few.large_line({**row, "peak_bytes": 2**30})) <= 100
    assert "failed: out of memory" in few.large_line({**row, "failed": "out of memory"})


def test_the_next_recipe_is_tried_after_one_that_ran_out(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ask(words: list[str], _: float) -> dict[str, Any]:
        asked.append(words)
        if words[0] == "gpt2-xl" or "checkpointing" in words[1]:
            return {"failed": None, "tokens_per_second": 1.0, "mfu": None, "peak_bytes": None}
        return {"failed": "out of memory"}

    monkeypatch.setattr(few, "ask_child", ask)
    kept: list[int] = []
    rows = few.run_large(few.LARGE, H200, lambda rows: kept.append(len(rows)), 1.0)
    assert [(row["model"], row["rungs"][-2], row["failed"]) for row in rows] == [
        ("gpt2-xl", "sigmoid-gelu", None),
        ("gpt-7b", "sigmoid-gelu", "out of memory"),
        ("gpt-7b", "checkpointing", None),
    ]
    assert kept == [1, 2, 3]
    assert asked[0][2:] == ["8", "cuda"]


@pytest.mark.long
def test_a_child_reports_its_row(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process; a CPU has no kernel for most of the rungs."""
    row = few.ask_child(["tiny", "tied-weights,fused-adamw", "1", "cpu"], 300.0)
    assert row["failed"] is None
    assert row["loss_last"] < row["loss_first"]
    assert few.ask_child(["tiny", "no-such-rung", "1", "cpu"], 300.0)["failed"].startswith("UserError")
