"""The training loss: cross-entropy in fp32 whatever the model's dtype.

`next_token_loss` takes logits. `head_loss` takes the head's input and never returns the logits: it computes their
gradient as soon as it has them, in one go or piece by piece, so that they need not wait for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels.cross_entropy import cross_entropy_
from redline.kernels.products import product
from redline.kernels.transpose import transposed
from redline.model.first_order import first_order
from redline.model.fp8 import head_gradients, narrowed


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens. logits [B, T, V], targets [B, T]; a logit of -inf stands for no class."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def head_loss(
    features: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab: int,
    pieces: int,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    tuned: bool = False,
) -> torch.Tensor:
    """Return the same mean from features [B, T, C] and the head's weight [rows, C]. `dtype`: what autocast would give
    the matmuls (None: the features' type). `fp8`: they take 8-bit inputs and return `dtype`. `tuned`: 16-bit ones use
    the algorithm that is fastest here."""
    loss: torch.Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
        features.flatten(0, 1), weight, targets.flatten(), vocab, pieces, dtype or features.dtype, fp8, tuned
    )
    return loss


class HeadLoss(torch.autograd.Function):
    """The forward pass computes the gradients too, up to the factor that only the backward pass knows. That factor, and
    the 1/N of the mean, scale the small results rather than the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab: int,
        pieces: int,
        dtype: torch.dtype,
        fp8: bool,
        tuned: bool,
    ) -> torch.Tensor:
        total, of_features = torch.zeros((), device=features.device), []
        of_weight: torch.Tensor | None = None
        if fp8:
            rows, piece = narrow_head(features, weight, vocab, dtype)
        elif tuned:
            rows, piece = tuned_head(features, weight, vocab, dtype, weight.dtype if pieces == 1 else dtype)
        else:
            rows, piece = wide_head(features, weight, vocab, dtype)
        for part_of_rows, labels in zip(rows.chunk(pieces), targets.chunk(pieces), strict=True):
            losses, of_rows, part = piece(part_of_rows, labels)
            total = total + losses.sum()
            of_features.append(of_rows)
            of_weight = part if of_weight is None else of_weight.float() + part
        ctx.save_for_backward(of_features[0] if pieces == 1 else torch.cat(of_features), of_weight)
        ctx.dtypes = features.dtype, weight.dtype
        return total / targets.numel()

    @staticmethod
    @first_order
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
            None,
            None,
        )


Piece = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Maps rows of the features and their targets to losses and the gradients of these rows and of the head's weight."""


HEADROOM = 2.0**-6  # of fp16, whose range ends at 65,504; features of a norm stay far above its smallest numbers


def of_head(gradient: torch.Tensor, rows: torch.Tensor, matmul: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the head's weight, whose sum over all tokens comes before the 1/N of the mean. In fp16 it
    may overflow, whatever the loss scale, which comes later too: some 140,000 tokens of bytes suffice, by the mean
    gradient of a GPT that begins."""
    if rows.dtype != torch.float16:
        return matmul(gradient.t(), rows)
    return matmul(gradient.t(), rows * HEADROOM).float() / HEADROOM


def wide_head(
    features: torch.Tensor, weight: torch.Tensor, vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Piece]:
    """Return the features in the matmuls' type, and the function that handles a piece of them."""
    narrow = weight.to(dtype)

    def piece(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = rows @ narrow.t()  # the logits, until the next line
        losses = cross_entropy_(gradient, labels, vocab)
        return losses, gradient @ narrow, of_head(gradient, rows, torch.mm)

    return features.to(dtype), piece


def tuned_head(
    features: torch.Tensor, weight: torch.Tensor, vocab: int, dtype: torch.dtype, of_weight: torch.dtype
) -> tuple[torch.Tensor, Piece]:
    """`of_weight`: the type of the weight's gradient. A gradient computed in one piece has the weight's own type and
    needs no cast afterwards; pieces have the matmuls' type, since adding them up widens them anyway."""
    narrow = weight.to(dtype)

    def piece(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = product(rows, narrow.t(), dtype)
        losses = cross_entropy_(gradient, labels, vocab)
        return losses, product(gradient, narrow, dtype), of_head(gradient, rows, lambda a, b: product(a, b, of_weight))

    return features.to(dtype), piece


def narrow_head(
    features: torch.Tensor, weight: torch.Tensor, vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Piece]:
    (values, inverse), head = narrowed(features), narrowed(weight)
    turned = transposed(head[0])

    def piece(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return head_gradients((rows, inverse), head, turned, labels, vocab, dtype)

    return values, piece
