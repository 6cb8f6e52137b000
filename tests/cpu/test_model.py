"""Our GPT-2 against transformers': same weights, same numbers. And what a model must be whoever wrote it: causal,
started at ln V, unchanged by padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from redline.core.errors import UserError
from redline.core.workload import Shape
from redline.kernels.cross_entropy import cross_entropy_
from redline.model.attention import ATTENTION, fused_attention, naive_attention
from redline.model.gpt import GELU, GPT, initialise
from redline.model.huggingface import from_huggingface, to_huggingface
from redline.model.loss import head_loss, next_token_loss
from redline.workloads import PRESETS

SHAPE = Shape(layers=2, heads=4, d_model=48, d_ff=144, vocab=257, sequence=32)  # d_ff is three times the width: no luck
PADDED_ROWS = 384
both_heads = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
every_attention = pytest.mark.parametrize("attention", ["naive", "flash"])


def random_model(seed: int = 0, **options: object) -> GPT:
    """Initialised, then every tensor moved: biases of zero and gains of one would hide a mix-up."""
    model = GPT(SHAPE, **options)  # type: ignore[arg-type]
    initialise(model, seed=7)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def their_model(*, tied: bool, shape: Shape = SHAPE) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.sequence,
        n_embd=shape.d_model,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.d_ff,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def some_tokens(*, B: int = 3, T: int = SHAPE.sequence, seed: int = 1) -> torch.Tensor:
    return torch.randint(SHAPE.vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def real(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., : SHAPE.vocab]


# --- against transformers ---------------------------------------------------------------------------------------------


@both_heads
@every_attention
def test_same_weights_give_the_logits_loss_and_gradients_of_transformers(tied: bool, attention: str) -> None:
    ours, theirs = random_model(tied=tied, attention=attention), their_model(tied=tied)
    theirs.load_state_dict(to_huggingface(ours), strict=True)
    tokens = some_tokens(T=SHAPE.sequence + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    our_logits, their_logits = ours(inputs), theirs(inputs).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=0, atol=1e-5)

    our_loss = next_token_loss(our_logits, targets)
    their_loss = F.cross_entropy(their_logits.reshape(-1, SHAPE.vocab), targets.reshape(-1))
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=0)

    our_loss.backward()
    their_loss.backward()
    their_parameters = dict(theirs.named_parameters())
    checked = set()
    for name, parameter in ours.named_parameters():
        their_name = name if name == "lm_head.weight" else f"transformer.{name}"
        expected = their_parameters[their_name].grad
        if name.startswith("h.") and expected.dim() == 2:
            expected = expected.t()  # Conv1D keeps its weights transposed
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text)
        checked.add(their_name)
    assert checked == set(their_parameters)


@both_heads
def test_weights_go_there_and_back_without_losing_a_bit(tied: bool) -> None:
    ours, theirs = random_model(tied=tied), their_model(tied=tied)
    theirs.load_state_dict(to_huggingface(ours), strict=True)
    again = random_model(seed=99, tied=tied)
    from_huggingface(again, theirs.state_dict())
    for (name, one), (_, other) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_weights_saved_without_prefix_or_without_the_tied_head_are_understood() -> None:
    ours, again = random_model(tied=True), random_model(seed=99, tied=True)
    state = {name.removeprefix("transformer."): tensor for name, tensor in to_huggingface(ours).items()}
    del state["lm_head.weight"]
    from_huggingface(again, state)
    assert torch.equal(again(some_tokens()), ours(some_tokens()))


def test_an_untied_model_takes_a_tied_file() -> None:
    ours, untied = random_model(tied=True), random_model(seed=99, tied=False)
    state = to_huggingface(ours)
    del state["lm_head.weight"]
    from_huggingface(untied, state)
    assert torch.equal(untied.lm_head.weight, ours.wte.weight)
    assert torch.equal(untied(some_tokens()), ours(some_tokens()))


def test_an_untied_model_takes_a_tied_file_without_prefix() -> None:
    ours, untied = random_model(tied=True), random_model(seed=99, tied=False)
    state = {name.removeprefix("transformer."): tensor for name, tensor in to_huggingface(ours).items()}
    del state["lm_head.weight"]
    from_huggingface(untied, state)
    assert torch.equal(untied.lm_head.weight, ours.wte.weight)


@both_heads
def test_a_padded_model_exports_the_published_rows_and_the_same_logits(tied: bool) -> None:
    plain, padded = random_model(tied=tied), random_model(seed=5, tied=tied, vocab_rows=PADDED_ROWS)
    from_huggingface(padded, to_huggingface(plain))
    exported = to_huggingface(padded)
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in to_huggingface(plain).items()
    }
    their_model(tied=tied).load_state_dict(exported, strict=True)
    torch.testing.assert_close(real(padded(some_tokens())), plain(some_tokens()), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        next_token_loss(padded(some_tokens()), some_tokens(seed=2)),
        next_token_loss(plain(some_tokens()), some_tokens(seed=2)),
        rtol=1e-6,
        atol=0,
    )
    assert not padded.wte.weight[SHAPE.vocab :].any()
    assert not padded.lm_head.weight[SHAPE.vocab :].any()


def test_weights_of_another_shape_are_refused() -> None:
    wider = GPT(replace(SHAPE, d_ff=160))
    with pytest.raises(UserError, match="another shape") as caught:
        from_huggingface(wider, to_huggingface(random_model()))
    assert "c_fc.weight" in caught.value.problem
    assert "preset" in caught.value.fix


@pytest.mark.parametrize(
    "name", ["transformer.h.1.mlp.c_proj.bias", "transformer.wte.weight", "transformer.ln_f.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:
    state = to_huggingface(random_model())
    del state[name]
    with pytest.raises(UserError) as caught:
        from_huggingface(random_model(seed=3), state)
    assert name in caught.value.problem


# --- padding ----------------------------------------------------------------------------------------------------------


@both_heads
def test_padding_has_no_probability_and_no_gradient(tied: bool) -> None:
    model = random_model(tied=tied, vocab_rows=PADDED_ROWS)  # its padded rows are junk, not zeros
    logits = model(some_tokens())
    assert real(logits).isfinite().all()
    assert not logits.softmax(dim=-1)[..., SHAPE.vocab :].any()  # cut off or -inf: no sampler can draw it
    assert (logits.argmax(dim=-1) < SHAPE.vocab).all()
    next_token_loss(logits, some_tokens(seed=2)).backward()
    for weight in (model.wte.weight, model.lm_head.weight):
        assert weight.shape[0] == PADDED_ROWS
        assert weight.grad is not None
        assert not weight.grad[SHAPE.vocab :].any()
        assert weight.grad[: SHAPE.vocab].any()


@both_heads
def test_what_stands_in_the_padding_does_not_matter(tied: bool) -> None:
    model = random_model(tied=tied, vocab_rows=PADDED_ROWS)
    before = model(some_tokens())
    with torch.no_grad():
        model.lm_head.weight[SHAPE.vocab :] = 1e3
    assert torch.equal(model(some_tokens()), before)


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_initialisation_is_the_published_one() -> None:
    shape = Shape(layers=6, heads=4, d_model=128, d_ff=512, vocab=1000, sequence=128)
    model = GPT(shape, tied=False)
    initialise(model, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 6) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


def test_tensors_do_not_share_their_random_numbers() -> None:
    model = GPT(SHAPE, tied=False)
    initialise(model, seed=1)
    drawn = [parameter.flatten()[:64] for parameter in model.parameters() if parameter.dim() == 2]
    scaled = [values / values.norm() for values in drawn]
    assert all(abs(torch.dot(one, other)) < 0.6 for i, one in enumerate(scaled) for other in scaled[:i])


@pytest.mark.parametrize(
    "options", [{"tied": True}, {"vocab_rows": PADDED_ROWS}, {"tied": True, "vocab_rows": PADDED_ROWS}], ids=str
)
def test_variants_start_from_the_same_weights(options: dict[str, object]) -> None:
    plain, variant = GPT(SHAPE, tied=False), GPT(SHAPE, **{"tied": False, **options})  # type: ignore[arg-type]
    initialise(plain, seed=1)
    initialise(variant, seed=1)
    expected = dict(plain.named_parameters())
    for name, parameter in variant.named_parameters():
        rows = expected[name].shape[0]
        assert torch.equal(parameter[:rows], expected[name]), name
        assert not parameter[rows:].any(), name


def test_the_seed_decides_and_nothing_else_does() -> None:
    one, other = GPT(SHAPE), GPT(SHAPE)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    initialise(one, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    initialise(other, seed=1)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    initialise(other, seed=2)
    assert not torch.equal(one.wte.weight, other.wte.weight)


@both_heads
def test_training_starts_at_ln_v(tied: bool) -> None:
    model = GPT(SHAPE, tied=tied)
    initialise(model, seed=1)
    loss = next_token_loss(model(some_tokens(B=8)), some_tokens(B=8, seed=2))
    assert loss.item() == pytest.approx(SHAPE.ln_vocab, abs=0.1)


@pytest.mark.parametrize(("name", "parameters"), [("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200)])
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[name].shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


# --- attention --------------------------------------------------------------------------------------------------------


@every_attention
@settings(deadline=None, max_examples=20)
@given(place=st.integers(0, SHAPE.sequence - 1), change=st.integers(1, SHAPE.vocab - 1))
def test_no_token_reaches_back(attention: str, place: int, change: int) -> None:
    model = random_model(attention=attention)
    tokens = some_tokens(B=2)
    changed = tokens.clone()
    changed[0, place] = (tokens[0, place] + change) % SHAPE.vocab
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[0, :place], before[0, :place], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-6)  # nor does a sequence reach another
    differs = (after[0] - before[0]).abs().amax(dim=-1)
    assert (differs[place:] > 1e-5).all()  # and it does reach everything after it


@pytest.mark.parametrize(("T", "d_head"), [(1, 8), (7, 8), (32, 12), (130, 16)])
def test_naive_attention_is_sdpa(T: int, d_head: int) -> None:
    q, k, v = torch.randn(3, 2, 3, T, d_head, generator=torch.Generator().manual_seed(T)).requires_grad_().unbind()
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    naive, fused = naive_attention(q, k, v, future), fused_attention(q, k, v, future)
    torch.testing.assert_close(naive, fused, rtol=1e-5, atol=1e-6)
    weights = torch.randn(naive.shape, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        torch.autograd.grad((naive * weights).sum(), (q, k, v)),
        torch.autograd.grad((fused * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_first_place_attends_to_itself_alone() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for attend in ATTENTION.values():
        torch.testing.assert_close(attend(q, k, v, future)[:, :, 0], v[:, :, 0])


@every_attention
def test_shorter_sequences_than_the_context_are_fine(attention: str) -> None:
    model = random_model(attention=attention)
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens[:, :9]), model(tokens)[:, :9], rtol=0, atol=1e-6)


# --- loss -------------------------------------------------------------------------------------------------------------


def test_gelu_through_the_sigmoid_is_gelu() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e6, -0.0, 0.0, 1e6])]).double().requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, slopes = {}, {}
    for name, gelu in GELU.items():
        values[name] = gelu(x)
        (slopes[name],) = torch.autograd.grad((values[name] * weights).sum(), x)
    torch.testing.assert_close(values["sigmoid"], values["tanh"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes["sigmoid"], slopes["tanh"], rtol=1e-12, atol=1e-12)


def test_the_loss_is_fp32_whatever_the_logits_are() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(10).view(2, 5)
    by_hand = -logits.bfloat16().float().log_softmax(-1).gather(-1, targets[..., None]).mean()
    loss = next_token_loss(logits.bfloat16(), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, by_hand)


@pytest.mark.parametrize("pieces", [1, 3, 8])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_the_head_is_the_loss_with_its_gradients(pieces: int, padded: bool) -> None:
    """In fp64, where rounding cannot hide the wrong weight of a piece: 3 pieces of 5 x 13 tokens are not equal."""
    model = random_model(vocab_rows=PADDED_ROWS if padded else None).double()
    tokens, targets = some_tokens(B=5)[:, :13], some_tokens(B=5, seed=2)[:, :13]
    whole = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    wanted = torch.autograd.grad(3 * whole, list(model.parameters()))  # 3: a factor from above, as a loss scale is
    loss = head_loss(model.features(tokens), model.lm_head.weight, targets, vocab=SHAPE.vocab, pieces=pieces)
    found = torch.autograd.grad(3 * loss, list(model.parameters()))
    torch.testing.assert_close(loss.double(), whole, rtol=1e-6, atol=0)  # the loss itself is fp32
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)


def test_logits_become_their_gradient_in_place() -> None:
    logits = torch.randn(7, PADDED_ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(SHAPE.vocab, (7,), generator=torch.Generator().manual_seed(1))
    real_logits = logits[:, : SHAPE.vocab].clone().requires_grad_()
    wanted = F.cross_entropy(real_logits, targets, reduction="none")
    wanted.sum().backward()
    losses = cross_entropy_(logits, targets, SHAPE.vocab)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits[:, : SHAPE.vocab], real_logits.grad, rtol=1e-5, atol=1e-7)
    assert (logits[:, SHAPE.vocab :] == 0).all()


def test_the_operator_keeps_its_promises_to_the_compiler() -> None:
    """Fake shapes, declared mutation: torch's own check of a custom operator."""
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(cross_entropy_, (logits, torch.arange(5), 11))


