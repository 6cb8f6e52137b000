"""Our formulas against torch's own counter, which watches the operators of a real forward and backward go by.

On the meta device nothing is computed, so full sizes cost nothing. The counter sees matmuls alone, as the formulas do.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.model.gpt import GPT
from redline.model.loss import next_token_loss
from redline.predict.flops import executed_flops_per_token, flops_per_token
from redline.workloads import PRESETS

SHAPES = {
    "tiny": PRESETS["tiny"].shape,
    "gpt2": PRESETS["gpt2"].shape,
    "gpt2-xl": PRESETS["gpt2-xl"].shape,
    "one layer, one head": Shape(layers=1, heads=1, d_model=24, d_ff=96, vocab=11, sequence=5),
    "narrow d_ff": Shape(layers=3, heads=4, d_model=64, d_ff=72, vocab=257, sequence=40),
    "long": Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=17, sequence=4096),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
B = 2


def counted_per_token(shape: Shape, *, tied: bool = False, vocab_rows: int | None = None) -> float:
    with torch.device("meta"):
        model = GPT(shape, tied=tied, vocab_rows=vocab_rows)
        tokens = torch.zeros(B, shape.sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens), tokens).backward()
    return counter.get_total_flops() / (B * shape.sequence)


@every_shape
def test_model_flops_are_what_torch_counts(shape: Shape) -> None:
    assert flops_per_token(shape) == counted_per_token(shape)


@pytest.mark.parametrize("tied", [False, True])
def test_tying_saves_parameters_and_no_flops(tied: bool) -> None:
    shape = SHAPES["tiny"]
    assert flops_per_token(shape) == counted_per_token(shape, tied=tied)


@every_shape
@pytest.mark.parametrize("multiple", [1, 64, 128])
def test_executed_flops_count_the_padding(shape: Shape, multiple: int) -> None:
    plan = Plan(vocab_multiple=multiple)
    counted = counted_per_token(shape, vocab_rows=plan.vocab_rows(shape.vocab))
    assert executed_flops_per_token(shape, plan) == counted


@every_shape
def test_a_flash_kernel_executes_half_of_what_torch_counts_for_it(shape: Shape) -> None:
    """torch counts seven full matmuls (two forward, five backward); a causal kernel visits half of each square."""
    q = (B, shape.heads, shape.sequence, shape.d_model // shape.heads)
    kernel = (sdpa_flop_count(q, q, q) + sdpa_backward_flop_count(q, q, q, q)) / 2 / (B * shape.sequence)
    naive = 3 * sdpa_flop_count(q, q, q) / (B * shape.sequence)
    expected = counted_per_token(shape) + shape.layers * (kernel - naive)
    assert executed_flops_per_token(shape, Plan(attention="flash")) == pytest.approx(expected, rel=1e-12)
