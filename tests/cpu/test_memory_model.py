"""The memory model against what torch does: the tensors autograd keeps, and every byte alive during a real step.

A CPU has neither cuBLAS workspaces nor a rounding allocator, so sums of tensors can be compared directly. Its autocast
leaves softmax in 16 bit, where a GPU's goes to fp32: naive attention is compared in fp32 only. Kernels' own scratch
memory and compiled code cannot be seen from here; those stand in records/2026-11-15-h200-memory.json.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.core.plan import Plan
from redline.core.workload import Shape, Workload
from redline.engine.build import plain_loss
from redline.engine.step import TrainStep
from redline.model.adapter import DTYPES, adapter_of
from redline.model.gpt import GPT
from redline.optim import build_optimizer
from redline.predict.activations import layer_activations
from redline.predict.memory import WORKSPACES, predict_memory

SHAPES = {
    "square": Shape(layers=3, heads=4, d_model=64, d_ff=256, vocab=257, sequence=64),
    "vocabulary": Shape(layers=2, heads=4, d_model=64, d_ff=256, vocab=5000, sequence=32),
    "long": Shape(layers=3, heads=4, d_model=32, d_ff=96, vocab=64, sequence=256),
    "weights": Shape(layers=4, heads=4, d_model=256, d_ff=1024, vocab=512, sequence=16),
}
FUSED = Plan(attention="flash", optimizer="adamw-fused")
PLANS = {
    "plain": Plan(),
    "flash": replace(FUSED, optimizer="adamw-loop"),
    "foreach-tied": replace(FUSED, optimizer="adamw-foreach", tied=True),
    "fused-loss": replace(FUSED, loss="fused", tied=True),
    "chunked-loss": replace(FUSED, loss="chunked"),
    "selective": Plan(checkpointing="selective", optimizer="adamw-fused"),
    "full": Plan(checkpointing="full", optimizer="adamw-fused"),
    "full-chunked": Plan(checkpointing="full", loss="chunked", optimizer="adamw-fused"),
    "bf16": replace(FUSED, autocast="bf16"),
    "bf16-chunked-tied": replace(FUSED, autocast="bf16", loss="chunked", tied=True),
    "bf16-full-padded": replace(FUSED, autocast="bf16", checkpointing="full", loss="fused", vocab_multiple=128),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def build_model(shape: Shape, plan: Plan) -> GPT:
    return GPT(
        shape,
        attention=plan.attention,
        tied=plan.tied,
        vocab_rows=plan.vocab_rows(shape.vocab),
        checkpointing=plan.checkpointing,
    )


def held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


# every byte of a step


class Alive(TorchDispatchMode):
    """Adds up the storages that exist, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # the same for every view
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.now)
        return result


def peak_of_a_step(shape: Shape, plan: Plan, micro_batch: int) -> int:
    workload = Workload(name="test", shape=shape, tokenizer="bytes", micro_batch=micro_batch, learning_rate=1e-3)
    adapter = adapter_of(workload)
    model = adapter.build(plan, torch.device("cpu"))
    optimizer = build_optimizer(plan.optimizer, model, learning_rate=1e-3, weight_decay=0.1)
    step = TrainStep(
        adapter=adapter,
        model=model,
        loss_of=plain_loss(adapter, model, plan),
        optimizer=optimizer,
        plan=plan,
        learning_rate=lambda _: 1e-3,
        clip_norm=1.0,
    )
    batch = torch.randint(shape.vocab, (2, micro_batch, shape.sequence))
    step(batch)  # the optimizer's state exists from here on
    alive = Alive()
    state = (value for tensors in optimizer.state.values() for value in tensors.values())
    for tensor in (*held_tensors(model), *state, batch):
        alive.watch(tensor)
    with alive:
        step(batch)
    return alive.peak


CASES = [
    pytest.param(
        shape,
        plan,
        size,
        id=f"{size}-{plan_name}-{shape_name}",
        marks=[pytest.mark.long] if size == 1 and shape_name != "weights" else [],
    )
    for (shape_name, shape), (plan_name, plan), size in itertools.product(SHAPES.items(), PLANS.items(), (1, 8))
]


@pytest.mark.parametrize(("shape", "plan", "micro_batch"), CASES)
def test_the_peak_of_a_step(shape: Shape, plan: Plan, micro_batch: int) -> None:
    """Among these every moment of the model is the worst one somewhere."""
    predicted = predict_memory(shape, plan, micro_batch=micro_batch)
    assert predicted.allocated - WORKSPACES == pytest.approx(peak_of_a_step(shape, plan, micro_batch), rel=0.025)


