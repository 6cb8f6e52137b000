"""What must be computed: the model's shape, the text it reads, how it is trained. Nothing about how fast.

Workload(name="tiny", shape=Shape(...), tokenizer="bytes", micro_batch=16, learning_rate=3e-3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from redline.core.errors import UserError, unknown_name
from redline.core.traced import TOKEN, Traced

SIZES = ("layers", "heads", "d_model", "d_ff", "vocab", "sequence")
OPTIONAL_SIZES = ("max_positions", "kv_heads", "head_dim", "window", "windowed_layers")
CHOICES = {"positions": ("learned", "rope", "none"), "norm": ("layernorm", "rmsnorm")}
ON_CPUS = "on a CPU "  # begins reasons that may not hold on a GPU, where autocast casts more functions
SAMPLE_CORPUS = "sample"  # the prose that ships with every Python; see data/text.py
NO_TOKENIZER = "none"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes, unpadded: the model the user asked for, whatever a recipe adds to it. The defaults are
    GPT-2's; the fields below `sequence` describe later models."""

    layers: int
    heads: int
    d_model: int
    d_ff: int
    vocab: int
    sequence: int
    """Tokens per sequence: the context length, or less if a run uses shorter sequences."""
    max_positions: int | None = None
    """The longest possible context; with learned positions, the rows of their table. None: `sequence`."""
    kv_heads: int | None = None
    """Heads of keys and values: fewer than `heads` is GQA, one is MQA. None: as many as `heads`."""
    head_dim: int | None = None
    """None: d_model / heads."""
    gated: bool = False
    """A gated MLP (SwiGLU, GeGLU) has three matrices, two of them side by side."""
    tied: bool = True
    """True if the published model's head is its token embedding. Whether a run ties them is up to its plan."""
    fused_qkv: bool = True
    """Queries, keys and values come out of one matmul."""
    biases: bool = True
    """The linear layers have biases, except for the head."""
    qkv_biases: bool | None = None
    """Biases of queries, keys and values, if different from the others: Qwen2 has only these. None: `biases`."""
    mlp_biases: bool | None = None
    """The same for the MLP's two or three layers."""
    head_bias: bool = False
    positions: str = "learned"
    """'learned', 'rope' or 'none'."""
    norm: str = "layernorm"
    """'layernorm' (gain and bias) or 'rmsnorm' (gain)."""
    layer_norms: int = 2
    """Norms over the model's width in each layer: before attention and before the MLP; Gemma 2 has two more after."""
    qk_norms: bool = False
    """Queries and keys are normalised too, with gains as wide as a head."""
    window: int | None = None
    """Sliding-window attention: how many tokens back a token sees."""
    windowed_layers: int | None = None
    """Number of layers with the window; the others see everything. None: all of them."""

    def __post_init__(self) -> None:
        for name in (*SIZES, "layer_norms"):
            check_positive(name, getattr(self, name))
        for name in OPTIONAL_SIZES:
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown_name(name, str(getattr(self, name)), known)
        self._check_heads()
        self._check_positions()
        self._check_window()

    def _check_positions(self) -> None:
        if self.positions == "learned" and self.sequence > self.positions_count:
            raise UserError(
                f"{self.sequence} tokens do not fit {self.positions_count} learned positions",
                "the model has a vector for each position it learned, and none beyond",
                f"use sequences of {self.positions_count} tokens or fewer",
            )

    def _check_window(self) -> None:
        if self.windowed_layers is None:
            return
        if self.window is None:
            raise UserError(
                f"windowed_layers is {self.windowed_layers} and there is no window",
                "the size of their window is missing",
                "give window, or leave windowed_layers out",
            )
        if self.windowed_layers > self.layers:
            raise UserError(
                f"{self.windowed_layers} of {self.layers} layers have a window",
                "a part is not larger than the whole",
                f"set windowed_layers to {self.layers} or less",
            )

    def _check_heads(self) -> None:
        if self.head_dim is None and self.d_model % self.heads:
            raise UserError(
                f"{self.heads} heads do not divide d_model {self.d_model}",
                "each head takes an equal share of the width",
                f"choose a number of heads that divides {self.d_model}, or give head_dim",
            )
        if self.heads % self.key_value_heads:
            raise UserError(
                f"{self.key_value_heads} key-value heads do not divide {self.heads} heads",
                "each key-value head serves an equal group of query heads",
                f"choose a number of key-value heads that divides {self.heads}",
            )

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head: d_model / heads unless the shape says otherwise."""
        return self.d_model // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all heads together, which the output projection reads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and again of all values."""
        return self.key_value_heads * self.head_width

    @property
    def positions_count(self) -> int:
        """The longest context; with learned positions the rows of their table."""
        return self.sequence if self.max_positions is None else self.max_positions

    def has_bias(self, where: str) -> bool:
        """True if the linear layer of this name (predict/gemms.py) has a bias: 'qkv', 'q', 'kv', 'proj', 'up', 'down'
        or 'head'."""
        if where == "head":
            return self.head_bias
        own = {"qkv": self.qkv_biases, "q": self.qkv_biases, "kv": self.qkv_biases}
        own |= {"up": self.mlp_biases, "down": self.mlp_biases}
        said = own.get(where)
        return self.biases if said is None else said

    @property
    def layers_with_window(self) -> int:
        if self.window is None:
            return 0
        return self.layers if self.windowed_layers is None else self.windowed_layers

    @property
    def ln_vocab(self) -> float:
        """The loss of a model that knows nothing, where training must start."""
        return math.log(self.vocab)


