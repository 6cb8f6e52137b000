"""Every operation of a training step with its FLOPs and bytes, from which the roofline computes times.

    operations(shape, plan, micro_batch=16) -> (Operation(name="qkv", direction="forward", flops=..., bytes=...), ...)

Bytes are what crosses the memory bus when an operation reads its inputs once and writes its outputs once. The fusion
level decides how many operations there are:

    eager     every operator is a kernel of its own, including autocast's casts, copies and the mask's clone
    inductor  residual, norm and cast are one kernel, the whole softmax is one, the loss reads logits twice and writes
              their gradient once; bias gradients, q/k/v's gradient stack and weight casts stay kernels of their own
    ideal     the stream is kept in the matmuls' dtype; activations, biases and rotations are fused into the matmuls and
              the attention kernel, the loss reads and writes the logits once, clipping is fused into the optimizer

Norms and activations count as single kernels even in eager mode, as torch's own modules are. A name says what the
operation is for; a row sums over all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from redline.core.devices import VECTOR_BYTES
from redline.core.errors import unknown_name
from redline.core.plan import PIECES, Plan
from redline.core.workload import Shape
from redline.predict.activations import Rank, residual_bytes
from redline.predict.flops import executed_flops, parameters
from redline.predict.gemms import Gemm, attention_gemms, linear_gemms, linear_layers
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout

CONTRACTION, NORMALISATION, ELEMENTWISE = "tensor contraction", "normalisation", "element-wise"
OPTIMIZER, MOVEMENT = "optimizer", "data movement"
GROUPS = (CONTRACTION, NORMALISATION, ELEMENTWISE, OPTIMIZER, MOVEMENT)
FUSIONS = ("eager", "inductor", "ideal")
FP32 = 4  # bytes: parameters and gradients unless the optimizer says otherwise, softmax and norms in eager autocast
FP8 = 1
LINEARS = ("qkv", "q", "kv", "proj", "up", "down")
COPIED_BYTES = 4  # rows that start at multiples of this can at least be loaded by asynchronous copies


@dataclass(frozen=True, kw_only=True)
class Operation:
    name: str
    group: str
    direction: str
    """forward, backward, recompute or update."""
    bytes: float
    flops: float = 0.0
    """FLOPs of matmuls; the arithmetic of other operations never decides their time."""
    kernels: int
    part: str
    """core (of attention), layer or rest: decides whether checkpointing recomputes it."""
    kind: str = "memory"
    """gemm, fp8, unaligned, odd, attention or memory: decides which share of which peak it reaches."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes from which bytes are counted."""

    shape: Shape
    plan: Plan
    fusion: str
    tokens: int
    sequences: int

    @property
    def compute(self) -> int:
        """Bytes per element that a matmul reads."""
        return 2 if self.plan.autocast else FP32

    @property
    def weight(self) -> int:
        """Bytes per stored weight, and per gradient."""
        return find_optimizer(self.plan.optimizer).weights

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream."""
        return self.compute if self.fusion == "ideal" else residual_bytes(self.plan)

    @property
    def casts(self) -> bool:
        return self.compute != FP32

    @property
    def square(self) -> float:
        """Attention scores of one layer, per token."""
        return self.shape.heads * self.shape.sequence

    @property
    def rows(self) -> int:
        return self.plan.vocab_rows(self.shape.vocab)

    def per_token(
        self, name: str, group: str, direction: str, width: float, *, calls: int, kernels: int = 1, part: str = "layer"
    ) -> Operation:
        """Return an operation with `width` bytes per token and call, and `kernels` kernels per call."""
        size = self.tokens * width * calls
        return Operation(name=name, group=group, direction=direction, bytes=size, kernels=calls * kernels, part=part)


def operations(
    shape: Shape, plan: Plan, *, micro_batch: int, accumulation: int = 1, fusion: str | None = None
) -> tuple[Operation, ...]:
    """Return the operations of one step: `accumulation` passes over a micro batch each, and one update. `fusion` None
    means what the plan does: 'inductor' if it compiles, else 'eager'."""
    fusion = fusion or ("inductor" if plan.compile else "eager")
    if fusion not in FUSIONS:
        raise unknown_name("fusion level", fusion, FUSIONS)
    z = Sizes(shape=shape, plan=plan, fusion=fusion, tokens=micro_batch * shape.sequence, sequences=micro_batch)
    listed = [
        *_linear(z),
        *_attention(z),
        *_norms(z),
        *_activations(z),
        *_gradient_sums(z),
        *_loss(z),
        *_embedding(z),
        *_weight_casts(z),
        *_narrow_head(z),
        *_narrow_layers(z),
        *_update(z),
    ]
    kept = [operation for operation in listed if operation.bytes]
    once = (*kept, *_recomputed(kept, plan))
    return (*(_repeated(operation, accumulation) for operation in once), *_accumulated(z, accumulation))


def _repeated(operation: Operation, passes: int) -> Operation:
    """An update happens once per step, everything else once per pass, even autocast's casts: its cache lasts one
    pass."""
    if operation.direction == "update":
        return operation
    return replace(
        operation,
        bytes=passes * operation.bytes,
        flops=passes * operation.flops,
        kernels=passes * operation.kernels,
    )


def _accumulated(z: Sizes, passes: int) -> Iterator[Operation]:
    """Each further pass adds its gradients to the sum: two reads and a write, or in the ideal step one read by the
    matmul, which adds to it."""
    if passes == 1:
        return
    width = z.weight if z.fusion == "ideal" else 3 * z.weight
    count = parameters(z.shape, z.plan.tied, z.plan).total
    yield Operation(
        name="gradient sums",
        group=ELEMENTWISE,
        direction="backward",
        bytes=(passes - 1) * width * count,
        kernels=0 if z.fusion == "ideal" else (passes - 1) * tensors(z.shape, z.plan),
        part="rest",
    )


def _recomputed(listed: list[Operation], plan: Plan) -> Iterator[Operation]:
    parts = {"full": ("core", "layer"), "selective": ("core",)}.get(plan.checkpointing, ())
    for operation in listed:
        if operation.direction == "forward" and operation.part in parts:
            yield replace(operation, direction="recompute")


# tensor contractions


def _linear(z: Sizes) -> Iterator[Operation]:
    for gemm in linear_gemms(z.shape, z.plan, micro_batch=z.sequences):
        yield _contraction(gemm, z, part="rest" if gemm.where == "head" else "layer")


def is_narrow(gemm: Gemm, plan: Plan) -> bool:
    """True if the GEMM's operands have 8 bits."""
    if gemm.where == "head":
        return plan.narrow_head
    return gemm.where in LINEARS and plan.narrows(gemm.where, gemm.direction)


