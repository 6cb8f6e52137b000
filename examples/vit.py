"""A vision transformer as a workload: `redline ladder examples/vit.py:vit`.

Two sizes in one file: `vit` is small enough for a laptop, `vit_base` is ViT-B/16 of the paper (arXiv 2010.11929) with a
batch of its own. Attention goes through F.scaled_dot_product_attention, so `flash` applies from outside.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(
        self, *, image: int, patch: int, width: int, layers: int, heads: int, classes: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit() -> nn.Module:
    return ViT(image=32, patch=8, width=64, layers=2, heads=4, classes=10)


def vit_batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return images(size, seed, side=32, classes=10)


def vit_base() -> nn.Module:
    return ViT(image=224, patch=16, width=768, layers=12, heads=12, classes=1000)


def vit_base_batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return images(size, seed, side=224, classes=1000)


def images(size: int, seed: int, *, side: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(size, 3, side, side, generator=generator)
    return pixels, torch.randint(classes, (size,), generator=generator)
