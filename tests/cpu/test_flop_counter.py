"""Our formulas against torch's own counter, which watches the operators of a real forward and backward go by.

On the meta device nothing is computed, so full sizes cost nothing. The counter sees matmuls alone, as the formulas do.
Its pitfalls are tested too: it never halves causal attention, and sees nothing of SDPA on a CPU. What
engine/flop_counter.py adds to it is held against the same products written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from redline.core.plan import PIECES, Plan
from redline.core.workload import Shape
from redline.engine.flop_counter import FORMULAS, Counter, aten
from redline.kernels.packed_attention import packed_attention, packed_attention_backward
from redline.model.gpt import GPT
from redline.model.loss import head_loss, next_token_loss
from redline.model.tuned import tune_layers
from redline.predict.flops import (
    executed_flops,
    executed_flops_per_token,
    flops_per_token,
    model_flops,
    parameters,
    prefill_flops,
)
from redline.predict.gemms import linear_layers
from redline.workloads import PRESETS

SHAPES = {
    "tiny": PRESETS["tiny"].shape,
    "gpt2": PRESETS["gpt2"].shape,
    "gpt2-xl": PRESETS["gpt2-xl"].shape,
    "one layer, one head": Shape(layers=1, heads=1, d_model=24, d_ff=96, vocab=11, sequence=5),
    "narrow d_ff": Shape(layers=3, heads=4, d_model=64, d_ff=72, vocab=257, sequence=40),
    "long": Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=17, sequence=4096),
}
# gpt2 is the same with fewer of the same layers, whose operators all pass through Python here.
LONG = {"gpt2-xl": pytest.mark.long}
every_shape = pytest.mark.parametrize(
    "shape", [pytest.param(shape, id=name, marks=LONG.get(name, ())) for name, shape in SHAPES.items()]
)
B = 2


def counted_per_token(
    shape: Shape,
    *,
    tied: bool = False,
    vocab_rows: int | None = None,
    checkpointing: str = "none",
    loss: str = "full",
) -> float:
    with torch.device("meta"):
        model = GPT(shape, tied=tied, vocab_rows=vocab_rows, checkpointing=checkpointing)
        tokens = torch.zeros(B, shape.sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        if loss == "full":
            next_token_loss(model(tokens), tokens).backward()
        else:
            head, pieces = model.lm_head.weight, PIECES[loss]
            head_loss(model.features(tokens), head, tokens, vocab=shape.vocab, pieces=pieces).backward()
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
def test_a_flash_kernel_executes_the_causal_part_of_what_torch_counts_for_it(shape: Shape) -> None:
    """torch counts seven full matmuls (two forward, five backward); a causal kernel visits s (s + 1) / 2 of the s x s
    pairs of each."""
    s, q = shape.sequence, (B, shape.heads, shape.sequence, shape.d_model // shape.heads)
    kernel = (sdpa_flop_count(q, q, q) + sdpa_backward_flop_count(q, q, q, q)) * (s + 1) / (2 * s) / (B * s)
    naive = 3 * sdpa_flop_count(q, q, q) / (B * s)
    expected = counted_per_token(shape) + shape.layers * (kernel - naive)
    assert executed_flops_per_token(shape, Plan(attention="flash")) == pytest.approx(expected, rel=1e-12)


# recomputation

small = pytest.mark.parametrize("name", ["tiny", "gpt2", "narrow d_ff"])


@small
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_flops_are_one_more_forward(name: str, checkpointing: str) -> None:
    shape = SHAPES[name]
    with set_checkpoint_early_stop(False):
        counted = counted_per_token(shape, checkpointing=checkpointing)
    assert executed_flops_per_token(shape, Plan(checkpointing=checkpointing)) == counted


@small
def test_torch_stops_before_the_last_product_of_what_it_recomputes(name: str) -> None:
    """A block's last matmul is the MLP's second and attention's is weights·v: nobody asks for their outputs again, so
    torch leaves them out. The convention, as Megatron's, counts the whole forward: HFU is that much too high."""
    shape = SHAPES[name]
    (down,) = (layer for layer in linear_layers(shape, Plan()) if layer.where == "down")
    spared = {"full": 2 * down.inputs * down.outputs * down.count}
    spared["selective"] = executed_flops(shape, Plan()).attention.forward / 2
    for checkpointing, product in spared.items():
        counted = counted_per_token(shape, checkpointing=checkpointing)
        assert executed_flops_per_token(shape, Plan(checkpointing=checkpointing)) == counted + product


