"""Matmuls with 8-bit operands: one rung for each part of the model, used only when named.

redline ladder gpt2 --also fp8-head,fp8-linears,fp8-mlps

They round so coarsely that they count as changed maths: the gradients are compared with those of the unchanged fp32
model, within bounds of their own, and the verdict is never better than *changed* (docs/fp8.md).
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.hardware import Hardware
from redline.core.plan import PIECES, Plan
from redline.core.workload import Workload
from redline.rungs.rung import Maths, Rung, missing

WHOLE = 16  # the length of a row of an 8-bit operand must be a multiple of this


def _narrow_needs(hardware: Hardware, plan: Plan) -> str | None:
    if plan.autocast != "bf16":
        return "8-bit operands are made of bf16 ones: add bf16"
    if not plan.runs_whole:
        return "8-bit matmuls were tried with whole layers only: a model that is cut undoes them"
    return missing(hardware, "fp8")


class Fp8Head(Rung):
    """Run the head's three matmuls with 8-bit operands.

    The head is a third of the matmul work of GPT-2 124M, and fp8 tensor cores do that work at twice the rate. The
    head's input and its weight become e4m3, each with one scale, a power of two that is recomputed at every step. The
    loss kernel writes the gradient of the logits directly as e5m2, half the bytes it wrote before; before the division
    by the number of tokens that gradient lies in [-1, 1], so its scale is a constant. The weight's gradient sums over
    tokens, and tensor cores accept 8-bit operands only with the summed index last: a kernel transposes the gradient,
    which costs part of the gain. Results are bf16, and weights and optimizer stay as they are. Each matmul has a random
    relative error of about 3 % (bf16: 0.3 %): docs/fp8.md says what that means for a run.
    """

    name = "fp8-head"
    title = "head's matmuls in fp8"
    maths = Maths.CHANGES
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if plan.loss == "full":
            return "the loss kernel writes the gradient in 8 bits: add fused-loss or chunked-loss"
        return _narrow_needs(hardware, plan) or _odd_head(workload, plan)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, fp8_head=True)


def _odd_head(workload: Workload, plan: Plan) -> str | None:
    shape, pieces = workload.decoder, PIECES[plan.loss]
    if plan.vocab_rows(shape.vocab) % WHOLE:
        return f"8-bit rows are whole {WHOLE}s, and the vocabulary has {shape.vocab:,}: add padded-vocab"
    if shape.d_model % WHOLE:
        return f"8-bit rows are whole {WHOLE}s, and the model's width is {shape.d_model}"
    if shape.sequence % (WHOLE * pieces):  # the weight's gradient sums over the tokens of a piece
        of = "a sequence has" if pieces == 1 else "a piece of the loss has an eighth of a sequence's"
        return f"8-bit rows are whole {WHOLE}s, and {of} {shape.sequence} tokens"
    return None


class Fp8Linears(Rung):
    """Run the matmuls of the blocks' linear layers with 8-bit operands, forward and for the gradients of their inputs.

    This is two thirds of the blocks' matmul work, at twice the rate. Every row of an operand has its own scale, a power
    of two. The kernel that writes a row (a norm, GELU) knows the row's largest element in time and writes the 8-bit row
    beside the 16-bit one, so under torch.compile most casts cost one byte per element and no pass of their own.
    Activations, weights and gradients become e4m3. The weights' gradients stay in 16 bits: they sum over tokens, for
    which tensor cores need the 8-bit operands transposed, and copying both costs about what the faster matmul gains.
    Layers of the blocks are replaced, so the rung is for the built-in models only. Each matmul has a relative error of
    3.8 %, and the errors of all layers add up in the gradients: docs/fp8.md.

    With `tuned-matmuls` and `fused-backward`, only three of a block's matmuls run in 8 bits, those that gain more than
    their casts cost: the projection to q, k and v, the first matmul of the MLP, and the input gradient of its second.
    The others stay in 16 bits, with the fastest algorithms. With `fused-matmuls`, the two MLP matmuls have GELU and its
    gradient as epilogues, as the 16-bit ones do, and the first step compiles and times three tile sizes for each.
    """

    name = "fp8-linears"
    title = "blocks' matmuls in fp8"
    maths = Maths.CHANGES
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if not plan.compile:
            return "without compile every cast is six kernels: add compile"
        if plan.tuned_matmuls and plan.backward != "fused":
            return "beside tuned-matmuls it takes the blocks of fused-backward: add it"
        return _narrow_needs(hardware, plan) or _odd_blocks(workload)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, fp8_linears=True)


class Fp8Mlps(Rung):
    """Run the MLPs' other two matmuls in 8 bits too: those that read what GELU, or its gradient, has just written.

    Beside `fused-matmuls`, `fp8-linears` leaves these two in 16 bits, since the cast would be a pass of its own: a
    kernel that writes tiles does not see the largest element of a row. Here it need not. No element of a product
    exceeds the product of the norms of its two rows, which are known beforehand. A scale derived from that bound leaves
    some octaves unused, and e4m3 has enough of them. So the kernels with GELU epilogues write 8 bits beside the 16 bits
    that the weights' gradients read. That costs one byte per element; the next matmul reads one byte less per element
    and takes about half the time.
    """

    name = "fp8-mlps"
    title = "all of the MLPs' matmuls in fp8"
    maths = Maths.CHANGES
    when_named = True

    def needs(self, workload: Workload, hardware: Hardware, plan: Plan) -> str | None:
        if not plan.fp8_linears:
            return "it adds to what fp8-linears has in 8 bits: add it"
        if not plan.fused_matmuls:
            return "the kernels that write 8 bits are those of fused-matmuls: add it"
        return None

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, fp8_mlps=True)


def _odd_blocks(workload: Workload) -> str | None:
    shape = workload.decoder
    odd = next((width for width in (shape.d_model, shape.query_width, shape.d_ff) if width % WHOLE), None)
    return None if odd is None else f"8-bit rows are whole {WHOLE}s, and a layer of the model is {odd} wide"
