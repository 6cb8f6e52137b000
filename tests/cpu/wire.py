"""What a step sends and what it holds, seen from below: every operator of torch's passes through here.

with Wire() as wire: step()              # wire.seen() -> {"all-gather": (calls, bytes), ...}
with Storages() as made: build()         # made.bytes, made.peak: of memory that was asked for inside and lives
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.predict.communication import ALL_GATHER, ALL_REDUCE, POINT, REDUCE_SCATTER

# What each operator is, and where its whole tensor stands: argument 0 or 1, or the result.
OPERATORS = {
    "c10d::allreduce_": (ALL_REDUCE, 0),
    "c10d::_allgather_base_": (ALL_GATHER, 0),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1),
    "c10d::send": (POINT, 0),
    "_c10d_functional::all_reduce": (ALL_REDUCE, 0),
    "_c10d_functional::reduce_scatter_tensor": (REDUCE_SCATTER, 0),
    "_c10d_functional::all_gather_into_tensor": (ALL_GATHER, None),
}
# Not traffic of this GPU's sending: results awaited or wrapped, and what another sends.
SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::recv_"}


def size(tensors: Any) -> int:
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in listed)


class Wire(TorchDispatchMode):
    """Collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it goes on to what it consists of, and to the collectives
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name
        if "c10d" in name and name not in SILENT:
            kind, place = OPERATORS[name]  # one that is not listed must not go uncounted
            self.calls[kind] += 1
            self.bytes[kind] += size(result if place is None else args[place])
        return result

    def seen(self) -> dict[str, tuple[int, int]]:
        return {kind: (self.calls[kind], self.bytes[kind]) for kind in self.calls}


class Storages(TorchDispatchMode):
    """Memory of the host that operators asked for since, as long as somebody holds it. `look` is called after each."""

    def __init__(self, look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.look = look
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        """By address: the storage, and whether it was asked for in here."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self._note((args, kwargs), new=False)
        result = operator(*args, **(kwargs or {}))
        self._note(result, new=True)
        self.peak = max(self.peak, self.bytes)
        if self.look is not None:
            self.look()
        return result

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._living())  # FSDP resizes to 0 what it gives back

    def _living(self) -> Iterator[Any]:
        for reference, new in list(self._known.values()):
            if new and (storage := reference()) is not None:
                yield storage

    def _note(self, tree: Any, new: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            at = storage._cdata
            if at not in self._known:
                self._known[at] = (weakref.ref(storage, lambda _, at=at: self._known.pop(at, None)), new)