@small
@pytest.mark.parametrize("loss", PIECES)
def test_a_fused_loss_computes_the_head_no_more_than_once(name: str, loss: str) -> None:
    shape = SHAPES[name]
    assert executed_flops_per_token(shape, Plan(loss=loss)) == counted_per_token(shape, loss=loss)


# other families, as transformers builds them: random weights, a few kilobytes

SIZES = {"hidden_size": 48, "intermediate_size": 136, "num_hidden_layers": 3, "num_attention_heads": 6}
SIZES |= {"vocab_size": 101, "max_position_embeddings": 64, "use_cache": False}
MODERN = Shape(
    layers=3,
    heads=6,
    d_model=48,
    d_ff=136,
    vocab=101,
    sequence=40,
    gated=True,
    tied=False,
    fused_qkv=False,
    biases=False,
    positions="rope",
    norm="rmsnorm",
)
FAMILIES = {
    "llama, all heads": (transformers.LlamaConfig(**SIZES, num_key_value_heads=6), MODERN),
    "llama, grouped": (transformers.LlamaConfig(**SIZES, num_key_value_heads=2), replace(MODERN, kv_heads=2)),
    "llama, one key head": (transformers.LlamaConfig(**SIZES, num_key_value_heads=1), replace(MODERN, kv_heads=1)),
    "llama, wide heads": (
        transformers.LlamaConfig(**SIZES, num_key_value_heads=3, head_dim=20),
        replace(MODERN, kv_heads=3, head_dim=20),
    ),
    "mistral, window": (
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
        replace(MODERN, kv_heads=2, window=7),
    ),
    "gemma, wide heads, tied": (
        transformers.GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16, pad_token_id=0),
        replace(MODERN, kv_heads=1, head_dim=16, tied=True),
    ),
    "gpt2": (
        transformers.GPT2Config(
            n_embd=48, n_layer=3, n_head=6, n_inner=136, vocab_size=101, n_positions=40, attn_pdrop=0.0, use_cache=False
        ),
        Shape(layers=3, heads=6, d_model=48, d_ff=136, vocab=101, sequence=40),
    ),
}
every_family = pytest.mark.parametrize(("config", "shape"), FAMILIES.values(), ids=FAMILIES)


