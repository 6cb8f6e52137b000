"""A small GPT with two mistakes in it: `redline profile examples/naive_gpt.py:gpt` and `redline lint` find both.

Attention is written out, so no attention kernel can replace it from outside: the ladder's `flash` row names the lines
to change. And the loss is read inside forward(), which makes the host wait for the GPU in every step.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, LAYERS, SEQUENCE = 257, 64, 4, 2, 64
items_per_sample, unit = SEQUENCE, "token"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // HEADS)
        scores = scores.masked_fill(self.future[:T, :T], float("-inf"))
        weights = F.softmax(scores, dim=-1)
        y = weights @ v
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.worst = 0.0

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.worst = max(self.worst, loss.item())  # the host waits here, in every step
        return loss


def gpt() -> nn.Module:
    return GPT()


def make_batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (size, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def shape() -> dict[str, object]:
    """Optional: tells lint what the sizes are for, and the check at which loss training must start."""
    return {
        "layers": LAYERS,
        "heads": HEADS,
        "d_model": WIDTH,
        "d_ff": 4 * WIDTH,
        "vocab": VOCAB,
        "sequence": SEQUENCE,
        "tied": False,
    }
