"""Hand-written backward passes against autograd's, in fp64: kernel by kernel in plain torch, and a whole model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from redline.core.workload import Shape
from redline.kernels.gelu_backward import gelu_backward_
from redline.kernels.norm_backward import norm_backward
from redline.kernels.side_by_side import side_by_side
from redline.model import fused as fused_module
from redline.model.fused import PACKED, add_norm, mlp, output
from redline.model.gpt import GPT, Block, initialise
from redline.model.loss import head_loss
from redline.model.tuned import tune_layers

SHAPE = Shape(layers=2, heads=4, d_model=48, d_ff=144, vocab=257, sequence=32)  # d_ff is three times the width: no luck
EPS = 1e-5


def random(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_gelus_gradient_and_its_sums_are_autograds() -> None:
    x, above = 3 * random(13, 7, seed=0), random(13, 7, seed=1)
    x[0, :3] = torch.tensor([-50.0, 0.0, 50.0])  # flat, in the middle, straight
    inputs = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.gelu(inputs, approximate="tanh"), inputs, above)
    sums = gelu_backward_(above, x)
    torch.testing.assert_close(above, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, wanted.sum(dim=0), rtol=1e-12, atol=1e-12)


def test_parts_stand_side_by_side_with_their_sums() -> None:
    parts = [random(9, 10, seed=seed)[:, 2:7] for seed in range(3)]  # rows that do not touch
    joined, sums = side_by_side(*parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    torch.testing.assert_close(sums, torch.cat([part.sum(dim=0) for part in parts]), rtol=1e-12, atol=1e-12)


def test_the_norms_backward_is_autograds_with_every_sum() -> None:
    """The stream is a sum with a biased branch, is normalised and goes on beside the norm."""
    stream, branch = 2 + random(11, 6, seed=0), random(11, 6, seed=1)
    bias, gain, offset = (random(6, seed=seed) for seed in (2, 3, 4))
    above, beside = random(11, 6, seed=5), random(11, 6, seed=6)
    leaves = [tensor.clone().requires_grad_() for tensor in (stream, branch, bias, gain, offset)]
    together = leaves[0] + leaves[1] + leaves[2]
    normal = F.layer_norm(together, (6,), leaves[3], leaves[4], EPS)
    wanted = torch.autograd.grad((together, normal), leaves, (beside, above))
    _, mean, scale = torch.native_layer_norm(together.detach(), (6,), None, None, EPS)
    of_stream, sums = norm_backward(above, together.detach(), beside, gain, mean, scale)
    for found, other in zip((of_stream, of_stream, sums[2], sums[0], sums[1]), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        (
            gelu_backward_,
            lambda: (random(5, 3, seed=0, dtype=torch.float32), random(5, 3, seed=1, dtype=torch.float32)),
        ),
        (side_by_side, lambda: tuple(random(5, 3, seed=seed, dtype=torch.bfloat16) for seed in range(3))),
        (
            norm_backward,
            lambda: (
                *(random(5, 3, seed=seed, dtype=torch.bfloat16) for seed in range(3)),
                *(random(size, seed=3, dtype=torch.float32) for size in (3, (5, 1), (5, 1))),
            ),
        ),
    ],
    ids=["gelu_backward_", "side_by_side", "norm_backward"],
)
def test_operators_keep_their_promises_to_the_compiler(operator: object, inputs: Callable[[], tuple[object]]) -> None:
    """Fake shapes and types, declared mutation: torch's own check of a custom operator."""
    torch.library.opcheck(operator, inputs())  # type: ignore[arg-type]


def random_model(**options: object) -> GPT:
    """Every tensor moved away from its initial value: biases of zero and gains of one would hide a mix-up."""
    model = GPT(SHAPE, **options)  # type: ignore[arg-type]
    initialise(model, seed=7)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(random(*parameter.shape, seed=number, dtype=torch.float32), alpha=0.05)
    return model


