"""Writes checkpoints so that a crash at any byte leaves the previous one whole, and removes those not worth keeping.

    path = write_checkpoint(folder, 500, {"model.safetensors": [header, data], "state.json": [text]})
    notes = rotate(folder, path, keep_last=2, keep_best=1)

Everything goes into `step-….draft` and is flushed to the disk, the manifest last; renaming the folder makes it a
checkpoint in one instant. Removal goes the other way: renamed first, so nothing half-deleted is taken for one.
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
    """The new checkpoint's path, when it is safely on the disk. On an error the draft is removed, if that is possible:
    on a full disk it is the draft that fills it."""
    draft = open_draft(folder, step)
    try:
        return publish_draft(draft, {name: write_file(draft / name, parts) for name, parts in files.items()})
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def open_draft(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; what a killed writer left is removed."""
    remove_leftovers(folder)
    draft = folder / (_free_name(folder, step) + DRAFT)
    draft.mkdir()
    return draft


def publish_draft(draft: Path, records: Mapping[str, FileRecord]) -> Path:
    """Makes a checkpoint of a draft whose files, all of them in `records`, are on the disk."""
    write_file(draft / MANIFEST_FILE, [manifest_text(records).encode()])
    sync_folder(draft)  # the names of the files in it
    final = draft.with_name(draft.name.removesuffix(DRAFT))
    os.rename(draft, final)
    sync_folder(final.parent)  # the new name itself
    return final


def record_of(path: Path) -> FileRecord:
    """Of a file that somebody else wrote."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        size = file.tell()
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def write_file(path: Path, parts: Parts) -> FileRecord:
    """Hashed on the way, so that nothing is read back; on the disk when it returns."""
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
    """The system may take less than it is offered."""
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """What a killed writer left: drafts, and folders on their way out. Only the run that writes here may do this."""
    for path in folder.iterdir():
        if path.name.endswith((DRAFT, REMOVING)) and order_of(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed must not stop the next checkpoint


def rotate(folder: Path, written: Path, *, keep_last: int, keep_best: int) -> list[str]:
    """Keeps the newest and the best, and always what was just written. Damaged ones count for neither. Later steps than
    the one just written are left alone: they are of a run that was resumed from before them. Returns what it could not
    remove."""
    paths = list_checkpoints(folder)
    whole: dict[int, Checkpoint] = {}  # newest first; of a step that was saved twice, the later one
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
    """By metric, lowest first; of equals, the first given. What was not evaluated, or came out as NaN, is not best."""
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
