"""Every matrix multiplication of a training step, forward and backward: the basis of FLOPs, roofline, lint and the
measured peak.

    linear_gemms(shape, plan, micro_batch=16) -> (Gemm(where="qkv", direction="forward", m=16384, n=2304, k=768), ...)

C[m, n] = A[m, k] B[k, n]. A layer y = x W with `tokens` rows has a forward (tokens, out, in), a gradient of its input
(tokens, in, out) and a gradient of its weight (out, in, tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from redline.core.plan import Plan
from redline.core.workload import Shape

DIRECTIONS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class Gemm:
    where: str
    """qkv, q, kv, proj, up, down, head, or scores and mix: the two matmuls of attention."""
    direction: str
    m: int
    n: int
    k: int
    batch: int = 1
    """Independent matmuls in one call: one per sequence and head in attention."""
    count: int = 1
    """Calls per step."""

    @property
    def flops(self) -> int:
        """FLOPs of all calls in a step; a multiply-add is two."""
        return 2 * self.m * self.n * self.k * self.batch * self.count


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer as one rank holds it."""

    where: str
    inputs: int
    outputs: int
    count: int


def linear_layers(shape: Shape, plan: Plan, tp: int = 1) -> tuple[Layer, ...]:
    """Return the linear layers as one of `tp` ranks holds them: column-parallel layers divide their outputs among the
    ranks, row-parallel layers (proj, down) their inputs."""
    h, rows = shape.d_model, plan.vocab_rows(shape.vocab)
    if shape.fused_qkv:
        qkv = [Layer(where="qkv", inputs=h, outputs=(shape.query_width + 2 * shape.kv_width) // tp, count=shape.layers)]
    else:
        qkv = [
            Layer(where="q", inputs=h, outputs=shape.query_width // tp, count=shape.layers),
            Layer(where="kv", inputs=h, outputs=shape.kv_width // tp, count=2 * shape.layers),
        ]
    return (
        *qkv,
        Layer(where="proj", inputs=shape.query_width // tp, outputs=h, count=shape.layers),
        Layer(where="up", inputs=h, outputs=shape.d_ff // tp, count=(2 if shape.gated else 1) * shape.layers),
        Layer(where="down", inputs=shape.d_ff // tp, outputs=h, count=shape.layers),
        Layer(where="head", inputs=h, outputs=rows // tp, count=1),
    )


def linear_gemms(shape: Shape, plan: Plan, *, micro_batch: int, tp: int = 1) -> tuple[Gemm, ...]:
    """Return the matmuls with weights, which do not depend on the attention kernel."""
    tokens = micro_batch * shape.sequence
    return tuple(gemm for layer in linear_layers(shape, plan, tp) for gemm in _three_passes(layer, tokens))


def _three_passes(layer: Layer, tokens: int) -> Iterator[Gemm]:
    out, into = layer.outputs, layer.inputs
    for direction, (m, n, k) in zip(
        DIRECTIONS, ((tokens, out, into), (tokens, into, out), (out, into, tokens)), strict=True
    ):
        yield Gemm(where=layer.where, direction=direction, m=m, n=n, k=k, count=layer.count)


def attention_gemms(shape: Shape, *, micro_batch: int, tp: int = 1) -> tuple[Gemm, ...]:
    """Return the matmuls of naive attention over the whole square; a fused kernel does half of them, internally."""
    s, d, batch = shape.sequence, shape.head_width, micro_batch * shape.heads // tp
    sizes = {
        ("scores", "forward"): (s, s, d),  # q k^T
        ("mix", "forward"): (s, d, s),  # weights v
        ("mix", "dgrad"): (s, s, d),  # d y v^T: the gradient of the weights
        ("mix", "wgrad"): (s, d, s),  # weights^T d y: the gradient of v
        ("scores", "dgrad"): (s, d, s),  # d scores k: the gradient of q
        ("scores", "wgrad"): (s, d, s),  # d scores^T q: the gradient of k
    }
    return tuple(
        Gemm(where=where, direction=direction, m=m, n=n, k=k, batch=batch, count=shape.layers)
        for (where, direction), (m, n, k) in sizes.items()
    )
