"""Counted operations against arithmetic done by hand and against the published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.flops import (
    CONVENTION,
    CONVENTIONS,
    causal_pairs,
    decode_flops,
    executed_flops,
    executed_flops_per_token,
    flops_per_token,
    megatron_flops,
    model_flops,
    parameters,
    prefill_flops,
    shortcut_tflops,
    six_n,
)
from redline.predict.gemms import attention_gemms, linear_gemms
from redline.rungs import LADDER, plan_of
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape
NAIVE, FLASH, CUDNN = Plan(), replace(Plan(), attention="flash"), replace(Plan(), attention="cudnn")
PADDED = replace(Plan(), vocab_multiple=128)

quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test


# As published, from their config.json files; parameter counts as their authors and Hugging Face print them.
LLAMA_3_8B = Shape(
    layers=32,
    heads=32,
    kv_heads=8,
    d_model=4096,
    d_ff=14336,
    vocab=128256,
    sequence=8192,
    gated=True,
    tied=False,
    fused_qkv=False,
    biases=False,
    positions="rope",
    norm="rmsnorm",
)
MISTRAL_7B = replace(LLAMA_3_8B, vocab=32000, window=4096, sequence=32768)
GEMMA_7B = replace(
    LLAMA_3_8B,
    layers=28,
    heads=16,
    kv_heads=16,
    head_dim=256,
    d_model=3072,
    d_ff=24576,
    vocab=256000,
    tied=True,
)


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


@st.composite
def modern_shapes(draw):
    """Everything a Shape can say, small enough to enumerate pairs of tokens."""
    kv_heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    window, sequence = draw(st.none() | st.integers(1, 60)), draw(st.integers(1, 40))
    return Shape(
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 40)),
        d_model=draw(st.integers(1, 100)),
        d_ff=draw(st.integers(1, 100)),
        vocab=draw(st.integers(1, 500)),
        sequence=sequence,
        max_positions=draw(st.none() | st.integers(sequence, 60)),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        fused_qkv=draw(st.booleans()),
        biases=draw(st.booleans()),
        qkv_biases=draw(st.none() | st.booleans()),
        mlp_biases=draw(st.none() | st.booleans()),
        head_bias=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "rope", "none"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        layer_norms=draw(st.integers(1, 4)),
        qk_norms=draw(st.booleans()),
        window=window,
        windowed_layers=None if window is None else draw(st.none() | st.integers(1, layers)),
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
    """1024 x 1025 / 2 pairs forward, 2.5 times that backward: docs/sources.md 2 gives 807 MFLOP per token."""
    weights = 3 * (12 * (4_718_592 + 9_437_184) + 77_194_752)  # 741,192,192
    attention = 12 * (1 + 2.5) * 4 * 768 * (1024 * 1025 // 2) / 1024  # 66,124,800: 1025 / 1024 of half the square
    assert executed_flops_per_token(GPT2, plan) == weights + attention == 807_316_992
    assert round(executed_flops_per_token(GPT2, plan) / 1e6) == 807


@quick
@given(shapes())
def test_a_fused_kernel_saves_five_twelfths_of_a_long_square(shape):
    """3.5 times s (s + 1) / 2 pairs against 3 times s squared. One token alone is a square: there it costs more."""
    s, per_pair = shape.sequence, 4 * shape.layers * shape.d_model / shape.sequence
    saved = executed_flops_per_token(shape, NAIVE) - executed_flops_per_token(shape, FLASH)
    assert saved == pytest.approx(per_pair * (3 * s * s - 3.5 * s * (s + 1) / 2))
    assert executed_flops_per_token(shape, FLASH) == executed_flops_per_token(shape, CUDNN)


CHANGES_WORK = (
    "flash",
    "cudnn-attention",
    "padded-vocab",
    "selective-checkpointing",
    "checkpointing",
)


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_only_these_rungs_change_what_is_executed(rung):
    changes = executed_flops_per_token(GPT2, plan_of([rung.name])) != flops_per_token(GPT2)
    assert changes == (rung.name in CHANGES_WORK)


# conventions


def test_the_conventions_of_gpt2_as_facts_gives_them():
    """sources.md 2, MFLOP per token at s = 1024. nanoGPT counts 6 per parameter other than positions, so biases and
    norms too: 855. We count matmuls alone: 854."""
    nanogpt = 6 * (parameters(GPT2).total - parameters(GPT2).positions) + 12 * 12 * 768 * 1024
    assert nanogpt == 855_166_464
    assert round(nanogpt / 1e6) == 855
    assert round(flops_per_token(GPT2) / 1e6) == 854
    assert flops_per_token(GPT2, "causal") == 741_192_192 + 12 * 3 * 4 * 768 * 1025 / 2 == 797_870_592
    assert round(flops_per_token(GPT2, "causal") / 1e6) == 798
    assert round(six_n(GPT2) / 1e6) == 747


@pytest.mark.parametrize(("sequence", "percent"), [(1024, 7), (4096, 23), (16384, 55)])
def test_the_gap_between_full_and_causal_grows_with_length(sequence, percent):
    shape = replace(GPT2, sequence=sequence)
    assert round(100 * (flops_per_token(shape) / flops_per_token(shape, "causal") - 1)) == percent


def test_every_convention_names_itself():
    assert flops_per_token(GPT2) == flops_per_token(GPT2, "full")
    assert model_flops(GPT2).convention == CONVENTION == CONVENTIONS["full"]
    assert model_flops(GPT2, "causal").convention == CONVENTIONS["causal"]
    assert executed_flops(GPT2, FLASH).convention == CONVENTIONS["as-executed"]
    assert len(set(CONVENTIONS.values())) == 3


@pytest.mark.parametrize("name", ["half", "as-executed"])
def test_a_convention_that_is_none_lists_those_there_are(name):
    with pytest.raises(UserError, match="known: full, causal"):
        flops_per_token(GPT2, name)


@quick
@given(st.integers(1, 60), st.none() | st.integers(1, 80))
def test_causal_pairs_by_counting_them(sequence, window):
    seen = [(i, j) for i in range(sequence) for j in range(i + 1) if window is None or i - j < window]
    assert causal_pairs(sequence, window) == len(seen)


@quick
@given(modern_shapes())
def test_the_full_count_is_the_sum_of_all_matmuls(shape):
    gemms = (*linear_gemms(shape, Plan(), micro_batch=1), *attention_gemms(shape, micro_batch=1))
    assert flops_per_token(shape) * shape.sequence == pytest.approx(sum(gemm.flops for gemm in gemms), rel=1e-12)


@quick
@given(modern_shapes())
def test_only_layers_with_a_window_are_cheaper_by_it(shape):
    everywhere = replace(shape, window=None, windowed_layers=None)
    assert flops_per_token(shape) == flops_per_token(everywhere)  # the whole square, window or not
    spared = causal_pairs(shape.sequence) - causal_pairs(shape.sequence, shape.window)
    less = 3 * 4 * shape.query_width * spared * shape.layers_with_window / shape.sequence
    causal = flops_per_token(everywhere, "causal")
    assert causal - flops_per_token(shape, "causal") == pytest.approx(less, abs=1e-6 * causal)


def test_grouped_keys_save_only_their_own_projections():
    """Llama 3 8B: 24 of 32 key-value heads fewer, each with a projection for keys and one for values; every query head
    still multiplies with all keys."""
    spared = 3 * 2 * 32 * 4096 * 2 * (32 - 8) * 128
    assert flops_per_token(replace(LLAMA_3_8B, kv_heads=32)) - flops_per_token(LLAMA_3_8B) == spared


def test_llama_by_hand():
    per_layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # q and o, k and v, gate and up and down
    weights = 32 * per_layer + 4096 * 128256
    assert flops_per_token(LLAMA_3_8B) == 6 * weights + 12 * 32 * 4096 * 8192


# passes and recomputation


@quick
@given(modern_shapes(), st.sampled_from(["full", "causal"]))
def test_backward_is_twice_the_forward(shape, convention):
    count = model_flops(shape, convention)
    assert count.backward == 2 * count.forward
    assert count.recomputed == 0
    assert count.total == pytest.approx(3 * count.forward)
    assert count.total == pytest.approx(count.linear.total + count.attention.total + count.head.total)


@quick
@given(modern_shapes(), st.sampled_from([NAIVE, FLASH]))
def test_full_checkpointing_is_one_more_forward_of_the_layers(shape, plan):
    plain, again = executed_flops(shape, plan), executed_flops(shape, replace(plan, checkpointing="full"))
    assert again.recomputed == plain.linear.forward + plain.attention.forward
    assert again.total == pytest.approx(plain.total + plain.forward - plain.head.forward)


@quick
@given(modern_shapes(), st.sampled_from([NAIVE, FLASH]))
def test_selective_checkpointing_is_one_more_attention(shape, plan):
    plain, again = executed_flops(shape, plan), executed_flops(shape, replace(plan, checkpointing="selective"))
    assert again.recomputed == again.attention.recomputed == plain.attention.forward


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_no_loss_computes_the_head_twice(loss):
    """Both compute the logits' gradient as soon as they have them."""
    assert executed_flops(GPT2, replace(FLASH, loss=loss)) == executed_flops(GPT2, FLASH)