# --- what is kept for the backward pass -------------------------------------------------------------------------------


def kept_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Of everything autograd saves, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_changes_no_bit_and_keeps_less(checkpointing: str) -> None:
    plain, other = random_model(), random_model(checkpointing=checkpointing)
    other.load_state_dict(plain.state_dict())
    tokens, targets = some_tokens(B=4), some_tokens(B=4, seed=2)
    for model in (plain, other):
        next_token_loss(model(tokens), targets).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    kept = {name: kept_bytes(lambda m=model: m(tokens)) for name, model in (("plain", plain), ("other", other))}
    assert kept["other"] < 0.9 * kept["plain"]


def test_the_loss_of_the_head_keeps_no_logits() -> None:
    model, tokens, targets = random_model(), some_tokens(B=8), some_tokens(B=8, seed=2)
    features = model.features(tokens).detach().requires_grad_()
    full = kept_bytes(lambda: next_token_loss(model.lm_head(features), targets))
    head = kept_bytes(lambda: head_loss(features, model.lm_head.weight, targets, vocab=SHAPE.vocab, pieces=1))
    logits = 4 * tokens.numel() * SHAPE.vocab
    assert full >= logits > head


def test_a_shape_that_is_not_gpt2s_is_not_built() -> None:
    with pytest.raises(UserError, match="kv_heads, gated"):
        GPT(replace(SHAPE, kv_heads=1, gated=True))
