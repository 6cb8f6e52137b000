"""Text that is trained on without preparation: read through once at the start, and recognised when a run resumes.

    survey(Survey(sources=("novels/",), out=run / "text", tokenizer="gpt2", val_tokens=163_841))
    text = open_text(run / "text");  text.source, text.val, text.identity

    OUT/text.json    the sources, how they are read, size and time of every file, counts and a hash for every part
    OUT/val.tokens   held-out documents as a shard (data/shards.py): as many tokens as an evaluation takes

Reading costs a small fraction of tokenising, and finds before the first step what would otherwise end a run after
hours: a byte that is not UTF-8, a line that is not JSON, an archive cut short. It also counts the documents and finds
the held-out ones, which may be one in 200. A data set on the hub is not read ahead. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy

from redline.core.errors import UserError, explained
from redline.core.host import core_count, timestamp
from redline.core.values import from_json, to_json
from redline.data.pool import Meter, OnProgress, Pulse, Task, unheard, work_through
from redline.data.prepare import check_val_fraction, file_difference, files_of, is_val
from redline.data.shards import (
    ShardWriter,
    Split,
    TokenizerId,
    check_fits,
    explaining,
    open_shard,
    quiet,
    tokenizer_id,
    verify_shard,
    write_json,
)
from redline.data.sources import HUB, Found, Part, Piece, Reading, cut_parts, find_sources, read_part
from redline.data.tokenizer import tokenizer

TEXT_FILE, VAL_FILE = "text.json", "val.tokens"
FORMAT, VERSION = "redline-text", 1
SMALLEST_PART, LARGEST_PART = 1 << 16, 1 << 26
READ_HERE_BYTES = 1 << 23  # starting processes takes longer than reading this much
ANEW = "put the text back as it was, or start a new run"


@final
@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Text cut into parts, and how it becomes tokens: all that decides which tokens there are, but not their order."""

    parts: tuple[Part, ...]
    reading: Reading
    tokenizer: TokenizerId
    val_fraction: float
    hashes: tuple[str, ...]
    """A hash of the text of each part; on the hub, which is not read ahead, the data set's name."""

    def is_val(self, piece: Piece) -> bool:
        return is_val(piece.key, self.val_fraction)

    @property
    def fingerprint(self) -> str:
        """Equal for equal text in equal order, wherever the files are and whenever they were written."""
        facts = [self.hashes, to_json(self.tokenizer), to_json(self.reading), self.val_fraction]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@final
@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """What reading through a part has found."""

    part: int
    documents: int
    """Documents that end in the part, as in a shard."""
    val_documents: int
    text_bytes: int
    val_bytes: int
    hash: str
    """A hash of the part's text and of the places where documents end."""


@final
@dataclass(frozen=True, kw_only=True)
class Survey:
    """An order: which text to read, how, and where to write what was found."""

    sources: tuple[str, ...]
    out: Path
    tokenizer: str = "gpt2"
    reading: Reading = field(default_factory=Reading)
    val_fraction: float = 0.005
    val_tokens: int
    """How many tokens of held-out documents to keep."""
    processes: int | None = None
    """None: one per core."""
    command: str = ""

    def __post_init__(self) -> None:
        check_val_fraction(self.val_fraction)


