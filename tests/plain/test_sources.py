"""Documents out of files: every one once, in one order, however the files are cut; and mistakes with their place."""

from __future__ import annotations

import gzip
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.data import sources
from redline.data.sources import PIECE_BYTES, Piece, Reading, cut_parts, cut_point, find_sources, read_part
from redline.data.tokenizer import tokenizer

HUGE = 1 << 40
# What could upset a border: letters, digits, signs, apostrophes, every kind of white space, long characters.
ODD = st.text(alphabet="ab1'!. \n\t\r\u00a0\u3000\u2003\x85\u00e9\u4f60\U0001f600", max_size=60)


def pieces_of(path: Path, reading: Reading, part_bytes: int = HUGE) -> list[Piece]:
    found = find_sources([str(path)])
    return [piece for part in cut_parts(found.files, part_bytes, reading) for piece in read_part(part, reading)]


def documents_of(path: Path, reading: Reading, part_bytes: int = HUGE) -> list[str]:
    """Put together again from their pieces."""
    documents, text = [], ""
    for piece in pieces_of(path, reading, part_bytes):
        text += piece.text
        if piece.ends:
            documents.append(text)
            text = ""
    assert text == ""
    return documents


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts)
    data = lines.encode()
    if path.suffix == ".zst":
        import zstandard

        half = len(data) // 2  # two frames, as parallel compressors write
        data = b"".join(zstandard.ZstdCompressor().compress(piece) for piece in (data[:half], data[half:]))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(scope="module")
def gpt2():
    return tokenizer("gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


# where text may be cut


@settings(max_examples=300, deadline=None)
@given(text=ODD, position=st.integers(0, 200))
@example(text="a\u3000\n\nb c", position=0)
@example(text="a \n b  c", position=2)
def test_a_cut_changes_no_token(gpt2, text, position):
    data = text.encode()
    cut = cut_point(data, min(position, len(data)))
    first, second = data[:cut].decode(), data[cut:].decode()
    assert [*gpt2.encode(first), *gpt2.encode(second)] == gpt2.encode(text).tolist()


def test_a_cut_is_found_wherever_there_is_one():
    assert cut_point(b"one two", 0) == 3
    assert cut_point(b"one two", 3) == 3
    assert cut_point(b"one two", 4) == 7
    assert cut_point(b"one  two\n", 4) == 8
    assert cut_point("\u4f60\u597d\n\u4f60".encode(), 0) == 6
    assert cut_point("a\u3000\nb".encode(), 0) == len("a\u3000\nb".encode())  # U+3000 is white space too


# parts


@settings(max_examples=150, deadline=None)
@given(text=ODD.filter(bool), part_bytes=st.integers(1, 80), piece_bytes=st.integers(1, 50))
def test_a_text_file_is_one_document_however_it_is_cut(folder, text, part_bytes, piece_bytes):
    path = folder / "one.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece_bytes)
        found = pieces_of(path, Reading(), part_bytes)
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert len({piece.key for piece in found}) == 1
    assert sum(piece.passed for piece in found) == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab\n\u4f60", max_size=12), min_size=1, max_size=8),
    part_bytes=st.integers(1, 60),
)
def test_documents_between_separators(folder, texts, part_bytes):
    path, reading = folder / "many.txt", Reading(separator="<>")
    path.write_text("<>".join(texts) + "\n", encoding="utf-8", newline="")
    expected = [text for text in [*texts[:-1], texts[-1] + "\n"] if text]
    assert documents_of(path, reading, part_bytes) == expected


@given(text=st.text(alphabet="ab\n", min_size=1, max_size=40), part_bytes=st.integers(1, 45))
@settings(deadline=None)
def test_separators_that_overlap_are_the_same_borders_for_every_part(folder, text, part_bytes):
    path, reading = folder / "overlap.txt", Reading(separator="\n\n")
    path.write_text(text)
    found = documents_of(path, reading, part_bytes)
    assert found == documents_of(path, reading)
    assert [document.strip("\n") for document in found if document.strip("\n")] == [
        document.strip("\n") for document in text.split("\n\n") if document.strip("\n")
    ]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(ODD.filter(bool), min_size=1, max_size=8), part_bytes=st.integers(1, 200))
def test_json_lines_however_they_are_cut(folder, texts, part_bytes):
    path = write_lines(folder / "a.jsonl", texts)
    assert documents_of(path, Reading(), part_bytes) == texts
    assert sum(piece.passed for piece in pieces_of(path, Reading(), part_bytes)) == path.stat().st_size


