"""Token shards, which are self-describing files of tokens, and the folders of them that `redline data prepare` makes.

    write_shard(path, tokenizer_id(tokenizer("gpt2")), [ids_of_one_document, ids_of_the_next])
    data = open_dataset(Path("tokens/"), vocab=50257);  data.train.gather(starts, length)

    bytes 0 to 19    magic, version, length and checksum of the header
    bytes 20 to 4095 the header: JSON, padded with spaces
    from 4096        the tokens, uint16 or uint32, little endian; zeros up to a multiple of 8
    then             where each document ends, one uint64 each: the place after its end of text

A document that is longer than a shard continues in the next one. Files appear whole or not at all, and a data set is
checked when it is opened (`open_dataset` says how thoroughly). Nothing is ever unpickled. No torch here.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy

from redline.core.checkpoint_writer import sync_folder
from redline.core.errors import UserError, explained
from redline.core.units import counted
from redline.core.values import from_json, to_json
from redline.data.tokenizer import Tokenizer
from redline.data.tokens import token_dtype

MAGIC, VERSION = b"REDLTOK\n", 1
PREAMBLE = struct.Struct("<8sIII")
DATA_START = 4096  # a page: the tokens can be mapped by themselves
HASH_BYTES = 32
INDEX_FILE, STAMPS_FILE, PREPARE_FILE = "index.json", "stamps.json", "prepare.json"
SHARD_SUFFIX = ".tokens"
AGAIN = "prepare the data again, or copy the file again from where it is whole"
CHECK_TOKENS = 1 << 24  # checked at a time, which needs little memory


@final
@dataclass(frozen=True, kw_only=True)
class TokenizerId:
    """What must agree between a shard and its reader."""

    name: str
    vocab: int
    end_of_text: int
    fingerprint: str


@final
@dataclass(frozen=True, kw_only=True)
class Header:
    tokenizer: TokenizerId
    dtype: str
    tokens: int
    documents: int
    """Documents that end in this shard."""
    hash: str
    """blake2b of every byte after the header."""

    def __post_init__(self) -> None:
        if self.dtype != numpy.dtype(token_dtype(self.tokenizer.vocab)).name or self.tokens < 0 or self.documents < 0:
            raise ValueError(f"{self.tokens} tokens of {self.dtype} in {self.documents} documents make no sense")

    @property
    def tokens_bytes(self) -> int:
        """Bytes of the tokens and of the zeros after them, which align the ends that follow."""
        return -(-self.tokens * numpy.dtype(self.dtype).itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        return DATA_START + self.tokens_bytes + 8 * self.documents


def tokenizer_id(tokenizer: Tokenizer) -> TokenizerId:
    """Fingerprint what the tokenizer does, not its files: the text of every id, and the ids of a probe text."""
    digest = hashlib.sha256(f"{tokenizer.name} {tokenizer.vocab} {tokenizer.end_of_text}".encode())
    for token in range(tokenizer.vocab):
        digest.update(tokenizer.decode([token]).encode())
    letters = "".join(map(chr, range(0x20, 0x250)))
    probe = f"It's 2026, and {letters}\r\n\t  they'll  say: don't!!!\n\n\n" + "\u4f60\u597d \U0001f600 \u00a0 x\u0301"
    digest.update(tokenizer.encode(probe).astype("<u4").tobytes())
    return TokenizerId(
        name=tokenizer.name,
        vocab=tokenizer.vocab,
        end_of_text=tokenizer.end_of_text,
        fingerprint=digest.hexdigest()[:32],
    )


# writing


@final
class ShardWriter:
    """Writes tokens as they come; memory holds eight bytes per document and nothing else.

    finish() makes the file appear; discard() removes the draft instead.
    """

    def __init__(self, path: Path, tokenizer: TokenizerId) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._draft = path.with_name(path.name + ".draft")
        self._dtype = numpy.dtype(token_dtype(tokenizer.vocab)).newbyteorder("<")
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self._tokens, self._ends = 0, array("Q")
        with explaining(path):
            self._file = open(self._draft, "wb")  # noqa: SIM115
            self._file.seek(DATA_START)

    def add(self, ids: numpy.ndarray, ends: Iterable[int] = ()) -> None:
        """Write tokens, ends of text included; `ends` are the places among them right after an end of text."""
        if ids.size and int(ids.max()) >= self._tokenizer.vocab:
            raise beyond_vocabulary(self._path, ids, self._tokens, self._tokenizer.vocab)
        self._ends.extend(self._tokens + end for end in ends)
        self._tokens += ids.size
        self._write(ids.astype(self._dtype).tobytes())

    def finish(self) -> Header:
        header = Header(
            tokenizer=self._tokenizer,
            dtype=self._dtype.name,
            tokens=self._tokens,
            documents=len(self._ends),
            hash="",
        )
        self._write(bytes(header.tokens_bytes - self._tokens * self._dtype.itemsize))
        self._write(numpy.array(self._ends, dtype="<u8").tobytes())
        header = replace(header, hash=self._hash.hexdigest())
        with explaining(self._path):
            self._file.seek(0)
            self._file.write(_header_bytes(header))
            publish(self._file, self._draft, self._path)
        return header

    def discard(self) -> None:
        self._file.close()
        self._draft.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        with explaining(self._path):
            self._file.write(data)
        self._hash.update(data)


def write_shard(path: Path, tokenizer: TokenizerId, documents: Iterable[numpy.ndarray]) -> Header:
    """Write documents, adding an end of text after each."""
    writer = ShardWriter(path, tokenizer)
    try:
        for ids in documents:
            writer.add(numpy.append(ids, numpy.uint32(tokenizer.end_of_text)), ends=[len(ids) + 1])
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def _header_bytes(header: Header) -> bytes:
    text = json.dumps(to_json(header)).encode().ljust(DATA_START - PREAMBLE.size)
    return PREAMBLE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def publish(file: Any, draft: Path, path: Path) -> None:
    """Flush the bytes to disk, rename the file, then sync the folder: after any crash the file is whole or absent."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(draft, path)
    sync_folder(path.parent)


