"""LayerNorm's backward, the sum with the stream's other gradient, and all the sums over rows that follow, in one pass.

    of_stream, sums = norm_backward(gradient, stream, beside, gain, mean, scale)
    of_gain, of_bias, of_branch = sums          # [3, C] in fp32

`stream` [N, C] is the norm's input, `gradient` the gradient of its output, and `beside` the gradient that reaches the
stream past the norm. `of_stream` is the sum of both paths. The branch that was added to the stream has the same
gradient, and the branch's bias its sum over rows, for which the compiler would read it again. `mean` and `scale` (one
over the deviation), both [N, 1], come from the forward: with them one pass over a row is enough, where computing them
again takes three, one after the other.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("redline::norm_backward", mutates_args=())
def norm_backward(
    gradient: torch.Tensor,
    stream: torch.Tensor,
    beside: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first three are [N, C], and `stream` is contiguous; `of_stream` has its dtype."""
    if stream.is_cuda:
        from redline.kernels.norm_backward_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(gradient, stream, beside, gain, mean, scale)
    return plain_norm_backward(gradient, stream, beside, gain, mean, scale)


@norm_backward.register_fake
def _(
    gradient: torch.Tensor,
    stream: torch.Tensor,
    beside: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(stream), stream.new_empty(3, stream.size(1), dtype=torch.float32)


def plain_norm_backward(
    gradient: torch.Tensor,
    stream: torch.Tensor,
    beside: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes, in torch; in fp32 unless the stream is wider."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    x, above = stream.to(wide), gradient.to(wide)
    mean, scale = mean.to(wide), scale.to(wide)
    normal = (x - mean) * scale
    scaled = above * gain.to(wide)
    across = scaled - normal * (scaled * normal).mean(dim=1, keepdim=True) - scaled.mean(dim=1, keepdim=True)
    total = across * scale + beside.to(wide)
    return total.to(stream.dtype), torch.stack([(above * normal).sum(dim=0), above.sum(dim=0), total.sum(dim=0)])
