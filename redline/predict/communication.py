"""What the GPUs of a layout send each other in a step, and how long that takes.

    sent = traffic(rank, gpus_per_node=8)                 # Collective(kind="reduce-scatter", axis="dp", calls=13, ...)
    sent_bytes(sent) -> {"all-gather": 470e6, "reduce-scatter": 470e6}            of one GPU, in one step
    step = step_time(compute, sent, fabric, usual_model(), layout)
    step.seconds, step.exposed_seconds

The collectives are those that torch issues: DDP's buckets, FSDP2's units with their padded shards, the all-reduces of
`parallelize_module` and of its vocabulary-parallel loss. tests/cpu/test_communication_bytes.py counts them on a fake
group of 1,024 ranks, call by call and byte by byte. Left out: the gradient norm and the loss, one number each.

The time of a collective of S bytes over n nodes with g GPUs each (docs/parallel.md has the derivation):

    passes x ((g-1)/g S / inside  +  (n-1)/n S/g / between)  +  latency  +  wait (n-1)/n

passes is 2 for an all-reduce and 1 for the others. Transfer and latency hide behind the matmuls where torch overlaps
them, up to the overlap share; the wait for the slowest node does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from redline.core.interconnects import Links, choose_links
from redline.core.layout import bubble as share_of_bubble
from redline.core.plan import Plan
from redline.core.units import MIB
from redline.core.workload import Shape
from redline.predict.activations import FP32, Rank, residual_bytes
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, POINT = "all-reduce", "reduce-scatter", "all-gather", "point-to-point"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, POINT)
PASSES = {ALL_REDUCE: 2, REDUCE_SCATTER: 1, ALL_GATHER: 1}  # around the ring
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # torch's DDP: a small first bucket lets sending start early


@dataclass(frozen=True, kw_only=True)
class Group:
    """GPUs that communicate with each other."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> float:
        return self.ranks / self.nodes


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All calls of one kind for one purpose, by one GPU in one step."""

    what: str
    kind: str
    """One of KINDS."""
    axis: str
    """dp, tp or pp: the part of the layout that requires it."""
    group: Group
    calls: int
    bytes: float
    """Bytes of all calls, as whole tensors: the input of a reduce-scatter, the output of an all-gather."""
    during: str
    """forward, backward or update."""
    hides: bool
    """True if the matmuls of that pass run meanwhile."""
    every_pass: bool
    """True if it happens once per micro batch, False if once per step."""

    @property
    def sent(self) -> float:
        """Bytes that this GPU sends: in a ring, all but its own part, once per pass around the ring."""
        if self.kind == POINT:
            return self.bytes
        return PASSES[self.kind] * (self.group.ranks - 1) / self.group.ranks * self.bytes


def sent_bytes(collectives: Iterable[Collective]) -> dict[str, float]:
    """Return the bytes that this GPU sends, by kind, for the kinds that occur."""
    collectives = tuple(collectives)
    sums = {kind: sum(one.sent for one in collectives if one.kind == kind) for kind in KINDS}
    return {kind: size for kind, size in sums.items() if size}


# who talks to whom


def group_of(layout: Layout, axis: str, gpus_per_node: int) -> Group:
    """Return the group along `axis`; of several such groups, the one that spans most nodes. `axis` is tp, dp or pp, or
    a part of dp under hybrid sharding: `shard`, the GPUs of one copy, or `copies`, the GPUs that hold the same shard of
    each copy. Ranks count TP fastest, then DP (the shards of a copy first, then the copies), then PP."""
    tp, dp, pp, shards = layout.tp, layout.dp, layout.pp, layout.shards
    if axis == "pp":  # two neighbours; if the stages do not all fit in one node, some pair spans two
        return Group(ranks=2, nodes=2 if layout.gpus > gpus_per_node else 1)
    strides = {"tp": (tp, 1), "dp": (dp, tp), "shard": (shards, tp), "copies": (layout.replicas, tp * shards)}
    size, stride = strides[axis]
    if layout.gpus <= gpus_per_node:
        return Group(ranks=size, nodes=1)
    if axis == "copies":
        firsts = (stage * dp * tp for stage in range(min(pp, gpus_per_node)))
        starts = (first + shard * tp for first in firsts for shard in range(min(shards, gpus_per_node)))
    else:
        starts = (number * size * stride for number in range(min(layout.gpus // (size * stride), gpus_per_node)))
    nodes = max((start + (size - 1) * stride) // gpus_per_node - start // gpus_per_node + 1 for start in starts)
    return Group(ranks=size, nodes=min(size, nodes))  # neighbours more than a node apart: one node each


# what is sent


def traffic(rank: Rank, gpus_per_node: int) -> tuple[Collective, ...]:
    """Return the collectives of this GPU in one step. The first, middle and last stages of a pipeline differ: `rank`
    says which stage this is."""
    parts = (_data_parallel(rank, gpus_per_node), _tensor_parallel(rank, gpus_per_node), _pipeline(rank, gpus_per_node))
    return tuple(one for part in parts for one in part if one.calls)


def _data_parallel(rank: Rank, gpus_per_node: int) -> Iterator[Collective]:
    if rank.layout.dp == 1:
        return
    if rank.zero < 3:
        yield from _whole_weights(rank, group_of(rank.layout, "dp", gpus_per_node))
        return
    shard, copies = (group_of(rank.layout, axis, gpus_per_node) for axis in ("shard", "copies"))
    yield from _sharded_weights(rank, shard)
    if rank.layout.replicas > 1:
        yield _between_copies(rank, copies)
    if rank.uncut:
        yield from (_of_vectors(rank, group) for group in (shard, copies) if group.ranks > 1)


def _whole_weights(rank: Rank, group: Group) -> Iterator[Collective]:
    """DDP sums gradients in buckets, on the last micro batch only. Under ZeRO 1 and 2 each rank keeps a shard of the
    sum, updates it and gathers the weights; ZeRO 2 also shards gradients, so every micro batch must be reduced."""
    buckets = ddp_buckets(gradient_tensors(rank))
    passes = rank.layout.accumulation if rank.zero == 2 else 1
    yield Collective(
        what="gradients",
        kind=ALL_REDUCE if rank.zero == 0 else REDUCE_SCATTER,
        axis="dp",
        group=group,
        calls=passes * len(buckets),
        bytes=passes * sum(buckets),
        during="backward",
        hides=True,
        every_pass=rank.zero == 2,
    )
    if rank.zero:
        yield Collective(
            what="updated weights",
            kind=ALL_GATHER,
            axis="dp",
            group=group,
            calls=len(buckets),
            bytes=sum(buckets),
            during="update",
            hides=False,
            every_pass=False,
        )


def _sharded_weights(rank: Rank, group: Group) -> Iterator[Collective]:
    """FSDP2 has a unit per layer, and one for the rest, which stays gathered from forward to backward. `fsdp-keep`
    gathers once per micro batch and reduce-scatters gradients on the last micro batch only. `fsdp-whole` is one unit,
    gathered before the first micro batch and reduce-scattered after the last, while nothing else runs. It does not cut
    vectors; their gradients are averaged."""
    passes, whole = rank.layout.accumulation, rank.gathers_all
    units, numbers = _units(rank, group.ranks)
    layer = padded(rank.layer_tensors(), group.ranks)
    gathered = rank.compute if rank.casts else rank.weight
    again = 0 if rank.keeps or whole else rank.layers
    gatherings, reductions = 1 if whole else passes, 1 if rank.keeps or whole else passes
    for what, kind, during, times, calls, size in (
        ("weights", ALL_GATHER, "forward", gatherings, units, gathered * numbers),
        ("weights again", ALL_GATHER, "backward", gatherings, again, gathered * again * layer),
        ("gradients", REDUCE_SCATTER, "backward", reductions, units, rank.weight * numbers),
    ):
        yield Collective(
            what=what,
            kind=kind,
            axis="dp",
            group=group,
            calls=times * calls,
            bytes=times * size,
            during=during,
            hides=not whole,
            every_pass=times == passes,
        )


def _units(rank: Rank, shards: int) -> tuple[int, int]:
    """Return how many units FSDP2 gathers, and the number of elements in all of them."""
    layer, rest = (
        padded((one for one in tensors if rank.is_cut(one[0])), shards)
        for tensors in (rank.layer_tensors(), rank.outer_tensors())
    )
    numbers = rank.layers * layer + rest
    return 1 if rank.gathers_all else rank.layers + (rest > 0), numbers


def _between_copies(rank: Rank, group: Group) -> Collective:
    """Hybrid sharding: a GPU's shard of each unit's gradients is averaged over the copies, on the last micro batch
    only."""
    shards = rank.layout.shards
    units, numbers = _units(rank, shards)
    return Collective(
        what="gradients between copies",
        kind=ALL_REDUCE,
        axis="dp",
        group=group,
        calls=units,
        bytes=rank.weight * numbers // shards,
        during="backward",
        hides=not rank.gathers_all,
        every_pass=False,
    )


def _of_vectors(rank: Rank, group: Group) -> Collective:
    """Gradients of uncut tensors, averaged in one call after the last backward pass."""
    return Collective(
        what="gradients of vectors",
        kind=ALL_REDUCE,
        axis="dp",
        group=group,
        calls=1,
        bytes=rank.weight * rank.uncut,
        during="backward",
        hides=False,
        every_pass=False,
    )


def padded(tensors: Iterable[tuple[tuple[int, ...], int]], ranks: int) -> int:
    """Return the elements of tensors cut by rows, padding included: each GPU sends as many rows as the GPU that has
    most."""
    return sum(count * -(-sizes[0] // ranks) * ranks * math.prod(sizes[1:]) for sizes, count in tensors)


def gradient_tensors(rank: Rank) -> Iterator[int]:
    """Yield the bytes of each gradient in the order in which the backward pass finishes them. A head tied to the
    embedding finishes with it, at the end."""
    (table, tables), *others = [(rank.weight * math.prod(sizes), count) for sizes, count in rank.outer_tensors()]
    head = rank.last and not rank.head_is_embedding
    positions = 1 if rank.first and rank.shape.positions == "learned" else 0  # they follow the table
    yield from [table] * head
    yield from _each(others[positions:])
    layer = [(rank.weight * math.prod(sizes), count) for sizes, count in rank.layer_tensors()]
    yield from rank.layers * list(_each(reversed(layer)))
    yield from _each(others[:positions])
    yield from [table] * (tables - head)


def _each(sizes: Iterable[tuple[int, int]]) -> Iterator[int]:
    for size, count in sizes:
        yield from [size] * count


def ddp_buckets(tensors: Iterable[int], first: int = FIRST_BUCKET, cap: int = BUCKET) -> list[int]:
    """Return the bytes of each bucket: tensors are added in order, and a bucket that reaches the limit is closed."""
    buckets, open_bucket, limit = [], 0, first
    for size in tensors:
        open_bucket += size
        if open_bucket >= limit:
            buckets.append(open_bucket)
            open_bucket, limit = 0, cap
    return [*buckets, open_bucket] if open_bucket else buckets


def _tensor_parallel(rank: Rank, gpus_per_node: int) -> Iterator[Collective]:
    """The all-reduces of model/tensor_parallel.py, which nothing hides. Layers cut by inputs (proj, down) sum their
    outputs, layers cut by outputs (qkv, up, head) sum the gradients of their inputs, and the cut embedding sums its
    rows, in fp32. Outputs have the dtype of the matmuls. Inputs have the dtype that the norm wrote, which is that of
    the weights; FSDP gathers weights in the dtype of the matmuls."""
    layout = rank.layout
    if layout.tp == 1:
        return
    stream = rank.tokens * rank.shape.d_model
    narrow = rank.compute if rank.zero == 3 else rank.weight
    again = rank.layers if rank.plan.checkpointing == "full" else 0  # proj's output; down's is not needed again
    group = group_of(layout, "tp", gpus_per_node)
    for what, during, calls, size in (
        ("rows of the embedding", "forward", rank.first, FP32 * stream),
        ("outputs of attention and MLP", "forward", 2 * rank.layers, rank.compute * stream),
        ("outputs of attention again", "backward", again, rank.compute * stream),
        ("largest logits", "forward", rank.last, FP32 * rank.tokens),
        ("sums and targets of the logits", "forward", rank.last, 2 * FP32 * rank.tokens),
        ("gradients of inputs", "backward", 2 * rank.layers + rank.last, narrow * stream),
    ):
        yield Collective(
            what=what,
            kind=ALL_REDUCE,
            axis="tp",
            group=group,
            calls=layout.accumulation * calls,
            bytes=layout.accumulation * calls * size,
            during=during,
            hides=False,
            every_pass=True,
        )


def _pipeline(rank: Rank, gpus_per_node: int) -> Iterator[Collective]:
    """Each micro batch sends the stream to the next stage and its gradient to the one before. A tied table exists in
    two stages, whose gradients are summed."""
    layout = rank.layout
    if layout.pp == 1:
        return
    number = rank.compute if rank.zero == 3 else residual_bytes(rank.plan)
    size, group = number * rank.tokens * rank.shape.d_model, group_of(layout, "pp", gpus_per_node)
    for what, during, calls in (
        ("stream to the next stage", "forward", not rank.last),
        ("gradient to the stage before", "backward", not rank.first),
    ):
        yield Collective(
            what=what,
            kind=POINT,
            axis="pp",
            group=group,
            calls=layout.accumulation * calls,
            bytes=layout.accumulation * calls * size,
            during=during,
            hides=False,
            every_pass=True,
        )
    if rank.plan.tied and rank.first != rank.last:
        yield Collective(
            what="gradient of the tied table",
            kind=ALL_REDUCE,
            axis="pp",
            group=group,
            calls=1,
            bytes=rank.shared(rank.weight * rank.table, 2),
            during="update",
            hides=False,
            every_pass=False,
        )


# how long it takes


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How the GPUs are connected."""

    gpus_per_node: int
    links: Links

    @property
    def inside_rate(self) -> float:
        assert self.links.inside is not None, "missing_link was not asked"
        return self.links.inside.rate

    @property
    def between_rate(self) -> float:
        """Bytes per second of one GPU: all GPUs of the node use a shared port at once."""
        assert self.links.between is not None, "missing_link was not asked"
        return self.links.between.rate / (self.gpus_per_node if self.links.between.shared else 1)

    def missing_link(self, collectives: Iterable[Collective]) -> str | None:
        """Return why the traffic cannot be timed, or None if it can."""
        collectives = tuple(collectives)
        if self.links.inside is None and any(_uses_inside(one) for one in collectives):
            return "the traffic inside a node cannot be timed: name its link (--interconnect, such as nvlink4 or pcie4)"
        if self.links.between is None and any(one.group.nodes > 1 for one in collectives):
            return "the traffic between nodes cannot be timed: name their network (--interconnect, such as ib-400)"
        return None


