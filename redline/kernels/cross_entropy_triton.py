"""The Triton kernels of `kernels.cross_entropy`. Imported only if there is a CUDA device.

`..._whole_row` keeps a row of bf16 logits in the registers of one program, two numbers to a word, so that memory is
read once and written once. `..._twice` accepts rows of any length and dtype and reads them twice; the second read comes
from the cache only in part, since the rows in flight are larger than the cache. A target that is not in the vocabulary
gives its row a loss of NaN and a NaN in its gradient, and nothing outside the row is read or written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from redline.kernels.on_device import on_its_device

# Each load of 8 warps reads 16 bytes per thread; four loads share one rescaling of the running sum.
BLOCK, WARPS = 2048, 8
LOWEST = tl.constexpr(-1e30)  # not -inf: -inf minus -inf is NaN
# 25 tiles of 1024 words take 100 of a thread's 128 registers, and two such programs fill a multiprocessor: while one
# waits for memory the other computes. One program with 190 registers is slower than reading twice (docs/speed-log.md).
TILE, MOST_TILES, REGISTERS = 1024, 25, 128
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
TWO_LOWEST = tl.constexpr(0xFF80FF80)  # -inf and -inf
TWO_NANS = tl.constexpr(0x7E7E)  # of e5m2


@on_its_device
def launch(
    logits: torch.Tensor, targets: torch.Tensor, vocab: int, narrow: torch.Tensor | None = None, octaves: int = 0
) -> torch.Tensor:
    """`narrow` [rows, columns] in e5m2 receives 2^octaves times the gradient; without it the logits receive it."""
    rows, columns = logits.shape
    assert logits.stride(1) == 1
    assert targets.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if fits(logits):
        words = logits.view(torch.uint32)
        out = words if narrow is None else narrow.view(torch.uint16)  # two numbers to a word, like the logits
        _cross_entropy_whole_row[(rows,)](
            words,
            targets,
            losses,
            out,
            words.stride(0),
            vocab,
            words.size(1),
            0,
            NARROW=narrow is not None,
            OCTAVES=octaves,
            FULL=vocab // 2 // TILE,
            TILES=triton.cdiv(words.size(1), TILE),
            TILE=TILE,
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    else:
        _cross_entropy_twice[(rows,)](
            logits,
            targets,
            losses,
            logits if narrow is None else narrow,
            logits.stride(0),
            vocab,
            columns,
            NARROW=narrow is not None,
            OCTAVES=octaves,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses


def fits(logits: torch.Tensor) -> bool:
    """True if the logits are bf16 and their rows consist of whole words and fit in registers."""
    rows, columns = logits.shape
    whole = columns % 2 == 0 and logits.stride(0) % 2 == 0 and logits.data_ptr() % 4 == 0
    return logits.dtype == torch.bfloat16 and whole and columns <= 2 * MOST_TILES * TILE


@triton.jit
def _low(word):  # type: ignore[no-untyped-def]
    """The first bf16 of a word as fp32: its bits, followed by zeros."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):  # type: ignore[no-untyped-def]
    return (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high):  # type: ignore[no-untyped-def]
    low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit  # type: ignore[untyped-decorator]