def _contraction(gemm: Gemm, z: Sizes, part: str) -> Operation:
    narrow = is_narrow(gemm, z.plan)
    size = (FP8 if narrow else z.compute) * (gemm.m * gemm.k + gemm.k * gemm.n) + z.compute * gemm.m * gemm.n
    return Operation(
        name=gemm.where if gemm.direction == "forward" else f"{gemm.where} {gemm.direction}",
        group=CONTRACTION,
        direction="forward" if gemm.direction == "forward" else "backward",
        bytes=size * gemm.batch * gemm.count,
        flops=gemm.flops,
        kernels=gemm.count,
        part=part,
        kind="fp8" if narrow else _gemm_kind(gemm, z),
    )


def _gemm_kind(gemm: Gemm, z: Sizes) -> str:
    """Rows of odd length start at unaligned addresses, from which tensor cores cannot load at full speed. Inductor pads
    them, and plain fp32 does not use those loads. The tokens that a weight's gradient sums over are not along rows."""
    if z.fusion != "eager" or z.plan.precision == "fp32":
        return "gemm"
    along = (gemm.m, gemm.n) if gemm.direction == "wgrad" else (gemm.n, gemm.k)
    step = math.gcd(*(size * z.compute for size in along))  # its largest power of two is the alignment of rows
    if step % COPIED_BYTES:
        return "odd"
    return "unaligned" if step % VECTOR_BYTES else "gemm"


