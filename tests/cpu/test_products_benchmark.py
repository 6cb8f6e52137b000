"""benchmarks/products.py: which products a step asks for, and what it would gain by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports
        patch.syspath_prepend(str(repository / "benchmarks"))
        import products
    return products


MS = {"torch": 5.0, "tuned": 3.0, "torch + fp32": 7.0, "tuned fp32": 6.5}


@pytest.mark.parametrize(
    ("layer", "what", "gain"),
    [
        ("qkv", "forward", None),  # it has a bias
        ("qkv", "forward + bias", 24.0),
        ("mlp up", "forward + bias", None),  # and GELU behind it
        ("mlp up", "forward + bias + GELU", 24.0),
        ("mlp down", "forward", 24.0),
        ("mlp down", "forward + bias", None),  # the sum behind it adds the bias
        ("attention out", "of input", 24.0),
        ("attention out", "of weight", 6.0),  # both sides in fp32
        ("head", "forward", 2.0),  # there is one
        ("head", "of weight", 0.5),
    ],
    ids=str,
)
def test_the_gain_is_of_what_a_step_asks_for(bench: Any, layer: str, what: str, gain: float | None) -> None:
    assert bench.gain_ms(layer, what, MS, 12) == gain


def test_the_table_adds_up_and_fits(bench: Any) -> None:
    rows = [
        {"product": "mlp up, forward + bias", "flops": 3e11, "ms": {"torch": 1.0, "tuned": 2.0}, "step_gain_ms": None},
        {"product": "mlp up, of weight", "flops": 3e11, "ms": MS, "step_gain_ms": 6.0},
        {"product": "head, of input", "flops": 5e12, "ms": {"torch": 7.5, "tuned": 8.0}, "step_gain_ms": -0.5},
    ]
    assert bench.total_ms(rows) == 5.5
    table = list(bench.lines(rows))
    assert table[-1].split() == ["a", "step", "would", "gain", "5.500"]
    assert len({len(line) for line in table}) == 1, "columns stand below each other"
    assert len(table[0]) <= 100
    assert table[1].split()[-4:] == ["—", "—", "300", "—"]
