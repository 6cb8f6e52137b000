"""The checkpoint store: saves while training continues, and loads the newest intact checkpoint.

    with CheckpointStore(run / "checkpoints", keep_last=2, keep_best=1) as store:
        loaded = store.latest()                       # None at the first start; store.notes has what it skipped
        store.save(step=500, tensors={"model.wte.weight": ..., "optimizer.wte.weight.exp_avg": ...},
                   state={"schedule": ...}, identity={"vocab": 50257}, metric=3.28)

Tensors are copied to host memory, and a thread writes them from there. A failed write (a full disk) does not stop the
training: older checkpoints stay intact, and the error is kept and reported. The files are described in
`core/checkpoints.py`, their contents in `engine/snapshot.py`. Reading alone (`latest_checkpoint`, `load_from`) takes no
lock and changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from redline.core.checkpoint_writer import Parts, remove_leftovers, rotate, write_checkpoint
from redline.core.checkpoints import STATE_FILE, load_checkpoint, newest, read_checkpoint, state_text
from redline.core.errors import UserError, explained
from redline.engine.tensor_files import (
    METADATA_FILE,
    HostImage,
    SavedTensors,
    by_file,
    layout_of,
    open_sharded,
    open_tensors,
)

LOCK_FILE = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # a network file system without locks


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint with its files open, so that it stays readable when rotation removes it."""

    path: Path
    step: int
    metric: float | None
    identity: dict[str, Any]
    state: dict[str, Any]
    opened: SavedTensors

    def tensors(self, device: torch.device | str = "cpu") -> SavedTensors:
        """Return the tensors by name. Each is read on access, so that memory never holds the model twice."""
        return self.opened.on(device)


def load_from(path: Path, *, verify: bool = True) -> Loaded:
    """Load the checkpoint in `path`, or raise a UserError that names the file at fault."""
    return load_checkpoint(path, partial(_load, verify=verify))


def latest_checkpoint(folder: Path, *, verify: bool = True) -> tuple[Loaded | None, tuple[str, ...]]:
    """Return the newest intact checkpoint and notes on those skipped. Safe while another process writes there."""
    return newest(folder, partial(_load, verify=verify))


def _load(path: Path, *, verify: bool) -> Loaded:
    found = read_checkpoint(path, verify=verify)
    return Loaded(
        path=path,
        step=found.step,
        metric=found.metric,
        identity=found.identity,
        state=found.state,
        opened=open_sharded(path) if (path / METADATA_FILE).exists() else open_tensors(found.tensor_files),
    )


class CheckpointStore:
    def __init__(self, folder: Path, *, keep_last: int = 2, keep_best: int = 1) -> None:
        """Create the folder, lock it for this process, and remove what a killed run left unfinished in it."""
        if keep_last < 1 or keep_best < 0:
            raise UserError(
                f"cannot keep the last {keep_last} and the best {keep_best} checkpoints",
                "a run goes on from its last one",
                "keep at least 1 last and 0 best",
            )
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.notes: list[str] = []
        """What was skipped or could not be removed, in words for the user."""
        self.last_error: UserError | None = None
        """The error of the last finished write; None if it succeeded."""
        self.last_saved: int | None = None
        """Step of the newest checkpoint that this store has written."""
        self._images: dict[str, HostImage] = {}
        self._thread: threading.Thread | None = None
        self._lock = self._open_folder()

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        metric: float | None = None,
    ) -> UserError | None:
        """Copy everything and return; a thread does the writing. Waits for the previous write first, and returns its
        error if it failed. This one is attempted anyway, since somebody may have made room."""
        failure = self.wait()
        # Serialised now: training continues and changes the objects in the state.
        text = state_text(step=step, metric=metric, identity=identity, state=state).encode()
        copied = self._copy(tensors)
        # A daemon, so that an abrupt exit need not wait for it. `close` waits, and an abandoned draft is no checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, text, copied), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return failure

    def wait(self) -> UserError | None:
        """Wait until nothing is being written. Return the error of the last write, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_error

    def close(self) -> None:
        """Wait, unlock the folder, and raise if the last write failed."""
        failure = self.wait()
        self._release()
        if failure is not None:
            raise failure

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if not issubclass(kind, KeyboardInterrupt):  # a second Ctrl-C means: leave now
            self.wait()  # the error that ended the block matters more than a failed write
        self._release()

    # --- loading ------------------------------------------------------------------------------------------------------

    def latest(self, *, verify: bool = True) -> Loaded | None:
        """Return the newest checkpoint whose manifest and checksums are valid. `notes` gets those skipped."""
        self.wait()
        found, notes = latest_checkpoint(self.folder, verify=verify)
        self.notes.extend(notes)
        return found

    # --- inside -------------------------------------------------------------------------------------------------------

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.cuda.Event]:
        """Queue copies from device to host behind the step just taken. Stream order puts them before the next update of
        the weights, so the host need not wait; the writer waits for the returned events."""
        images = {}
        for name, inside in by_file(tensors).items():
            layout = layout_of(inside)
            pinned = any(tensor.is_cuda for tensor in inside.values())
            image = self._images.get(name)
            if image is None or image.layout != layout or image.pinned != pinned:
                image = HostImage(layout, pinned=pinned)
            image.copy_from(inside)
            images[name] = image
        self._images = images
        return [
            _record_event(device) for device in {tensor.device for tensor in tensors.values()} if device.type == "cuda"
        ]

    def _write(self, step: int, text: bytes, copied: list[torch.cuda.Event]) -> None:
        """Write the checkpoint; runs in the thread. Every error is kept for the next call, so that none gets lost."""
        try:
            for event in copied:
                event.synchronize()
            files: dict[str, Parts] = {name: image.parts() for name, image in self._images.items()}
            path = write_checkpoint(self.folder, step, {**files, STATE_FILE: [text]})
            self.last_saved, self.last_error = step, None
            self.notes.extend(rotate(self.folder, path, keep_last=self.keep_last, keep_best=self.keep_best))
        except Exception as error:
            self.last_error = not_written(step, self.folder, error)

    def _open_folder(self) -> int:
        """Create and lock the folder. An unwritable one fails here, and not at the first save an hour later."""
        with explained(f"cannot write checkpoints to {self.folder}", "choose a folder you may write to with --out DIR"):
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.touch()
            probe.unlink()
            lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take(lock)
            remove_leftovers(self.folder)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _take(self, lock: int) -> None:
        """Lock the folder: two runs would remove each other's drafts. The system frees the lock if the process dies."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run writes checkpoints to {self.folder}",
                f"it holds {LOCK_FILE} in it",
                "wait for it or stop it, or choose another folder with --out DIR",
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.notes.append(f"{self.folder} has no file locks: nothing stops a second run from writing there")

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def not_written(step: int, folder: Path, error: Exception) -> UserError:
    if isinstance(error, OSError):
        why = f"{error.strerror or error} ({error.filename or folder})"
        fix = "free some space or fix what it names: older checkpoints are intact, and the next save tries again"
    else:
        why, fix = f"{type(error).__name__}: {error}", "older checkpoints are intact; the next save tries again"
    return UserError(f"the checkpoint of step {step} was not written", why, fix)
