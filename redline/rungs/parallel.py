"""How several ranks share a step: one rung each, used when named or when there are ranks (`--gpus N`).

redline train gpt2 --gpus 8        redline train gpt2-large --gpus 8 --parallel fsdp --tensor 2

The number of ranks is not part of a recipe: on one process, or on one rank, a recipe with `fsdp` is the recipe without
it (`for_layout` in `rungs/ladder.py`).
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
        return "there is only one process: use --gpus N"
    return GRAPHS_OF_RANKS if plan.cuda_graphs else None


def _undone(plan: Plan) -> Plan:
    """Return the plan without what a cut model cannot have: interdependent blocks, layers with their own matmuls."""
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
    """Return why this model cannot be cut, or None for the built-in GPT, the only model whose cuts are known."""
    if workload.source == BUILT_IN:
        return None
    if rung == TENSOR_PARALLEL:
        return "which layers are cut by rows and which by columns is known of the built-in GPT only: take fsdp"
    return "where a model can be cut into stages is known of the built-in GPT only: take fsdp"


class Ddp(Rung):
    """Every rank holds the whole model and processes its share of the batch; gradients are averaged.

    torch's DistributedDataParallel puts gradients into buckets of 25 MB and averages one while the backward pass
    computes the next. With gradient accumulation, gradients are averaged only in the last micro batch of an update.
    Every rank holds all weights, gradients and optimizer state, so more devices do not make room for a larger model.
    torch cuts the graph of a compiled step where a bucket is full (its DDPOptimizer): the gradients of each part are
    ready when its backward pass ends, and nothing is fused across a cut. A single rank has no one to average with and
    gets no wrapper.
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
    """Ranks hold parts of the tensors, instead of all of them as with DDP."""

    maths = Maths.ROUNDING
    instead_of = DDP
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _sharding_needs(hardware, plan)


class Fsdp(Sharded):
    """Every rank holds a shard of each tensor, of its gradient and of its optimizer state.

    FSDP2 (`fully_shard`): the weights of a block are gathered before it runs, freed, and gathered again for its
    backward pass; gradients are reduced and scattered at once, in every micro batch of an update. A rank holds 1/N of
    what DDP holds, at 1.5 times the traffic, and pays that in every micro batch, where DDP averages once per update.
    Most of the traffic is hidden behind the computation of the previous block. With bf16 the weights travel in 16 bits
    and gradients are summed in fp32. Blocks are compiled one by one. The model is built without allocating its weights,
    so it may be larger than one device.

    With `--replicas R` there are R copies of the model, each sharded among N/R ranks (hybrid sharding). With one copy
    per node, weights are gathered inside nodes and only gradients travel between them, once per update.

    `fused-backward` is undone: its blocks read a bias of the previous block, which is not gathered at that moment. So
    are `tuned-matmuls`, `fused-matmuls`, `packed-attention`, `flash4-backward`, `fp8-head`, `fp8-linears` and
    `fp8-mlps`, which were tested with whole layers only.
    """

    name = FSDP
    title = "ranks share weights, FSDP2"

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), parallel="fsdp")


class FsdpKeep(Sharded):
    """Like `fsdp`, with gathered weights kept from the forward to the backward pass and gradients scattered once.

    There is one gather less per micro batch, so without accumulation the traffic is no more than DDP's; but from the
    end of the forward pass on, every rank holds all weights for a while. With accumulation, whole gradients are
    accumulated as well, and scattered only in the last micro batch of an update: less traffic than `fsdp`, but a rank
    holds all gradients during an update. Optimizer state stays sharded, and so does everything else between updates.
    """

    name = "fsdp-keep"
    title = "FSDP2, weights kept for the backward"

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), parallel="fsdp-keep")


class FsdpWhole(Sharded):
    """Like `fsdp`, but the model is gathered as a whole, once per update, and runs as it does in one process.

    Between updates every rank holds a shard of each tensor and of its optimizer state, as with `fsdp`. One gather
    before the first forward pass of an update brings all weights, in 16 bits with bf16. They stay until the last
    backward pass is over, and then all gradients are reduced and scattered at once. So during an update a rank holds
    whole weights and whole gradients, as with ZeRO 1, and sends each of them once, however many micro batches there
    are. In between nothing is gathered: the model is compiled as one graph, and rungs that replace layers or make
    blocks depend on one another (`fused-backward`, `tuned-matmuls`, `packed-attention`, fp8) stay.

    Biases and norms are not sharded: every rank has them in fp32, as one process does, and their gradients are averaged
    in one call. They are two thirds of GPT-2's tensors but a thousandth of its parameters, and FSDP2 works tensor by
    tensor. The traffic is not hidden, whereas `fsdp` hides it behind blocks. This is meant for models whose weights
    fit, on fast links or with many micro batches per update.
    """

    name = "fsdp-whole"
    title = "FSDP2, the model gathered as one"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, parallel="fsdp-whole")


class TensorParallel(Rung):
    """The ranks of a group hold every layer together: heads, the MLP's width and the vocabulary are split among them.

    The first matrix of attention and of the MLP is split by columns and the second by rows (Megatron-LM, arXiv
    1909.08053), so a rank computes whole heads and a part of the MLP, and two all-reduces over the group, per layer and
    direction, assemble the residual stream. Embedding and head are split by rows of the vocabulary: a rank has only its
    own logits, and the loss takes two reductions of a few numbers per token. A rank holds 1/N of the weights, gradients
    and moments, and of the activations inside a layer. Every layer waits for its all-reduces, so a group stays within
    one node. `--tensor N` sets its size.

    Blocks are compiled one by one. The loss becomes the full one, and `fused-backward`, `tuned-matmuls`,
    `fused-matmuls`, `packed-attention`, `flash4-backward` and the fp8 rungs are undone: they need whole layers, or
    whole rows of logits.
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
    """Ranks hold the blocks one after the other, and micro batches pass through them.

    torch.distributed.pipelining with the 1F1B schedule: a stage computes as many forward passes as there are stages
    behind it before it starts to alternate, one backward and one forward pass, so few activations wait. The micro
    batches of the pipeline are those of gradient accumulation. While m of them fill and drain p stages, each rank idles
    (p-1)/(m+p-1) of the time, so give an update many. Only the residual stream between two blocks travels, once per
    stage and direction, so stages may be on different nodes. A rank holds 1/N of the blocks. The first stage has the
    embedding too and the last the head, which costs as much as several blocks where the model is narrow; a tied weight
    is on both, and its gradients are summed at every update. `--pipeline N` sets the number of stages, which have
    equally many blocks each.

    Blocks are compiled one by one. `fused-backward`, whose blocks pass on two tensors, is undone, and so are the rungs
    that go with it, `tuned-matmuls` and the fp8 rungs.
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
    """Like `pipeline-parallel`, but all forward passes of an update come before its backward passes.

    GPipe (arXiv 1811.06965): the bubble is the same as with 1F1B, but a stage keeps the activations of all micro
    batches of an update rather than of one per stage. What a stage sends need not wait for what it receives, which may
    pay off where the links are slow.
    """

    name = PIPELINE_GPIPE
    title = "ranks hold blocks in turn, GPipe"
    instead_of = PIPELINE_PARALLEL

    def apply(self, plan: Plan) -> Plan:
        return replace(_undone(plan), pipeline="gpipe")


WAYS = tuple(rung.name for rung in (Ddp, Fsdp, FsdpKeep, FsdpWhole))  # values of `--parallel`
RANK_RUNGS = (*WAYS, *(rung.name for rung in (TensorParallel, PipelineParallel, PipelineGpipe)))
