"""What optimizers cost: bytes of state per parameter, temporary memory of an update, and the bytes that it moves.

    OPTIMIZERS["adamw-fused"].state -> 8;  find_optimizer("lion").traffic -> 52
    OPTIMIZERS["adafactor"].state_bytes((768, 3072), of_layer=True) -> 4 * 768 * 3072 + 4 * (768 + 3072)

The names are those of optim/table.py, which builds the optimizers. State assumes fp32 weights and gradients unless the
row says otherwise; the step counter that most keep per tensor, 4 bytes and often on the host, is not counted. Traffic
is each operator's inputs and outputs counted once, as tests/cpu/test_optim.py observes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from redline.core.errors import unknown_name

FP32, BF16 = 4, 2
SMALLEST_QUANTISED = 4096  # numbers in a tensor; torchao, like bitsandbytes, leaves smaller ones as they are
CODES = 256  # of 8 bits: each moment stores a table of the numbers that they represent


@dataclass(frozen=True, kw_only=True)
class Update:
    """The costs of updating one tensor."""

    bytes: float
    kernels: int
    """Kernels for this tensor alone; those for all tensors together are in `OptimizerCosts.kernels`."""
    matmul_flops: int = 0
    """FLOPs of its matmuls, in bf16 whatever the plan computes in."""
    matmul_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerCosts:
    name: str
    state: float
    """Bytes per parameter that persist between updates."""
    state_of_rest: float | None = None
    """The same for embedding, head and vectors, if another rule updates those."""
    state_of_vectors: float | None = None
    """The same for vectors, if they are treated differently from matrices."""
    factored: bool = False
    """True if a second moment is kept as one number per row and one per column of a matrix."""
    block: int | None = None
    """Elements per scale of two 8-bit moments; a small tensor, or one that does not divide, keeps two in fp32."""
    weights: int = FP32
    """Bytes per weight, and per gradient."""
    of_all: float = 0
    """Temporary bytes per parameter during the update, for all parameters at once."""
    of_largest: float = 0
    """The same for one tensor at a time: the largest decides."""
    of_previous: float = 0
    """The same for the largest matrix of a layer: what the previous tensor still holds, or only such matrices need."""
    traffic: float
    """Bytes per parameter that an update reads and writes, without matmuls."""
    traffic_of_rest: float | None = None
    """The same for embedding, head and vectors, if another rule updates those."""
    kernels: int = 0
    """Kernels launched for all tensors together."""
    kernels_per_matrix: int = 0
    """Kernels launched for each matrix (only those of the layers, if another rule updates the rest)."""
    kernels_per_vector: int = 0
    rounds: int = 0
    """Rounds of Newton-Schulz, for matrices of the layers."""
    note: str

    def state_bytes(self, sizes: tuple[int, ...], *, of_layer: bool) -> int:
        """Return the bytes of state of one tensor, exactly. `of_layer`: it is a matrix inside the layers."""
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
        moved = 3 * short * long + 4 * short**2  # X read twice and written; X X' and the polynomial written and read
        return Update(
            bytes=self.traffic * numbers,
            kernels=own,
            matmul_flops=self.rounds * flops,
            matmul_bytes=BF16 * self.rounds * moved,
        )


OPTIMIZERS = {
    row.name: row
    for row in (
        # A square root and its quotient, while the previous tensor's still exists (torch, _single_tensor_adam). Bytes
        # moved: decay 8, lerp 12, mul 8, addcmul 12, sqrt, div and add 8 each, addcdiv 16. Vectors do not decay.
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
        # The same for all tensors in one call, with the division in place (torch, _multi_tensor_adam).
        OptimizerCosts(
            name="adamw-foreach",
            state=8,
            of_all=4,
            traffic=80,
            kernels=8,
            note="two fp32 moments; a square root of all of them",
        ),
        # Reads weight, gradient and both moments; writes all but the gradient.
        OptimizerCosts(name="adamw-fused", state=8, traffic=28, kernels=1, note="two fp32 moments; nothing else"),
        # Temporarily both moments of one tensor in fp32 (seen on an H200: 311.6 MB for GPT-2, whose largest tensor has
        # 38.6 M elements). The traffic assumes that its compiled kernels read and write everything once, with 1 byte
        # and a share of a scale per moment, which is the least they can do.
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
        # fp32 copies of one tensor: weight, gradient and both moments. Bytes moved: 24 to make them, 8 decay, 88 the
        # update, 12 to store the moments; then, for stochastic rounding, 54 for the random bits and 6 for the weight,
        # or, for Kahan summation, 20 to add and find the remainder and 12 to store it and the weight.
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
        # Bytes moved: square 8, eps 8, means 8, outer product 4, times gradient 12, norm 4, scaling 8, moment 12,
        # decay 8, step 12.
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
        # Bytes moved: mix 12, sign 8, decay 8, step 12, moment 12.
        OptimizerCosts(
            name="lion",
            state=4,
            of_largest=4,
            traffic=52,
            kernels_per_matrix=5,
            kernels_per_vector=5,
            note="one fp32 moment; the update of one tensor",
        ),
        # Reads weight, gradient and moment; writes weight and moment.
        OptimizerCosts(name="sgd-momentum", state=4, traffic=20, kernels=1, note="one fp32 moment"),
        # The fp32 mix of momentum and gradient, two bf16 copies of it and two products of it with itself, which for a
        # 1:4 matrix have a quarter of its elements each. Bytes moved: moment 12, mix 12, to bf16 6, norm 2, scaling 4,
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