@final
@dataclass(frozen=True, kw_only=True)
class StreamedText:
    """An opened folder; the text that it describes is there and unchanged."""

    folder: Path
    source: TextSource
    val: Split | None
    """None if no document is held out."""
    index: dict[str, Any]

    @property
    def tokenizer(self) -> TokenizerId:
        return self.source.tokenizer

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again, with enough detail to see what differs."""
        return {
            "text": self.source.fingerprint,
            "documents": self.index["documents"],
            "bytes of text": self.index["text_bytes"],
            "reading": {**to_json(self.source.reading), "val_fraction": self.source.val_fraction},
        }


# reading it through


def survey(order: Survey, on_progress: OnProgress = unheard) -> dict[str, Any]:
    """Read every file, write the folder, and return its text.json. A bad file raises before anything is written."""
    words = [absolute(word) for word in order.sources]
    found = find_sources(words)
    encoder = tokenizer_id(tokenizer(order.tokenizer))
    size = part_size(found)
    parts = cut_parts(found.files, size, order.reading)
    task = partial(read_through, order.reading, order.val_fraction)
    todo = [number for number, part in enumerate(parts) if part[0].file.kind != "hub"]
    seen = read_parts(task, parts, todo, order.processes, on_progress)
    facts = [seen.get(number) for number in range(len(parts))]
    check_some_to_train(facts)
    source = TextSource(
        parts=parts,
        reading=order.reading,
        tokenizer=encoder,
        val_fraction=order.val_fraction,
        hashes=hashes_of(parts, facts),
    )
    with explaining(order.out):
        order.out.mkdir(parents=True, exist_ok=True)
    kept = hold_out(source, facts, order)
    about = {"sources": {"words": words, "bytes": found.size}, "part_bytes": size, "files": files_of(found)}
    index = {**index_of(source, facts), **about, "val_tokens": kept, "notes": notes_on(found, facts, kept, order)}
    index |= {"date": timestamp(), "command": order.command}
    write_json(order.out / TEXT_FILE, index)
    return index


def index_of(source: TextSource, facts: Sequence[PartFacts | None]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": to_json(source.tokenizer),
        "reading": to_json(source.reading),
        "val_fraction": source.val_fraction,
        "documents": totals(facts, "documents", "val_documents"),
        "text_bytes": totals(facts, "text_bytes", "val_bytes"),
        "parts": to_json(facts),
    }


def part_size(found: Found) -> int:
    """Derive the size from the files alone, as everything must be that decides the order of tokens."""
    return min(max(found.size // 1024, SMALLEST_PART), LARGEST_PART)


def read_parts(
    task: Task[PartFacts],
    parts: Sequence[Part],
    todo: Sequence[int],
    processes: int | None = None,
    on_progress: OnProgress = unheard,
) -> dict[int, PartFacts]:
    size = sum(span.size for number in todo for span in parts[number])
    meter = Meter(parts, size, [], on_progress)
    if size <= READ_HERE_BYTES:
        return {number: task(number, parts[number], meter.add) for number in todo}
    found = work_through(partial(same, task), parts, todo=todo, processes=processes or core_count(), meter=meter)
    with contextlib.closing(found):
        return {facts.part: facts for facts in found}


def same(task: Task[PartFacts]) -> Task[PartFacts]:
    """Return the task itself: a worker has nothing to set up."""
    return task


def read_through(reading: Reading, val_fraction: float, number: int, part: Part, on_progress: OnProgress) -> PartFacts:
    digest, pulse = hashlib.blake2b(digest_size=16), Pulse(on_progress)
    val_documents = val_bytes = 0
    for piece in read_part(part, reading):
        words = piece.text.encode()
        digest.update(words)
        if piece.ends:
            digest.update(b"\xff")  # a byte that never occurs in UTF-8
        if is_val(piece.key, val_fraction):
            val_documents += piece.ends
            val_bytes += len(words)
        pulse.count(piece, len(words), 0)
    pulse.send()
    return PartFacts(
        part=number,
        documents=pulse.documents,
        val_documents=val_documents,
        text_bytes=pulse.text_bytes,
        val_bytes=val_bytes,
        hash=digest.hexdigest(),
    )


def hashes_of(parts: Sequence[Part], seen: Sequence[PartFacts | None]) -> tuple[str, ...]:
    return tuple(part[0].file.path if facts is None else facts.hash for part, facts in zip(parts, seen, strict=True))


def totals(seen: Sequence[PartFacts | None], name: str, val_name: str) -> dict[str, int | None]:
    """Return the totals of train and val; None if a part was not read."""
    known = [facts for facts in seen if facts is not None]
    if len(known) < len(seen):
        return {"train": None, "val": None}
    val = sum(getattr(facts, val_name) for facts in known)
    return {"train": sum(getattr(facts, name) for facts in known) - val, "val": val}


def check_some_to_train(seen: Sequence[PartFacts | None]) -> None:
    if totals(seen, "text_bytes", "val_bytes")["train"] == 0:
        documents = sum(facts.documents for facts in seen if facts is not None)
        raise UserError(
            "there is nothing to train on",
            f"all of the {documents} documents fell into validation" if documents else "no document holds any text",
            "give more documents (--split-documents cuts a text file into some), or a smaller --val-fraction",
        )


def notes_on(found: Found, seen: Sequence[PartFacts | None], kept: int, order: Survey) -> list[str]:
    notes = list(found.notes)
    if any(facts is None for facts in seen):
        notes.append("what lies on the hub was not read through: mistakes in it show up under way")
    if order.val_fraction and not kept:
        notes.append(
            f"validation is empty: no document fell into its {order.val_fraction:g}; more documents "
            "(--split-documents) or a larger --val-fraction give it some"
        )
    return notes


def absolute(word: str) -> str:
    """Make a path in the user's word absolute, since a run may be resumed from another folder."""
    scheme, path = (HUB, word.removeprefix(HUB)) if word.startswith(HUB) else ("", word)
    if scheme and not Path(path).exists():
        return word  # a name on the hub
    return scheme + str(Path(path).expanduser().absolute())


# held-out documents


def hold_out(source: TextSource, seen: Sequence[PartFacts | None], order: Survey) -> int:
    """Write tokens of held-out documents until there are enough, and return how many; if none, write no file."""
    writer, kept = ShardWriter(order.out / VAL_FILE, source.tokenizer), 0
    try:
        for ids, ends in val_tokens(source, seen, order.tokenizer):
            ids = ids[: order.val_tokens - kept]
            writer.add(ids, [end for end in ends if end <= len(ids)])
            kept += len(ids)
            if kept == order.val_tokens:
                break
    except BaseException:
        writer.discard()
        raise
    if kept:
        writer.finish()
    else:
        writer.discard()
    return kept


