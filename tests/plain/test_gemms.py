"""The list of matmuls: sizes by hand, and what must hold for every shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.gemms import DIRECTIONS, Gemm, attention_gemms, linear_gemms, linear_layers
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape
GROUPED = Shape(
    layers=3,
    heads=8,
    kv_heads=2,
    head_dim=48,
    d_model=128,
    d_ff=352,
    vocab=1000,
    sequence=64,
    gated=True,
    fused_qkv=False,
)


def sizes(gemms, where):
    return {gemm.direction: (gemm.m, gemm.n, gemm.k) for gemm in gemms if gemm.where == where}


def test_gpt2_by_hand():
    gemms = linear_gemms(GPT2, Plan(vocab_multiple=128), micro_batch=16)
    assert sizes(gemms, "qkv") == {
        "forward": (16384, 2304, 768),
        "dgrad": (16384, 768, 2304),
        "wgrad": (2304, 768, 16384),
    }
    assert sizes(gemms, "down")["forward"] == (16384, 768, 3072)
    assert sizes(gemms, "head")["wgrad"] == (50304, 768, 16384)
    assert {gemm.where: gemm.count for gemm in gemms} == {"qkv": 12, "proj": 12, "up": 12, "down": 12, "head": 1}


def test_grouped_gated_and_wide_heads_by_hand():
    layers = {layer.where: (layer.inputs, layer.outputs, layer.count) for layer in linear_layers(GROUPED, Plan())}
    assert layers == {
        "q": (128, 384, 3),
        "kv": (128, 96, 6),  # keys and values of each layer
        "proj": (384, 128, 3),
        "up": (128, 352, 6),  # gate and up
        "down": (352, 128, 3),
        "head": (128, 1000, 1),
    }


def test_a_multiply_add_is_two():
    assert Gemm(where="up", direction="forward", m=2, n=3, k=5, batch=7, count=11).flops == 2 * 2 * 3 * 5 * 7 * 11


@pytest.mark.parametrize("shape", [GPT2, GROUPED], ids=["gpt2", "grouped"])
def test_each_pass_is_the_same_work(shape):
    """Forward, input gradient and weight gradient of a layer multiply the same three sizes."""
    work = [
        sum(gemm.flops for gemm in linear_gemms(shape, Plan(), micro_batch=2) if gemm.direction == direction)
        for direction in DIRECTIONS
    ]
    assert work[0] == work[1] == work[2]


@pytest.mark.parametrize("shape", [GPT2, GROUPED], ids=["gpt2", "grouped"])
def test_naive_attention_is_two_products_forward_and_four_backward(shape):
    gemms = attention_gemms(shape, micro_batch=5)
    each = 2 * shape.sequence**2 * shape.head_width * 5 * shape.heads * shape.layers
    assert [gemm.flops for gemm in gemms] == [each] * 6
    assert [gemm.direction == "forward" for gemm in gemms].count(True) == 2


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_share_the_work(tp):
    shape = replace(GPT2, vocab=50304)
    whole = sum(gemm.flops for gemm in linear_gemms(shape, Plan(), micro_batch=1))
    assert tp * sum(gemm.flops for gemm in linear_gemms(shape, Plan(), micro_batch=1, tp=tp)) == whole
    attention = sum(gemm.flops for gemm in attention_gemms(shape, micro_batch=1))
    assert tp * sum(gemm.flops for gemm in attention_gemms(shape, micro_batch=1, tp=tp)) == attention
