"""Caches step 0 of the plain model on disk, so that rows of a run with the same reference compute it once.

    expected = kept_reference(folder, {"workload": ..., "micro_batch": 64}, make=lambda: reference_gradients(...))

The file lies in the run's cache and is removed with it. Nothing depends on it: a reference that cannot be written, or
does not read back, is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from redline.engine.equivalence import Expected

MOST_OF_THE_DISK = 0.25  # of the free space: a run has other things to write
TENSORS = ("gradients", "weights")
FIGURES = tuple(field.name for field in fields(Expected) if field.name not in TENSORS)


def kept_reference(folder: Path | None, question: Mapping[str, Any], make: Callable[[], Expected]) -> Expected:
    """Return the cached reference, or make it and cache it. `question` must hold everything that the answer depends on;
    without a folder nothing is cached."""
    if folder is None:
        return make()
    text = json.dumps({"torch": torch.__version__, **question}, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _read(path: Path) -> Expected | None:
    """Return the cached reference, or None. Its tensors are memory-mapped, and read on access."""
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            said: dict[str, Any] = json.loads(file.metadata()["figures"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):  # missing, or not what was written
        return None
    if said.keys() != set(FIGURES):
        return None
    said |= {kind: {name: tensors[full] for full, name in _named(tensors, kind)} for kind in TENSORS}
    return Expected(**said)


def _named(tensors: Iterable[str], kind: str) -> Iterator[tuple[str, str]]:
    """Yield the tensors of one kind: (name in the file, name in the model)."""
    start = f"{kind}."
    return ((name, name.removeprefix(start)) for name in tensors if name.startswith(start))


def _write(path: Path, expected: Expected) -> None:
    """Write atomically, and only if there is plenty of space."""
    tensors = {
        f"{kind}.{name}": tensor.contiguous() for kind in TENSORS for name, tensor in getattr(expected, kind).items()
    }
    figures = {name: getattr(expected, name) for name in FIGURES}
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if needed > MOST_OF_THE_DISK * shutil.disk_usage(path.parent).free:
            return
        save_file(tensors, draft, metadata={"figures": json.dumps(figures)})
        draft.replace(path)
    except (OSError, SafetensorError):  # a full disk: the next row computes its own
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
