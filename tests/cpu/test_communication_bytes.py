"""What torch's DDP, fully_shard and pipelining and our own tensor parallel send, call by call, against the prediction.

The group is torch's fake one: 1,024 ranks of which this process is one, whose collectives do nothing. CommDebugMode
counts calls; `Wire` adds up their bytes.
"""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from redline.core.layout import Layout as Ranked
from redline.core.plan import Plan
from redline.core.workload import Shape, Workload
from redline.engine.distributed import Ranks
from redline.engine.shard import give_memory, share
from redline.model.adapter import adapter_of
from redline.model.gpt import GPT, fill_buffers
from redline.model.tensor_parallel import cut_gpt, vocabulary_loss
from redline.predict.activations import Rank
from redline.predict.communication import ALL_GATHER, ALL_REDUCE, POINT, REDUCE_SCATTER, traffic
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout

RANKS = 1024
SMALL = Shape(layers=2, heads=4, d_model=64, d_ff=256, vocab=96, sequence=16)
WIDE = Shape(layers=2, heads=12, d_model=768, d_ff=3072, vocab=1000, sequence=8)  # layers of more than one bucket
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# CommDebugMode's own hooks on a model whose inputs are token ids.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


# counting


Wire = runpy.run_path(str(Path(__file__).with_name("wire.py")))["Wire"]


def predicted(shape, plan, *, tp=1, pp=1, zero=0, accumulation=1, replicas=1, first=True, last=True):
    layout = Layout(gpus=RANKS, tp=tp, pp=pp, micro_batch=2, accumulation=accumulation, replicas=replicas)
    rank = Rank(
        shape=shape,
        plan=plan,
        micro_batch=2,
        layout=layout,
        zero=zero,
        optimizer=find_optimizer(plan.optimizer),
        first=first,
        last=last,
    )
    calls, sizes = Counter(), Counter()
    for one in traffic(rank, gpus_per_node=8):
        calls[one.kind] += one.calls
        sizes[one.kind] += one.bytes
    return {kind: (calls[kind], sizes[kind]) for kind in calls}


def only_axis(shape, plan, axis, *, tp):
    layout = Layout(gpus=RANKS, tp=tp, micro_batch=2)
    optimizer = find_optimizer(plan.optimizer)
    rank = Rank(
        shape=shape, plan=plan, micro_batch=2, layout=layout, zero=0, optimizer=optimizer, first=True, last=True
    )
    calls, sizes = Counter(), Counter()
    for one in traffic(rank, gpus_per_node=8):
        if one.axis == axis:
            calls[one.kind] += one.calls
            sizes[one.kind] += one.bytes
    return {kind: (calls[kind], sizes[kind]) for kind in calls}


def only(found, *kinds):
    return {kind: value for kind, value in found.items() if kind in kinds}


# the group


@pytest.fixture(scope="module", autouse=True)
def group():
    """Rank 256 is in the middle: the second of four stages, the first of its tensor-parallel group."""
    dist.init_process_group("fake", store=FakeStore(), rank=256, world_size=RANKS)
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def flat():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


