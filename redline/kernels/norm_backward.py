"""LayerNorm's backward, the stream's gradient beside it, and all the sums over rows that follow, in one pass.

    of_stream, sums = norm_backward(gradient, stream, beside, gain, eps)
    of_gain, of_bias, of_branch = sums          # [3, C] in fp32

`stream` [N, C] is what the norm read, `gradient` that of what it gave, `beside` what reached the stream past the norm.
`of_stream` is the sum of both ways. The branch that was added to the stream has the same gradient, and its bias the sum
over rows of it: the compiler would read it again for that. The mean and the deviation of a row are computed again: the
row is there.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("redline::norm_backward", mutates_args=())
def norm_backward(
    gradient: torch.Tensor, stream: torch.Tensor, beside: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All but the gain are contiguous [N, C]; the result has the stream's type."""
    if stream.is_cuda:
        from redline.kernels.norm_backward_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(gradient, stream, beside, gain, eps)
    return plain_norm_backward(gradient, stream, beside, gain, eps)


@norm_backward.register_fake
def _(
    gradient: torch.Tensor, stream: torch.Tensor, beside: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(stream), stream.new_empty(3, stream.size(1), dtype=torch.float32)


def plain_norm_backward(
    gradient: torch.Tensor, stream: torch.Tensor, beside: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes, in torch; in fp32 unless the stream is wider."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    x, above = stream.to(wide), gradient.to(wide)
    deviation, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    scale = (deviation + eps).rsqrt()
    normal = (x - mean) * scale
    scaled = above * gain.to(wide)
    across = scaled - normal * (scaled * normal).mean(dim=1, keepdim=True) - scaled.mean(dim=1, keepdim=True)
    total = across * scale + beside.to(wide)
    return total.to(stream.dtype), torch.stack([(above * normal).sum(dim=0), above.sum(dim=0), total.sum(dim=0)])
