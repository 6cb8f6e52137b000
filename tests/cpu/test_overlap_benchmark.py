"""benchmarks/overlap.py: every way runs what it says, and the share that two streams hide is of the sums' own time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports
        patch.syspath_prepend(str(repository / "benchmarks"))
        import overlap
    return overlap


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("in turn", ["matmul", "sum", "matmul", "sum"]),
        ("side by side", ["matmul", "sum", "matmul", "sum"]),
        ("matmuls", ["matmul", "matmul"]),
        ("sums", ["sum", "sum"]),
    ],
)
def test_a_block_runs_pairs_or_one_of_the_two(bench: Any, way: str, calls: list[str]) -> None:
    ran: list[str] = []
    work = (lambda: ran.append("matmul"), lambda: ran.append("sum"))
    assert bench.block(work, way, 2, torch.device("cpu")) > 0
    assert ran == calls


def test_all_ways_take_turns_and_each_comes_first_once(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def noted(work: Any, way: str, count: int, device: torch.device) -> float:
        asked.append((way, count))
        return 0.01

    monkeypatch.setattr(bench, "block", noted)
    rounds = bench.in_rounds((), torch.device("cpu"), rounds=4, seconds=0.5)
    assert len(rounds) == 4, "and one before them, dropped"
    blocks = asked[2:]
    assert {count for _, count in blocks} == {50}
    assert [way for way, _ in blocks[4::4]] == ["side by side", "matmuls", "sums", "in turn"]


def test_the_kernels_are_a_layer_and_a_residual_sum(bench: Any) -> None:
    matmul, total = bench.kernels(6, 4, 16, torch.device("cpu"))
    assert (matmul().shape, total().shape) == ((6, 16), (6, 4))
    assert matmul().dtype is torch.bfloat16
    assert matmul().data_ptr() == matmul().data_ptr(), "nothing is allocated while it is timed"


def test_what_is_hidden_is_a_share_of_the_sums(bench: Any) -> None:
    free = {"in turn": 1.2, "side by side": 1.0, "matmuls": 1.0, "sums": 0.2}
    nothing = free | {"side by side": 1.2}
    assert bench.results([free])["hidden"]["median"] == pytest.approx(1.0)
    assert bench.results([nothing])["hidden"]["median"] == pytest.approx(0.0)
    assert bench.results([free, free, nothing])["hidden"]["median"] == pytest.approx(1.0)


def test_the_record_says_where_it_comes_from(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["tiny", "--micro-batch", "1", "--rounds", "2", "--seconds", "0.001", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert (record["workload"], record["micro_batch"]) == ("tiny", 1)
    assert set(record["seconds"]) == {"in turn", "side by side", "matmuls", "sums"}
    assert "hidden" in err


def test_a_mistake_is_three_lines(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["tiny", "--rounds", "0"]) == 2
    assert capsys.readouterr().err.startswith("problem: ")
