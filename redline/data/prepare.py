"""Text to token shards: in parallel, and the same bytes whatever the number of processes or interruptions.

    index = prepare(Preparation(sources=("novels/",), out=Path("tokens"), tokenizer="gpt2"))

The files are cut into parts by their sizes alone; each part becomes one shard of train and one of val. A worker takes
part after part, and what it has finished stays: the same command goes on where a killed one stopped.

    OUT/prepare.json   what is being made, from which files: another order in the same folder is refused
    OUT/parts.jsonl    a line for each finished part, appended and flushed
    OUT/*.tokens       the shards (data/shards.py)
    OUT/index.json     last of all: with it the folder is complete
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast, final

import numpy

from redline import __version__
from redline.core.errors import UserError
from redline.core.values import from_json, to_json
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
from redline.data.sources import Found, Part, Piece, Reading, cut_parts, find_sources, read_part
from redline.data.tokenizer import Tokenizer, tokenizer
from redline.data.workers import core_count, end_with_parent, how_it_ended

PARTS_FILE = "parts.jsonl"
OURS = re.compile(rf"(train|val)-\d+\{SHARD_SUFFIX}|.*\.draft|{PARTS_FILE}|{STAMPS_FILE}|{INDEX_FILE}|{PREPARE_FILE}")
SMALLEST_PART, LARGEST_PART = 1 << 20, 1 << 26
FLUSH_TOKENS = 1 << 20
REPORT_SECONDS = 0.25


@final
@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The order: what to make of which text, and where."""

    sources: tuple[str, ...]
    out: Path
    tokenizer: str = "gpt2"
    reading: Reading = field(default_factory=Reading)
    val_fraction: float = 0.005
    processes: int | None = None
    """None: one for each core."""
    part_bytes: int | None = None
    """Text in a part. None: by the size of all files, never by the number of processes."""
    overwrite: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise UserError(
                f"the share of validation is {self.val_fraction:g}",
                "it is a share of the documents, and some must be left to train on",
                "give --val-fraction a number from 0 to below 1, such as 0.005",
            )
        for name in ("processes", "part_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}", "it is a count", f"give {name} a number from 1")


