"""What tests/cpu/test_interpreted_kernels.py runs: Triton's kernels on a CPU, through its interpreter, against fp64.

TRITON_INTERPRET=1 python interpreted_kernels.py        # JSON: the relative error of every case

The variable must be set before Triton is imported, so it takes a process of its own. One process for all cases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from redline.kernels import (
    cross_entropy_triton,
    gelu_backward_triton,
    norm_backward_triton,
    side_by_side_triton,
    transpose_triton,
)
from redline.kernels.cross_entropy import GRADIENT_FACTOR, OCTAVES, plain_cross_entropy_
from redline.kernels.cross_entropy_triton import _out_word
from redline.kernels.gelu_backward import plain_gelu_backward_
from redline.kernels.norm_backward import plain_norm_backward
from redline.kernels.side_by_side import plain_side_by_side

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


def allow_ranges() -> None:
    """Triton 3.6 makes an integer of an array of one, which numpy 2.5 refuses: `range` over what a kernel was given."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def random(*size: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the 2-norm; not a number stays one, and does not pass."""
    found = found.double()
    return float((found - wanted).norm() / wanted.norm()) if wanted.norm() else float(found.norm())


def loss_cases() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    sizes = [(3, 384, 257), (2, 4300, 4300), (2, 258, 257), (2, 257, 257), (3, 130, 1), (1, 51_202, 51_201)]
    for rows, columns, vocab in sizes:
        for dtype in (BF16, FP32):
            if columns <= 4300 or dtype is BF16:
                yield f"loss {rows}x{columns}/{vocab} {dtype}", lambda s=(rows, columns, vocab), d=dtype: loss(*s, d)
    yield "loss extremes", lambda: loss(4, 300, 299, BF16, extremes=True)


def loss(rows: int, columns: int, vocab: int, dtype: torch.dtype, extremes: bool = False) -> dict[str, float]:
    logits = random(rows, columns, seed=columns, dtype=dtype, scale=3)
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1))
    targets[0] = vocab - 1
    if extremes:
        logits[0] = 1e3
        logits[1] = -1e3
        logits[2, 5:] = -torch.inf
        targets[2] = 3
        logits[3, 7] = 1e3
    logits[:, vocab:] = torch.nan  # padding is never read
    wanted = logits.double()
    wanted_losses = plain_cross_entropy_(wanted, targets, vocab)
    losses = cross_entropy_triton.launch(logits, targets, vocab)
    return {"losses": error(losses, wanted_losses), "gradient": error(logits, wanted)}


def narrow_loss(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> dict[str, float]:
    """Every number of the gradient by itself, within what e5m2 rounds; the logits are left alone."""
    logits = random(rows, columns, seed=columns, dtype=dtype, scale=5)
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1))
    targets[0] = vocab - 1
    logits[:, vocab:] = torch.nan
    wanted, before = logits.double(), logits.clone()
    wanted_losses = plain_cross_entropy_(wanted, targets, vocab)
    narrow = torch.full((rows, columns), torch.nan).to(torch.float8_e5m2)
    losses = cross_entropy_triton.launch(logits, targets, vocab, narrow, OCTAVES)
    found, wanted = narrow.double(), GRADIENT_FACTOR * wanted
    smallest = 2.0**-16  # the step of the numbers next to zero
    off = (found - wanted).abs() / wanted.abs().clamp(min=4 * smallest)
    changed = float(not torch.equal(logits.view(torch.uint8), before.view(torch.uint8)))
    return {
        "losses": error(losses, wanted_losses),
        "each": float(off.max()),
        "most": float(off.quantile(0.85)),
        "logits changed": changed,
    }


def strangers() -> dict[str, float]:
    """Targets outside the vocabulary: a loss of NaN, a NaN in the row's gradient, and no other number touched."""
    wrong = {}
    for dtype, narrow in ((BF16, False), (FP32, False), (BF16, True), (FP32, True)):
        whole = random(7, 300, seed=0, dtype=dtype)  # rows before, between and behind those of the loss
        logits, before = whole[1:6], whole.clone()
        targets = torch.tensor([3, -100, 299, 290, 700])  # 290 is padding
        out = torch.zeros(5, 300).to(torch.float8_e5m2) if narrow else None
        losses = cross_entropy_triton.launch(logits, targets, 290, out, OCTAVES if narrow else 0)
        known = torch.tensor([True, False, False, False, False])
        gradient = logits if out is None else out.float()
        off = (losses.isnan() == known).sum() + (gradient.isnan().any(dim=1) == known).sum()
        off += (whole[[0, 6]] != before[[0, 6]]).sum() + (~gradient[0].isfinite()).sum()
        wrong[f"bytes of {dtype}{', narrow' if narrow else ''}"] = float(off)
    return wrong


@triton.jit
def store_words(low, high, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, _out_word(tl.load(low + at), tl.load(high + at), 0, True))


