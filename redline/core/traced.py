"""What was observed of a model that has no description: a user's module, walked and run on the host.

    traced.flops.at(16)                            # FLOPs of a step of 16 samples, counted
    traced.saved_bytes("bf16", "fused", "none")    # Line(constant=..., per_sample=...)

A `Traced` takes the place of a `Shape` and has the attributes that readers of both use: `sequence`, `layers`,
`ln_vocab`, `tied`. It has no decoder sizes, and nothing here is guessed: what was not seen is None or empty. Made by
`engine/inspect_model.py` of plain values only, so that it can be part of a job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN, SAMPLE = "token", "sample"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One or several lines of the user's code."""

    file: str
    line: int
    last: int | None = None
    """The last of several lines."""

    def __str__(self) -> str:
        lines = f"{self.line}" if self.last in (None, self.line) else f"{self.line}-{self.last}"
        return f"{Path(self.file).name}:{lines}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A quantity that grows linearly with the batch, measured at two batch sizes."""

    constant: float
    per_sample: float

    def at(self, samples: int) -> float:
        return self.constant + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that the forward pass keeps for the backward pass, without parameters, in one configuration."""

    precision: str
    """'fp32', or 'bf16' under autocast."""
    attention: str
    """'naive': scores are stored; 'fused': one kernel that keeps none. Always 'naive' if SDPA is not called."""
    checkpointing: str
    """'none' or 'full'."""
    bytes: Line


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matmul of the forward pass with its sizes for one sample; `count` identical calls."""

    where: str
    """The module that ran it, with layer numbers as a star: 'blocks.*.mlp.up'."""
    kind: str
    """'linear' and 'convolution' have a weight; 'product' is of two activations, or with a stack of weights."""
    m: int
    n: int
    k: int
    batch: int = 1
    grows: str | None = None
    """Which of m, n, k and batch is multiplied by the number of samples; None: none of them."""
    count: int = 1
    area: int = 1
    """Positions that a convolution's kernel covers; k is this times the input channels of a group."""
    place: Place | None = None
    """Where it is called."""
    made: Place | None = None
    """Where its layer is made, and so where its sizes are written."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Parameters of the same shape."""

    sizes: tuple[int, ...]
    of_layer: bool
    """True for matrices inside a list of layers, which some optimizers treat differently."""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention that is written out: two batched matmuls with a softmax between them."""

    place: Place
    causal: bool
    """True if the softmax's output was zero above the diagonal."""
    module: str | None = None
    """'MultiheadAttention' if torch's own module wrote it out because its weights were requested."""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The longest list of modules of one class."""

    name: str
    """Name of the list, as in `named_modules`."""
    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Unlisted:
    """Equal modules of one parent that have names of their own instead of being in a list."""

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
    """A recurrent layer, whose matmuls compute all gates at once."""

    where: str
    """As in `Product`."""
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
    """A key of core/profile.py's FINDINGS."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    parameters: int
    """Total number of parameters, with shared tensors counted once."""
    trainable: int
    other_numbers: int = 0
    """Parameters that are not float32. They are frozen, and keep their dtype whatever the recipe."""
    other_bytes: int = 0
    tensors: tuple[Tensors, ...]
    """Trainable parameters, grouped by shape."""
    buffer_bytes: int
    items_per_sample: int = 1
    unit: str = SAMPLE
    """What an item is: 'sample', 'token', ..."""
    loss: str
    """Where the loss comes from. 'own': the file's function; 'model': the model returns it; 'attribute': the model
    returns an object with .loss; 'cross-entropy': it is computed from the logits that the model returns."""
    classes: int | None = None
    """Number of classes of those logits, which targets must stay below; None for other losses."""
    batch_bytes: int
    """Bytes of one sample."""
    flops_forward: Line
    flops_backward: Line
    uncounted: tuple[str, ...] = ()
    """Operators that multiply and have no FLOP formula. If there are any, the FLOPs are too low to be of use."""
    saved: tuple[Saved, ...]
    products: tuple[Product, ...] = ()
    products_left_out: int = 0
    """Number of matmuls whose sizes do not simply grow with the batch."""
    blocks: Blocks | None = None
    unlisted: Unlisted | None = None
    """Modules that could be blocks, if there are none."""
    no_autocast: str | None = None
    """What a step under bf16 autocast raised, and where, in which case `saved` is for fp32 only; None: it ran."""
    sdpa: bool = False
    """True if F.scaled_dot_product_attention is called."""
    sdpa_calls: tuple[Place, ...] = ()
    sdpa_drops: bool = False
    """True if one of the calls has a dropout_p above zero in training, which no fused CPU kernel accepts."""
    attention: tuple[Attention, ...] = ()
    syncs: tuple[Sync, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    recurrent: tuple[Recurrent, ...] = ()
    dropout: tuple[str, ...] = ()
    """Modules and calls with a dropout rate above zero; it is set to zero while measuring."""
    draws: tuple[Place, ...] = ()
    """Lines of the forward pass that draw random numbers; empty if none is known, or if the numbers decide nothing."""
    generators: tuple[str, ...] = ()
    """Generators that are drawn from, such as "Python's random"; torch's only if no line is known."""
    random: bool = False
    tied: bool = False
    """Always False: a rung ties built-in models only. For weights that the file ties itself see `shared`."""
    shared: tuple[str, ...] = ()
    """Parameters that are one tensor under several names: 'wte.weight = head.weight'."""
    tanh_gelus: int = 0
    """Number of nn.GELU(approximate='tanh') modules, which can be replaced from outside."""
    gelu_calls: tuple[Place, ...] = ()
    """Calls of F.gelu(..., approximate='tanh') outside of such modules."""
    splits: bool = True
    """True if the loss of a batch is the mean over its parts. With batch norm it is not: that batch is never split."""
    vocab: int | None = None
    """Vocabulary size, if the file describes a language model."""
    described: dict[str, Any] | None = field(default=None, hash=False)
    """What the file's shape() returned: fields of a Shape."""
    imports: dict[str, str] = field(default_factory=dict, hash=False)
    """Other files of the user's folder that are imported to make the model, and their SHA-256."""

    @property
    def sequence(self) -> int:
        """Items per sample, as a text model has tokens per sequence."""
        return self.items_per_sample

    @property
    def layers(self) -> int:
        return 1 if self.blocks is None else self.blocks.count

    @property
    def ln_vocab(self) -> float | None:
        """The loss at which training must start; None if unknown."""
        return None if self.vocab is None else math.log(self.vocab)

    @property
    def flops(self) -> Line:
        """FLOPs of forward and backward as counted: a multiply-add is two, and attention counts as the whole square."""
        forward, backward = self.flops_forward, self.flops_backward
        return Line(constant=forward.constant + backward.constant, per_sample=forward.per_sample + backward.per_sample)

    def saved_bytes(self, precision: str, attention: str, checkpointing: str) -> Line:
        """Return the bytes kept in the nearest configuration that was run. One that was not run saves nothing over the
        plain one."""
        wanted = (precision, attention, checkpointing)
        return max(
            self.saved,
            key=lambda one: [
                mine == theirs
                for mine, theirs in zip((one.precision, one.attention, one.checkpointing), wanted, strict=True)
            ],
        ).bytes

    @property
    def left_out_text(self) -> str | None:
        if not self.products_left_out:
            return None
        return f"{self.products_left_out} products whose sizes do not simply grow with the batch are left out"

    @property
    def why_no_flops(self) -> str | None:
        """Why the counted FLOPs are not those of the model; None if they are."""
        return f"operators without a formula: {', '.join(self.uncounted)}" if self.uncounted else None

    @property
    def why_random(self) -> str | None:
        """Why no two runs can be compared; None if they can."""
        if not self.random:
            return None
        where = f" at {', '.join(map(str, self.draws))}" if self.draws else ""
        source = f" from {' and '.join(self.generators)}" if self.generators else ""
        drawn = f" (random numbers are drawn{where}{source})" if where or source else ""
        return f"the same weights and the same batch do not give the same loss each time{drawn}"
