"""Optimizers other than the baseline's for-loop AdamW and `fused-adamw`: one rung each, used only when named.

redline ladder gpt2 --rungs tf32,bf16,muon        redline train gpt2 --optimizer muon

All of them replace `fused-adamw`, since a recipe has one optimizer. The speed of a step says nothing about how much it
learns, so only `foreach-adamw`, which is AdamW, can push `fused-adamw` out of a recipe by its speed. Formulas, bytes
and learning-rate factors: docs/optimizers.md.
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing

FUSED_ADAMW = "fused-adamw"
# Another update rule learns at another pace from the first step on. Over the 20 steps of a ladder, all of them warm-up,
# the rules that train the small model as well as AdamW reduce the loss by 0.72 (Adafactor) to 1.03 (Muon) times as much
# as AdamW, there or on `tiny`. Lion reaches 0.4: it starts at a tenth of the rate, and all of its steps have the same
# size.
LEAST_LEARNING, LEAST_OF_LION = 0.5, 0.25


class ForeachAdamW(Rung):
    """AdamW with one call per operation for all tensors.

    Each of the loop's eight operations is launched once for many tensors instead of once per tensor. As many bytes
    cross memory as before, about 3 times those of the fused kernel, but the host has little to launch. The square roots
    of all second moments exist for a moment: 4 bytes per parameter.
    """

    name = "foreach-adamw"
    title = "AdamW, all tensors per operation"
    maths = Maths.ROUNDING
    instead_of = FUSED_ADAMW
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-foreach", weights="fp32")


class OtherRule(Rung):
    """A rung whose optimizer follows another update rule than AdamW, or rounds where AdamW does not."""

    maths = Maths.CHANGES
    instead_of = FUSED_ADAMW
    stand_in = True
    when_named = True


class AdamW8bit(OtherRule):
    """AdamW with 8-bit moments, one scale for every 256 of them.

    2 bytes of state per parameter instead of 8 (arXiv 2110.02861): 0.74 GB less for GPT-2, 9.3 GB less for GPT-2 XL.
    The optimizer is torchao's, which compiles a kernel per shape in the first step. The moments are rounded to 256
    levels, so this is another rule than AdamW. That it learns as AdamW does is shown in the paper and checked in
    `tests/cpu/test_optim.py`.
    """

    name = "adamw-8bit"
    title = "AdamW with 8-bit moments"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        # Not a device feature: unless the probe looked for torchao, it is not missing (`estimate` asks about any
        # machine).
        return hardware.missing.get("torchao") or missing(hardware, "compile")

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-8bit", weights="fp32")


def _bf16_weights_need(hardware: Hardware, plan: Plan) -> str | None:
    lacks = missing(hardware, "bf16")
    if lacks is None and plan.autocast != "bf16":
        return "weights in bf16 are for matmuls in bf16: add bf16"
    return lacks


class AdamWBf16(OtherRule):
    """Weights, gradients and moments in bf16 alone: 8 bytes per parameter instead of 16.

    Most updates are smaller than the last bit of a bf16 weight and would be lost. They are therefore computed in fp32
    and rounded up or down at random, in proportion, so that they are right on average (arXiv 2010.06192). Autocast's
    casts of the weights disappear as well. The update is slower than the fused one: a series of eager kernels per
    tensor.
    """

    name = "adamw-bf16"
    title = "bf16 weights, rounded by chance"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _bf16_weights_need(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-bf16", weights="bf16")


class AdamWBf16Kahan(OtherRule):
    """Weights, gradients and moments in bf16, and a second bf16 tensor for what rounding cut off the weights.

    10 bytes per parameter. What was cut off is added at the next step (Kahan summation), so a weight and its remainder
    have 16 mantissa bits together and nothing is random: two bytes more than `adamw-bf16`, and no noise.
    """

    name = "adamw-bf16-kahan"
    title = "bf16 weights, Kahan summation"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _bf16_weights_need(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-bf16-kahan", weights="bf16")


class Adafactor(OtherRule):
    """Adam that stores a matrix's second moments as one number per row and one per column.

    Half of AdamW's state (arXiv 1804.04235), and no extra package. The second moments of a matrix are approximated by
    the product of its row and column means. A tensor's update is scaled down to a root mean square of 1 at most before
    the learning rate is applied.
    """

    name = "adafactor"
    title = "Adafactor: rows x columns"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adafactor", weights="fp32")


class Lion(OtherRule):
    """Update by the sign of a moment, which is the only state.

    Half of AdamW's state and five operations per tensor (arXiv 2302.06675). Every weight moves by the learning rate, so
    the rate must be smaller than AdamW's and the decay larger; choosing the optimizer sets both. Lion was made for
    large batches and long runs, and over the first steps it learns less than AdamW.
    """

    name = "lion"
    title = "Lion: the sign of a moment"
    least_learning = LEAST_OF_LION

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="lion", weights="fp32")


class SgdMomentum(OtherRule):
    """Gradient descent with momentum, in one fused kernel: the least that an optimizer can cost.

    One moment: 20 bytes moved per parameter, where AdamW moves 28. Without second moments, one learning rate serves
    tensors whose gradients differ by orders of magnitude, and transformers learn badly with it. It is here as a bound.
    """

    name = "sgd-momentum"
    title = "SGD with momentum, fused"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="sgd-momentum", weights="fp32")


class Muon(OtherRule):
    """Muon for the matrices of the layers, fused AdamW for embedding, head and vectors.

    Five rounds of three bf16 matmuls (Newton-Schulz) make the momentum of a matrix nearly orthogonal, so that every
    direction learns at the same speed. That gives a better loss per token (arXiv 2502.16982) for some milliseconds per
    step, which matter less the larger the batch. Inside the layers it has half of AdamW's state.
    """

    name = "muon"
    title = "Muon for matrices, AdamW for the rest"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="muon", weights="fp32")
