"""torch's FLOP counter with what it lacks: formulas for recurrent layers, grouped matmuls and redline's own operators,
and the names of operators that multiply but have no formula.

    with Counter() as counter:
        loss(batch).backward()
    counter.get_total_flops(), counter.uncounted       # 6_690_816, () or ("aten._fft_r2c", ...)

A multiply-add is two FLOPs. torch counts an unknown operator as zero, so if `uncounted` is not empty the total is too
low by an unknown amount and means nothing. Elementwise operators, sums and copies are left out by the convention of MFU
(docs/flops.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
Formula = Callable[..., int]
Size = Sequence[int]


# --- formulas: tensors are passed as their sizes ----------------------------------------------------------------------


def _layer(rows: Size, *weights: Size) -> int:
    """FLOPs of multiplying every row by every weight."""
    return 2 * math.prod(rows[:-1]) * sum(map(math.prod, weights))


def _matrices(weights: Sequence[Size]) -> list[Size]:
    return [size for size in weights if len(size) == 2]  # not the biases


def _cudnn_rnn(rows: Size, weights: Sequence[Size], *_: Any, **__: Any) -> int:
    """All layers and directions at once, with projections among the weights: each position meets each matrix once."""
    return _layer(rows, *_matrices(weights))


def _cudnn_rnn_backward(rows: Size, weights: Sequence[Size], *_: Any, **__: Any) -> int:
    """Gradients of inputs and weights. Those of the first input and state are computed even if nobody needs them."""
    return 2 * _layer(rows, *_matrices(weights))


def _mkldnn_rnn(rows: Size, of_input: Size, of_state: Size, *_: Any, **__: Any) -> int:
    """One layer in one direction."""
    return _layer(rows, of_input, of_state)


def _mkldnn_rnn_backward(rows: Size, of_input: Size, of_state: Size, *_: Any, **__: Any) -> int:
    return 2 * _layer(rows, of_input, of_state)


def _matrix_vector(matrix: Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _added_matrix_vector(_added: Size, matrix: Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _added_product(_added: Size, a: Size, b: Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _grouped(a: Size, b: Size, *_: Any, **__: Any) -> int:
    """Where only a has a dimension for the groups, each group has its own part of the columns of b."""
    shared_columns = len(a) == 3 and len(b) == 2
    return 2 * math.prod(a[-2:] if shared_columns else a) * b[-1]


def _our_product(a: Size, b: Size, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def _our_layer(rows: Size, weight: Size, *_: Any, **__: Any) -> int:
    return _layer(rows, weight)


def _packed_attention(qkv: Size, *_: Any, **__: Any) -> int:
    """The whole square, as torch counts attention: two matmuls of T x T with the width of all heads."""
    batch, tokens, three_widths = qkv
    return 4 * batch * tokens * tokens * three_widths // 3


def _packed_attention_backward(_above: Size, qkv: Size, *_: Any, **__: Any) -> int:
    return 2 * _packed_attention(qkv)


FORMULAS: dict[Any, Formula] = {
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    aten.mkldnn_rnn_layer: _mkldnn_rnn,
    aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward,
    aten.mv: _matrix_vector,
    **dict.fromkeys((aten.addmv, aten.addmv_), _added_matrix_vector),
    **dict.fromkeys((aten.addmm_, aten._addmm_activation, aten.addbmm, aten.addbmm_, aten.baddbmm_), _added_product),
    aten._grouped_mm: _grouped,
    aten._scaled_grouped_mm: _grouped,
}
OURS: dict[str, Formula] = {
    "product": _our_product,
    **dict.fromkeys(("product_and_bias", "product_and_gelu", "gelu_product", "gelu_product_backward"), _our_layer),
    **dict.fromkeys(("narrow_gelu_product", "narrow_gelu_product_in_both"), _our_layer),
    **dict.fromkeys(("narrow_gelu_product_backward", "narrow_gelu_product_backward_in_both"), _our_layer),
    **dict.fromkeys(("packed_attention", "flash4_attention"), _packed_attention),
    **dict.fromkeys(("packed_attention_backward", "flash4_attention_backward"), _packed_attention_backward),
}


# --- operators without a formula --------------------------------------------------------------------------------------

# torch's own operators that multiply: one whose name begins like this and that has no formula is reported.
MULTIPLYING = (
    *("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn", "_lstm_mps", "lstm_mps_backward"),
    *("cudnn_convolution", "miopen_convolution", "miopen_depthwise", "mkldnn_convolution", "mkldnn_linear"),
    *("_slow_conv", "slow_conv", "_conv_depthwise", "conv_depthwise", "conv_tbc", "_convolution_double_backward"),
    *("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_native_multi_head_attention"),
    *("_int_mm", "_weight_int", "_scaled_mm", "_sparse_mm", "_sparse_addmm", "_sparse_semi_structured", "sspaddmm"),
    *("_trilinear", "_cdist_", "_fft_", "linalg_", "_linalg_"),
    *("cholesky", "triangular_solve", "lu_solve", "geqrf", "ormqr", "_transformer_encoder_layer"),
)
NOT_MULTIPLYING = (
    *("_cudnn_rnn_flatten_weight", "_linalg_check_errors"),
    *("linalg_vector_norm", "linalg__powsum", "linalg_cross", "linalg_diagonal"),
)
# What the operators of any other library do is unknown. redline's own matmuls have formulas.
KNOWN_LIBRARIES = (
    *("aten", "prim", "prims", "rngprims", "profiler", "streams", "fsdp", "_dtensor"),
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    "redline",
)


def lacks_formula(operator: Any) -> bool:
    """True if an operator without a formula may do work that a count must include."""
    library, _, name = operator._qualified_op_name.partition("::")
    if library not in KNOWN_LIBRARIES:
        return True
    return library == "aten" and name.startswith(MULTIPLYING) and not name.startswith(NOT_MULTIPLYING)


def incomplete(uncounted: Sequence[str]) -> str:
    return f"FLOPs are incomplete, operators without a formula: {', '.join(uncounted)}"


def ours() -> dict[Any, Formula]:
    """Return redline's formulas by operator, for operators whose file has been imported."""
    return {getattr(torch.ops.redline, name): each for name, each in OURS.items() if hasattr(torch.ops.redline, name)}


class Counter(FlopCounterMode):
    def __init__(self, more: dict[Any, Formula] | None = None) -> None:
        super().__init__(display=False, custom_mapping={**FORMULAS, **ours(), **(more or {})})
        self._uncounted: dict[str, None] = {}

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names of operators that ran but have no formula, in the order of their first call."""
        return tuple(self._uncounted)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet not in self.flop_registry and hasattr(func_packet, "_qualified_op_name"):
            if lacks_formula(func_packet):
                self._uncounted[str(func_packet)] = None
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