def _attention(z: Sizes) -> Iterator[Operation]:
    yield from _rotations(z)
    if z.plan.attention == "naive":
        for gemm in attention_gemms(z.shape, micro_batch=z.sequences):
            yield _contraction(gemm, z, part="core")
        yield from _softmax(z)
        yield from _head_copies(z)
        return
    flops = executed_flops(z.shape, z.plan).attention
    q, kv, layers = z.shape.query_width, z.shape.kv_width, z.shape.layers
    statistics = FP32 * z.shape.heads  # softmax's log-sum-exp, one per head and token
    for direction, work, numbers in (
        ("forward", flops.forward, 2 * q + 2 * kv),  # q, k, v in, y out
        ("backward", flops.backward, 4 * q + 4 * kv),  # q, k, v, y, dy in; dq, dk, dv out
    ):
        yield Operation(
            name="attention",
            group=CONTRACTION,
            direction=direction,
            bytes=z.tokens * (z.compute * numbers + statistics) * layers,
            flops=work * z.tokens,
            kernels=layers,
            part="core",
            kind="attention",
        )


# normalisations


def _norms(z: Sizes) -> Iterator[Operation]:
    """The norms of the layers and the final norm, with the residual sums and casts around them."""
    for part, calls in (("layer", z.shape.layer_norms * z.shape.layers), ("rest", 1)):
        for name, group, direction, width, kernels in _norm_passes(z, residual=part == "layer"):
            yield z.per_token(name, group, direction, width * z.shape.d_model, calls=calls, kernels=kernels, part=part)


def _norm_passes(z: Sizes, residual: bool) -> list[tuple[str, str, str, int, int]]:
    """Return each pass with its bytes per element of the width and its kernels. Eager residual sums belong to layers;
    fused, the last sum is part of the last norm."""
    r, c, cast = z.stream, z.compute, z.compute + z.stream if z.casts else 0
    if z.fusion == "eager":
        return [
            ("norm", NORMALISATION, "forward", 2 * r, 1),
            ("norm", NORMALISATION, "backward", 5 * r, 2),  # dx: dy, x in, dx out; gains: dy, x once more
            ("residual", ELEMENTWISE, "forward", 2 * r + c if residual else 0, 1),
            ("residual", ELEMENTWISE, "backward", 3 * r if residual else 0, 1),  # two branches' gradients become one
            ("cast", MOVEMENT, "forward", cast, 1),  # what the norm wrote, for the matmul
            ("cast", MOVEMENT, "backward", 2 * cast, 2),  # the norm's gradient, and the stream's for the branch
        ]
    # One kernel: stream and branch in, stream and normalised out; the backward is the reverse.
    copy = c if r != c and z.fusion == "inductor" else 0
    gains = c + r if z.fusion == "inductor" else 0  # a separate reduction over tokens
    return [
        ("residual + norm", NORMALISATION, "forward", 2 * r + 2 * c, 1),
        ("residual + norm", NORMALISATION, "backward", c + 3 * r + copy + gains, 2 if gains else 1),
    ]


def _softmax(z: Sizes) -> Iterator[Operation]:
    """Scale, mask and softmax of naive attention, over the whole square."""
    c, cast, calls = z.compute, z.compute + FP32 if z.casts else 0, z.shape.layers
    if z.fusion == "eager":
        passes = [
            ("scale", ELEMENTWISE, "forward", 2 * c, 1),
            ("mask", ELEMENTWISE, "forward", 4 * c, 2),  # masked_fill clones and then fills
            ("softmax", NORMALISATION, "forward", 2 * FP32, 1),
            ("softmax cast", MOVEMENT, "forward", 2 * cast, 2),  # to fp32 and back
            ("softmax cast", MOVEMENT, "backward", 2 * cast, 2),
            ("softmax", NORMALISATION, "backward", 3 * FP32, 1),
            ("mask", ELEMENTWISE, "backward", 4 * c, 2),
            ("scale", ELEMENTWISE, "backward", 2 * c, 1),
        ]
    else:
        passes = [
            ("softmax", NORMALISATION, "forward", 2 * c, 1),
            ("softmax", NORMALISATION, "backward", 3 * c, 1),
        ]
    for name, group, direction, width, kernels in passes:
        yield z.per_token(name, group, direction, width * z.square, calls=calls, kernels=kernels, part="core")


