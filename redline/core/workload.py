"""What must be computed: the model's shape, the text it reads, how it is trained. Nothing about how fast.

Workload(name="tiny", shape=Shape(...), tokenizer="bytes", micro_batch=16, learning_rate=3e-3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from redline.core.errors import UserError

SAMPLE_CORPUS = "sample"  # the prose that ships with every Python; see data/text.py


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT's sizes, unpadded: the model the user asked for, whatever a recipe adds to it."""

    layers: int
    heads: int
    d_model: int
    d_ff: int
    vocab: int
    sequence: int
    """Tokens of context, which is also the number of learned positions."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "d_model", "d_ff", "vocab", "sequence"):
            check_positive(name, getattr(self, name))
        if self.d_model % self.heads:
            raise UserError(
                f"{self.heads} heads do not divide d_model {self.d_model}",
                "each head takes an equal share of the width",
                f"choose a number of heads that divides {self.d_model}",
            )

    @property
    def ln_vocab(self) -> float:
        """The loss of a model that knows nothing: where training must start."""
        return math.log(self.vocab)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its text and its training settings; a Recipe says how to run it."""

    name: str
    shape: Shape
    tokenizer: str
    """'bytes' or 'gpt2'."""
    micro_batch: int
    """Sequences per step when nobody says otherwise."""
    learning_rate: float
    corpus: str = SAMPLE_CORPUS
    """SAMPLE_CORPUS or the path of a text file."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1337


def check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"{name} is {value!r}", f"{name} counts things, so it is a whole number from 1", f"set {name} to 1 or more"
        )
