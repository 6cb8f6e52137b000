"""Matmuls by cuBLASLt, with the algorithm that is fastest on this device, and with epilogues.

    lt = library(a.device)                               # None if torch has no CUDA, or another version of cuBLASLt
    out = lt.product(a, b, out_dtype=torch.float32)      # a [M, K], b [K, N] in 16 bits; either may be transposed
    lt.product(a, b, bias=bias, epilogue=GELU_AUX_BIAS, aux=hidden)      # None if it has no algorithm for these

torch asks cuBLASLt for one algorithm and uses it. Here the first call of a form (sizes, layouts, dtypes, epilogue)
times the algorithms that cuBLASLt proposes, on the actual operands, and later calls use the fastest. The library is the
one that torch has loaded. It is called through ctypes, because torch's own functions neither choose an algorithm nor
keep GELU's input. A step makes some 150 calls, and the device must not wait for Python: what a call needs is prepared
by the first call of its form, and looked up by a tuple.

cuBLASLt is column-major: a row-major product D = A B is the column-major D' = B' A', so the operands are swapped.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from redline.kernels.on_device import on_its_device

# From cublasLt.h and library_types.h; they have not changed between CUDA 11 and 13.
COMPUTE_32F, REAL_32F, REAL_16F, REAL_16BF = 68, 0, 2, 14
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 4, 7, 8, 11, 12
MAX_WORKSPACE_BYTES, REDUCTION_SCHEMES, IN_COMPUTE_TYPE = 1, 3, 2
DEFAULT, BIAS, GELU, AUX = 1, 4, 32, 128
GELU_AUX_BIAS = GELU | AUX | BIAS
TYPES = {torch.bfloat16: REAL_16BF, torch.float16: REAL_16F, torch.float32: REAL_32F}

WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA recommends for Hopper
PROPOSALS = 16
MOST_FORMS = 256  # of a model with fixed sizes there are some dozens; texts of all lengths would be timed for ever
LOOKS = 5
BUSY_CYCLES = 400_000  # of the device's clock, about 0.2 ms
ALIGNMENT = 16  # of rows, in bytes; below it no fast kernels are proposed, and torch's own choice is as good
ADDRESS_ALIGNMENT = 256  # bytes; cuBLASLt's proposals assume it, and torch's allocator guarantees it


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
    """A matrix as cuBLASLt sees its memory: `rows` x `columns` with the leading dimension `ld`, transposed or not."""

    dtype: torch.dtype
    rows: int
    columns: int
    ld: int
    transposed: bool


def operand(matrix: torch.Tensor) -> Operand:
    """Describe a matrix for the swapped product, in which a row-major matrix is its column-major transpose."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if right == 1 and down >= columns:
        return Operand(matrix.dtype, columns, rows, down, transposed=False)
    if down == 1 and right >= rows:
        return Operand(matrix.dtype, rows, columns, right, transposed=True)
    raise ValueError(f"a matrix with strides {(down, right)}: neither rows nor columns lie side by side")


@dataclass(frozen=True)
class Form:
    """The properties of a call for which an algorithm is chosen."""

    first: Operand
    second: Operand
    out: Operand
    epilogue: int
    device: torch.device


STATUSES = {  # cublasStatus_t; engine/memory.py recognises the second by its name
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
}


class LtError(RuntimeError):
    def __init__(self, what: str, status: int | None = None) -> None:
        super().__init__(what if status is None else f"{what}: CUBLAS_STATUS_{STATUSES.get(status, status)}")
        self.no_memory = STATUSES.get(status or 0) == "ALLOC_FAILED"


POINTER, WORD, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
OFTEN_CALLED = {  # with declared types, ctypes accepts plain integers as pointers
    "cublasLtMatmul": (POINTER,) * 14 + (SIZE, POINTER),
    "cublasLtMatmulDescSetAttribute": (POINTER, WORD, POINTER, SIZE),
}


