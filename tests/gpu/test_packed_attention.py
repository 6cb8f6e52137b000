"""cuDNN's attention in place: against the formulas in fp64, and against torch's."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.packed_attention import (
    is_there,
    packed_attention,
    packed_attention_backward,
    plain_packed_attention,
    plain_packed_attention_backward,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_there(), reason="nvidia-cudnn-frontend is not installed"),
]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 128, 4, 64), (1, 1024, 12, 64), (3, 200, 2, 128), (2, 77, 3, 32)], ids=str)
def test_attention_and_its_gradients_are_the_formulas(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    batch, sequence, heads, head = sizes
    qkv = torch.randn(batch, sequence, 3 * heads * head, device="cuda").to(dtype)
    above = torch.randn(batch, sequence, heads * head, device="cuda").to(dtype)
    wanted, sums = plain_packed_attention(qkv.double(), heads)
    out, stats = packed_attention(qkv, heads)
    assert off(out, wanted) < 5e-3
    assert off(stats, sums) < 1e-4
    gradient = packed_attention_backward(above, qkv, out, stats, heads)
    of_qkv = plain_packed_attention_backward(above.double(), qkv.double(), wanted, sums, heads)
    for found, part in zip(gradient.chunk(3, dim=2), of_qkv.chunk(3, dim=2), strict=True):
        assert off(found, part) < 1e-2


def test_a_later_token_changes_nothing_before_it() -> None:
    qkv = torch.randn(2, 64, 3 * 128, device="cuda", dtype=torch.bfloat16)
    before, _ = packed_attention(qkv, 2)
    qkv[:, 40:] = 7
    after, _ = packed_attention(qkv, 2)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