def write_json(path: Path, document: Any) -> None:
    draft = path.with_name(path.name + ".draft")
    with explaining(path):
        file = open(draft, "w", encoding="utf-8")  # noqa: SIM115
        with file:
            json.dump(document, file, indent=1)
            file.write("\n")
            publish(file, draft, path)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    with explained(f"cannot write {path}", "free some space, or choose another folder"):
        yield


# reading


@final
@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard whose form has been checked. Each process maps the file itself, at first use."""

    path: Path
    header: Header
    stamp: tuple[int, int]
    """Size and time of the last change (ns) when the shard was opened."""

    @cached_property
    def tokens(self) -> numpy.ndarray:
        return self._map(self.header.dtype, DATA_START, self.header.tokens)

    @cached_property
    def ends(self) -> numpy.ndarray:
        return self._map("uint64", DATA_START + self.header.tokens_bytes, self.header.documents)

    def check_unchanged(self) -> None:
        """Raise a UserError if the file has changed; cheap enough for every batch. A file that shrinks under a memory
        map ends the process without a message."""
        now = stamp_of(self.path)
        if now != self.stamp:
            raise UserError(
                f"{self.path} changed while it was being read",
                f"it had {self.stamp[0]:,} bytes when it was opened and has {now[0]:,} now, or was written since",
                "let nobody write to the data of a run; `redline data check` says what is left of it",
            )

    def _map(self, dtype: str, start: int, count: int) -> numpy.ndarray:
        if not count:
            return numpy.empty(0, dtype=dtype)
        little = numpy.dtype(dtype).newbyteorder("<")
        # A plain view of the map: slicing numpy.memmap itself costs several times as much.
        return numpy.asarray(numpy.memmap(self.path, mode="r", dtype=little, offset=start, shape=(count,)))

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map writes out its contents. Another process gets the path and maps the file again.
        return {name: value for name, value in self.__dict__.items() if name not in ("tokens", "ends")}


def open_shard(path: Path) -> Shard:
    """Open a shard and check its magic, version, header and length; `verify_shard` reads every token."""
    with explained(f"cannot read the shard {path}", AGAIN), open(path, "rb") as file:
        head, stamp = file.read(DATA_START), stamp_of(path)
    header = _read_header(path, head)
    if stamp[0] != header.file_bytes:
        state = "is cut short" if stamp[0] < header.file_bytes else "is longer than it says"
        raise UserError(
            f"the shard {path} {state}",
            f"its {counted(header.tokens, 'token')} and {counted(header.documents, 'document')} are "
            f"{header.file_bytes:,} bytes, and the file ends at byte {stamp[0]:,}",
            AGAIN,
        )
    return Shard(path=path, header=header, stamp=stamp)


def _read_header(path: Path, head: bytes) -> Header:
    if not head:
        raise UserError(f"the shard {path} is empty", "it has 0 bytes", AGAIN)
    if not head.startswith(MAGIC):
        raise UserError(
            f"{path} is not a token shard", f"byte 0 begins {head[:8]!r} where a shard has {MAGIC!r}", AGAIN
        )
    if len(head) < DATA_START:
        raise UserError(
            f"the shard {path} is cut short", f"its header is {DATA_START:,} bytes, the file {len(head):,}", AGAIN
        )
    _, version, length, checksum = PREAMBLE.unpack_from(head)
    if version != VERSION:
        raise UserError(
            f"the shard {path} is of version {version}",
            f"this redline reads version {VERSION} (byte 8)",
            "prepare the data again with this redline, or read it with the one that wrote it",
        )
    text = head[PREAMBLE.size :]
    if length != len(text) or zlib.crc32(text) != checksum:
        raise UserError(f"the header of {path} is damaged", "bytes 8 to 4,095 do not fit their checksum", AGAIN)
    try:
        return from_json(Header, json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"the header of {path} cannot be read", str(error), AGAIN) from error


def verify_shard(shard: Shard) -> None:
    """Check every byte: the vocabulary, the ends of documents, and the hash."""
    _check_ids(shard)
    _check_ends(shard)
    found = content_hash(shard)
    if found != shard.header.hash:
        raise UserError(
            f"the content of {shard.path} is damaged",
            f"bytes {DATA_START:,} to {shard.stamp[0]:,} have the hash {found[:16]}..., "
            f"the header says {shard.header.hash[:16]}...",
            AGAIN,
        )


def content_hash(shard: Shard) -> str:
    with explained(f"cannot read the shard {shard.path}", AGAIN), open(shard.path, "rb") as file:
        file.seek(DATA_START)
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=HASH_BYTES)).hexdigest()


def _check_ids(shard: Shard) -> None:
    vocab = shard.header.tokenizer.vocab
    for start in range(0, shard.header.tokens, CHECK_TOKENS):
        ids = shard.tokens[start : start + CHECK_TOKENS]
        if int(ids.max()) >= vocab:
            raise beyond_vocabulary(shard.path, ids, start, vocab)


def _check_ends(shard: Shard) -> None:
    """Raise a UserError unless the ends are exactly the places after an end of text."""
    end_of_text, known = shard.header.tokenizer.end_of_text, 0
    for start in range(0, shard.header.tokens, CHECK_TOKENS):
        found = numpy.flatnonzero(shard.tokens[start : start + CHECK_TOKENS] == end_of_text) + start + 1
        said = shard.ends[known : known + len(found)]
        if len(said) < len(found) or not numpy.array_equal(found, said):
            wrong = next((int(one) for one, other in zip(found, said, strict=False) if one != other), int(found[-1]))
            raise _wrong_ends(shard, f"the end of text at token {wrong - 1:,} is not among them")
        known += len(found)
    if known < shard.header.documents:
        raise _wrong_ends(shard, f"the tokens hold {known:,} ends of text, it lists {shard.header.documents:,}")


def _wrong_ends(shard: Shard, why: str) -> UserError:
    return UserError(f"the list of documents in {shard.path} is wrong", why, AGAIN)


def beyond_vocabulary(path: Path, ids: numpy.ndarray, start: int, vocab: int) -> UserError:
    place = int(numpy.flatnonzero(ids >= vocab)[0])
    return UserError(
        f"a token of {path} is beyond the vocabulary",
        f"token {start + place:,} is {int(ids[place])}, and the ids are 0 to {vocab - 1}",
        AGAIN,
    )


def stamp_of(path: Path) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


# a folder of shards


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    """Shards in order, as one long row of tokens; a window may cross from one shard into the next."""

    shards: tuple[Shard, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each shard begins, and where the last one ends."""
        return [0, *itertools.accumulate(shard.header.tokens for shard in self.shards)]

    @property
    def tokens(self) -> int:
        return self.offsets[-1]

    @property
    def documents(self) -> int:
        return sum(shard.header.documents for shard in self.shards)

    def gather(self, starts: Iterable[int], length: int) -> numpy.ndarray:
        """Return tokens [start, start + length) for each start, as [starts, length]."""
        starts = list(starts)
        windows = numpy.empty((len(starts), length), dtype=self.shards[0].header.dtype)
        for row, start in zip(windows, starts, strict=True):
            number = bisect.bisect_right(self.offsets, start) - 1
            while len(row):  # from one shard, or into the next ones too
                self.shards[number].check_unchanged()
                begin = start - self.offsets[number]
                piece = self.shards[number].tokens[begin : begin + len(row)]
                row[: len(piece)] = piece
                row, start, number = row[len(piece) :], start + len(piece), number + 1
        return windows

    @cached_property
    def document_offsets(self) -> list[int]:
        return [0, *itertools.accumulate(shard.header.documents for shard in self.shards)]

    def documents_before(self, position: int) -> int:
        """Count the documents that end in the first `position` tokens."""
        number = min(bisect.bisect_right(self.offsets, position) - 1, len(self.shards) - 1)
        inside = numpy.searchsorted(self.shards[number].ends, position - self.offsets[number], side="right")
        return self.document_offsets[number] + int(inside)

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self.shards}


