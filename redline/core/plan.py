"""How a step is run, field by field. The defaults are the plain, slow baseline; each rung changes a field or two.

The plan holds no torch object, so prediction, reports and tests read it anywhere. `rungs.plan_of` folds a recipe into
a plan; `engine/build.py` is the one place that turns a plan into running code.
"""

from __future__ import annotations

from dataclasses import dataclass

# Chunks of the tokens for each loss that computes its gradient right away. An eighth of the logits is small beside the
# layers' activations, and still a large matmul.
PIECES = {"fused": 1, "chunked": 8}
# Three implementations of one rule, so a run may switch between them. The update of an element needs only its own
# gradient and state, so ranks may hold rows of a matrix.
ADAMWS = ("adamw-loop", "adamw-foreach", "adamw-fused")
# Rungs that third-party models cannot use, grouped by the reason: they need layers that accumulate in fp32 what is
# stored in bf16; their kernels are part of fused-backward's blocks.
BF16_WEIGHTS = ("adamw-bf16", "adamw-bf16-kahan")
ON_FUSED_BACKWARD = ("packed-attention", "flash4-backward", "fused-matmuls", "fp8-mlps")


# Head widths for which flash-attn-4's backward pass was checked against fp64 on an H200. It compiles for others, but
# with 16 (version 4.0.0b36) the gradients of whole rows stayed zero.
FLASH4_HEADS = (32, 64, 128)
# The blocks' matmuls that gain more from 8 bits than their casts cost (H200, docs/speed-log.md), by their names in
# predict/gemms.py. Two read a norm's output, which the compiler casts while writing it, and the third writes four times
# as much as it reads.
PAYING = (("qkv", "forward"), ("up", "forward"), ("down", "dgrad"))
# Those that read the output of two of these, for when their kernels can write it in 8 bits as well.
MLPS = (("down", "forward"), ("up", "dgrad"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    # process switches
    matmul_precision: str = "highest"
    """float32 matmuls: 'highest' is true fp32, 'high' is TF32."""
    expandable_segments: bool = False
    """torch's allocator grows its segments instead of adding new ones, so that less memory is lost to fragmentation."""
    # the model
    attention: str = "naive"
    """'naive' (four lines), or 'flash' / 'cudnn': SDPA with that backend pinned and all others off."""
    tied: bool = False
    """The head shares the token embedding, as published; the baseline unties them to show what tying does."""
    vocab_multiple: int = 1
    """Rows of embedding and head are padded to a multiple of this; the padding never reaches the loss."""
    residual: str = "fp32"
    """The residual stream between the blocks: 'fp32', as autocast leaves it, or 'bf16'."""
    gelu: str = "tanh"
    """How GELU's tanh is computed: 'tanh' by its own function, 'sigmoid' through sigmoid, which compiles to cheaper
    code."""
    backward: str = "autograd"
    """The backward pass between the matmuls: 'autograd', left to it and the compiler, or 'fused', kernels that sum the
    gradients of biases while they write those of activations."""
    loss: str = "full"
    """'full': logits are kept for the backward pass; 'fused': one kernel turns them into their gradient right away;
    'chunked': the same over an eighth of the tokens at a time."""
    packed_attention: str = "none"
    """With cuDNN's attention and the fused backward: q, k and v stay side by side, and so do their gradients, which
    'cudnn' or 'flash4' (the package flash-attn-4) writes in place; 'none': gradients are copied there afterwards."""
    tuned_matmuls: bool = False
    """Matmuls of the blocks, and of the head unless it is in 8 bits or the loss is 'full', use the fastest of the
    algorithms that cuBLASLt proposes, as measured on this machine."""
    fused_matmuls: bool = False
    """With tuned matmuls and the fused backward: GELU, its gradient and its bias's gradient sums are epilogues of two
    GEMMs."""
    fp8_head: bool = False
    """The head's three matmuls take 8-bit inputs. Applies only under autocast: without it, as in the fp32 reference,
    nothing is narrow."""
    fp8_linears: bool = False
    """The blocks' matmuls take 8-bit inputs too, except those for weight gradients; with tuned matmuls and the fused
    backward, only those that gain from it (PAYING). Applies only under autocast."""
    fp8_mlps: bool = False
    """With `fp8_linears` and fused matmuls, so do the MLPs' other matmuls, except those for weight gradients (MLPS)."""
    checkpointing: str = "none"
    """What the backward recomputes instead of keeping: 'none', 'selective' (the attention core) or 'full'."""
    activation_budget: float = 1.0
    """Share of its usual activations that a compiled step keeps for the backward pass. The compiler chooses which."""
    # compilation
    compile: bool = False
    max_autotune: bool = False
    """Inductor times several kernels for each matmul and keeps the fastest."""
    cuda_graphs: bool = False
    """Inductor records the kernels of forward and backward once and replays them with one launch each."""
    # the step
    autocast: str | None = None
    """None, 'bf16' or 'fp16'. Applies to forward and loss only; parameters stay as `weights` says."""
    loss_scaling: bool = False
    optimizer: str = "adamw-loop"
    """A name in optim/table.py; docs/optimizers.md has them all."""
    weights: str = "fp32"
    """How parameters and gradients are stored: 'fp32', or 'bf16' for optimizers that make up for the rounding. What
    matmuls compute in is up to autocast; without it, as in the reference, stored bf16 weights are widened."""
    read_loss_every: int = 1
    """Steps between two reads of the loss by the host. 1 waits for the device at every step; 0 never reads it, leaving
    that to the caller."""
    # several ranks
    parallel: str = "none"
    """How ranks share a step: 'none' (there is one), 'ddp' (each holds the model), 'fsdp' (each holds a part; blocks
    are gathered in forward and backward), 'fsdp-keep' (gathered once, and kept for the backward) or 'fsdp-whole' (the
    model is gathered as a whole, once per update)."""
    tensor_parallel: bool = False
    """Every layer is cut among the ranks of a tensor group, whose size is up to the layout."""
    pipeline: str = "none"
    """The order in which pipeline stages process the micro batches: 'none', '1f1b' (a forward, then a backward) or
    'gpipe' (all forwards first)."""
    # the loader
    loader_workers: int = 0
    """Processes that make batches; above 0 also pins memory and copies one batch ahead."""

    @property
    def precision(self) -> str:
        """The coarsest arithmetic of the step: 'fp8', 'fp16', 'bf16', 'tf32' or 'fp32'."""
        return "fp8" if self.narrow_head or self.narrow_linears else self.usual_precision

    @property
    def usual_precision(self) -> str:
        """Arithmetic of the matmuls that are not in 8 bits."""
        if self.autocast:
            return self.autocast
        return "tf32" if self.matmul_precision == "high" else "fp32"

    @property
    def narrow_head(self) -> bool:
        return self.fp8_head and self.autocast is not None

    @property
    def narrow_linears(self) -> bool:
        return self.fp8_linears and self.autocast is not None

    @property
    def narrows_what_pays(self) -> bool:
        """True if only PAYING, or also MLPS, are narrow among the blocks' matmuls; the others are tuned 16-bit ones."""
        return self.narrow_linears and self.tuned_matmuls and self.backward == "fused"

    @property
    def narrows_mlps(self) -> bool:
        return self.narrows_what_pays and self.fused_matmuls and self.fp8_mlps

    def narrows(self, where: str, direction: str) -> bool:
        """True if this matmul of a block, by its names in predict/gemms.py, takes 8-bit operands."""
        if not self.narrow_linears or direction == "wgrad":
            return False
        some = (*PAYING, *MLPS) if self.narrows_mlps else PAYING
        return not self.narrows_what_pays or (where, direction) in some

    @property
    def runs_whole(self) -> bool:
        """True if this rank has all layers, each of them whole, throughout a step, as a single process does. Whatever
        replaces layers, passes more than the stream between blocks or compiles across them needs that."""
        by_blocks = self.parallel in ("fsdp", "fsdp-keep")
        return not (by_blocks or self.tensor_parallel or self.pipeline != "none")

    def vocab_rows(self, vocab: int) -> int:
        return -(-vocab // self.vocab_multiple) * self.vocab_multiple
