"""read_corpus: the embedded sample, a user's file, and every way a file can disappoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.workload import SAMPLE_CORPUS
from redline.data.text import _text_of, check_corpus, read_corpus


def test_sample_is_half_a_megabyte_of_prose() -> None:
    text = read_corpus(SAMPLE_CORPUS)
    assert len(text) > 400_000
    assert text.count(" the ") > 3_000
    check_corpus(SAMPLE_CORPUS)


def test_sample_is_the_help_topics_in_sorted_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pydoc_data.topics.topics", {"b": "second\n", "a": "first"})
    assert read_corpus(SAMPLE_CORPUS) == "first\n\nsecond\n"


def test_sample_missing_from_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "pydoc_data" in problem_of(SAMPLE_CORPUS).why


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("Größe\r\n\tdone \n".encode())  # no newline translated, nothing stripped
    assert read_corpus(str(path)) == "Größe\r\n\tdone \n"
    check_corpus(str(path))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_utf8_text_survives(text: str) -> None:
    assert _text_of("x", text.encode()) == text


def problem_of(corpus: str | Path) -> UserError:
    """The error, which both functions must raise alike."""
    with pytest.raises(UserError) as checked:
        check_corpus(str(corpus))
    with pytest.raises(UserError) as read:
        read_corpus(str(corpus))
    assert read.value.lines() == checked.value.lines()
    assert "UTF-8" in read.value.fix or "utf-8" in read.value.fix
    return read.value


def test_missing(tmp_path: Path) -> None:
    error = problem_of(tmp_path / "none.txt")
    assert "none.txt" in error.problem
    assert error.why == "No such file or directory"


def test_directory(tmp_path: Path) -> None:
    assert problem_of(tmp_path).why == "it is a directory"


def test_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in problem_of(tmp_path / "pipe").why


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything: let the system call answer as it would for others

        def refuse(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", refuse)
    assert problem_of(path).why == "Permission denied"


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "is empty" in problem_of(tmp_path / "empty.txt").problem


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"abc\xffdef", "byte 3 is not UTF-8"),
        ("é".encode() + b"\xe9 is latin-1", "byte 2 is not UTF-8"),
        ("text".encode("utf-16"), "NUL byte at byte 3"),
        (b"text\0", "NUL byte at byte 4"),
        (b"cut \xc3", "byte 4 is not UTF-8"),
    ],
)
def test_not_text(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    assert why in problem_of(path).why


def test_nul_in_the_path() -> None:
    assert "null" in problem_of("a\0b").why


@pytest.mark.parametrize("module", ["redline.data.text", "redline.data.tokenizer"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'numpy', 'tiktoken', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tokens_do_not_import_torch() -> None:
    code = "import sys, redline.data.tokens; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