@final
@dataclass(frozen=True, kw_only=True)
class Dataset:
    folder: Path
    tokenizer: TokenizerId
    train: Split
    val: Split | None
    """None if no document fell into validation."""
    index: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order; a resumed run must find the same."""
        hashes = [[shard.header.hash for shard in split.shards] for split in (self.train, self.val) if split]
        return hashlib.sha256(json.dumps([to_json(self.tokenizer), hashes]).encode()).hexdigest()[:32]

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again, with enough detail to see what differs."""
        splits = {"train": self.train, "val": self.val}
        counts = {
            name: {"tokens": split.tokens if split else 0, "documents": split.documents if split else 0}
            for name, split in splits.items()
        }
        return {"fingerprint": self.fingerprint, **counts}


def quiet(message: str) -> None:
    pass


def open_dataset(
    folder: Path,
    *,
    vocab: int | None = None,
    tokenizer_name: str | None = None,
    verify: bool = True,
    say: Callable[[str], None] = quiet,
) -> Dataset:
    """Open a prepared folder, or raise a UserError that names the file and the place.

    The form and length of every shard are always checked, and its header against the index. Unless `verify` is off,
    shards whose size or time has changed since they were written or last checked are read in full: a copy is read at
    every opening until `redline data check` has stamped it. `vocab` and `tokenizer_name` are the model's.
    """
    index = read_index(folder)
    tokenizer = _tokenizer_of(folder, index)
    check_fits(f"the data in {folder}", tokenizer, vocab=vocab, name=tokenizer_name)
    splits = {}
    for name in ("train", "val"):
        shards = tuple(_open_listed(folder, entry, tokenizer) for entry in index[name]["shards"])
        splits[name] = Split(shards=shards) if shards else None
    if splits["train"] is None:
        raise UserError(f"{folder} holds nothing to train on", f"{INDEX_FILE} lists no shard for it", AGAIN)
    data = Dataset(folder=folder, tokenizer=tokenizer, train=splits["train"], val=splits["val"], index=index)
    if verify:
        _verify_unstamped(data, say)
    return data


