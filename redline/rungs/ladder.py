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
    """The plain way, which every speed-up is counted from.

    True fp32 matmuls, attention written as four lines, a for-loop AdamW, an untied head, the published vocabulary,
    batches made in the training process and the loss read back after every step. Nothing here is wrong: it is what
    one writes first, and it is also the reference that every other rung must agree with. A Hugging Face config whose
    head is its embedding is tied here already: untied it would be another model.
    """

    name = "baseline"
    title = "fp32, nothing fused, loop AdamW"
    maths = Maths.BIT_EXACT

    def apply(self, plan: Plan) -> Plan:
        return plan


class Tf32(Rung):
    """Let float32 matmuls use the tensor cores with TF32 inputs.

    TF32 keeps fp32's range and rounds the inputs of a matmul to 10 bits of mantissa; sums stay fp32. One line,
    `torch.set_float32_matmul_precision("high")`, and the matmul units of Ampere and later run about eight times
    faster. The whole step gains less, because everything else still moves 4-byte numbers.
    """

    name = "tf32"
    title = "TF32 tensor-core matmuls"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "tf32")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, matmul_precision="high")


class NoSync(Rung):
    """Leave the loss on the device and read it once per cycle.

    `loss.item()` makes the host wait until the device has finished the step, so the next one is not queued in time
    and the device idles between them. The larger the step, the smaller the gap: expect little on a big eager step,
    more once the step is short.
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
    """bf16 autocast around forward and loss; parameters, gradients and optimizer stay fp32.

    Matmuls take 16-bit inputs and accumulate in fp32: twice TF32's rate and half the bytes. bf16 has fp32's range, so
    no loss scaling is needed. The backward pass follows the dtypes of the forward and must stay outside autocast.
    """

    name = "bf16"
    title = "bf16 autocast"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "bf16")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, autocast="bf16", loss_scaling=False)


class Fp16(Rung):
    """fp16 autocast with a gradient scaler: the alternative where bf16 does not exist.

    fp16 has three more bits of mantissa than bf16 and a far smaller range: small gradients vanish, so the loss is
    multiplied before the backward pass and the gradients divided after it. Steps whose gradients overflow are
    skipped. Measured beside bf16 on the same base, and kept only where bf16 does not apply.
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
    """torch.compile over forward and loss.

    Inductor fuses the element-wise work, normalisations and the loss into few kernels, so the same numbers cross the
    memory bus fewer times, and the host launches less. The first step pays for compiling; that time is reported apart.
    Each measurement has its own compile cache: a shared one has served graphs of another backend. With --compile-ahead
    rows in which nothing that is compiled differs share one.
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
    """Scaled-dot-product attention with the flash kernel pinned.

    The T x T scores never reach memory: the kernel walks over them in tiles and keeps a running softmax. All other
    backends are switched off, because an unpinned call may pick another kernel and the row would measure that one.
    The name of the kernel that ran is read off a profile.
    """

    name = "flash"
    title = "flash attention, pinned"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _attention_needs(workload, hardware, plan, "flash")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, attention="flash")


class CudnnAttention(Rung):
    """The same attention through cuDNN's fused kernels, pinned.

    On Hopper and later cuDNN's kernels use instructions the flash kernel in torch does not. Measured on the same base
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

    The head is the largest matmul of a small GPT, and rows of 50257 numbers start at unaligned addresses. The padded
    rows are never indexed, the loss and the sampler see only the real vocabulary (so the maths is unchanged), and
    exported weights have the published number of rows again.
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
    """The head shares the token embedding, as GPT-2 was published.

    Saves vocabulary x width parameters, their gradients and their optimizer state; the matmuls stay. The model is
    another one, so the check asks that it starts at ln V and learns as the untied one does: tying an embedding that
    was drawn from N(0, 1) starts at a loss of 37 and is caught here. Of a Hugging Face config it is no choice: the
    config says whether the head is the embedding, and every recipe of it does as it says.
    """

    name = "tied-weights"
    title = "head tied to the embedding"
    maths = Maths.CHANGES

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, tied=True)


class FusedAdamW(Rung):
    """AdamW as one fused kernel over all parameters.

    The loop launches a dozen small kernels per tensor, about two thousand per step for GPT-2; the fused kernel reads
    and writes every number once.
    """

    name = FUSED_ADAMW
    title = "fused AdamW"
    maths = Maths.ROUNDING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-fused", weights="fp32")


