"""Turns text into token shards in parallel: the same bytes for any number of processes or interruptions.

    index = prepare(Preparation(sources=("novels/",), out=Path("tokens"), tokenizer="gpt2"))

The files are cut into parts by their sizes alone; each part becomes at most one shard of train and one of val. Workers
process part after part, and finished parts are kept: the same command continues where a killed one stopped.

    OUT/prepare.json   what is being made, from which files: a different order in the same folder is refused
    OUT/parts.jsonl    a line for each finished part, appended and flushed
    OUT/*.tokens       the shards (data/shards.py)
    OUT/index.json     written last: with it the folder is complete
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy

from redline import __version__
from redline.core.errors import UserError
from redline.core.host import core_count, timestamp
from redline.core.units import counted
from redline.core.values import from_json, to_json
from redline.data.pool import Meter, OnProgress, Pulse, Task, unheard, work_through
from redline.data.shards import (
    INDEX_FILE,
    PREPARE_FILE,
    SHARD_SUFFIX,
    STAMPS_FILE,
    VERSION,
    Header,
    ShardWriter,
    TokenizerId,
    explaining,
    open_shard,
    read_index,
    tokenizer_id,
    write_json,
    write_stamps,
)
from redline.data.sources import Found, Part, Reading, cut_parts, find_sources, read_part
from redline.data.tokenizer import Tokenizer, tokenizer

PARTS_FILE = "parts.jsonl"
OURS = re.compile(rf"(train|val)-\d+\{SHARD_SUFFIX}|.*\.draft|{PARTS_FILE}|{STAMPS_FILE}|{INDEX_FILE}|{PREPARE_FILE}")
SMALLEST_PART, LARGEST_PART = 1 << 20, 1 << 26
FLUSH_TOKENS = 1 << 20


@final
@dataclass(frozen=True, kw_only=True)
class Preparation:
    """An order: what to make from which text, and where."""

    sources: tuple[str, ...]
    out: Path
    tokenizer: str = "gpt2"
    reading: Reading = field(default_factory=Reading)
    val_fraction: float = 0.005
    processes: int | None = None
    """None: one per core."""
    part_bytes: int | None = None
    """Bytes of the files in a part. None: derived from the size of all files, never from the number of processes."""
    overwrite: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        check_val_fraction(self.val_fraction)
        for name in ("processes", "part_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}", "it is a count", f"set {name} to 1 or more")


@final
@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished part, as its line in parts.jsonl."""

    part: int
    train: Header | None
    val: Header | None
    documents: int
    text_bytes: int


def prepare(order: Preparation, on_progress: OnProgress = unheard) -> dict[str, Any]:
    """Make the shards, and return the index of the finished folder."""
    found = find_sources(order.sources)
    encoder = tokenizer_id(tokenizer(order.tokenizer))
    size = order.part_bytes or part_size(found.size)
    parts = cut_parts(found.files, size, order.reading)
    identity = identity_of(order, found, encoder, size)
    with explaining(order.out):
        order.out.mkdir(parents=True, exist_ok=True)
    with locked(order.out):
        open_folder(order, identity)
        finished = read_finished(order.out)
        if len(finished) == len(parts) and (order.out / INDEX_FILE).exists():
            index = read_index(order.out)
            return {**index, "notes": [*index["notes"], "already prepared: nothing left to do"]}
        meter = Meter(parts, found.size, list(finished), on_progress)
        if len(finished) < len(parts):
            make_shards(order, encoder, parts, finished, meter)
        return finish(order, identity, encoder, found, [finished[number] for number in range(len(parts))], meter)