def check_fits(what: str, tokenizer: TokenizerId, *, vocab: int | None, name: str | None) -> None:
    """Raise a UserError if the tokenizer does not fit the model, whose `vocab` and tokenizer's `name` are given."""
    if vocab is not None and tokenizer.vocab > vocab:
        raise UserError(
            f"{what} does not fit the model",
            f"its tokenizer {tokenizer.name!r} has ids 0 to {tokenizer.vocab - 1}, the model has {vocab} entries",
            f"use a model with a vocabulary of {tokenizer.vocab}, or prepare the text with another --tokenizer",
        )
    if name is not None and tokenizer.name != name:
        raise UserError(
            f"{what} does not fit the model",
            f"it was made with the tokenizer {tokenizer.name!r}, the model reads and writes {name!r}",
            f"prepare the text with --tokenizer {name}, or train a model of the other tokenizer",
        )


def _verify_unstamped(data: Dataset, say: Callable[[str], None]) -> None:
    stamps = read_stamps(data.folder)
    shards = (*data.train.shards, *(data.val.shards if data.val else ()))
    changed = [shard for shard in shards if stamps.get(shard.path.name) != list(shard.stamp)]
    if changed:
        which = f"{len(changed):,} of {len(shards):,} shards in {data.folder}"
        say(f"{which} were copied or changed since they were checked: reading them in full")
    for shard in changed:
        verify_shard(shard)


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_FILE
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if (folder / PREPARE_FILE).exists():
            raise UserError(
                f"the data in {folder} is not finished",
                "its preparation was interrupted",
                "run the same `redline data prepare` again: it continues where it stopped",
            ) from error
        raise UserError(
            f"{folder} holds no prepared data",
            f"its {INDEX_FILE} cannot be read ({error.strerror or error})",
            f"make some: redline data prepare TEXT --out {folder}",
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged", str(error), AGAIN) from error
    if not isinstance(index, dict) or index.get("format") != "redline-tokens":
        raise UserError(f"{path} is not an index of token shards", "it has no format 'redline-tokens'", AGAIN)
    if index.get("version") != VERSION:
        raise UserError(
            f"{folder} is of version {index.get('version')}",
            f"this redline reads version {VERSION}",
            "prepare the data again with this redline, or read it with the one that wrote it",
        )
    return index


def _tokenizer_of(folder: Path, index: dict[str, Any]) -> TokenizerId:
    try:
        for split in ("train", "val"):
            for entry in index[split]["shards"]:
                if Path(entry["name"]).name != entry["name"]:
                    raise ValueError(f"the shard {entry['name']!r} is not a file in the folder")
                from_json(Header, entry["header"])
        return from_json(TokenizerId, index["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / INDEX_FILE} is damaged", f"{type(error).__name__}: {error}", AGAIN) from error


def _open_listed(folder: Path, entry: dict[str, Any], tokenizer: TokenizerId) -> Shard:
    shard = open_shard(folder / entry["name"])
    found, listed = to_json(shard.header), entry["header"]
    for name in found:
        if found[name] != listed.get(name):
            raise UserError(
                f"{shard.path} is not the shard that {INDEX_FILE} lists",
                f"its {name} is {_short(found[name])}, the list says {_short(listed.get(name))}",
                AGAIN,
            )
    if shard.header.tokenizer != tokenizer:
        raise UserError(
            f"{shard.path} was made with another tokenizer than the rest",
            f"{_short(to_json(shard.header.tokenizer))} instead of {_short(to_json(tokenizer))}",
            AGAIN,
        )
    return shard


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_stamps(folder: Path) -> dict[str, Any]:
    """Return the stamps; if they are lost or damaged, the only cost is a full check."""
    try:
        found = json.loads((folder / STAMPS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_stamps(folder: Path, shards: Iterable[Shard]) -> None:
    write_json(folder / STAMPS_FILE, {shard.path.name: list(shard.stamp) for shard in shards})


def check_dataset(folder: Path) -> tuple[list[Shard], list[UserError]]:
    """Check every byte of every shard; return the intact shards, and an error for each of the others."""
    index = read_index(folder)
    tokenizer = _tokenizer_of(folder, index)
    whole, problems = [], []
    for entry in (*index["train"]["shards"], *index["val"]["shards"]):
        try:
            shard = _open_listed(folder, entry, tokenizer)
            verify_shard(shard)
            shard.check_unchanged()
            whole.append(shard)
        except UserError as error:
            problems.append(error)
    return whole, problems
