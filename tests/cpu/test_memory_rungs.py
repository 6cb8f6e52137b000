"""benchmarks/memory_rungs.py: which rows there are, what waits for room, and both shares of the peak."""

from __future__ import annotations

import io
import json
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.core.hardware import Hardware
from redline.predict.flops import executed_flops_per_token, flops_per_token
from redline.rungs import plan_of
from redline.workloads import resolve_workload

RUNGS = ("bf16", "compile", "cudnn-attention", "tied-weights", "padded-vocab", "fused-loss")
H200 = Hardware(kind="cuda", name="NVIDIA H200", multiprocessors=132, memory_bytes=150 * 10**9)


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports: a kernels.py lies there too
        patch.syspath_prepend(str(repository / "benchmarks"))
        import memory_rungs
    return memory_rungs


def orders_of(bench: Any, rows: dict[str, tuple[str, ...]], *sizes: int) -> list[Any]:
    made = {"candidate": "redline", "workload": resolve_workload("gpt2"), "device": "cuda", "compiled": True}
    return [
        bench.Order(**made, rungs=rungs, micro_batch=size, label=name) for size in sizes for name, rungs in rows.items()
    ]


class Fake:
    """Each step takes as long."""

    def __init__(self, order: Any, seconds: float) -> None:
        self.order, self.seconds = order, seconds

    def block(self, steps: int) -> dict[str, Any]:
        return {"seconds": [self.seconds] * steps, "peak_bytes": 2**27 * self.order.micro_batch, "loss": 1.0}

    def close(self) -> None: ...


def test_each_row_is_the_recipe_with_one_thing_changed(bench: Any) -> None:
    plans = {name: plan_of(rungs) for name, rungs in bench.rows_of(RUNGS).items()}
    told = {name: (plan.loss, plan.checkpointing, plan.attention) for name, plan in plans.items()}
    assert told == {
        "recipe": ("fused", "none", "cudnn"),
        "chunked-loss": ("chunked", "none", "cudnn"),
        "checkpointing": ("fused", "full", "cudnn"),
        "both": ("chunked", "full", "cudnn"),
        "budget": ("fused", "none", "cudnn"),
        "naive-attention": ("fused", "none", "naive"),
        "selective": ("fused", "selective", "naive"),
    }
    assert {name: plan.activation_budget for name, plan in plans.items() if plan.activation_budget < 1} == {
        "budget": 0.5
    }


def test_naive_rows_leave_nothing_of_a_fused_kernel(bench: Any) -> None:
    """The recipe that a Hopper card prefers: what packs q, k and v for a kernel goes with the kernel."""
    more = ("bf16-residual", "sigmoid-gelu", "fused-backward", "flash4-backward", "tuned-matmuls", "fused-matmuls")
    rows = bench.rows_of((*RUNGS, *more))
    for name in ("naive-attention", "selective"):
        plan = plan_of(rows[name])
        assert (plan.attention, plan.packed_attention) == ("naive", "none"), name
    assert all(plan_of(rows[name]).packed_attention == "flash4" for name in ("recipe", "checkpointing", "budget"))


