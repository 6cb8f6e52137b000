"""A stage of a pipeline: some blocks of a GPT, with the embedding before the first and the head after the last.

    stage = Stage(shape, layers=layers_of(1, stages=2, layers=12), tied=True)      # blocks 6 to 11, ln_f and the head
    stage.features(x)                     # [B, T, C] from the stage before -> [B, T, C]; the first one takes tokens

It is the GPT without what other stages hold: parameters keep the names they have in the whole model, so seeds and
checkpoints still match. A tied head is a copy of the embedding under the embedding's name, `wte.weight`: the first and
the last stage hold one each, and `engine/pipeline.py` keeps them equal.
"""

from __future__ import annotations

from typing import Any

import torch

from redline.core.workload import Shape
from redline.model.gpt import GPT


class Stage(GPT):
    def __init__(self, shape: Shape, *, layers: range, tied: bool = True, **options: Any) -> None:
        """`layers`: the blocks of this stage. On 'meta', the parts that are removed again cost nothing."""
        super().__init__(shape, tied=tied, **options)
        whole = {name for name, _ in self.named_parameters()}
        self.layers, self.first, self.last = layers, layers.start == 0, layers.stop == shape.layers
        self.is_copy = tied and self.last and not self.first
        """True if `wte.weight` here is the head, a copy of the first stage's, which is the authoritative one."""
        for number in set(range(shape.layers)) - set(layers):
            delattr(self.h, str(number))  # the remaining blocks keep their numbers
        if not self.first:
            del self.wpe
            if not self.is_copy:
                del self.wte
        if not self.last:
            del self.ln_f, self.lm_head
        self.elsewhere = frozenset(whole - {name for name, _ in self.named_parameters()})
        """Parameters of the whole model that other stages hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Like `features`, but the last stage returns logits, [B, T, rows]."""
        x = self.features(x)
        return self.lm_head(x) if self.last else x

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through_blocks(self.embedded(x) if self.first else x)
        return self.ln_f(x) if self.last else x


def layers_of(stage: int, *, stages: int, layers: int) -> range:
    """Return the blocks of a stage; all stages have equally many."""
    if layers % stages:
        raise ValueError(f"{layers} layers do not make {stages} stages")
    each = layers // stages
    return range(stage * each, (stage + 1) * each)