def other_than_gpt2(shape: Shape) -> list[str]:
    """Return the fields in which a shape differs from GPT-2's. Sequences shorter than the context do not count."""
    sizes = {name: getattr(shape, name) for name in (*SIZES, "max_positions")}
    plain = Shape(**sizes)
    return [one.name for one in fields(Shape) if getattr(shape, one.name) != getattr(plain, one.name)]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model's code comes from. With it, a job has everything a worker needs to build the model."""

    kind: str = "gpt2"
    """'gpt2': the built-in model; 'huggingface': transformers' own, built from `config`; 'python': a user's file."""
    config: dict[str, Any] | None = field(default=None, hash=False)
    """A Hugging Face config.json as it was read."""
    file: str | None = None
    """A user's file, by absolute path. `factory` is the function that makes the model, `digest` the file's SHA-256."""
    factory: str | None = None
    digest: str | None = None
    dropout: bool = False
    """For a user's file: leave its dropout on. Measurements turn it off, since no two could be compared with it."""


BUILT_IN = Source()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its text and its training settings; a Recipe says how to run it."""

    name: str
    shape: Shape | Traced
    """The sizes of a described model, or what was observed of a user's module."""
    tokenizer: str
    """'bytes' or 'gpt2'; NO_TOKENIZER where a file makes its own batches."""
    micro_batch: int
    """Default number of sequences per step."""
    learning_rate: float
    corpus: str = SAMPLE_CORPUS
    """SAMPLE_CORPUS or the path of a text file."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1337
    source: Source = BUILT_IN
    cannot: dict[str, str] = field(default_factory=dict, hash=False)
    """Rungs that cannot be applied to this model's code from outside, with the reason; one that begins with ON_CPUS
    holds only there. The built-in model allows all."""
    notes: tuple[str, ...] = ()
    """Choices that were made for the user, with their reasons."""
    words: str | None = None
    """What to type to get it again, if that is not its name."""

    def refusal(self, rung: str, kind: str) -> str | None:
        """Return why the model's code does not allow a rung on this kind of device; None if it does, or if only trying
        would tell."""
        reason = self.cannot.get(rung)
        return None if reason is not None and reason.startswith(ON_CPUS) and kind != "cpu" else reason

    @property
    def decoder(self) -> Shape:
        """The sizes of a described model. Callers must check `reads_text` first."""
        assert isinstance(self.shape, Shape), f"{self.name} was traced, not described"
        return self.shape

    @property
    def reads_text(self) -> bool:
        """True if batches are windows of a text's tokens; a user's file makes its own."""
        return self.source.kind != "python"

    @property
    def unit(self) -> str:
        """What a rate counts."""
        return self.shape.unit if isinstance(self.shape, Traced) else TOKEN

    @property
    def splits(self) -> bool:
        """True if the loss of a batch is the mean over its parts, so that a large batch may be split."""
        return self.shape.splits if isinstance(self.shape, Traced) else True

    @property
    def why_unchecked(self) -> str | None:
        """Why equivalence cannot be checked, whatever is measured; None if it can."""
        return self.shape.why_random if isinstance(self.shape, Traced) else None


def check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"{name} is {value!r}", f"{name} counts things, so it is a whole number from 1", f"set {name} to 1 or more"
        )