def test_fixed_and_best_with_both_shares(bench: Any) -> None:
    """At 64 checkpointing is slower; at 256, where the recipe does not fit, it wins."""
    rows = {name: rungs for name, rungs in bench.rows_of(RUNGS).items() if name in ("recipe", "checkpointing")}
    orders = orders_of(bench, rows, 256, 64)
    seconds = {"recipe-64": 0.1, "checkpointing-64": 0.125, "checkpointing-256": 0.32}
    found = bench.Found(orders=[one for one in orders if one.name in seconds])
    options = Namespace(at_once=2, block=3)
    bench.look_at_all(found, lambda one: (Fake(one, seconds[one.name]), {}), options)
    found.reasons["recipe-256"] = "not run"
    record = json.loads(json.dumps(bench.results(found, orders, rows, 64, H200)))
    plain, again = record["recipe"], record["checkpointing"]
    assert plain["fixed"] == plain["rebatched"]
    assert plain["sizes"][0]["reason"] == "not run"
    assert (again["fixed"]["micro_batch"], again["rebatched"]["micro_batch"]) == (64, 256)
    assert again["rebatched"]["tokens_per_second"] == pytest.approx(256 * 1024 / 0.32)
    assert again["rebatched"]["peak_bytes"] == 256 * 2**27
    shape = resolve_workload("gpt2").decoder
    for row, name in ((plain, "recipe"), (again, "checkpointing")):
        rate = row["fixed"]["tokens_per_second"]
        assert row["fixed"]["mfu"] == pytest.approx(flops_per_token(shape) * rate / 989.4e12, rel=1e-3)
        executed = executed_flops_per_token(shape, plan_of(rows[name])) * rate / 989.4e12
        assert row["fixed"]["hfu"] == pytest.approx(executed, rel=1e-3)
    assert again["fixed"]["hfu"] > again["fixed"]["mfu"]
    assert len(plain["fixed"]["seconds"]) == 6
    shown = {"workload": "gpt2", "hardware": {"name": H200.name}, "micro_batch": 64, "rows": record}
    console = Console(record=True, width=bench.WIDTH, file=io.StringIO())
    bench.show(shown, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    told = [line.split() for line in lines]
    assert ["recipe", "at", "256:", "not", "run"] in told
    assert [words[:4] for words in told if words[:1] == ["checkpointing"]] == [
        ["checkpointing", "64", "524,288", "45.3"],
        ["checkpointing", "256", "*", "819,200"],
    ]


def test_sizes_come_one_after_the_other_and_each_stays(bench: Any) -> None:
    rows = {name: rungs for name, rungs in bench.rows_of(RUNGS).items() if name in ("recipe", "checkpointing")}
    found = bench.Found(orders=orders_of(bench, rows, 64, 128))
    opened: list[str] = []

    def open_fake(order: Any) -> tuple[Fake, dict[str, Any]]:
        opened.append(order.name)
        return Fake(order, 0.1), {}

    bench.look_at_all(bench.only_at(64, found), open_fake, Namespace(at_once=1, block=3))
    assert opened == ["recipe-64", "checkpointing-64"]
    record = bench.results(found, found.orders, rows, 64, H200)
    for row in record.values():
        fixed, larger = row["sizes"]
        assert (fixed["micro_batch"], fixed["tokens_per_second"]) == (64, pytest.approx(64 * 1024 / 0.1))
        assert (larger["micro_batch"], larger["tokens_per_second"]) == (128, None)


def test_what_cannot_fit_is_not_run(bench: Any) -> None:
    rows = bench.rows_of(RUNGS)
    by_name = {one.name: bench.too_large(one, int(0.9 * 150e9)) for one in orders_of(bench, rows, 64, 512)}
    assert by_name["recipe-64"] is by_name["checkpointing-512"] is None
    assert "by prediction" in by_name["recipe-512"]
    assert "by prediction" in by_name["naive-attention-512"]


def test_whoever_does_not_fit_beside_the_others_waits(bench: Any) -> None:
    room, order, inside = bench.Room(10), [], threading.Event()

    def take(size: int) -> None:
        with room.taken(size):
            order.append(size)
            inside.set()

    with room.taken(6):
        other = threading.Thread(target=take, args=(5,))
        other.start()
        with room.taken(4):  # fits beside it
            assert not inside.wait(0.05)
            order.append(4)
    other.join()
    assert order == [4, 5]
    assert room.free == 10
    refused = []

    def wait() -> None:
        try:
            take(5)
        except bench.OutError as error:
            refused.append(str(error))

    with room.taken(6):
        other = threading.Thread(target=wait)
        other.start()
        room.close()
        other.join()
    assert refused == ["stopped before it began"]


def test_mistakes(bench: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "probe_machine", lambda _: pytest.fail("too late"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "fast.json").write_text(json.dumps({"rungs": list(RUNGS), "micro_batch": 2}))
    for words, text in {"--rows selectiv": "did you mean 'selective'", "--micro-batch 0": "is 0"}.items():
        assert bench.main(["gpt2", "--recipe", str(tmp_path / "fast.json"), *words.split()]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.long
def test_real_processes(bench: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "plain.json").write_text(json.dumps({"rungs": ["tied-weights"], "micro_batch": 1}))
    words = f"tiny --recipe {tmp_path}/plain.json --rows recipe,selective --micro-batch 1 --sizes 2 --block 2"
    assert bench.main([*words.split(), "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["finished"]
    for row in record["rows"].values():
        assert sorted(size["micro_batch"] for size in row["sizes"]) == [1, 2]
        assert all(size["tokens_per_second"] > 0 for size in row["sizes"])
        assert row["fixed"]["mfu"] is None  # a CPU has no peak in the table
