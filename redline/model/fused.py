"""Parts of a block with a hand-written backward pass: matmuls, and one kernel between two of them.

    q, k, v = project(x, attention.c_attn, dtype)
    x, normal = add_norm(x, branch, c_proj.bias, ln_2, dtype)     # the sum, and what the next matmul reads
    branch = mlp(normal, block.mlp, dtype)                        # whose last bias the next sum gives a gradient

What autograd and the compiler make of the same formulas reads a gradient once more for every bias. Here the kernel that
writes a gradient also sums its columns (`kernels/`). A branch leaves the gradient of its last bias to the sum that
follows it, because that gradient is the stream's, which the norm's backward pass writes. The bias itself is added
inside the branch's last matmul, before rounding: a rounded branch often puts a 16-bit stream exactly halfway between
two numbers, and a bias added later, however small, would push all of those to its own side (docs/speed-log.md). `dtype`
is the type that autocast gives the matmuls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redline.core.plan import MLPS, PAYING
from redline.kernels.flash4_attention import flash4_attention, flash4_attention_backward
from redline.kernels.gelu_backward import gelu_backward_
from redline.kernels.gelu_products import gelu_product, gelu_product_backward
from redline.kernels.narrow_products import (
    narrow_gelu_product,
    narrow_gelu_product_backward,
    narrow_gelu_product_backward_in_both,
    narrow_gelu_product_in_both,
)
from redline.kernels.norm_backward import norm_backward
from redline.kernels.packed_attention import packed_attention, packed_attention_backward
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.kernels.side_by_side import side_by_side
from redline.model.first_order import first_order
from redline.model.fp8 import (
    Fp8Linear,
    forward_product,
    input_gradient,
    operands,
    product_of_narrow,
    scale_beforehand,
)
from redline.model.tuned import TunedLinear

Tensors = tuple[torch.Tensor, ...]
Weights = tuple[torch.Tensor, torch.Tensor]
"""A layer's weight and bias."""
# Packed attention by the kernels that write the gradients of q, k and v: (forward, backward).
PACKED = {
    "cudnn": (packed_attention, packed_attention_backward),
    "flash4": (flash4_attention, flash4_attention_backward),
}
# What computes a layer's matmuls (`products_of`): one of TUNED, or torch, or torch with all operands in 8 bits ("fp8").
FUSED = ("fused", "fp8-fused", "fp8-mlp")  # MLPs whose matmuls have GELU epilogues
TUNED = ("tuned", "fp8-tuned", *FUSED)
NARROW = {"fp8-tuned": PAYING, "fp8-fused": PAYING, "fp8-mlp": (*PAYING, *MLPS)}  # 8 bits beside tuned 16-bit ones


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast unless the type is right already. For the forward pass of autograd functions: torch 2.11's compiler loses
    gradients over a cast that changes nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def project(x: torch.Tensor, linear: nn.Linear, dtype: torch.dtype) -> Tensors:
    """Return q, k and v, [B, T, C] each, as parts of one matmul's result."""
    by = products_of(linear)
    parts = Projection.apply(x.flatten(0, 1), linear.weight, linear.bias, dtype, by)  # type: ignore[no-untyped-call]
    return tuple(part.unflatten(0, x.shape[:2]) for part in parts)


class Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, by: str
    ) -> Tensors:
        narrow, rows = weight if by == "fp8" else cast(weight, dtype), cast(x, dtype)
        ctx.save_for_backward(rows, narrow)
        ctx.dtypes, ctx.by = (x.dtype, weight.dtype, bias.dtype), by
        return through(rows, narrow, cast(bias, dtype), by, is_narrow("qkv", "forward", by)).chunk(3, dim=1)

    @staticmethod
    @first_order
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, narrow = ctx.saved_tensors
        gradient, sums = side_by_side(*above)
        of_x, of_weight, of_bias = ctx.dtypes
        of_rows = back_through(gradient, narrow, ctx.by, is_narrow("qkv", "dgrad", ctx.by))
        return of_rows.to(of_x), of_weights(gradient, rows, of_weight, ctx.by), sums.to(of_bias), None, None


def attend_packed(x: torch.Tensor, linear: nn.Linear, heads: int, dtype: torch.dtype, kernels: str) -> torch.Tensor:
    """Return the heads' output [B, T, C]. q, k and v and their gradients stay side by side. `kernels`: of PACKED."""
    by = products_of(linear)
    rows = PackedProjection.apply(x.flatten(0, 1), linear.weight, linear.bias, dtype, by)  # type: ignore[no-untyped-call]
    qkv = rows.unflatten(0, x.shape[:2])
    mixed: torch.Tensor = PackedAttention.apply(qkv, heads, kernels)  # type: ignore[no-untyped-call]
    return mixed


class PackedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, by: str
    ) -> torch.Tensor:
        narrow, rows = weight if by == "fp8" else cast(weight, dtype), cast(x, dtype)
        ctx.save_for_backward(rows, narrow)
        ctx.dtypes, ctx.by = (x.dtype, weight.dtype, bias.dtype), by
        return through(rows, narrow, cast(bias, dtype), by, is_narrow("qkv", "forward", by))

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, narrow = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        sums = gradient.sum(dim=0, dtype=torch.promote_types(gradient.dtype, torch.float32))
        of_rows = back_through(gradient, narrow, ctx.by, is_narrow("qkv", "dgrad", ctx.by))
        return of_rows.to(of_x), of_weights(gradient, rows, of_weight, ctx.by), sums.to(of_bias), None, None


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads: int, kernels: str) -> torch.Tensor:
        out, stats = PACKED[kernels][0](qkv, heads)
        ctx.save_for_backward(qkv, out, stats)
        ctx.heads, ctx.kernels = heads, kernels
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backward = PACKED[ctx.kernels][1]
        return backward(above.contiguous(), *ctx.saved_tensors, ctx.heads), None, None


def products_of(linear: nn.Linear) -> str:
    """Return what computes a layer's matmuls: 'torch', 'fp8', or one of TUNED."""
    if isinstance(linear, Fp8Linear):
        return "fp8"
    if isinstance(linear, TunedLinear):
        if linear.narrow_mlp:
            return "fp8-mlp"
        return ("fp8-" if linear.narrow else "") + ("fused" if linear.fused else "tuned")
    return "torch"


def is_narrow(where: str, direction: str, by: str) -> bool:
    """True if this matmul takes 8-bit operands."""
    return by == "fp8" or (where, direction) in NARROW.get(by, ())


def through(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, by: str, narrow: bool) -> torch.Tensor:
    """Apply a layer to `rows`."""
    if narrow:
        return forward_product(rows, weight, bias, rows.dtype)
    if by in TUNED:
        found: torch.Tensor = product_and_bias(rows, weight, bias)
        return found
    return torch.addmm(bias, rows, weight.t())


def back_through(above: torch.Tensor, weight: torch.Tensor, by: str, narrow: bool) -> torch.Tensor:
    """Return the gradient of a layer's input."""
    if narrow:
        return input_gradient(above, weight, above.dtype)
    return product(above, weight, above.dtype) if by in TUNED else above @ weight


def of_weights(above: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, by: str) -> torch.Tensor:
    """Return the gradient of a layer's weight, which has type `dtype`."""
    return product(above.t(), rows, dtype) if by in TUNED else (above.t() @ rows).to(dtype)


