"""One rank is one process: no wrapper, what a way to share undoes stays, equal bits. And benchmarks/ranks.py, which
times that, with a model that takes no time."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from redline.core.hardware import Hardware
from redline.core.recipe import Recipe
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.engine import build
from redline.engine.build import build_step
from redline.engine.distributed import Ranks
from redline.engine.session import training_plan
from redline.engine.shard import Replicated, Sharded, Shared, whole
from redline.engine.step import TrainStep
from redline.predict.memory import predict_memory
from redline.rungs import plan_of
from redline.rungs.parallel import WAYS

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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        spec.loader.exec_module(module)
        yield module
    del sys.modules[spec.name]


@pytest.fixture
def few(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """With turns of two steps, and a model named `small`."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the benchmark sets is gone afterwards
    monkeypatch.setattr(benchmark, "STEPS", 2)
    return benchmark


@pytest.fixture
def small(few: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "small.json").write_text(json.dumps(to_json(WORKLOAD.decoder)))
    monkeypatch.setattr(few, "SHAPES", tmp_path)
    return few.Setting(model="small", micro_batch=2, rungs=RUNGS, device="cpu")


@pytest.fixture
def one(few: Any) -> Iterator[Ranks]:
    with few.one_rank("cpu") as (ranks, _):
        yield ranks


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(257, (2, 2, 16), generator=torch.Generator().manual_seed(3))


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_trains_what_one_process_trains_bit_for_bit(one: Ranks, batch: torch.Tensor, way: str) -> None:
    recipe = Recipe(rungs=(*RUNGS, way), micro_batch=2)
    plain = trained(build_step(WORKLOAD, plan_of(RUNGS), device=CPU), batch)
    step = build_step(WORKLOAD, training_plan(recipe, one.layout), device=CPU, ranks=one)
    assert type(step.shared) is Shared
    ours = trained(step, batch)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_what_is_wrapped_trains_the_same_too(one: Ranks, few: Any, batch: torch.Tensor) -> None:
    found = {}
    for name, plan in few.ways(RUNGS).items():
        step = build_step(WORKLOAD, plan, device=CPU, ranks=one)
        kind = Shared if "wrapped" not in name else Replicated if name.startswith("ddp") else Sharded
        assert type(step.shared) is kind, name
        found[name] = trained(step, batch)
    for name, weights in found.items():
        for key, weight in weights.items():
            assert (weight - found["plain"][key]).abs().max() < 1e-6, (name, key)


