"""Optimizers as memory sees them: bytes of state per parameter, and what an update needs for a moment.

    OPTIMIZERS["adamw-fused"].state -> 8;  find_optimizer("lion").state -> 4

The first three are the plan's own (optim/adamw.py); the others can be estimated and not yet run. State is counted for
fp32 weights and gradients, which every plan keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.core.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    name: str
    state: float
    """Bytes that stay, per parameter."""
    state_of_rest: float | None = None
    """Of embedding, head and vectors, where another rule updates those."""
    factored: bool = False
    """A second moment kept as one number per row and one per column of a matrix."""
    of_all: float = 0
    """Bytes per parameter that exist during the update, for all parameters at once."""
    of_largest: float = 0
    """The same, for one tensor at a time: the largest decides."""
    of_previous: float = 0
    """What the tensor before it still has: a matrix of a layer."""
    note: str


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
        OptimizerMemory(name="adamw-bf16", state=4, note="two bf16 moments"),
        OptimizerMemory(name="adamw-8bit", state=2, note="two 8-bit moments"),
        OptimizerMemory(name="lion", state=4, of_largest=4, note="one fp32 moment; the update of one tensor"),
        OptimizerMemory(name="sgd-momentum", state=4, note="one fp32 moment"),
        OptimizerMemory(
            name="adafactor", state=4, factored=True, of_largest=8, note="one fp32 moment, and rows and columns"
        ),
        # One momentum for the layers' matrices, AdamW for the rest; orthogonalised in bf16 with two products of it.
        OptimizerMemory(name="muon", state=4, state_of_rest=8, of_largest=6, note="one fp32 moment; AdamW elsewhere"),
    )
}


def find_optimizer(name: str) -> OptimizerMemory:
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
