"""Counted operations against arithmetic done by hand and against the published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.flops import executed_flops_per_token, flops_per_token
from redline.rungs import LADDER, plan_of
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape
NAIVE, FLASH, CUDNN = Plan(), replace(Plan(), attention="flash"), replace(Plan(), attention="cudnn")
PADDED = replace(Plan(), vocab_multiple=128)

quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test


@st.composite
def shapes(draw):
    heads = draw(st.integers(1, 32))
    return Shape(
        layers=draw(st.integers(1, 100)),
        heads=heads,
        d_model=heads * draw(st.integers(1, 256)),
        d_ff=draw(st.integers(1, 40_000)),
        vocab=draw(st.integers(1, 300_000)),
        sequence=draw(st.integers(1, 200_000)),
    )


def test_gpt2_by_hand():
    """12 layers of width 768 with a MLP of 3072, 1024 tokens of context, 50257 words; 2 FLOPs per multiply-add."""
    q_k_v_and_projection = 2 * 4 * 768 * 768  # 4,718,592
    mlp = 2 * 2 * 768 * 3072  # 9,437,184
    scores_and_values = 2 * 2 * 1024 * 768  # 3,145,728
    layers = 12 * (q_k_v_and_projection + mlp + scores_and_values)  # 207,618,048
    head = 2 * 768 * 50257  # 77,194,752
    assert (layers, head) == (207_618_048, 77_194_752)
    assert flops_per_token(GPT2) == 3 * (layers + head) == 854_438_400


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt2")])
def test_the_family_by_6n_and_the_attention_square(name):
    """PaLM's count: 6 per weight of the matmuls, and 12 L h s for the square."""
    shape = PRESETS[name].shape
    weights = 12 * shape.layers * shape.d_model**2 + shape.d_model * shape.vocab
    palm = 6 * weights + 12 * shape.layers * shape.d_model * shape.sequence
    assert flops_per_token(shape) == palm


@quick
@given(shapes(), st.integers(1, 64))
def test_megatron_equation_3(shape, B):
    """72 B s L h^2 (1 + s/(6h) + V/(12 L h)) FLOPs an iteration, for d_ff = 4h (arXiv 2104.04473)."""
    s, L, h, V = shape.sequence, shape.layers, shape.d_model, shape.vocab
    published = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    assert flops_per_token(replace(shape, d_ff=4 * h)) * B * s == pytest.approx(published, rel=1e-12)


@quick
@given(shapes())
def test_twice_the_layers_is_twice_all_but_the_head(shape):
    head = 6 * shape.d_model * shape.vocab
    twice = replace(shape, layers=2 * shape.layers)
    assert flops_per_token(twice) - head == 2 * (flops_per_token(shape) - head)


@quick
@given(shapes())
def test_heads_do_not_count(shape):
    assert flops_per_token(replace(shape, heads=1)) == flops_per_token(shape)


# what a plan executes


@quick
@given(shapes())
def test_the_naive_plan_executes_the_models_flops(shape):
    assert executed_flops_per_token(shape, NAIVE) == flops_per_token(shape)


@quick
@given(shapes(), st.integers(1, 512), st.sampled_from([NAIVE, FLASH, CUDNN]))
def test_padding_adds_exactly_its_own_rows(shape, multiple, plan):
    rows = -(-shape.vocab // multiple) * multiple - shape.vocab
    padded = replace(plan, vocab_multiple=multiple)
    added = executed_flops_per_token(shape, padded) - executed_flops_per_token(shape, plan)
    assert 0 <= rows < multiple
    assert added == 3 * 2 * shape.d_model * rows


def test_padding_gpt2_by_hand():
    assert executed_flops_per_token(GPT2, PADDED) - flops_per_token(GPT2) == 3 * 2 * 768 * 47
    assert flops_per_token(GPT2) == 854_438_400  # MFU's count knows no plan


@pytest.mark.parametrize("plan", [FLASH, CUDNN], ids=["flash", "cudnn"])
def test_a_fused_kernel_on_gpt2_by_hand(plan):
    """Half the square forward, 2.5 times that backward: FACTS section 2 gives 807 MFLOP per token."""
    weights = 3 * (12 * (4_718_592 + 9_437_184) + 77_194_752)  # 741,192,192
    attention = 12 * (1 + 2.5) * 3_145_728 / 2  # 66,060,288
    assert executed_flops_per_token(GPT2, plan) == weights + attention == 807_252_480
    assert round(executed_flops_per_token(GPT2, plan) / 1e6) == 807


@quick
@given(shapes())
def test_a_fused_kernel_never_executes_more(shape):
    """7/12 of the naive square: 3.5 halves against 3 wholes."""
    saved = executed_flops_per_token(shape, NAIVE) - executed_flops_per_token(shape, FLASH)
    assert saved == pytest.approx(5 / 12 * 12 * shape.layers * shape.sequence * shape.d_model)
    assert executed_flops_per_token(shape, FLASH) == executed_flops_per_token(shape, CUDNN)


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_only_attention_and_padding_change_what_is_executed(rung):
    changes = executed_flops_per_token(GPT2, plan_of([rung.name])) != flops_per_token(GPT2)
    assert changes == (rung.name in ("flash", "cudnn-attention", "padded-vocab"))
