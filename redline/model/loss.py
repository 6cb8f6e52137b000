"""The training loss: cross-entropy in fp32 whatever the model's dtype, over all logits at once or piece by piece."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PIECES = 8  # of a chunked loss: an eighth of the logits is small beside the layers, and still a large matmul


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens. logits [B, T, V], targets [B, T]; a logit of -inf is a class that does not exist."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def chunked_next_token_loss(
    head: nn.Module, features: torch.Tensor, targets: torch.Tensor, pieces: int = PIECES
) -> torch.Tensor:
    """The same mean without ever holding all logits: each piece's are thrown away and computed again for its gradient.

    features [B, T, C], targets [B, T]. Costs one more forward of the head.
    """
    rows, labels = features.flatten(0, 1), targets.flatten()
    sums = [
        checkpoint(partial(_sum_of_losses, head), some, theirs, use_reentrant=False, preserve_rng_state=False)
        for some, theirs in zip(rows.chunk(pieces), labels.chunk(pieces), strict=True)
    ]
    return torch.stack(sums).sum() / labels.numel()


def _sum_of_losses(head: nn.Module, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(features).float(), targets, reduction="sum")