def test_small_files_share_a_part_and_order_stays(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    files = find_sources([str(tmp_path)]).files
    parts = cut_parts(files, 20)
    assert [len(part) for part in parts] == [4, 4, 2]  # six bytes each
    assert [piece.text for part in parts for piece in read_part(part, Reading())] == [f"text {n}" for n in range(10)]


def test_a_long_text_is_read_in_small_pieces(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("some words " * 400_000)
    found = pieces_of(path, Reading())
    assert len(found) == 5
    assert max(len(piece.text) for piece in found) < PIECE_BYTES + 20


# formats


TEXTS = ["first, short", "second " * 50_000, "Gr\u00f6\u00dfe \u4f60\n\nlast", "x"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "b.json.gz", "a.ndjson", "a.jsonl.zst"])
def test_json_lines_of_every_packing(tmp_path, name):
    if name.endswith("zst"):
        pytest.importorskip("zstandard")
    path = write_lines(tmp_path / name, TEXTS, field="body")
    assert documents_of(path, Reading(field="body"), 1000) == TEXTS
    assert sum(piece.passed for piece in pieces_of(path, Reading(field="body"))) == path.stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_a_damaged_archive_is_named_with_the_place(tmp_path, name, damage):
    if name.endswith("zst"):
        pytest.importorskip("zstandard")
    path = write_lines(tmp_path / name, ["".join(map(chr, range(40, 1000))) * 20] * 3)
    data = path.read_bytes()
    changed = {"cut": data[:-20], "flip": data[:30] + bytes([data[30] ^ 255]) + data[31:], "other": b"plain text\n"}
    path.write_bytes(changed[damage])
    with pytest.raises(UserError, match="behind the line that begins at byte|first line cannot be unpacked") as caught:
        pieces_of(path, Reading())
    assert str(path) in caught.value.problem


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": list(range(7)), "text": [f"row {n}" for n in range(7)]})
    parquet.write_table(table, path, row_group_size=2)
    for part_bytes in (1, 100, HUGE):
        assert documents_of(path, Reading(), part_bytes) == [f"row {n}" for n in range(7)]
    assert len(cut_parts(find_sources([str(path)]).files, 1)) == 4
    assert pieces_of(path, Reading(), 1)[4].where.endswith("row 4")
    with pytest.raises(UserError, match="has no field 'body'"):
        pieces_of(path, Reading(field="body"))
    with pytest.raises(UserError, match="holds a int"):
        pieces_of(path, Reading(field="id"))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="cannot read"):
        pieces_of(path, Reading())


def test_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines = write_lines(tmp_path / "a.jsonl", [f"row {n}" for n in range(9)])
    rows = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    for part_bytes in (1, 200, HUGE):
        assert documents_of(tmp_path / "plain", Reading(), part_bytes) == [f"row {n}" for n in range(9)]
    assert documents_of(tmp_path / "splits", Reading(split="test")) == ["row 1"]
    with pytest.raises(UserError, match="known: train, test"):
        pieces_of(tmp_path / "splits", Reading(split="dev"))


def test_a_data_set_through_load_dataset(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "d").mkdir()
    for number in range(3):
        write_lines(tmp_path / "d" / f"{number}.jsonl", [f"{number} {row}" for row in range(2)])
    found = find_sources([f"hf:{tmp_path / 'd'}"])
    parts = cut_parts(found.files, 1)
    assert [piece.text for part in parts for piece in read_part(part, Reading())] == [
        f"{number} {row}" for number in range(3) for row in range(2)
    ]
    with pytest.raises(UserError, match="cannot read the data set"):
        cut_parts(find_sources(["hf:/no/such/thing"]).files, 1)
    (tmp_path / "d" / "1.jsonl").write_text("{broken")  # as a network that breaks under way
    with pytest.raises(UserError, match="cannot read the data set"):
        [list(read_part(part, Reading())) for part in parts]


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst"), ("datasets", "hf:x")]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    word = name if name.startswith("hf:") else str(tmp_path / name)
    if not name.startswith("hf:"):
        (tmp_path / name).write_bytes(b"something")
    with pytest.raises(UserError, match=package) as caught:
        [list(read_part(part, Reading())) for part in cut_parts(find_sources([word]).files, 1)]
    assert f"pip install {package}" in caught.value.fix


# which files


