"""Floating-point operations of one token of training. A multiply-add counts as two.

    flops_per_token(PRESETS["gpt2"].shape) -> 854.4e6

Per token and layer the forward pass has four matmuls with weights (2 FLOPs per weight) and two with the sequence:
q·k and weights·v, 2·s·h each over the whole s x s square. The head is 2·h·V. Backward is twice the forward
(arXiv 2104.04473, eq. 3 without recompute, generalised to any d_ff). Embedding look-ups, normalisations and
element-wise work are not counted, as everywhere in this field.
"""

from __future__ import annotations

from redline.core.plan import Plan
from redline.core.workload import Shape

CONVENTION = "full attention square, unpadded"


def flops_per_token(shape: Shape) -> float:
    """Model FLOPs by the full-square convention (nanoGPT, PaLM, Megatron): what MFU counts."""
    attention = 4 * shape.sequence * shape.d_model
    return 3 * (shape.layers * (_layer_weights(shape) + attention) + _head(shape, shape.vocab))


def executed_flops_per_token(shape: Shape, plan: Plan) -> float:
    """Hardware FLOPs: what this plan really runs, with its padding and its attention kernel. What HFU counts."""
    square = 4 * shape.sequence * shape.d_model
    # A flash kernel visits the causal half, and its backward recomputes the scores: 5 matmuls after the forward's 2.
    attention = 3 * square if plan.attention == "naive" else (1 + 2.5) * square / 2
    weights = shape.layers * _layer_weights(shape) + _head(shape, plan.vocab_rows(shape.vocab))
    return 3 * weights + shape.layers * attention


def _layer_weights(shape: Shape) -> int:
    """Forward FLOPs of q, k, v, output projection and MLP, per token."""
    return 2 * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff)


def _head(shape: Shape, rows: int) -> int:
    return 2 * shape.d_model * rows