def val_tokens(
    source: TextSource, seen: Sequence[PartFacts | None], name: str
) -> Iterator[tuple[numpy.ndarray, list[int]]]:
    """Yield held-out tokens and their ends of documents, piece by piece. Parts come in the order of their hashes, so
    that they are from all over the text."""
    encoder = tokenizer(name)
    end = numpy.array([encoder.end_of_text], dtype=numpy.uint32)
    with_some = [facts for facts in seen if facts is not None and facts.val_bytes]
    numbers = [facts.part for facts in sorted(with_some, key=lambda facts: facts.hash)]
    unread = [number for number, facts in enumerate(seen) if facts is None] if source.val_fraction else []
    for number in (*numbers, *unread):
        for piece in read_part(source.parts[number], source.reading):
            if source.is_val(piece):
                ids = encoder.encode(piece.text)
                yield (numpy.append(ids, end), [len(ids) + 1]) if piece.ends else (ids, [])


# opening it again


def open_text(
    folder: Path, *, vocab: int | None = None, tokenizer_name: str | None = None, say: Callable[[str], None] = quiet
) -> StreamedText:
    """Open the text of a run, or raise a UserError that says what has changed since it was surveyed.

    Files that were written since but kept their size are read again; if they hold the same text, nothing has changed.
    `vocab` and `tokenizer_name` are the model's.
    """
    index = read_index(folder)
    recorded, reading, facts = parse_index(folder, index)
    check_fits(f"the text of {folder}", recorded, vocab=vocab, name=tokenizer_name)
    if (now := tokenizer_id(tokenizer(recorded.name))) != recorded:
        raise UserError(
            f"the tokenizer {recorded.name!r} is not the one that {folder} was made with",
            f"its fingerprint was {recorded.fingerprint} and is now {now.fingerprint}",
            "install the version it was, or start a new run",
        )
    parts = find_again(folder, index, reading, say)
    source = TextSource(
        parts=parts,
        reading=reading,
        tokenizer=recorded,
        val_fraction=index["val_fraction"],
        hashes=hashes_of(parts, facts),
    )
    return StreamedText(folder=folder, source=source, val=open_val(folder, index), index=index)


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / TEXT_FILE
    try:
        with explained(f"cannot read {path}", "start a new run"):
            index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged", str(error), "start a new run") from error
    if not isinstance(index, dict) or (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        raise UserError(
            f"{path} cannot be used", f"it has no format {FORMAT!r} of version {VERSION}", "start a new run"
        )
    return index


def parse_index(folder: Path, index: dict[str, Any]) -> tuple[TokenizerId, Reading, list[PartFacts | None]]:
    try:
        for name in ("sources", "files", "val_fraction", "part_bytes", "val_tokens", "documents", "text_bytes"):
            index[name]
        facts = [None if found is None else from_json(PartFacts, found) for found in index["parts"]]
        return from_json(TokenizerId, index["tokenizer"]), from_json(Reading, index["reading"]), facts
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / TEXT_FILE} is damaged", why, "start a new run") from error


def find_again(folder: Path, index: dict[str, Any], reading: Reading, say: Callable[[str], None]) -> tuple[Part, ...]:
    """Return the parts, after checking that they hold the very text that was surveyed."""
    try:
        found = find_sources(index["sources"]["words"])
    except UserError as error:
        raise changed(f"{error.problem}: {error.why}") from error
    before, now = index["files"], files_of(found)
    # Files of the same kind and size, but another time.
    touched = {path for path in now.keys() & before if now[path] != before[path] and now[path][:2] == before[path][:2]}
    difference = file_difference(before, {path: before[path] if path in touched else now[path] for path in now})
    if difference is not None:
        raise changed(difference)
    parts = cut_parts(found.files, index["part_bytes"], reading)
    if len(parts) != len(index["parts"]):  # only the hub can cause that
        raise changed(f"it has {len(parts):,} parts now and had {len(index['parts']):,}")
    if touched:
        say(f"the text: {len(touched):,} of {len(now):,} files were modified, reading those again")
        check_same_text(parts, touched, index, reading)
        write_json(folder / TEXT_FILE, {**index, "files": now})
    return parts


def check_same_text(parts: Sequence[Part], touched: set[str], index: dict[str, Any], reading: Reading) -> None:
    todo = [number for number, part in enumerate(parts) if any(span.file.path in touched for span in part)]
    for number, facts in read_parts(partial(read_through, reading, index["val_fraction"]), parts, todo).items():
        if to_json(facts) != index["parts"][number]:
            first, *more = sorted({span.file.path for span in parts[number]} & touched)
            which = f"{first} or one of {len(more)} others" if more else first
            raise changed(f"{which} was written since and holds other words")


def changed(why: str) -> UserError:
    return UserError("the text of this run has changed", why, ANEW)


def open_val(folder: Path, index: dict[str, Any]) -> Split | None:
    if not index["val_tokens"]:
        return None
    shard = open_shard(folder / VAL_FILE)
    verify_shard(shard)  # a few hundred kilobytes
    return Split(shards=(shard,))
