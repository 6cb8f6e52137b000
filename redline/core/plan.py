"""How a step is run, field by field. The defaults are the plain, slow baseline; each rung changes a field or two.

The plan holds no torch object, so prediction, reports and tests read it anywhere. `rungs.plan_of` folds a recipe into
a plan; `engine/build.py` is the one place that turns a plan into running code.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the tokens, for each loss that computes its gradient at once: an eighth of the logits is small beside the layers,
# and still a large matmul.
PIECES = {"fused": 1, "chunked": 8}
# One rule in three implementations: a run may go from one to another. A number's update needs that number's gradient
# and state alone, so that ranks may hold rows of a matrix.
ADAMWS = ("adamw-loop", "adamw-foreach", "adamw-fused")
# Rungs that a model of somebody else's cannot have for one reason: their layers add up in fp32 what is stored in bf16;
# their kernels lie in the blocks of fused-backward.
BF16_WEIGHTS = ("adamw-bf16", "adamw-bf16-kahan")
ON_FUSED_BACKWARD = ("packed-attention", "flash4-backward", "fused-matmuls", "fp8-mlps")


# Widths of heads with which flash-attn-4's backward pass was held against fp64 on an H200. It compiles for others, but
# of 16 (4.0.0b36) the gradients of whole rows stayed zero.
FLASH4_HEADS = (32, 64, 128)
# The blocks' products that 8 bits make faster by more than their casts take (H200, docs/speed-log.md), by their names
# in predict/gemms.py. Two read what a norm writes, which the compiler narrows on the way, and the third writes four
# times as much as it reads.
PAYING = (("qkv", "forward"), ("up", "forward"), ("down", "dgrad"))
# And those that read what two of these write, where their kernels can write it in 8 bits as well.
MLPS = (("down", "forward"), ("up", "dgrad"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    # process switches
    matmul_precision: str = "highest"
    """float32 matmuls: 'highest' is true fp32, 'high' is TF32."""
    expandable_segments: bool = False
    """torch's allocator grows its segments instead of adding new ones, so less of them lies idle between tensors."""
    # the model
    attention: str = "naive"
    """'naive' (four lines), or 'flash' / 'cudnn': SDPA with that backend pinned and all others off."""
    tied: bool = False
    """The head shares the token embedding, as published; the baseline unties to show what tying does."""
    vocab_multiple: int = 1
    """Rows of embedding and head are padded to a multiple of this; the padding never reaches the loss."""
    residual: str = "fp32"
    """The stream between the blocks: 'fp32', as autocast leaves it, or 'bf16'."""
    gelu: str = "tanh"
    """How GELU's tanh is computed: 'tanh' by its own function, 'sigmoid' through the one that is cheaper compiled."""
    backward: str = "autograd"
    """Between the matmuls: 'autograd', as it and the compiler have it, or 'fused', kernels that add up the gradients of
    biases while they write those of activations."""
    loss: str = "full"
    """'full': logits wait for the backward pass; 'fused': one kernel turns them into their gradient at once; 'chunked':
    the same over an eighth of the tokens at a time."""
    packed_attention: str = "none"
    """Of cuDNN's attention and the fused backward: q, k and v stay side by side, and so do their gradients, which are
    written by 'cudnn' or by 'flash4', the package flash-attn-4; 'none': they are put there afterwards."""
    tuned_matmuls: bool = False
    """Products of the blocks, and of a head that is neither in 8 bit nor of the full loss, by the algorithm that was
    fastest here, of those cuBLASLt proposes."""
    fused_matmuls: bool = False
    """Of those and the fused backward: GELU, its gradient and the sums for its bias are the ends of two products."""
    fp8_head: bool = False
    """The head's three products take 8-bit inputs. Of autocast's products only: without it, as the fp32 reference is,
    nothing is narrow."""
    fp8_linears: bool = False
    """So do those of the blocks, but for the weights' gradients; with tuned products and the fused backward only those
    that gain by it (PAYING)."""
    fp8_mlps: bool = False
    """And, with fused products, all others of the MLPs (MLPS)."""
    checkpointing: str = "none"
    """What the backward computes again instead of keeping it: 'none', 'selective' (the attention core) or 'full'."""
    activation_budget: float = 1.0
    """Share of what a compiled step would keep for its backward pass. The compiler chooses what to compute again."""
    # compilation
    compile: bool = False
    max_autotune: bool = False
    """Inductor times several kernels for each matmul and keeps the fastest."""
    cuda_graphs: bool = False
    """Inductor records the kernels of forward and backward once and replays them with one launch each."""
    # the step
    autocast: str | None = None
    """None, 'bf16' or 'fp16': around forward and loss only, parameters stay fp32."""
    loss_scaling: bool = False
    optimizer: str = "adamw-loop"
    """A name in optim/table.py; docs/optimizers.md has them all."""
    weights: str = "fp32"
    """How parameters and gradients are stored: 'fp32', or 'bf16' for optimizers that make up for the rounding. What
    matmuls compute in is autocast's affair: without it stored bf16 weights are widened, which the reference does."""
    read_loss_every: int = 1
    """Steps between two reads of the loss by the host; 1 waits for the device at every step, 0 leaves it to others."""
    # several ranks
    parallel: str = "none"
    """How ranks share a step: 'none' (there is one), 'ddp' (each holds the model), 'fsdp' (each holds a part; blocks
    are gathered forward and backward), 'fsdp-keep' (gathered once, and kept for the backward) or 'fsdp-whole' (the
    model is gathered as one, once per update)."""
    tensor_parallel: bool = False
    """Every layer is cut among the ranks of a tensor group; how many those are is the layout's affair."""
    pipeline: str = "none"
    """The order in which stages take the pieces of a batch, where ranks hold the layers one after the other: 'none',
    '1f1b' (a forward, then a backward) or 'gpipe' (all forwards first)."""
    # the loader
    loader_workers: int = 0
    """Processes that make batches; above 0 also pins memory and copies one batch ahead."""

    @property
    def precision(self) -> str:
        """The coarsest arithmetic of the step: 'fp8', 'fp16', 'bf16', 'tf32' or 'fp32'."""
        return "fp8" if self.narrow_head or self.narrow_linears else self.usual_precision

    @property
    def usual_precision(self) -> str:
        """Of the products that are not in 8 bit."""
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
        """Of the blocks' products PAYING alone are narrow, or MLPS too, and all others are at their best in 16 bits."""
        return self.narrow_linears and self.tuned_matmuls and self.backward == "fused"

    @property
    def narrows_mlps(self) -> bool:
        return self.narrows_what_pays and self.fused_matmuls and self.fp8_mlps

    def narrows(self, where: str, direction: str) -> bool:
        """Whether this product of a block, by its names in predict/gemms.py, takes 8-bit operands."""
        if not self.narrow_linears or direction == "wgrad":
            return False
        some = (*PAYING, *MLPS) if self.narrows_mlps else PAYING
        return not self.narrows_what_pays or (where, direction) in some

    @property
    def runs_whole(self) -> bool:
        """While a step goes on this rank has all layers, each of them whole, as one process has them. What exchanges
        layers, lets blocks know one another or compiles across them needs that."""
        by_blocks = self.parallel in ("fsdp", "fsdp-keep")
        return not (by_blocks or self.tensor_parallel or self.pipeline != "none")

    def vocab_rows(self, vocab: int) -> int:
        return -(-vocab // self.vocab_multiple) * self.vocab_multiple
