"""Transposes a matrix of 8-bit numbers into a new matrix.

    columns = transposed(rows)        # [M, N] -> [N, M], contiguous

Tensor cores need both 8-bit operands with the summed index last, and a weight's gradient sums over tokens, so
activations and gradients are needed transposed as well. torch's own copy moves one byte at a time.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("redline::transposed", mutates_args=())
def transposed(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.is_cuda:
        from redline.kernels.transpose_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(matrix)
    return matrix.t().contiguous()


@transposed.register_fake
def _(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.new_empty(matrix.size(1), matrix.size(0))
