"""The Triton kernel of `kernels.cross_entropy`. Imported only where there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 8 warps read 16 bytes per thread and load; four loads share one rescaling of the running sum.
BLOCK, WARPS = 2048, 8
LOWEST = tl.constexpr(-1e30)  # not -inf: the difference of two of those is no number


def launch(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    rows, columns = logits.shape
    assert logits.stride(1) == 1
    assert targets.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, logits.stride(0), vocab, columns, BLOCK=BLOCK, num_warps=WARPS)
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, stride, vocab, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)  # rows x columns passes 2^31 from 42 sequences of GPT-2 on
    logits += row * stride
    target = tl.load(targets + row)
    of_target = tl.load(logits + target).to(tl.float32)  # before the reductions below: they order it before any store
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, 4 * BLOCK):
        at = start + lanes
        a = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        b = tl.load(logits + at + BLOCK, mask=at + BLOCK < vocab, other=-float("inf")).to(tl.float32)
        c = tl.load(logits + at + 2 * BLOCK, mask=at + 2 * BLOCK < vocab, other=-float("inf")).to(tl.float32)
        d = tl.load(logits + at + 3 * BLOCK, mask=at + 3 * BLOCK < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        total = total * tl.exp(highest - higher)
        total += tl.exp(a - higher) + tl.exp(b - higher) + tl.exp(c - higher) + tl.exp(d - higher)
        highest = higher
    top = tl.max(highest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
    tl.store(losses + row, log_sum - of_target)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < columns)
