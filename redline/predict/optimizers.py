"""Optimizers as memory sees them: bytes of state per parameter, and what an update needs for a moment.

    OPTIMIZERS["adamw-fused"].state -> 8;  find_optimizer("lion").state -> 4
    OPTIMIZERS["adafactor"].state_bytes((768, 3072), of_layer=True) -> 4 * 768 * 3072 + 4 * (768 + 3072)

The same names as optim/table.py, which builds them. State is counted for fp32 weights and gradients unless the row says
otherwise; the counter of steps that most keep per tensor, 4 bytes and often on the host, is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from redline.core.errors import unknown_name

FP32 = 4
SMALLEST_QUANTISED = 4096  # numbers in a tensor; torchao, like bitsandbytes, leaves smaller ones as they are
CODES = 256  # of 8 bits: a moment carries the table of the numbers they stand for


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    name: str
    state: float
    """Bytes that stay, per parameter."""
    state_of_rest: float | None = None
    """Of embedding, head and vectors, where another rule updates those."""
    state_of_vectors: float | None = None
    """Of vectors, where they are not treated as matrices are."""
    factored: bool = False
    """A second moment kept as one number per row and one per column of a matrix."""
    block: int | None = None
    """Two 8-bit moments with a scale for each so many numbers; a tensor that does not divide keeps two of fp32."""
    weights: int = FP32
    """Bytes of a weight, and of its gradient."""
    of_all: float = 0
    """Bytes per parameter that exist during the update, for all parameters at once."""
    of_largest: float = 0
    """The same, for one tensor at a time: the largest decides."""
    of_previous: float = 0
    """The same for the largest matrix of a layer: what the tensor before still has, or what only those need."""
    note: str

    def state_bytes(self, sizes: tuple[int, ...], *, of_layer: bool) -> int:
        """Of one tensor, to the byte. `of_layer`: a matrix inside the layers."""
        numbers = math.prod(sizes)
        if self.block is not None:
            if numbers < SMALLEST_QUANTISED or numbers % self.block:
                return 2 * FP32 * numbers
            return 2 * (numbers + FP32 * numbers // self.block + FP32 * CODES)
        lines = FP32 * sum(sizes) if self.factored and len(sizes) > 1 else 0
        return round(self._per_parameter(of_layer=of_layer, matrix=len(sizes) > 1) * numbers) + lines

    def _per_parameter(self, *, of_layer: bool, matrix: bool) -> float:
        if not matrix and self.state_of_vectors is not None:
            return self.state_of_vectors
        return self.state if of_layer or self.state_of_rest is None else self.state_of_rest


OPTIMIZERS = {
    row.name: row
    for row in (
        # A square root, then that divided, while the last tensor's is still there (torch, _single_tensor_adam).
        OptimizerMemory(
            name="adamw-loop", state=8, of_largest=8, of_previous=4, note="two fp32 moments; copies of one tensor"
        ),
        # The same for all tensors in one call, and the division in place (torch, _multi_tensor_adam).
        OptimizerMemory(name="adamw-foreach", state=8, of_all=4, note="two fp32 moments; a square root of all of them"),
        OptimizerMemory(name="adamw-fused", state=8, note="two fp32 moments; nothing else"),
        # What its compiled kernels hold for a moment is not known, and taken for nothing.
        OptimizerMemory(name="adamw-8bit", state=2, block=256, note="two 8-bit moments, a scale for 256 of them"),
        # fp32 copies of one tensor: weight, gradient and both moments.
        OptimizerMemory(name="adamw-bf16", state=4, weights=2, of_largest=16, note="two bf16 moments; bf16 weights"),
        OptimizerMemory(
            name="adamw-bf16-kahan",
            state=6,
            weights=2,
            of_largest=16,
            note="two bf16 moments and what rounding cut off; bf16 weights",
        ),
        OptimizerMemory(
            name="adafactor",
            state=4,
            state_of_vectors=8,
            factored=True,
            of_largest=4,
            note="one fp32 moment, and rows and columns; the update of one tensor",
        ),
        OptimizerMemory(name="lion", state=4, of_largest=4, note="one fp32 moment; the update of one tensor"),
        OptimizerMemory(name="sgd-momentum", state=4, note="one fp32 moment"),
        # The momentum's fp32 mix with the gradient, two bf16 copies of it and two products of it with itself, which for
        # a matrix of 1 to 4 have a quarter of its numbers each.
        OptimizerMemory(name="muon", state=4, state_of_rest=8, of_previous=9, note="one fp32 moment; AdamW elsewhere"),
    )
}


def find_optimizer(name: str) -> OptimizerMemory:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
