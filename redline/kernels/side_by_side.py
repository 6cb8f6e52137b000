"""Joins three matrices side by side and sums over rows, in one pass: what the projection of q, k and v needs backward.

    joined, sums = side_by_side(dq, dk, dv)     # three of [N, C] -> [N, 3C] in their type; sums [3C] in fp32

Attention returns three gradients, and the projection's matmuls read one. The compiler copies them in one kernel and
reads the copy again in another for the bias's gradient.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("redline::side_by_side", mutates_args=())
def side_by_side(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The three have one shape and dtype, and the elements of a row are next to each other in memory."""
    if q.is_cuda:
        from redline.kernels.side_by_side_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(q, k, v)
    return plain_side_by_side(q, k, v)


@side_by_side.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    joined = q.new_empty(q.size(0), 3 * q.size(1))
    return joined, joined.new_empty(joined.size(1), dtype=torch.float32)


def plain_side_by_side(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes, in torch; sums in fp32 unless the parts are wider."""
    joined = torch.cat((q, k, v), dim=1)
    return joined, joined.sum(dim=0, dtype=torch.promote_types(joined.dtype, torch.float32))