@pytest.fixture(scope="module")
def crossed():
    return init_device_mesh("cpu", (RANKS // 4, 4), mesh_dim_names=("dp", "tp"))


class Trained(nn.Module):
    """A model and its loss in one, so that what leaves it is no view of a tensor that FSDP watches."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


def tokens_for(shape):
    return torch.randint(0, shape.vocab, (2, shape.sequence))


def step(trained, shape, *, autocast=False):
    """Forward, loss and backward of one micro batch of two sequences, with what it sent."""
    wire, counts = Wire(), CommDebugMode()
    with counts, wire:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = trained(tokens_for(shape))
        loss.backward()
    assert counts.get_total_counts() == sum(wire.calls.values())  # both saw the same calls
    return wire.seen()


# data parallel


def ddp(model):
    """The reducer wants a result from the work it starts, which the fake group's has not: the hook gives it one. Its
    buckets are made in the order of the first backward and announced in the forward after it."""
    trained = Trained(model)
    # The mask is the same everywhere; how to leave it out has another name in each version of torch but this one.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trained, ["model.future"])
    wrapped = DistributedDataParallel(trained)

    def all_reduce(_, bucket):
        dist.all_reduce(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, all_reduce)
    for _ in range(2):
        wrapped(tokens_for(model.shape)).backward()
    return wrapped


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ddp(tied):
    model = ddp(GPT(WIDE, tied=tied))
    found = predicted(WIDE, Plan(tied=tied))
    assert found == {ALL_REDUCE: (found[ALL_REDUCE][0], 4 * sum(p.numel() for p in model.parameters()))}
    assert step(model, WIDE) == found


def test_ddp_sends_on_the_last_micro_batch_only():
    model = ddp(GPT(SMALL))
    step_bytes = predicted(SMALL, Plan(tied=True), accumulation=3)
    assert step_bytes == predicted(SMALL, Plan(tied=True))
    with Wire() as wire:
        with model.no_sync():
            for _ in range(2):
                model(tokens_for(SMALL)).backward()
        model(tokens_for(SMALL)).backward()
    assert wire.seen() == step_bytes


def sharded(model, blocks, mesh, policy):
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(Trained(model), mesh=mesh, mp_policy=policy)


class ManyRanks(Ranks):
    """Of the fake group, which has no store."""

    joined = True


def update_of_the_engine(way, layout, *, tied, autocast):
    """What `engine/shard.py` sends for three micro batches."""
    ranks = ManyRanks(rank=dist.get_rank(), count=RANKS)
    ranks.arrange(layout)
    workload = Workload(name="small", shape=SMALL, tokenizer="bytes", micro_batch=2, learning_rate=1e-3)
    plan, cpu = Plan(tied=tied, autocast=autocast, parallel=way), torch.device("cpu")
    adapter = adapter_of(workload)
    model = adapter.build_unplaced(plan)
    shared = share(adapter, model, adapter.loss_of(model, plan), plan=plan, ranks=ranks, device=cpu, cuts={})

    def backward(tokens, _):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            loss = shared.loss_of(tokens, tokens)
        loss.backward()
        return loss.detach()

    with Wire() as wire:
        shared.gradients([(tokens_for(SMALL), 1 / 3)] * 3, backward)
    return wire.seen()


@pytest.mark.parametrize(
    ("tied", "policy"), [(True, POLICY), (False, MixedPrecisionPolicy())], ids=["tied-bf16", "untied-fp32"]
)
def test_fsdp2(flat, tied, policy):
    model = GPT(SMALL, tied=tied)
    plan = Plan(tied=tied, autocast="bf16" if policy is POLICY else None)
    assert step(sharded(model, model.h, flat, policy), SMALL) == predicted(SMALL, plan, zero=3)


def test_fsdp2_gathers_and_scatters_every_micro_batch(flat):
    model = GPT(SMALL)
    trained, sums = sharded(model, model.h, flat, POLICY), Counter()
    for _ in range(2):
        for kind, (calls, moved) in step(trained, SMALL).items():
            sums[kind, "calls"] += calls
            sums[kind, "bytes"] += moved
    for kind, (calls, moved) in predicted(SMALL, Plan(tied=True, autocast="bf16"), zero=3, accumulation=2).items():
        assert (sums[kind, "calls"], sums[kind, "bytes"]) == (calls, moved)


@pytest.mark.parametrize(("tied", "autocast"), [(True, "bf16"), (False, None)], ids=["tied-bf16", "untied-fp32"])
def test_the_model_as_one_is_gathered_and_scattered_once_per_update(tied, autocast):
    found = predicted(SMALL, Plan(tied=tied, autocast=autocast, parallel="fsdp-whole"), zero=3, accumulation=3)
    calls = {kind: calls for kind, (calls, _) in found.items()}
    assert calls == {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 1}, "the last for what is not cut"
    assert update_of_the_engine("fsdp-whole", Ranked(ranks=RANKS), tied=tied, autocast=autocast) == found


# hybrid sharding: copies of the model, each cut among some ranks


@pytest.mark.parametrize(
    ("tied", "policy"), [(True, POLICY), (False, MixedPrecisionPolicy())], ids=["tied-bf16", "untied-fp32"]
)
@pytest.mark.parametrize("copies", [2, 64])
def test_hybrid_sharding(tied, policy, copies):
    """Gathers and reduce-scatters inside a copy, and an all-reduce of each unit's share between copies."""
    mesh = init_device_mesh("cpu", (copies, RANKS // copies), mesh_dim_names=("replicate", "shard"))
    model = GPT(SMALL, tied=tied)
    plan = Plan(tied=tied, autocast="bf16" if policy is POLICY else None)
    found = predicted(SMALL, plan, zero=3, replicas=copies)
    assert found[ALL_REDUCE][0] == SMALL.layers + 1
    assert step(sharded(model, model.h, mesh, policy), SMALL) == found


@pytest.mark.parametrize("way", ["fsdp", "fsdp-keep", "fsdp-whole"])
def test_copies_are_averaged_on_the_last_micro_batch_only(way):
    found = predicted(SMALL, Plan(tied=True, autocast="bf16", parallel=way), zero=3, accumulation=3, replicas=4)
    assert update_of_the_engine(way, Ranked(ranks=RANKS, replicas=4), tied=True, autocast="bf16") == found


def test_hybrid_sharding_and_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, RANKS // 8, 4), mesh_dim_names=("replicate", "shard", "tp"))
    trained, policy = Cut(mesh["tp"]), replace(POLICY, cast_forward_inputs=False)
    for block in trained.model.h:
        fully_shard(block, mesh=mesh["replicate", "shard"], mp_policy=policy)
    fully_shard(trained, mesh=mesh["replicate", "shard"], mp_policy=policy, reshard_after_forward=False)
    plan = Plan(tied=True, autocast="bf16")
    assert step(trained, SMALL, autocast=True) == predicted(SMALL, plan, tp=4, zero=3, replicas=2)


# tensor parallel


class Cut(nn.Module):
    """What `redline train --tensor 4` computes: the built-in GPT as its adapter cuts it, and its loss."""

    def __init__(self, mesh, *, tied=True, recompute=False):
        super().__init__()
        with torch.device("meta"):
            self.model = GPT(SMALL, tied=tied, checkpointing="full" if recompute else "none")
        cut_gpt(self.model, mesh)
        give_memory(self.model, torch.device("cpu"))
        nn.init.zeros_(self.model.wte.weight)
        fill_buffers(self.model)

    def forward(self, tokens):
        return vocabulary_loss(self.model, tokens, tokens)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_tensor_parallel(crossed, recompute, autocast):
    plan = Plan(tied=True, checkpointing="full" if recompute else "none", autocast="bf16" if autocast else None)
    expected = only_axis(SMALL, plan, "tp", tp=4)
    assert step(Cut(crossed["tp"], recompute=recompute), SMALL, autocast=autocast) == expected


def test_tensor_parallel_and_fsdp2(crossed):
    trained, policy = Cut(crossed["tp"]), replace(POLICY, cast_forward_inputs=False)
    for block in trained.model.h:
        fully_shard(block, mesh=crossed["dp"], mp_policy=policy)
    fully_shard(trained, mesh=crossed["dp"], mp_policy=policy, reshard_after_forward=False)
    assert step(trained, SMALL, autocast=True) == predicted(SMALL, Plan(tied=True, autocast="bf16"), tp=4, zero=3)


# pipeline parallel


class Block(nn.Module):
    """The matrices of a GPT-2 block; which numbers meet does not matter."""

    def __init__(self, shape):
        super().__init__()
        C = shape.d_model
        self.norm_1, self.qkv, self.proj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm_2, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, shape.d_ff), nn.Linear(shape.d_ff, C)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.proj(q * k.sigmoid() + v)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def test_pipeline(monkeypatch):
    """The second of four stages sends the stream forwards and its gradient backwards, once per micro batch. The fake
    group receives nothing: that all stages know their shapes, on which torch has them vote first, is filled in."""
    monkeypatch.setattr(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1))
    mesh = init_device_mesh("cpu", (4, RANKS // 4), mesh_dim_names=("pp", "dp"))
    layer, stream = Block(SMALL), torch.zeros(2, 16, 64, requires_grad=True)
    stage = PipelineStage(
        layer, 1, 4, torch.device("cpu"), input_args=stream, output_args=stream, group=mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, n_microbatches=6, loss_fn=lambda output, target: output.sum())
    schedule.step()  # the vote is over
    with Wire() as wire:
        schedule.step()
    shape = replace(SMALL, layers=4)
    found = predicted(shape, Plan(), pp=4, accumulation=6, first=False, last=False)
    assert only(wire.seen(), POINT) == only(found, POINT)