def output(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Apply a layer whose bias gets its gradient in `add_norm`."""
    bias = linear.bias.detach()
    return F.linear(x, linear.weight, bias) if products_of(linear) == "torch" else linear.through(x, bias)  # type: ignore[operator]


def add_norm(
    stream: torch.Tensor, branch: torch.Tensor | None, bias: torch.Tensor, norm: nn.LayerNorm, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add stream and branch [B, T, C] and normalise the sum. `bias` is already in the branch and gets its gradient
    here. With no branch, the branch and its bias were added before (`add`). What comes later must be added to the sum
    returned here, because its gradient comes back here."""
    rows = None if branch is None else branch.flatten(0, 1)
    together, normal = AddNorm.apply(  # type: ignore[no-untyped-call]
        stream.flatten(0, 1), rows, bias, norm.weight, norm.bias, norm.eps, dtype
    )
    return together.view_as(stream), normal.view_as(stream)


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        branch: torch.Tensor | None,
        bias: torch.Tensor,
        gain: torch.Tensor,
        offset: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensors:
        together = stream.view_as(stream) if branch is None else add(stream, branch)
        wide = torch.promote_types(stream.dtype, torch.float32)
        normal, mean, scale = torch.native_layer_norm(
            cast(together, wide), gain.shape, cast(gain, wide), cast(offset, wide), eps
        )
        ctx.save_for_backward(together, gain, mean, scale)
        of_branch = None if branch is None else branch.dtype
        ctx.dtypes = of_branch, bias.dtype, gain.dtype, offset.dtype
        return together, cast(normal, dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, beside: torch.Tensor, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        together, gain, mean, scale = ctx.saved_tensors
        of_stream, sums = norm_backward(above, together, beside, gain, mean, scale)
        branch, bias, weight, offset = ctx.dtypes
        of_gain, of_offset, of_bias = sums.unbind()
        of_branch = None if branch is None else of_stream.to(branch)
        return of_stream, of_branch, of_bias.to(bias), of_gain.to(weight), of_offset.to(offset), None, None


def add(stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """Add in fp32 and round once, to the stream's type."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    return cast(cast(stream, wide) + cast(branch, wide), stream.dtype)


def mlp(x: torch.Tensor, c_fc: nn.Linear, gelu: Any, c_proj: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """Return the MLP's output [B, T, C]; its last bias gets its gradient in `add_norm`."""
    first, last = (c_fc.weight, c_fc.bias), (c_proj.weight, c_proj.bias.detach())
    y: torch.Tensor = Mlp.apply(x.flatten(0, 1), *first, gelu, *last, dtype, products_of(c_fc))  # type: ignore[no-untyped-call]
    return y.view_as(x)


class Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor,
        gelu: Any,
        down: torch.Tensor,
        last_bias: torch.Tensor,
        dtype: torch.dtype,
        by: str,
    ) -> torch.Tensor:
        rows = cast(x, dtype)
        narrow_up, narrow_down = (up, down) if by == "fp8" else (cast(up, dtype), cast(down, dtype))
        first, last = (narrow_up, cast(bias, dtype)), (narrow_down, cast(last_bias, dtype))
        bend, active, y = through_mlp(rows, first, gelu, last, by)
        ctx.save_for_backward(rows, bend, active, narrow_up, narrow_down)
        ctx.dtypes, ctx.by = (x.dtype, up.dtype, bias.dtype, down.dtype), by
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, bend, active, up, down = ctx.saved_tensors
        of_x, of_up, of_bias, of_down = ctx.dtypes
        of_hidden, sums, of_rows = back_through_mlp(above, down, bend, up, ctx.by)
        return (
            of_rows.to(of_x),
            of_weights(of_hidden, rows, of_up, ctx.by),
            sums.to(of_bias),
            None,
            of_weights(above, active, of_down, ctx.by),
            None,
            None,
            None,
        )


def through_mlp(rows: torch.Tensor, first: Weights, gelu: Any, last: Weights, by: str) -> Tensors:
    """Return what the backward pass of GELU needs (`through_gelu`), GELU's output, and the last layer's output."""
    if by == "fp8-mlp":
        (up, bias), (down, last_bias) = first, last
        scale = scale_beforehand(rows, up, bias)
        slope, active, narrow = narrow_gelu_product_in_both(*operands(rows, up), bias, scale)
        return slope, active, product_of_narrow(narrow, scale, down, rows.dtype, last_bias)
    bend, active = through_gelu(rows, *first, gelu, by)
    return bend, active, through(active, *last, by, is_narrow("down", "forward", by))


def back_through_mlp(above: torch.Tensor, down: torch.Tensor, bend: torch.Tensor, up: torch.Tensor, by: str) -> Tensors:
    """Return the gradients of the first layer's output, of that layer's bias, and of the MLP's input."""
    if by == "fp8-mlp":
        scale = scale_beforehand(above, down.t())
        words = operands(above, down.t())
        of_hidden, sums, narrow = narrow_gelu_product_backward_in_both(*words, bend, scale)
        return of_hidden, sums, product_of_narrow(narrow, scale, up.t(), above.dtype)
    of_hidden, sums = back_through_gelu(above, down, bend, by)
    return of_hidden, sums, back_through(of_hidden, up, by, is_narrow("up", "dgrad", by))


def through_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gelu: Any, by: str) -> Tensors:
    """Apply the first layer of an MLP and GELU. Return what GELU's backward pass needs, then GELU's output. The former
    is GELU's slope for `by` in FUSED, otherwise GELU's input. As an epilogue of a 16-bit or fused matmul it is the tanh
    GELU whatever `gelu` is, and reads its input before rounding."""
    narrow = is_narrow("up", "forward", by)
    if narrow and by in FUSED:
        both: Tensors = narrow_gelu_product(*operands(rows, weight), bias)
    elif by in TUNED and not narrow:
        both = (gelu_product if by in FUSED else product_and_gelu)(rows, weight, bias)
    else:
        hidden = through(rows, weight, bias, by, narrow)
        both = hidden, gelu(hidden)
    return both


def back_through_gelu(above: torch.Tensor, weight: torch.Tensor, bend: torch.Tensor, by: str) -> Tensors:
    """Return the gradients of the first layer's output and of that layer's bias."""
    narrow = is_narrow("down", "dgrad", by)
    if by in FUSED:
        both: Tensors = (
            narrow_gelu_product_backward(*operands(above, weight.t()), bend)
            if narrow
            else gelu_product_backward(above, weight, bend)
        )
        return both
    of_hidden = back_through(above, weight, by, narrow)
    return of_hidden, gelu_backward_(of_hidden, bend)
