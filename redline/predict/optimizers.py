"""Optimizers as prediction sees them: bytes of state per parameter, what an update needs for a moment, what it moves.

    OPTIMIZERS["adamw-fused"].state -> 8;  find_optimizer("lion").traffic -> 52
    OPTIMIZERS["adafactor"].state_bytes((768, 3072), of_layer=True) -> 4 * 768 * 3072 + 4 * (768 + 3072)

The same names as optim/table.py, which builds them. State is counted for fp32 weights and gradients unless the row says
otherwise; the counter of steps that most keep per tensor, 4 bytes and often on the host, is not. Traffic is what each
operator reads once and writes once, as tests/cpu/test_optim.py sees them pass by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from redline.core.errors import unknown_name

FP32, BF16 = 4, 2
SMALLEST_QUANTISED = 4096  # numbers in a tensor; torchao, like bitsandbytes, leaves smaller ones as they are
CODES = 256  # of 8 bits: a moment carries the table of the numbers they stand for


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the update of one tensor takes."""

    bytes: float
    kernels: int
    """Of its own: those for all tensors together are in `OptimizerCosts.kernels`."""
    matmul_flops: int = 0
    """In bf16, whatever the plan computes in."""
    matmul_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerCosts:
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
    traffic: float
    """Bytes per parameter that an update reads and writes, matmuls apart."""
    traffic_of_rest: float | None = None
    """Of embedding, head and vectors, where another rule updates those."""
    kernels: int = 0
    """Launched for all tensors together,"""
    kernels_per_matrix: int = 0
    """and for each matrix (of the layers, where another rule updates the rest),"""
    kernels_per_vector: int = 0
    rounds: int = 0
    """Of Newton-Schulz, for matrices of the layers."""
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

    def update(self, sizes: tuple[int, ...], *, of_layer: bool) -> Update:
        numbers = math.prod(sizes)
        if self.traffic_of_rest is not None and not of_layer:
            return Update(bytes=self.traffic_of_rest * numbers, kernels=0)
        own = self.kernels_per_matrix if len(sizes) > 1 else self.kernels_per_vector
        if not self.rounds:
            return Update(bytes=self.traffic * numbers, kernels=own)
        # A round of Newton-Schulz: X X', its square, and their polynomial times X; X has no more rows than columns.
        short, long = sorted(sizes)
        flops = 4 * short**2 * long + 2 * short**3
        moved = 3 * short * long + 4 * short**2  # X in twice and out; X X' and the polynomial out and in
        return Update(
            bytes=self.traffic * numbers,
            kernels=own,
            matmul_flops=self.rounds * flops,
            matmul_bytes=BF16 * self.rounds * moved,
        )


OPTIMIZERS = {
    row.name: row
    for row in (
        # A square root, then that divided, while the last tensor's is still there (torch, _single_tensor_adam). Moved:
        # decay 8, lerp 12, mul 8, addcmul 12, sqrt, div and add 8 each, addcdiv 16. Vectors do not decay.
        OptimizerCosts(
            name="adamw-loop",
            state=8,
            of_largest=8,
            of_previous=4,
            traffic=80,
            kernels_per_matrix=8,
            kernels_per_vector=7,
            note="two fp32 moments; copies of one tensor",
        ),
        # The same for all tensors in one call, and the division in place (torch, _multi_tensor_adam).
        OptimizerCosts(
            name="adamw-foreach",
            state=8,
            of_all=4,
            traffic=80,
            kernels=8,
            note="two fp32 moments; a square root of all of them",
        ),
        # Weight, gradient and both moments read, all but the gradient written.
        OptimizerCosts(name="adamw-fused", state=8, traffic=28, kernels=1, note="two fp32 moments; nothing else"),
        # For a moment both moments of one tensor in fp32 (seen on an H200: 311.6 MB for GPT-2, whose largest tensor has
        # 38.6 M numbers). That its compiled kernels read and write everything once, with 1 byte for a moment and its
        # share of a scale, is the least they can do.
        OptimizerCosts(
            name="adamw-8bit",
            state=2,
            block=256,
            of_largest=8,
            traffic=12 + 4 * (1 + FP32 / 256),
            kernels_per_matrix=1,
            kernels_per_vector=1,
            note="two 8-bit moments, a scale for 256 of them; both of one tensor in fp32",
        ),
        # fp32 copies of one tensor: weight, gradient and both moments. Moved: 24 to make them, 8 decay, 88 the update,
        # 12 to store the moments; then 54 for chance and 6 for the weight, or 20 for the rest that is added and found,
        # and 12 to store it and the weight.
        OptimizerCosts(
            name="adamw-bf16",
            state=4,
            weights=2,
            of_largest=16,
            traffic=192,
            kernels_per_matrix=25,
            kernels_per_vector=25,
            note="two bf16 moments; bf16 weights",
        ),
        OptimizerCosts(
            name="adamw-bf16-kahan",
            state=6,
            weights=2,
            of_largest=16,
            traffic=164,
            kernels_per_matrix=20,
            kernels_per_vector=20,
            note="two bf16 moments and what rounding cut off; bf16 weights",
        ),
        # Square 8, eps 8, means 8, outer product 4, times gradient 12, norm 4, scaled 8, moment 12, decay 8, step 12.
        OptimizerCosts(
            name="adafactor",
            state=4,
            state_of_vectors=8,
            factored=True,
            of_largest=4,
            traffic=84,
            kernels_per_matrix=20,
            kernels_per_vector=13,
            note="one fp32 moment, and rows and columns; the update of one tensor",
        ),
        # Mix 12, sign 8, decay 8, step 12, moment 12.
        OptimizerCosts(
            name="lion",
            state=4,
            of_largest=4,
            traffic=52,
            kernels_per_matrix=5,
            kernels_per_vector=5,
            note="one fp32 moment; the update of one tensor",
        ),
        # Weight, gradient and moment read, weight and moment written.
        OptimizerCosts(name="sgd-momentum", state=4, traffic=20, kernels=1, note="one fp32 moment"),
        # The momentum's fp32 mix with the gradient, two bf16 copies of it and two products of it with itself, which for
        # a matrix of 1 to 4 have a quarter of its numbers each. Moved: moment 12, mix 12, to bf16 6, norm 2, scaled 4,
        # decay 8, step 10, and the matmuls.
        OptimizerCosts(
            name="muon",
            state=4,
            state_of_rest=8,
            of_previous=9,
            traffic=54,
            traffic_of_rest=28,
            kernels=1,
            kernels_per_matrix=23,
            rounds=5,
            note="one fp32 moment; AdamW elsewhere",
        ),
    )
}


def find_optimizer(name: str) -> OptimizerCosts:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
