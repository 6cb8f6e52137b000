"""Rungs that get more out of libraries than torch does: NVIDIA's own, and those of the extra `hopper`."""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import FLASH4_HEADS, Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing


class TunedMatmuls(Rung):
    """Run the matmuls of blocks and head with the fastest cuBLASLt algorithm, one of them with GELU as its epilogue.

    torch asks cuBLASLt for one algorithm per matmul and uses it. Here the first step times the proposed algorithms on
    its own operands and keeps the fastest. Weight gradients are written directly in fp32, without a cast afterwards.
    With `fused-backward`, the first matmul of an MLP writes GELU's input and output in one kernel. The head's three
    matmuls are included with `fused-loss` or `chunked-loss`, which call them explicitly; with the full loss they stay
    torch's, and `fp8-head` has its own. Layers are replaced, so the rung is for the built-in models only. Each process
    makes its own choice, so two runs may round differently; --deterministic leaves the matmuls to torch.
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
    """Fuse GELU, its gradient and the sum that is its bias's gradient into the MLP's matmuls, as epilogues.

    The input gradient of an MLP's second layer is four times as wide as the residual stream, and a separate kernel
    reads it together with GELU's input and writes it again. QuACK's matmuls for Hopper can apply an epilogue to each
    element before they write it, so that kernel disappears; in the forward pass they are no slower than cuBLASLt's with
    a GELU epilogue. GELU's input is not kept: computing its slope in the forward pass costs a few more operations and
    leaves only a multiplication for the backward pass. The first step compiles these kernels, which takes some seconds,
    and times two variants of the backward one. Everything else is as in `tuned-matmuls` and `fused-backward`. GELU's
    tanh is the GPU's own instruction, whose eleven bits are more than the output keeps. The kernels come from the
    package quack-kernels (pip install '.[hopper]').
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

    torch's attention returns three gradients, which the projection's matmuls read as one tensor, so all three are
    copied. cuDNN's kernels accept any strides, so here they write where the matmuls read; the only pass that remains
    sums the bias gradient. The kernels are called through NVIDIA's nvidia-cudnn-frontend, which drives the cuDNN that
    torch has loaded. The blocks are those of `fused-backward`, so the rung is for the built-in models only.
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
    """Like `packed-attention`, but flash-attn-4's kernel computes the gradients of q, k and v.

    On an H200, cuDNN has the faster forward pass and flash-attn-4 the faster backward pass: 0.79 ms for 64 sequences of
    GPT-2, where torch's call of cuDNN takes 1.18 ms including the copy that puts the three gradients side by side. So
    torch calls cuDNN for the forward pass, and the package flash-attn-4 does the backward pass; it accepts the strides,
    and reuses the softmax statistics that cuDNN saves. Its kernel is compiled on the first call and kept in redline's
    cache folder, unless FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is set, which then decides. dq is accumulated in fp32 in
    no fixed order, so two runs may round differently; --deterministic fixes the order. The blocks are those of
    `fused-backward`, so the rung is for the built-in models only.
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
    """Return why attention cannot read q, k and v in place under this plan, or None if it can."""
    if plan.backward != "fused":
        return "the blocks are those of fused-backward: add it"
    if plan.attention != "cudnn":
        return "the kernel is cuDNN's: add cudnn-attention"
    if plan.checkpointing == "selective":
        return "selective-checkpointing computes attention again, which is one with its projection here"
    return None
