"""Triton kernels against plain torch in fp64, at the sizes where indexing and masks go wrong."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.cross_entropy import cross_entropy_, plain_cross_entropy_
from redline.kernels.gelu_backward import gelu_backward_, plain_gelu_backward_
from redline.kernels.norm_backward import norm_backward, plain_norm_backward
from redline.kernels.side_by_side import plain_side_by_side, side_by_side

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [
        (7, 257, 257),
        (64, 384, 257),
        (1000, 50304, 50257),
        (3, 8192, 8192),
        (50, 51_202, 51_201),  # longer than what a program's registers hold
        (43_000, 50304, 50257),
    ],
)
def test_cross_entropy_is_that_of_fp64(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> None:
    """The last size has more than 2^31 logits: its last rows are checked."""
    if rows * columns > 2**31 and dtype is not torch.bfloat16:
        pytest.skip("once is enough")
    logits = 3 * torch.randn(rows, columns, dtype=dtype, device="cuda")
    logits[:, vocab:] = torch.nan  # padding is never read
    targets = torch.randint(vocab, (rows,), device="cuda")
    last = slice(max(0, rows - 1000), rows)
    wanted = logits[last].double()
    wanted_losses = plain_cross_entropy_(wanted, targets[last], vocab)
    losses = cross_entropy_(logits, targets, vocab)
    torch.testing.assert_close(losses[last], wanted_losses, rtol=1e-5, atol=1e-5)
    assert (logits[:, vocab:] == 0).all()
    error = (logits[last].double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_targets_outside_the_vocabulary_are_nan_and_touch_nothing_else(dtype: torch.dtype) -> None:
    whole = random(7, 300, dtype=dtype)
    logits, before = whole[1:6], whole.clone()
    losses = cross_entropy_(logits, torch.tensor([3, -100, 299, 290, 700], device="cuda"), 290)
    known = torch.tensor([True, False, False, False, False], device="cuda")
    assert torch.equal(losses.isnan(), ~known)
    assert torch.equal(logits.isnan().any(dim=1), ~known)
    assert torch.equal(whole[[0, 6]], before[[0, 6]])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Fresh ones each time."""
    return (scale * torch.randn(*size, device="cuda")).to(dtype)


every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
ODD_SIZES = [(1, 8), (777, 513), (1000, 3072), (129, 6400), (5, 9000), (70_000, 768)]
NARROW = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), ODD_SIZES)
def test_gelus_backward_is_that_of_fp64(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, above = random(rows, columns, dtype=dtype, scale=3), random(rows, columns, dtype=dtype)
    x[0, 0], x[-1, -1] = 1e4, -1e4  # straight, and flat
    wanted = above.double()
    wanted_sums = plain_gelu_backward_(wanted, x.double())
    sums = gelu_backward_(above, x)
    assert relative(above, wanted) < NARROW[dtype]
    assert relative(sums, wanted_sums) < 1e-5


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), ODD_SIZES)
def test_parts_stand_side_by_side(rows: int, columns: int, dtype: torch.dtype) -> None:
    parts = [random(rows, columns + 3, dtype=dtype)[:, :columns] for _ in range(3)]  # rows that do not touch
    joined, sums = side_by_side(*parts)
    wanted, wanted_sums = plain_side_by_side(*(part.double() for part in parts))
    assert torch.equal(joined.double(), wanted)
    assert relative(sums, wanted_sums) < 1e-5


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), ODD_SIZES)
def test_the_norms_backward_is_that_of_fp64(rows: int, columns: int, dtype: torch.dtype) -> None:
    above, stream, beside = (random(rows, columns, dtype=dtype) for _ in range(3))
    stream = 10 * stream + 100  # a mean that is not zero
    gain = random(columns, dtype=torch.float32)
    _, *stats = torch.native_layer_norm(stream.double(), (columns,), None, None, 1e-5)
    words = above, stream, beside, gain, *(one.float() for one in stats)
    of_stream, sums = norm_backward(*words)
    wanted, wanted_sums = plain_norm_backward(*(one.double() for one in words))
    assert relative(of_stream, wanted) < NARROW[dtype]
    for found, other in zip(sums, wanted_sums, strict=True):
        assert relative(found, other) < 1e-4
