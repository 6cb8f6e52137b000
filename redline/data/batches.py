"""Batches of token windows, made in this process or ahead of time by workers.

    for batch in stream_batches(TokenBatches(path=path, seed=1337, micro_batch=16, sequence=1024), device, workers=2):
        inputs, targets = batch                                             # [2, B, T] on the device

Batch i is a pure function of (tokens, seed, i), so any number of workers yields the same batches in the same order, and
resuming means starting at another i. The stream never ends: callers close it, which ends the workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.forkserver
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any, Protocol, final

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset

from redline.core.errors import UserError
from redline.data.tokens import open_tokens
from redline.data.workers import end_with_parent, outlive_signals


class BatchSource(Protocol):
    """Where a trainer gets its batches, such as a `Loader` of prepared data or a `TextStream`."""

    waited_seconds: float
    """Seconds that callers of next() have spent waiting."""
    documents: int
    """Documents that have ended in the batches since the source was opened."""

    @property
    def epoch(self) -> float:
        """The position in epochs: 1.5 is half-way through the second. An int if the length of an epoch is unknown."""

    def __next__(self) -> Any: ...

    def state(self) -> dict[str, Any]:
        """Return the position after the batches handed out so far, as plain JSON for a checkpoint."""

    def close(self) -> None: ...


class Batches(Dataset[Any], ABC):
    """A map from i to the i-th batch: [2, B, T], or a tree of tensors made by a user's file (`data/made.py`). It has no
    length: every i from 0 has a batch."""

    @abstractmethod
    def open(self) -> None:
        """Raise a UserError if the data is unusable, before any worker starts."""


@final
@dataclass(frozen=True, kw_only=True)
class TokenBatches(Batches):
    """Windows drawn at random from one token file, with replacement; the ladder measures with these."""

    path: Path
    seed: int
    micro_batch: int
    sequence: int
    rank: int = 0
    ranks: int = 1
    """All ranks draw the same batch, and each keeps its own rows: rank x B to (rank + 1) x B."""

    def __getitem__(self, index: int) -> torch.Tensor:
        # One generator per batch instead of a running one: no state to save, and no order to keep among workers.
        drawn = numpy.random.default_rng((self.seed, index))
        starts = drawn.integers(len(self.windows), size=self.ranks * self.micro_batch)
        windows = self.windows[starts[self.rank * self.micro_batch :][: self.micro_batch]]  # [B, T + 1]
        batch = torch.empty((2, self.micro_batch, self.sequence), dtype=torch.int64)  # embedding and loss take int64
        into = batch.numpy()
        into[0], into[1] = windows[:, :-1], windows[:, 1:]
        return batch  # [2, B, T]

    def open(self) -> None:
        _ = self.windows

    @cached_property
    def windows(self) -> numpy.ndarray:
        """Every window of T + 1 tokens as a view of the memory map, [tokens - T, T + 1]; opened at first use."""
        return numpy.lib.stride_tricks.sliding_window_view(open_tokens(self.path), self.sequence + 1)

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map writes out the array itself. A worker gets the path and maps the file again, so that
        # all processes share the pages of one file.
        return {name: value for name, value in self.__dict__.items() if name != "windows"}


def stream_batches(batches: Batches, device: torch.device, workers: int, start: int = 0) -> Generator[Any, None, None]:
    """Generate batches start, start + 1, ... on the device. Close the generator to end the workers."""
    batches.open()  # a missing or damaged file raises its own error here, and does not crash a worker later
    if workers == 0:
        return (moved(batches[index], device) for index in itertools.count(start))
    context = worker_context()  # started here, not at the first batch: it gets ready while the caller builds its model
    return _stream_from_workers(batches, device, workers, start, context)


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move a tree of tensors to the device. A None in it, such as an absent mask, stays None."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), batch)


def _stream_from_workers(
    batches: Batches, device: torch.device, workers: int, start: int, context: BaseContext
) -> Generator[Any, None, None]:
    host_batches = _start_workers(batches, device, workers, start, context)
    try:
        if device.type == "cuda":
            yield from copy_ahead(host_batches, device)
        else:
            for batch in host_batches:
                yield moved(batch, device)
    finally:
        # torch ends and joins the workers when the last reference to their iterator is dropped, so none may remain in
        # this frame, which an exception's traceback can keep alive. Otherwise Python, when it exits, would send the
        # workers a signal that they outlive, and wait for them.
        del host_batches


def _start_workers(
    batches: Batches, device: torch.device, workers: int, start: int, context: BaseContext
) -> Iterator[Any]:
    with warnings.catch_warnings():
        # More workers than cores may be slow. That is a result to measure here, not something to warn about.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Telling(batches),
            batch_size=None,  # each item is already a batch
            sampler=itertools.count(start),
            num_workers=workers,
            prefetch_factor=2,
            pin_memory=device.type == "cuda",  # only page-locked memory can be copied while the host continues
            multiprocessing_context=context,
            worker_init_fn=_end_with_the_trainer,
            # The loader draws a seed for its workers. Drawing it from the global generator would shift every random
            # number that the model draws afterwards, and a run with workers would differ from one without.
            generator=torch.Generator(),
        )
        # Not a generator: its frame would keep the workers alive for as long as a traceback lives.
        return map(_unpacked, iter(loader))


class _Telling(Dataset[Any]):
    """Batches whose UserErrors leave a worker as their three sentences; torch would reduce them to a traceback."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, index: int) -> torch.Tensor | _Parcel | list[str]:
        try:
            batch = self._batches[index]
        except UserError as error:
            return [error.problem, error.why, error.fix]
        return batch if isinstance(batch, torch.Tensor) else _Parcel(batch)


