"""Products of two matrices by cuBLASLt: the algorithm that was fastest here, and what it can do on its way out.

    lt = library()                                      # None where torch has no CUDA, or another version of it
    out = lt.product(a, b, out_dtype=torch.float32)      # a [M, K], b [K, N] in 16 bits; either may be transposed
    lt.product(a, b, bias=bias, epilogue=GELU_AUX_BIAS, aux=hidden)

torch asks cuBLASLt for one algorithm and takes it. Here the first call of a form (sizes, layouts, types, epilogue)
times those that cuBLASLt proposes, on the very operands, and later calls take the fastest. Through ctypes, because
torch's own calls neither choose nor keep GELU's input; the library is the one that torch has loaded.

cuBLASLt counts columns first: a row-major product D = A B is the column-major D' = B' A', so operands change places.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from dataclasses import dataclass
from typing import Any

import torch

# From cublasLt.h and library_types.h; they have not changed between CUDA 11 and 13.
COMPUTE_32F, REAL_32F, REAL_16F, REAL_16BF = 68, 0, 2, 14
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 4, 7, 8, 11, 12
MAX_WORKSPACE_BYTES = 1
DEFAULT, BIAS, GELU_AUX_BIAS = 1, 4, 32 | 128 | 4
TYPES = {torch.bfloat16: REAL_16BF, torch.float16: REAL_16F, torch.float32: REAL_32F}

WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA recommends for Hopper
PROPOSALS = 16
LOOKS = 5
ALIGNMENT = 16  # bytes; below it the fast kernels are not proposed, and torch's own choice is as good


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Operand:
    """A matrix as cuBLASLt sees its memory: `rows` x `columns`, columns apart by `ld`, to be transposed or not."""

    dtype: torch.dtype
    rows: int
    columns: int
    ld: int
    transposed: bool


def operand(matrix: torch.Tensor) -> Operand:
    """Of a row-major matrix the transposed one, which is what the swapped product wants."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if right == 1 and down >= columns:
        return Operand(matrix.dtype, columns, rows, down, transposed=False)
    if down == 1 and right >= rows:
        return Operand(matrix.dtype, rows, columns, right, transposed=True)
    raise ValueError(f"a matrix with strides {(down, right)}: neither rows nor columns lie side by side")


@dataclass(frozen=True)
class Form:
    """What an algorithm is chosen for."""

    first: Operand
    second: Operand
    out: Operand
    epilogue: int
    device: torch.device


class LtError(RuntimeError):
    pass


class Library:
    def __init__(self, name: str) -> None:
        self.lt = ctypes.CDLL(name)
        self.handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        self.plans: dict[Form, Plan] = {}
        self.workspaces: dict[torch.device, torch.Tensor] = {}

    def _call(self, name: str, *words: Any) -> None:
        status = getattr(self.lt, name)(*words)
        if status != 0:
            raise LtError(f"{name}: status {status}")

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
        epilogue: int = DEFAULT,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """a [M, K] b [K, N] -> [M, N]; `aux` [M, N] is written by epilogues that have one."""
        out = torch.empty(a.size(0), b.size(1), dtype=out_dtype or a.dtype, device=a.device)
        form = Form(operand(b), operand(a), operand(out), epilogue, a.device)
        plan = self.plans.get(form)
        if plan is None:
            plan = self.plans[form] = Plan(self, form)
        pointers = (b.data_ptr(), a.data_ptr(), out.data_ptr())
        plan.attach(bias, aux)
        chosen = plan.chosen or plan.choose(pointers)
        plan.run(pointers, chosen)
        return out

    def workspace(self, device: torch.device) -> torch.Tensor:
        """One for all: calls follow each other on one stream."""
        if device not in self.workspaces:
            self.workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self.workspaces[device]


