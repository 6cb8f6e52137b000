"""The checkpoint stores of several ranks: who writes, who reads, and how a model that is cut is saved.

    LeadingStore      rank 0: writes what a single process would, and tells the others which checkpoint it found
    FollowingStore    the other ranks: read the checkpoint that rank 0 found, and write nothing
    ShardedStore      wraps either of them for a model that is cut: every rank writes its part

A model that is cut is written with torch's distributed checkpoint (DCP): `__R_0.distcp` by each rank R, and
`.metadata`. Tensors have the same names as in any other checkpoint. All files go into one draft folder. Once every rank
has reported what it wrote, rank 0 writes state.json and the manifest and renames the folder. The result is a checkpoint
like any other: complete or absent, checked by its checksums, readable by any number of ranks.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from redline.core.checkpoint_writer import open_draft, publish_draft, record_of, rotate, write_file
from redline.core.checkpoints import STATE_FILE, FileRecord, state_text
from redline.core.errors import UserError
from redline.engine.checkpoint import CheckpointStore, Loaded, load_from, not_written
from redline.engine.distributed import Ranks
from redline.engine.parts import on_host
from redline.engine.tensor_files import METADATA_FILE

FOUND = "checkpoint"
SETTLE_SECONDS = 5.0  # after a failure, for a checkpoint that is being written: a rank may never report


class Store(Protocol):
    folder: Path
    notes: list[str]
    last_error: UserError | None
    last_saved: int | None

    def latest(self) -> Loaded | None: ...

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        metric: float | None = None,
    ) -> UserError | None: ...

    def wait(self) -> UserError | None: ...

    def __enter__(self) -> Store: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LeadingStore(CheckpointStore):
    def __init__(self, folder: Path, ranks: Ranks, *, keep_last: int, keep_best: int) -> None:
        super().__init__(folder, keep_last=keep_last, keep_best=keep_best)
        self.ranks = ranks

    def latest(self, *, verify: bool = True) -> Loaded | None:
        found = super().latest(verify=verify)
        self.ranks.say(f"{self.folder}/{FOUND}", None if found is None else found.path.name)
        return found


class FollowingStore:
    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.notes: list[str] = []
        self.last_error: UserError | None = None
        self.last_saved: int | None = None

    def latest(self) -> Loaded | None:
        """Return the checkpoint that rank 0 found. It has verified every byte, so the others need not."""
        name = self.ranks.hear(f"{self.folder}/{FOUND}")
        return None if name is None else load_from(self.folder / name, verify=False)

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        metric: float | None = None,
    ) -> UserError | None:
        return None

    def wait(self) -> UserError | None:
        return None

    def __enter__(self) -> FollowingStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class WriterOfCopies(FileSystemWriter):
    """Writes tensors that are already copies. DCP would copy them again, and cannot copy a `Part`."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class ShardedStore:
    def __init__(self, own: LeadingStore | FollowingStore, ranks: Ranks) -> None:
        self.own, self.ranks, self.folder, self.notes = own, ranks, own.folder, own.notes
        self.last_error: UserError | None = None
        self.last_saved: int | None = None
        self._saves = 0
        self._thread: threading.Thread | None = None
        # A group of its own: its collectives run alongside those of the training, and in each group their order must be
        # the same on all ranks.
        self._group = torch.distributed.new_group(backend="gloo")

    def latest(self) -> Loaded | None:
        return self.own.latest()

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        metric: float | None = None,
    ) -> UserError | None:
        """Copy this rank's part and let threads write it. Returns the failure of the previous save, if any."""
        failure = self.wait()
        self._saves += 1
        draft = self._draft(step)
        if draft is None:
            return failure
        text = state_text(step=step, metric=metric, identity=identity, state=state).encode()
        held = {name: on_host(tensor) for name, tensor in tensors.items()}  # the next step changes the originals
        writer = WriterOfCopies(draft, sync_files=True)
        written = async_save(held, storage_writer=writer, process_group=self._group)
        assert isinstance(written, Future)
        self._thread = threading.Thread(
            target=self._finish, args=(step, draft, text, written), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return failure

    def wait(self) -> UserError | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_error

    def __enter__(self) -> ShardedStore:
        self.own.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            # The final report reads from the folder what was saved. Wait less than the other ranks wait for rank 0.
            self._thread.join(min(SETTLE_SECONDS, self.ranks.mistake_seconds / 2))
        self.own.__exit__(kind, error, trace)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _draft(self, step: int) -> Path | None:
        """Return the draft folder that rank 0 makes; None on all ranks if it cannot."""
        key = f"{self.folder}/draft/{self._saves}"
        if not self.ranks.leads:
            name = self.ranks.hear(key)
            return None if name is None else self.folder / name
        try:
            draft = open_draft(self.folder, step)
        except OSError as error:
            self.last_error = not_written(step, self.folder, error)
            self.ranks.say(key, None)
            return None
        self.ranks.say(key, draft.name)
        return draft

    def _finish(self, step: int, draft: Path, text: bytes, written: Future[Any]) -> None:
        """Runs in a thread. Every rank reports what it wrote, or why it failed; rank 0 publishes the checkpoint."""
        try:
            written.result()
            mine = {path.name: asdict(record_of(path)) for path in draft.glob(f"__{self.ranks.rank}_*")}
            told: dict[str, Any] = {"files": mine}
        except Exception as error:
            told = {"failure": f"rank {self.ranks.rank}: {next(iter(str(error).splitlines()), type(error).__name__)}"}
        try:
            self.ranks.say(f"{self.folder}/written/{self._saves}/{self.ranks.rank}", told)
            if self.ranks.leads:
                self._publish(step, draft, text)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            self.last_error = not_written(step, self.folder, error)

    def _publish(self, step: int, draft: Path, text: bytes) -> None:
        key = f"{self.folder}/written/{self._saves}"
        parts = [self.ranks.hear(f"{key}/{rank}", rank) for rank in range(self.ranks.count)]
        failures = [part["failure"] for part in parts if "failure" in part]
        if failures:
            raise RuntimeError(failures[0])
        records = {name: FileRecord(**record) for part in parts for name, record in part["files"].items()}
        records[METADATA_FILE] = record_of(draft / METADATA_FILE)
        records[STATE_FILE] = write_file(draft / STATE_FILE, [text])
        path = publish_draft(draft, records)
        self.last_saved, self.last_error = step, None
        assert isinstance(self.own, LeadingStore)
        self.notes.extend(rotate(self.folder, path, keep_last=self.own.keep_last, keep_best=self.own.keep_best))
