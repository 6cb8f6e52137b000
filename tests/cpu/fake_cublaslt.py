"""cuBLASLt's functions as redline.kernels.cublaslt calls them, on the memory of the host: it does what it is told.

lt = Library(FakeLt())      # with `stream_of` and `Plan._time` exchanged, which ask a device
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels import cublaslt

DTYPES = {code: dtype for dtype, code in cublaslt.TYPES.items()}


def whole(word: Any) -> int:
    return word if isinstance(word, int) else int(word.value)


def memory(address: int, dtype: torch.dtype, rows: int, columns: int, ld: int) -> torch.Tensor:
    """A matrix as cuBLASLt has it: columns first, `ld` apart."""
    size = ((columns - 1) * ld + rows) * dtype.itemsize
    held = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(held, dtype=dtype).as_strided((rows, columns), (1, ld))


class FakeLt:
    def __init__(self) -> None:
        self.layouts: dict[int, tuple[torch.dtype, int, int, int]] = {}
        self.attributes: dict[int, dict[int, int]] = {}
        self.told: list[int] = []
        """Attributes, in the order in which they were set."""
        self.taken: list[int] = []
        """The first word of the algorithm of each call."""
        functions = [name for name in dir(self) if name.startswith("do_")]
        for name in functions:  # ctypes' functions have attributes of their own, which methods have not
            own = getattr(self, name)
            setattr(self, f"cublasLt{name.removeprefix('do_')}", lambda *words, _own=own: _own(*words) or 0)

    def do_Create(self, handle: Any) -> None:  # noqa: N802  # theirs
        handle._obj.value = 1

    def do_MatmulDescCreate(self, description: Any, compute: int, scale: int) -> None:  # noqa: N802
        description._obj.value = 100 + len(self.attributes)
        self.attributes[description._obj.value] = {}

    def do_MatmulDescSetAttribute(self, description: int, name: int, at: int, size: int) -> None:  # noqa: N802
        self.told.append(name)
        self.attributes[description][name] = int.from_bytes(ctypes.string_at(at, size), "little")

    def do_MatrixLayoutCreate(self, layout: Any, code: int, rows: Any, columns: Any, ld: Any) -> None:  # noqa: N802
        layout._obj.value = 1000 + len(self.layouts)
        self.layouts[layout._obj.value] = (DTYPES[code], whole(rows), whole(columns), whole(ld))

    def do_MatmulPreferenceCreate(self, preference: Any) -> None:  # noqa: N802
        preference._obj.value = 2

    def do_MatmulPreferenceSetAttribute(self, *_: Any) -> None:  # noqa: N802
        pass

    def do_MatmulPreferenceDestroy(self, *_: Any) -> None:  # noqa: N802
        pass

    def do_MatmulAlgoGetHeuristic(self, *words: Any) -> None:  # noqa: N802
        found, count = words[-2], words[-1]._obj
        for number in range(3):
            found[number].algorithm[0] = 70 + number
        count.value = 3

    def do_Matmul(self, *words: Any) -> None:  # noqa: N802
        handle, description, one, a, first, b, second, zero, c, like, d, out, by, space, most, stream = words
        assert all(type(word) is int for word in words), "nothing is left for ctypes to make"
        assert (handle, c, like, most, stream) == (1, d, out, cublaslt.WORKSPACE_BYTES, 0)
        assert [ctypes.c_float.from_address(at).value for at in (one, zero)] == [1.0, 0.0]
        set_to = self.attributes[description]
        left, right, result = (memory(at, *self.layouts[layout]) for at, layout in ((a, first), (b, second), (d, out)))
        left = left.t() if set_to[cublaslt.TRANSA] else left
        right = right.t() if set_to[cublaslt.TRANSB] else right
        product, epilogue = left.float() @ right.float(), set_to[cublaslt.EPILOGUE]
        dtype, rows, columns, _ = self.layouts[out]
        if epilogue & cublaslt.BIAS:
            product += memory(set_to[cublaslt.BIAS_POINTER], left.dtype, rows, 1, rows).float()
        if epilogue & cublaslt.AUX:
            memory(set_to[cublaslt.AUX_POINTER], dtype, rows, columns, set_to[cublaslt.AUX_LD]).copy_(product)
        result.copy_(F.gelu(product, approximate="tanh") if epilogue & cublaslt.GELU else product)
        self.taken.append(ctypes.c_uint64.from_address(by).value)
