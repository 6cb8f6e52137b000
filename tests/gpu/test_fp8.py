"""8-bit products on a device with fp8 tensor cores, against fp64: kernels, a head, a layer, and rows of a ladder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.data.tokens import prepare_tokens
from redline.engine.probe import probe
from redline.kernels.cross_entropy import GRADIENT_FACTOR, cross_entropy_narrow, plain_cross_entropy_
from redline.kernels.narrow_products import narrow_product
from redline.kernels.transpose import transposed
from redline.model.fp8 import input_gradient, narrow_layers, narrowed
from redline.model.loss import head_loss
from redline.predict.verdict import judge
from redline.rungs import find_rung, plan_of
from redline.search.launch import launch

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)
FAST = ("bf16", "compile", "flash", "padded-vocab", "fused-adamw", "fused-loss", "bf16-residual")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 tensor cores"
    ),
]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def test_the_probe_sees_it() -> None:
    assert "fp8" in probe("cuda").features


@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [(7, 384, 257), (1000, 50304, 50257), (50, 51_202, 51_201), (43_000, 50304, 50257)],
)
def test_the_gradient_is_each_number_rounded(rows: int, columns: int, vocab: int) -> None:
    """The last size has more than 2^31 logits: its last rows are checked. A number may be rounded to fp16 on its way,
    next to zero too: 2^-8 of half a step."""
    logits = (3 * torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")).contiguous()
    logits[:, vocab:] = torch.nan  # padding is never read
    targets = torch.randint(vocab, (rows,), device="cuda")
    last = slice(max(0, rows - 1000), rows)
    wanted = logits[last].double()
    wanted_losses = plain_cross_entropy_(wanted, targets[last], vocab)
    losses, gradient = cross_entropy_narrow(logits, targets, vocab)
    torch.testing.assert_close(losses[last], wanted_losses, rtol=1e-5, atol=1e-5)
    assert logits[:, vocab:].isnan().all(), "the logits stay as they are"
    found = gradient[last].double() / GRADIENT_FACTOR
    assert ((found - wanted).abs() <= 2.0**-3 * (1 + 2.0**-7) * wanted.abs().clamp(min=2.0**-29)).all()
    assert (found[:, vocab:] == 0).all()


def test_a_row_that_is_no_number_stays_none() -> None:
    logits = torch.randn(4, 384, dtype=torch.bfloat16, device="cuda")
    logits[2, 5] = torch.nan
    losses, gradient = cross_entropy_narrow(logits, torch.arange(4, device="cuda"), 384)
    assert losses.isnan().tolist() == [False, False, True, False]
    assert gradient[2].float().isnan().any()
    assert gradient[[0, 1, 3]].float().isfinite().all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (129, 300), (4096, 768), (50304, 48_000)])
def test_transposed_moves_every_byte(rows: int, columns: int) -> None:
    """The last size has more than 2^31 bytes."""
    matrix = torch.randint(256, (rows, columns), dtype=torch.uint8, device="cuda")
    assert torch.equal(transposed(matrix), matrix.t())


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1024, 50304, 768), (1024, 768, 3072), (1024, 768, 50304), (768, 3072, 65536)]
)
@pytest.mark.parametrize("fast", [True, False])
def test_a_product_adds_up_in_fp32(m: int, n: int, k: int, fast: bool) -> None:
    """Of the narrow numbers themselves, so that sums are all that can err. A fast accumulator is asked for sums over a
    layer's width only."""
    if fast and k > 4096:
        pytest.skip("not asked for")
    rows, others = (narrowed(torch.randn(size, k, device="cuda")) for size in (m, n))
    found = narrow_product(rows[0], others[0], rows[1], others[1], dtype=torch.float32, fast=fast)
    some = slice(0, 64)
    wanted = (rows[0][some].double() * rows[1]) @ (others[0].double() * others[1]).t()
    assert relative(found[some], wanted) < (5e-3 if fast else 1e-3)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_product_by_rows(bias: bool) -> None:
    """Scales of rows that differ by many octaves; an odd number of rows, as a sample has."""
    (rows, inverse), (others, others_inverse) = (
        narrowed(torch.randn(size, 768, device="cuda") * torch.logspace(-3, 3, size, device="cuda")[:, None], True)
        for size in (999, 2304)
    )
    given = torch.randn(2304, device="cuda").bfloat16() if bias else None
    found = narrow_product(rows, others, inverse, others_inverse, dtype=torch.bfloat16, fast=True, bias=given)
    wanted = (rows.double() * inverse) @ (others.double() * others_inverse).t()
    wanted = wanted if given is None else wanted + given
    for mine, other in zip(
        found[::100], wanted[::100], strict=True
    ):  # each row by itself: the last would hide the first
        assert relative(mine, other) < 1e-2


