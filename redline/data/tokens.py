"""The token file: one .npy of uint16 (uint32 for vocabularies above 65,536), memory-mapped by its readers.

    count = prepare_tokens(workload, run / "tokens.npy");  open_tokens(run / "tokens.npy")[:1024]

Mistakes are found before the file is made, and the file appears whole or not at all. No torch here.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy

from redline.core.errors import UserError
from redline.core.workload import Workload
from redline.data.text import read_corpus
from redline.data.tokenizer import tokenizer


def prepare_tokens(workload: Workload, path: Path) -> int:
    """Write the workload's text as tokens, and return how many there are."""
    ids = encode_corpus(workload)
    write_tokens(path, ids, workload.decoder.vocab)
    return len(ids)


def encode_corpus(workload: Workload) -> numpy.ndarray:
    """Return the workload's text as checked ids with an end of text at the end. Nothing is written."""
    encoder = tokenizer(workload.tokenizer)
    ids = numpy.append(
        encoder.encode(read_corpus(workload.corpus)).astype(numpy.uint32), numpy.uint32(encoder.end_of_text)
    )
    _check_count(len(ids), workload)
    _check_ids(ids, workload.decoder.vocab)
    return ids


def write_tokens(path: Path, ids: numpy.ndarray, vocab: int) -> None:
    ids = numpy.asarray(ids)
    _check_ids(ids, vocab)
    draft = path.with_name(path.name + ".draft")
    try:
        with open(draft, "wb") as file:  # given a name, numpy.save would add .npy to it
            numpy.save(file, ids.astype(token_dtype(vocab)), allow_pickle=False)
        os.replace(draft, path)  # readers see the old file or the new one, never half of it
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the tokens {path}",
            error.strerror or "the disk is full",  # numpy reports how many items it could not write, and no errno
            "free some space, or choose another folder with --out",
        ) from error


def open_tokens(path: Path) -> numpy.ndarray:
    """Return the tokens as a read-only memory map: opening costs microseconds, whatever the size."""
    try:
        tokens = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except (ValueError, EOFError) as error:  # not an .npy, cut short, or one that would need unpickling
        raise _unreadable(path, str(error)) from error
    if not isinstance(tokens, numpy.memmap) or tokens.ndim != 1 or tokens.dtype not in (numpy.uint16, numpy.uint32):
        raise _unreadable(path, "it is not one row of uint16 or uint32")
    return tokens


def token_dtype(vocab: int) -> type[numpy.unsignedinteger]:
    """Return the smaller of the two types of token files that holds ids 0 to vocab - 1."""
    return numpy.uint16 if vocab <= 1 << 16 else numpy.uint32


def _check_count(count: int, workload: Workload) -> None:
    # A window is `sequence` inputs and one more token for the last target; one token more makes two windows.
    sequence, needed = workload.shape.sequence, workload.shape.sequence + 2
    if count < needed:
        raise UserError(
            f"the corpus {workload.corpus!r} is too short",
            f"it has {count:,} tokens by {workload.tokenizer!r}; a sequence of {sequence:,} needs {needed:,}",
            "give a longer text, or a shape with a shorter sequence",
        )
    windows = count - sequence  # that TokenBatches draws from
    if workload.micro_batch > windows:
        raise UserError(
            f"the corpus {workload.corpus!r} is too short for a micro batch of {workload.micro_batch:,}",
            f"its {count:,} tokens hold {windows:,} different sequences of {sequence:,}; one step would repeat some",
            f"set --micro-batch to {windows} or less, or give a longer text with --data",
        )


def _check_ids(ids: numpy.ndarray, vocab: int) -> None:
    """Raise a UserError for ids outside the vocabulary: a cast to the file's type would silently wrap them."""
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.size:
        raise UserError(
            f"token id {outside.max()} is outside the vocabulary",
            f"{outside.size:,} of {ids.size:,} tokens are not among the ids 0 to {vocab - 1}",
            f"set vocab to at least {outside.max() + 1}, or use a smaller tokenizer such as 'bytes'",
        )


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(f"cannot read the tokens {path}", why, "start a new run: it writes its token file again")
