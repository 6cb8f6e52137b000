"""Every rung, slowest first. To add one: write the class, put it into LADDER where it belongs, run `make docs`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from redline.core.errors import UserError, unknown_name
from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.rungs.fp8 import Fp8Head, Fp8Linears, Fp8Mlps
from redline.rungs.matmuls import Flash4Backward, FusedMatmuls, PackedAttention, TunedMatmuls
from redline.rungs.optimizers import (
    FUSED_ADAMW,
    Adafactor,
    AdamW8bit,
    AdamWBf16,
    AdamWBf16Kahan,
    ForeachAdamW,
    Lion,
    Muon,
    SgdMomentum,
)
from redline.rungs.parallel import (
    DDP,
    GRAPHS_OF_RANKS,
    PIPELINE_GPIPE,
    PIPELINE_PARALLEL,
    RANK_RUNGS,
    TENSOR_PARALLEL,
    WAYS,
    Ddp,
    Fsdp,
    FsdpKeep,
    FsdpWhole,
    PipelineGpipe,
    PipelineParallel,
    TensorParallel,
)
from redline.rungs.rung import Maths, Rung, missing, why_not

LEAST_TO_AUTOTUNE = 68  # multiprocessors: torch/_inductor/utils.py, is_big_gpu


class Baseline(Rung):
    """The plain training step that every speed-up is measured against.

    True fp32 matmuls, attention written out in four lines, a for-loop AdamW, an untied head, the published vocabulary
    size, batches built in the training process, and the loss read back after every step. Nothing here is wrong: it is
    what one writes first, and it is the reference that every other rung must agree with. The one exception is a Hugging
    Face config whose head is tied to the embedding: it stays tied here, since untied it would be another model.
    """

    name = "baseline"
    title = "fp32, nothing fused, loop AdamW"
    maths = Maths.BIT_EXACT

    def apply(self, plan: Plan) -> Plan:
        return plan


class Tf32(Rung):
    """Run float32 matmuls on the tensor cores with TF32 inputs.

    TF32 keeps fp32's range and rounds matmul inputs to 10 mantissa bits; accumulation stays in fp32. It takes one line,
    `torch.set_float32_matmul_precision("high")`, and the matmul units of Ampere and later GPUs then run about eight
    times faster. The whole step gains less, because everything else still moves 4-byte numbers.
    """

    name = "tf32"
    title = "TF32 tensor-core matmuls"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "tf32")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, matmul_precision="high")


class NoSync(Rung):
    """Leave the loss on the device and read it once per cycle of 10 steps.

    `loss.item()` makes the host wait until the device has finished the step, so the next step is not queued in time and
    the device idles in between. The longer the step, the smaller this gap: expect little on a big eager step, and more
    once the step is short.
    """

    name = "no-sync"
    title = "loss read once per cycle"
    maths = Maths.BIT_EXACT

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return (
            None
            if hardware.kind == "cuda"
            else "a CPU runs each operation before the next: there is no queue to keep full"
        )

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, read_loss_every=10)


class Bf16(Rung):
    """bf16 autocast around the forward pass and the loss; parameters, gradients and optimizer state stay in fp32.

    Matmuls take 16-bit inputs and accumulate in fp32: twice TF32's rate and half the bytes. bf16 has fp32's range, so
    no loss scaling is needed. The backward pass follows the dtypes of the forward pass and must stay outside autocast.
    """

    name = "bf16"
    title = "bf16 autocast"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "bf16")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, autocast="bf16", loss_scaling=False)


class Fp16(Rung):
    """fp16 autocast with a gradient scaler, for devices without bf16.

    fp16 has three more mantissa bits than bf16 but a far smaller range, so small gradients would vanish. The loss is
    therefore scaled up before the backward pass and the gradients are scaled down after it. Updates whose gradients
    overflow are skipped. Measured beside bf16 on the same base, and kept only where bf16 does not apply.
    """

    name = "fp16"
    title = "fp16 autocast + GradScaler"
    maths = Maths.ROUNDING
    instead_of = "bf16"
    stand_in = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "fp16")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, autocast="fp16", loss_scaling=True)


class Compile(Rung):
    """`torch.compile` over the forward pass and the loss.

    Inductor fuses element-wise operations, normalisations and the loss into a few kernels, so the same data crosses the
    memory bus fewer times and the host launches fewer kernels. The first step pays for compilation, and that time is
    reported separately. Each row of a ladder has its own compile cache, because a shared cache has served graphs
    compiled for another attention backend. With --compile-ahead, rows that compile the same code share one.
    """

    name = "compile"
    title = "torch.compile"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "compile")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, compile=True)


def _attention_needs(workload: Workload, hardware: Hardware, plan: Plan, feature: str) -> str | None:
    lacks = missing(hardware, feature)
    if lacks is None and hardware.kind == "cuda" and plan.autocast is None:
        return "the kernel takes 16-bit inputs only: add bf16 or fp16"
    return lacks


class Flash(Rung):
    """Scaled-dot-product attention, pinned to the flash kernel.

    The T x T scores never reach memory: the kernel walks over them in tiles and keeps a running softmax. All other SDPA
    backends are switched off, because an unpinned call may pick another kernel and the row would then measure that one.
    The name of the kernel that ran is read from a profile.
    """

    name = "flash"
    title = "flash attention, pinned"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _attention_needs(workload, hardware, plan, "flash")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, attention="flash")


class CudnnAttention(Rung):
    """Scaled-dot-product attention, pinned to cuDNN's fused kernels.

    On Hopper and later, cuDNN's kernels use instructions that torch's flash kernel does not. Measured on the same base
    as `flash`; the faster of the two stays in the recipe.
    """

    name = "cudnn-attention"
    title = "cuDNN attention, pinned"
    maths = Maths.ROUNDING
    instead_of = "flash"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _attention_needs(workload, hardware, plan, "cudnn-attention")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, attention="cudnn")


class PaddedVocab(Rung):
    """Pad the vocabulary to the next multiple of 128: 50257 becomes 50304.

    The head is the largest matmul of a small GPT, and rows of 50257 elements start at unaligned addresses. The padded
    rows are never indexed, and the loss and the sampler see only the real vocabulary, so the maths is unchanged.
    Exported weights have the published number of rows again.
    """

    name = "padded-vocab"
    title = "vocabulary padded to 128"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        vocab = workload.decoder.vocab
        return f"the vocabulary, {vocab}, is a multiple of 128 already" if vocab % 128 == 0 else None

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, vocab_multiple=128)


class TiedWeights(Rung):
    """The head shares the token embedding's weight, as in the published GPT-2.

    This saves vocabulary x width parameters with their gradients and optimizer state; the matmuls remain. It is another
    model, so the check requires that it starts at ln V, the loss of a uniform guess, and learns as the untied model
    does: tying an embedding drawn from N(0, 1) starts at a loss of 37 and is caught here. For a Hugging Face config
    there is no choice: the config says whether the head is tied, and all of its recipes follow the config.
    """

    name = "tied-weights"
    title = "head tied to the embedding"
    maths = Maths.CHANGES

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, tied=True)


class FusedAdamW(Rung):
    """AdamW as one fused kernel over all parameters.

    The for-loop AdamW launches a dozen small kernels per tensor, about two thousand per step for GPT-2. The fused
    kernel reads and writes every element once.
    """

    name = FUSED_ADAMW
    title = "fused AdamW"
    maths = Maths.ROUNDING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-fused", weights="fp32")


class LoaderWorkers(Rung):
    """Build batches in worker processes, in pinned memory, and copy them to the device one step ahead.

    The host then only hands over batches that are ready. The order of the batches depends on the seed and the step
    alone, not on the number of workers.
    """

    name = "loader-workers"
    title = "loader workers, pinned, prefetched"
    maths = Maths.BIT_EXACT

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return (
            None
            if hardware.cpu_cores > 1
            else "one core only: a worker process would take it from the training process"
        )

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, loader_workers=2)


class FusedLoss(Rung):
    """Turn the logits into their own gradient in one kernel.

    The logits are the largest tensor of a small GPT. A loss written as log-softmax and look-up reads them, copies them
    to fp32, keeps them for the backward pass and reads them again. Here a Triton kernel reads a row, computes its loss
    and writes the gradient over it. The head's two other matmuls follow at once, so that nothing of this size outlives
    the forward pass.
    """

    name = "fused-loss"
    title = "loss and gradient in one kernel"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "triton")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, loss="fused")


class Bf16Residual(Rung):
    """Keep the residual stream between the blocks in bf16.

    Autocast computes matmuls in 16 bits but leaves the residual sum, which runs through all blocks, in fp32: every norm
    reads and writes it at 4 bytes per element, forward and backward, and its gradient is cast for every branch. In
    bf16, half of that traffic and all of those casts disappear; the norms still compute in fp32, inside the compiled
    kernel. The sum is rounded after every branch, twice per layer, and the gradient check measures what that costs.
    """

    name = "bf16-residual"
    title = "stream between blocks in bf16"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast != "bf16":
            return "the stream takes the matmuls' type, and that is not bf16 here"
        return None if plan.compile else "without compile every norm makes its own fp32 copy of the stream"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, residual="bf16")


class SigmoidGelu(Rung):
    """Compute GELU's tanh through the sigmoid.

    (1 + tanh u) / 2 equals sigmoid(2u), so the function is the same. In a compiled kernel it costs one exponential and
    one division, where Triton's tanh is a library call of several dozen instructions. In eager mode it would be eight
    kernels instead of one.
    """

    name = "sigmoid-gelu"
    title = "GELU's tanh through the sigmoid"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if not plan.compile:
            return "without compile it is eight kernels instead of one"
        return "it is Triton's tanh that is slow, and there is no Triton here" if missing(hardware, "triton") else None

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, gelu="sigmoid")


class FusedBackward(Rung):
    """Kernels for the backward pass between the matmuls that sum the bias gradients on the way.

    The compiler writes the gradient of an activation in one kernel and reads it again in another, to sum the gradient
    of the bias that precedes it. Here the kernel that writes a gradient also sums its columns: in GELU's backward pass,
    when the gradients of q, k and v are stacked, and in the norm's backward pass, which adds the residual gradient and
    sums the gradients of gain and bias in the same pass. Each tensor is read once. The blocks are written for these
    kernels, so the rung is for the built-in models only.
    """

    name = "fused-backward"
    title = "bias gradients summed where written"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast != "bf16":
            return "the kernels were made for matmuls in bf16: add bf16"
        if not plan.runs_whole:
            return "its blocks must be whole and pass on more than the residual stream: a model that is cut undoes it"
        return missing(hardware, "triton") if plan.compile else "the forward pass is left to the compiler: add compile"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, backward="fused")


class ChunkedLoss(Rung):
    """Compute head and loss over an eighth of the tokens at a time, with the gradient computed on the spot.

    Like `fused-loss`, but only an eighth of the logits exists at any moment: 200 MB instead of 1.6 GB for 16 sequences
    of GPT-2. The price is smaller matmuls and a sum over eight gradients of the head's weight. It pays off when the
    freed memory allows a faster micro batch.
    """

    name = "chunked-loss"
    title = "head and loss in 8 chunks"
    maths = Maths.ROUNDING
    instead_of = "fused-loss"
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, loss="chunked")


class SelectiveCheckpointing(Rung):
    """Recompute the attention core in the backward pass instead of keeping its activations.

    The scores and weights of naive attention are the bulk of its activations (heads x T x T per sequence) and cheap to
    recompute. A fused attention kernel never stores them, so with one there is nothing to save.
    """

    name = "selective-checkpointing"
    title = "attention core recomputed"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return None if plan.attention == "naive" else "the fused attention kernel keeps no scores: nothing to save"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, checkpointing="selective")


class Checkpointing(Rung):
    """Keep only the input of each block and recompute the rest in the backward pass.

    One more forward pass through all layers (a third of their work) saves most of the activation memory. At a fixed
    micro batch it only costs time; it pays off where the model or the batch would not fit otherwise.
    """

    name = "checkpointing"
    title = "every block recomputed"
    maths = Maths.ROUNDING
    instead_of = "selective-checkpointing"
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, checkpointing="full")


class BudgetCheckpointing(Rung):
    """Let the compiler keep half of the activation bytes it would keep otherwise, and choose what to recompute.

    Marking whole blocks for recomputation means paying for their matmuls again. The compiler sees the whole graph and
    what each tensor costs to recompute, so it can save half of the bytes for less than half of that work
    (torch._functorch.config.activation_memory_budget). It needs no blocks and no support from the model. How much is
    recomputed is up to the compiler, so such a step has no HFU.
    """

    name = "budget-checkpointing"
    title = "compiler keeps half the activations"
    maths = Maths.ROUNDING
    instead_of = "selective-checkpointing"
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return None if plan.compile else "the compiler chooses what is computed again: add compile"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, activation_budget=0.5, checkpointing="none")


class MaxAutotune(Rung):
    """Let Inductor time several kernels for each matmul and keep the fastest.

    torch's `max-autotune-no-cudagraphs`: cuBLAS and Triton templates compete for every matmul shape, and the block
    sizes of the other kernels are searched too. Compilation takes minutes. The gain depends on the shapes, and there is
    none in a step whose matmuls cuBLAS already does well. It pays off in long runs only, from the break-even that
    `redline tune` reports.
    """

    name = "max-autotune"
    title = "Inductor times kernels, keeps the best"
    maths = Maths.ROUNDING
    when_named = True
    compile_factor = 10.0  # one H200: 26 s became "over 4 minutes" (docs/sources.md 6)

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        small = hardware.multiprocessors is not None and hardware.multiprocessors < LEAST_TO_AUTOTUNE
        if hardware.kind == "cuda" and small:
            return f"Inductor searches matmuls from {LEAST_TO_AUTOTUNE} multiprocessors up"
        return _compiled_on_cuda(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, max_autotune=True)


class CudaGraphs(Rung):
    """Record the kernels of a compiled step once and replay them with one launch.

    The host then needs microseconds where it had to queue hundreds of kernels. A small step whose device waits for the
    host gains; one that keeps the device busy gains nothing and pays with a private memory pool. Each replay overwrites
    what the previous one wrote, so losses are copied out, and so are gradients that are accumulated.
    """

    name = "cuda-graphs"
    title = "kernels recorded once, then replayed"
    maths = Maths.ROUNDING
    when_measured = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if hardware.ranks > 1:
            return GRAPHS_OF_RANKS
        return _compiled_on_cuda(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, cuda_graphs=True)


def _compiled_on_cuda(hardware: Hardware, plan: Plan) -> str | None:
    if hardware.kind != "cuda":
        return "Inductor does this on GPUs"
    return missing(hardware, "triton") if plan.compile else "it needs compiled code: add compile"


class ExpandableSegments(Rung):
    """Let torch's allocator grow its segments instead of adding new ones.

    Tensors of many sizes leave holes that no later tensor fits: memory is reserved but unused, and near the limit of a
    card the allocator starts to free its cache and allocate again, which stops the device each time. Growing segments
    leave few holes. Speed changes only where memory is tight; a larger micro batch may fit.
    """

    name = "expandable-segments"
    title = "allocator's segments grow"
    maths = Maths.BIT_EXACT
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return None if hardware.kind == "cuda" else "it is a setting of torch's allocator for GPUs"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, expandable_segments=True)


LADDER: tuple[Rung, ...] = (
    Baseline(),
    Tf32(),
    NoSync(),
    Bf16(),
    Fp16(),
    Compile(),
    Flash(),
    CudnnAttention(),
    PaddedVocab(),
    TiedWeights(),
    FusedAdamW(),
    ForeachAdamW(),
    AdamW8bit(),
    AdamWBf16(),
    AdamWBf16Kahan(),
    Adafactor(),
    Lion(),
    SgdMomentum(),
    Muon(),
    LoaderWorkers(),
    FusedLoss(),
    Bf16Residual(),
    SigmoidGelu(),
    FusedBackward(),
    PackedAttention(),
    Flash4Backward(),
    TunedMatmuls(),
    FusedMatmuls(),
    CudaGraphs(),
    ChunkedLoss(),
    SelectiveCheckpointing(),
    Checkpointing(),
    BudgetCheckpointing(),
    MaxAutotune(),
    ExpandableSegments(),
    Fp8Head(),
    Fp8Linears(),
    Fp8Mlps(),
    Ddp(),
    Fsdp(),
    FsdpKeep(),
    FsdpWhole(),
    TensorParallel(),
    PipelineParallel(),
    PipelineGpipe(),
)


def find_rung(name: str) -> Rung:
    for rung in LADDER:
        if rung.name == name:
            return rung
    raise unknown_name("rung", name, (rung.name for rung in LADDER))


def plan_of(names: Iterable[str]) -> Plan:
    """Return the plan of a recipe's rungs, applied in the order of LADDER so that their own order cannot matter."""
    wanted = {find_rung(name).name for name in names}
    plan = Plan()
    for rung in LADDER:
        if rung.name in wanted:
            plan = rung.apply(plan)
    return plan


