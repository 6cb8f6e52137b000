"""Checkpoints as files: how they are read, checked and compared. Needs no torch, so mistakes are found at once.

    step-00000500/            a step that is saved again becomes step-00000500.2, and the first is removed
      model.safetensors       tensors, a file per kind
      optimizer.safetensors
      state.json              step, metric, identity of the run, everything else it needs to continue
      manifest.json           size and SHA-256 of the files above, and its own; written last

    found, notes = newest(folder, read_checkpoint)         # the newest whole one; what was passed over, and why

`core/checkpoint_writer.py` writes them and `engine/checkpoint.py` handles the tensors. A name with any other suffix
(`.draft`, `.removing`) is never a checkpoint. The whole story: docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redline.core.errors import UserError

FORMAT = 1
CHECKPOINTS_FOLDER = "checkpoints"  # in a run directory
MANIFEST_FILE, STATE_FILE, TENSOR_SUFFIX = "manifest.json", "state.json", ".safetensors"
CHUNK_BYTES = 16 << 20  # hashed and written at a time: large enough to make Python's overhead negligible
LISTINGS = 10  # attempts at a folder whose newest checkpoint vanishes while it is read
SHOWN = 8  # differences shown in one message
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")

T = TypeVar("T")


class UnusableError(Exception):
    """A checkpoint cannot be used. The message starts with the file at fault."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's metadata and state, without its tensors."""

    path: Path
    step: int
    metric: float | None
    """Lower is better; None if nothing was evaluated."""
    identity: dict[str, Any]
    """What must be the same to resume: model, tokenizer, data and so on."""
    state: dict[str, Any]
    """Everything else that the run saved: schedule, scaler, random generators, position in the data."""
    tensor_files: tuple[Path, ...]


# --- names ------------------------------------------------------------------------------------------------------------


def folder_name(step: int, generation: int = 1) -> str:
    return f"step-{step:08d}" + (f".{generation}" if generation > 1 else "")


def order_of(path: Path) -> tuple[int, int] | None:
    """Return (step, generation), or None if this is not the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """List checkpoints by name alone, newest first. A missing folder has none."""
    try:
        found = [(order, path) for path in folder.iterdir() if (order := order_of(path))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoints in {folder}",
            error.strerror or str(error),
            "name the folder of a training run, and see that you may read it",
        ) from error
    return [path for _, path in sorted(found, reverse=True)]


def newest_checkpoint(folder: Path, updates: int | None) -> str | None:
    """Return, by name alone, the checkpoint that a run with this many updates (None: unknown) resumes from. Later ones,
    which were passed over as damaged, may still be there and are skipped."""
    found = ((order_of(path), path) for path in list_checkpoints(folder))
    within = (str(path) for order, path in found if order is not None and (updates is None or order[0] <= updates))
    return next(within, None)


# --- reading ----------------------------------------------------------------------------------------------------------


def newest(folder: Path, read: Callable[[Path], T]) -> tuple[T | None, tuple[str, ...]]:
    """Return the newest checkpoint that `read` accepts, and a note for every newer one that it rejects."""
    for _ in range(LISTINGS):
        notes: list[str] = []
        for path in list_checkpoints(folder):
            try:
                return read(path), tuple(notes)
            except UnusableError as reason:
                if not path.exists():
                    break  # rotated away while it was read: a newer one is there by now
                notes.append(f"passed over {path.name}: {reason}")
        else:
            return None, tuple(notes)
    raise UserError(
        f"the checkpoints in {folder} are replaced faster than they can be read",
        f"the newest one vanished {LISTINGS} times while it was read",
        "let the run keep more of them, or wait for its end",
    )


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, checking all sizes and the checksums of the JSON files; `verify` checks the tensors' too."""
    files = _read_manifest(path / MANIFEST_FILE)
    for name, record in files.items():
        _check_size(path / name, record)
    for name, record in files.items():
        if verify or name == STATE_FILE:
            _check_sum(path / name, record)
    saved = _parse(path / STATE_FILE, _read_bytes(path / STATE_FILE))
    try:
        return Checkpoint(
            path=path,
            step=saved["step"],
            metric=saved["metric"],
            identity=saved["identity"],
            state=saved["state"],
            tensor_files=tuple(path / name for name in files if name.endswith(TENSOR_SUFFIX)),
        )
    except KeyError as error:
        raise UnusableError(f"{STATE_FILE}: it has no {error}") from None


