"""The Triton kernel of `kernels.norm_backward`. Imported only if there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from redline.kernels.norm_backward import plain_norm_backward
from redline.kernels.on_device import on_its_device

# The fastest of 177 configurations on an H200, at 65,536 x 768: `PROGRAMS` on each multiprocessor, each of which goes
# through its share of the rows, `HIGH` at a time, keeps its sums in registers and prefetches rows two iterations ahead.
# 0.116 ms, where a sum of products takes 0.094; without prefetching 0.132, without the forward's means and scales
# 0.145.
PROGRAMS, HIGH, AHEAD = 4, 2, 3
SHARE = 0.85  # of a multiprocessor's shared memory, for prefetched rows
LONGEST = 8192  # columns; beyond that, a program's sums do not fit in its registers


@on_its_device
def launch(
    gradient: torch.Tensor,
    stream: torch.Tensor,
    beside: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = stream.shape
    if columns > LONGEST:
        return plain_norm_backward(gradient, stream, beside, gain, mean, scale)
    gradient, beside = gradient.contiguous(), beside.contiguous()
    assert all(one.is_contiguous() for one in (stream, gain, mean, scale))
    block = triton.next_power_of_2(columns)
    high, each = sizes(block)
    programs = min(triton.cdiv(rows, high), each * multiprocessors(stream.device))
    of_stream = torch.empty_like(stream)
    sums = torch.empty(programs, 3, columns, dtype=torch.float32, device=stream.device)
    _norm_backward[(programs,)](
        gradient,
        stream,
        beside,
        gain,
        mean,
        scale,
        of_stream,
        sums,
        rows,
        columns,
        BLOCK=block,
        HIGH=high,
        AHEAD=ahead(each * high * block * (gradient.itemsize + stream.itemsize + beside.itemsize), stream.device),
        num_warps=warps(block),
    )
    return of_stream, sums.sum(dim=0)


def sizes(block: int) -> tuple[int, int]:
    """Return the rows at a time, and the programs on a multiprocessor: fewer for long rows, with the same registers."""
    return (HIGH, PROGRAMS) if block <= 1024 else (1, max(1, min(PROGRAMS, LONGEST // block)))


def ahead(step_bytes: int, device: torch.device) -> int:
    """Return how many iterations' rows are in shared memory at once, for all programs of a multiprocessor."""
    if device.type != "cuda":
        return AHEAD
    room = SHARE * torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return max(1, min(AHEAD, int(room // step_bytes)))


def multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def warps(block: int) -> int:
    """Return the warps of a program: 16 elements of a row per thread, up to 16 warps."""
    return min(max(block // 512, 1), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    gradients,
    streams,
    besides,
    gains,
    means,
    scales,
    of_streams,
    sums,
    rows,
    columns,
    BLOCK: tl.constexpr,
    HIGH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    real = column < columns
    gain = tl.load(gains + column, mask=real, other=0.0).to(tl.float32)
    of_gain = tl.zeros((1, BLOCK), tl.float32)
    of_bias = tl.zeros((1, BLOCK), tl.float32)
    of_branch = tl.zeros((1, BLOCK), tl.float32)
    for start in tl.range(tl.program_id(0) * HIGH, rows, tl.num_programs(0) * HIGH, num_stages=AHEAD):
        row = start + tl.arange(0, HIGH)[:, None]
        at = row.to(tl.int64) * columns + column
        inside = (row < rows) & real
        x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        beside = tl.load(besides + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0).to(tl.float32)
        normal = tl.where(inside, x - mean, 0.0) * scale
        scaled = above * gain
        along = tl.sum(scaled * normal, axis=1, keep_dims=True) / columns
        total = (scaled - normal * along - tl.sum(scaled, axis=1, keep_dims=True) / columns) * scale + beside
        total = tl.where(inside, total, 0.0)
        tl.store(of_streams + at, total.to(of_streams.dtype.element_ty), mask=inside)
        of_gain += tl.sum(above * normal, axis=0, keep_dims=True)
        of_bias += tl.sum(above, axis=0, keep_dims=True)
        of_branch += tl.sum(total, axis=0, keep_dims=True)
    line = sums + tl.program_id(0).to(tl.int64) * 3 * columns + column
    tl.store(line, of_gain, mask=real)
    tl.store(line + columns, of_bias, mask=real)
    tl.store(line + 2 * columns, of_branch, mask=real)
