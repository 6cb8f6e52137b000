"""A classifier as a workload: `redline ladder examples/mlp.py:mlp`.

The batch is a pair of inputs and targets and the model returns logits, so the loss defaults to cross-entropy.
"""

import torch
from torch import nn

FEATURES, WIDTH, CLASSES = 784, 512, 10


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


def make_batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, FEATURES, generator=generator)
    return images, images[:, :CLASSES].argmax(dim=1)  # something to learn