@final
@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the work stands. Parts that an earlier run had finished are done, but nobody waited for them now."""

    bytes_total: int
    bytes_kept: int = 0
    bytes_done: int = 0
    """Of the files, since this run began."""
    text_bytes: int = 0
    """Of UTF-8, unpacked, since this run began."""
    documents: int = 0
    tokens: int = 0
    parts: int = 0
    parts_done: int = 0
    seconds: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Finished:
    """A part that is done: its line in parts.jsonl."""

    part: int
    train: Header | None
    val: Header | None
    documents: int
    text_bytes: int


OnProgress = Callable[[Progress], None]


def prepare(order: Preparation, on_progress: OnProgress = lambda progress: None) -> dict[str, Any]:
    """The index of the finished folder."""
    found = find_sources(order.sources, order.reading)
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
            return {**index, "notes": [*index["notes"], "this was prepared before: nothing was left to do"]}
        meter = Meter(parts, found.size, finished, on_progress)
        if len(finished) < len(parts):
            run_workers(order, encoder, parts, finished, meter)
        return finish(order, identity, encoder, found, [finished[number] for number in range(len(parts))], meter)


def part_size(total_bytes: int) -> int:
    """A part is small enough for 200 of them to keep many cores busy to the end, and large enough to be a file."""
    return max(min(max(total_bytes // 256, SMALLEST_PART), LARGEST_PART), total_bytes // 1024)


def is_val(key: int, val_fraction: float) -> bool:
    """By the document's own beginning: neither order nor parallelism nor a renamed file moves it, and two copies of
    a text are never one on each side."""
    return key < val_fraction * 2.0**64


# the folder


def identity_of(order: Preparation, found: Found, encoder: TokenizerId, part_bytes: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "tokenizer": to_json(encoder),
        **to_json(order.reading),
        "val_fraction": order.val_fraction,
        "part_bytes": part_bytes,
        "files": {file.path: [file.kind, file.size, file.mtime_ns] for file in found.files},
    }


def open_folder(order: Preparation, identity: dict[str, Any]) -> None:
    """A folder that is new, or holds the beginning of exactly this work."""
    names = {path.name for path in order.out.iterdir()}
    if PREPARE_FILE in names:
        difference = first_difference(read_identity(order.out), identity)
        if difference is None:
            clear_drafts(order.out)
            return
        if not order.overwrite:
            raise UserError(
                f"{order.out} holds the tokens of something else",
                difference,
                "choose another --out, or add --overwrite to make them anew",
            )
    strangers = sorted(name for name in names if not OURS.fullmatch(name))
    if strangers or (names and not order.overwrite):
        raise UserError(
            f"{order.out} is already in use",
            f"it holds {strangers[0] if strangers else min(names)}, which is not of this preparation",
            "choose a new folder with --out",
        )
    with explaining(order.out):
        # The index first: without it, nobody takes what is left for complete. prepare.json last: it says whose
        # the rest is.
        for name in sorted(names, key=lambda name: (name != INDEX_FILE, name == PREPARE_FILE)):
            (order.out / name).unlink()
    write_json(order.out / PREPARE_FILE, identity)


def read_identity(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / PREPARE_FILE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """In words, or None where both are the same."""
    for name in now:
        old, new = before.get(name), now[name]
        if name == "files" and isinstance(old, dict):
            for path in {**new, **old}:
                if path not in old or path not in new:
                    return f"the file {path} {'is new' if path in new else 'is gone'}"
                if old[path] != new[path]:
                    return f"the file {path} has changed since (it had {old[path][1]:,} bytes and has {new[path][1]:,})"
            if list(old) != list(new):
                return "the files are named in another order"
        elif old != new:
            return f"its {name.replace('_', ' ')} was {json.dumps(old)} and is now {json.dumps(new)}"
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two at work in one folder would take away each other's drafts."""
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
    """The parts whose shards are there. A line cut short, or a shard that is not what its line says, is work to do."""
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
        # On a line of its own even after half a line that a killed writer left.
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
            f"all of the {documents} documents fell into validation" if documents else "no document holds any text",
            "give more documents (--split-documents cuts a text file into some), or a smaller --val-fraction",
        )
    notes = list(found.notes)
    if order.val_fraction and not splits["val"]["tokens"]:
        notes.append(
            f"validation is empty: of {documents:,} documents none fell into its {order.val_fraction:g}; more "
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
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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


# the parent


@final
class Meter:
    """Adds up what the workers tell, and passes it on."""

    def __init__(self, parts: tuple[Part, ...], size: int, finished: dict[int, Finished], tell: OnProgress) -> None:
        self._tell, self._started = tell, time.monotonic()
        kept = sum(span.size for number in finished for span in parts[number])
        self.now = Progress(bytes_total=size, bytes_kept=kept, parts=len(parts), parts_done=len(finished))
        self._tell(self.now)

    def add(self, step: Progress) -> None:
        """A step holds only what is new."""
        names = ("bytes_done", "text_bytes", "documents", "tokens", "parts_done")
        sums = {name: getattr(self.now, name) + getattr(step, name) for name in names}
        self.now = replace(self.now, **sums, seconds=time.monotonic() - self._started)
        self._tell(self.now)


def run_workers(
    order: Preparation,
    encoder: TokenizerId,
    parts: tuple[Part, ...],
    finished: dict[int, Finished],
    meter: Meter,
) -> None:
    """Every part that is not finished, by as many processes as are useful. Ends them all, however it ends."""
    todo = [number for number in range(len(parts)) if number not in finished]
    # Spawned, not forked: this process has threads (the progress bar), and a worker needs no more than its imports.
    context = multiprocessing.get_context("spawn")
    crew: dict[Connection, Worker] = {}
    try:
        for _ in range(min(order.processes or core_count(), len(todo))):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, order, encoder), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            crew[ours] = Worker(process=process)
        queue = iter(todo)
        for connection in list(crew):
            hand_out(connection, crew, queue, parts)
        while crew:
            for ready in wait(list(crew)):
                connection = cast(Connection, ready)
                result = listen(connection, crew[connection], parts, meter)
                if result is not None:
                    record(order.out, result)
                    finished[result.part] = result
                    meter.add(Progress(bytes_total=0, parts_done=1))
                    hand_out(connection, crew, queue, parts)
    finally:
        for connection, worker in crew.items():
            worker.process.terminate()
            worker.process.join()
            connection.close()
        clear_drafts(order.out)