# published formulas


@quick
@given(shapes(), st.integers(1, 64))
def test_megatron_with_recomputation_is_a_checkpointed_naive_plan(shape, batch):
    shape = replace(shape, d_ff=4 * shape.d_model)
    sizes = {"batch": batch, "sequence": shape.sequence, "layers": shape.layers}
    sizes |= {"hidden": shape.d_model, "vocab": shape.vocab}
    tokens = batch * shape.sequence
    assert megatron_flops(**sizes) == pytest.approx(flops_per_token(shape) * tokens, rel=1e-12)
    again = executed_flops_per_token(shape, replace(NAIVE, checkpointing="full"))
    assert megatron_flops(**sizes, recompute=True) == pytest.approx(again * tokens, rel=1e-12)


def test_megatron_by_hand():
    """B=2, s=4, L=3, h=8, V=96: 72 x 2 x 4 x 3 x 64 (1 + 4/48 + 96/288), and 96 with V/16 for the recomputation."""
    sizes = {"batch": 2, "sequence": 4, "layers": 3, "hidden": 8, "vocab": 96}
    assert megatron_flops(**sizes) == pytest.approx(110_592 * (1 + 1 / 12 + 1 / 3))
    assert megatron_flops(**sizes, recompute=True) == pytest.approx(147_456 * (1 + 1 / 12 + 1 / 4))


