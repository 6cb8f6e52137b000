"""The Triton kernel of `kernels.transpose`. Imported only if there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from redline.kernels.on_device import on_its_device

# A tile is read in rows of 128 bytes, transposed in shared memory and written in rows of 128 bytes: whole cache lines
# either way.
TILE, WARPS = 128, 8


@on_its_device
def launch(matrix: torch.Tensor) -> torch.Tensor:
    assert matrix.element_size() == 1
    assert matrix.stride(1) == 1
    rows, columns = matrix.shape
    turned = torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device)
    # Neighbouring programs read along a row. One axis, since only the first axis of a grid may exceed 65,535.
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)
    _transpose[grid](
        matrix.view(torch.uint8),
        turned.view(torch.uint8),
        matrix.stride(0),
        rows,
        columns,
        TILE=TILE,
        num_warps=WARPS,
    )
    return turned


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(matrix, turned, stride, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    across = tl.cdiv(columns, TILE)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * TILE + tl.arange(0, TILE)  # rows x columns may exceed 2^31
    column = (program % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(
        matrix + row[:, None] * stride + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < columns),
        other=0,
    )
    tl.store(
        turned + column[:, None] * rows + row[None, :],
        tl.trans(tile),
        mask=(column[:, None] < columns) & (row[None, :] < rows),
    )
