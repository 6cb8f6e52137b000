"""Reads documents from files: text, folders of it, JSON lines, parquet, Hugging Face data sets.

    found = find_sources(["novels/", "more.jsonl.gz"])
    for part in cut_parts(found.files, part_bytes=1 << 26):
        for piece in read_part(part, Reading(field="text")): ...          # always in the same order

A part is what one process reads at a time. Where parts begin and end depends on the files alone, so the documents and
their order do not depend on how many processes share the work. No torch or numpy here: `data prepare` plans with this.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, final

from redline.core.errors import UserError, unknown_name

# Only these are read from a folder. A file that the user names is text unless its name says otherwise.
SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
}
HUB = "hf:"  # hf:NAME or hf:NAME:CONFIG, through `datasets`
ERRORS = ("strict", "replace")
PIECE_BYTES = 1 << 20  # a long text is decoded and encoded in pieces of about this size: memory stays small
KEY_BYTES = 1 << 16  # how much of a document's beginning decides between train and val
CUT = re.compile(rb"[\x21-\x7e\x80-\xff](?=[ \n])")
INSTALL = "pip install zstandard pyarrow datasets"


@final
@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents."""

    field: str = "text"
    """The field of a JSON line, a parquet file or a data set that holds the text."""
    separator: str | None = None
    """The text between two documents of a text file. None: a file is one document."""
    errors: str = "strict"
    """For bytes that are not UTF-8: 'strict' stops and names the place, 'replace' substitutes U+FFFD."""
    split: str = "train"
    """The split of a Hugging Face data set."""

    def __post_init__(self) -> None:
        if self.errors not in ERRORS:
            raise unknown_name("way with invalid UTF-8", self.errors, ERRORS)
        if self.separator == "":
            raise UserError(
                "the separator of documents is empty",
                "it is found between any two letters",
                "give the text that stands between two documents, such as '\\n\\n\\n', or leave --split-documents out",
            )


@final
@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file, a saved data set or one on the hub: a single source from the user's point of view."""

    path: str
    """An absolute path, or the user's word for a data set on the hub."""
    kind: str
    size: int
    """Bytes on disk; 0 on the hub, where the size is unknown."""
    mtime_ns: int


@final
@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of one file, in its kind's own unit: bytes, row groups, rows, files on the hub."""

    file: SourceFile
    start: int
    stop: int
    size: int
    """About how many of the file's bytes it covers, to balance the parts."""


