"""Peak device memory of a training step, tensor by tensor, before anything runs.

    memory = predict_memory(shape, plan, micro_batch=16)
    memory.allocated     # comparable with torch.cuda.max_memory_allocated
    memory.total         # plus what the allocator reserves and what lies outside it: what a card must have

The peak of a step can lie at a few moments: the loss, forward or backward, the backward of the last or the first layer,
the embedding's gradient, the update, and with `fsdp-whole` the sharding of all gradients. The prediction is the largest
of them. Every term is a tensor; docs/memory.md says which were seen alive on an H200, which on a CPU, and which are
reasoned. Left out: dropout, sequence parallelism, offloading, DDP's buckets besides the gradients. What fits a card is
in predict/fitting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from redline.core.devices import VECTOR_BYTES
from redline.core.errors import UserError, unknown_name
from redline.core.plan import PIECES, Plan
from redline.core.traced import Traced
from redline.core.units import MIB
from redline.core.workload import Shape, check_positive
from redline.predict.activations import (
    FP32,
    Rank,
    batch_bytes,
    final_activations,
    kept_activations,
    layer_backward,
    mlp_tensors,
)
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout, check_layout
from redline.predict.sizes import round_up
from redline.predict.traced import one_gpu_only, traced_bytes

KINDS = ("residual", "normalised", "qkv", "attention core", "attention output", "mlp", "embedding", "recomputed")
# cuBLAS has a workspace per thread that calls it: one for the forward, one for the backward. Each takes 32 MiB on
# Hopper and Blackwell, and 8 MiB on older cards. cublasLt adds a small one.
WORKSPACES = (2 * 32 + 1) * MIB
CONTEXT = 810 * 10**6  # CUDA context and loaded kernels: 787 to 884 MB in the ladder's record of 2026-11-15 on an H200
COLLECTIVES = 1536 * MIB  # NCCL's buffers with several GPUs: 1 to 2 GiB (docs/sources.md 3)
FRAGMENTATION = 0.08  # reserved over allocated: the median of the memory record is 1.08, a single run 1.01 to 1.6
STRIDE_BYTES = 128  # if vector loads cannot take rows, Inductor pads them, and wide rows to this multiple
INFERENCE_BYTES = {"fp32": 4, "mixed": 4, "half": 2, "int8": 1}  # per parameter; mixed adds 16-bit casts
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU at the moment of the peak."""

    moment: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: dict[str, int] = field(default_factory=dict)
    """Kept for the backward pass, by kind: KINDS."""
    logits: int = 0
    """Logits, their copies and their gradient."""
    temporary: int = 0
    """Gradients in flight through a layer, matmul workspaces, and what an update needs."""
    autocast_cache: int = 0
    """16-bit copies of the weights."""
    context: int = 0
    """Bytes outside the allocator."""
    stage: str | None = None
    """In a pipeline, which stage this is: 'first' or 'last'."""

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated would return."""
        parts = (self.weights, self.gradients, self.optimizer, self.logits, self.temporary, self.autocast_cache)
        return sum(parts) + self.activation_bytes

    @property
    def fragmentation(self) -> int:
        """Bytes reserved by the allocator and not in use: a typical share, not a prediction."""
        return round(FRAGMENTATION * self.allocated)

    @property
    def total(self) -> int:
        return self.allocated + self.fragmentation + self.context


def predict_memory(
    shape: Shape | Traced,
    plan: Plan,
    *,
    micro_batch: int,
    layout: Layout | None = None,
    zero: int = 0,
    optimizer: str | None = None,
    inference: bool | str = False,
) -> Memory:
    """Predict the peak of the GPU that needs most. `optimizer`: a name in predict/optimizers.py instead of the plan's.
    `zero`: the ZeRO stage among the data-parallel GPUs; 3 is FSDP. `inference`: True, or a key of INFERENCE_BYTES."""
    check_positive("micro batch", micro_batch)
    layout = layout or Layout(gpus=1)
    if isinstance(shape, Traced):
        if inference or zero or layout.gpus > 1:
            raise one_gpu_only("inference, ZeRO or several GPUs")
        return _traced_memory(shape, plan, micro_batch, optimizer)
    check_layout(shape, layout)
    _check_choices(plan, layout, zero)
    if inference:
        return _generate(
            shape, plan, micro_batch=micro_batch, layout=layout, weights=inference_precision(plan, inference)
        )
    row = find_optimizer(plan.optimizer if optimizer is None else optimizer)
    moments = [
        memory
        for first, last in _ends(layout.pp)
        for memory in _moments(
            Rank(
                shape=shape,
                plan=plan,
                micro_batch=micro_batch,
                layout=layout,
                zero=zero,
                optimizer=row,
                first=first,
                last=last,
            )
        )
    ]
    return max(moments, key=lambda memory: memory.total)


def _traced_memory(traced: Traced, plan: Plan, micro_batch: int, optimizer: str | None) -> Memory:
    """Memory of a traced model: what is kept is known, what lives only briefly is not."""
    parts = traced_bytes(traced, plan, micro_batch=micro_batch, optimizer=optimizer)
    return Memory(
        moment="sum of all parts",
        weights=parts.weights,
        gradients=parts.gradients,
        optimizer=parts.optimizer,
        activations={"saved for the backward": parts.activations},
        temporary=WORKSPACES + parts.batch,
        context=CONTEXT,
    )


def _check_choices(plan: Plan, layout: Layout, zero: int) -> None:
    for name, value, known in (
        ("loss", plan.loss, ("full", *PIECES)),
        ("attention", plan.attention, ("naive", "flash", "cudnn")),
        ("checkpointing", plan.checkpointing, ("none", "selective", "full")),
    ):
        if value not in known:
            raise unknown_name(name, value, known)
    if zero not in ZERO_STAGES:
        raise UserError(f"ZeRO stage {zero}", "the stages are 0 to 3", "use 0, 1, 2 or 3")
    if zero < 3:  # FSDP around one GPU is meaningful: all tensors whole, 16-bit weights one block at a time
        check_replicas(zero, layout)


def check_replicas(zero: int, layout: Layout) -> None:
    """Raise UserError if ZeRO would shard state over a single replica."""
    if zero and layout.dp == 1:
        raise UserError(
            f"ZeRO stage {zero} with one replica of the model",
            "ZeRO shares state among data-parallel GPUs, and DP = GPUs / (TP x PP) is 1",
            "use more GPUs, or ZeRO 0",
        )


def _ends(pp: int) -> tuple[tuple[bool, bool], ...]:
    """Return (first, last) of the pipeline's first and last stage; those between hold less than one of the two."""
    return ((True, True),) if pp == 1 else ((True, False), (False, True))


