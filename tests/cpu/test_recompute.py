"""Blocks that are computed again: compiled ones keep as little as eager ones, and give the gradients of kept ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.engine.build import switch_process
from redline.model.gpt import GPT, initialise
from redline.model.recompute import recomputed
from redline.model.tuned import tune_layers

BATCH, LAYERS = 2, 3
SHAPE = Shape(layers=LAYERS, heads=2, d_model=64, d_ff=256, vocab=96, sequence=32)
STREAM = (BATCH, SHAPE.sequence, SHAPE.d_model)
Kept = list[torch.Tensor]


def compiled(model: nn.Module) -> tuple[Callable[..., torch.Tensor], Kept]:
    """And what the forward pass computes and keeps for the backward, which fills up as it runs: parted as Inductor
    parts them."""
    kept: Kept = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        outputs = graph.graph.output_node().args[0]
        kept.extend(node.meta["val"] for node in outputs[1:] if getattr(node, "op", "placeholder") != "placeholder")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True), kept


def gpt(products: str, **options: Any) -> GPT:
    model = GPT(SHAPE, tied=False, **options)
    initialise(model, seed=1)
    if products != "torch":
        tune_layers(model.h, torch.bfloat16, fused=products == "fused")
    return model


def gradients(model: nn.Module, run: Callable[..., torch.Tensor], batch: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=batch.dtype == torch.int64):
        loss = run(batch).float().square().mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("products", ["torch", "tuned", "fused"])
@pytest.mark.parametrize("attention", ["naive", "flash", "packed-cudnn"])
def test_a_hand_written_block_keeps_its_input_only(attention: str, products: str) -> None:
    options = {"attention": attention, "residual": torch.bfloat16, "fused": torch.bfloat16}
    batch = torch.randint(SHAPE.vocab, (BATCH, SHAPE.sequence), generator=torch.Generator().manual_seed(3))
    whole, again = gpt(products, **options), gpt(products, **options, checkpointing="full")
    run, kept = compiled(again)
    found = gradients(again, run, batch)
    for name, wanted in gradients(whole, whole, batch).items():
        torch.testing.assert_close(found[name], wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()), msg=name)
    streams = [value for value in kept if tuple(value.shape) == STREAM and value.dtype == torch.bfloat16]
    assert len(streams) == LAYERS
    # Beside the inputs of the blocks: what the head read, and its weight.
    sizes = [
        value.numel() * value.element_size() for value in kept if value.dtype != torch.uint8
    ]  # a generator's state
    others = sum(sizes) - LAYERS * streams[0].numel() * 2
    assert others < 2 * (streams[0].numel() + SHAPE.vocab * SHAPE.d_model) + 8192


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        ctx.save_for_backward(x, weight, product)
        return product * product

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, product = ctx.saved_tensors
        of_product = 2 * above * product
        return of_product @ weight.T, x.T @ of_product


class OwnBlock(nn.Module):
    """A function of its own, and operations in place before and behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Squared.apply(self.up(self.norm(x)).relu_(), self.weight)  # type: ignore[no-untyped-call]
        y.mul_(0.5).add_(1)
        z = y * y
        z[:, 0] = 0
        return x + self.down(z)


class FlatBlock(nn.Module):
    """It ends in a view, of what it computes for all tokens in a row, and its arguments have checkpoint's names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, early_stop: float = 1.0, function: float = 2.0) -> torch.Tensor:
        rows = x.view(4, 2, 16).flatten(0, 1)
        return (rows + early_stop * self.down(F.gelu(self.up(function * rows)))).view(4, 2, 16).view(x.shape)


class OwnModel(nn.Module):
    def __init__(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], kind: type[nn.Module] = OwnBlock, **named: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind(16) for _ in range(LAYERS))
        self.wrap, self.named = wrap, named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x, **self.named)
        return x


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("kind", "named"), [(OwnBlock, {}), (FlatBlock, {"early_stop": 0.5, "function": 0.3})], ids=["functions", "views"]
)
def test_a_users_blocks_are_computed_again_too(kind: type[nn.Module], named: dict[str, Any], is_compiled: bool) -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    plain, again = OwnModel(lambda block: block, kind, **named), OwnModel(recomputed, kind, **named)
    run, kept = compiled(again) if is_compiled else (again, [])
    found = gradients(again, run, batch)
    for name, wanted in gradients(plain, plain, batch).items():
        torch.testing.assert_close(found[name], wanted, msg=name)
    assert [value.numel() for value in kept] == ([8 * 16] * (LAYERS - 1) if is_compiled else [])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with dynamo.patch(optimize_ddp=dynamo.optimize_ddp):
        yield
    dist.destroy_process_group()


class Within(nn.Module):
    """As the engine has it: DDP around what calls the compiled model."""

    def __init__(self, model: nn.Module, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.run(batch)


@pytest.mark.usefixtures("one_rank")
def test_blocks_in_ddps_buckets_are_computed_again() -> None:
    shape = replace(SHAPE, d_model=256, d_ff=1024)  # more than the first bucket takes
    batch, kept_bytes = torch.randint(shape.vocab, (BATCH, shape.sequence)), {}
    for checkpointing in ("none", "full"):
        switch_process(Plan(compile=True, parallel="ddp", checkpointing=checkpointing))
        model = GPT(shape, residual=torch.bfloat16, fused=torch.bfloat16, checkpointing=checkpointing)
        initialise(model, seed=1)
        run, kept = compiled(model)
        gradients(model, DistributedDataParallel(Within(model, run)), batch)
        kept_bytes[checkpointing] = sum(value.numel() * value.element_size() for value in kept)
    assert kept_bytes["full"] < kept_bytes["none"] / 5, kept_bytes
