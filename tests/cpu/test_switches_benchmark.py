"""benchmarks/switches.py: what each row changes, what it is compared with, and that a switch is set where it counts."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config as inductor
from rich.console import Console

from redline.core.workload import Workload
from redline.workloads import resolve_workload

RUNGS = ("bf16", "compile", "tied-weights", "tuned-matmuls", "fused-matmuls")


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports: a kernels.py lies there too
        patch.syspath_prepend(str(repository / "benchmarks"))
        import switches
    return switches


class Fake:
    """Each step takes as long as its row says, and a round later a tenth longer for everybody: a card warms up."""

    def __init__(self, order: Any, seconds: float) -> None:
        self.order, self.seconds = order, seconds

    def block(self, steps: int) -> dict[str, Any]:
        self.seconds *= 1.1
        return {"seconds": [self.seconds] * steps, "peak_bytes": 2**30, "loss": 1.0}

    def close(self) -> None: ...


class Broken(Fake):
    def block(self, steps: int) -> dict[str, Any]:
        raise sys.modules["against"].OutError("out of memory")  # there while the fixture `bench` is


def orders_of(bench: Any, *names: str) -> list[Any]:
    made = {"candidate": "redline", "workload": resolve_workload("gpt2"), "device": "cuda", "compiled": True}
    switches = {name: bench.ROWS[name].switches for name in names}
    return [bench.Order(**made, rungs=RUNGS, micro_batch=8, label=name, switches=switches[name]) for name in switches]


def test_a_ratio_is_of_one_round_and_to_the_rows_own_base(bench: Any) -> None:
    orders = orders_of(bench, "recipe", "early-launch", "torch-matmuls", "tma-matmuls")
    seconds = {"recipe-8": 0.10, "early-launch-8": 0.08, "torch-matmuls-8": 0.12, "tma-matmuls-8": 0.15}
    found = bench.Found(orders=orders)
    players = [Fake(order, seconds[order.name]) for order in orders]
    bench.take_turns(found, players, Namespace(rounds=3, block=2))
    rows = json.loads(json.dumps(bench.results(found, orders)))
    assert rows["recipe"]["ratio"] is rows["torch-matmuls"]["ratio"] is None
    assert rows["early-launch"]["ratio"] == pytest.approx(
        {"median": 1.25, "p10": 1.25, "p90": 1.25, "n": 3, "mean": 1.25}
    )
    assert rows["tma-matmuls"]["ratio"]["median"] == pytest.approx(0.8)
    assert rows["recipe"]["tokens_per_second"] == pytest.approx(8 * 1024 / 0.121)
    record = {"workload": "gpt2", "hardware": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "rows": rows}
    console = Console(record=True, width=bench.WIDTH, file=io.StringIO())
    bench.show({**record, "micro_batch": 8}, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)


def test_who_falls_out_keeps_the_others(bench: Any) -> None:
    orders = orders_of(bench, "recipe", "early-launch")
    found = bench.Found(orders=orders)
    broken = Broken(orders[1], 1.0)
    bench.take_turns(found, [Fake(orders[0], 0.1), broken], Namespace(rounds=2, block=2))
    rows = bench.results(found, orders)
    assert rows["recipe"]["step_seconds"]["n"] == 4
    assert (rows["early-launch"]["ratio"], rows["early-launch"]["reason"]) == (None, "out of memory")


def test_rows_bring_what_they_are_compared_with(bench: Any) -> None:
    assert bench.chosen("tma-matmuls") == ["torch-matmuls", "tma-matmuls"]
    assert bench.chosen(None) == list(bench.ROWS)
    assert all(row.base in bench.ROWS for row in bench.ROWS.values())


def test_every_switch_is_one_of_torchs(bench: Any) -> None:
    """Inductor's settings are renamed now and then; a row whose switch is gone is told, not measured."""
    orders = orders_of(bench, *bench.ROWS)
    found = bench.Found(orders=list(orders))
    bench.leave_out_unknown(found)
    assert found.orders == orders
    found.orders = [bench.replace(orders[0], switches={"triton.no_such_thing": True})]
    bench.leave_out_unknown(found)
    assert (found.orders, found.reasons) == ([], {"recipe-8": "this torch has no triton.no_such_thing"})


def test_the_child_sets_it_before_it_builds(
    bench: Any, small: Workload, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    made = {"candidate": "redline", "workload": small, "device": "cpu", "compiled": False, "micro_batch": 2}
    order = bench.Order(**made, rungs=("tied-weights",), switches={"triton.enable_pdl": True})
    contestants = bench.Child.__init__.__globals__["contestants"]
    build = contestants.STEPS["redline"]

    def looking(*words: Any) -> Any:
        seen.append(inductor.triton.enable_pdl)
        return build(*words)

    monkeypatch.setitem(contestants.STEPS, "redline", looking)
    with inductor.patch({"triton.enable_pdl": False}):
        contestants.Runner(order, tokens).close()
    assert seen == [True]


def test_mistakes(bench: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "plain.json").write_text(json.dumps({"rungs": ["tied-weights"], "micro_batch": 2}))
    cases = {
        "--rows early-lunch": "did you mean 'early-launch'",
        "--rounds 0": "is 0",
        "--rows recipe": "does not compile",
    }
    for words, text in cases.items():
        given = ["tiny", "--recipe", str(tmp_path / "plain.json"), "--device", "cpu", *words.split()]
        assert bench.main(given) == 2
        assert text in capsys.readouterr().err


@pytest.mark.long
def test_real_processes(bench: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a minute; what a switch does to a step only a GPU says."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "plain.json").write_text(json.dumps({"rungs": ["compile", "tied-weights"], "micro_batch": 1}))
    words = f"tiny --recipe {tmp_path}/plain.json --rows joined-kernels --rounds 2 --block 2 --at-once 1"
    assert bench.main([*words.split(), "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(rows) == ["recipe", "joined-kernels"]
    assert rows["joined-kernels"]["ratio"]["n"] == 2
