"""Batches made by a user's own function: `make_batch(size, seed)` returns a tree of tensors.

    for batch in stream_batches(MadeBatches(source=source, seed=1337, micro_batch=16), device, workers=2): ...

Batch i is always make_batch(size, seed + i), so the number of workers changes nothing and resuming means starting at
another i. `MadeLoader` does the same for a training run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from redline.core.errors import UserError
from redline.core.generators import seeded
from redline.core.user_code import Functions, blaming, check_targets, definition, described, is_numpy, load_functions
from redline.core.workload import Source
from redline.data.batches import Batches, moved, stream_batches

VALIDATION_SEEDS = 2**30  # beyond the steps of any run: no training batch has such a seed


@final
@dataclass(frozen=True, kw_only=True)
class MadeBatches(Batches):
    source: Source
    seed: int
    micro_batch: int
    rank: int = 0
    ranks: int = 1
    """Every rank makes the whole batch and keeps its own rows."""
    classes: int | None = None
    """The number of classes for the targets, the second of a pair; None if unknown."""

    def __getitem__(self, index: int) -> Any:
        whole = make_batch(self.functions, self.ranks * self.micro_batch, self.seed + index)
        if self.classes is not None:
            check_targets(whole[1], self.classes, self.functions)
        if self.ranks == 1:
            return whole
        start = self.rank * self.micro_batch
        return tree_map_only(torch.Tensor, lambda leaf: leaf[start:][: self.micro_batch], whole)

    def open(self) -> None:
        _ = self.functions

    @cached_property
    def functions(self) -> Functions:
        """The user's file, imported in this process."""
        return load_functions(self.source)

    def __getstate__(self) -> dict[str, Any]:
        # Functions from a file that only redline knows how to import cannot be pickled: each worker imports it again.
        return {name: value for name, value in self.__dict__.items() if name != "functions"}


def make_batch(functions: Functions, size: int, seed: int) -> Any:
    """Call the user's function and check its batch. What it draws does not affect the model's later random numbers."""
    name = functions.batch_name
    whose = functions.file, f"{name}({size}, {seed})", functions.make_batch
    with seeded(seed), blaming(*whose, call=f"{name}(size, seed)"):
        batch = functions.make_batch(size, seed)
    check_batch(batch, size, functions)
    return batch


def check_batch(batch: Any, size: int, functions: Functions) -> None:
    """Raise a UserError if a leaf is no valid tensor. A None in a tuple or dict is an absent one, such as a mask."""
    leaves = [leaf for leaf in tree_leaves(batch) if leaf is not None]
    wrong = [leaf for leaf in leaves if not _is_part(leaf, size)]
    if leaves and not wrong:
        return
    if wrong and is_numpy(wrong[0]):
        raise UserError(
            f"{functions.batch_name}({size}, seed) for {functions.words} returned {described(wrong[0])}",
            "a batch is made of torch's tensors, and nothing is converted unasked",
            "return torch.from_numpy(...) of it",
        )
    line = definition(functions.make_batch, functions.file)
    what = described(wrong[0]) if wrong else "None" if batch is None else "no tensor at all"
    raise UserError(
        f"{functions.batch_name}({size}, seed) for {functions.words} returned {what}",
        f"a batch is a tensor, or tuples and dicts of tensors, on the host, each with {size} in its first dimension"
        + (f"; it is made at {line}" if line else ""),
        "return tensors of [size, ...]; what all samples share belongs in the model, as a buffer",
    )


def _is_part(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim() > 0 and leaf.size(0) == size


def validation_batches(
    data: MadeData, *, seed: int, micro_batch: int, count: int, device: torch.device
) -> Iterator[Any]:
    """Yield batches of seeds that no training step uses."""
    batches = data.batches(seed=seed + VALIDATION_SEEDS, micro_batch=micro_batch)
    for index in range(count):
        yield moved(batches[index], device)


@dataclass(frozen=True, kw_only=True)
class MadeData:
    """A user's file that makes endless batches, used in place of a data set."""

    source: Source
    imports: dict[str, str]
    classes: int | None = None

    def batches(self, *, seed: int, micro_batch: int) -> MadeBatches:
        return MadeBatches(source=self.source, seed=seed, micro_batch=micro_batch, classes=self.classes)

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must match: the file's content, not its path, since a run may be resumed elsewhere."""
        source = self.source
        return {"factory": source.factory, "digest": source.digest, "dropout": source.dropout, "imports": self.imports}


class MadeLoader:
    """A BatchSource whose batches are whole updates, starting at a position."""

    documents = 0  # a function's batches hold none

    def __init__(
        self, data: MadeData, *, seed: int, global_batch: int, device: torch.device, workers: int, position: int
    ) -> None:
        batches = data.batches(seed=seed, micro_batch=global_batch)
        self._stream = stream_batches(batches, device, workers, start=position // global_batch)
        self.waited_seconds = 0.0

    @property
    def epoch(self) -> int:
        return 0  # a function never runs out of batches

    def __next__(self) -> Any:
        started = time.perf_counter()
        batch = next(self._stream)
        self.waited_seconds += time.perf_counter() - started
        return batch

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._stream.close()