class Plan:
    """Descriptors of one form, and the algorithm chosen for it."""

    def __init__(self, library: Library, form: Form) -> None:
        self.library, self.form = library, form
        self.workspace = library.workspace(form.device)
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.description = ctypes.c_void_p()
        library._call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_32F, REAL_32F)
        self._set(TRANSA, ctypes.c_int32(form.first.transposed))
        self._set(TRANSB, ctypes.c_int32(form.second.transposed))
        self._set(EPILOGUE, ctypes.c_uint32(form.epilogue))
        self.layouts = tuple(self._layout(one) for one in (form.first, form.second, form.out))
        self.chosen: Proposal | None = None
        self.seconds: dict[int, float] = {}
        """By the number of the proposal, of those that ran; 0 is what torch would take."""

    def _set(self, attribute: int, value: Any) -> None:
        self.library._call(
            "cublasLtMatmulDescSetAttribute",
            self.description,
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def _layout(self, one: Operand) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self.library._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            TYPES[one.dtype],
            ctypes.c_uint64(one.rows),
            ctypes.c_uint64(one.columns),
            ctypes.c_int64(one.ld),
        )
        return layout

    def attach(self, bias: torch.Tensor | None, aux: torch.Tensor | None) -> None:
        if bias is not None:
            self._set(BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        if aux is not None:
            self._set(AUX_POINTER, ctypes.c_void_p(aux.data_ptr()))
            self._set(AUX_LD, ctypes.c_int64(aux.stride(0)))

    def proposals(self) -> list[Proposal]:
        preference, found = ctypes.c_void_p(), (Proposal * PROPOSALS)()
        count, most = ctypes.c_int(), ctypes.c_uint64(WORKSPACE_BYTES)
        call, (first, second, out) = self.library._call, self.layouts
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference,
                MAX_WORKSPACE_BYTES,
                ctypes.byref(most),
                ctypes.c_size_t(ctypes.sizeof(most)),
            )
            call(
                "cublasLtMatmulAlgoGetHeuristic",
                self.library.handle,
                self.description,
                first,
                second,
                out,
                out,
                preference,
                PROPOSALS,
                found,
                ctypes.byref(count),
            )
        finally:
            call("cublasLtMatmulPreferenceDestroy", preference)
        return [one for one in found[: count.value] if one.state == 0]

    def choose(self, pointers: tuple[int, int, int]) -> Proposal:
        """Times what is proposed, in turns, so that a card that warms up is warm for all."""
        found = self.proposals()
        if not found:
            raise LtError("cuBLASLt proposes no algorithm")
        times: dict[int, list[float]] = {}
        for number, one in enumerate(found):
            try:
                self._time(pointers, one)
                times[number] = []
            except LtError:  # proposed, and refused when it is called
                continue
        for _ in range(LOOKS):
            for number, seconds in times.items():
                seconds.append(self._time(pointers, found[number]))
        if not times:
            raise LtError("cuBLASLt runs none of the algorithms that it proposes")
        self.seconds = {number: statistics.median(seconds) for number, seconds in times.items()}
        self.chosen = found[min(self.seconds, key=self.seconds.__getitem__)]
        return self.chosen

    def _time(self, pointers: tuple[int, int, int], algorithm: Proposal) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.run(pointers, algorithm)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def run(self, pointers: tuple[int, int, int], algorithm: Proposal) -> None:
        first, second, out = pointers
        layout_first, layout_second, layout_out = self.layouts
        self.library._call(
            "cublasLtMatmul",
            self.library.handle,
            self.description,
            ctypes.byref(self.one),
            ctypes.c_void_p(first),
            layout_first,
            ctypes.c_void_p(second),
            layout_second,
            ctypes.byref(self.zero),
            ctypes.c_void_p(out),
            layout_out,
            ctypes.c_void_p(out),
            layout_out,
            ctypes.byref(algorithm.algorithm),
            ctypes.c_void_p(self.workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(self.form.device).cuda_stream),
        )


@functools.cache
def library() -> Library | None:
    """The cuBLASLt that torch has loaded, found by its name; None where there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return Library(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except (OSError, LtError):
        return None


def takes(*matrices: torch.Tensor) -> bool:
    """Sizes and addresses for which there are fast kernels to choose from."""
    return all(
        one.dtype in (torch.bfloat16, torch.float16)
        and one.data_ptr() % ALIGNMENT == 0
        and max(one.stride()) * one.element_size() % ALIGNMENT == 0
        and min(one.stride()) == 1
        for one in matrices
    )