def gradients(model: GPT, run: Callable[..., torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(SHAPE.vocab, (2, 3, SHAPE.sequence), generator=generator)
    loss = F.cross_entropy((model if run is None else run)(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("gelu", ["tanh", "sigmoid"])
def test_a_models_gradients_are_autograds(gelu: str, checkpointing: str) -> None:
    options = {"tied": False, "gelu": gelu, "checkpointing": checkpointing}
    wanted = gradients(random_model(**options).double())
    found = gradients(random_model(**options, fused=torch.float64).double())
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert_equal(found[name], gradient, name)


@pytest.mark.parametrize("fused", [False, True])
def test_products_of_ones_own_give_the_same_gradients(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch does them; which of them are asked for what is the model's."""
    asked = []
    for name in ("gelu_product", "gelu_product_backward"):
        ask = getattr(fused_module, name)
        monkeypatch.setattr(fused_module, name, lambda *words, name=name, ask=ask: (asked.append(name), ask(*words))[1])
    wanted = gradients(random_model().double())
    model = random_model(fused=torch.float64)
    tune_layers(model.h, torch.float64, fused=fused)
    found = gradients(model.double())
    both = ["gelu_product"] * SHAPE.layers + ["gelu_product_backward"] * SHAPE.layers
    assert asked == (both if fused else [])
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert_equal(found[name], gradient, name)


@pytest.mark.parametrize("kernels", sorted(PACKED))
def test_attention_that_stays_packed_gives_the_same_gradients(kernels: str) -> None:
    wanted = gradients(random_model().double())
    found = gradients(random_model(fused=torch.float64, attention=f"packed-{kernels}").double())
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert_equal(found[name], gradient, name)


@pytest.mark.parametrize(("products", "small"), [("torch", 3e-5), ("tuned", 3e-5), ("fused", 3e-5), ("fp8-mlp", 1e-2)])
@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_a_small_bias_moves_a_16_bit_stream_by_its_own_size(branch: str, products: str, small: float) -> None:
    """Of sums that lie between two numbers, as one in eight does here, half must go up, whatever the bias is: one that
    was added after the branch was rounded took all of them along, and moved it by four to six times its size (GPT-2 XL
    then left fp32's curve by 0.046 nats)."""
    tokens, width = 4096, 64
    block = Block(replace(SHAPE, d_model=width, d_ff=width), attention="naive", recompute_attention=False, gelu="tanh")
    if products != "torch":
        tune_layers(block, torch.bfloat16, fused=products != "tuned", narrow_mlp=products == "fp8-mlp")
    layer = block.attn.c_proj if branch == "attention" else block.mlp.c_proj
    signs = random(width, seed=0, dtype=torch.float32).sign()
    with torch.no_grad():
        layer.weight.copy_(
            random(width, width, seed=1, dtype=torch.float32) * (0.01 if branch == "attention" else 0.02)
        )
        layer.bias.copy_(small * signs)
    x = random(1, tokens, width, seed=2, dtype=torch.bfloat16)
    stream = (0.75 * signs).to(torch.bfloat16).expand(1, tokens, width).contiguous()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if branch == "attention":
            found, read = output(x, layer), x
        else:
            found = mlp(x, block.mlp.c_fc, block.mlp.gelu, layer, torch.bfloat16)
            read = block.mlp.gelu(block.mlp.c_fc(x))
        together, _ = add_norm(stream, found, layer.bias, block.ln_2, torch.bfloat16)
    weight = layer.weight.to(torch.bfloat16).double()
    unbiased = stream.double() + read.double() @ weight.t()
    moved = ((together.double() - unbiased) * signs).mean().item()
    assert moved == pytest.approx(small, abs=small / 3)  # rounding a quarter of a million numbers leaves 2e-6


def test_weights_in_bf16_get_gradients_in_bf16() -> None:
    model = random_model(fused=torch.float32, attention="flash").to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(model)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    assert len(found) == len(list(model.parameters()))


@pytest.mark.parametrize("fused", [None, False, True], ids=["torch", "tuned", "fused"])
@pytest.mark.parametrize("attention", ["naive", *(f"packed-{kernels}" for kernels in sorted(PACKED))])
def test_the_compiler_sees_one_graph(attention: str, fused: bool | None) -> None:
    """Traced as torch.compile traces it, with the same numbers; what Inductor makes of it is tested on GPUs. In fp64
    no cast changes anything, and torch 2.11 then loses gradients that are cast on their way out of a function."""
    wanted = gradients(random_model().double())
    model = random_model(fused=torch.float64, attention=attention).double()
    if fused is not None:
        tune_layers(model.h, torch.float64, fused=fused)
    torch.compiler.reset()
    found = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    for name, gradient in wanted.items():
        assert_equal(found[name], gradient, name)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("attention", ["packed-cudnn", "packed-flash4"])
def test_without_gradients_nothing_is_planned_for_each_length(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is sampled grows token by token: packed kernels and timed matmuls would be chosen for every length,
    and the packed ones ignore the backends that sampling pins."""

    def refuse(*_: object) -> None:
        pytest.fail("asked for without gradients")

    model = GPT(SHAPE, attention=attention, fused=torch.float32)
    initialise(model, seed=0)
    tune_layers(model.h, torch.float32)
    tokens = torch.arange(6).view(1, 6)
    wanted = model(tokens).detach()
    for name in PACKED:
        monkeypatch.setitem(PACKED, name, (refuse, refuse))
    for name in ("product", "product_and_bias", "product_and_gelu"):
        monkeypatch.setattr(fused_module, name, refuse)
    monkeypatch.setattr("redline.model.tuned.product", refuse)
    monkeypatch.setattr("redline.model.tuned.product_and_bias", refuse)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("pieces", "tuned"), [(1, False), (4, False), (1, True), (4, True)])
def test_the_heads_gradient_does_not_overflow_in_fp16(pieces: int, tuned: bool) -> None:
    """It is a sum over all tokens, before the mean divides it: here 107,000, and fp16 ends at 65,504."""
    features = torch.full((1, 20_000, 4), 8.0, requires_grad=True)
    head, targets = torch.zeros(3, 4, requires_grad=True), torch.ones(1, 20_000, dtype=torch.long)
    loss = head_loss(features, head, targets, vocab=3, pieces=pieces, dtype=torch.float16, tuned=tuned)
    (found,) = torch.autograd.grad(loss, head)
    wanted = 8.0 * torch.tensor([1 / 3, -2 / 3, 1 / 3])
    torch.testing.assert_close(found, wanted.unsqueeze(1).expand(3, 4), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("part", ["head", "layer", "block"])
def test_a_second_derivative_is_refused(part: str) -> None:
    """It would be wrong without a word: what the forward pass saves knows nothing of the graph behind it."""
    x = torch.randn(1, 6, SHAPE.d_model, requires_grad=True)
    if part == "head":
        loss = head_loss(x, torch.randn(257, SHAPE.d_model), torch.arange(6).view(1, 6), vocab=257, pieces=1)
    elif part == "layer":
        layers = torch.nn.Sequential(torch.nn.Linear(SHAPE.d_model, 8))
        tune_layers(layers, torch.float32)
        loss = layers(x).square().sum()
    else:
        block = Block(SHAPE, "naive", recompute_attention=False, gelu="tanh")
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        loss = block.fused(x, None, None, future, torch.float32)[0].square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, x, create_graph=True)