def load_checkpoint(path: Path, read: Callable[[Path], T]) -> T:
    """Read the checkpoint at `path`, or raise a UserError that says what is wrong with it."""
    try:
        return read(path)
    except UnusableError as reason:
        others = [other.name for other in list_checkpoints(path.parent) if other.name != path.name]
        fix = (
            f"use another: {', '.join(others[:SHOWN])}" if others else "name a folder such as runs/train/step-00000500"
        )
        raise UserError(f"cannot use the checkpoint {path}", str(reason), fix) from None


def state_text(*, step: int, metric: float | None, identity: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return the state as JSON. Python's JSON round-trips every float bit for bit, infinities and NaN included."""
    document = {"step": step, "metric": metric, "identity": dict(identity), "state": dict(state)}
    return json.dumps(document, indent=1) + "\n"


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """Return the manifest as JSON with its own checksum, in one canonical form, so that any changed byte shows."""
    body = {"format": FORMAT, "files": {name: vars(record) for name, record in sorted(files.items())}}
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": own}, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, FileRecord]:
    text = _read_bytes(path)
    document = _parse(path, text)
    if document.get("format", FORMAT) != FORMAT:
        raise UnusableError(f"{path.name}: format {document['format']!r}, and this version of redline reads {FORMAT}")
    try:
        files = {name: FileRecord(**record) for name, record in document["files"].items()}
        whole = manifest_text(files).encode() == text
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UnusableError(f"{path.name}: its own checksum does not hold: bytes changed after it was written")
    if STATE_FILE not in files or any(Path(name).name != name for name in files):
        raise UnusableError(f"{path.name}: it must list {STATE_FILE}, and files of its own folder only")
    return files


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise UnusableError(f"{path.name}: unreadable JSON ({error})") from None
    if not isinstance(document, dict):
        raise UnusableError(f"{path.name}: not a JSON object")
    return document


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    if size != record.bytes:
        how = "cut short" if size < record.bytes else "too long"
        raise UnusableError(f"{path.name}: {how}, {size:,} bytes of {record.bytes:,}")


def _check_sum(path: Path, record: FileRecord) -> None:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest.hexdigest() != record.sha256:
        raise UnusableError(f"{path.name}: its checksum does not hold: bytes changed after it was written")


def _unreadable(path: Path, error: OSError) -> UnusableError:
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    return UnusableError(f"{path.name}: " + ("missing" if missing else f"cannot be read ({error.strerror or error})"))


# --- the same run? ----------------------------------------------------------------------------------------------------


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each difference: 'vocab: 50257 there, 257 here'. Nested values are named 'model.vocab', 'files[2]'."""
    # Round-trip through JSON, so that a tuple equals the list it was saved as.
    return list(_differences("", json.loads(json.dumps(saved)), json.loads(json.dumps(now))))


def _differences(name: str, saved: Any, now: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in [*saved, *(key for key in now if key not in saved)]:
            inner = f"{name}.{key}" if name else key
            if key in saved and key in now:
                yield from _differences(inner, saved[key], now[key])
            else:
                yield f"{inner}: " + (f"{_shown(saved[key])} there, not here" if key in saved else "here, not there")
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{name}[{number}]", old, new)
    elif saved != now or isinstance(saved, bool) != isinstance(now, bool):
        yield f"{name}: {_shown(saved)} there, {_shown(now)} here"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} items"
    return json.dumps(value) if not isinstance(value, str) else repr(value)


def check_same_run(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = differences(saved, now)
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise UserError(
            f"{checkpoint} belongs to another run",
            "; ".join(found[:SHOWN]) + more,
            "resume with the model, tokenizer and data it was trained with, or start anew with another --out",
        )