def group_of(rung: Rung) -> str:
    """Return the name of a rung's group, which is its first rung. The rungs of a group replace one another, and a
    recipe holds at most one of them."""
    return rung.name if rung.instead_of is None else group_of(find_rung(rung.instead_of))


def published_rungs(workload: Workload) -> tuple[str, ...]:
    """Return the rungs that make a model the published one: `tied-weights` if its head is its embedding, else none."""
    return (TiedWeights.name,) if workload.shape.tied else ()


def own_rungs(workload: Workload) -> tuple[str, ...]:
    """Return the rungs in every recipe of a Hugging Face model, which would be another model without them. A built-in
    model has none: its ladder unties the head on purpose, to show what tying does."""
    return published_rungs(workload) if workload.source.kind == "huggingface" else ()


def with_own(names: Iterable[str], workload: Workload) -> tuple[str, ...]:
    """Put the model's own rungs before these, unless they are among them already."""
    names = tuple(names)
    return (*(name for name in own_rungs(workload) if name not in names), *names)


def check_alternatives(names: Iterable[str], source: str | None = None) -> None:
    """Refuse a rung that is named twice, and rungs that replace one another. `source`: the recipe file they come from,
    if any."""
    names, taken = tuple(names), dict[str, str]()
    where = "" if source is None else f" in {source}"
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} was given twice{where}", "a rung is either on or off", f"name {name} once{where}")
        other = taken.setdefault(group_of(find_rung(name)), name)
        if other != name:
            raise UserError(
                f"{other} and {name} were given together{where}",
                "each takes the place of the other, and a step has one of the two",
                f"drop one of them{where}",
            )


