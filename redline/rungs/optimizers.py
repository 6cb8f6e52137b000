"""Other optimizers than the loop AdamW of the baseline and `fused-adamw`: one rung each, taken when it is named.

redline ladder gpt2 --rungs tf32,bf16,muon        redline train gpt2 --optimizer muon

All stand in the place of `fused-adamw`: a recipe has one optimizer. How fast a step is says nothing about how much it
learns, so none but `foreach-adamw`, which is AdamW, pushes `fused-adamw` out of a recipe by its speed. Formulas, bytes
and factors on the learning rate: docs/optimizers.md.
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing

FUSED_ADAMW = "fused-adamw"
# Another rule learns at another pace from the first step on. Over the 20 steps of a ladder, warm-up all of them, those
# that train the small model as well as AdamW shed from 0.72 (Adafactor) to 1.03 (Muon) of what it sheds there or on
# `tiny`; Lion 0.4, since it starts at a tenth of the rate and every step is of one size.
LEAST_LEARNING, LEAST_OF_LION = 0.5, 0.25


class ForeachAdamW(Rung):
    """AdamW with one call per operation for all tensors.

    The loop's eight operations, each launched once for many tensors instead of once per tensor: as many bytes cross
    memory as before, some 3 times those of the fused kernel, but the host has little to launch. A square root of all
    second moments exists for a moment, 4 bytes per parameter.
    """

    name = "foreach-adamw"
    title = "AdamW, all tensors per operation"
    maths = Maths.ROUNDING
    instead_of = FUSED_ADAMW
    when_named = True

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-foreach", weights="fp32")


class OtherRule(Rung):
    """A rung whose optimizer follows another rule than AdamW, or rounds where AdamW does not."""

    maths = Maths.CHANGES
    instead_of = FUSED_ADAMW
    stand_in = True
    when_named = True


class AdamW8bit(OtherRule):
    """AdamW whose moments have 8 bits, 256 of them to a scale.

    2 bytes of state per parameter instead of 8 (arXiv 2110.02861): 0.74 GB less for GPT-2, 9.3 GB for GPT-2 XL. From
    torchao, which compiles a kernel per shape at the first step. The moments are rounded to 256 levels, so it is
    another rule than AdamW; that it learns as AdamW does is what the paper shows and `tests/cpu/test_optim.py` checks.
    """

    name = "adamw-8bit"
    title = "AdamW with 8-bit moments"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        # Not a feature of the device: what was not looked for is not missing (estimate asks for any machine).
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

    An update is mostly smaller than the last bit of a bf16 weight and would be lost. It is computed in fp32 and rounded
    up or down by chance, in proportion, so that it is right on average (arXiv 2010.06192). Autocast's casts of the
    weights are gone as well. The update is a row of eager kernels per tensor, and slower than the fused one.
    """

    name = "adamw-bf16"
    title = "bf16 weights, rounded by chance"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _bf16_weights_need(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-bf16", weights="bf16")


class AdamWBf16Kahan(OtherRule):
    """Weights, gradients and moments in bf16, and a second bf16 tensor with what rounding cut off the weights.

    10 bytes per parameter. What is cut off is added at the next step (Kahan summation), so weight and rest have 16 bits
    of mantissa together and no chance is involved: two bytes more than `adamw-bf16`, and no noise.
    """

    name = "adamw-bf16-kahan"
    title = "bf16 weights, Kahan summation"

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        return _bf16_weights_need(hardware, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adamw-bf16-kahan", weights="bf16")


class Adafactor(OtherRule):
    """Adam whose second moment of a matrix is one number per row and one per column.

    Half of AdamW's state (arXiv 1804.04235), and no package is needed. A matrix of second moments becomes the product
    of its rows' and columns' means, and no tensor moves by more than 1 in the root mean square, times the rate.
    """

    name = "adafactor"
    title = "Adafactor: rows x columns"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="adafactor", weights="fp32")


class Lion(OtherRule):
    """The sign of a moment, with that moment as the only state.

    Half of AdamW's state and five operations per tensor (arXiv 2302.06675). Every weight moves by the learning rate, so
    the rate must be smaller than AdamW's and the decay larger: both come with the optimizer. Made for large batches and
    long runs; over the first steps it learns less than AdamW.
    """

    name = "lion"
    title = "Lion: the sign of a moment"
    least_learning = LEAST_OF_LION

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="lion", weights="fp32")


class SgdMomentum(OtherRule):
    """Gradient descent with momentum, in one fused kernel: the least that an optimizer can cost.

    One moment, 20 bytes moved per parameter where AdamW moves 28. There is no second moment, so one rate serves tensors
    whose gradients differ by orders of magnitude: transformers learn badly with it. Here as a lower bound.
    """

    name = "sgd-momentum"
    title = "SGD with momentum, fused"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="sgd-momentum", weights="fp32")


class Muon(OtherRule):
    """Muon for the matrices of the layers, fused AdamW for embedding, head and vectors.

    The momentum of a matrix is made nearly orthogonal by five rounds of three matmuls in bf16 (Newton-Schulz), so that
    every direction learns at one speed: better loss per token (arXiv 2502.16982) for some milliseconds per step, which
    weigh less the larger the batch. Half of AdamW's state inside the layers.
    """

    name = "muon"
    title = "Muon for matrices, AdamW for the rest"
    least_learning = LEAST_LEARNING

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, optimizer="muon", weights="fp32")