def part_size(total_bytes: int) -> int:
    """Return a size small enough for some 200 parts, which keep many cores busy to the end, yet worth a file each."""
    return max(min(max(total_bytes // 256, SMALLEST_PART), LARGEST_PART), total_bytes // 1024)


def check_val_fraction(share: float) -> None:
    if not 0 <= share < 1:
        raise UserError(
            f"the share of validation is {share:g}",
            "it is a share of the documents, and some must be left to train on",
            "give --val-fraction a number from 0 to below 1, such as 0.005",
        )


def is_val(key: int, val_fraction: float) -> bool:
    """True if the document belongs to validation. Its key is a hash of its beginning, so neither order nor parallelism
    nor a renamed file changes that, and two copies of a text are always on the same side."""
    return key < val_fraction * 2.0**64


# the folder


def identity_of(order: Preparation, found: Found, encoder: TokenizerId, part_bytes: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "tokenizer": to_json(encoder),
        **to_json(order.reading),
        "val_fraction": order.val_fraction,
        "part_bytes": part_bytes,
        "files": files_of(found),
    }


def files_of(found: Found) -> dict[str, Any]:
    return {file.path: [file.kind, file.size, file.mtime_ns] for file in found.files}


def open_folder(order: Preparation, identity: dict[str, Any]) -> None:
    """Make sure that the folder is new, is cleared for this work, or holds the beginning of exactly this work."""
    names = {path.name for path in order.out.iterdir()}
    made = any(name == INDEX_FILE or name.endswith(SHARD_SUFFIX) for name in names)
    if PREPARE_FILE in names:
        difference = first_difference(read_identity(order.out), identity)
        if difference is None:
            clear_drafts(order.out)
            return
        if made and not order.overwrite:
            raise UserError(
                f"{order.out} holds the tokens of something else",
                difference,
                "choose another --out, or add --overwrite to prepare them again",
            )
    strangers = sorted(name for name in names if not OURS.fullmatch(name))
    # A first attempt that failed on its text has left prepare.json and no tokens: the corrected text may go there.
    stumbled = PREPARE_FILE in names and not made
    if strangers or (names and not order.overwrite and not stumbled):
        raise UserError(
            f"{order.out} is already in use",
            f"it holds {strangers[0] if strangers else min(names)}, which is not of this preparation",
            "choose a new folder with --out",
        )
    with explaining(order.out):
        # Remove the index first: without it the folder cannot pass for complete. Remove prepare.json last: it says
        # what the other files belong to.
        for name in sorted(names, key=lambda name: (name != INDEX_FILE, name == PREPARE_FILE)):
            (order.out / name).unlink()
    write_json(order.out / PREPARE_FILE, identity)


def read_identity(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / PREPARE_FILE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def first_difference(before: dict[str, Any], now: dict[str, Any], of: str = "") -> str | None:
    """Describe the first difference in words; None if there is none."""
    for name in now:
        old, new = before.get(name), now[name]
        if name == "files" and isinstance(old, dict):
            found = file_difference(old, new)
        elif isinstance(old, dict) and isinstance(new, dict):
            found = first_difference(old, new, of=f"{name} ")
        else:
            words = f"its {of}{name.replace('_', ' ')} was {json.dumps(old)} and is now {json.dumps(new)}"
            found = None if old == new else words
        if found is not None:
            return found
    return None


def file_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first difference between files by path, each with its kind, size and time; None if there is none."""
    for path in {**now, **before}:
        if path not in before or path not in now:
            return f"the file {path} {'is new' if path in now else 'is gone'}"
        if before[path] != now[path]:
            return f"the file {path} has changed since (it had {before[path][1]:,} bytes and has {now[path][1]:,})"
    return None if list(before) == list(now) else "the files are named in another order"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder: two preparations in one folder would delete each other's drafts."""
    with explaining(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(
            f"{folder} is being prepared already", "another process holds it", "wait for it, or choose another --out"
        ) from error
    finally:
        os.close(handle)


def clear_drafts(folder: Path) -> None:
    for draft in folder.glob("*.draft"):
        draft.unlink(missing_ok=True)


def shard_path(folder: Path, split: str, part: int) -> Path:
    return folder / f"{split}-{part:05d}{SHARD_SUFFIX}"


def read_finished(folder: Path) -> dict[int, Finished]:
    """Return the parts whose shards exist. A line cut short or a shard that does not match its line is still to do."""
    path = folder / PARTS_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    done = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            part = from_json(Finished, json.loads(line))
            if is_there(folder, part):
                done[part.part] = part
    return done


def is_there(folder: Path, part: Finished) -> bool:
    try:
        return all(
            header is None or open_shard(shard_path(folder, split, part.part)).header == header
            for split, header in (("train", part.train), ("val", part.val))
        )
    except UserError:
        return False


def record(folder: Path, part: Finished) -> None:
    path = folder / PARTS_FILE
    with explaining(path), open(path, "ab") as file:
        # Start on a new line: a killed writer may have left half of one.
        file.write(b"\n" + json.dumps(to_json(part)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def finish(
    order: Preparation,
    identity: dict[str, Any],
    encoder: TokenizerId,
    found: Found,
    parts: list[Finished],
    meter: Meter,
) -> dict[str, Any]:
    splits = {split: list_shards(order.out, split, parts) for split in ("train", "val")}
    documents = sum(split["documents"] for split in splits.values())
    if not splits["train"]["tokens"]:
        raise UserError(
            "there is nothing to train on",
            f"all of {counted(documents, 'document')} fell into validation"
            if documents
            else "no document holds any text",
            "give more documents (--split-documents cuts a text file into some), or a smaller --val-fraction",
        )
    notes = list(found.notes)
    if order.val_fraction and not splits["val"]["tokens"]:
        notes.append(
            f"validation is empty: of {counted(documents, 'document')} none fell into its {order.val_fraction:g}; more "
            "documents (--split-documents) or a larger --val-fraction give it some"
        )
    index = {
        "format": "redline-tokens",
        "version": VERSION,
        "tokenizer": to_json(encoder),
        **splits,
        "text_bytes": sum(part.text_bytes for part in parts),
        "sources": {"words": list(order.sources), "files": len(found.files), "bytes": found.size},
        "options": {name: identity[name] for name in identity if name not in ("files", "tokenizer", "version")},
        "notes": notes,
        "date": timestamp(),
        "command": order.command,
        "versions": {"redline": __version__},
    }
    shards = [open_shard(order.out / entry["name"]) for split in splits.values() for entry in split["shards"]]
    write_stamps(order.out, shards)
    write_json(order.out / INDEX_FILE, index)
    return {**index, "took": to_json(meter.now)}


def list_shards(folder: Path, split: str, parts: list[Finished]) -> dict[str, Any]:
    found = [(part.part, getattr(part, split)) for part in parts]
    shards = [(shard_path(folder, split, number).name, header) for number, header in found if header is not None]
    return {
        "tokens": sum(header.tokens for _, header in shards),
        "documents": sum(header.documents for _, header in shards),
        "shards": [{"name": name, "header": to_json(header)} for name, header in shards],
    }


# the work


def make_shards(
    order: Preparation, encoder: TokenizerId, parts: tuple[Part, ...], finished: dict[int, Finished], meter: Meter
) -> None:
    """Make the shards of every unfinished part, with as many processes as are useful."""
    todo = [number for number in range(len(parts)) if number not in finished]
    make_task = partial(part_task, order, encoder)
    done = work_through(make_task, parts, todo=todo, processes=order.processes or core_count(), meter=meter)
    try:
        with contextlib.closing(done):
            for part in done:
                record(order.out, part)
                finished[part.part] = part
    finally:
        clear_drafts(order.out)


def part_task(order: Preparation, encoder: TokenizerId) -> Task[Finished]:
    """Return the task of a worker, which builds its tokenizer once."""
    return partial(prepare_part, order, encoder, tokenizer(order.tokenizer))


def prepare_part(
    order: Preparation, encoder: TokenizerId, encode: Tokenizer, number: int, part: Part, on_progress: OnProgress
) -> Finished:
    outputs = {split: Output(shard_path(order.out, split, number), encoder) for split in ("train", "val")}
    pulse = Pulse(on_progress)
    try:
        for piece in read_part(part, order.reading):
            ids = encode.encode(piece.text)
            outputs["val" if is_val(piece.key, order.val_fraction) else "train"].add(ids, piece.ends)
            size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            pulse.count(piece, size, ids.size)
        pulse.send()
        headers = {split: output.finish() for split, output in outputs.items()}
    except BaseException:
        for output in outputs.values():
            output.discard()
        raise
    return Finished(part=number, **headers, documents=pulse.documents, text_bytes=pulse.text_bytes)


@final
class Output:
    """One split of one part: collects small documents, writes large chunks, and creates no file if it stays empty."""

    def __init__(self, path: Path, encoder: TokenizerId) -> None:
        self._path, self._encoder = path, encoder
        self._end = numpy.array([encoder.end_of_text], dtype=numpy.uint32)
        self._pieces: list[numpy.ndarray] = []
        self._ends: list[int] = []
        self._count = 0
        self._writer: ShardWriter | None = None

    def add(self, ids: numpy.ndarray, ends: bool) -> None:
        self._pieces.append(ids)
        self._count += ids.size
        if ends:
            self._pieces.append(self._end)
            self._count += 1
            self._ends.append(self._count)
        if self._count >= FLUSH_TOKENS:
            self._flush()

    def finish(self) -> Header | None:
        if self._count:
            self._flush()
        return None if self._writer is None else self._writer.finish()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()

    def _flush(self) -> None:
        self._writer = self._writer or ShardWriter(self._path, self._encoder)
        self._writer.add(numpy.concatenate(self._pieces), self._ends)
        self._pieces, self._ends, self._count = [], [], 0
