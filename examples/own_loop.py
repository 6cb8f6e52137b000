"""Your own training loop, with a recipe applied to the model and a meter in the loop.

    python examples/own_loop.py                 # the rungs below
    python examples/own_loop.py best.json       # the recipe of a ladder or of a tune

Model and loop are yours: `redline.prepare` applies the recipe to the model, `redline.Meter` measures the loop.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import redline

VOCAB, TOKENS, SEQUENCES, WIDTH, HEADS, LAYERS = 256, 32, 8, 64, 4, 2
RUNGS = ("bf16", "flash", "fused-adamw")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, d]
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm_2(x))


class TinyLM(nn.Module):
    """A language model; `forward` returns logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a pair of inputs and targets, [B, T] each."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def build_model() -> TinyLM:
    torch.manual_seed(1337)
    return TinyLM()


def build_loader(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Load sequences that count upwards from random numbers: something that can be learned."""
    starts = torch.randint(0, VOCAB, (steps * SEQUENCES, 1), generator=torch.Generator().manual_seed(1))
    ids = (starts + torch.arange(TOKENS + 1)) % VOCAB
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=SEQUENCES)


def main(steps: int = 30, recipe: str | tuple[str, ...] = RUNGS) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepared = redline.prepare(build_model(), recipe, learning_rate=1e-3, loss=next_token_loss, device=device)
    meter = redline.Meter(tokens_per_step=SEQUENCES * TOKENS, model=prepared)
    print(prepared)
    losses = []
    for batch in meter.data(build_loader(steps)):
        losses.append(prepared.step(batch))  # still on the device: reading it here would make the host wait
        meter.step()
    print(meter)
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    found = main(recipe=sys.argv[1] if len(sys.argv) > 1 else RUNGS)
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