def test_scale_and_inverse_of_a_column_are_made_of_one_number() -> None:
    """The compiler makes them in two kernels, from fp32 weights that it does not round to 16 bits in between."""
    above, weight = torch.randn(256, 768, device="cuda").bfloat16(), torch.randn(768, 65_536, device="cuda")
    run = torch.compile(lambda above, weight: input_gradient(above, weight.bfloat16(), torch.bfloat16), fullgraph=True)
    found, wanted = run(above, weight), above.float() @ weight
    assert ((found - wanted).norm(dim=0) < 0.1 * wanted.norm(dim=0)).all(), "no column is twice or half"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layers_gradients_are_fp64s_within_the_formats(compiled: bool) -> None:
    """Behind a norm, so that the compiler has something to put the cast into. The weight's gradient is bf16's."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(768), torch.nn.Linear(768, 3072)).cuda()
    x, above = torch.randn(4, 512, 768, device="cuda"), torch.randn(4, 512, 3072, device="cuda")
    wanted_y = model.double()(x.double())
    wanted = torch.autograd.grad(wanted_y, list(model.parameters()), above.double())
    narrow_layers(model.float(), torch.bfloat16)
    run: Callable[..., torch.Tensor] = torch.compile(model, fullgraph=True) if compiled else model
    y = run(x)
    in_columns = above.to(y.dtype).transpose(0, 2).contiguous().transpose(0, 2)  # as some operators leave gradients
    found = torch.autograd.grad(y, list(model.parameters()), in_columns)
    assert 5e-3 < relative(y, wanted_y) < 6e-2
    errors = [relative(mine, other) for mine, other in zip(found, wanted, strict=True)]
    assert all(5e-3 < error < 6e-2 for error in errors[:2]), errors  # the norm's, through the layer
    assert all(error < 1e-2 for error in errors[2:]), errors


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("pieces", [1, 8])
def test_the_heads_gradients_are_fp64s_within_the_formats(pieces: int, compiled: bool) -> None:
    vocab, rows, width, tokens = 50257, 50304, 768, 2048
    features = F.layer_norm(torch.randn(2, tokens // 2, width, device="cuda"), (width,)).bfloat16().requires_grad_()
    weight = 0.05 * torch.randn(rows, width, device="cuda")
    weight[vocab:] = 0
    weight.requires_grad_()
    targets = torch.randint(vocab, (2, tokens // 2), device="cuda")
    x, w = (tensor.detach().double().requires_grad_() for tensor in (features, weight))
    wanted_loss = F.cross_entropy((x @ w[:vocab].t()).flatten(0, 1), targets.flatten())
    wanted = torch.autograd.grad(wanted_loss, (x, w))
    run: Callable[..., torch.Tensor] = torch.compile(head_loss, fullgraph=True) if compiled else head_loss
    loss = run(features, weight, targets, vocab=vocab, pieces=pieces, dtype=torch.bfloat16, fp8=True)
    assert abs(loss.item() - wanted_loss.item()) < 0.02
    for mine, other in zip(torch.autograd.grad(loss, (features, weight)), wanted, strict=True):
        assert 5e-3 < relative(mine, other) < 5e-2


@pytest.mark.parametrize(
    "narrow",
    [
        ("fp8-head",),
        ("fp8-linears",),
        ("fused-backward", "fp8-head", "fp8-linears"),
        ("fused-backward", "tuned-matmuls", "fp8-linears"),
        ("fused-backward", "tuned-matmuls", "fused-matmuls", "fp8-head", "fp8-linears"),
        ("fused-backward", "tuned-matmuls", "fused-matmuls", "fp8-head", "fp8-linears", "fp8-mlps"),
    ],
    ids="+".join,
)
def test_a_row_of_a_ladder_is_changed(tmp_path: Path, narrow: tuple[str, ...]) -> None:
    """Compiled, in a worker, against fp32 without 8 bits: worse than bf16, as it must be, and inside its bounds."""
    prepare_tokens(WORKLOAD, tmp_path / "tokens.npy")
    recipe = Recipe(rungs=(*FAST, *narrow), micro_batch=WORKLOAD.micro_batch)
    job = Job(workload=WORKLOAD, recipe=recipe, device="cuda", tokens="tokens.npy", timed_steps=10)
    asked = (replace(job, kind="reference", recipe=replace(recipe, rungs=narrow[-1:])), job)
    expected, found = (launch(RunDirectory(tmp_path), one, 300, lambda *_, **__: None) for one in asked)
    assert isinstance(expected, Measurement), expected
    assert isinstance(found, Measurement), found
    verdict = judge(
        maths=find_rung(narrow[-1]).maths.value,
        precision=plan_of(recipe.rungs).precision,
        measurement=found,
        reference=expected.loss_curve,
        base=None,
        plain=expected.loss_curve,
        ln_vocab=WORKLOAD.shape.ln_vocab,
    )
    assert verdict.verdict == "changed", verdict.detail
    assert {"fp8", "bf16"} <= set(found.proof.matmul_dtypes), found.proof  # attention's flash kernel is no matmul
    assert found.proof.graph_breaks == 0
    assert found.gradients is not None
    assert found.gradients.error > 1.5 * found.gradients.yardstick