def _uses_inside(one: Collective) -> bool:
    return one.group.nodes == 1 if one.kind == POINT else one.group.per_node > 1


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """What a collective costs besides its bytes. The share of each link that is reached is in core/interconnects.py."""

    latency_inside: float = 20e-6
    """Seconds per call within a node: NVLink's 15 to 25 us (docs/sources.md 7)."""
    latency_between: float = 40e-6
    """Seconds per call between nodes: InfiniBand's 30 to 50 us (docs/sources.md 7)."""
    wait: float = 0.0
    """Seconds that a collective over very many nodes waits for the slowest; over n nodes, (n-1)/n of it."""
    overlap: float = 0.8
    """Share of a pass's matmuls behind which traffic hides. Assumed: the published series fits with anything from 0.05
    to 1."""


def transfer_seconds(one: Collective, fabric: Fabric, model: LinkModel) -> float:
    """Return the seconds of all calls: bytes over bandwidth, plus latency."""
    group = one.group
    if one.kind == POINT:
        between = group.nodes > 1
        rate = fabric.between_rate if between else fabric.inside_rate
        return one.bytes / rate + one.calls * (model.latency_between if between else model.latency_inside)
    seconds = 0.0
    if group.per_node > 1:
        moved = PASSES[one.kind] * (1 - 1 / group.per_node) * one.bytes
        seconds += moved / fabric.inside_rate + one.calls * model.latency_inside
    if group.nodes > 1:
        moved = PASSES[one.kind] * (1 - 1 / group.nodes) * one.bytes / group.per_node
        seconds += moved / fabric.between_rate + one.calls * model.latency_between
    return seconds