def test_a_model_that_is_gathered_as_one_is_compiled_as_one(
    one: Ranks, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all steps and pieces, though FSDP2 takes the weights' memory away after each update: forward and
    loss below its hooks. With what `fsdp` undoes, and matrices in 16 bits."""
    seen: list[list[set[torch.dtype]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append([{one.dtype for one in inputs if one.is_floating_point() and one.dim() == dim} for dim in (1, 2)])
        return graph

    monkeypatch.setattr(
        build, "compile_loss", lambda loss_of, _: torch.compile(loss_of, backend=backend, dynamic=False)
    )
    rungs = (*RUNGS, "bf16", "compile", "bf16-residual", "fused-backward")
    plan = plan_of((*rungs, "fsdp-whole"))
    assert plan == replace(plan_of(rungs), parallel="fsdp-whole"), "nothing is undone"
    step = build_step(WORKLOAD, plan, device=CPU, ranks=one, chunk=1)
    eager = build_step(WORKLOAD, replace(plan_of(rungs), compile=False), device=CPU, chunk=1)
    for either in (step, eager):
        either.compute_gradients(batch)
    for (name, ours), theirs in zip(step.model.named_parameters(), eager.model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (whole(ours.grad) - theirs.grad).norm() < 0.02 * theirs.grad.norm(), name
    step.apply_gradients()
    trained(step, batch)
    assert seen == [[{torch.float32}, {torch.bfloat16}]], "vectors and matrices"


def trained(step: TrainStep, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(3):
        step(batch)
    return {name: whole(weight).detach().clone() for name, weight in step.model.named_parameters()}


# --- the benchmark ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "plain, by blocks", "fsdp-whole, wrapped"])
def test_a_process_takes_a_turn_for_every_order(few: Any, small: Any, way: str) -> None:
    told: list[dict[str, Any]] = []
    few.serve_turns(replace(small, way=way), ["turn\n", "turn\n"], told.append)
    assert [list(row) for row in told] == [["build_seconds"], ["times"], ["times"]]
    assert all(len(row["times"]) == 2 + 1 and min(row["times"]) >= 0 for row in told[1:]), "two steps, a cycle's end"


class Pretended:
    """A seat whose turns take what `pace` says: seconds of a step by way and round."""

    pace: ClassVar[dict[str, list[float]]]

    def __init__(self, setting: Any) -> None:
        self.setting, self.turns, self.closed = setting, 0, False
        all_seats.append(self)

    def answer(self) -> dict[str, Any]:
        if self.setting.way == "fsdp, wrapped":
            raise RuntimeError("RuntimeError: no such collective")
        return {"build_seconds": 3.0}

    def take_turn(self) -> list[float]:
        paces = self.pace.get(self.setting.way, self.pace["plain"])
        if self.turns == len(paces):
            raise KeyboardInterrupt
        self.turns += 1
        return [paces[self.turns - 1]] * 2 + [0.0]

    def close(self) -> None:
        self.closed = True


all_seats: list[Pretended] = []


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    all_seats.clear()
    monkeypatch.setattr(Pretended, "pace", {"plain": [1.0, 2.0, 4.0], "ddp, wrapped": [1.1, 2.2, 4.8]}, raising=False)
    return Pretended


def test_a_ratio_is_of_turns_of_the_same_round(few: Any, small: Any, pretended: type[Pretended]) -> None:
    """A card that slows down slows all: 10 % more in a round are 10 %. One that fails is a row."""
    kept: list[list[dict[str, Any]]] = []
    rows = few.compare(small, 3, lambda rows: kept.append(list(rows)), pretended)
    assert [row["way"] for row in rows] == list(few.ways(RUNGS))
    assert [row.get("rounds") for row in kept[0]] == [1, 1, 1, 1, 1, None, 1, 1]
    assert kept[-1] == rows
    assert [row.get("ratio") for row in rows] == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.1, None, 1.0, 1.0])
    assert (rows[4]["ratio_least"], rows[4]["ratio_most"]) == pytest.approx((1.1, 1.2))
    assert rows[4]["ratios"] == pytest.approx([1.1, 1.1, 1.2])
    assert rows[4]["slowest_step_seconds"] == 4.8
    assert rows[0]["step_seconds"] == {"median": 2.0, "p10": 1.0, "p90": 4.0, "n": 6}
    assert rows[0]["tokens_per_second"] == pytest.approx(2 * 16 / 2.0)
    assert rows[5]["failed"] == "RuntimeError: no such collective"
    assert all(len(few.line_of(row)) <= 100 for row in rows)
    assert all(seat.closed for seat in all_seats)
    assert few.verdict(rows) is True
    assert few.verdict([{**row, "ratio": 1.02} if row["way"] == "fsdp, one rank" else row for row in rows]) is False
    assert few.verdict(rows[:3]) is None


def test_some_of_the_ways_take_turns(few: Any, pretended: type[Pretended]) -> None:
    few.measure(few.parse(["--rounds", "1", "--ways", "fsdp-whole, wrapped", "plain"]), (H200, {}), pretended)
    assert [seat.setting.way for seat in all_seats] == ["plain", "fsdp-whole, wrapped"]


def test_what_was_finished_is_in_the_record(
    few: Any, pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the third round."""
    monkeypatch.setattr(pretended, "pace", {"plain": [1.0, 2.0, 4.0], "ddp, wrapped": [1.1, 2.2]})
    path = tmp_path / "record.json"
    record = few.measure(few.parse(["--json", str(path)]), (H200, {"torch": "2.13"}), pretended)
    assert json.loads(path.read_text()) == record
    assert record["finished"] is False
    assert [row.get("rounds") for row in record["rows"]] == [2, 2, 2, 2, 2, None, 2, 2]
    assert (record["hardware"]["name"], record["versions"], record["limit"]) == ("NVIDIA H200", {"torch": "2.13"}, 0.01)
    assert record["within_limit"] is True
    assert all(seat.closed for seat in all_seats)
    assert few.measure(few.parse(["--rounds", "2"]), (H200, {}), pretended)["finished"] is True


def test_a_way_that_fails_later_keeps_what_it_had_finished(
    few: Any, small: Any, pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pretended.take_turn

    def take_turn(self: Pretended) -> list[float]:
        if self.setting.way == "ddp, wrapped" and self.turns == 2:
            raise RuntimeError("exit code -9")
        return real(self)

    monkeypatch.setattr(pretended, "take_turn", take_turn)
    rows = {row["way"]: row for row in few.compare(small, 3, lambda _: None, pretended)}
    assert (rows["ddp, wrapped"]["rounds"], rows["ddp, wrapped"]["failed"]) == (2, "exit code -9")
    assert rows["ddp, wrapped"]["ratio"] == pytest.approx(1.1)
    assert rows["plain"]["rounds"] == 3


def test_large_models_take_the_first_recipe_that_is_predicted_to_fit(few: Any) -> None:
    for name, sequence, sizes in (("gpt2-xl", 1024, [32, 32]), ("gpt-7b", 2048, [5, 16])):
        workload = few.Setting(model=name, micro_batch=1).workload
        chosen = few.choose_recipes(workload, H200.memory_bytes)
        assert [rungs for rungs, _ in chosen] == list(few.LARGE_RECIPES), "both of them, the faster first"
        assert workload.decoder.sequence == sequence
        assert [size for _, size in chosen] == sizes, "32,768 tokens, or what fits"
        row = few.describe(few.Setting(model=name, micro_batch=chosen[0][1], rungs=chosen[0][0]))
        assert row["predicted_total_bytes"] < 0.92 * H200.memory_bytes
    C = 4096  # by hand: a block's matrices, biases and norms; tokens and positions; the last norm
    assert row["parameters"] == 32 * (12 * C**2 + 13 * C) + (50257 + 2048 + 2) * C
    tight = few.choose_recipes(few.Setting(model="gpt2-xl", micro_batch=1).workload, 30 * 1024**3)
    assert [rungs[-1] for rungs, _ in tight] == ["checkpointing"]
    assert few.choose_recipes(workload, 48 * 1024**3) == []


def test_fsdp_around_one_gpu_holds_whole_tensors_and_casts_of_a_block_at_a_time(few: Any) -> None:
    """By hand: not 16-bit copies of all matrices, but of two blocks and of what lies outside them."""
    workload, rungs = few.Setting(model="gpt2-xl", micro_batch=1).workload, few.SHARED
    plain = predict_memory(workload.shape, plan_of(rungs), micro_batch=16)
    wrapped = few.large_case(workload, rungs).memory(16)
    assert wrapped.moment == plain.moment == "forward of the loss"
    assert (wrapped.weights, wrapped.optimizer, wrapped.autocast_cache) == (plain.weights, plain.optimizer, 0)
    C, layers, rows = 1600, 48, 50304
    copies = 2 * (layers * 12 * C**2 + rows * C)
    gathered = 2 * (2 * (12 * C**2 + 13 * C) + (rows + 1024 + 2) * C)
    assert plain.autocast_cache == copies
    assert plain.allocated - wrapped.allocated == copies - gathered


def test_a_large_model_is_timed_and_its_peak_held_against_the_prediction(few: Any, small: Any, one: Ranks) -> None:
    row = {**few.describe(small), **few.time_large(small, H200, one, torch.device("cpu"), steps=2)}
    assert row["step_seconds"]["n"] == 2
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_seconds"]["median"])
    assert row["loss_last"] < row["loss_first"]
    assert row["mfu"] is not None
    assert (row["rungs"], row["failed"]) == ([*RUNGS, "fsdp"], None)
    assert len(few.large_line({**row, "peak_bytes": 2**30})) <= 100
    assert "failed: out of memory" in few.large_line({**row, "failed": "out of memory"})


def test_the_next_recipe_is_tried_after_one_that_ran_out(few: Any) -> None:
    asked: list[Any] = []

    class Answering(Pretended):
        def answer(self) -> dict[str, Any]:
            asked.append(self.setting)
            if self.setting.model == "gpt2-xl" or "checkpointing" in self.setting.rungs:
                return {"failed": None, "tokens_per_second": 1.0, "mfu": None, "peak_bytes": None}
            raise RuntimeError("out of memory")

    kept: list[int] = []
    rows = few.run_large(few.LARGE, H200, lambda rows: kept.append(len(rows)), Answering)
    assert [(row["model"], row["rungs"][-2], row["failed"]) for row in rows] == [
        ("gpt2-xl", "sigmoid-gelu", None),
        ("gpt-7b", "sigmoid-gelu", "out of memory"),
        ("gpt-7b", "checkpointing", None),
    ]
    assert kept == [1, 2, 3]
    assert (asked[0].micro_batch, asked[0].device, asked[0].way) == (32, "cuda", None)


@pytest.mark.long
def test_real_processes_take_turns_and_tell_what_is_wrong(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = few.Setting(model="tiny", micro_batch=1, rungs=("tied-weights",), device="cpu")
    rows = few.compare(plain, 1, lambda _: None)
    assert [row["failed"] for row in rows] == [None] * 8
    row = few.run_large(["tiny"], Hardware(kind="cpu", name="a CPU", memory_bytes=2**30), lambda _: None)[-1]
    assert row["failed"] is not None, "a CPU has no such kernels"
