"""Triton kernels against plain torch in fp64, at the sizes where indexing and masks go wrong."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.cross_entropy import cross_entropy_, plain_cross_entropy_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [(7, 257, 257), (64, 384, 257), (1000, 50304, 50257), (3, 8192, 8192), (43_000, 50304, 50257)],
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
