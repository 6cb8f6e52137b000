"""FLOPs and bytes of an operator call, from the shapes that the profiler recorded.

    work_of("aten::mm", {"Input Dims": [[384, 64], [64, 257]], "Input type": ["float", "float"]})
    -> Work(flops=12_632_064, bytes=..., dtype="fp32")

A matmul has 2 m n k FLOPs. Bytes are the least that must cross the memory bus: each input read and each output written
once; a broadcast input counts with the size that is stored. The work of an unlisted operator is unknown: None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = {
    "float": ("fp32", 4),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "double": ("fp64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "bool": ("bool", 1),
    "unsigned char": ("uint8", 1),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
}
# Index of the left matrix among the arguments.
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
PRODUCTS |= {"redline::product": 0, "redline::gelu_product_backward": 0}
NARROW = tuple(
    f"redline::narrow_gelu_product{way}{also}" for way in ("", "_backward") for also in ("", "_in_both")
)  # the additional 8-bit output is not counted
# Operators on rows [M, K] and a weight [N, K].
LAYERS = frozenset(("redline::product_and_bias", "redline::product_and_gelu", "redline::gelu_product", *NARROW))
# Besides the product they write or read GELU's input or its slope, which has the same size.
TWO_OF_THEM = LAYERS - {"redline::product_and_bias"} | {"redline::gelu_product_backward"}
FUSED_BACKWARD = 2.5  # a fused kernel recomputes the scores: five matmuls where the forward has two


@dataclass(frozen=True)
class Fused:
    """A fused attention operator: positions of its queries and causal flag, and its cost in forward passes."""

    query: int
    causal: int
    passes: float = 1.0


ATTENTIONS = {
    "aten::_scaled_dot_product_flash_attention": Fused(0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Fused(0, 4),
    "aten::_scaled_dot_product_efficient_attention": Fused(0, 6),
    "aten::_scaled_dot_product_cudnn_attention": Fused(0, 6),
    "aten::_scaled_dot_product_flash_attention_backward": Fused(1, 11, FUSED_BACKWARD),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Fused(1, 7, FUSED_BACKWARD),
    "aten::_scaled_dot_product_efficient_attention_backward": Fused(1, 11, FUSED_BACKWARD),
    "aten::_scaled_dot_product_cudnn_attention_backward": Fused(1, 14, FUSED_BACKWARD),
}
# Operators whose output is as large as their largest input.
SAME_SIZE = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "pow", "sqrt", "exp", "exp_", "tanh", "neg"),
        *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "relu", "masked_fill", "masked_fill_", "where"),
        *("native_layer_norm", "layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data"),
        *("_log_softmax", "_log_softmax_backward_data", "lerp_", "addcmul_", "addcdiv_", "clone"),
    )
) | {"redline::cross_entropy_", "redline::transposed"}
READS = frozenset(("aten::sum", "aten::mean", "aten::linalg_vector_norm", "aten::_foreach_norm"))
OVERWRITES = frozenset(("aten::copy_",))  # the first input is the output, and is not read
FUSED_ADAM = ("aten::_fused_adamw_", "aten::_fused_adam_")
GIGABYTE = 1e9


@dataclass(frozen=True)
class Work:
    flops: float
    """0 for anything but matmuls: other arithmetic is never the bottleneck."""
    bytes: float
    dtype: str | None


def work_of(name: str, arguments: Mapping[str, Any], parameter_bytes: int | None = None) -> Work | None:
    """Return the work of a call, or None. `parameter_bytes`: bytes per element of the parameters. The profiler records
    no dtypes for lists of tensors; those of the operators listed here hold parameters, their gradients and their
    moments."""
    if "kernel_num_gb" in arguments:  # Inductor's own count for a kernel it generated
        return Work(float(arguments.get("kernel_flop") or 0), GIGABYTE * float(arguments["kernel_num_gb"]), None)
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not dims or not types:
        return None
    matrices = 2 if name in TWO_OF_THEM else 1
    if name in PRODUCTS:
        return _product(dims[PRODUCTS[name] :], types[PRODUCTS[name]], matrices)
    if name in LAYERS:
        return _product([dims[0], dims[1][::-1]], types[0], matrices)
    if name in ATTENTIONS:
        return _attention(ATTENTIONS[name], dims, types, arguments.get("Concrete Inputs") or [])
    sizes = list(_sizes(arguments, parameter_bytes))
    if name in FUSED_ADAM and len(sizes) >= 4:
        # Weights, gradients and two moments are read; all but the gradients are written.
        return Work(0, 2 * sum(sizes[:4]) - sizes[1], None)
    if name in READS and sizes:
        return Work(0, sum(sizes), None)
    if name in OVERWRITES and len(sizes) == 2:
        return Work(0, sum(sizes), None)
    if name in SAME_SIZE and sizes:
        return Work(0, sum(sizes) + max(sizes), None)
    return None


def _product(dims: list[list[int]], kind: str, matrices: int) -> Work | None:
    """`matrices`: how many matrices of the product's size are written or read."""
    left, right = dims[0], dims[1]
    if len(left) < 2 or len(right) < 2 or kind not in DTYPES:
        return None
    dtype, width = DTYPES[kind]
    batch, (m, k), n = math.prod(left[:-2]), left[-2:], right[-1]
    result = max(width, 2)  # matmuls of 8-bit operands have 16-bit results
    return Work(2 * batch * m * n * k, batch * (width * (m * k + k * n) + matrices * result * m * n), dtype)


def _attention(fused: Fused, dims: list[list[int]], types: list[str], values: list[str]) -> Work | None:
    query, key = dims[fused.query], dims[fused.query + 1]
    if len(query) != 4 or len(key) != 4 or len(values) <= fused.causal or types[fused.query] not in DTYPES:
        return None
    dtype, width = DTYPES[types[fused.query]]
    batch, heads, rows, depth = query
    # Causal: row i sees i + 1 columns. predict/flops.py counts the work of a fused kernel in the same way.
    pairs = rows * (rows + 1) / 2 if values[fused.causal] == "True" else rows * key[2]
    forward = fused.passes == 1
    tensors = 2 * (math.prod(query) + math.prod(key)) if forward else 4 * (math.prod(query) + math.prod(key))
    return Work(fused.passes * 4 * batch * heads * pairs * depth, width * tensors, dtype)


def _sizes(arguments: Mapping[str, Any], parameter_bytes: int | None) -> Iterator[float]:
    """Yield the bytes of each tensor argument; a list of tensors is one argument. Numbers and options have no dims."""
    strides = arguments.get("Input Strides") or []
    types = arguments["Input type"]
    for index, shape in enumerate(arguments["Input Dims"]):
        kind = types[index] if index < len(types) else ""
        if kind == "TensorList" and shape and parameter_bytes is not None:  # no shapes are recorded for long lists
            yield float(parameter_bytes * sum(math.prod(each) for each in shape))
        elif kind in DTYPES and shape:
            stride = strides[index] if index < len(strides) else [1] * len(shape)
            stored = (size for size, step in zip(shape, stride, strict=False) if step)
            yield float(DTYPES[kind][1] * math.prod(stored))