@dataclass
class Worker:
    process: Any
    part: int = -1


def hand_out(
    connection: Connection, crew: dict[Connection, Worker], queue: Iterator[int], parts: tuple[Part, ...]
) -> None:
    """The next part, or the way home."""
    number = next(queue, None)
    try:
        connection.send(None if number is None else (number, parts[number]))
    except OSError as error:  # it died before it was asked anything
        raise died(crew[connection], parts, number) from error
    if number is None:
        crew.pop(connection).process.join()
        connection.close()
    else:
        crew[connection].part = number


def listen(connection: Connection, worker: Worker, parts: tuple[Part, ...], meter: Meter) -> Finished | None:
    try:
        kind, content = connection.recv()
    except (EOFError, OSError) as error:
        raise died(worker, parts, worker.part) from error
    if kind == "mistake":
        raise UserError(*content)
    if kind == "crash":
        raise RuntimeError(f"a worker failed at {describe(parts[worker.part])}\n{content}")
    if kind == "step":
        meter.add(content)
        return None
    assert isinstance(content, Finished)
    return content


def died(worker: Worker, parts: tuple[Part, ...], number: int | None) -> UserError:
    return UserError(
        f"a worker was ended from outside ({how_it_ended(worker.process)})",
        f"it was at {describe(parts[number])}" if number is not None else "it had nothing to do",
        "SIGKILL is mostly a lack of memory: use fewer --processes; SIGBUS a file that shrank while it was read. "
        "The same command goes on from the parts that are finished",
    )


def describe(part: Part) -> str:
    return part[0].file.path + (f" and {len(part) - 1} more files" if len(part) > 1 else "")


# a worker


def work(connection: Connection, order: Preparation, encoder: TokenizerId) -> None:
    """Part after part, until told to go. Ctrl-C is the parent's business: it reaches every process of the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    encode = tokenizer(order.tokenizer)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the parent has gone: nobody to tell
        while (task := connection.recv()) is not None:
            number, part = task
            try:
                done = prepare_part(number, part, order, encode, encoder, lambda step: connection.send(("step", step)))
                connection.send(("done", done))
            except UserError as error:
                connection.send(("mistake", (error.problem, error.why, error.fix)))
            except Exception:
                connection.send(("crash", traceback.format_exc()))


def prepare_part(
    number: int,
    part: Part,
    order: Preparation,
    encode: Tokenizer,
    encoder: TokenizerId,
    tell: OnProgress,
) -> Finished:
    outputs = {split: Output(shard_path(order.out, split, number), encoder) for split in ("train", "val")}
    pulse = Pulse(tell)
    try:
        for piece in read_part(part, order.reading):
            ids = encode.encode(piece.text)
            outputs["val" if is_val(piece.key, order.val_fraction) else "train"].add(ids, piece.ends)
            pulse.count(piece, ids.size)
        pulse.send()
        headers = {split: output.finish() for split, output in outputs.items()}
    except BaseException:
        for output in outputs.values():
            output.discard()
        raise
    return Finished(part=number, **headers, documents=pulse.documents, text_bytes=pulse.text_bytes)


@final
class Output:
    """One split of one part: collects small documents, writes large pieces, and makes no file for nothing."""

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


@final
class Pulse:
    """What a worker tells of its work, a few times a second."""

    def __init__(self, tell: OnProgress) -> None:
        self._tell, self._last = tell, time.monotonic()
        self._step = [0, 0, 0, 0]  # bytes done, text bytes, documents, tokens: a list, since this runs per document
        self.documents = self.text_bytes = 0

    def count(self, piece: Piece, tokens: int) -> None:
        size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        self._step[0] += piece.passed
        self._step[1] += size
        self._step[2] += piece.ends
        self._step[3] += tokens + piece.ends
        self.text_bytes += size
        self.documents += piece.ends
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.send()

    def send(self) -> None:
        names = ("bytes_done", "text_bytes", "documents", "tokens")
        self._tell(Progress(bytes_total=0, **dict(zip(names, self._step, strict=True))))
        self._step, self._last = [0, 0, 0, 0], time.monotonic()