def test_the_shortcut_on_the_example_of_its_source():
    """github.com/stas00/ml-engineering's: 64 GPUs, 52B parameters, 1024 sequences of 2048 tokens in 127 s."""
    run = {"billions": 52, "sequence": 2048, "global_batch": 1024, "seconds": 127, "gpus": 64}
    assert shortcut_tflops(**run, recompute=True) == pytest.approx(52 * 4 * 2 * 2048 * 1024 / (127 * 64 * 1e3))
    assert shortcut_tflops(**run, recompute=True) == pytest.approx(107.33, abs=0.005)
    assert shortcut_tflops(**run, recompute=False) == pytest.approx(107.33 * 3 / 4, abs=0.005)


def test_the_shortcut_reports_a_little_less_than_the_exact_count():
    """It leaves attention out: 10 % for GPT-2 XL at s = 1024, where embeddings and biases give 0.2 % back."""
    xl = PRESETS["gpt2-xl"].shape
    exact = flops_per_token(xl) * 8 * 1024 / 1e12
    short = shortcut_tflops(
        billions=parameters(xl).total / 1e9, sequence=1024, global_batch=8, seconds=1, gpus=1, recompute=False
    )
    assert 0.90 < short / exact < 0.92


# parameters


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (GPT2, 124_439_808),
        (PRESETS["gpt2-medium"].shape, 354_823_168),
        (PRESETS["gpt2-large"].shape, 774_030_080),
        (PRESETS["gpt2-xl"].shape, 1_557_611_200),
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (GEMMA_7B, 8_537_680_896),
    ],
    ids=["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-3-8b", "mistral-7b", "gemma-7b"],
)
def test_parameters_as_published(shape, published):
    assert parameters(shape).total == published


