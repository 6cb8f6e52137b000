"""The training loss: cross-entropy in fp32 whatever the model's dtype.

`next_token_loss` takes logits. `head_loss` takes what the head reads and never lets the logits out: it computes their
gradient as soon as it has them, so that they need not wait for the backward pass, all at once or piece by piece.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels.cross_entropy import cross_entropy_


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens. logits [B, T, V], targets [B, T]; a logit of -inf is a class that does not exist."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def head_loss(
    features: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab: int,
    pieces: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same mean from features [B, T, C] and the head's weight [rows, C]; `dtype` is what autocast
    would give the matmuls (None: the features')."""
    loss: torch.Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
        features.flatten(0, 1), weight, targets.flatten(), vocab, pieces, dtype or features.dtype
    )
    return loss


class HeadLoss(torch.autograd.Function):
    """Forward computes the gradients too, up to the factor that only the backward pass knows. That factor, and the 1/N
    of the mean, scale the small results rather than the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab: int,
        pieces: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        total, of_features = torch.zeros((), device=features.device), []
        of_weight: torch.Tensor | None = None
        narrow = weight.to(dtype)
        for rows, labels in zip(features.to(dtype).chunk(pieces), targets.chunk(pieces), strict=True):
            gradient = rows @ narrow.t()  # the logits, until the next line
            total = total + cross_entropy_(gradient, labels, vocab).sum()
            of_features.append(gradient @ narrow)
            part = gradient.t() @ rows
            of_weight = part if of_weight is None else of_weight.float() + part
        ctx.save_for_backward(of_features[0] if pieces == 1 else torch.cat(of_features), of_weight)
        ctx.dtypes = features.dtype, weight.dtype
        return total / targets.numel()

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_features, of_weight = ctx.saved_tensors
        scale = above / of_features.size(0)
        features_dtype, weight_dtype = ctx.dtypes
        return (
            (scale * of_features.float()).to(features_dtype),
            (scale * of_weight).to(weight_dtype),
            None,
            None,
            None,
            None,
        )
