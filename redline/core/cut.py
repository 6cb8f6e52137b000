"""Which part of a tensor a tensor-parallel rank holds: pure arithmetic.

    cut = Cut(shape=(96, 32), dim=0, parts=3, rank=1, ranks=2)      # queries, keys and values in one matrix
    [run.there for run in cut.runs], cut.piece_shape                -> [16, 48, 80], (48, 32)

A matrix that packs several (`parts`) is cut inside each of them, so that a rank has the queries, the keys AND the
values of its own heads. Parts need not divide evenly: the ranks' shares of a part then differ by one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """A contiguous range along the cut dimension: where it starts in the rank's piece and in the whole tensor."""

    here: int
    there: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    parts: int = 1
    """Equal matrices packed into this one along `dim`."""
    rank: int
    ranks: int

    @property
    def runs(self) -> tuple[Run, ...]:
        each = self.shape[self.dim] // self.parts
        first, end = each * self.rank // self.ranks, each * (self.rank + 1) // self.ranks
        length = end - first
        return tuple(Run(here=n * length, there=n * each + first, length=length) for n in range(self.parts))

    @property
    def size(self) -> int:
        """Size of the rank's piece along `dim`."""
        return sum(run.length for run in self.runs)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])
