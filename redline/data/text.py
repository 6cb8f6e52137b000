"""Where the text comes from: the prose every CPython ships with, or one UTF-8 file of the user's.

    read_corpus("sample") -> half a megabyte of the Python manual;  read_corpus("novels.txt") -> that file's text

Nothing is downloaded, cleaned or split here: what a file holds is what the tokenizer sees.
"""

from __future__ import annotations

from pathlib import Path

from redline.core.errors import UserError
from redline.core.workload import SAMPLE_CORPUS

GIVE_A_FILE = f"give the path of a UTF-8 text file, or {SAMPLE_CORPUS!r} for the embedded text"


def read_corpus(corpus: str) -> str:
    """Return the whole text, which is never empty. Raise a UserError if it cannot be read."""
    return "\n\n".join(sample_documents()) if corpus == SAMPLE_CORPUS else _text_of(corpus, _read_bytes(corpus))


def check_corpus(corpus: str) -> None:
    """Raise what read_corpus would raise; called before a run writes anything."""
    read_corpus(corpus)


def sample_documents() -> tuple[str, ...]:
    """Return Python's help topics in sorted order. Their wording depends on the Python version, which runs record."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "the embedded sample text is missing", f"this Python was built without pydoc_data ({error})", GIVE_A_FILE
        ) from error
    return tuple(topics[name] for name in sorted(topics))


def _read_bytes(corpus: str) -> bytes:
    path = Path(corpus)
    try:
        if path.exists() and not path.is_file():
            # A pipe would be empty for the second reader, and a device such as /dev/zero never ends.
            what = (
                "it is a directory"
                if path.is_dir()
                else "it is not a regular file, and the text is read more than once"
            )
            raise _unreadable(corpus, what)
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(corpus, error.strerror or str(error)) from error
    except ValueError as error:  # a NUL byte in the path itself
        raise _unreadable(corpus, str(error)) from error


def _text_of(corpus: str, data: bytes) -> str:
    if not data:
        raise UserError(f"the corpus {corpus!r} is empty", "training needs text", GIVE_A_FILE)
    nul_position = data.find(b"\0")
    if nul_position >= 0:  # valid UTF-8, but never in text: an archive, a token file, UTF-16 without its mark
        raise _not_text(corpus, f"there is a NUL byte at byte {nul_position}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(corpus, f"byte {error.start} is not UTF-8 ({error.reason})") from error


def _unreadable(corpus: str, why: str) -> UserError:
    return UserError(f"cannot read the corpus {corpus!r}", why, GIVE_A_FILE)


def _not_text(corpus: str, why: str) -> UserError:
    return UserError(
        f"the corpus {corpus!r} is not UTF-8 text",
        why,
        "unpack it if it is compressed, or convert it: iconv -f latin1 -t utf-8 OLD > NEW",
    )