def counted_family(config: transformers.PretrainedConfig, attention: str, *, train: bool = True) -> tuple[float, int]:
    """FLOPs of B sequences by torch's count, and the model's parameters."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    tokens = torch.randint(0, config.vocab_size, (B, 40))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, use_cache=False).logits
        if train:
            logits.sum().backward()
    return counter.get_total_flops(), sum(parameter.numel() for parameter in model.parameters())


@every_family
def test_families_count_as_torch_does(config: transformers.PretrainedConfig, shape: Shape) -> None:
    """Naive attention multiplies the whole square, masked or windowed: the full convention."""
    flops, numbers = counted_family(config, "eager")
    assert flops_per_token(shape) * B * shape.sequence == flops
    assert parameters(shape).total == numbers


@every_family
def test_prefill_counts_as_torch_does(config: transformers.PretrainedConfig, shape: Shape) -> None:
    flops, _ = counted_family(config, "eager", train=False)
    assert B * prefill_flops(shape, 40, convention="full", all_logits=True) == flops


@pytest.mark.parametrize("name", ["llama, all heads", "gpt2"])
def test_on_a_cpu_torch_sees_nothing_of_sdpa(name: str) -> None:
    """Without its products a count is short by all of attention: never take one from a CPU with SDPA."""
    config, shape = FAMILIES[name]
    flops, _ = counted_family(config, "sdpa")
    assert flops / (B * shape.sequence) == flops_per_token(shape) - model_flops(shape).attention.total


def test_torch_never_halves_causal_attention() -> None:
    counts = []
    for causal in (False, True):
        q = torch.zeros(B, 3, 32, 8, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 4 * B * 3 * 32 * 32 * 8


# what torch's counter lacks: recurrent layers, and operators that it takes for nothing

RECURRENT = {
    "lstm": nn.LSTM(24, 40),
    "lstm, two layers": nn.LSTM(24, 40, num_layers=2),
    "lstm, both directions": nn.LSTM(24, 40, num_layers=2, bidirectional=True),
    "lstm, projected": nn.LSTM(24, 40, num_layers=2, bidirectional=True, proj_size=7),
    "lstm, no biases": nn.LSTM(24, 40, bias=False),
    "gru": nn.GRU(24, 40, num_layers=2, bidirectional=True),
    "rnn": nn.RNN(24, 40, num_layers=2),
}
every_recurrent = pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
STEPS = 12


def states(layer: nn.RNNBase) -> Any:
    """That want a gradient, as a fused kernel computes it in any case."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    made: dict[str, Any] = {"dtype": layer.weight_ih_l0.dtype, "requires_grad": True}
    state = torch.zeros(count, B, layer.proj_size or layer.hidden_size, **made)
    cells = torch.zeros(count, B, layer.hidden_size, **made)
    return (state, cells) if isinstance(layer, nn.LSTM) else state


def recurrent_pass(layer: nn.RNNBase, counter: FlopCounterMode) -> tuple[int, int]:
    """FLOPs of forward and of backward."""
    rows = torch.ones(STEPS, B, 24, dtype=layer.weight_ih_l0.dtype, requires_grad=True)
    with counter:
        out, _ = layer(rows, states(layer))
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops() - forward


def unrolled(layer: nn.RNNBase) -> tuple[int, int]:
    """The layer as torch's own loop over the steps, whose products its counter sees."""
    return recurrent_pass(copy.deepcopy(layer).double(), FlopCounterMode(display=False))  # which oneDNN does not take


@every_recurrent
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers_count_as_their_unrolled_products(layer: nn.RNNBase) -> None:
    counter = Counter()
    assert recurrent_pass(layer, counter) == unrolled(layer)
    assert counter.uncounted == ()


def test_an_lstm_counts_as_by_hand() -> None:
    every_weight = 4 * 40 * (24 + 40) + 4 * 40 * (40 + 40)
    assert recurrent_pass(RECURRENT["lstm, two layers"], Counter())[0] == 2 * STEPS * B * every_weight
    with FlopCounterMode(display=False) as torchs:
        RECURRENT["lstm, two layers"](torch.ones(STEPS, B, 24))
    assert torchs.get_total_flops() == 0  # or the formula can go


@every_recurrent
@pytest.mark.parametrize("packed", [False, True])
def test_cudnns_operator_counts_as_the_unrolled_products(layer: nn.RNNBase, packed: bool) -> None:
    """No GPU is needed for the arithmetic; tests/gpu runs the operator. A packed sequence has no dimension of steps."""
    rows = (STEPS * B, 24) if packed else (STEPS, B, 24)
    weights = [weight.shape for weight in layer._flat_weights]
    found = [FORMULAS[each](rows, weights, 4) for each in (aten._cudnn_rnn, aten._cudnn_rnn_backward)]
    assert tuple(found) == unrolled(layer)


@torch.library.custom_op("redline_test::stranger", mutates_args=())
def stranger(x: torch.Tensor) -> torch.Tensor:
    return x @ x


SQUARE = torch.eye(6) + 0.1
UNCOUNTED = {
    "fft": (lambda: torch.fft.rfft(SQUARE), "aten._fft_r2c"),
    "inverse": (lambda: torch.linalg.inv(SQUARE), "aten.linalg_inv_ex"),
    "solve": (lambda: torch.linalg.solve(SQUARE, SQUARE), "aten._linalg_solve_ex"),
    "bilinear": (lambda: F.bilinear(SQUARE, SQUARE, torch.ones(3, 6, 6)), "aten._trilinear"),
    "distances": (lambda: torch.cdist(SQUARE, SQUARE, p=1.0), "aten._cdist_forward"),
    "somebody's own": (lambda: stranger(SQUARE), "redline_test.stranger"),
}


