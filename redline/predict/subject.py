"""A shape and how it is trained: everything that decides the sizes of a step's GEMMs, with their work and time.

    subject = Subject(shape=PRESETS["gpt2"].shape, micro_batch=16, device=find_device("H200"))
    predicted_gain(subject, subject.changed({"vocab": 50304})) -> 0.097

This is what `redline lint` reasons about. Time is that of the GEMMs alone, as predict/tiles.py predicts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from redline.core.devices import Device
from redline.core.plan import Plan
from redline.core.units import counted
from redline.core.workload import Shape
from redline.predict.gemms import Gemm, attention_gemms, linear_gemms
from redline.predict.sizes import Change
from redline.predict.tiles import ELEMENT_BYTES, estimate

DEFAULT_ALIGNMENT_BYTES = 128  # of all tensor cores since the A100
FP8_ALIGNMENT_BYTES = 16  # required by fp8 matmuls; more is not known to pay
ATTENTION = ("scores", "mix")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A shape and how it is trained: everything that decides the sizes of a step's GEMMs."""

    shape: Shape
    micro_batch: int
    tp: int = 1
    dtype: str = "bf16"
    device: Device | None = None
    batch_is_chosen: bool = False
    """True if the user named the micro batch; lint does not complain about an assumed one."""
    settled: frozenset[str] = frozenset()
    """Fields that earlier findings changed; no later one proposes another value."""

    def alignment_bytes(self, dtype: str) -> int:
        """Return the alignment of a row of this dtype."""
        if dtype == "fp8":
            return FP8_ALIGNMENT_BYTES
        return DEFAULT_ALIGNMENT_BYTES if self.device is None else self.device.alignment_bytes

    @property
    def attention_dtype(self) -> str:
        """fp8 training keeps attention at 16 bit."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def multiple(self) -> int:
        """What rows of the layers' matrices must be a multiple of, in elements, to be aligned."""
        return max(1, self.alignment_bytes(self.dtype) // ELEMENT_BYTES[self.dtype])

    @property
    def attention_multiple(self) -> int:
        """The same for queries, keys, values and scores."""
        dtype = self.attention_dtype
        return max(1, self.alignment_bytes(dtype) // ELEMENT_BYTES[dtype])

    def dtype_of(self, gemm: Gemm) -> str:
        return self.attention_dtype if gemm.where in ATTENTION else self.dtype

    @property
    def undivided(self) -> list[str]:
        """The sizes that do not divide among the ranks, in words."""
        shape = self.shape
        sizes = {counted(shape.heads, "head"): shape.heads, f"vocabulary {shape.vocab}": shape.vocab}
        sizes[f"d_ff {shape.d_ff}"] = shape.d_ff
        if shape.kv_heads is not None:
            sizes[counted(shape.kv_heads, "key-value head")] = shape.kv_heads
        return [words for words, size in sizes.items() if size % self.tp]

    @cached_property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms)

    @cached_property
    def seconds(self) -> float | None:
        """Predicted seconds of all GEMMs of a step; None without a device, or if a size does not divide among the
        ranks."""
        return self._seconds(whole_waves=True)

    @cached_property
    def seconds_of_tiles(self) -> float | None:
        """The same, if a last round of tiles cost only the multiprocessors it uses."""
        return self._seconds(whole_waves=False)

    def _seconds(self, whole_waves: bool) -> float | None:
        device = self.device
        if device is None or self.undivided:
            return None
        return math.fsum(
            gemm.count * estimate(gemm, device, self.dtype_of(gemm), whole_waves=whole_waves).seconds
            for gemm in self.gemms
        )

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """GEMMs of one step on one rank: those with weights, and attention's as unfused matmuls."""
        size = {"micro_batch": self.micro_batch, "tp": self.tp}
        return (*linear_gemms(self.shape, Plan(), **size), *attention_gemms(self.shape, **size))

    def changed(self, change: Change) -> Subject:
        own = {name: value for name, value in change.items() if name in ("micro_batch", "tp")}
        shape = replace(self.shape, **{name: value for name, value in change.items() if name not in own})
        return replace(self, shape=shape, settled=self.settled | change.keys(), **own)


def useful_flops(subject: Subject, vocab: int) -> int:
    """Return the FLOPs with a vocabulary of `vocab`: rows that pad it are not useful work."""
    if subject.shape.vocab == vocab:
        return subject.flops
    return replace(subject, shape=replace(subject.shape, vocab=vocab)).flops


def gain(before: Subject, after: Subject, seconds_before: float | None, seconds_after: float | None) -> float | None:
    """Return how much more useful work a second of GEMM time does: 0.05 is 5 % more. Counting work, not time alone,
    keeps a smaller layer from looking like a faster one."""
    if not seconds_before or not seconds_after:
        return None
    vocab = before.shape.vocab
    return useful_flops(after, vocab) / seconds_after / (useful_flops(before, vocab) / seconds_before) - 1


def predicted_gain(before: Subject, after: Subject) -> float | None:
    return gain(before, after, before.seconds, after.seconds)