# the moments of a step


def _moments(rank: Rank) -> Iterator[Memory]:
    if rank.last:
        yield from _loss_moments(rank)
    yield _layer_moment(rank, "backward of the last layer", behind=rank.layers - 1)
    yield _layer_moment(rank, "backward of the first layer", behind=0)
    if rank.first:
        yield _embedding_moment(rank)
    if rank.gathers_all:
        yield _sharing_out_moment(rank)
    yield _moment(rank, "optimizer update", gradients=rank.gradient_bytes, temporary=rank.update_bytes)


def _moment(
    rank: Rank,
    name: str,
    *,
    activations: dict[str, float] | None = None,
    gradients: int = 0,
    logits: float = 0,
    temporary: float = 0,
    casts: int = 0,
) -> Memory:
    waiting = rank.in_flight - 1  # further micro batches in the pipeline
    kept = activations or {}
    if waiting:
        kept = _sum(kept, {kind: waiting * size for kind, size in kept_activations(rank, rank.layers).items()})
    return Memory(
        moment=name,
        weights=rank.weight_bytes,
        gradients=gradients,
        optimizer=rank.optimizer_bytes,
        activations={kind: round(kept[kind]) for kind in KINDS if kept.get(kind)},
        logits=round(logits),
        temporary=WORKSPACES + round(temporary),
        autocast_cache=casts,
        context=_context(rank),
        stage=_stage(rank),
    )


def _stage(rank: Rank) -> str | None:
    return None if rank.layout.pp == 1 else "first" if rank.first else "last"


def _loss_moments(rank: Rank) -> Iterator[Memory]:
    """The end of the forward, with every activation in place; then the start of the backward."""
    whole = _sum(kept_activations(rank, rank.layers), final_activations(rank))
    blocks_again = rank.plan.checkpointing == "full"
    for name, logits, temporary in LOSSES[rank.plan.loss](rank):
        # Autocast's cache lasts through the forward; then casts that no node saved are freed. Inductor has no cache.
        cached = rank.layers if not blocks_again or (name == LOSS_FORWARD and not rank.plan.compile) else 0
        yield _moment(
            rank,
            name,
            activations=whole,
            gradients=rank.standing_gradients,
            logits=logits,
            temporary=temporary + rank.gathered_weights(rank.layers),
            casts=rank.cast_bytes(cached, head=True),
        )


LOSS_FORWARD, LOSS_BACKWARD = "forward of the loss", "backward of the loss"
LossMoments = Iterator[tuple[str, float, float]]