class Library:
    """A cuBLASLt handle, which belongs to the current device, and its plans. `lt`: the functions of cublasLt.h by name,
    as ctypes.CDLL provides them."""

    def __init__(self, lt: Any) -> None:
        self.lt = lt
        for name, types in OFTEN_CALLED.items():
            getattr(lt, name).argtypes = types
        self.matmul = lt.cublasLtMatmul
        self.handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        self.plans: dict[tuple[Any, ...], Plan | None] = {}
        """By form; None where cuBLASLt has no algorithm."""
        self.workspaces: dict[torch.device, torch.Tensor] = {}

    def _call(self, name: str, *words: Any) -> None:
        status = getattr(self.lt, name)(*words)
        if status != 0:
            raise LtError(name, status)

    @on_its_device
    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
        epilogue: int = DEFAULT,
        aux: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Multiply a [M, K] by b [K, N]. `aux` [M, N], contiguous, is written by epilogues that have one. None if there
        is no algorithm for this form, or if it is one form too many: torch's own matmul has to do."""
        shape, other = a.shape, b.shape
        key = (shape, a.stride(), a.dtype, other, b.stride(), b.dtype, out_dtype, epilogue, a.get_device())
        plan = self.plans.get(key)
        if plan is None and (key in self.plans or len(self.plans) >= MOST_FORMS):
            return None
        out = a.new_empty((shape[0], other[1]), dtype=out_dtype)
        pointers = (b.data_ptr(), a.data_ptr(), out.data_ptr())
        try:
            if plan is None:
                form = Form(operand(b), operand(a), operand(out), epilogue, a.device)
                plan = self.plans[key] = Plan(self, form)
            if bias is not None:
                plan.bias.point(bias.data_ptr())
            if aux is not None:
                plan.aux.point(aux.data_ptr())
            chosen = plan.chosen or plan.choose(pointers)
        except LtError as error:
            if error.no_memory:
                raise
            self.plans[key] = None
            return None
        plan.run(pointers, chosen)
        return out

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Return the workspace, which all calls share, since they run one after another on one stream. Another thread
        allocates it: while this thread warms up for a CUDA graph, its allocations belong to the graph, and torch does
        not let them outlive it."""
        if device not in self.workspaces:
            with ThreadPoolExecutor(1) as aside:
                made = aside.submit(lambda: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
            self.workspaces[device] = made.result()
        return self.workspaces[device]


class Plan:
    """The descriptors of one form, and the algorithm chosen for it."""

    def __init__(self, library: Library, form: Form) -> None:
        self.library, self.form = library, form
        self.workspace = library.workspace(form.device)
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.description = ctypes.c_void_p()
        library._call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_32F, REAL_32F)
        self._set(TRANSA, ctypes.c_int32(form.first.transposed))
        self._set(TRANSB, ctypes.c_int32(form.second.transposed))
        self._set(EPILOGUE, ctypes.c_uint32(form.epilogue))
        if form.epilogue & AUX:
            self._set(AUX_LD, ctypes.c_int64(form.out.ld))
        self.bias, self.aux = Attribute(self, BIAS_POINTER), Attribute(self, AUX_POINTER)
        self.layouts = tuple(self._layout(one) for one in (form.first, form.second, form.out))
        self.at = tuple(layout.value for layout in self.layouts)
        self.begin = library.handle.value, self.description.value, ctypes.addressof(self.one)
        self.zero_at, self.space, self.index = ctypes.addressof(self.zero), self.workspace.data_ptr(), form.device.index
        self.chosen: Proposal | None = None
        self.seconds: dict[int, float] = {}
        """Median seconds by the number of the proposal, for those that ran; 0 is the one torch would use."""

    def _set(self, attribute: int, value: Any) -> None:
        """Set an attribute. cuBLASLt copies `value`, a ctypes object."""
        where, size = ctypes.addressof(value), ctypes.sizeof(value)
        self.library._call("cublasLtMatmulDescSetAttribute", self.description.value, attribute, where, size)

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
            if not may_add_in_16_bits(self.form.first.dtype):
                scheme = ctypes.c_uint32(IN_COMPUTE_TYPE)
                call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    REDUCTION_SCHEMES,
                    ctypes.byref(scheme),
                    ctypes.c_size_t(ctypes.sizeof(scheme)),
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
        """Time the proposals in turns, so that a GPU that warms up affects all alike, and choose the fastest."""
        found = self.proposals()
        if not found:
            raise LtError("cuBLASLt proposes no algorithm")
        times: dict[int, list[float]] = {}
        for number, one in enumerate(found):
            try:
                self._time(pointers, one)
                times[number] = []
            except LtError:  # proposed, and rejected when called
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
        torch.cuda._sleep(BUSY_CYCLES)  # otherwise the launch would be timed, which takes longer than some matmuls
        before.record()
        self.run(pointers, algorithm)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def run(self, pointers: tuple[int, int, int], algorithm: Proposal) -> None:
        a, b, d = pointers
        first, second, out = self.at
        by = ctypes.addressof(algorithm)  # the algorithm is its first field
        where = (a, first, b, second, self.zero_at, d, out, d, out, by, self.space, WORKSPACE_BYTES)
        status = self.library.matmul(*self.begin, *where, stream_of(self.index))
        if status != 0:
            raise LtError("cublasLtMatmul", status)


class Attribute:
    """A pointer in a descriptor, which is set only when it changes."""

    def __init__(self, plan: Plan, name: int) -> None:
        self.plan, self.name, self.value = plan, name, ctypes.c_void_p()

    def point(self, pointer: int) -> None:
        if pointer != self.value.value:
            self.value.value = pointer
            self.plan._set(self.name, self.value)


def stream_of(device: int) -> int:
    """Return the current stream as Inductor's generated code does: making a torch.cuda.Stream takes longer."""
    return torch._C._cuda_getCurrentRawStream(device)


def may_add_in_16_bits(dtype: torch.dtype) -> bool:
    """True unless the user has forbidden that parts of a sum are added up in the output's 16 bits, as torch's own
    matmuls then leave out the algorithms that do. Asked when the first call of a form chooses its algorithm."""
    flags = torch.backends.cuda.matmul
    if dtype == torch.bfloat16:
        return bool(flags.allow_bf16_reduced_precision_reduction)
    return bool(flags.allow_fp16_reduced_precision_reduction)


@functools.cache
def library(device: torch.device) -> Library | None:
    """Return the cuBLASLt that torch has loaded, found by its name; None if there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        with torch.cuda.device(device):
            return Library(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"))
    except OSError:
        return None
    except LtError as error:
        if error.no_memory:  # nothing is remembered, so that a smaller batch may find it
            raise
        return None


def takes(*matrices: torch.Tensor) -> bool:
    """True if the sizes and addresses have fast kernels to choose from."""
    return all(one.data_ptr() % ADDRESS_ALIGNMENT == 0 and _lies_well(one.dtype, one.stride()) for one in matrices)


@functools.lru_cache(maxsize=4096)
def _lies_well(dtype: torch.dtype, stride: tuple[int, ...]) -> bool:
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    return in_16_bits and max(stride) * dtype.itemsize % ALIGNMENT == 0 and min(stride) == 1
