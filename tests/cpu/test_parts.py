"""Parts of tensors and the whole: what a tensor group and FSDP together leave to a rank, without any process.

A tensor that FSDP cut is stood in for by its rows: `chunks_of` gets them as `rows_held` would give them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from redline.core.cut import Cut
from redline.engine.parts import Part, chunks_of, on_host, part_of, parts_of
from redline.engine.shard import piece_of, put
from redline.engine.tensor_files import open_sharded

CUTS = {
    "qkv": {"shape": (12, 5), "dim": 0, "parts": 3},
    "bias": {"shape": (12,), "dim": 0, "parts": 3},
    "by inputs": {"shape": (5, 8), "dim": 1},
    "uneven": {"shape": (7, 3), "dim": 0},
}


def whole_of(cut: Cut) -> torch.Tensor:
    return torch.arange(float(torch.Size(cut.shape).numel())).view(cut.shape)


def pieces(ranks: int, shards: int, **cut: object) -> list[Part]:
    """Of every rank: a tensor group's piece, cut again by rows as FSDP does."""
    found = []
    for rank in range(ranks):
        own = Cut(**cut, rank=rank, ranks=ranks)  # type: ignore[arg-type]
        first = 0
        for rows in torch.zeros(own.piece_shape).chunk(shards):
            found.append(Part(rows, own.shape, tuple(chunks_of(rows, first, own))))
            first += rows.size(0)
    return found


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 1), (2, 2), (2, 3), (4, 2)], ids=str)
def test_parts_are_the_whole(name: str, ranks: int, shards: int) -> None:
    cut = Cut(**CUTS[name], rank=0, ranks=ranks)  # type: ignore[arg-type]
    whole, again = whole_of(cut), torch.full(cut.shape, -1.0)
    count = 0
    for part in pieces(ranks, shards, **CUTS[name]):
        assert part.shape == whole.shape
        put(part, whole)
        for offsets, numbers in part.chunks:
            again[tuple(slice(o, o + n) for o, n in zip(offsets, numbers.shape, strict=True))] = numbers
            count += numbers.numel()
    assert torch.equal(again, whole)
    assert count == whole.numel()  # nobody holds another's


@pytest.mark.parametrize("name", CUTS)
def test_a_piece_is_what_is_computed_with(name: str) -> None:
    cut = Cut(**CUTS[name], rank=1, ranks=2)  # type: ignore[arg-type]
    held = torch.zeros(cut.piece_shape)
    put(part_of(held, cut), whole_of(cut))
    assert torch.equal(held, piece_of(whole_of(cut), cut))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", CUTS)
def test_a_file_holds_whole_tensors_whoever_wrote_it(name: str, tmp_path: Path) -> None:
    """Written by one rank in parts, and read whole, or by another layout in its own parts."""
    cut = Cut(**CUTS[name], rank=0, ranks=1)  # type: ignore[arg-type]
    whole = whole_of(cut)
    save({"a": part_of(whole.clone(), cut)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    saved = open_sharded(tmp_path)
    assert torch.equal(saved["a"], whole)
    for part in pieces(2, 2, **CUTS[name]):
        saved.read_into({"a": part})
        for offsets, numbers in part.chunks:
            there = tuple(slice(o, o + n) for o, n in zip(offsets, numbers.shape, strict=True))
            assert torch.equal(numbers, whole[there])


def test_what_is_whole_is_no_part() -> None:
    cut = Cut(**CUTS["qkv"], rank=0, ranks=2)  # type: ignore[arg-type]
    tensors = {"w": torch.zeros(6, 5), "w.exp_avg": torch.zeros(6, 5), "w.step": torch.zeros(()), "ln": torch.zeros(5)}
    found = parts_of(tensors, {"w": cut})
    assert {name for name, tensor in found.items() if isinstance(tensor, Part)} == {"w", "w.exp_avg"}
    assert found["w"].shape == found["w.exp_avg"].shape == (12, 5)


def test_a_copy_is_left_alone_by_the_next_step() -> None:
    held = torch.zeros(6, 5)
    copy = on_host(part_of(held, Cut(**CUTS["qkv"], rank=0, ranks=2)))  # type: ignore[arg-type]
    held += 1
    assert isinstance(copy, Part)
    assert all(not numbers.any() for _, numbers in copy.chunks)


def test_a_part_computes_nothing() -> None:
    part = part_of(torch.zeros(6, 5), Cut(**CUTS["qkv"], rank=0, ranks=2))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="for checkpoints"):
        part + 1
