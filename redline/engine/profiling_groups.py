"""Assigns operators and kernels to groups of work by the names that torch, Inductor and the libraries give them.

    group_of_operators(["aten::linear", "aten::addmm", "aten::copy_"]) -> "tensor contraction"    # outermost first
    group_of_kernel("triton_poi_fused_gelu_3") -> "element-wise"

Of nested operators the outermost informative one decides: the copy inside an addmm is part of the matmul. Names that
only wrap others (linear, matmul) are not informative. Nothing here imports torch: a recorded trace can be read
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from redline.core.profile import (
    ATTENTION,
    COMMUNICATION,
    CONTRACTION,
    ELEMENTWISE,
    IDLE,
    LOSS,
    MOVEMENT,
    NORMALISATION,
    OPTIMIZER,
    OTHER,
)

# Substrings of names, most specific first. They match operators ("aten::gelu"), autograd's nodes ("GeluBackward0") and
# torch's own annotations ("Optimizer.step#AdamW.step").
OPERATOR_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COMMUNICATION, ("nccl", "c10d::", "c10d_functional::", "gloo:", "all_reduce", "all_gather", "reduce_scatter")),
    (OPTIMIZER, ("optimizer.step#", "optimizer.zero_grad#", "_fused_adam", "_fused_sgd")),
    (
        ATTENTION,
        ("scaled_dot_product", "scaleddotproduct", "flash_attention", "efficient_attention", "flex_attention"),
    ),
    (ATTENTION, ("redline::packed_attention", "redline::flash4_attention")),
    (LOSS, ("cross_entropy", "crossentropy", "nll_loss", "nllloss", "log_softmax", "logsoftmax")),
    (NORMALISATION, ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "batch_norm", "group_norm", "softmax")),
    (NORMALISATION, ("redline::norm_backward",)),
    (ELEMENTWISE, ("redline::gelu_backward", "redline::side_by_side")),
    (MOVEMENT, ("aten::embedding", "embeddingbackward", "embedding_backward", "embedding_dense_backward")),
)
OWN_PRODUCTS = (
    "redline::product",
    "redline::product_and_bias",
    "redline::product_and_gelu",
    "redline::gelu_product",
    "redline::gelu_product_backward",
    "redline::narrow_gelu_product",
    "redline::narrow_gelu_product_backward",
    "redline::narrow_gelu_product_in_both",
    "redline::narrow_gelu_product_backward_in_both",
)  # of redline/kernels
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "addmv", "mv")
CONTRACTIONS = frozenset((*(f"aten::{name}" for name in _PRODUCTS), *OWN_PRODUCTS))
CONTRACTION_WORDS = ("conv1d", "conv2d", "convolution")
COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "clone", "contiguous", "_to_copy", "cat", "stack", "fill_", "zero_", "zeros", "zeros_like", "ones"),
        *("index_select", "index", "gather", "scatter", "scatter_", "index_put_", "_index_put_impl_", "arange"),
        *("repeat", "repeat_interleave", "roll", "flip", "index_add_", "slice_backward", "select_backward", "full"),
    )
)
# Operators that move no data and cost host time only.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "as_strided", "expand"),
        *("select", "slice", "narrow", "split", "chunk", "unbind", "squeeze", "unsqueeze", "flatten", "unflatten"),
        *("alias", "detach", "detach_", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "to", "lift"),
        *(
            "linear",
            "matmul",
            "resolve_conj",
            "resolve_neg",
            "result_type",
            "item",
            "_local_scalar_dense",
            "is_nonzero",
        ),
        *(
            "set_",
            "requires_grad_",
            "view_as",
            "expand_as",
            "type_as",
            "movedim",
            "numpy_T",
            "mT",
            "einsum",
            "new_zeros",
        ),
    )
)
WRAPPERS = ("autograd::engine::", "torch::autograd::", "torch-compiled region", "torchdynamo", "compiledfunction")

# Kernels by name alone: compiled kernels are named after their operators, library kernels after their algorithms.
FUSED = re.compile(r"^(triton_|graph_\d+_cpp_fused|cpp_fused)")
FUSED_NORMS = ("layer_norm", "rms_norm", "softmax", "var_mean", "rsqrt", "native_batch_norm")
FUSED_ARITHMETIC = re.compile(
    r"_(add|sub|mul|div|gelu|silu|tanh|sigmoid|pow|sum|mean|where|exp|neg|relu|sqrt|norm)(_|$)"
)
# Names of torch's flash kernels, cuDNN's and the memory-efficient ones.
ATTENTION_KERNELS = ("attention", "sdpa", "flash_fwd", "flash_bwd", "fmha", "flash::")
KERNEL_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COMMUNICATION, ("nccl",)),
    (MOVEMENT, ("memcpy", "memset", "copy_kernel", "catarray", "fillfunctor", "embedding", "index")),
    (ATTENTION, ATTENTION_KERNELS),
    (CONTRACTION, ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv")),
    (OPTIMIZER, ("multi_tensor_apply", "adam")),
    (LOSS, ("cross_entropy", "nll_loss", "logsoftmax", "log_softmax")),
    (NORMALISATION, ("layer_norm", "layernorm", "rms_norm", "softmax", "gammabeta", "norm_backward")),
    (ELEMENTWISE, ("elementwise", "reduce_kernel", "gelu_backward", "side_by_side")),
)


def group_of_operators(names: Sequence[str]) -> str | None:
    """Return the group of an operator, given its name and those of the operators around it, outermost first; IDLE if
    all of them are bookkeeping, None if there are no operators among them."""
    for name in names:
        found = group_of_operator(name)
        if found not in (None, IDLE):
            return found
    known = [name for name in names if "::" in name or FUSED.match(name)]
    if not known:
        return None
    return IDLE if all(group_of_operator(name) == IDLE or _wraps(name) for name in known) else OTHER


def group_of_operator(name: str) -> str | None:
    """Return the group that a name implies; None for a wrapper, an annotation, or an unlisted operator outside aten."""
    if FUSED.match(name):
        return group_of_fused(name)
    lowered = name.lower()
    for group, words in OPERATOR_WORDS:
        if any(word in lowered for word in words):
            return group
    if name in CONTRACTIONS or any(word in lowered for word in CONTRACTION_WORDS):
        return CONTRACTION
    if name in COPIES:
        return MOVEMENT
    if name in BOOKKEEPING:
        return IDLE
    return ELEMENTWISE if name.startswith("aten::") else None  # the rest of aten is element-wise or a reduction


def group_of_fused(name: str) -> str:
    """Inductor joins the names of what it fused. Attention among them means operators around its kernel."""
    lowered = name.lower()
    if "triton_tem" in lowered and re.search(r"_(mm|bmm|addmm)(_|$)", lowered):
        return CONTRACTION
    if any(word in lowered for word in ("nll_loss", "log_softmax", "cross_entropy")):
        return LOSS
    if any(word in lowered for word in FUSED_NORMS):
        return NORMALISATION
    return ELEMENTWISE if FUSED_ARITHMETIC.search(lowered) else MOVEMENT


def group_of_kernel(name: str) -> str:
    """Classify a kernel by its name alone, if no operator launched it, as in a CUDA graph."""
    if FUSED.match(name):
        return group_of_fused(name)
    lowered = name.lower()
    return next((group for group, words in KERNEL_WORDS if any(word in lowered for word in words)), OTHER)


def is_product(names: Iterable[str]) -> bool:
    """True if there is a batched matmul: together with a softmax in the same module it is written-out attention."""
    return any(name in ("aten::bmm", "aten::baddbmm") for name in names)


def is_softmax(names: Iterable[str]) -> bool:
    return any("softmax" in name.lower() and not re.search("log_?softmax", name.lower()) for name in names)


def _wraps(name: str) -> bool:
    return name.lower().startswith(WRAPPERS)
