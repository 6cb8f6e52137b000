"""FSDP2 around one rank with NCCL there: what `fsdp-whole` leaves in a recipe computes what it computes in one process,
with weights that were gathered in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import TCPStore

from redline.core.workload import Shape, Workload
from redline.engine.build import build_step
from redline.engine.distributed import Ranks
from redline.engine.probe import probe
from redline.engine.shard import Sharded, whole
from redline.engine.step import TrainStep
from redline.rungs import find_rung, plan_of, why_not

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)
FAST = ("bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw", "fused-loss")
FAST += ("bf16-residual", "sigmoid-gelu", "fused-backward")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with Ranks(rank=0, count=1, store=store) as ranks:
        ranks.connect("cuda")
        yield ranks


def gradients(step: TrainStep, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the second step: FSDP2 has taken the weights' memory away and given it back by then."""
    step(batch)
    step.compute_gradients(batch)
    return {name: whole(p.grad).detach() for name, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("rungs", "bound"),
    [
        ((), 0.03),
        (("packed-attention", "tuned-matmuls"), 0.03),
        (("flash4-backward", "tuned-matmuls", "fused-matmuls"), 0.03),
        (("fp8-head", "fp8-linears"), 0.15),  # each of the two rounds by more than that: docs/fp8.md
    ],
    ids=["usual", "libraries", "fused", "fp8"],
)
@pytest.mark.parametrize("chunk", [None, 4], ids=["at-once", "two-pieces"])
def test_what_is_gathered_as_one_computes_what_one_process_computes(
    one: Ranks, rungs: tuple[str, ...], bound: float, chunk: int | None
) -> None:
    machine, plan = probe("cuda"), plan_of((*FAST, *rungs))
    for name in rungs:
        others = plan_of(other for other in (*FAST, *rungs) if other != name)
        if (reason := why_not(find_rung(name), WORKLOAD, machine, others)) is not None:
            pytest.skip(reason)
    batch = torch.randint(257, (2, 8, 256), device=CUDA)
    theirs = gradients(build_step(WORKLOAD, plan, device=CUDA, chunk=chunk), batch)
    torch._dynamo.reset()
    step = build_step(WORKLOAD, plan_of((*FAST, *rungs, "fsdp-whole")), device=CUDA, ranks=one, chunk=chunk)
    assert type(step.shared) is Sharded
    ours = gradients(step, batch)
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < bound * gradient.norm(), name