def with_optimizer(names: Iterable[str], optimizer: str) -> tuple[str, ...]:
    """Return the rungs with this optimizer, a name in optim/table.py, in place of their own."""
    own = {Plan().optimizer: None} | {
        rung.apply(Plan()).optimizer: rung.name for rung in LADDER if group_of(rung) == FUSED_ADAMW
    }
    if optimizer not in own:
        raise unknown_name("optimizer", optimizer, own)
    others = (name for name in names if group_of(find_rung(name)) != FUSED_ADAMW)
    return in_order(filter(None, (own[optimizer], *others)))


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the rungs in the order in which the ladder climbs them."""
    wanted = set(names)
    return tuple(rung.name for rung in LADDER if rung.name in wanted)


def with_parallel(names: Iterable[str], way: str | None) -> tuple[str, ...]:
    """Return the rungs with ranks sharing the step in this way. None keeps the way they name, or takes `ddp`."""
    if way is not None and way not in WAYS:
        raise unknown_name("way to share a step", way, WAYS)
    names = tuple(names)
    way = way or next((name for name in names if name in WAYS), DDP)
    return (*(name for name in names if name not in WAYS), way)


def cuts_of(names: Iterable[str], layout: Layout) -> list[str]:
    """Return the rungs of a layout's degrees above one. A recipe may choose the schedule of the pipeline."""
    cuts = [TENSOR_PARALLEL] if layout.tensor > 1 else []
    if layout.pipeline > 1:
        cuts.append(PIPELINE_GPIPE if PIPELINE_GPIPE in names else PIPELINE_PARALLEL)
    return cuts