def _loss(z: Sizes) -> Iterator[Operation]:
    """Cross-entropy over the logits, which the head's matmul has written."""
    c, cast = z.compute, z.compute + FP32 if z.casts else 0
    passes = {
        "eager": [
            ("loss cast", MOVEMENT, "forward", cast, 1),
            ("loss", NORMALISATION, "forward", 2 * FP32, 1),
            ("loss fill", MOVEMENT, "backward", FP32, 1),  # zeros, and a -1 per token
            ("loss", NORMALISATION, "backward", 3 * FP32, 1),
            ("loss cast", MOVEMENT, "backward", cast, 1),
        ],
        "inductor": [("loss", NORMALISATION, "forward", c, 1), ("loss", NORMALISATION, "backward", 2 * c, 1)],
        # logits in, their gradient out in place, or in 8 bit elsewhere
        "fused": [("loss", NORMALISATION, "forward", c + (FP8 if z.plan.narrow_head else c), 1)],
    }["fused" if z.plan.loss != "full" or z.fusion == "ideal" else z.fusion]
    for name, group, direction, width, kernels in passes:
        yield z.per_token(name, group, direction, width * z.rows, calls=1, kernels=kernels, part="rest")
    if z.plan.loss == "chunked":  # each further piece adds its gradient of the head to the fp32 sum
        sums = PIECES["chunked"] - 1
        yield Operation(
            name="head gradient sums",
            group=ELEMENTWISE,
            direction="forward",
            bytes=sums * (2 * FP32 + c) * z.rows * z.shape.d_model,
            kernels=sums,
            part="rest",
        )


# element-wise


def _activations(z: Sizes) -> Iterator[Operation]:
    """GELU, or silu(gate) x up, with the elements read and written per element of the MLP's width."""
    numbers = {
        ("eager", False): (2, 3),
        ("eager", True): (5, 9),  # silu, then a product; its two gradients, then silu's
        ("inductor", False): (2, 3),
        ("inductor", True): (3, 5),
        ("ideal", False): (1, 1),  # a second output of the matmul; its backward reads that again
        ("ideal", True): (1, 3),
    }[z.fusion, z.shape.gated]
    kernels = (2, 3) if z.shape.gated and z.fusion == "eager" else (1, 1)
    width, layers = z.compute * z.shape.d_ff, z.shape.layers
    yield z.per_token("activation", ELEMENTWISE, "forward", numbers[0] * width, calls=layers, kernels=kernels[0])
    yield z.per_token("activation", ELEMENTWISE, "backward", numbers[1] * width, calls=layers, kernels=kernels[1])


def _rotations(z: Sizes) -> Iterator[Operation]:
    """Rotary positions of queries and keys: x cos + rotated(x) sin, operator by operator or in one pass."""
    if z.shape.positions != "rope" or z.fusion == "ideal":
        return
    numbers, kernels = (9, 5) if z.fusion == "eager" else (2, 1)
    width = numbers * z.compute * (z.shape.query_width + z.shape.kv_width)
    for direction in ("forward", "backward"):
        yield z.per_token("rope", ELEMENTWISE, direction, width, calls=z.shape.layers, kernels=kernels)


