"""The Triton kernels themselves, where there is no GPU: Triton's interpreter runs them in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The interpreter cuts bf16 off instead of rounding: 2^-8 of a number at most, and half of that on average.
BOUNDS = {"bfloat16": 5e-3, "float32": 2e-5}
EXACT = 1e-5  # what is kept in fp32 whatever the tensors are


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch came without Triton")
def test_kernels_are_fp64s_at_odd_sizes_and_extremes() -> None:
    script = Path(__file__).parent / "interpreted_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 40
    wrong = {
        f"{case}: {what}": error
        for case, errors in found.items()
        for what, error in errors.items()
        if error is None or error > bound_of(case, what)
    }
    assert not wrong


def bound_of(case: str, what: str) -> float:
    if what.startswith("bytes") or what == "logits changed":
        return 0.0
    if what == "most":  # e5m2 has two bits behind the point, and rounds the last
        return 0.125
    if what == "each":  # what rounds up to the next power of two, the interpreter halves where its exponent is odd
        return 0.5
    if what in ("losses", "sums", "gain", "bias", "branch"):
        return EXACT
    return BOUNDS["float32" if "float32" in case else "bfloat16"]
