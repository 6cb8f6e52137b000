"""NVIDIA's libraries asked for more than torch asks of them: rungs that are taken when they are named.

redline ladder gpt2 --from best.json --rungs packed-attention,tuned-matmuls
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import Plan
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
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast is None:
            return "the layers compute in 16 bit: add bf16"
        if plan.fp8_linears:
            return "fp8-linears has products of its own"
        if not plan.runs_whole:
            return "it exchanges whole layers: a model that is cut undoes it"
        return missing(hardware, "cublaslt")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, tuned_matmuls=True)


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
        if plan.backward != "fused":
            return "the blocks are those of fused-backward: add it"
        if plan.attention != "cudnn":
            return "the kernel is cuDNN's: add cudnn-attention"
        if plan.checkpointing == "selective":
            return "selective-checkpointing computes attention again, which is one with its projection here"
        return missing(hardware, "cudnn-frontend")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, packed_attention=True)