def _gradient_sums(z: Sizes) -> Iterator[Operation]:
    """Bias gradients, each a sum over all tokens, and stacking the gradients of q, k and v for the fused matmul."""
    if z.fusion == "ideal":
        return
    outputs = [layer for layer in linear_layers(z.shape, z.plan) if layer.where != "head"]
    biased = [layer for layer in outputs if z.shape.has_bias(layer.where)]
    if biased and z.plan.backward != "fused":  # its kernels sum what they write
        width = z.compute * sum(layer.outputs * layer.count for layer in biased)
        calls = sum(layer.count for layer in biased)
        yield z.per_token("bias gradients", ELEMENTWISE, "backward", width / calls, calls=calls)
    if z.shape.fused_qkv:
        width = 2 * z.compute * (z.shape.query_width + 2 * z.shape.kv_width)
        yield z.per_token("q/k/v gradient stack", MOVEMENT, "backward", width, calls=z.shape.layers)


# data movement and the optimizer


def _head_copies(z: Sizes) -> Iterator[Operation]:
    """Naive attention's batched matmuls need each head's rows together: q, k, v (repeated to every head) and y are
    copied into that order and back; in the backward, y's gradient and two of the other gradients are."""
    width = 2 * z.compute * z.shape.query_width
    for direction, copies in (("forward", 4), ("backward", 3)):
        yield z.per_token(
            "head copies", MOVEMENT, direction, copies * width, calls=z.shape.layers, kernels=copies, part="core"
        )


def _embedding(z: Sizes) -> Iterator[Operation]:
    """Look-ups, the positions added to them, and both gradients: a table of zeros, then one row added per token."""
    row = z.stream * z.shape.d_model
    added = 2 * row if z.shape.positions == "learned" and z.fusion == "eager" else 0
    yield z.per_token("embedding", MOVEMENT, "forward", 2 * row + added, calls=1, kernels=2, part="rest")
    summed = row if z.shape.positions == "learned" else 0
    gathered = z.per_token("embedding", MOVEMENT, "backward", 3 * row + summed, calls=1, kernels=3, part="rest")
    tables = z.weight * z.rows * z.shape.d_model * (1 + 3 * z.plan.tied)  # zeros; tied, the head's gradient is added
    yield replace(gathered, bytes=gathered.bytes + tables)


def _weight_casts(z: Sizes) -> Iterator[Operation]:
    """Autocast casts fp32 weights to 16 bit and 16-bit gradients to fp32, once per pass; in the ideal step the
    optimizer writes both kinds of weights."""
    if z.compute == z.weight:
        return
    layers = linear_layers(z.shape, z.plan)
    weights = sum(layer.inputs * layer.outputs * layer.count for layer in layers)
    ideal = z.fusion == "ideal"
    # An 8-bit copy replaces the 16-bit one, unless other matmuls of the layer need that.
    narrow = z.rows * z.shape.d_model if z.plan.narrow_head else 0
    narrow += weights - z.rows * z.shape.d_model if z.plan.narrow_linears and not z.plan.narrows_what_pays else 0
    for direction in ("update",) if ideal else ("forward", "backward"):
        yield Operation(
            name="weight casts",
            group=MOVEMENT,
            direction=direction,
            bytes=(weights - (0 if direction == "backward" else narrow)) * (z.compute if ideal else z.compute + FP32),
            kernels=0 if ideal else sum(layer.count for layer in layers),
            part="rest",
        )


def _narrow_layers(z: Sizes) -> Iterator[Operation]:
    """A compiled kernel that writes a row also knows its maximum, so it writes the row in 8 bit too. What attention
    writes is read once more, and so are gradients that hand-written kernels write."""
    if not z.plan.narrow_linears:
        return
    layers = [layer for layer in linear_layers(z.shape, z.plan) if layer.where in LINEARS]
    by_hand = [where for where in LINEARS if z.plan.backward == "fused" and not (z.plan.narrows_mlps and where == "up")]
    alone = {"forward": ["proj"], "backward": by_hand}
    # The forward reads a weight's row once; the backward needs the maximum of a column first.
    for direction, product, reads in (("forward", "forward", 1), ("backward", "dgrad", 2)):
        narrow = [layer for layer in layers if z.plan.narrows(layer.where, product)]
        for layer in narrow:
            apart = z.fusion == "eager" or (z.fusion == "inductor" and layer.where in alone[direction])
            # Eager reads for the maximum and for the cast, with two fp32 copies between.
            read = {"eager": 2 * z.compute + 4 * FP32, "inductor": z.compute if apart else 0, "ideal": 0}[z.fusion]
            yield z.per_token(
                f"{layer.where} casts",
                MOVEMENT,
                direction,
                (read + FP8) * (layer.inputs if direction == "forward" else layer.outputs),
                calls=layer.count,
                kernels={"eager": 6, "inductor": int(apart), "ideal": 0}[z.fusion],
            )
        weights = sum(layer.inputs * layer.outputs * layer.count for layer in narrow)
        yield Operation(
            name="8-bit weights",
            group=MOVEMENT,
            direction=direction,
            bytes=weights * (reads * z.weight + FP8),
            kernels=reads * sum(layer.count for layer in narrow),
            part="rest",
        )