@dataclass
class _Parcel:
    """A wrapper that carries a tree out of a worker: torch's loader would turn its tuples into lists."""

    batch: Any

    def pin_memory(self) -> _Parcel:
        """Pin the tensors; torch's loader calls this."""
        return _Parcel(tree_map_only(torch.Tensor, torch.Tensor.pin_memory, self.batch))


def _unpacked(found: torch.Tensor | _Parcel | list[str]) -> Any:
    if isinstance(found, _Parcel):
        return found.batch
    if isinstance(found, torch.Tensor):
        return found
    raise UserError(*found)


def copy_ahead(host_batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Keep one batch ahead on a CUDA device, copied on a separate stream while the step computes on the caller's."""
    copies = torch.cuda.Stream(device)

    def send(host_batch: Any) -> Any:
        # torch's host allocator notes which stream reads a pinned block and does not hand the block out again before
        # the copy is done, so `host_batch` may be dropped at once.
        with torch.cuda.stream(copies):
            return moved(host_batch, device, non_blocking=True)

    try:
        ahead = send(next(host_batches))
        for host_batch in host_batches:
            batch = ahead
            compute = torch.cuda.current_stream(device)  # read each time: the caller may have changed streams
            # Make the step's kernels wait for this copy, before the next one is queued and they wait for that too.
            compute.wait_stream(copies)
            # The block belongs to the copy stream's pool. Without record_stream, freeing `batch` on the host would let
            # the next copy overwrite it while queued kernels of the step have yet to read it.
            for tensor in tree_leaves(batch):
                if tensor is not None:
                    tensor.record_stream(compute)
            ahead = send(host_batch)
            yield batch
    finally:
        del host_batches  # a traceback keeps this frame alive too: see _stream_from_workers


def worker_context() -> ForkServerContext:
    """Return a context that forks workers from a small server process, which has only imported torch.

    Forking this process would be quickest, but it has threads (autograd, OpenMP, CUDA): a lock that one of them holds
    stays locked in the child for ever, and Python 3.12 warns about it. Spawning imports torch once per worker, which
    takes seconds each. The server imports it once for all of them, in the background, and forks in milliseconds. It has
    no other thread at that moment: numpy's OpenBLAS ends its own before a fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    multiprocessing.forkserver.ensure_running()
    return context


def _end_with_the_trainer(worker_id: int) -> None:
    """End this worker with the trainer. torch only watches the parent process id, which is the fork server's here, and
    the server lives as long as a worker does: without this, a trainer killed by a time limit or for its memory would
    leave all of them behind for good."""
    outlive_signals()
    end_with_parent()
