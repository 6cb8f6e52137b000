"""What `redline train --data` takes: prepared, to be prepared, to be streamed. Mistakes leave nothing behind."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from redline.commands.training_data import (
    TEXT_OPTIONS,
    add_data_options,
    check_data,
    data_of_run,
    training_data,
)
from redline.core.errors import UserError
from redline.core.job import begin_run_directory
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Workload
from redline.data.prepare import Preparation, prepare
from redline.data.shards import open_dataset
from redline.data.survey import open_text

SETTINGS = TrainSettings(micro_batch=2, global_batch=4, learning_rate=1e-3, budget=Budget(steps=1), eval_batches=3)


def options(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_data_options(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {number} of many"}) + "\n" for number in range(500)))
    return path


@pytest.fixture
def tokens(corpus: Path) -> Path:
    (corpus.parent / "a.txt").write_text("some words")
    out = corpus.parent / "tokens"
    prepare(Preparation(sources=(str(corpus.parent / "a.txt"),), out=out, tokenizer="bytes", processes=1))
    return out


def make(asked: argparse.Namespace, tiny: Workload, out: Path) -> tuple[Path, str]:
    said = io.StringIO()
    check_data(asked, tiny)
    out.mkdir(exist_ok=True)
    folder = training_data(asked, tiny, SETTINGS, out, Console(file=said, width=100))
    return folder, said.getvalue()


def test_a_prepared_folder_is_taken_as_it_is(tokens: Path, tiny: Workload, tmp_path: Path) -> None:
    folder, said = make(options("--data", tokens), tiny, tmp_path / "run")
    assert (folder, said) == (tokens.resolve(), "")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_text_is_prepared_in_the_run_directory(corpus: Path, tiny: Workload, tmp_path: Path) -> None:
    words = ("--data", corpus, "--field", "body", "--val-fraction", "0.1")
    folder, said = make(options(*words), tiny, tmp_path / "run")
    data = open_dataset(folder)
    assert folder == (tmp_path / "run" / "data").resolve()
    assert data.train.documents + data.val.documents == 500
    assert data.index["options"]["val_fraction"] == 0.1
    assert "--stream" in said


def test_a_text_is_streamed_with_enough_held_out_for_an_evaluation(
    corpus: Path, tiny: Workload, tmp_path: Path
) -> None:
    words = ("--data", corpus, "--field", "body", "--val-fraction", "0.1", "--stream")
    folder, _ = make(options(*words), tiny, tmp_path / "run")
    text = open_text(folder)
    assert folder == (tmp_path / "run" / "text").resolve()
    assert text.source.reading.field == "body"
    assert text.source.val_fraction == 0.1
    assert text.val.tokens == 3 * 2 * 16 + 1  # batches, sequences of each, tokens of each, and the last target


@pytest.mark.parametrize("words", [(), ("--stream",)])
def test_without_data_it_is_the_prose_that_ships_with_python(
    tiny: Workload, tmp_path: Path, words: tuple[str, ...]
) -> None:
    folder, said = make(options(*words), tiny, tmp_path / "run")
    opened = open_text(folder) if words else open_dataset(folder)
    assert opened.val is not None
    assert "the prose that ships with Python" in said


def test_notes_are_shown(tmp_path: Path, tiny: Workload) -> None:
    (tmp_path / "a.txt").write_text("one document")
    _, said = make(options("--data", tmp_path / "a.txt", "--val-fraction", "1e-9", "--stream"), tiny, tmp_path / "run")
    assert "note: validation is empty" in said


def test_mistakes_are_told_before_there_is_a_run(tokens: Path, tiny: Workload, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "prepare.json").write_text("{}")
    for words, text in (
        (("--data", tmp_path / "missing"), "cannot read"),
        (("--data", tmp_path / "empty.txt"), "is empty"),
        (("--data", tmp_path / "begun"), "is not finished"),
        (("--data", tokens, "--stream"), "--stream has no use here: .* was prepared already"),
        (("--data", tokens, "--stream", "--field", "x"), "--stream, --field have no use here"),
        (("--split-documents", ""), "separator of documents is empty"),
    ):
        with pytest.raises(UserError, match=text):
            check_data(options(*words), tiny)
    gpt2 = replace(tiny, tokenizer="gpt2", shape=replace(tiny.shape, vocab=50257))
    with pytest.raises(UserError, match="made with the tokenizer 'bytes', the model reads and writes 'gpt2'"):
        check_data(options("--data", tokens), gpt2)
    with pytest.raises(UserError, match="ids 0 to 256, the model has 100 entries"):
        check_data(options("--data", tokens), replace(tiny, shape=replace(tiny.shape, vocab=100)))
    (tokens / "train-00000.tokens").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a token shard"):
        check_data(options("--data", tokens), tiny)


@pytest.mark.parametrize("words", [(), ("--stream",)])
def test_a_text_that_cannot_be_read_leaves_no_run(tiny: Workload, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xff")
    with pytest.raises(UserError, match="byte 5 is not UTF-8"), begin_run_directory(tmp_path / "run"):
        make(options("--data", tmp_path / "a.txt", *words), tiny, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_not_given_is_none() -> None:
    """`train --resume` refuses what was given, so a default may not look like it."""
    assert all(getattr(options(), name) is None for name in (*TEXT_OPTIONS, "data"))


def test_a_run_that_was_moved_finds_its_data(tmp_path: Path) -> None:
    (tmp_path / "new" / "text").mkdir(parents=True)
    assert data_of_run(str(tmp_path / "old" / "text"), tmp_path / "new") == str(tmp_path / "new" / "text")
    (tmp_path / "elsewhere").mkdir()
    assert data_of_run(str(tmp_path / "elsewhere"), tmp_path / "new") == str(tmp_path / "elsewhere")
    assert data_of_run(str(tmp_path / "gone"), tmp_path / "new") == str(tmp_path / "gone")  # to be told as missing
