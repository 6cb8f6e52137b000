"""The store of checkpoints: saves while the training goes on, and finds the newest whole one again.

    with CheckpointStore(run / "checkpoints", keep_last=2, keep_best=1) as store:
        loaded = store.latest()                       # None at the first start; what it passed over is in store.notes
        store.save(step=500, tensors={"model.wte.weight": ..., "optimizer.wte.weight.exp_avg": ...},
                   state={"schedule": ...}, identity={"vocab": 50257}, metric=3.28)

Tensors are copied to host memory; a thread writes them from there. A write that fails (a full disk) stops nobody: the
older checkpoints are whole, the error is kept and told. Files: `core/checkpoints.py`; what to put in:
`engine/snapshot.py`. Reading alone (`latest_checkpoint`, `load_from`) takes no lock and changes nothing.
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
    """A checkpoint with its files open: it stays readable when rotation removes it."""

    path: Path
    step: int
    metric: float | None
    identity: dict[str, Any]
    state: dict[str, Any]
    opened: SavedTensors

    def tensors(self, device: torch.device | str = "cpu") -> SavedTensors:
        """By name, each read when it is asked for: the model never lies in memory a second time."""
        return self.opened.on(device)


def load_from(path: Path, *, verify: bool = True) -> Loaded:
    """The checkpoint in `path`, or a UserError that names the file at fault."""
    return load_checkpoint(path, partial(_load, verify=verify))


def latest_checkpoint(folder: Path, *, verify: bool = True) -> tuple[Loaded | None, tuple[str, ...]]:
    """The newest whole checkpoint and notes on what was passed over, also while another process writes there."""
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
        """Makes the folder and takes it for this process; what a killed run left unfinished in it is removed."""
        if keep_last < 1 or keep_best < 0:
            raise UserError(
                f"cannot keep the last {keep_last} and the best {keep_best} checkpoints",
                "a run goes on from its last one",
                "keep at least 1 last and 0 best",
            )
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.notes: list[str] = []
        """What was passed over or could not be removed, in words for the user."""
        self.last_error: UserError | None = None
        """Of the last write that ended; None when it went well."""
        self.last_saved: int | None = None
        """The step of the newest checkpoint that this store has on the disk."""
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
        """Copies everything and goes on; a thread writes. Waits for the write before this one, and returns its failure,
        if it failed: this one is tried all the same, since somebody may have made room."""
        failure = self.wait()
        # As text now: the training goes on and changes what the state is made of.
        text = state_text(step=step, metric=metric, identity=identity, state=state).encode()
        copied = self._copy(tensors)
        # A daemon: whoever leaves at once does not wait for it. `close` does, and a draft left behind is no checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, text, copied), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return failure

    def wait(self) -> UserError | None:
        """Until nothing is being written. Returns the failure of the last write, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_error

    def close(self) -> None:
        """Waits, gives the folder free, and raises if the last checkpoint is not on the disk."""
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
        if not issubclass(kind, KeyboardInterrupt):  # somebody who presses it a second time wants to leave now
            self.wait()  # what ended the block matters more than a checkpoint that failed
        self._release()

    # --- loading ------------------------------------------------------------------------------------------------------

    def latest(self, *, verify: bool = True) -> Loaded | None:
        """The newest checkpoint whose manifest and checksums hold. Those passed over are in `notes`."""
        self.wait()
        found, notes = latest_checkpoint(self.folder, verify=verify)
        self.notes.extend(notes)
        return found

    # --- inside -------------------------------------------------------------------------------------------------------

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.cuda.Event]:
        """Device to host, queued behind the step that was just taken: the next one changes the weights only after the
        copy, in the order of the stream, so the host need not wait. The writer waits, for the events."""
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
        """In the thread. Nothing may get lost in it, so every failure is kept for the next call."""
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
        """Found now rather than at the first save, an hour later: is there a folder that may be written to?"""
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
        """Two runs would remove each other's drafts. The system gives the lock free when its process dies."""
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
        fix = "free some space or fix what it names: older checkpoints are whole, and the next save tries again"
    else:
        why, fix = f"{type(error).__name__}: {error}", "older checkpoints are whole; the next save tries again"
    return UserError(f"the checkpoint of step {step} was not written", why, fix)
