"""Causal attention over q, k and v side by side: forward by cuDNN, backward by flash-attn-4.

    out, stats = flash4_attention(qkv, heads)                        # qkv [B, T, 3C] -> [B, T, C]
    of_qkv = flash4_attention_backward(above, qkv, out, stats, heads)

It computes and saves what `packed_attention.py` does. On an H200 cuDNN has the faster forward, flash-attn-4 the faster
backward. Both read q, k and v in place, and the backward writes their gradients side by side. The forward is torch's
own call of cuDNN, so only the backward needs a package, flash-attn-4, whose kernel is made for Hopper. Besides the
gradients the backward allocates dq in fp32, to accumulate it, and two numbers per row. On other devices, or without the
package, plain formulas are used.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from redline.core.job import user_cache
from redline.core.plan import FLASH4_HEADS
from redline.kernels.on_device import on_its_device
from redline.kernels.packed_attention import plain_packed_attention, plain_packed_attention_backward

PACKAGE = "flash-attn-4"  # the distribution's name: older packages share its module's name
HOPPER = 9
HALVES = (torch.bfloat16, torch.float16)
CACHE, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@torch.library.custom_op("redline::flash4_attention", mutates_args=())
def flash4_attention(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the heads' outputs side by side, and the log-sum-exp of the scores, [B, heads, T, 1] in fp32."""
    if not takes(qkv, heads):
        return plain_packed_attention(qkv, heads)
    return by_cudnn(qkv, heads)


@flash4_attention.register_fake
def _(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sequence, width = qkv.shape
    stats = qkv.new_empty(batch, heads, sequence, 1, dtype=torch.promote_types(qkv.dtype, torch.float32))
    return qkv.new_empty(batch, sequence, width // 3), stats


@torch.library.custom_op("redline::flash4_attention_backward", mutates_args=())
def flash4_attention_backward(
    above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int
) -> torch.Tensor:
    """Return the gradient of qkv, [B, T, 3C]. `above` [B, T, C] must be contiguous, as `out` is."""
    if not takes(qkv, heads):
        return plain_packed_attention_backward(above, qkv, out, stats, heads)
    return by_flash4(above, qkv, out, stats, heads)


@flash4_attention_backward.register_fake
def _(above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.empty_like(qkv)


def by_cudnn(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (part.transpose(1, 2) for part in parts(qkv, heads))  # [B, heads, T, d]
    out, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=True)
    return out.transpose(1, 2).flatten(2), stats  # torch lays it out like q: nothing is copied


@on_its_device
def by_flash4(
    above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int
) -> torch.Tensor:
    """Run the backward. With fake tensors, it compiles the kernel and runs nothing, which needs no GPU."""
    gradient = torch.empty_like(qkv)
    q, k, v = parts(qkv, heads)
    dq, dk, dv = parts(gradient, heads)
    library()(
        *(q, k, v, out.unflatten(2, (heads, -1)), above.unflatten(2, (heads, -1)), stats.squeeze(3)),
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # otherwise the order of dq's sums is random
        dq=dq,
        dk=dk,
        dv=dv,
    )
    return gradient


def parts(packed: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Return views of q, k and v, [B, T, heads, d] each."""
    return packed.unflatten(2, (3, heads, -1)).unbind(2)


def takes(qkv: torch.Tensor, heads: int) -> bool:
    fits = qkv.dtype in HALVES and qkv.size(2) // 3 // heads in FLASH4_HEADS
    return qkv.is_cuda and fits and is_there() and _is_hopper(qkv.device)


@functools.cache
def is_there() -> bool:
    try:
        return bool(metadata.version(PACKAGE))
    except metadata.PackageNotFoundError:
        return False


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER


@functools.cache
def library() -> Callable[..., Any]:
    """Return the package's backward pass. Imported by the first call, since that takes seconds."""
    keep_kernels()
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # raised by the package whenever it compiles
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd


def keep_kernels() -> None:
    """Enable the package's cache of compiled kernels. Without it, every process compiles them, and every row of a
    ladder is a process. The user's settings take precedence, and if the folder cannot be made there is no cache."""
    if CACHE in os.environ:
        return
    folder = os.environ.get(FOLDER, str(user_cache() / PACKAGE))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return
    os.environ.update({CACHE: "1", FOLDER: folder})
