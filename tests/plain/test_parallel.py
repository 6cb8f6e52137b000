"""Batches over GPUs: products that must hold, and refusals that must name what would work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.workload import Shape
from redline.predict.parallel import Layout, check_layout, layout_for_batch
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape  # 12 heads, 12 layers
GROUPED = Shape(layers=32, heads=32, kv_heads=8, d_model=4096, d_ff=14336, vocab=128256, sequence=8192, gated=True)
quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test
few = st.integers(1, 12)


@quick
@given(few, few, few, few, few)
def test_the_products(dp, tp, pp, micro_batch, accumulation):
    layout = Layout(gpus=dp * tp * pp, tp=tp, pp=pp, micro_batch=micro_batch, accumulation=accumulation)
    assert layout.dp == dp
    assert layout.global_batch == micro_batch * dp * accumulation
    again = layout_for_batch(gpus=layout.gpus, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=layout.global_batch)
    assert again == layout


def test_it_explains_itself_in_one_sentence():
    """384 GPUs as BLOOM's (arXiv 2211.05100): TP 4, PP 12, 2048 sequences in micro batches of 2."""
    layout = layout_for_batch(gpus=384, tp=4, pp=12, micro_batch=2, global_batch=2048)
    assert layout.explain() == (
        "384 GPUs / (TP 4 x PP 12) = DP 8; MBS 2 x DP 8 x GAS 128 = a global batch of 2048 sequences."
    )


def test_gpus_that_cannot_be_cut():
    with pytest.raises(UserError) as error:
        Layout(gpus=10, tp=4, pp=2)
    assert error.value.problem == "10 GPUs cannot be cut into replicas of 4 x 2"
    assert error.value.fix == "use 8 or 16 GPUs, or a TP x PP of 5 or 10"
    with pytest.raises(UserError, match="use 8 GPUs, or a TP x PP of 4$"):
        Layout(gpus=4, tp=8)  # fewer GPUs than one replica takes: zero is not proposed


def test_a_batch_that_is_not_whole_passes():
    with pytest.raises(UserError) as error:
        layout_for_batch(gpus=8, micro_batch=5, global_batch=96)
    assert error.value.problem == "a global batch of 96 is not a number of passes of 40"
    assert error.value.fix == "use a global batch of 80 or 120, or a micro batch of 4 or 6"
    with pytest.raises(UserError, match="use a global batch of 96 or 128$"):
        layout_for_batch(gpus=8, micro_batch=4, global_batch=100)  # 8 replicas do not divide 100 either


@pytest.mark.parametrize(
    ("shape", "cut", "problem", "fix"),
    [
        (GPT2, {"gpus": 16, "tp": 8}, "12 heads cannot be shared by TP 8", "use TP 4"),
        (GPT2, {"gpus": 30, "tp": 5}, "12 heads cannot be shared by TP 5", "use TP 3 or 6"),
        (GROUPED, {"gpus": 64, "tp": 16}, "8 key-value heads cannot be shared by TP 16", "use TP 8"),
        (
            replace(GPT2, d_ff=3070),
            {"gpus": 8, "tp": 4},
            "3070 numbers across the MLP cannot be shared by TP 4",
            "use TP 2",
        ),
        (GPT2, {"gpus": 60, "pp": 5}, "12 layers cannot be shared by PP 5", "use PP 4 or 6"),
        (GPT2, {"gpus": 10, "pp": 5}, "12 layers cannot be shared by PP 5", "use PP 2"),
    ],
)
def test_a_model_that_cannot_be_cut(shape, cut, problem, fix):
    with pytest.raises(UserError) as error:
        check_layout(Layout(**cut), shape)
    assert (error.value.problem, error.value.fix) == (problem, fix)


@pytest.mark.parametrize(("shape", "cut"), [(GPT2, {"tp": 6, "pp": 4}), (GROUPED, {"tp": 8, "pp": 16})])
def test_a_model_that_can(shape, cut):
    check_layout(Layout(gpus=384, **cut), shape)


@quick
@given(few, few, few, st.integers(1, 48), st.integers(1, 24))
def test_what_is_proposed_works(dp, tp, pp, heads, layers):
    """Every TP or PP in the fix of a refusal is one that the same GPUs and the same model accept."""
    shape = Shape(layers=layers, heads=heads, d_model=64 * heads, d_ff=5040, vocab=100, sequence=8)
    layout = Layout(gpus=dp * tp * pp, tp=tp, pp=pp)
    try:
        check_layout(layout, shape)
    except UserError as error:
        _, name, *numbers = error.fix.replace(" or", "").split()
        assert numbers
        for number in map(int, numbers):
            proposed = replace(layout, **{name.lower(): number})
            assume(layers % proposed.pp == 0)  # TP is refused before PP is looked at
            check_layout(proposed, shape)


@pytest.mark.parametrize("name", ["gpus", "tp", "pp", "micro_batch", "accumulation"])
def test_counts_are_counts(name):
    with pytest.raises(UserError, match=f"{name} is 0"):
        Layout(**{"gpus": 1, name: 0})
    with pytest.raises(UserError, match="global_batch is -1"):
        layout_for_batch(gpus=1, micro_batch=1, global_batch=-1)