def _out_word(low, high, no_number, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack two numbers of the gradient for storing. e5m2 is the upper byte of fp16, rounded to even here, both numbers
    at once: neither exceeds 2^15, so nothing carries from one into the other, except for a NaN. A row with one NaN is
    all NaN, and `no_number` turns whatever came out into NaNs. Triton's 8-bit dtypes are not used: a version with them
    wrote wrong bytes on an H200, for reasons unknown."""
    if NARROW:
        low = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        both = low | (high << 16)
        both += 0x007F007F + ((both >> 8) & 0x00010001)
        return (((both >> 8) & 0xFF) | ((both >> 16) & 0xFF00) | no_number).to(tl.uint16)
    else:  # noqa: RET505  # Triton compiles one of the two
        return _word(low, high)


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_whole_row(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    out,
    stride,
    vocab,
    columns,
    zero,
    NARROW: tl.constexpr,
    OCTAVES: tl.constexpr,
    FULL: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """`stride` and `columns` are in words. `zero` is 0, which the compiler does not know, so each of the three passes
    widens the words again. Otherwise it would keep the first pass's fp32 numbers: twice as many registers."""
    row = tl.program_id(0).to(tl.int64)  # rows x columns exceeds 2^31 from 42 sequences of GPT-2 on
    logits += row * stride
    if NARROW:
        out += row * columns
    else:
        out = logits
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    target = tl.where(known, target, 0).to(tl.int32)
    at_target = tl.load(logits + target // 2)
    is_low = target % 2 == 0
    of_target = tl.where(known, tl.where(is_low, _low(at_target), _high(at_target)) * LOG2E, float("nan"))
    lanes = tl.arange(0, TILE)
    kept = ()
    for i in tl.static_range(TILES):
        at = i * TILE + lanes
        if i < FULL:
            word = tl.load(logits + at, eviction_policy="evict_first")
        else:
            word = tl.load(logits + at, mask=2 * at < vocab, other=TWO_LOWEST, eviction_policy="evict_first")
            word = tl.where(2 * at + 1 == vocab, (word & 0xFFFF) | 0xFF800000, word)
        kept = kept + (word,)  # type: ignore[assignment]  # noqa: RUF005  # Triton knows no unpacking
    highest = tl.full((TILE,), LOWEST, tl.float32)
    for i in tl.static_range(TILES):
        highest = tl.maximum(highest, tl.maximum(_low(kept[i]), _high(kept[i])))
    top = tl.max(highest, axis=0) * LOG2E
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(TILES):
        word = kept[i] ^ zero
        total += tl.exp2(_low(word) * LOG2E - top) + tl.exp2(_high(word) * LOG2E - top)
    log_sum = top + tl.log2(tl.sum(total, axis=0))
    tl.store(losses + row, (log_sum - of_target) * LN2)
    no_number = tl.where(known & (log_sum == log_sum), 0, TWO_NANS)  # TWO_NANS | anything is NaN in e5m2
    log_sum -= OCTAVES  # scales the probabilities at no cost
    for i in tl.static_range(TILES):
        at = i * TILE + lanes
        word = kept[i] ^ (zero + zero)
        low, high = tl.exp2(_low(word) * LOG2E - log_sum), tl.exp2(_high(word) * LOG2E - log_sum)
        gradient = _out_word(low, high, no_number, NARROW)
        if i < FULL:
            tl.store(out + at, gradient, eviction_policy="evict_first")
        else:
            tl.store(out + at, gradient, mask=at < columns, eviction_policy="evict_first")
    tl.debug_barrier()  # the target's word is written again, after every thread's first store
    own = tl.exp2(of_target - log_sum) - 1.0 * (1 << OCTAVES)
    beside = tl.exp2(tl.where(is_low, _high(at_target), _low(at_target)) * LOG2E - log_sum)
    beside = tl.where((target ^ 1) < vocab, beside, 0.0)
    first, second = tl.where(is_low, own, beside), tl.where(is_low, beside, own)
    tl.store(out + target // 2, _out_word(first, second, no_number, NARROW))


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_twice(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    out,
    stride,
    vocab,
    columns,
    NARROW: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    if NARROW:
        out += row * columns
    else:
        out = logits
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    target, one = tl.where(known, target, 0), tl.where(known, 1.0, float("nan"))
    of_target = one * tl.load(logits + target).to(tl.float32)  # before the reductions, which order it before any store
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
        gradient = tl.exp(x - log_sum) - tl.where(at == target, one, 0.0)
        if NARROW:
            gradient = gradient * (1 << OCTAVES)
        tl.store(out + at, gradient.to(out.dtype.element_ty), mask=at < columns)
