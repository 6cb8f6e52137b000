"""The tensors that one GPU holds and that a layer keeps for its backward pass; `predict/memory.py` adds them up.

    layer_activations(shape, plan) -> {"residual": 6144, "normalised": 3088, "qkv": 4608, ...}   bytes per token

Each term names its tensor. Widths: C of the residual stream, Q of all query heads, KV of all key heads (and again of
all value heads), F of the MLP. c is the number of bytes per element that a matmul reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.gemms import Layer, linear_layers
from redline.predict.optimizers import OptimizerCosts
from redline.predict.parallel import Layout

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One GPU and its part of a step, from which every term is computed."""

    shape: Shape
    plan: Plan
    micro_batch: int
    layout: Layout
    zero: int
    optimizer: OptimizerCosts
    first: bool
    """True if it has the embedding."""
    last: bool
    """True if it has the head."""

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.shape.sequence

    @property
    def layers(self) -> int:
        return self.shape.layers // self.layout.pp

    @property
    def in_flight(self) -> int:
        """Micro batches whose activations are held: 1F1B lets the first stage run ahead by one per later stage."""
        return min(self.layout.pp, self.layout.accumulation) if self.first else 1

    @property
    def compute(self) -> int:
        return compute_bytes(self.plan)

    @property
    def casts(self) -> bool:
        return self.compute != FP32

    @property
    def weight(self) -> int:
        """Bytes per weight and per gradient: 4, or 2 for optimizers that keep weights in 16 bit."""
        return self.optimizer.weights

    @property
    def rows(self) -> int:
        """Rows of embedding and head, padded and divided among tensor-parallel GPUs."""
        return -(-self.plan.vocab_rows(self.shape.vocab) // self.layout.tp)

    @property
    def vectors(self) -> int:
        return (2 if self.shape.norm == "layernorm" else 1) * self.shape.d_model

    @cached_property
    def linear(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in linear_layers(self.shape, self.plan, self.layout.tp) if layer.where != "head")

    @cached_property
    def matrices(self) -> int:
        """Parameters in the matrices of one layer."""
        return sum(layer.inputs * layer.outputs * layer.count for layer in self.linear) // self.shape.layers

    @cached_property
    def layer(self) -> int:
        """Parameters of one layer."""
        return sum(count * math.prod(sizes) for sizes, count in self.layer_tensors())

    @property
    def table(self) -> int:
        """Parameters in the embedding, and in the head."""
        return self.rows * self.shape.d_model

    @property
    def head_is_embedding(self) -> bool:
        return self.plan.tied and self.first and self.last  # separate stages each hold a copy

    @property
    def outer(self) -> int:
        """Parameters outside the layers."""
        return sum(count * math.prod(sizes) for sizes, count in self.outer_tensors())

    # tensors as (sizes, count)

    def layer_tensors(self) -> Iterator[tuple[tuple[int, ...], int]]:
        for layer in self.linear:
            each = layer.count // self.shape.layers
            yield (layer.outputs, layer.inputs), each
            if self.shape.has_bias(layer.where):
                yield (layer.outputs,), each
        of_norm = 2 if self.shape.norm == "layernorm" else 1  # gain and bias, or gain alone
        yield (self.shape.d_model,), self.shape.layer_norms * of_norm
        if self.shape.qk_norms:
            yield (self.shape.head_width,), 2 * of_norm

    def outer_tensors(self) -> Iterator[tuple[tuple[int, ...], int]]:
        yield (self.rows, self.shape.d_model), self.first + self.last - self.head_is_embedding
        if self.first and self.shape.positions == "learned":
            yield (self.shape.positions_count, self.shape.d_model), 1
        if self.last:
            yield (self.shape.d_model,), 2 if self.shape.norm == "layernorm" else 1
        if self.last and self.shape.head_bias:
            yield (self.rows,), 1

    @cached_property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outer

    @property
    def largest(self) -> int:
        """Parameters in the largest tensor."""
        return max(self.largest_inside, self.table if self.first or self.last else 0)

    @property
    def largest_inside(self) -> int:
        """Parameters in the largest matrix of a layer."""
        return max(layer.inputs * layer.outputs for layer in self.linear)

    @property
    def cached_tokens(self) -> float:
        """Tokens per sequence whose keys and values generation keeps, summed over the layers of this GPU. Layers with a
        window are assumed to be spread evenly over the stages."""
        shape, windowed = self.shape, self.shape.layers_with_window
        seen = min(shape.sequence, shape.window or shape.sequence)
        return (windowed * seen + (shape.layers - windowed) * shape.sequence) / self.layout.pp

    # persistent state, which ZeRO shards among data-parallel GPUs

    @property
    def weight_bytes(self) -> int:
        # The mask has a byte per pair of tokens, once for all layers; the built-in GPT has it with any attention.
        mask = self.plan.attention == "naive" or self.shape.positions == "learned"
        return self._shared_numbers(self.weight, 3) + mask * self.shape.sequence**2

    @property
    def gradient_bytes(self) -> int:
        return self._shared_numbers(self.weight, 2)

    @property
    def keeps(self) -> bool:
        """True for `fsdp-keep`: ZeRO 3 between updates. Within an update, weights stay gathered from forward to
        backward, and whole gradients accumulate until the last micro batch."""
        return self.zero == 3 and self.plan.parallel == "fsdp-keep"

    @property
    def gathers_all(self) -> bool:
        """True for `fsdp-whole`: ZeRO 3 between updates, except for vectors, which every GPU holds. Within an update
        all weights are gathered, and whole gradients wait for the end of the last backward pass, in the dtype in which
        the weights were gathered."""
        return self.zero == 3 and self.plan.parallel == "fsdp-whole"

    def is_cut(self, sizes: tuple[int, ...]) -> bool:
        """True if ZeRO shards a tensor of these sizes, given that it shards any."""
        return len(sizes) > 1 or not self.gathers_all

    @cached_property
    def uncut(self) -> int:
        """Parameters in tensors that are not cut."""
        inside, outside = (
            sum(count * math.prod(sizes) for sizes, count in tensors if not self.is_cut(sizes))
            for tensors in (self.layer_tensors(), self.outer_tensors())
        )
        return self.layers * inside + outside

    def _shared_numbers(self, size: int, stage: int) -> int:
        """Bytes on this GPU of state with `size` bytes per parameter that is sharded from ZeRO stage `stage` on."""
        return self.shared(size * (self.parameters - self.uncut), stage) + size * self.uncut

    @property
    def standing_gradients(self) -> int:
        """Bytes of gradients from earlier micro batches that are held during a forward pass."""
        if self.layout.accumulation == 1:
            return 0
        return self.weight * self.parameters if self.keeps or self.gathers_all else self.gradient_bytes

    @cached_property
    def optimizer_bytes(self) -> int:
        state, sums = self.optimizer.state_bytes, {True: 0, False: 0}
        for sizes, count in self.layer_tensors():
            sums[self.is_cut(sizes)] += self.layers * count * state(sizes, of_layer=len(sizes) > 1)
        for sizes, count in self.outer_tensors():
            sums[self.is_cut(sizes)] += count * state(sizes, of_layer=False)
        return self.shared(sums[True], 1) + sums[False]

    @property
    def update_bytes(self) -> int:
        """Bytes that an update needs besides state and gradients."""
        rule = self.optimizer
        needed = rule.of_all * self.parameters + rule.of_largest * self.largest
        return self.shared(needed + rule.of_previous * self.largest_inside, 1)

    def shared(self, size: float, stage: int) -> int:
        return -(-round(size) // self.layout.shards) if self.zero >= stage else round(size)

    # further copies of weights and gradients at one moment of a step

    def cast_bytes(self, layers: int, *, head: bool) -> int:
        """Bytes of 16-bit copies of the weights of `layers` layers; 0 under FSDP, which gathers weights in 16 bit."""
        if self.compute == self.weight or self.zero == 3:
            return 0
        return self.compute * (layers * self.matrices + head * self.table)

    def gathered_weights(self, waiting: int) -> int:
        """Bytes of weights gathered under ZeRO 3: the current layer, the next one in flight, and what lies outside the
        layers. `fsdp-keep` holds all layers that are `waiting` for their backward, `fsdp-whole` all it cuts."""
        if self.gathers_all:
            return self.compute * (self.parameters - self.uncut)
        layers = waiting if self.keeps else 2
        return self.compute * (layers * self.layer + self.outer) if self.zero == 3 else 0

    def gathered_gradients(self, done: int) -> int:
        """Bytes of the `done` gradients that ZeRO 2 and 3 have not sharded yet: those of one layer. With `fsdp-whole`
        all of them, unless they are added at once to accumulated gradients of the same dtype."""
        if self.gathers_all and (self.casts or self.layout.accumulation == 1):
            return self.compute * done // self.weight
        return min(done, self.weight * self.layer) if self.zero >= 2 else 0

    def shared_gradients(self, done: int) -> int:
        """Bytes on this GPU of the `done` gradients that are already sharded."""
        if self.gathers_all:
            return 0
        return min(self.gradient_bytes, self.shared(done - self.gathered_gradients(done), 2))


def compute_bytes(plan: Plan) -> int:
    """Bytes per element that a matmul reads."""
    return 2 if plan.autocast else FP32


def residual_bytes(plan: Plan) -> int:
    """Bytes per element of the stream between the blocks: autocast leaves it in fp32 unless the plan narrows it."""
    return FP32 if plan.residual == "fp32" else 2


# what a layer keeps


def layer_activations(shape: Shape, plan: Plan, tp: int = 1) -> dict[str, float]:
    """Bytes per token that one layer keeps for its backward, by kind, when no block is checkpointed. Tensor-parallel
    GPUs divide what lies inside attention and MLP; each holds the stream and its norms whole."""
    C, c = shape.d_model, compute_bytes(plan)
    statistics = 2 if shape.norm == "layernorm" and not plan.compile else 1  # mean and 1/std; Inductor keeps one
    return {
        "residual": 2 * residual_bytes(plan) * C,  # what each norm reads
        "normalised": 2 * c * C + 2 * FP32 * statistics,  # what the first matmul of each branch reads
        "qkv": _qkv(shape, plan, tp),
        "attention core": _core(shape, plan, tp),
        "attention output": c * shape.query_width / tp,  # what the output projection reads
        "mlp": mlp_tensors(shape, plan) * c * shape.d_ff / tp,
    }


def _qkv(shape: Shape, plan: Plan, tp: int) -> float:
    c, Q, KV = compute_bytes(plan), shape.query_width / tp, shape.kv_width / tp
    if plan.attention == "naive" and plan.checkpointing != "selective":
        return 3 * c * Q  # batched matmuls copy q, k and v head by head; shared keys and values once per query head
    projected = c * (Q + 2 * KV)
    if shape.positions != "rope":
        return projected
    rotated = c * (Q + KV)
    return rotated + (projected if shape.fused_qkv else c * KV)  # v is a view and keeps the whole projection


def _core(shape: Shape, plan: Plan, tp: int) -> float:
    """Bytes per token between q, k, v and the output: 0 if they are recomputed."""
    heads, c = shape.heads / tp, compute_bytes(plan)
    if plan.checkpointing == "selective":
        return 0
    if plan.attention != "naive":
        return FP32 * heads  # log-sum-exp of each row
    square = heads * shape.sequence
    if plan.compile:
        return 2 * c * square + 2 * FP32 * heads  # scores, weights; maximum and sum of each row
    return FP32 * square + (c * square if c != FP32 else 0)  # softmax, which autocast does in fp32, and its 16-bit copy


def mlp_tensors(shape: Shape, plan: Plan) -> int:
    """Number of tensors of the MLP's width: GELU's input and output; or gate, up, their product and, in eager mode,
    silu(gate)."""
    if not shape.gated:
        return 2
    return 3 if plan.compile else 4


def kept_activations(rank: Rank, layers: int) -> dict[str, float]:
    """Bytes kept by the first `layers` layers of this GPU for one micro batch, by kind, with the batch itself."""
    shape, plan = rank.shape, rank.plan
    of_one = layer_activations(shape, plan, rank.layout.tp)
    if plan.checkpointing == "full":
        of_one = {"residual": residual_bytes(plan) * shape.d_model}  # the input of the block
    of_one = {kind: plan.activation_budget * size for kind, size in of_one.items()}  # the compiler picks the tensors
    kept = {kind: rank.tokens * layers * size for kind, size in of_one.items()}
    kept["embedding"] = batch_bytes(rank)
    return kept


def batch_bytes(rank: Rank) -> float:
    """Bytes of inputs and targets as 64-bit integers, doubled if the next batch is copied ahead; Inductor also keeps
    the rows of the positions."""
    batches = 2 if rank.plan.loader_workers else 1
    learned = rank.first and rank.shape.positions == "learned"
    rows = FP32 * rank.shape.d_model if rank.plan.compile else 8  # eager keeps their indices
    return 16 * rank.tokens * batches + (rank.shape.sequence * rows if learned else 0)


def final_activations(rank: Rank) -> dict[str, float]:
    """Bytes kept of the last norm, by kind: its input, and its output for the head. A head that computes its gradient
    at once keeps no input; Inductor recomputes the last block's output if that block is checkpointed."""
    if not rank.last:
        return {}
    again = rank.plan.compile and rank.plan.checkpointing == "full"
    statistics = 2 if rank.shape.norm == "layernorm" and not rank.plan.compile else 1
    per_token = {"residual": 0 if again else residual_bytes(rank.plan) * rank.shape.d_model}
    per_token["normalised"] = FP32 * statistics + (rank.compute * rank.shape.d_model if rank.plan.loss == "full" else 0)
    return {kind: rank.tokens * size for kind, size in per_token.items()}


@dataclass(frozen=True, kw_only=True)
class LayerBackward:
    """Bytes per token at the worst point of one layer's backward, beyond what the layer has kept."""

    recomputed: float
    flowing: float
    """Gradients in flight, less what the layer has freed by then."""


def layer_backward(rank: Rank) -> LayerBackward:
    """Return the worse of two points: the MLP's backward, with everything alive, or attention's, with the MLP's tensors
    freed."""
    worst = max(_in_mlp(rank), _in_attention(rank), key=lambda point: point.recomputed + point.flowing)
    # The gradient that a matmul reads, in 8 bit beside the 16-bit one.
    narrow = [layer.outputs for layer in rank.linear if rank.plan.narrows(layer.where, "dgrad")]
    worst = replace(worst, flowing=worst.flowing + max(narrow, default=0))
    if worst.flowing < 0:  # more was freed than is in flight
        return LayerBackward(recomputed=worst.recomputed + worst.flowing, flowing=0)
    return worst


def _stream(rank: Rank) -> float:
    """Bytes per token of the stream's gradient, and of its copy for the branch if that computes in another dtype."""
    own = residual_bytes(rank.plan)
    return rank.shape.d_model * (own + (rank.compute if rank.compute != own else 0))


def _in_mlp(rank: Rank) -> LayerBackward:
    """A gated MLP holds the gradients of gate and up together, once their product is freed."""
    width = (2 if rank.shape.gated else 1) * rank.compute * rank.shape.d_ff / rank.layout.tp
    whole = layer_activations(rank.shape, rank.plan, rank.layout.tp)
    again = (
        sum(whole.values()) - residual_bytes(rank.plan) * rank.shape.d_model if rank.plan.checkpointing == "full" else 0
    )
    return LayerBackward(recomputed=again, flowing=_stream(rank) + width)


def _in_attention(rank: Rank) -> LayerBackward:
    shape, plan, tp, c = rank.shape, rank.plan, rank.layout.tp, rank.compute
    Q, KV = shape.query_width / tp, shape.kv_width / tp
    naive = plan.attention == "naive"
    whole = layer_activations(shape, replace(plan, checkpointing="none"), tp)
    freed = whole["mlp"] + (residual_bytes(plan) + c) * shape.d_model  # plus what the MLP's norm read and wrote
    # A fused kernel: gradients of q, k and v, then a stacked copy unless they were written stacked; dq is accumulated
    # in fp32. flash-attn-4 allocates the fp32 dq and two numbers per row itself and frees them before it returns.
    copies = 2 if plan.packed_attention == "none" else 1
    core = _naive_backward(rank) if naive else copies * c * (Q + 2 * KV) + FP32 * Q
    again = {
        "none": 0,
        "selective": whole["attention core"] + (whole["qkv"] if naive else whole["attention output"]),
        "full": sum(whole.values()) - residual_bytes(plan) * shape.d_model,
    }[plan.checkpointing]
    return LayerBackward(recomputed=again, flowing=_stream(rank) + c * Q + core - freed)


def _naive_backward(rank: Rank) -> float:
    """Bytes per token of score squares beyond the kept ones, just after softmax's gradient was computed."""
    square = rank.shape.heads / rank.layout.tp * rank.shape.sequence
    if rank.plan.compile:
        return rank.compute * square  # the weights' gradient, which becomes the scores'
    return (6 if rank.casts else 8) * square  # both in fp32; the 16-bit weights are freed by then
