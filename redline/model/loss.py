"""The training loss: cross-entropy over full logits, in fp32 whatever the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens. logits [B, T, V], targets [B, T]; a logit of -inf is a class that does not exist."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
