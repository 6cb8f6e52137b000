"""How several ranks share a step: one rung each, taken when it is named or when there are ranks (`--gpus N`).

redline train gpt2 --gpus 8        redline train gpt2-large --gpus 8 --parallel fsdp --tensor 2

How many ranks there are is no part of a recipe: a recipe with `fsdp` on one process, or on one rank, is the recipe
without it (`for_layout` in `rungs/ladder.py`).
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import ADAMWS, Plan
from redline.core.workload import BUILT_IN, Workload
from redline.rungs.rung import Maths, Rung

DDP, FSDP = "ddp", "fsdp"
GRAPHS_OF_RANKS = "what a CUDA graph replays cannot wait for other ranks: leave cuda-graphs out"
TENSOR_PARALLEL = "tensor-parallel"
PIPELINE_PARALLEL = "pipeline-parallel"
PIPELINE_GPIPE = "pipeline-gpipe"


def _several(hardware: Hardware, plan: Plan) -> str | None:
    if hardware.ranks < 2:
        return "there is one process: several share a step with --gpus N"
    return GRAPHS_OF_RANKS if plan.cuda_graphs else None


def _undone(plan: Plan) -> Plan:
    """What a model that is cut does without: blocks that know one another, and layers with products of their own."""
    return replace(
        plan,
        backward="autograd",
        fp8_head=False,
        fp8_linears=False,
        fp8_mlps=False,
        tuned_matmuls=False,
        fused_matmuls=False,
        packed_attention="none",
    )


def where_to_cut(rung: str, workload: Workload) -> str | None:
    """Why nobody knows, of a model that is not the built-in GPT."""
    if workload.source == BUILT_IN:
        return None
    if rung == TENSOR_PARALLEL:
        return "which layers are cut by rows and which by columns is known of the built-in GPT only: take fsdp"
    return "where a model can be cut into stages is known of the built-in GPT only: take fsdp"


class Ddp(Rung):
    """Every rank holds the model and takes its share of the batch; gradients are averaged.

    torch's DistributedDataParallel: gradients go into buckets of 25 MB, and one is averaged while the backward pass
    computes the next. With accumulation only the last micro batch of an update is averaged. Weights,
    gradients and optimizer state lie on every rank in full: what fits one device fits many, and no larger model. Of a
    compiled step torch cuts the graph where a bucket is full (its DDPOptimizer): a part's gradients are there when its
    backward pass has ended, and nothing is fused across a cut. One rank has nobody to average with, and no wrapper.
    """

    name = DDP
    title = "ranks average their gradients"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _several(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, parallel="ddp")


def _sharding_needs(hardware: Hardware, plan: Plan) -> str | None:
    if plan.optimizer not in ADAMWS:
        return f"a rank holds rows of a matrix, and {plan.optimizer} was tried with whole ones only: take an AdamW"
    if plan.autocast == "fp16":
        return "loss scaling was tried with whole gradients only: take bf16"
    return _several(hardware, plan)


class Sharded(Rung):
    """Ranks hold parts of the tensors, in the place of DDP."""

    maths = Maths.ROUNDING
    instead_of = DDP
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _sharding_needs(hardware, plan)


class Fsdp(Sharded):
    """Every rank holds a part of each tensor, of its gradient and of its optimizer state.

    FSDP2 (`fully_shard`): the weights of a block are gathered before it runs, given back, and gathered again for its
    backward pass; gradients are added up and dealt out at once, in every micro batch of an update. A rank holds 1/N of
    what DDP holds, at 1.5 times the traffic, and that in every micro batch, where DDP averages once per update; most of
    it is hidden behind the block before. With bf16 the weights travel in 16 bits and gradients are added
    up in fp32. Blocks are compiled one by one, and the model is built without memory: one larger than a device starts.
    With `--replicas R` there are R copies of the model, each cut among N/R ranks (hybrid sharding): with one per node,
    weights are gathered inside nodes and only gradients travel between them, once per update.
    `fused-backward` is undone: its blocks read a bias of the block before, which is not gathered then. So are
    `tuned-matmuls`, `fused-matmuls`, `packed-attention`, `fp8-head`, `fp8-linears` and `fp8-mlps`, which were tried
    with whole layers only.
    """

    name = FSDP
    title = "ranks share weights, FSDP2"

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), parallel="fsdp")


class FsdpKeep(Sharded):
    """As `fsdp`, with gathered weights kept from the forward to the backward pass, and gradients dealt out once.

    One gathering less per micro batch, so as little traffic as DDP without accumulation; but from the end of the
    forward pass on every rank holds all weights for a while. With accumulation whole gradients are added up as well,
    and dealt out on the last micro batch of an update only: less traffic than `fsdp`, and a rank holds all gradients
    within an update. Optimizer state is shared as before, and so is everything between updates.
    """

    name = "fsdp-keep"
    title = "FSDP2, weights kept for the backward"

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), parallel="fsdp-keep")


class FsdpWhole(Sharded):
    """As `fsdp`, with the model gathered as one, once per update, so that it runs as one process runs it.

    Between updates every rank holds a part of each tensor and of its optimizer state, as with `fsdp`. One gathering
    before the first forward pass of an update brings all weights, with bf16 in 16 bits; they stay until its last
    backward pass is over, and then all gradients are dealt out at once. So a rank holds whole weights and whole
    gradients within an update, which is what ZeRO 2 holds of gradients, and sends each of them once, however many micro
    batches there are. In between nothing is gathered: the model is compiled as one graph, and whatever changes layers
    or lets blocks know one another (`fused-backward`, `tuned-matmuls`, `packed-attention`, fp8) stays. Biases and norms
    are not cut: every rank has them in fp32, as one process does, and averages their gradients in one call. They are
    two thirds of GPT-2's tensors and a thousandth of its numbers, and FSDP2 works tensor by tensor. Nothing hides the
    traffic either, which `fsdp` hides behind blocks. It is meant for models whose weights fit, on fast links or
    with many micro batches per update.
    """

    name = "fsdp-whole"
    title = "FSDP2, the model gathered as one"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, parallel="fsdp-whole")


class TensorParallel(Rung):
    """Ranks of a group hold every layer together: heads, the MLP's width and the vocabulary are cut.

    The first matrix of attention and MLP is cut by its columns and the second by its rows (Megatron-LM, arXiv
    1909.08053), so a rank computes whole heads and a part of the MLP, and two sums over the group per layer and
    direction put the stream together. Embedding and head are cut by rows of the vocabulary: a rank has its own logits
    only, and the loss takes two sums of a few numbers per token. A rank holds 1/N of weights, gradients, moments
    and of activations inside a layer; every layer waits for its sums, so a group stays in one node. `--tensor N`
    says how many. Blocks are compiled one by one; `fused-backward`, `fp8-head`, `fp8-linears` and the
    losses in one kernel or in pieces are undone, which take whole layers and whole rows of logits.
    """

    name = TENSOR_PARALLEL
    title = "ranks share every layer"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return where_to_cut(self.name, workload) or _sharding_needs(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), tensor_parallel=True, loss="full")


class PipelineParallel(Rung):
    """Ranks hold the blocks one after the other, and pieces of the batch pass through them.

    torch.distributed.pipelining, with the schedule 1F1B: a stage has computed as many forwards as there are stages
    behind it when it begins to alternate, a backward and a forward, so few activations wait. A micro batch of the
    pipeline is one of the gradient accumulation. While m of them fill and drain p stages, each rank idles
    (p-1)/(m+p-1) of the time: make an update of many. Only the stream between two blocks travels, once per stage and
    direction, so stages may stand in different nodes. A rank holds 1/N of the blocks. The first has the
    embedding too and the last the head, which costs as much as several blocks where the model is narrow; a tied weight
    lies on both, and its gradients are added up at every update. `--pipeline N` says how many stages, with equally many
    blocks each. Blocks are compiled one by one; `fused-backward` is undone, whose blocks hand on two tensors, and
    so are `fp8-head` and `fp8-linears`.
    """

    name = PIPELINE_PARALLEL
    title = "ranks hold blocks in turn, 1F1B"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if (unknown := where_to_cut(PIPELINE_PARALLEL, workload)) is not None:
            return unknown
        if plan.optimizer not in ADAMWS:
            tried = f"{plan.optimizer} was tried with all of them only"
            return f"a stage has parameters of its own, and {tried}: take an AdamW"
        if plan.autocast == "fp16":
            return "loss scaling was tried with the gradients of a whole model only: take bf16"
        return _several(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), pipeline="1f1b")


class PipelineGpipe(PipelineParallel):
    """As `pipeline-parallel`, with all forwards of an update before its backwards.

    GPipe (arXiv 1811.06965): the bubble is that of 1F1B, and what a stage keeps for its backwards is that of all micro
    batches of an update rather than of one per stage. What a stage sends need not wait for what it receives, which may
    pay where the links are slow.
    """

    name = PIPELINE_GPIPE
    title = "ranks hold blocks in turn, GPipe"
    instead_of = PIPELINE_PARALLEL

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), pipeline="gpipe")


WAYS = tuple(rung.name for rung in (Ddp, Fsdp, FsdpKeep, FsdpWhole))  # `--parallel`
RANK_RUNGS = (*WAYS, *(rung.name for rung in (TensorParallel, PipelineParallel, PipelineGpipe)))
