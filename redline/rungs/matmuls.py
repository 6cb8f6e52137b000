"""Libraries asked for more than torch asks of them: NVIDIA's own, and those of the extra `hopper`."""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import FLASH4_HEADS, Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing


class TunedMatmuls(Rung):
    """Products of blocks and head by the cuBLASLt algorithm that is fastest here, GELU on the way out of one of them.

    torch asks cuBLASLt for one algorithm per product and takes it. Here the first step times those that are proposed,
    on its own operands, and keeps the fastest; weight gradients are written in fp32 at once, without a cast afterwards.
    With `fused-backward` the first product of an MLP writes GELU's input and output in one kernel. The head's three
    products are taken with `fused-loss` or `chunked-loss`, which ask for them by name; with the full loss they stay
    torch's, and `fp8-head` has its own. The layers are exchanged, so it is for the built-in models. The choice is a
    process's own, so that two runs may round differently; --deterministic leaves the products to torch.
    """

    name = "tuned-matmuls"
    title = "matmul algorithms measured"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast is None:
            return "the layers compute in 16 bit: add bf16"
        if plan.fp8_linears and plan.backward != "fused":
            return "beside fp8-linears it takes the blocks of fused-backward: add it"
        if not plan.runs_whole:
            return "it exchanges whole layers: a model that is cut undoes it"
        return missing(hardware, "cublaslt")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, tuned_matmuls=True)


class FusedMatmuls(Rung):
    """GELU, its gradient, and the sums that are its bias's gradient, at the ends of an MLP's matmuls.

    The gradient of an MLP's second layer writes four times the stream's width, and a kernel of its own reads that and
    what GELU was given and writes it again. QuACK's matmuls for Hopper do with a number what they are told before they
    write it, so here that kernel is gone; and forward they are no slower than cuBLASLt's with GELU behind them. What
    GELU was given is not kept: on the way out its slope costs a few operations more, and on the way back nothing but a
    multiplication is left. The first step compiles them, which takes some seconds, and times two ways of the second.
    Everything else is as `tuned-matmuls` and `fused-backward` have it. GELU's tanh is the GPU's own instruction, whose
    eleven bits are more than what is written keeps. From the package quack-kernels (pip install '.[hopper]').
    """

    name = "fused-matmuls"
    title = "GELU inside the matmuls, both ways"
    maths = Maths.ROUNDING

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if hardware.kind != "cuda":
            return missing(hardware, "quack")
        if not plan.tuned_matmuls:
            return "the layers are those of tuned-matmuls: add it"
        if plan.backward != "fused":
            return "the blocks are those of fused-backward: add it"
        if not plan.compile:
            return "add compile: in an eager step other kernels take the time"
        shape = workload.decoder
        if odd := [str(width) for width in (shape.d_model, shape.d_ff) if width % 8]:
            return f"rows of 16-bit numbers must fill 16 bytes: {' and '.join(odd)} is no multiple of 8"
        return missing(hardware, "quack")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, fused_matmuls=True)


class PackedAttention(Rung):
    """Attention reads q, k and v where their projection wrote them, and writes their gradients side by side.

    torch's attention gives three gradients, which the projection's matmuls read as one: all three are copied. cuDNN's
    kernels take any strides, so here they write where the matmuls read; what is left is a pass that adds up the bias's
    gradient. Through NVIDIA's nvidia-cudnn-frontend, which drives the cuDNN that torch has loaded. The blocks are those
    of `fused-backward`, so it is for the built-in models.
    """

    name = "packed-attention"
    title = "q, k, v and their gradients in place"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _packed_needs(plan) or missing(hardware, "cudnn-frontend")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, packed_attention="cudnn")


class Flash4Backward(Rung):
    """The same in place, with the gradients of q, k and v by flash-attn-4's kernel.

    cuDNN's forward pass is the faster one on an H200, flash-attn-4's backward pass is: at 64 sequences of GPT-2 0.79 ms
    where torch's call of cuDNN takes 1.18 with the three gradients put side by side. So cuDNN goes forward, called by
    torch, and the package flash-attn-4 back; it takes the strides and the softmax's sums that cuDNN leaves. Its kernel
    is compiled at its first call and kept in redline's cache folder; who sets FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED
    decides that. dq is added up in fp32 in whatever order, so that two runs may round differently; --deterministic asks
    for one order. The blocks are those of `fused-backward`, so it is for the built-in models.
    """

    name = "flash4-backward"
    title = "attention's backward by flash-attn-4"
    maths = Maths.ROUNDING
    instead_of = "packed-attention"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if hardware.kind != "cuda":
            return missing(hardware, "flash4")
        if plan.autocast is None:
            return "the kernel takes 16-bit inputs only: add bf16 or fp16"
        width = workload.decoder.head_width
        if width not in FLASH4_HEADS:
            tried = ", ".join(map(str, FLASH4_HEADS))
            return f"the kernel is right with heads of {tried} (of 16 it was wrong); these have {width}"
        return _packed_needs(plan) or missing(hardware, "flash4")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, packed_attention="flash4")


def _packed_needs(plan: Plan) -> str | None:
    """Of attention that reads q, k and v where they lie."""
    if plan.backward != "fused":
        return "the blocks are those of fused-backward: add it"
    if plan.attention != "cudnn":
        return "the kernel is cuDNN's: add cudnn-attention"
    if plan.checkpointing == "selective":
        return "selective-checkpointing computes attention again, which is one with its projection here"
    return None