class LoaderWorkers(Rung):
    """Batches made by worker processes, in pinned memory, copied to the device one step ahead.

    The host then only hands over batches that are already there. The order of the batches is a function of the seed
    and the step, whatever the number of workers.
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
    """One kernel that turns the logits into their own gradient.

    The logits are the largest tensor of a small GPT. Written as log-softmax and look-up they are read, copied to fp32,
    kept for the backward pass and read again; here a Triton kernel reads a row, finds its loss, and writes the gradient
    over it. The head's two other matmuls follow at once, so nothing of this size outlives the forward pass.
    """

    name = "fused-loss"
    title = "loss and gradient in one kernel"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return missing(hardware, "triton")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, loss="fused")


class Bf16Residual(Rung):
    """The stream between the blocks in bf16.

    Autocast computes matmuls in 16 bit and leaves the sum that runs through all blocks in fp32: each of the norms reads
    and writes it at 4 bytes a number, forward and backward, and its gradient is cast for every branch. In bf16 half of
    that traffic and all of those casts are gone; norms still compute in fp32, inside the compiled kernel. The sum of
    twice as many branches as layers is rounded at each of them, which the gradient check weighs.
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
    """The tanh of GELU through the sigmoid.

    (1 + tanh u) / 2 is sigmoid(2u), so it is the same function: one exponential and a division in a compiled kernel,
    where Triton's tanh is a library call of several dozen instructions. In eager mode it would be eight kernels instead
    of one.
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
    """Kernels for the backward pass between the matmuls, which add up the gradients of biases on the way.

    The compiler writes the gradient of an activation in one kernel and reads it again in another for the bias before
    it. Here whoever writes a gradient adds up its columns: GELU's backward, the stacking of q, k and v's gradients, and
    the norm's backward, which has the residual sum, its gain and its bias in the same pass. Each tensor is read once.
    The blocks are written for that, so it is for the built-in models.
    """

    name = "fused-backward"
    title = "bias gradients summed where written"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast != "bf16":
            return "the kernels were made for matmuls in bf16: add bf16"
        if not plan.runs_whole:
            return "its blocks are whole, and hand one another more than the stream: a model that is cut undoes it"
        return missing(hardware, "triton") if plan.compile else "the forward pass is left to the compiler: add compile"

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, backward="fused")


class ChunkedLoss(Rung):
    """Head and loss over an eighth of the tokens at a time, with the gradient computed on the spot.

    As `fused-loss`, but an eighth of the logits exists at any moment: 200 MB instead of 1.6 GB for 16 sequences of
    GPT-2. The price is smaller matmuls and a sum over eight gradients of the head. Pays when the memory it frees buys
    a faster micro batch.
    """

    name = "chunked-loss"
    title = "head and loss in 8 pieces"
    maths = Maths.ROUNDING
    instead_of = "fused-loss"
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, loss="chunked")


class SelectiveCheckpointing(Rung):
    """Compute the attention core again in the backward pass instead of keeping it.

    Scores and weights of naive attention are the bulk of its activations (heads x T x T per sequence) and cheap to
    compute again. A fused kernel never stores them, so there is nothing left to save.
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
    """Keep the input of each block only and compute the rest again in the backward pass.

    One more forward of all layers (a third of their work) buys most of the activations' memory. At a fixed micro batch
    it only costs time; it pays where the model or the batch would not fit otherwise.
    """

    name = "checkpointing"
    title = "every block recomputed"
    maths = Maths.ROUNDING
    instead_of = "selective-checkpointing"
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, checkpointing="full")


class BudgetCheckpointing(Rung):
    """Let the compiler keep half of what it would keep, and choose what to compute again.

    Whoever marks blocks for recomputation pays for their matmuls too. The compiler sees the whole graph and what each
    tensor costs to compute again, so that half of the bytes goes for less than half of the work
    (torch._functorch.config.activation_memory_budget). It needs no blocks and no help from a model. How much is
    computed again is the compiler's own affair: there is no HFU of such a step.
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
    sizes of the other kernels are searched too. Minutes of compiling; what they bring is a matter of shapes, and on a
    step whose matmuls cuBLAS does well it is nothing. It pays in long runs only: see the break-even of `redline tune`.
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

    The host then needs microseconds where it needed to queue hundreds of kernels. A small step whose device waits for
    the host gains; one that keeps the device busy gains nothing and pays with a private memory pool. What a replay
    writes, the next replay overwrites, so losses are copied out, and so are gradients that are added up.
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
    return missing(hardware, "triton") if plan.compile else "it is a way of compiling: add compile"


class ExpandableSegments(Rung):
    """Let torch's allocator grow its segments instead of adding new ones.

    Tensors of many sizes leave holes that no later tensor fits: memory is reserved and not in use, and near the limit
    of a card the allocator starts to give back and ask again, which stops the device each time. Segments that grow
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
    """The plan of a recipe's rungs, folded in the order of LADDER so that a recipe's own order cannot matter."""
    wanted = {find_rung(name).name for name in names}
    plan = Plan()
    for rung in LADDER:
        if rung.name in wanted:
            plan = rung.apply(plan)
    return plan


def group_of(rung: Rung) -> str:
    """Rungs that take each other's place form a group, named after the first of them; a recipe holds one of each."""
    return rung.name if rung.instead_of is None else group_of(find_rung(rung.instead_of))


def published_rungs(workload: Workload) -> tuple[str, ...]:
    """What makes a model the one that was published: its head is its embedding, or it is not."""
    return (TiedWeights.name,) if workload.shape.tied else ()


def own_rungs(workload: Workload) -> tuple[str, ...]:
    """What every recipe of a model that others have published has: without it it would be another model. The ladder of
    a built-in one unties it on purpose, to show what tying does."""
    return published_rungs(workload) if workload.source.kind == "huggingface" else ()