def _full_loss(rank: Rank) -> LossMoments:
    """Yield (moment, bytes of logits, other bytes) of cross-entropy over all logits."""
    c, numbers = rank.compute, rank.tokens * rank.rows
    if not rank.plan.compile:
        copy = FP32 if rank.casts else 0
        yield LOSS_FORWARD, (c + copy + FP32) * numbers, 0  # logits, their fp32 copy, log-probabilities
        yield LOSS_BACKWARD, 3 * FP32 * numbers, 0  # log-probabilities, their gradient, the logits' gradient
        return
    # Inductor writes the gradient over the logits, unless it had to pad them: then both exist, in wider rows. The
    # gradient of the head's input exists beside them.
    odd = _odd_rows(rank)
    numbers = rank.tokens * _padded_rows(rank) if odd else numbers
    yield LOSS_BACKWARD, (2 if odd else 1) * c * numbers, c * rank.tokens * rank.shape.d_model


def _odd_rows(rank: Rank) -> bool:
    """True if vector loads cannot take the rows of logits: Inductor may pad the matmuls that touch them (pad_mm)."""
    return rank.rows * rank.compute % VECTOR_BYTES != 0


def _padded_rows(rank: Rank) -> int:
    return round_up(rank.rows, STRIDE_BYTES // rank.compute)


def _head_loss(rank: Rank) -> LossMoments:
    """The logits of one piece, which are overwritten by their gradient. The peak is when the head's gradient is made,
    when those of two pieces are added, or when the pieces' gradients of the features are joined."""
    c, table, stream = rank.compute, rank.table, rank.tokens * rank.shape.d_model
    pieces = PIECES[rank.plan.loss]
    if rank.plan.narrow_head:
        yield from _narrow_loss(rank)
        return
    piece = -(-rank.tokens // pieces)
    logits = c * piece * rank.rows
    if rank.plan.compile and rank.casts and _odd_rows(rank):
        # Two matmuls read the logits' gradient, one of them transposed; pad_mm probably copies it for each. GPT-2 at
        # micro batch 64 on an H200 takes 41.17 GB, 13.11 GB more than with a padded vocabulary, and two copies are
        # 13.19 GB (record of `tune` of 2026-11-15). This was not measured with fp32 logits.
        logits += 2 * c * piece * _padded_rows(rank)
    # The head's input in 16 bit, and in eager mode also as the norm wrote it.
    features = c * stream + (FP32 * stream if rank.casts and not rank.plan.compile else 0)
    wide = rank.casts and rank.plan.tuned_matmuls and not rank.gathers_all
    alone = rank.weight if wide else c  # the head's gradient of a single piece
    parts = 2 * c if rank.casts else c  # the second meets the first, which is widened only then
    adding = (2 * FP32 + parts) * table + c * stream if pieces > 1 else 0  # two sums, parts; features' gradients
    joining = (FP32 + c if pieces > 1 else alone) * table + 2 * c * stream
    if pieces == 1 or rank.plan.compile:  # measured peaks: compiled code still has the last logits then
        yield LOSS_FORWARD, logits, features + max(adding, joining)
        return
    yield LOSS_FORWARD, logits, features + (FP32 + 2 * c) * table + c * stream  # the sum, the prior part, the new one
    yield LOSS_FORWARD, 0, features + max(adding, joining)


def _narrow_loss(rank: Rank) -> LossMoments:
    """In 8 bit the gradient does not overwrite the logits: first both exist, then the gradient and its transpose, with
    the gradients computed from them. The weight exists in both orientations, which takes as much as in 16 bit."""
    c, table, stream = rank.compute, rank.table, rank.tokens * rank.shape.d_model
    pieces = PIECES[rank.plan.loss]
    numbers = -(-rank.tokens // pieces) * rank.rows
    features = (c + 1) * stream + (0 if rank.plan.compile else FP32 * stream)
    done = (FP32 + c) * table + c * stream if pieces > 1 else 0  # the sum of earlier pieces, and their gradients
    yield LOSS_FORWARD, (c + 1) * numbers, features + done
    sums = 2 * FP32 + 2 * c if pieces > 1 else c
    yield LOSS_FORWARD, 2 * numbers, features + stream // pieces + sums * table + 2 * c * stream


LOSSES: dict[str, Callable[[Rank], LossMoments]] = {"full": _full_loss, "fused": _head_loss, "chunked": _head_loss}


def _layer_moment(rank: Rank, name: str, behind: int) -> Memory:
    """One layer in its backward while `behind` layers wait for theirs; of the layers after it only gradients are
    left."""
    extra = layer_backward(rank)
    kept = kept_activations(rank, behind + 1)
    kept["recomputed"] = rank.tokens * extra.recomputed
    casts = behind + 1 if rank.plan.checkpointing != "full" else 1
    done = rank.weight * ((rank.layers - behind - 1) * rank.layer + rank.last * (rank.table + rank.vectors))
    gathered = rank.gathered_gradients(done)
    gradients = max(rank.standing_gradients, rank.shared_gradients(done))
    # A weight's gradient comes out of the matmul in 16 bit before it is widened.
    narrow = rank.compute * rank.matrices if rank.compute != rank.weight and not rank.gathers_all else 0
    return _moment(
        rank,
        name,
        activations=kept,
        gradients=gradients,
        temporary=rank.tokens * extra.flowing + rank.gathered_weights(behind + 1) + gathered + narrow,
        casts=rank.cast_bytes(casts, head=False),
    )


def _embedding_moment(rank: Rank) -> Memory:
    """A gradient as large as the table. If head and embedding are tied, the head's is held too, and their sum is a
    third. The stream's gradient is its input."""
    stream = FP32 * rank.tokens * rank.shape.d_model
    own = 2 * rank.weight * rank.table if rank.head_is_embedding else 0
    done = rank.weight * rank.parameters if rank.gathers_all else rank.gradient_bytes
    return _moment(
        rank,
        "gradient of the embedding",
        activations={"embedding": batch_bytes(rank)},
        gradients=max(0 if rank.gathers_all else rank.gradient_bytes, rank.standing_gradients),
        temporary=stream + own + rank.gathered_weights(0) + rank.gathered_gradients(done),
    )


def _sharing_out_moment(rank: Rank) -> Memory:
    """All gradients at once, after the gathered weights are freed: as computed or accumulated, beside the copy that is
    sent; or that copy beside this GPU's shard."""
    vectors = rank.weight * rank.uncut
    sent, share = rank.weight * rank.parameters - vectors, rank.gradient_bytes - vectors
    computed = max(rank.standing_gradients - vectors, rank.gathered_gradients(sent))
    return _moment(
        rank, "gradients shared out", gradients=rank.gradient_bytes, temporary=sent + max(0, computed - share)
    )


def _context(rank: Rank) -> int:
    return CONTEXT + (COLLECTIVES if rank.layout.gpus > 1 else 0)


def _sum(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in (*a, *(kind for kind in b if kind not in a))}


# inference


def inference_precision(plan: Plan, inference: bool | str) -> str:
    if isinstance(inference, str):
        if inference not in INFERENCE_BYTES:
            raise unknown_name("inference precision", inference, INFERENCE_BYTES)
        return inference
    return "mixed" if plan.autocast else "fp32"


def _generate(shape: Shape, plan: Plan, *, micro_batch: int, layout: Layout, weights: str) -> Memory:
    """Memory while reading whole sequences with a cache of keys and values: nothing else is kept, and the head runs
    only for the last token of each sequence. Layers with a window keep only the window: a rolling cache."""
    plan = replace(plan, autocast=None if weights == "fp32" else plan.autocast or "bf16", checkpointing="none")
    ends = [
        Rank(
            shape=shape,
            plan=plan,
            micro_batch=micro_batch,
            layout=layout,
            zero=0,
            optimizer=find_optimizer("adamw-fused"),
            first=first,
            last=last,
        )
        for first, last in _ends(layout.pp)
    ]
    return max((_prefill(rank, weights) for rank in ends), key=lambda memory: memory.total)


def _prefill(rank: Rank, weights: str) -> Memory:
    shape, c, tp = rank.shape, rank.compute, rank.layout.tp
    C, Q, KV, F = shape.d_model, shape.query_width / tp, shape.kv_width / tp, shape.d_ff / tp
    stream = (FP32 if weights in ("fp32", "mixed") else c) * C
    mlp = mlp_tensors(shape, rank.plan) * c * F
    square = shape.heads / tp * shape.sequence
    # Naive softmax: its input and output in fp32, and under autocast the 16-bit scores.
    softmax = (2 * c if rank.plan.compile else 2 * FP32 + (c if rank.casts else 0)) * square
    attention = c * (2 * Q + 2 * KV) + (softmax if rank.plan.attention == "naive" else 0)
    return Memory(
        moment="prefill of whole prompts",
        weights=INFERENCE_BYTES[weights] * rank.parameters,
        activations={
            "keys and values": round(rank.micro_batch * rank.cached_tokens * 2 * c * KV),
            "one layer": round(rank.tokens * (stream + c * C + max(mlp, attention))),
            "embedding": round(8 * rank.tokens),
        },
        logits=rank.last * rank.micro_batch * rank.rows * (c + FP32),
        temporary=WORKSPACES // 2,  # no backward, so one thread
        autocast_cache=rank.cast_bytes(rank.layers, head=rank.last) if weights == "mixed" else 0,
        context=_context(rank),
    )