def _narrow_head(z: Sizes) -> Iterator[Operation]:
    """What the head's 8-bit matmuls need beforehand. A tensor is read for its maximum and again for the cast. For the
    weight's gradient, the features and the logits' gradient are transposed; for the features' gradient, the weight."""
    if not z.plan.narrow_head:
        return
    turn = 2 * FP8
    between = 4 * FP32 if z.fusion == "eager" else 0  # an fp32 copy and a scaled one, each written and read
    head = partial(Operation, group=MOVEMENT, direction="forward", part="rest")
    sizes = sum(
        count * (2 * each + between + FP8 + turn) for count, each in ((z.tokens, z.compute), (z.rows, z.weight))
    )
    yield head(name="head casts", bytes=z.shape.d_model * sizes, kernels=6)
    yield head(name="head gradient turned", bytes=turn * z.tokens * z.rows, kernels=1)


def _update(z: Sizes) -> Iterator[Operation]:
    """Clipping and the optimizer. Clipping reads all gradients for their norm and scales them; fp16 divides them by the
    loss scale before that."""
    update = partial(Operation, group=OPTIMIZER, direction="update", part="rest")
    row, whole = find_optimizer(z.plan.optimizer), whole_model(z.shape, z.plan)
    passes = (1 if z.fusion == "ideal" else 3) + (2 if z.plan.loss_scaling else 0)
    yield update(name="clip", bytes=passes * z.weight * whole.parameters, kernels=4)
    listed = [
        (count * whole.layers, row.update(sizes, of_layer=len(sizes) > 1)) for sizes, count in whole.layer_tensors()
    ]
    listed += [(count, row.update(sizes, of_layer=False)) for sizes, count in whole.outer_tensors()]
    yield update(
        name=row.name,
        bytes=sum(count * one.bytes for count, one in listed),
        kernels=row.kernels + sum(count * one.kernels for count, one in listed),
    )
    # Timed at the plan's rate, which is right only in 16 bit; an fp32 step is so long that they do not matter.
    flops = sum(count * one.matmul_flops for count, one in listed)
    yield update(
        name=f"{row.name} matmuls",
        bytes=sum(count * one.matmul_bytes for count, one in listed),
        flops=flops if z.plan.autocast else 0,
        kernels=0,  # counted above
        kind="gemm",
    )


def whole_model(shape: Shape, plan: Plan) -> Rank:
    """Return one GPU that holds the whole model, for its parameters tensor by tensor."""
    return Rank(
        shape=shape,
        plan=plan,
        micro_batch=1,
        layout=Layout(gpus=1),
        zero=0,
        optimizer=find_optimizer(plan.optimizer),
        first=True,
        last=True,
    )


def tensors(shape: Shape, plan: Plan) -> int:
    """Return the number of parameter tensors, which a looping optimizer updates one by one."""
    linear = [layer for layer in linear_layers(shape, plan) if layer.where != "head"]
    matrices = sum(layer.count * (1 + shape.has_bias(layer.where)) for layer in linear)
    norms = shape.layers * (shape.layer_norms + 2 * shape.qk_norms) + 1
    tables = 1 + (shape.positions == "learned") + (not plan.tied) + shape.head_bias
    return matrices + norms * (2 if shape.norm == "layernorm" else 1) + tables
