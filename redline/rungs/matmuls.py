"""Who does the blocks' products: a rung that is taken when it is named.

redline ladder gpt2 --from best.json --rungs tuned-matmuls
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing


class TunedMatmuls(Rung):
    """The blocks' products by the cuBLASLt algorithm that is fastest here, GELU on the way out of one of them.

    torch asks cuBLASLt for one algorithm per product and takes it. Here the first step times those that are proposed,
    on its own operands, and keeps the fastest; weight gradients are written in fp32 at once, without a cast afterwards.
    With `fused-backward` the first product of an MLP writes GELU's input and output in one kernel. The layers are
    exchanged, so it is for the built-in models. The choice is a process's own, so that two runs may round differently;
    --deterministic leaves the products to torch.
    """

    name = "tuned-matmuls"
    title = "blocks' matmul algorithms measured"
    maths = Maths.ROUNDING
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.autocast is None:
            return "the layers compute in 16 bit: add bf16"
        if plan.fp8_linears:
            return "fp8-linears has products of its own"
        if plan.parallel.startswith("fsdp") or plan.tensor_parallel or plan.pipeline != "none":
            return "it exchanges whole layers: a model that is cut undoes it"
        return missing(hardware, "cublaslt")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, tuned_matmuls=True)