def narrow_words() -> dict[str, float]:
    """Every fp16 up to 2^15, either sign, beside another one: the two bytes are torch's, to the bit."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    numbers = numbers.where(numbers.abs() <= 2**15, 0)  # NaN is not
    low, high = numbers.float(), numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].float()
    found = torch.zeros(2**16, dtype=torch.uint16)
    store_words[(1,)](low, high, found, SIZE=2**16)
    wanted = torch.stack((low, high), dim=1).to(torch.float8_e5m2).view(torch.uint8)
    return {"bytes": float((found.view(torch.uint8).view(-1, 2) != wanted).sum())}


def narrow_nans() -> dict[str, float]:
    """A row with a NaN is all NaN, in the kernel that keeps a row and in the one that reads twice; others have none."""
    wrong = {}
    for dtype in (BF16, FP32):
        logits = random(4, 384, seed=0, dtype=dtype)
        bits = logits.view(torch.int16 if dtype is BF16 else torch.int32)
        bits[2, 5] = torch.iinfo(bits.dtype).max  # the NaN that a GPU makes: nothing but ones
        narrow = torch.zeros(4, 384).to(torch.float8_e5m2)
        losses = cross_entropy_triton.launch(logits, torch.tensor([0, 5, 7, 383]), 384, narrow, OCTAVES)
        nans = torch.tensor([[False], [False], [True], [False]])
        off = (narrow.float().isnan() != nans).sum() + (losses.isnan() != nans[:, 0]).sum()
        wrong[f"bytes of {dtype}"] = float(off)
    return wrong


def turned(rows: int, columns: int) -> dict[str, float]:
    matrix = torch.randint(256, (rows, columns + 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    matrix = matrix[:, :columns]
    found = transpose_triton.launch(matrix.view(torch.float8_e5m2)).view(torch.uint8)
    return {"bytes": float((found != matrix.t()).sum())}


def gelu(rows: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
    x, above = random(rows, columns, seed=0, dtype=dtype, scale=4), random(rows, columns, seed=1, dtype=dtype)
    x[0, 0], x[-1, -1] = 1e4, -1e4
    wanted = above.double()
    wanted_sums = plain_gelu_backward_(wanted, x.double())
    sums = gelu_backward_triton.launch(above, x)
    return {"gradient": error(above, wanted), "sums": error(sums, wanted_sums)}


def beside(rows: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
    parts = [random(rows, columns + 3, seed=seed, dtype=dtype)[:, :columns] for seed in range(3)]
    joined, sums = side_by_side_triton.launch(*parts)
    wanted, wanted_sums = plain_side_by_side(*(part.double() for part in parts))
    return {"joined": error(joined, wanted), "sums": error(sums, wanted_sums)}


def norm(rows: int, columns: int, dtype: torch.dtype) -> dict[str, float]:
    tensors = [random(rows, columns, seed=seed, dtype=dtype) for seed in range(3)]
    tensors[1] = 100 * tensors[1] + 1000  # a mean that is not zero
    gain = random(columns, seed=3, dtype=FP32)
    _, *stats = torch.native_layer_norm(tensors[1].to(FP32), (columns,), None, None, EPS)
    of_stream, sums = norm_backward_triton.launch(*tensors, gain, *stats)
    wanted, wanted_sums = plain_norm_backward(*(tensor.double() for tensor in (*tensors, gain, *stats)))
    errors = map(error, sums, wanted_sums)
    return {"stream": error(of_stream, wanted), **dict(zip(("gain", "bias", "branch"), errors, strict=True))}


def cases() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    yield from loss_cases()
    for sizes in ((3, 384, 257), (2, 258, 257), (2, 257, 257), (1, 51_202, 51_201)):
        yield f"narrow loss {sizes}", lambda s=sizes: narrow_loss(*s, BF16)
    yield "narrow words", narrow_words
    yield "narrow NaNs", narrow_nans
    yield "targets outside the vocabulary", strangers
    for size in ((1, 1), (128, 128), (129, 300), (16, 5)):
        yield f"turned {size}", lambda s=size: turned(*s)
    for name, run in {"gelu": gelu, "beside": beside, "norm": norm}.items():
        for rows, columns in ((1, 2), (7, 5), (9, 768), (6, 1025), (3, 4200)):
            for dtype in (BF16, FP32):
                yield f"{name} {rows}x{columns} {dtype}", lambda r=run, s=(rows, columns), d=dtype: r(*s, d)
    yield "norm too long", lambda: norm(2, norm_backward_triton.LONGEST + 1, FP32)


if __name__ == "__main__":
    allow_ranges()
    found = {name: run() for name, run in cases()}
    print(
        json.dumps(
            {name: {what: None if math.isnan(e) else e for what, e in each.items()} for name, each in found.items()}
        )
    )
