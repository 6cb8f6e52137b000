"""Causal attention, twice: as four lines anyone can check, and as one call whose backend the process has pinned.

Inputs and outputs are [B, heads, T, d_head].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [B, heads, T, T]
    scores = scores.masked_fill(future, float("-inf"))
    weights = scores.softmax(dim=-1)
    return weights @ v  # [B, heads, T, d_head]


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    """SDPA. `engine/build.py` decides which kernel runs, by leaving exactly one backend on."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION: dict[str, Attention] = {"naive": naive_attention, "flash": fused_attention, "cudnn": fused_attention}
# Training with packed attention goes through `model/fused.py`; these serve sampling.
ATTENTION |= {"packed-cudnn": fused_attention, "packed-flash4": fused_attention}
