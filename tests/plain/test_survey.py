"""A text that is streamed is read through once: what is broken is told, what is held out is found, a change is seen."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.core.errors import UserError
from redline.data import survey as module
from redline.data.pool import Progress
from redline.data.prepare import is_val
from redline.data.shards import tokenizer_id
from redline.data.sources import Reading, document_key
from redline.data.survey import Survey, open_text, survey
from redline.data.tokenizer import tokenizer

SHARE = 0.2


@pytest.fixture
def texts() -> list[str]:
    return [f"document {number} " + "of some length " * (number % 40) for number in range(400)]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    half = len(texts) // 2
    write_lines(folder / "a.jsonl", texts[:half])
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[half:])
    return folder


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def order(corpus: Path, **changes: Any) -> Survey:
    fields = {"sources": (str(corpus),), "out": corpus.parent / "text", "tokenizer": "bytes", "val_fraction": SHARE}
    return Survey(**{**fields, "val_tokens": 10**9, "processes": 2, **changes})


def held_out(texts: list[str]) -> list[str]:
    return [text for text in texts if is_val(document_key(text.encode()), SHARE)]


def val_documents(folder: Path) -> list[str]:
    val = open_text(folder).val
    row = tokenizer("bytes").decode(val.gather([0], val.tokens)[0].tolist())
    return row.split("<|endoftext|>")


# what it finds


def test_everything_is_counted_and_the_held_out_documents_are_kept(corpus: Path, texts: list[str]) -> None:
    seen: list[Progress] = []
    index = survey(order(corpus), seen.append)
    val = held_out(texts)
    assert index["documents"] == {"train": len(texts) - len(val), "val": len(val)}
    assert index["text_bytes"] == {"train": sum(map(len, texts)) - sum(map(len, val)), "val": sum(map(len, val))}
    *documents, rest = val_documents(corpus.parent / "text")
    assert rest == ""
    assert sorted(documents) == sorted(val)
    assert index["val_tokens"] == sum(map(len, val)) + len(val)
    assert index["notes"] == []
    assert (seen[-1].bytes_done, seen[-1].documents) == (seen[-1].bytes_total, len(texts))


def test_only_as_many_tokens_are_held_out_as_asked_for(corpus: Path, texts: list[str]) -> None:
    assert survey(order(corpus, val_tokens=1000))["val_tokens"] == 1000
    opened = open_text(corpus.parent / "text")
    assert opened.val.tokens == 1000
    *whole, cut = val_documents(corpus.parent / "text")
    assert set(whole) <= set(held_out(texts))
    assert any(text.startswith(cut) for text in held_out(texts))
    assert opened.val.documents == len(whole)


def test_processes_change_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_PART", 5000)
    here = survey(order(corpus, out=corpus.parent / "here"))
    monkeypatch.setattr(module, "READ_HERE_BYTES", 0)
    elsewhere = survey(order(corpus, out=corpus.parent / "elsewhere"))
    assert len(here["parts"]) > 5
    assert {**here, "date": ""} == {**elsewhere, "date": ""}
    assert (corpus.parent / "here/val.tokens").read_bytes() == (corpus.parent / "elsewhere/val.tokens").read_bytes()


def test_a_text_of_many_parts_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_PART", 1000)
    (tmp_path / "a.txt").write_text("some words and " * 1000)
    index = survey(order(tmp_path / "a.txt", val_fraction=1e-12))
    assert len(index["parts"]) > 10
    assert index["documents"] == {"train": 1, "val": 0}
    assert index["text_bytes"] == {"train": 15_000, "val": 0}
    assert "validation is empty" in index["notes"][-1]
    opened = open_text(tmp_path / "text")
    assert opened.val is None
    assert not (tmp_path / "text/val.tokens").exists()
    assert len(opened.source.parts) == len(index["parts"])


def test_the_fingerprint_is_of_the_words_and_of_nothing_else(corpus: Path, texts: list[str]) -> None:
    def fingerprint(folder: Path, **changes: Any) -> str:
        out = corpus.parent / f"text-{len(list(corpus.parent.iterdir()))}"
        survey(order(folder, out=out, **changes))
        return open_text(out).source.fingerprint

    first = fingerprint(corpus)
    copy = Path(shutil.copytree(corpus, corpus.parent / "copy", copy_function=shutil.copyfile))
    assert fingerprint(copy) == first
    others = [fingerprint(corpus, val_fraction=0.1), fingerprint(corpus, tokenizer="gpt2")]
    write_lines(copy / "a.jsonl", [texts[1], texts[0], *texts[2:200]])
    others.append(fingerprint(copy))
    assert len({first, *others}) == 4


# what it tells before anything is written


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"good words \xff", r"a\.txt is not UTF-8 text: byte 11 is"),
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"a\.jsonl is not JSON lines: the line that begins at byte 14 "),
        ("a.jsonl", b'{"body": "a"}\n', r"no text in field 'text' of .*a\.jsonl"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-10],
            r"a\.jsonl\.gz is damaged: .* (behind the line|first line)",
        ),
        ("a.jsonl", b'{"text": ""}\n', "nothing to train on: no document holds any text"),
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_broken_text_is_told_with_its_place(
    tmp_path: Path, name: str, content: bytes, text: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not here:
        monkeypatch.setattr(module, "READ_HERE_BYTES", 0)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=text):
        survey(order(tmp_path / name, processes=1))
    assert os.listdir(tmp_path) == [name]


def test_something_must_be_left_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(UserError, match="all of the 1 documents fell into validation"):
        survey(order(tmp_path / "a.txt", val_fraction=1 - 1e-12))
    with pytest.raises(UserError, match="share of validation"):
        order(tmp_path / "a.txt", val_fraction=1)


# opening it again


def other_words(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"document 7 ", b"document X "))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: (d / "a.jsonl").write_text('{"text": "short"}'), r"a\.jsonl has changed since \(it had"),
        (other_words, r"a\.jsonl was written since and holds other words"),
        (lambda d: (d / "c.txt").write_text("new"), r"c\.txt is new"),
        (lambda d: (d / "a.jsonl").unlink(), r"a\.jsonl is gone"),
        (shutil.rmtree, "cannot read .*corpus: No such file"),
    ],
)
def test_a_text_that_has_changed_is_refused_with_the_difference(corpus: Path, change: Any, text: str) -> None:
    survey(order(corpus))
    change(corpus)
    with pytest.raises(UserError, match=f"the text of this run has changed: .*{text}"):
        open_text(corpus.parent / "text")


def test_files_that_were_only_touched_are_read_once_more(corpus: Path) -> None:
    survey(order(corpus))
    before = open_text(corpus.parent / "text")
    os.utime(corpus / "a.jsonl", ns=(1, 1))
    said: list[str] = []
    assert open_text(corpus.parent / "text", say=said.append).identity == before.identity
    assert said == ["the text: 1 of 2 files were modified, reading those again"]
    said.clear()
    open_text(corpus.parent / "text", say=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: (d / "text.json").unlink(), r"cannot read .*text\.json"),
        (lambda d: (d / "text.json").write_text("{"), r"text\.json is damaged"),
        (lambda d: (d / "text.json").write_text("{}"), "no format 'redline-text'"),
        (lambda d: change_index(d, parts=[{"part": 1}]), r"text\.json is damaged"),
        (lambda d: change_index(d, reading={"colour": "red"}), "no field colour"),
        (lambda d: change_index(d, tokenizer={**index_of(d)["tokenizer"], "fingerprint": "0"}), "is not the one"),
        (lambda d: os.truncate(d / "val.tokens", 4100), r"val\.tokens is cut short"),
        (lambda d: flip(d / "val.tokens", 4100), "is damaged|list of documents"),
    ],
)
def test_a_damaged_folder_is_told(corpus: Path, change: Any, text: str) -> None:
    survey(order(corpus))
    change(corpus.parent / "text")
    with pytest.raises(UserError, match=text):
        open_text(corpus.parent / "text")


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "text.json").read_text())
    return found


def change_index(folder: Path, **changes: Any) -> None:
    (folder / "text.json").write_text(json.dumps({**index_of(folder), **changes}))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_model_of_another_tokenizer_is_refused(corpus: Path) -> None:
    survey(order(corpus))
    open_text(corpus.parent / "text", vocab=257, tokenizer_name="bytes")
    with pytest.raises(UserError, match="ids 0 to 256, the model has 100 entries"):
        open_text(corpus.parent / "text", vocab=100)
    with pytest.raises(UserError, match="'bytes', the model reads and writes 'gpt2'"):
        open_text(corpus.parent / "text", vocab=50257, tokenizer_name="gpt2")


# data sets of Hugging Face


def test_a_data_set_is_surveyed_like_a_file(tmp_path: Path, texts: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    write_lines(tmp_path / "a.jsonl", texts)
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path))
    rows.save_to_disk(tmp_path / "saved")
    index = survey(order(tmp_path / "saved"))
    assert index["documents"] == {"train": len(texts) - len(held_out(texts)), "val": len(held_out(texts))}
    assert open_text(tmp_path / "text").source.hashes == tuple(part["hash"] for part in index["parts"])


def test_what_lies_on_the_hub_is_not_read_ahead(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / "a.jsonl", texts)
    index = survey(replace(order(tmp_path / "d"), sources=("hf:d",), val_tokens=500))
    assert index["documents"] == {"train": None, "val": None}
    assert index["val_tokens"] == 500
    assert "not read through" in index["notes"][0]
    monkeypatch.chdir("/")  # the word is as good from here
    opened = open_text(tmp_path / "text")
    assert opened.source.hashes == (f"hf:{tmp_path / 'd'}",)
    assert opened.tokenizer == tokenizer_id(tokenizer("bytes"))
    assert opened.source.reading == Reading()
    write_lines(tmp_path / "b.jsonl", texts)  # what is beside it is read to the end
    index = survey(replace(order(tmp_path / "d"), sources=(str(tmp_path / "b.jsonl"), f"hf:{tmp_path / 'd'}")))
    *beside, hub = index["parts"]
    assert hub is None
    assert sum(part["documents"] for part in beside) == len(texts)