def wait_seconds(one: Collective, model: LinkModel) -> float:
    """Return the seconds spent waiting for the slowest node. Pipeline neighbours wait in the bubble instead."""
    return 0.0 if one.kind == POINT else one.calls * model.wait * (1 - 1 / one.group.nodes)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds of one GPU's own work in a step, over all micro batches."""

    forward: float
    backward: float
    update: float = 0.0

    @property
    def passes(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class StepTime:
    compute: Compute
    seconds_of: tuple[float, ...]
    """Seconds of each collective, hidden or not, in the order of the traffic."""
    exposed_seconds: float
    """The part of their sum that the matmuls do not hide."""
    bubble_seconds: float

    @property
    def communication_seconds(self) -> float:
        return sum(self.seconds_of)

    @property
    def hidden_seconds(self) -> float:
        return self.communication_seconds - self.exposed_seconds

    @property
    def seconds(self) -> float:
        return self.compute.passes + self.compute.update + self.exposed_seconds + self.bubble_seconds


def step_time(
    compute: Compute, collectives: tuple[Collective, ...], fabric: Fabric, model: LinkModel, layout: Layout
) -> StepTime:
    """Return the time of a step. Callers must check `fabric.missing_link` first."""
    transfers = [transfer_seconds(one, fabric, model) for one in collectives]
    waits = [wait_seconds(one, model) for one in collectives]
    hidden = sum(_hidden(compute, collectives, transfers, model, layout.accumulation, name) for name in HIDING)
    # Traffic that every micro batch waits for also lengthens every slot of the bubble.
    in_line = sum(time for one, time in zip(collectives, transfers, strict=True) if not one.hides and one.every_pass)
    return StepTime(
        compute=compute,
        seconds_of=tuple(map(sum, zip(transfers, waits, strict=True))),
        exposed_seconds=sum(transfers) + sum(waits) - hidden,
        bubble_seconds=(layout.pp - 1) * (compute.passes + in_line) / layout.accumulation,
    )


def bubble(layout: Layout) -> float:
    """Return the share of a pipeline's time in which a stage is idle."""
    return share_of_bubble(layout.pp, layout.accumulation)


HIDING = ("forward", "backward")


def _hidden(
    compute: Compute,
    collectives: tuple[Collective, ...],
    transfers: list[float],
    model: LinkModel,
    micro_batches: int,
    during: str,
) -> float:
    """Return the seconds of traffic hidden behind the matmuls of one pass, at most `model.overlap` of the pass. Traffic
    sent once per step has only the last micro batch to hide behind."""
    hiding = [
        (one, time) for one, time in zip(collectives, transfers, strict=True) if one.hides and one.during == during
    ]
    window = model.overlap * (compute.forward if during == "forward" else compute.backward)
    once = sum(time for one, time in hiding if not one.every_pass)
    always = sum(time for one, time in hiding if one.every_pass)
    return min(always + min(once, window / micro_batches), window)


# the published series to which the wait is fitted


SERIES_SHAPE = Shape(layers=12, heads=12, d_model=768, d_ff=3072, vocab=50368, sequence=2048)  # MPT-125M
SERIES_MICRO_BATCH = 26
SERIES_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a series measured on A100-40 with 200 Gb/s of RoCE per GPU, FSDP with everything in bf16 (llm-foundry,
    scripts/train/benchmarking/README.md; docs/sources.md 7)."""

    gpus: int
    accumulation: int
    tokens_per_second: float
    """Tokens per second of one GPU."""
    shape: Shape = SERIES_SHAPE
    micro_batch: int = SERIES_MICRO_BATCH

    @property
    def layout(self) -> Layout:
        return Layout(gpus=self.gpus, micro_batch=self.micro_batch, accumulation=self.accumulation)

    @property
    def traffic(self) -> tuple[Collective, ...]:
        rank = Rank(
            shape=self.shape,
            plan=Plan(autocast="bf16", tied=True),
            micro_batch=self.micro_batch,
            layout=self.layout,
            zero=3,
            optimizer=find_optimizer("adamw-bf16"),  # for its weights and gradients of 2 bytes: nothing else is read
            first=True,
            last=True,
        )
        return traffic(rank, SERIES_NODE)

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.accumulation * self.micro_batch * self.shape.sequence / self.tokens_per_second

    def predicted(self, pass_seconds: float, model: LinkModel) -> StepTime:
        """Predict the step with `pass_seconds` of work per micro batch, a third of it in the forward pass."""
        work = self.accumulation * pass_seconds
        compute = Compute(forward=work / 3, backward=2 * work / 3)
        fabric = Fabric(gpus_per_node=SERIES_NODE, links=choose_links("nvlink3,roce-200", None))
        return step_time(compute, self.traffic, fabric, model, self.layout)


ONE_NODE = Published(gpus=8, accumulation=3, tokens_per_second=136.3e3)
TWO_NODES = Published(gpus=16, accumulation=1, tokens_per_second=130.5e3)


def fit(small: Published, large: Published, start: LinkModel) -> tuple[float, LinkModel]:
    """Fit two numbers to two rows: the seconds of work per micro batch, to `small` in a single node, and the wait, to
    the time by which `large` is slower than predicted without one. Everything else is as in `start`."""
    alone = replace(start, wait=0.0)
    exposed = small.predicted(small.seconds / small.accumulation, alone).exposed_seconds
    work = (small.seconds - exposed) / small.accumulation
    waits = sum(wait_seconds(one, replace(start, wait=1.0)) for one in large.traffic)
    return work, replace(start, wait=max(0.0, (large.seconds - large.predicted(work, alone).seconds) / waits))


@cache
def usual_model() -> LinkModel:
    """Return the model fitted to 8 and 16 GPUs of the published series: a wait of 0.9 ms."""
    return fit(ONE_NODE, TWO_NODES, LinkModel())[1]
