"""Writes checkpoints so that a crash at any byte leaves the previous one whole, and removes those no longer needed.

    path = write_checkpoint(folder, 500, {"model.safetensors": [header, data], "state.json": [text]})
    notes = rotate(folder, path, keep_last=2, keep_best=1)

Everything goes into `step-….draft` and is flushed to disk, the manifest last; renaming the folder then makes it a
checkpoint atomically. Removal is the reverse: the folder is renamed first, so nothing half-deleted is taken for one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from redline.core.checkpoints import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    Checkpoint,
    FileRecord,
    UnusableError,
    folder_name,
    list_checkpoints,
    manifest_text,
    order_of,
    read_checkpoint,
)

DRAFT, REMOVING = ".draft", ".removing"

Parts = Iterable[bytes | memoryview]


def write_checkpoint(folder: Path, step: int, files: Mapping[str, Parts]) -> Path:
    """Write a checkpoint and return its path once it is safely on disk. On an error, try to remove the draft: if the
    disk is full, the draft is what fills it."""
    draft = open_draft(folder, step)
    try:
        return publish_draft(draft, {name: write_file(draft / name, parts) for name, parts in files.items()})
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def open_draft(folder: Path, step: int) -> Path:
    """Create an empty folder to write a checkpoint into, after removing what a killed writer left."""
    remove_leftovers(folder)
    draft = folder / (_free_name(folder, step) + DRAFT)
    draft.mkdir()
    return draft


def publish_draft(draft: Path, records: Mapping[str, FileRecord]) -> Path:
    """Turn a draft into a checkpoint. `records` must list all of its files, which must be on disk already."""
    write_file(draft / MANIFEST_FILE, [manifest_text(records).encode()])
    sync_folder(draft)  # the names of the files in it
    final = draft.with_name(draft.name.removesuffix(DRAFT))
    os.rename(draft, final)
    sync_folder(final.parent)  # the new name itself
    return final


def record_of(path: Path) -> FileRecord:
    """Hash a file that was not written by `write_file`."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        size = os.fstat(file.fileno()).st_size
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def write_file(path: Path, parts: Parts) -> FileRecord:
    """Write a file and flush it to disk. It is hashed on the way, so that nothing has to be read back."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                write_all(descriptor, chunk)
                size += len(chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def write_all(descriptor: int, chunk: memoryview) -> None:
    """Write the whole chunk; `os.write` may write only part of what it is given."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed writer left: drafts and half-removed checkpoints. Only the run that writes to this folder
    may call this."""
    for path in folder.iterdir():
        if path.name.endswith((DRAFT, REMOVING)) and order_of(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed must not stop the next checkpoint


def rotate(folder: Path, written: Path, *, keep_last: int, keep_best: int) -> list[str]:
    """Remove the checkpoints before `written`, except the newest and the best; damaged ones count as neither. Those
    after it are left alone: the run was resumed from before them. Return a note for each that could not be removed."""
    paths = list_checkpoints(folder)
    whole: dict[int, Checkpoint] = {}  # newest first; for a step that was saved twice, the later save
    for path in paths:
        with contextlib.suppress(UnusableError):
            found = read_checkpoint(path, verify=False)
            whole.setdefault(found.step, found)
    kept = {found.path for found in [*whole.values()][:keep_last] + best_of(whole.values(), keep_best)}
    notes = []
    for path in paths[paths.index(written) + 1 :]:
        if path not in kept:
            try:
                remove_checkpoint(path)
            except OSError as error:
                notes.append(f"{path.name} could not be removed: {error.strerror or error}")
    return notes


def best_of(checkpoints: Iterable[Checkpoint], count: int) -> list[Checkpoint]:
    """Return the `count` checkpoints with the lowest metric, lowest first; ties keep their order. Checkpoints that were
    not evaluated, or whose metric is NaN, are left out."""
    judged = [(found.metric, found) for found in checkpoints if found.metric is not None]
    judged = [(metric, found) for metric, found in judged if not math.isnan(metric)]
    return [found for _, found in sorted(judged, key=lambda pair: pair[0])][:count]


def remove_checkpoint(path: Path) -> None:
    doomed = path.with_name(path.name + REMOVING)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _free_name(folder: Path, step: int) -> str:
    taken = [order for path in list_checkpoints(folder) if (order := order_of(path)) and order[0] == step]
    return folder_name(step, max((generation for _, generation in taken), default=0) + 1)
