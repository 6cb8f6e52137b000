"""What was seen of a model that nobody described: a user's module, walked and run once on the host.

    traced.flops.at(16)                    # FLOPs of a step of 16 samples, counted
    traced.saved_bytes("bf16", "fused")    # Line(constant=..., per_sample=...)

It stands where a `Shape` stands and answers what the readers of both ask: `sequence`, `layers`, `ln_vocab`, `tied`. The
sizes of a decoder it does not have, and nothing here is guessed: what was not seen is None or empty. Made by
`engine/inspect_model.py`; plain values only, so that it travels in a job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN, SAMPLE = "token", "sample"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Lines of the user's code."""

    file: str
    line: int
    last: int | None = None
    """Of several lines."""

    def __str__(self) -> str:
        lines = f"{self.line}" if self.last in (None, self.line) else f"{self.line}-{self.last}"
        return f"{Path(self.file).name}:{lines}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Something that grows with the batch, seen at two sizes of it."""

    constant: float
    per_sample: float

    def at(self, samples: int) -> float:
        return self.constant + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that the forward pass leaves for the backward pass, parameters left out, under one way of running."""

    precision: str
    """'fp32', or 'bf16' under autocast."""
    attention: str
    """'naive': scores are stored; 'fused': one kernel that keeps none. Alike where SDPA is not called."""
    checkpointing: str
    """'none' or 'full'."""
    bytes: Line


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of the forward pass with its sizes for one sample; `count` calls alike."""

    where: str
    """The module that ran it, numbers of layers as a star: 'blocks.*.mlp.up'."""
    kind: str
    """'linear' and 'convolution' have a weight; 'product' is of two activations, or of a stack of weights."""
    m: int
    n: int
    k: int
    batch: int = 1
    grows: str | None = None
    """Which of m, n, k and batch is so many times as large for more samples; None: none of them."""
    count: int = 1
    area: int = 1
    """Places that a convolution's kernel covers: k is as many times the channels that go in."""
    place: Place | None = None
    """Where it is called."""
    made: Place | None = None
    """Where its layer is made, and its sizes are written."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Parameters of one size."""

    sizes: tuple[int, ...]
    of_layer: bool
    """A matrix inside a list of layers, which some optimizers treat apart."""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention that is written out: two batched products with a softmax between them."""

    place: Place
    causal: bool
    """What the softmax gave was zero above the diagonal."""
    module: str | None = None
    """'MultiheadAttention' where torch's own module wrote it out, because weights were asked for."""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The longest list of modules of one class."""

    name: str
    """Of the list, as named_modules calls it."""
    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Unlisted:
    """Equal modules that stand side by side under names of their own, and not in a list."""

    kind: str
    count: int
    made: tuple[Place, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Embedding:
    name: str
    rows: int
    width: int
    made: Place | None = None
    called: Place | None = None


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A layer whose products give several gates at once."""

    where: str
    """As a product's."""
    width: int
    gates: int

    @property
    def rows(self) -> int:
        return self.gates * self.width


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A line that makes the host wait for the device."""

    place: Place
    detail: str
    kind: str
    """Of core/profile.py's FINDINGS."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    parameters: int
    """Numbers in all, a shared tensor once."""
    trainable: int
    other_numbers: int = 0
    """Of frozen parameters that are no float32: whatever the recipe, they stay of their type."""
    other_bytes: int = 0
    tensors: tuple[Tensors, ...]
    """That are trained, by their sizes."""
    buffer_bytes: int
    items_per_sample: int = 1
    unit: str = SAMPLE
    """What an item is: 'sample', 'token', ..."""
    loss: str
    """'own': the file's; 'model': the model returns it; 'attribute': the model returns an object with .loss;
    'cross-entropy': of the logits that the model returns."""
    classes: int | None = None
    """Of those logits: what targets may be."""
    batch_bytes: int
    """Of one sample."""
    flops_forward: Line
    flops_backward: Line
    uncounted: tuple[str, ...] = ()
    """Operators that multiply and have no formula: with any of them the FLOPs are too low, and stand for nothing."""
    saved: tuple[Saved, ...]
    products: tuple[Product, ...] = ()
    products_left_out: int = 0
    """Products whose sizes do not simply grow with the batch."""
    blocks: Blocks | None = None
    unlisted: Unlisted | None = None
    """Where there are no blocks: what could be."""
    no_autocast: str | None = None
    """What a step under bf16 autocast raised, and where; None: it ran. `saved` is then of fp32 alone."""
    sdpa: bool = False
    """F.scaled_dot_product_attention is called."""
    sdpa_calls: tuple[Place, ...] = ()
    sdpa_drops: bool = False
    """One of the calls has a dropout_p above zero while the model is trained: what no fused kernel of a CPU takes."""
    attention: tuple[Attention, ...] = ()
    syncs: tuple[Sync, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    recurrent: tuple[Recurrent, ...] = ()
    dropout: tuple[str, ...] = ()
    """Modules with a rate above zero; it is zero while measuring."""
    draws: tuple[Place, ...] = ()
    """Lines of the forward pass that draw random numbers; empty: none is known, or they decide nothing."""
    generators: tuple[str, ...] = ()
    """That are drawn from and are not torch's: "Python's random"; torch's too where no line is known."""
    random: bool = False
    tied: bool = False
    """A rung ties built-in models. What a file ties, it ties itself: see `shared`."""
    shared: tuple[str, ...] = ()
    """Parameters that are one tensor under several names: 'wte.weight = head.weight'."""
    tanh_gelus: int = 0
    """nn.GELU(approximate='tanh') modules, which can be exchanged from outside."""
    gelu_calls: tuple[Place, ...] = ()
    """F.gelu(..., approximate='tanh') outside of such modules."""
    splits: bool = True
    """The loss of a batch is the mean over its parts. Batch norm makes it another: such a batch is never cut."""
    vocab: int | None = None
    """Of a language model whose file says so."""
    described: dict[str, Any] | None = field(default=None, hash=False)
    """What the file's shape() returned: fields of a Shape."""
    imports: dict[str, str] = field(default_factory=dict, hash=False)
    """Other files of the user's folder that the model is made with, and their SHA-256."""

    @property
    def sequence(self) -> int:
        """Items that a sample counts for, as tokens count for a sequence."""
        return self.items_per_sample

    @property
    def layers(self) -> int:
        return 1 if self.blocks is None else self.blocks.count

    @property
    def ln_vocab(self) -> float | None:
        """Where training must start, if that is known."""
        return None if self.vocab is None else math.log(self.vocab)

    @property
    def flops(self) -> Line:
        """Of forward and backward, as counted: a multiply-add is two, and of attention the whole square."""
        forward, backward = self.flops_forward, self.flops_backward
        return Line(constant=forward.constant + backward.constant, per_sample=forward.per_sample + backward.per_sample)

    def saved_bytes(self, precision: str, attention: str, checkpointing: str) -> Line:
        """Of the way of running that comes nearest: what was not run keeps no less than the plain way."""
        wanted = (precision, attention, checkpointing)
        return max(
            self.saved,
            key=lambda one: [
                mine == theirs
                for mine, theirs in zip((one.precision, one.attention, one.checkpointing), wanted, strict=True)
            ],
        ).bytes

    @property
    def left_out_words(self) -> str | None:
        if not self.products_left_out:
            return None
        return f"{self.products_left_out} products whose sizes do not simply grow with the batch are left out"

    @property
    def why_no_flops(self) -> str | None:
        """Why the counted FLOPs are not those of the model; None where they are."""
        return f"operators without a formula: {', '.join(self.uncounted)}" if self.uncounted else None

    @property
    def why_random(self) -> str | None:
        """Why no two runs can be compared; None where they can."""
        if not self.random:
            return None
        where = f" at {', '.join(map(str, self.draws))}" if self.draws else ""
        source = f" from {' and '.join(self.generators)}" if self.generators else ""
        drawn = f" (random numbers are drawn{where}{source})" if where or source else ""
        return f"the same weights and the same batch do not give the same loss each time{drawn}"