@pytest.mark.parametrize(("run", "name"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_operators_without_a_formula_are_named(run: Callable[[], object], name: str) -> None:
    with Counter() as counter:
        run()
    assert name in counter.uncounted


def test_operators_that_only_move_and_add_are_not_named() -> None:
    layers = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 3)
    model = nn.Sequential(*layers, nn.Upsample(scale_factor=2.0), nn.Softmax(-1))
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        out = model(torch.randn(2, 5, 16))
        F.embedding(torch.zeros(2, dtype=torch.int64), out.flatten(1)).cumsum(0).sort().values.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.AdamW(model.parameters()).step()
    assert counter.uncounted == ()


PRODUCTS = {
    "mv": (lambda: torch.mv(torch.ones(3, 5), torch.ones(5)), 2 * 3 * 5),
    "addmv_": (lambda: torch.ones(3).addmv_(torch.ones(3, 5), torch.ones(5)), 2 * 3 * 5),
    "addmm_": (lambda: torch.ones(3, 4).addmm_(torch.ones(3, 5), torch.ones(5, 4)), 2 * 3 * 4 * 5),
    "addbmm": (lambda: torch.addbmm(torch.ones(3, 4), torch.ones(7, 3, 5), torch.ones(7, 5, 4)), 2 * 7 * 3 * 4 * 5),
    "baddbmm_": (lambda: torch.ones(7, 3, 4).baddbmm_(torch.ones(7, 3, 5), torch.ones(7, 5, 4)), 2 * 7 * 3 * 4 * 5),
}


@pytest.mark.parametrize(("run", "flops"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_under_other_names_count(run: Callable[[], object], flops: int) -> None:
    with Counter() as counter:
        run()
    assert counter.get_total_flops() == flops


# rows of two groups, 6 and 4: those of a, the inner dimension, or the columns of b
GROUPED = {
    "rows": ((10, 8), (2, 8, 16), 2 * 10 * 8 * 16),
    "inner": ((8, 10), (10, 16), 2 * 8 * 10 * 16),
    "columns": ((2, 8, 16), (16, 10), 2 * 8 * 16 * 10),
    "batched": ((2, 10, 8), (2, 8, 16), 2 * 2 * 10 * 8 * 16),
}


@pytest.mark.parametrize(("a", "b", "flops"), GROUPED.values(), ids=GROUPED)
def test_grouped_products_count_the_work_of_all_groups(a: tuple[int, ...], b: tuple[int, ...], flops: int) -> None:
    assert FORMULAS[aten._grouped_mm](a, b) == flops


def test_our_own_products_count_as_torchs() -> None:
    plain, tuned = nn.Sequential(nn.Linear(24, 40)), nn.Sequential(nn.Linear(24, 40))
    tune_layers(tuned, torch.float32)
    rows = torch.ones(3, 5, 24, requires_grad=True)
    counts = []
    for layer in (tuned, plain):
        with Counter() as counter:
            layer(rows).sum().backward()
        counts.append((counter.get_total_flops(), counter.uncounted))
    assert counts[0] == counts[1] == (3 * 2 * 15 * 24 * 40, ())


def test_packed_attention_counts_the_whole_square() -> None:
    heads, qkv = 3, torch.randn(B, 8, 3 * 24)
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2).requires_grad_() for each in qkv.chunk(3, -1))
    with sdpa_kernel(SDPBackend.MATH), Counter() as plain:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    with Counter() as counter:
        out, stats = packed_attention(qkv, heads)
        packed_attention_backward(torch.ones_like(out), qkv, out, stats, heads)
    assert (counter.get_total_flops(), counter.uncounted) == (plain.get_total_flops(), ())
