"""The token file: types, atomic writes, read-only maps, and mistakes found before a byte is written."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.workload import Shape, Workload
from redline.data.tokenizer import tokenizer
from redline.data.tokens import open_tokens, prepare_tokens, write_tokens


def workload_of(corpus: str, *, sequence: int = 8, vocab: int = 257, name: str = "bytes") -> Workload:
    shape = Shape(layers=1, heads=1, d_model=8, d_ff=32, vocab=vocab, sequence=sequence)
    return Workload(name="test", shape=shape, tokenizer=name, micro_batch=2, learning_rate=1e-3, corpus=corpus)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(257, numpy.uint16), (65536, numpy.uint16), (65537, numpy.uint32), (200_000, numpy.uint32)]
)
def test_the_largest_id_survives(tmp_path: Path, vocab: int, dtype: type) -> None:
    path = tmp_path / "tokens.npy"
    write_tokens(path, numpy.array([0, vocab - 1, 1]), vocab)
    tokens = open_tokens(path)
    assert tokens.tolist() == [0, vocab - 1, 1]
    assert tokens.dtype == dtype


@given(st.lists(st.integers(0, 50256), min_size=1))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens"  # no suffix is added
    write_tokens(path, numpy.array(ids), 50257)
    assert open_tokens(path).tolist() == ids
    assert os.listdir(path.parent) == ["tokens"]


def test_map_is_read_only(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.npy", numpy.arange(10), 257)
    tokens = open_tokens(tmp_path / "tokens.npy")
    assert isinstance(tokens, numpy.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("ids", [[0, 257], [-1, 3], [70_000], [256 + 65536]])
def test_an_id_outside_the_vocabulary_is_refused_before_writing(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"token id -?\d+ is outside the vocabulary"):
        write_tokens(tmp_path / "tokens.npy", numpy.array(ids), 257)
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.npy"
    write_tokens(path, numpy.arange(10), 257)

    def full(file: object, ids: object, allow_pickle: bool) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    with pytest.raises(UserError, match="No space left"):
        write_tokens(path, numpy.arange(20), 257)
    assert os.listdir(tmp_path) == ["tokens.npy"]
    assert open_tokens(path).tolist() == list(range(10))


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write the tokens"):
        write_tokens(tmp_path / "none" / "tokens.npy", numpy.arange(10), 257)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("unpickled",))


def damaged_files(folder: Path) -> dict[str, Path]:
    paths = {
        name: folder / f"{name}.npy" for name in ("missing", "empty", "garbage", "cut", "pickle", "float", "table")
    }
    paths["empty"].touch()
    paths["garbage"].write_bytes(b"no numpy file at all")
    write_tokens(paths["cut"], numpy.arange(200), 257)
    os.truncate(paths["cut"], 300)
    numpy.save(paths["pickle"], numpy.array([Trap()], dtype=object), allow_pickle=True)
    numpy.save(paths["float"], numpy.zeros(10))
    numpy.save(paths["table"], numpy.zeros((2, 10), dtype=numpy.uint16))
    paths["archive"] = folder / "archive.npz"
    numpy.savez(paths["archive"], numpy.zeros(10, dtype=numpy.uint16))
    return paths


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "cut", "pickle", "float", "table", "archive"])
def test_damaged_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match="cannot read the tokens"):
        open_tokens(damaged_files(tmp_path)[kind])


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_prepare_writes_the_text_and_its_end(tmp_path: Path, name: str) -> None:
    text = "Hello world, and a literal <|endoftext|> too. Größe!"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    subject = tokenizer(name)
    workload = workload_of(str(tmp_path / "text.txt"), name=name, vocab=subject.vocab)
    count = prepare_tokens(workload, tmp_path / "tokens.npy")
    tokens = open_tokens(tmp_path / "tokens.npy")
    assert len(tokens) == count
    assert tokens.tolist() == [*subject.encode(text).tolist(), subject.end_of_text]
    assert tokens.dtype == numpy.uint16


def test_prepare_the_sample(tmp_path: Path) -> None:
    assert prepare_tokens(workload_of("sample"), tmp_path / "tokens.npy") > 400_000


def test_too_short_by_one_and_just_long_enough(tmp_path: Path) -> None:
    corpus, out = tmp_path / "text.txt", tmp_path / "out"
    out.mkdir()
    corpus.write_text("x" * 8)  # 8 bytes and the end of text: 9 tokens, where a sequence of 8 needs 10
    with pytest.raises(UserError) as caught:
        prepare_tokens(workload_of(str(corpus)), out / "tokens.npy")
    assert "too short" in caught.value.problem
    assert "9 tokens" in caught.value.why
    assert "needs 10" in caught.value.why
    assert os.listdir(out) == []
    corpus.write_text("x" * 9)
    assert prepare_tokens(workload_of(str(corpus)), out / "tokens.npy") == 10


def test_every_mistake_is_found_before_writing(tmp_path: Path) -> None:
    corpus, out = tmp_path / "text.txt", tmp_path / "out"
    out.mkdir()
    corpus.write_text("some text, long enough")
    good = workload_of(str(corpus))
    for bad in (
        workload_of(str(tmp_path / "none.txt")),
        workload_of(str(corpus), vocab=256),  # no room for the end of text
        workload_of(str(corpus), vocab=300, name="gpt2"),
        replace(good, tokenizer="words"),
    ):
        with pytest.raises(UserError):
            prepare_tokens(bad, out / "tokens.npy")
        assert os.listdir(out) == []