def for_layout(names: Iterable[str], layout: Layout) -> tuple[str, ...]:
    """Return the rungs that take effect in this layout. A degree of one has no rung: what its rung would undo stays,
    and no wrapper gathers from or averages with itself. Ranks with data of their own share the step as the rungs say,
    or else by `ddp`."""
    names = tuple(names)
    cuts = cuts_of(names, layout)
    others = [*(name for name in names if name not in RANK_RUNGS or name in WAYS), *cuts]
    if layout.data > 1:
        return with_parallel(others, None)
    return tuple(name for name in others if name not in WAYS)


def without_rung(
    names: Iterable[str], dropped: str, workload: Workload, hardware: Hardware
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rungs without this one and those that apply only beside it, then the rungs that were removed."""
    before = tuple(names)
    stood = {name for name in before if why_not_among(name, before, workload, hardware) is None}
    kept = tuple(name for name in before if name != dropped)
    while lost := {name for name in stood & {*kept} if why_not_among(name, kept, workload, hardware) is not None}:
        kept = tuple(name for name in kept if name not in lost)
    return kept, tuple(name for name in before if name not in kept)


def why_not_among(name: str, names: Iterable[str], workload: Workload, hardware: Hardware) -> str | None:
    """Return why a rung of a recipe does not apply beside the recipe's other rungs, or None if it does."""
    others = plan_of(other for other in names if other != name)
    return why_not(find_rung(name), workload, hardware, others)


def usual_rungs(workload: Workload, hardware: Hardware) -> tuple[str, ...]:
    """Return the plain ladder as far as it applies: the recipe to use when nothing was measured. Of two rungs that
    exclude each other the first is taken, since only measuring shows which is faster. Weights are tied if they were
    published that way."""
    chosen: list[str] = []
    for rung in LADDER[1:]:
        another_model = rung.maths is Maths.CHANGES and rung.name not in published_rungs(workload)
        if not rung.is_usual or another_model or rung.instead_of in chosen:
            continue
        if why_not(rung, workload, hardware, plan_of(chosen)) is None:
            chosen.append(rung.name)
    return tuple(chosen)


def reference_plan(names: Iterable[str]) -> Plan:
    """Return the plain fp32 plan with the recipe's maths: only rungs that declare a change of the maths are applied."""
    return plan_of(name for name in names if find_rung(name).maths is Maths.CHANGES)


PRECISION = ("matmul_precision", "autocast", "loss_scaling")
"""Plan fields that set the precision in which plain code computes."""


def plain_at_precision(reference: Plan, plan: Plan) -> Plan:
    """Return the plan of the yardstick, which shows what TF32 or 16 bits cost by themselves. 8-bit plans are compared
    with 16 bits, because an 8-bit yardstick would have the same faults."""
    precision = {name: getattr(plan, name) for name in PRECISION}
    return replace(reference, **precision, fp8_head=False, fp8_mlps=False, fp8_linears=False)


def yardstick_rungs(names: Iterable[str]) -> tuple[str, ...]:
    """Return the rungs of a recipe that also define its yardstick; recipes that agree in them share one."""
    return tuple(name for name in names if find_rung(name).maths is Maths.CHANGES or _sets_precision(find_rung(name)))


def _sets_precision(rung: Rung) -> bool:
    return any(getattr(rung.apply(Plan()), name) != getattr(Plan(), name) for name in PRECISION)
