"""benchmarks/fp8_gelu.py, with a CPU's kernels and no clock: what is compared, and what a failure leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.workload import Shape

SHAPE = Shape(layers=1, heads=2, d_model=64, d_ff=192, vocab=257, sequence=32)


@pytest.fixture
def benchmark(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports
        patch.syspath_prepend(str(repository / "benchmarks"))
        import fp8_gelu

    monkeypatch.setattr(fp8_gelu, "random", lambda *size: torch.randn(*size).bfloat16())
    monkeypatch.setattr(fp8_gelu, "compiled_cast", lambda tensor: tensor)
    monkeypatch.setattr(fp8_gelu, "milliseconds_of", lambda call: (call(), 1.0)[1])
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return fp8_gelu


def test_every_kernel_is_timed_and_held_against_fp64(benchmark: Any) -> None:
    found = benchmark.time_gelu(SHAPE, 64)
    works = {name: told for name, told in found.items() if "8 bits, QuACK" not in name}
    assert all(told["ms"] == 1.0 for told in works.values()), works
    for name, told in works.items():
        if "8 bits" in name:
            assert told["off"] < 5e-3, name
            assert 1e-2 < told["from 16 bits"] < 6e-2, name
        elif "16 bits" in name:
            assert told["from 16 bits"] < 5e-3, name


def test_a_kernel_that_fails_leaves_the_others(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As QuACK's do here, where it is not installed."""
    monkeypatch.setitem(sys.modules, "redline.kernels.narrow_products_quack", None)
    found = benchmark.time_gelu(SHAPE, 64)
    failed = [name for name, told in found.items() if "failed" in told]
    assert len(failed) == 5 * len(benchmark.TILES)
    assert all("8 bits, QuACK" in name and "ms" not in found[name] for name in failed)
    assert len(found) > len(failed) + 6
