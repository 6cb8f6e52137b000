"""Batches of a prepared data set: every window of an epoch exactly once, in an order decided by a seed.

    loader = Loader(data.train, seed=1337, micro_batch=16, sequence=1024, device=device, workers=2)
    batch = next(loader)                                                    # [2, B, T] on the device
    loader.position, loader.waited_seconds, loader.documents                # one integer resumes it exactly

Sample s of a run is window permute(s mod windows) of epoch s // windows. Rank r of R takes samples (iR + r)B to
(iR + r + 1)B as its batch i. So a global batch holds the same samples for any number of ranks and workers, batches
continue across the end of an epoch, and resuming means starting at another sample.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import numpy
import torch

from redline.core.errors import UserError
from redline.core.workload import check_positive
from redline.data.batches import Batches, stream_batches
from redline.data.shards import Split

ROUNDS = 6


@final
@dataclass(frozen=True, kw_only=True)
class Permutation:
    """A seeded permutation of 0 to size - 1, with random access and no table.

    A shuffled table would take 8 bytes per window in every process, and a new one each epoch. A Feistel network
    permutes the numbers of 2k bits whatever its round function is; a value that lands outside 0 to size - 1 goes
    through again until it lands inside (fewer than four times on average), so that `size` numbers are permuted.
    """

    size: int
    seed: int
    epoch: int

    def at(self, places: numpy.ndarray) -> numpy.ndarray:
        """Return the elements at these places, each from 0 to size - 1."""
        half = max(1, -(-(self.size - 1).bit_length() // 2))
        keys = numpy.random.SeedSequence((self.seed, self.epoch)).generate_state(ROUNDS, numpy.uint64)
        values = feistel(places.astype(numpy.uint64), keys, half)
        while (outside := values >= self.size).any():
            values[outside] = feistel(values[outside], keys, half)
        return values.astype(numpy.int64)


def feistel(values: numpy.ndarray, keys: numpy.ndarray, half: int) -> numpy.ndarray:
    """Map numbers of 2 * half bits one to one: each round changes one half depending on the other."""
    shift, mask = numpy.uint64(half), numpy.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (scramble(right ^ key) & mask)
    mixed: numpy.ndarray = left << shift | right
    return mixed


def scramble(values: numpy.ndarray) -> numpy.ndarray:
    """Apply the finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: numpy.ndarray = values ^ (values >> numpy.uint64(31))
    return mixed


@final
@dataclass(frozen=True, kw_only=True)
class WindowBatches(Batches):
    """A map from i to this rank's i-th batch, counted from sample `start`."""

    split: Split
    seed: int
    micro_batch: int
    sequence: int
    rank: int = 0
    ranks: int = 1
    start: int = 0
    """The sample at which batch 0 of rank 0 begins."""

    def __getitem__(self, index: int) -> torch.Tensor:
        starts = [window * self.sequence for window in self.windows_of(index)]
        windows = self.split.gather(starts, self.sequence + 1)  # [B, T + 1]
        batch = torch.empty((2, self.micro_batch, self.sequence), dtype=torch.int64)  # embedding and loss take int64
        into = batch.numpy()
        into[0], into[1] = windows[:, :-1], windows[:, 1:]
        return batch  # [2, B, T]

    def windows_of(self, index: int) -> list[int]:
        """Return the windows of the split that make up batch `index`."""
        first = self.start + (index * self.ranks + self.rank) * self.micro_batch
        epochs, places = numpy.divmod(numpy.arange(first, first + self.micro_batch), self.windows)
        found = numpy.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = epochs == epoch
            found[inside] = Permutation(size=self.windows, seed=self.seed, epoch=epoch).at(places[inside])
        return [int(window) for window in found]

    def documents_of(self, index: int) -> int:
        """Count the documents that end among the inputs of batch `index`: over an epoch, all that end in a window."""
        starts = [window * self.sequence for window in self.windows_of(index)]
        before = self.split.documents_before
        return sum(before(start + self.sequence) - before(start) for start in starts)

    @property
    def windows(self) -> int:
        """Windows in an epoch. The last token is only a target; the fewer than T tokens after that go unused."""
        return (self.split.tokens - 1) // self.sequence

    def open(self) -> None:
        for name in ("micro_batch", "sequence", "ranks"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.rank < self.ranks or self.start < 0:
            raise UserError(
                f"there is no rank {self.rank} of {self.ranks} from sample {self.start}",
                "ranks count from 0, and so do samples",
                "check rank, ranks and position",
            )
        if self.windows < 1:
            raise UserError(
                "the data is too short",
                f"it has {self.split.tokens:,} tokens; a sequence of {self.sequence:,} needs {self.sequence + 1:,}",
                "prepare more text, or use a shorter sequence",
            )
        for shard in self.split.shards:
            shard.check_unchanged()


@final
class Loader:
    """An endless iterator over this rank's batches on the device. Workers make them ahead; waiting is timed."""

    def __init__(
        self,
        split: Split,
        *,
        seed: int,
        micro_batch: int,
        sequence: int,
        device: torch.device,
        workers: int = 2,
        rank: int = 0,
        ranks: int = 1,
        position: int = 0,
    ) -> None:
        self.batches = WindowBatches(
            split=split,
            seed=seed,
            micro_batch=micro_batch,
            sequence=sequence,
            rank=rank,
            ranks=ranks,
            start=position,
        )
        self._stream = stream_batches(self.batches, device, workers)
        self._taken = 0
        self.waited_seconds = 0.0
        """Seconds that callers of next() have spent waiting, including the workers' start for the first batch."""
        self.documents = 0
        """Documents that have ended in this rank's batches since the starting `position`."""

    @property
    def position(self) -> int:
        """The first sample that no rank has taken, provided every rank has taken as many batches as this one."""
        return self.batches.start + self._taken * self.batches.ranks * self.batches.micro_batch

    @property
    def epoch(self) -> float:
        """The position in epochs: 1.5 is half-way through the second."""
        return self.position / self.batches.windows

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> torch.Tensor:
        started = time.perf_counter()
        batch: torch.Tensor = next(self._stream)
        self.waited_seconds += time.perf_counter() - started
        self.documents += self.batches.documents_of(self._taken)
        self._taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Plain JSON. Loader(..., position=state["position"]) resumes exactly, with any number of ranks or workers."""
        return {"position": self.position, "seed": self.batches.seed, "sequence": self.batches.sequence}

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
