"""The part of a tensor that a rank holds, as a checkpoint sees it: chunks of the whole tensor, wherever they lie in it.

    part = part_of(parameter, cut)              # has the size of the whole tensor, but only some of its elements
    part.fill_from(whole);  part.on_host()      # copies from a whole tensor; a copy that the next step does not change

torch's distributed checkpoint (DCP) reads and writes such a tensor chunk by chunk, through the three methods that
DTensor has too. `Part` exists because DTensor's placements cannot describe the thirds of fused queries, keys and values
that are cut by a tensor group and then perhaps by FSDP. A file therefore holds whole tensors under their own names,
whichever ranks wrote it, and each reader takes its own chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from redline.core.cut import Cut

if TYPE_CHECKING:  # takes most of a second to import, and a single process needs none of it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


class Chunk(NamedTuple):
    """Elements that form one block of the whole tensor."""

    offsets: tuple[int, ...]
    numbers: torch.Tensor
    """A view of the rank's own tensor."""


class Part(torch.Tensor):
    chunks: tuple[Chunk, ...]
    requires_grad: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> Part:
        part: Part = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        part.chunks = chunks
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a part is for checkpoints, and computes nothing")

    def fill_from(self, whole: torch.Tensor) -> None:
        for offsets, numbers in self.chunks:
            there = tuple(slice(start, start + size) for start, size in zip(offsets, numbers.shape, strict=True))
            numbers.copy_(whole[there])

    def on_host(self) -> Part:
        copies = tuple(Chunk(offsets, on_host(numbers)) for offsets, numbers in self.chunks)
        return Part(torch.empty(0, dtype=self.dtype), tuple(self.shape), copies)

    # --- called by DCP ------------------------------------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=numbers.size()) for offsets, numbers in self.chunks
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(numbers for offsets, numbers in self.chunks if torch.Size(offsets) == index.offset)


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """True for the tensors of FSDP. If nothing has imported the class, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.on_host() if isinstance(tensor, Part) else tensor.detach().to("cpu", copy=True)


def part_of(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, or the tensor itself if the rank holds all of it. `cut`: how a
    tensor group has cut it; FSDP's sharding is read from the tensor."""
    tensor = tensor if isinstance(tensor, Part) else tensor.detach()
    if not is_dtensor(tensor) and cut is None:
        return tensor
    held, first = rows_held(tensor)
    shape = tuple(tensor.shape) if cut is None else cut.shape
    chunks = [Chunk((first, *[0] * (held.dim() - 1)), held)] if cut is None else chunks_of(held, first, cut)
    return Part(held, shape, tuple(chunk for chunk in chunks if chunk.numbers.numel()))


def rows_held(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the local rows of a tensor that FSDP may have cut by rows, and the index of the first one."""
    if not is_dtensor(tensor):
        return tensor, 0
    (chunk,) = tensor.__create_chunk_list__()
    assert not any(chunk.offsets[1:]), f"FSDP cuts rows, and this is {tensor.placements}"
    return tensor.to_local(), chunk.offsets[0]


def chunks_of(held: torch.Tensor, first: int, cut: Cut) -> Iterator[Chunk]:
    """Yield the chunks of `held`: the rows from `first` on of the piece that the cut leaves to this rank."""
    for run in cut.runs:
        if cut.dim > 0:  # rows are not cut: FSDP's rows are those of the whole tensor
            yield Chunk(
                (first, *[0] * (cut.dim - 1), run.there, *[0] * (held.dim() - cut.dim - 1)),
                held.narrow(cut.dim, run.here, run.length),
            )
            continue
        begin, end = max(run.here, first), min(run.here + run.length, first + held.size(0))
        if begin < end:
            yield Chunk(
                (run.there + begin - run.here, *[0] * (held.dim() - 1)), held.narrow(0, begin - first, end - begin)
            )


def parts_of(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    """Apply `part_of` by name. An optimizer's tensors ("wte.weight.exp_avg") are cut as their parameter is; its
    counters are not."""
    found = {}
    for name, tensor in tensors.items():
        cut = cuts.get(name) or cuts.get(name.rpartition(".")[0])
        found[name] = part_of(tensor, cut if tensor.dim() else None)
    return found