def with_own(names: Iterable[str], workload: Workload) -> tuple[str, ...]:
    """The rungs with the model's own before them, where they are not among them."""
    names = tuple(names)
    return (*(name for name in own_rungs(workload) if name not in names), *names)


def check_alternatives(names: Iterable[str], source: str | None = None) -> None:
    """Each rung once, and one of those that replace each other. `source`: the recipe file they come from, if any."""
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
    """The rungs with this optimizer, a name in optim/table.py, instead of the one they have."""
    own = {Plan().optimizer: None} | {
        rung.apply(Plan()).optimizer: rung.name for rung in LADDER if group_of(rung) == FUSED_ADAMW
    }
    if optimizer not in own:
        raise unknown_name("optimizer", optimizer, own)
    others = (name for name in names if group_of(find_rung(name)) != FUSED_ADAMW)
    return in_order(filter(None, (own[optimizer], *others)))


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorted as the ladder climbs them."""
    wanted = set(names)
    return tuple(rung.name for rung in LADDER if rung.name in wanted)


def with_parallel(names: Iterable[str], way: str | None) -> tuple[str, ...]:
    """The rungs with this way for ranks to share a step instead of the one they have; None: theirs, or `ddp`."""
    if way is not None and way not in WAYS:
        raise unknown_name("way to share a step", way, WAYS)
    names = tuple(names)
    way = way or next((name for name in names if name in WAYS), DDP)
    return (*(name for name in names if name not in WAYS), way)


def cuts_of(names: Iterable[str], layout: Layout) -> list[str]:
    """The rungs of a layout's degrees above one; a recipe may say in which order stages take their pieces."""
    cuts = [TENSOR_PARALLEL] if layout.tensor > 1 else []
    if layout.pipeline > 1:
        cuts.append(PIPELINE_GPIPE if PIPELINE_GPIPE in names else PIPELINE_PARALLEL)
    return cuts


def for_layout(names: Iterable[str], layout: Layout) -> tuple[str, ...]:
    """The rungs that count among these ranks. A degree of one has none: what its rung would undo stays, and no wrapper
    gathers or averages with itself. Ranks with data of their own share the step as the rungs say, or by `ddp`."""
    names = tuple(names)
    cuts = cuts_of(names, layout)
    others = [*(name for name in names if name not in RANK_RUNGS or name in WAYS), *cuts]
    if layout.data > 1:
        return with_parallel(others, None)
    return tuple(name for name in others if name not in WAYS)


def without_rung(
    names: Iterable[str], dropped: str, workload: Workload, hardware: Hardware
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The rungs without this one and without those that apply only beside it; and what was taken out."""
    before = tuple(names)
    stood = {name for name in before if why_not_among(name, before, workload, hardware) is None}
    kept = tuple(name for name in before if name != dropped)
    while lost := {name for name in stood & {*kept} if why_not_among(name, kept, workload, hardware) is not None}:
        kept = tuple(name for name in kept if name not in lost)
    return kept, tuple(name for name in before if name not in kept)


def why_not_among(name: str, names: Iterable[str], workload: Workload, hardware: Hardware) -> str | None:
    """The reason a rung of a recipe does not apply beside the recipe's others; None where it does."""
    others = plan_of(other for other in names if other != name)
    return why_not(find_rung(name), workload, hardware, others)


def usual_rungs(workload: Workload, hardware: Hardware) -> tuple[str, ...]:
    """The plain ladder as far as it applies: what to take where nothing was measured. Of two that exclude each other
    the first stands; which one is faster only measuring tells. Weights are tied where they were published so."""
    chosen: list[str] = []
    for rung in LADDER[1:]:
        another_model = rung.maths is Maths.CHANGES and rung.name not in published_rungs(workload)
        if not rung.is_usual or another_model or rung.instead_of in chosen:
            continue
        if why_not(rung, workload, hardware, plan_of(chosen)) is None:
            chosen.append(rung.name)
    return tuple(chosen)


def reference_plan(names: Iterable[str]) -> Plan:
    """The plain fp32 plan with the same maths as the recipe: only rungs that declare a change are applied."""
    return plan_of(name for name in names if find_rung(name).maths is Maths.CHANGES)


PRECISION = ("matmul_precision", "autocast", "loss_scaling")
"""Fields of a plan that say what plain code computes in."""


def plain_at_precision(reference: Plan, plan: Plan) -> Plan:
    """What TF32 or 16 bits cost by themselves: the yardstick. 8 bits are held against 16: a yardstick of 8 would have
    the same faults."""
    precision = {name: getattr(plan, name) for name in PRECISION}
    return replace(reference, **precision, fp8_head=False, fp8_mlps=False, fp8_linears=False)


def yardstick_rungs(names: Iterable[str]) -> tuple[str, ...]:
    """Those of a recipe that its yardstick has too, so that recipes share one."""
    return tuple(name for name in names if find_rung(name).maths is Maths.CHANGES or _sets_precision(find_rung(name)))


def _sets_precision(rung: Rung) -> bool:
    return any(getattr(rung.apply(Plan()), name) != getattr(Plan(), name) for name in PRECISION)
