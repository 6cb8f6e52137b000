"""FLOPs and bytes of an operator call, from the shapes that the profiler wrote down.

    work_of("aten::mm", {"Input Dims": [[384, 64], [64, 257]], "Input type": ["float", "float"]})
    -> Work(flops=12_632_064, bytes=..., dtype="fp32")

A product's FLOPs are 2 m n k. Bytes are the least that must cross the memory bus: each input read and each output
written once; a broadcast input counts as often as it is stored. An operator that is not listed has unknown work: None.
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
# Where the left matrix stands.
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
PRODUCTS |= {"redline::product": 0, "redline::gelu_product_backward": 0}
# Rows [M, K] and a weight [N, K].
LAYERS = frozenset(("redline::product_and_bias", "redline::product_and_gelu", "redline::gelu_product"))
# GELU's input is written or read beside the product.
TWO_OF_THEM = frozenset(("redline::product_and_gelu", "redline::gelu_product", "redline::gelu_product_backward"))
FUSED_BACKWARD = 2.5  # a fused kernel computes the scores again: five products where the forward has two


@dataclass(frozen=True)
class Fused:
    """A fused attention operator: where its queries stand, and whether they are causal."""

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
# Their output is as large as their largest input.
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
    """0 for what is no product: its arithmetic never decides."""
    bytes: float
    dtype: str | None


def work_of(name: str, arguments: Mapping[str, Any], parameter_bytes: int | None = None) -> Work | None:
    """`parameter_bytes`: of one number of a parameter. The profiler writes down no types for lists of tensors, and
    those that are listed here are lists of parameters, their gradients and their moments."""
    if "kernel_num_gb" in arguments:  # Inductor's own count of a kernel it wrote
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
        return Work(
            0, 2 * sum(sizes[:4]) - sizes[1], None
        )  # weights, gradients, two moments; all written but gradients
    if name in READS and sizes:
        return Work(0, sum(sizes), None)
    if name in OVERWRITES and len(sizes) == 2:
        return Work(0, sum(sizes), None)
    if name in SAME_SIZE and sizes:
        return Work(0, sum(sizes) + max(sizes), None)
    return None


def _product(dims: list[list[int]], kind: str, matrices: int) -> Work | None:
    """`matrices`: of the product's size, that are written or read."""
    left, right = dims[0], dims[1]
    if len(left) < 2 or len(right) < 2 or kind not in DTYPES:
        return None
    dtype, width = DTYPES[kind]
    batch, (m, k), n = math.prod(left[:-2]), left[-2:], right[-1]
    result = max(width, 2)  # products of 8-bit numbers come out in 16
    return Work(2 * batch * m * n * k, batch * (width * (m * k + k * n) + matrices * result * m * n), dtype)


def _attention(fused: Fused, dims: list[list[int]], types: list[str], values: list[str]) -> Work | None:
    query, key = dims[fused.query], dims[fused.query + 1]
    if len(query) != 4 or len(key) != 4 or len(values) <= fused.causal or types[fused.query] not in DTYPES:
        return None
    dtype, width = DTYPES[types[fused.query]]
    batch, heads, rows, depth = query
    # Causal: row i sees i + 1 columns. As predict/flops.py counts what a fused kernel executes.
    pairs = rows * (rows + 1) / 2 if values[fused.causal] == "True" else rows * key[2]
    forward = fused.passes == 1
    tensors = 2 * (math.prod(query) + math.prod(key)) if forward else 4 * (math.prod(query) + math.prod(key))
    return Work(fused.passes * 4 * batch * heads * pairs * depth, width * tensors, dtype)


def _sizes(arguments: Mapping[str, Any], parameter_bytes: int | None) -> Iterator[float]:
    """Bytes of each tensor argument; a list of tensors is one argument. Numbers and options have no dims."""
    strides = arguments.get("Input Strides") or []
    types = arguments["Input type"]
    for index, shape in enumerate(arguments["Input Dims"]):
        kind = types[index] if index < len(types) else ""
        if kind == "TensorList" and shape and parameter_bytes is not None:  # of a long list no shapes are written down
            yield float(parameter_bytes * sum(math.prod(each) for each in shape))
        elif kind in DTYPES and shape:
            stride = strides[index] if index < len(strides) else [1] * len(shape)
            stored = (size for size, step in zip(shape, stride, strict=False) if step)
            yield float(DTYPES[kind][1] * math.prod(stored))