def test_a_folder_is_read_in_sorted_order_with_all_below_it(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "a.txt", ".hidden/x.txt", "a/.x.txt", "c.png", "run", "x.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "t"}')
    found = find_sources([str(tmp_path)])
    names = [str(Path(file.path).relative_to(tmp_path)) for file in found.files]
    assert names == ["a/b/c.jsonl", "a/z.md", "a.txt", "b.txt"]
    [note] = found.notes
    assert "3 files skipped" in note
    assert ".png" in note


def test_a_file_that_is_named_is_text_whatever_its_ending(tmp_path):
    (tmp_path / "LICENSE").write_text("a licence")
    assert documents_of(tmp_path / "LICENSE", Reading()) == ["a licence"]
    (tmp_path / "x.json").write_text('{"text": "t"}')
    assert documents_of(tmp_path / "x.json", Reading()) == ["t"]


def test_mistakes_are_found_before_any_work(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing").mkdir()
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")
    os.mkfifo(tmp_path / "pipe")
    for words, text in (
        ([], "nothing to read"),
        (["missing.txt"], "cannot read missing.txt"),
        (["a\0b"], "cannot read"),
        ([tmp_path / "empty.txt"], r"empty\.txt is empty"),
        ([tmp_path / "nothing"], "holds nothing to read"),
        ([tmp_path / "a.txt", tmp_path / "a.txt"], "would be read twice"),
        ([tmp_path / "a.txt", tmp_path / "link.txt"], "would be read twice"),
        ([tmp_path / "pipe"], "not a regular file"),
        (["hf:"], "names no data set"),
        (["hf::config"], "names no data set"),
    ):
        with pytest.raises(UserError, match=text):
            find_sources([str(word) for word in words])
    with pytest.raises(UserError, match="separator of documents is empty"):
        Reading(separator="")
    with pytest.raises(UserError, match="did you mean 'strict'"):
        Reading(errors="stric")


def test_a_file_that_changes_under_way_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    [part] = cut_parts(find_sources([str(path)]).files, HUGE)
    reader = read_part(part, Reading())
    assert next(reader).text == "one"
    with open(path, "a") as file:
        file.write('{"text": "three"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was being read"):
        list(reader)


# what is in them


@pytest.mark.parametrize("part_bytes", [HUGE, 1000, 777])
def test_invalid_utf8_is_named_with_its_byte(tmp_path, part_bytes):
    path = tmp_path / "a.txt"
    good = ("words and words \u00e9\n" * 200).encode()
    path.write_bytes(good + b"\xff" + good)
    with pytest.raises(UserError, match=f"byte {len(good):,} is not UTF-8") as caught:
        pieces_of(path, Reading(), part_bytes)
    assert "--errors replace" in caught.value.fix
    replaced = "".join(piece.text for piece in pieces_of(path, Reading(errors="replace"), part_bytes))
    assert replaced == (good + b"\xff" + good).decode(errors="replace")


def test_a_nul_byte_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    with pytest.raises(UserError, match="NUL byte at byte 3"):
        pieces_of(tmp_path / "a.txt", Reading())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "\xff"}', "byte 27 is not UTF-8"),
        (b"{nonsense", "line that begins at byte 17 cannot be read"),
        (b'{"body": "b"}', "no text in field 'text'.*byte 17 has body"),
        (b'{"text": null}', "no text in field.*byte 17 has a NoneType there"),
        (b"[1]", "has a list"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_with_its_byte(tmp_path, line, text):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=text):
        pieces_of(tmp_path / "a.jsonl", Reading())


def test_half_a_surrogate_pair_is_replaced_if_told_to(tmp_path, gpt2):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    [text] = documents_of(tmp_path / "a.jsonl", Reading(errors="replace"))
    assert text == "a\ufffdb"
    gpt2.encode(text)


def test_blank_lines_and_empty_documents_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": ""}\n  \n{"text": "x"}\n\n')
    assert documents_of(tmp_path / "a.jsonl", Reading()) == ["x"]


def test_the_key_is_of_the_text_and_not_of_its_place(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
    write_lines(tmp_path / "c.jsonl", ["the same text", "another"])
    keys = [piece.key for piece in pieces_of(tmp_path, Reading())]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    long = "a" * sources.KEY_BYTES
    write_lines(tmp_path / "d.jsonl", [long + "x", long + "y", "b" + long])
    first, second, third = (piece.key for piece in pieces_of(tmp_path / "d.jsonl", Reading()))
    assert first == second != third  # the beginning decides
    assert all(one != other for one, other in pairwise([*keys[2:], third]))