def test_the_cases_meet_every_moment() -> None:
    moments = {
        predict_memory(shape, plan, micro_batch=size).moment
        for shape, plan, size in (case.values for case in CASES if not case.marks)
    }
    assert moments == {
        "forward of the loss",
        "backward of the loss",
        "backward of the last layer",
        "backward of the first layer",
        "gradient of the embedding",
        "optimizer update",
    }


# what autograd keeps


def kept_bytes(run: Callable[[], torch.Tensor], held: set[int]) -> int:
    """Of everything saved for the backward, each storage once; parameters and buffers are not kept but there."""
    storages: dict[int, int] = {}
    alive = []  # what is saved now must not be freed and its address given to another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sum(size for address, size in storages.items() if address not in held)


def addresses(tensors: Iterator[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["naive", "flash"])
@every_shape
def test_a_layer_keeps_what_the_model_says(shape: Shape, attention: str, checkpointing: str) -> None:
    """One layer more keeps so much more: what is outside the layers cancels."""
    plan = Plan(attention=attention, checkpointing=checkpointing)
    tokens = torch.randint(shape.vocab, (4, shape.sequence))

    def kept(layers: int) -> int:
        model = build_model(replace(shape, layers=layers), plan)
        return kept_bytes(lambda: model.features(tokens), addresses(held_tensors(model)))

    per_token = layer_activations(shape, plan)
    if checkpointing == "full":
        per_token = {"residual": 4 * shape.d_model}
    assert kept(4) - kept(3) == pytest.approx(tokens.numel() * sum(per_token.values()), rel=1e-3)


def test_autocast_keeps_16_bit_copies_and_an_fp32_stream() -> None:
    shape, plan = SHAPES["square"], replace(FUSED, autocast="bf16")
    tokens = torch.randint(shape.vocab, (4, shape.sequence))

    def kept(layers: int) -> int:
        model = build_model(replace(shape, layers=layers), plan)
        with torch.autocast("cpu", dtype=DTYPES["bf16"]):
            return kept_bytes(lambda: model.features(tokens), addresses(held_tensors(model)))

    weights = 2 * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff)
    per_token = sum(layer_activations(shape, plan).values())
    assert kept(4) - kept(3) == pytest.approx(tokens.numel() * per_token + weights, rel=1e-3)


# a modern block, which the built-in model does not have


class ModernBlock(nn.Module):
    """Rotary positions, grouped keys and values, a gated MLP, no biases: as Llama's, with torch's own operators. The
    norm is LayerNorm: on a CPU torch's RMSNorm is made of parts and keeps one more tensor than a GPU's kernel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, Q, KV, width = shape.d_model, shape.query_width, shape.kv_width, shape.d_ff
        self.shape = shape
        self.norms = nn.ParameterList([torch.ones(C), torch.ones(C)])
        outputs = [Q + 2 * KV] if shape.fused_qkv else [Q, KV, KV]
        self.qkv = nn.ModuleList(nn.Linear(C, out, bias=False) for out in outputs)
        self.proj, self.down = nn.Linear(Q, C, bias=False), nn.Linear(width, C, bias=False)
        self.gate, self.up = nn.Linear(C, width, bias=False), nn.Linear(C, width, bias=False)
        angles = torch.outer(torch.arange(shape.sequence), torch.ones(shape.head_width))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        B, T, C = x.shape
        normed = F.layer_norm(x, (C,), self.norms[0])
        parts = [layer(normed) for layer in self.qkv]
        if shape.fused_qkv:
            parts = list(parts[0].split([shape.query_width, shape.kv_width, shape.kv_width], dim=2))
        q, k, v = (part.view(B, T, -1, shape.head_width).transpose(1, 2) for part in parts)
        q, k = self.rotate(q), self.rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, shape.query_width))
        normed = F.layer_norm(x, (C,), self.norms[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@pytest.mark.parametrize("fused_qkv", [True, False])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_modern_block_keeps_what_the_model_says(fused_qkv: bool, kv_heads: int) -> None:
    shape = Shape(
        layers=1,
        heads=4,
        kv_heads=kv_heads,
        d_model=64,
        d_ff=160,
        vocab=64,
        sequence=128,
        gated=True,
        fused_qkv=fused_qkv,
        biases=False,
        positions="rope",
    )
    block = ModernBlock(shape)
    x = torch.randn(4, shape.sequence, shape.d_model, requires_grad=True)
    kept = kept_bytes(lambda: block(x), addresses(held_tensors(block)))
    predicted = layer_activations(shape, Plan(attention="flash"))
    assert kept == pytest.approx(4 * shape.sequence * sum(predicted.values()), rel=0.01)