Part = tuple[Span, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Found:
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Piece(NamedTuple):
    """A document, or a piece of a long one, cut where the cut changes no token."""

    where: str
    """The document: its file, and where it begins there."""
    text: str
    key: int
    """A 64-bit hash of the document's beginning, the same for all its pieces; decides between train and val."""
    ends: bool
    """True if an end of text follows."""
    passed: int
    """Bytes of the file that this piece uses up, for progress reports."""


def read_part(part: Part, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of a part in order. Empty ones are skipped: they would be an end of text and nothing else."""
    for span in part:
        check_unchanged(span.file)
        yield from (piece for piece in READERS[span.file.kind](span, reading) if piece.text)
        check_unchanged(span.file)


def check_unchanged(file: SourceFile) -> None:
    if file.kind == "hub":
        return  # nothing that is cheap to query would show a change
    path = Path(file.path)
    try:
        now = _saved(path) if file.kind == "saved" else _file(path, file.kind)
    except OSError as error:
        raise unreadable(file.path, error.strerror or str(error)) from error
    if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
        raise UserError(
            f"{file.path} changed while it was being read",
            f"it had {file.size:,} bytes when the work was planned and has {now.size:,} now, or was written since",
            "wait until nobody writes to it, then start again",
        )


# which files


def find_sources(words: Iterable[str]) -> Found:
    """Return every file that the user's words name, folders in sorted order. Mistakes are found before any work."""
    files: list[SourceFile] = []
    passed_over: list[str] = []
    for word in words:
        files.extend(_files_of(word, passed_over))
    if not files:
        raise UserError("there is nothing to read", "no source was given", "name a text file, a folder or a .jsonl")
    _check_once(files)
    _check_filled(files)
    return Found(files=tuple(files), notes=_passed_over(passed_over))


def _files_of(word: str, passed_over: list[str]) -> list[SourceFile]:
    if word.startswith(HUB):
        if not word.removeprefix(HUB).partition(":")[0]:
            raise UserError(
                f"{word!r} names no data set", "nothing stands after 'hf:'", "write hf:NAME or hf:NAME:CONFIG"
            )
        return [SourceFile(path=word, kind="hub", size=0, mtime_ns=0)]
    path = Path(word).expanduser()
    try:
        if path.is_dir():
            return [_saved(path)] if _is_saved_dataset(path) else _in_folder(path, passed_over)
        if path.exists() and not path.is_file():
            raise unreadable(word, "it is not a regular file, and it is read more than once")
        return [_file(path, kind_of(path) or ("jsonl" if path.suffix == ".json" else "text"))]
    except OSError as error:
        raise unreadable(word, error.strerror or str(error)) from error
    except ValueError as error:  # a NUL byte in the path itself
        raise unreadable(word, str(error)) from error


def kind_of(path: Path) -> str | None:
    name = path.name.lower()
    longest_first = sorted(SUFFIXES, key=len, reverse=True)
    return next((SUFFIXES[suffix] for suffix in longest_first if name.endswith(suffix)), None)


def _in_folder(folder: Path, passed_over: list[str]) -> list[SourceFile]:
    found = []

    def stop(error: OSError) -> None:  # os.walk would skip what it may not open, and text would be missing
        raise error

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(root) / name
            if name.startswith("."):
                continue
            kind = kind_of(path)
            if kind is None:
                passed_over.append(str(path))
            else:
                found.append(_file(path, kind))
    if not found:
        raise UserError(
            f"{folder} holds nothing to read",
            f"no file below it ends in one of {', '.join(SUFFIXES)}",
            "name the files themselves: a file that is named is read as text whatever its ending",
        )
    return sorted(found, key=lambda file: Path(file.path).parts)


def _file(path: Path, kind: str) -> SourceFile:
    stat = path.stat()
    return SourceFile(path=str(path.absolute()), kind=kind, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or ((path / "dataset_info.json").is_file() and any_arrow(path))


def any_arrow(path: Path) -> bool:
    return any(path.glob("*.arrow"))


def _saved(path: Path) -> SourceFile:
    stats = [file.stat() for file in sorted(path.rglob("*.arrow"))]
    return SourceFile(
        path=str(path.absolute()),
        kind="saved",
        size=sum(stat.st_size for stat in stats),
        mtime_ns=max((stat.st_mtime_ns for stat in stats), default=0),
    )


def _check_once(files: list[SourceFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        where = file.path if file.kind == "hub" else os.path.realpath(file.path)
        if where in seen:
            raise UserError(
                f"{file.path} would be read twice",
                f"it is the same as {seen[where]}",
                "name every file once; a link counts as what it leads to",
            )
        seen[where] = file.path


def _check_filled(files: list[SourceFile]) -> None:
    empty = [file.path for file in files if file.size == 0 and file.kind != "hub"]
    if empty:
        others = f", and so are {len(empty) - 1:,} others" if len(empty) > 1 else ""
        raise UserError(
            f"{empty[0]} is empty{others}",
            "an empty file is more often a failed download than a document",
            "remove what is empty (find FOLDER -empty -delete), or fetch it again",
        )


def _passed_over(paths: list[str]) -> tuple[str, ...]:
    if not paths:
        return ()
    endings = sorted({Path(path).suffix or "none" for path in paths})
    shown = ", ".join(endings[:8]) + (", ..." if len(endings) > 8 else "")
    files = "1 file" if len(paths) == 1 else f"{len(paths):,} files"
    return (f"{files} skipped for an unknown file ending: {shown}",)


# which part of them


def cut_parts(files: Iterable[SourceFile], part_bytes: int, reading: Reading | None = None) -> tuple[Part, ...]:
    """Cut large files and combine small ones, always in order. Compressed files cannot be cut."""
    parts: list[Part] = []
    gathered: list[Span] = []
    size = 0
    for file in files:
        if file.kind == "hub" and gathered:  # a part of its own: it is not read ahead, its neighbours must be
            parts.append(tuple(gathered))
            gathered, size = [], 0
        for span in CUTTERS[file.kind](file, part_bytes, reading or Reading()):
            gathered.append(span)
            size += span.size
            if size >= part_bytes or file.kind not in ("text", "jsonl"):
                parts.append(tuple(gathered))
                gathered, size = [], 0
    return (*parts, tuple(gathered)) if gathered else tuple(parts)


def _cut_bytes(file: SourceFile, part_bytes: int, reading: Reading) -> Iterator[Span]:
    for start in range(0, file.size, part_bytes):
        stop = min(start + part_bytes, file.size)
        yield Span(file=file, start=start, stop=stop, size=stop - start)


def _cut_nothing(file: SourceFile, part_bytes: int, reading: Reading) -> Iterator[Span]:
    yield Span(file=file, start=0, stop=file.size, size=file.size)


def _cut_row_groups(file: SourceFile, part_bytes: int, reading: Reading) -> Iterator[Span]:
    with open_parquet(file.path) as parquet:
        check_column(parquet.schema_arrow.names, reading.field, file.path)
        sizes = [parquet.metadata.row_group(number).total_byte_size for number in range(parquet.num_row_groups)]
    start = 0
    for number in range(len(sizes)):
        if sum(sizes[start : number + 1]) >= part_bytes or number + 1 == len(sizes):
            share = sum(sizes[start : number + 1]) / max(1, sum(sizes))
            yield Span(file=file, start=start, stop=number + 1, size=int(file.size * share))
            start = number + 1


def _cut_rows(file: SourceFile, part_bytes: int, reading: Reading) -> Iterator[Span]:
    rows = len(open_saved(file.path, reading))
    step = max(1, rows * part_bytes // max(1, file.size))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Span(file=file, start=start, stop=stop, size=file.size * (stop - start) // rows)


def _cut_hub(file: SourceFile, part_bytes: int, reading: Reading) -> Iterator[Span]:
    for number in range(open_hub(file.path, reading).num_shards):
        yield Span(file=file, start=number, stop=number + 1, size=0)


CUTTERS: dict[str, Callable[[SourceFile, int, Reading], Iterator[Span]]] = {
    "text": _cut_bytes,
    "jsonl": _cut_bytes,
    "jsonl.gz": _cut_nothing,
    "jsonl.zst": _cut_nothing,
    "parquet": _cut_row_groups,
    "saved": _cut_rows,
    "hub": _cut_hub,
}


# text


def read_text(span: Span, reading: Reading) -> Iterator[Piece]:
    with open_map(span.file.path) as data:
        if reading.separator is not None:
            yield from _separated(data, span, reading)
            return
        # One document, of which this span may be a stretch. Neighbouring spans find their border by the same rule.
        start = cut_point(data, span.start) if span.start else 0
        stop = cut_point(data, span.stop)
        yield from _pieces(data, start, stop, first=0, last=len(data), file=span.file, reading=reading)


def _separated(data: mmap.mmap, span: Span, reading: Reading) -> Iterator[Piece]:
    """Yield the documents that begin inside the span: at the file's start, and right after each separator."""
    separator = (reading.separator or "").encode()
    if span.start == 0:
        start = 0
    else:
        found = data.find(separator, max(0, span.start - len(separator)))
        start = len(data) if found < 0 else found + len(separator)
    while start < min(span.stop, len(data)):
        # Search from inside the separator just passed: overlapping ones ('\n\n\n' for '\n\n') are two borders with
        # nothing between them. Otherwise the borders would depend on which part looks for them.
        found = data.find(separator, max(0, start - len(separator) + 1))
        stop, following = (len(data), len(data)) if found < 0 else (found, found + len(separator))
        if start < stop:
            yield from _pieces(data, start, stop, first=start, last=stop, file=span.file, reading=reading)
        start = following


def _pieces(
    data: mmap.mmap, start: int, stop: int, *, first: int, last: int, file: SourceFile, reading: Reading
) -> Iterator[Piece]:
    """Yield bytes [start, stop) of the document [first, last), in pieces of PIECE_BYTES or a little more."""
    key = document_key(data[first : min(last, first + KEY_BYTES)])
    where = f"{file.path}, byte {first:,}"
    while start < stop:
        end = min(cut_point(data, start + PIECE_BYTES), stop) if stop - start > PIECE_BYTES else stop
        text = _decode(data[start:end], start, file.path, reading.errors)
        yield Piece(where=where, text=text, key=key, ends=end == last, passed=end - start)
        start = end


def cut_point(data: mmap.mmap | bytes, position: int) -> int:
    """Return the first place from `position` on where a cut changes no token; the end of the data if there is none.

    Such a place is before a space or newline that follows a character other than white space. In GPT-2's pattern a
    word may begin with white space but never continues after it, so a word ends there whatever follows; raw bytes can
    be cut anywhere. A test checks that `encode(a) + encode(b) == encode(a + b)`.
    """
    for match in CUT.finditer(data, max(0, position - 1)):
        before = data[max(0, match.end() - 4) : match.end()].decode("utf-8", errors="ignore")
        if before and not before[-1].isspace():  # U+00A0, U+3000 and the like are white space in the pattern
            return int(match.end())
    return len(data)


def _decode(data: bytes, position: int, path: str, errors: str) -> str:
    nul = data.find(b"\0")
    if nul >= 0 and errors == "strict":  # valid UTF-8, but never in text: an archive, a token file, UTF-16
        raise not_text(path, f"there is a NUL byte at byte {position + nul:,}")
    try:
        return data.decode("utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise not_text(path, f"byte {position + error.start:,} is not UTF-8 ({error.reason})") from error


@contextmanager
def open_map(path: str) -> Iterator[mmap.mmap]:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def document_key(beginning: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(beginning[:KEY_BYTES], digest_size=8).digest())


# JSON lines


def read_json_lines(span: Span, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of the lines that begin inside the span."""
    try:
        with open(span.file.path, "rb", buffering=PIECE_BYTES) as file:
            position = span.start
            if position:  # a line that begins before the span belongs to the part before
                file.seek(position - 1)
                position += len(file.readline()) - 1
            while position < span.stop and (line := file.readline()):
                yield from _line_piece(line, span.file.path, position, reading, passed=len(line))
                position += len(line)
    except OSError as error:
        raise unreadable(span.file.path, error.strerror or str(error)) from error


def read_compressed_lines(span: Span, reading: Reading) -> Iterator[Piece]:
    path, position, passed = span.file.path, 0, 0
    try:
        with open(path, "rb") as raw, DECOMPRESSORS[span.file.kind](raw) as file:
            while line := file.readline():
                now = raw.tell()
                yield from _line_piece(line, path, position, reading, passed=now - passed)
                position, passed = position + len(line), now
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedZstdError) as error:
        raise UserError(
            f"{path} is damaged",
            f"it cannot be unpacked behind the line that begins at byte {position:,} of its text ({error})"
            if position
            else f"its first line cannot be unpacked ({error})",
            "fetch it again, or unpack what can be saved and give that",
        ) from error
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def _line_piece(line: bytes, path: str, position: int, reading: Reading, passed: int) -> Iterator[Piece]:
    if line.isspace():
        return
    where = f"{path}, byte {position:,}"
    try:
        text = line.decode("utf-8", errors=reading.errors)
    except UnicodeDecodeError as error:
        raise not_text(path, f"byte {position + error.start:,} is not UTF-8 ({error.reason})") from error
    try:
        record = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON lines",
            f"the line that begins at byte {position:,} cannot be read ({error})",
            'every line must be one JSON object, such as {"text": "..."}',
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get(reading.field), str):
        raise UserError(
            f"no text in field {reading.field!r} of {path}",
            f"the line that begins at byte {position:,} has {_fields_of(record, reading.field)}",
            "name the field that holds the text with --field",
        )
    yield _record_piece(record[reading.field], where, reading, passed)


def _fields_of(record: object, field: str) -> str:
    """Say what the record has instead of text in the field."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    if field in record:
        return f"a {type(record[field]).__name__} there"
    return ", ".join(record) or "no fields"


def _record_piece(text: str, where: str, reading: Reading, passed: int) -> Piece:
    try:
        beginning = text[:KEY_BYTES].encode()
        if len(text) > KEY_BYTES:
            text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, UTF-8 cannot
        if reading.errors == "strict":
            raise not_text(where, f"character {error.start:,} of the document is half a surrogate pair") from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        beginning = text[:KEY_BYTES].encode()
    return Piece(where=where, text=text, key=document_key(beginning), ends=bool(text), passed=passed)


class DamagedZstdError(Exception):
    pass


class _Zstd(io.RawIOBase):
    """Unpacks frame after frame. The package's own reader mistakes a file that is cut short for a complete one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._zstandard = optional("zstandard", ".zst files")
        self._raw, self._frame, self._ready, self._packed = raw, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready and self._more():
            pass
        count = min(len(into), len(self._ready))
        into[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _more(self) -> bool:
        """Unpack one block; return False at the end of the file, where a frame must end too."""
        packed = self._packed or self._raw.read(1 << 16)
        if not packed:
            if self._frame is not None:
                raise DamagedZstdError("the file ends inside a frame")
            return False
        frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = frame.decompress(packed)
        except self._zstandard.ZstdError as error:
            raise DamagedZstdError(str(error)) from error
        self._frame, self._packed = (None, frame.unused_data) if frame.eof else (frame, b"")
        return True


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    "jsonl.gz": lambda raw: io.BufferedReader(gzip.GzipFile(fileobj=raw), PIECE_BYTES),
    "jsonl.zst": lambda raw: io.BufferedReader(_Zstd(raw), PIECE_BYTES),
}


# parquet and Hugging Face


def read_parquet(span: Span, reading: Reading) -> Iterator[Piece]:
    with open_parquet(span.file.path) as parquet:
        groups = list(range(span.start, span.stop))
        rows = max(1, sum(parquet.metadata.row_group(number).num_rows for number in groups))
        row = sum(parquet.metadata.row_group(number).num_rows for number in range(span.start))
        for batch in parquet.iter_batches(batch_size=256, row_groups=groups, columns=[reading.field]):
            for text in batch.column(0).to_pylist():
                yield _row_piece(text, span.file.path, row, reading, span.size // rows)
                row += 1


def read_saved(span: Span, reading: Reading) -> Iterator[Piece]:
    dataset, row = open_saved(span.file.path, reading), span.start
    passed = span.size // max(1, span.stop - span.start)
    for batch in dataset.select(range(span.start, span.stop)).iter(batch_size=256):
        for text in batch[reading.field]:
            yield _row_piece(text, span.file.path, row, reading, passed)
            row += 1


def read_hub(span: Span, reading: Reading) -> Iterator[Piece]:
    dataset = open_hub(span.file.path, reading)
    where = f"{span.file.path}, file {span.start}"
    rows = enumerate(dataset.shard(num_shards=dataset.num_shards, index=span.start))
    while True:
        with explaining_hub(span.file.path):  # rows are fetched on demand
            row, record = next(rows, (0, None))
        if record is None:
            return
        check_column(list(record), reading.field, span.file.path)
        yield _row_piece(record[reading.field], where, row, reading, 0)


def _row_piece(text: object, path: str, row: int, reading: Reading, passed: int) -> Piece:
    if not isinstance(text, str):
        raise UserError(
            f"no text in row {row:,} of {path}",
            f"its field {reading.field!r} holds {'nothing' if text is None else f'a {type(text).__name__}'}",
            "name the field that holds the text with --field, or leave such rows out",
        )
    return _record_piece(text, f"{path}, row {row:,}", reading, passed)


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    arrow, parquet = optional("pyarrow", "parquet files"), optional("pyarrow.parquet", "parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path}", " ".join(str(error).split()), "fetch or write the file again") from error


def open_saved(path: str, reading: Reading) -> Any:
    """Open a folder written by `save_to_disk`."""
    datasets = optional("datasets", "data sets of Hugging Face")
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}", " ".join(str(error).split()), "save the data set again") from error
    if isinstance(found, datasets.DatasetDict):
        if reading.split not in found:
            raise unknown_name(f"split of {path}", reading.split, found)
        found = found[reading.split]
    check_column(found.column_names, reading.field, path)
    return found.select_columns([reading.field])


def open_hub(word: str, reading: Reading) -> Any:
    datasets = optional("datasets", "data sets of Hugging Face")
    name, _, config = word.removeprefix(HUB).partition(":")
    with explaining_hub(word):
        return datasets.load_dataset(name, config or None, split=reading.split, streaming=True)


@contextmanager
def explaining_hub(word: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # network, file formats and hub raise errors of any type: all are about this name
        raise UserError(
            f"cannot read the data set {word.removeprefix(HUB).partition(':')[0]!r}",
            " ".join(str(error).split())[:300] or type(error).__name__,
            "check the name, its config (hf:NAME:CONFIG), --split and the network; or fetch the files and name those",
        ) from error


def check_column(names: list[str], field: str, path: str) -> None:
    if field not in names:
        raise UserError(
            f"{path} has no field {field!r}", f"it has: {', '.join(names)}", "name the one with the text with --field"
        )


def optional(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"{what} need the package {package}", str(error), f"pip install {package} (or all three: {INSTALL})"
        ) from error


READERS: dict[str, Callable[[Span, Reading], Iterator[Piece]]] = {
    "text": read_text,
    "jsonl": read_json_lines,
    "jsonl.gz": read_compressed_lines,
    "jsonl.zst": read_compressed_lines,
    "parquet": read_parquet,
    "saved": read_saved,
    "hub": read_hub,
}


def unreadable(path: str, why: str) -> UserError:
    return UserError(
        f"cannot read {path}", why, "name a text file, a folder, a .jsonl, .jsonl.gz, .jsonl.zst or .parquet"
    )


def not_text(where: str, why: str) -> UserError:
    return UserError(
        f"{where} is not UTF-8 text",
        why,
        "unpack it if it is compressed, convert it (iconv -f latin1 -t utf-8 OLD > NEW), or use --errors replace",
    )
