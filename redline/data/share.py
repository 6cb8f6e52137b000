"""A rank's share of batches that can only be made whole: from a stream of text, or by a user's function.

    loader = Share(TextStream(...), cut=lambda batch: adapter.pieces(batch, 4)[rank][0], counts=rank == 0)

Every rank makes the whole batch and keeps its part, so the order of the data does not depend on the number of ranks.
Prepared data (`data/loader.py`) needs none of this: a rank reads its own windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redline.data.batches import BatchSource


class Share:
    def __init__(self, source: BatchSource, *, cut: Callable[[Any], Any], counts: bool) -> None:
        """`counts`: this rank reports the number of documents; only one rank does, since all of them see the same."""
        self._source, self._cut, self._counts = source, cut, counts
        self.waited_seconds, self.documents = 0.0, 0

    def __next__(self) -> Any:
        batch = next(self._source)
        self.waited_seconds = self._source.waited_seconds
        self.documents = self._source.documents if self._counts else 0
        return self._cut(batch)

    @property
    def epoch(self) -> float:
        return self._source.epoch

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def close(self) -> None:
        self._source.close()