@pytest.mark.parametrize(
    ("layers", "heads", "d_model", "sequence", "published"),
    [
        (24, 16, 2048, 2048, 1_315_950_592),
        (32, 20, 2560, 2048, 2_651_837_440),
        (32, 32, 4096, 2048, 6_658_859_008),
        (32, 32, 4096, 65536, 6_918_905_856),
        (40, 40, 5120, 2048, 12_853_954_560),
        (48, 56, 7168, 2048, 29_975_214_080),
    ],
    ids=["1b", "3b", "7b", "7b-64k", "13b", "30b"],
)
def test_parameters_of_mpt_as_llm_foundry_counts_them(layers, heads, d_model, sequence, published):
    """The NumParams column of mosaicml/llm-foundry, scripts/train/benchmarking/README.md: GPT-2's layout, tied, with a
    vocabulary of 50368."""
    shape = Shape(layers=layers, heads=heads, d_model=d_model, d_ff=4 * d_model, vocab=50368, sequence=sequence)
    assert parameters(shape).total == published


def test_parameters_of_gpt2_by_group():
    count = parameters(GPT2)
    assert (count.embedding, count.positions, count.head) == (50257 * 768, 1024 * 768, 0)
    assert count.attention == 12 * (768 * 2304 + 2304 + 768 * 768 + 768)
    assert count.mlp == 12 * (768 * 3072 + 3072 + 3072 * 768 + 768)
    assert count.norms == 25 * 2 * 768


def test_untying_and_padding_add_their_rows():
    assert parameters(GPT2, tied=False).total - parameters(GPT2).total == 50257 * 768
    padded = parameters(GPT2, False, PADDED)
    assert padded.embedding == padded.head == 50304 * 768
    assert parameters(LLAMA_3_8B, tied=True).head == 0


# inference


def test_prefill_by_the_formula_of_the_source():
    """arXiv 2104.04473: 24 B s h^2 + 4 B s^2 h per layer, by the full square; the head for the last token alone."""
    layers = 12 * (24 * 300 * 768**2 + 4 * 300**2 * 768)
    head = 2 * 768 * 50257
    assert prefill_flops(GPT2, 300, convention="full") == pytest.approx(layers + head)
    assert prefill_flops(GPT2, 300, convention="full", all_logits=True) == pytest.approx(layers + 300 * head)


def test_a_generated_token_by_hand():
    """GPT-2 with 99 tokens cached: every weight of a matmul once, and 100 keys and values in 12 layers."""
    weights = 12 * 12 * 768**2 + 768 * 50257
    assert decode_flops(GPT2, 99) == 2 * weights + 12 * 4 * 768 * 100


def test_norms_biases_and_positions_by_hand():
    """Two layers of width 8 with 4 heads of 3, 2 of keys and values; an MLP of 5; 7 words; 6 of 9 positions in use."""
    plain = Shape(
        layers=2, heads=4, kv_heads=2, head_dim=3, d_model=8, d_ff=5, vocab=7, sequence=6, max_positions=9, biases=False
    )
    base = parameters(plain)
    assert (base.positions, base.norms) == (9 * 8, (2 * 2 + 1) * 2 * 8)
    more = {
        "qkv_biases": ("attention", 2 * (12 + 2 * 6)),
        "mlp_biases": ("mlp", 2 * (5 + 8)),
        "head_bias": ("head", 7),
        "qk_norms": ("norms", 2 * 2 * 2 * 3),  # layers, queries and keys, gain and bias, a head's width
    }
    for name, (group, count) in more.items():
        changed = parameters(replace(plain, **{name: True}))
        assert getattr(changed, group) == getattr(base, group) + count, name
        assert changed.total == base.total + count, name
    assert parameters(replace(plain, layer_norms=4)).total == base.total + 2 * 2 * 2 * 8
    every = parameters(replace(plain, biases=True))
    assert every.total == base.total + 2 * (12 + 2 * 6) + 2 * 8 + 2 * (5 + 8)
    assert parameters(replace(plain, biases=True, qkv_biases=False, mlp_biases=False)).total == base.total + 2 * 8


@quick
@given(modern_shapes(), st.integers(1, 50))
def test_generating_a_text_costs_what_reading_it_does(shape, tokens):
    """Token by token with a cache, or all at once over causal pairs: the same multiplications."""
    generated = sum(decode_flops(shape, context) for context in range(tokens))
    assert prefill_flops(shape, tokens, all_logits=True) == pytest.approx(generated, rel=1e-9)
