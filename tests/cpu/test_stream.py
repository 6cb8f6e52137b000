"""Batches straight from text: every token of an epoch once, in an order that no number of workers changes."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.data import stream as module
from redline.data.shards import TokenizerId, tokenizer_id
from redline.data.sources import Reading, cut_parts, find_sources, read_part
from redline.data.stream import TextStream
from redline.data.survey import TextSource
from redline.data.tokenizer import TOKENIZERS, Tokenizer, tokenizer

CPU = torch.device("cpu")
FIRST_LETTER, LETTERS, END = 0x4E00, 20_000, 0xD7FF  # enough letters for every one of a corpus to be another


def install_letters(patch: pytest.MonkeyPatch) -> None:
    """A tokenizer of letters, in this process."""

    def encode(text: str) -> numpy.ndarray:
        return numpy.array([ord(letter) for letter in text], dtype=numpy.uint32)

    def decode(ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))

    made = Tokenizer(name="letters", vocab=END + 1, end_of_text=END, encode=encode, decode=decode)
    patch.setitem(TOKENIZERS, "letters", lambda: made)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    install_letters(monkeypatch)


def write_corpus(folder: Path, lengths: list[int]) -> tuple[Path, list[list[int]]]:
    """Documents of these lengths in which no letter comes twice."""
    documents, used = [], 0
    for length in lengths:
        documents.append([FIRST_LETTER + (used + place) % LETTERS for place in range(length)])
        used += length
    assert used <= LETTERS
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "".join(map(chr, ids))}) + "\n" for ids in documents))
    return path, documents


@functools.cache
def id_of(name: str) -> TokenizerId:
    return tokenizer_id(tokenizer(name))


def source_of(path: Path | str, *, name: str = "bytes", part_bytes: int = 300, **changes) -> TextSource:
    """Many parts of a small corpus."""
    reading = changes.pop("reading", Reading())
    parts = cut_parts(find_sources([str(path)]).files, part_bytes, reading)
    hashes = tuple(str(part) for part in parts)
    fields = {"val_fraction": 0.005, "tokenizer": id_of(name), "hashes": hashes}
    return TextSource(parts=parts, reading=reading, **{**fields, **changes})


def make(path: Path | str, *, name: str = "letters", part_bytes: int = 300, source: dict | None = None, **changes):
    fields = {"seed": 5, "micro_batch": 2, "sequence": 8, "device": CPU, "workers": 0, "split": "all"}
    text = source_of(path, name=name, part_bytes=part_bytes, **(source or {}))
    return TextStream(text, **{**fields, **changes})


def epoch_inputs(stream: TextStream, tokens: int) -> list[int]:
    """The first `tokens` inputs."""
    inputs: list[int] = []
    targets: list[int] = []
    while len(inputs) < tokens:
        batch = next(stream)
        inputs += batch[0].flatten().tolist()
        targets += batch[1].flatten().tolist()
    assert inputs[1:] == targets[:-1]  # across rows and batches too
    return inputs[:tokens]


def tokens_of(stream: TextStream) -> int:
    """In an epoch of this rank: its parts, read without the stream."""
    parts = [part for lane in range(module.LANES) for part in stream._text.parts_of(0, lane)]
    return sum(len(piece.text) + 1 for part in parts for piece in read_part(part, Reading()))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=15, max_size=60),
    chunk=st.integers(3, 64),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    micro_batch=st.integers(1, 4),
)
def test_every_token_of_an_epoch_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int, ranks: int, seed: int, micro_batch: int
) -> None:
    path, documents = write_corpus(tmp_path_factory.mktemp("stream"), lengths)
    with pytest.MonkeyPatch.context() as patch:
        install_letters(patch)
        patch.setattr(module, "CHUNK_TOKENS", chunk)
        streams = [
            make(path, part_bytes=100, ranks=ranks, rank=rank, seed=seed, micro_batch=micro_batch)
            for rank in range(ranks)
        ]
        shares = [tokens_of(each) for each in streams]
        expected = sorted(token for document in documents for token in (*document, END))
        assert sum(shares) == len(expected)
        inputs = [token for each, share in zip(streams, shares, strict=True) for token in epoch_inputs(each, share)]
        for each in streams:
            each.close()
    assert sorted(inputs) == expected


@pytest.mark.usefixtures("letters")
def test_the_second_epoch_has_the_same_tokens_in_another_order(tmp_path: Path) -> None:
    path, documents = write_corpus(tmp_path, [40] * 80)
    tokens = 41 * 80
    with make(path) as stream:
        both = epoch_inputs(stream, 2 * tokens)
        assert stream.epoch == 2
        assert stream.documents >= 160
    assert sorted(both[:tokens]) == sorted(both[tokens:])
    assert both[:tokens] != both[tokens:]
    with make(path, seed=6) as other:
        assert epoch_inputs(other, tokens) != both[:tokens]


@pytest.mark.usefixtures("letters")
def test_documents_stay_whole_inside_a_chunk(tmp_path: Path) -> None:
    path, documents = write_corpus(tmp_path, [30] * 40)
    with make(path) as stream:
        row = epoch_inputs(stream, 31 * 40)
    text = "".join(map(chr, row))
    assert sorted(text.split(chr(END))[:-1]) == sorted("".join(map(chr, document)) for document in documents)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """One text file and one of JSON lines: about 60,000 bytes, a few chunks in every lane."""
    folder = tmp_path_factory.mktemp("book")
    licence = (repository / "LICENSE").read_text()
    (folder / "a.txt").write_text(licence * 3)
    lines = [json.dumps({"text": paragraph}) for paragraph in licence.split("\n\n") if paragraph.strip()]
    (folder / "b.jsonl").write_text("\n".join(lines * 2) + "\n")
    return folder


def first(path: Path, count: int, **changes) -> list[torch.Tensor]:
    with make(path, **{"name": "bytes", "sequence": 64, **changes}) as stream:
        return [batch.clone() for batch in islice(stream, count)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing(book: Path, workers: int) -> None:
    assert same(first(book, 900, workers=workers), first(book, 900))  # 115,200 tokens: more than an epoch


@settings(max_examples=12, deadline=None)
@given(taken=st.integers(0, 900), workers=st.sampled_from([0, 0, 0, 2]))
def test_resuming_anywhere_is_no_interruption(book: Path, taken: int, workers: int) -> None:
    whole = first(book, taken + 30)
    with make(book, name="bytes", sequence=64) as stream:
        for _ in range(taken):
            next(stream)
        state = json.loads(json.dumps(stream.state()))
        with make(book, name="bytes", sequence=64, workers=workers) as other:
            other.resume(state)
            assert other.epoch == stream.epoch
            assert same([batch.clone() for batch in islice(other, 30)], whole[taken:])
            list(islice(stream, 30))
            assert other.epoch == stream.epoch


def test_a_stream_can_go_back_and_be_resumed_with_another_batch(book: Path) -> None:
    with make(book, name="bytes", sequence=64) as stream:
        start = stream.state()
        before = [next(stream).clone() for _ in range(5)]
        stream.resume(start)
        assert same([next(stream).clone() for _ in range(5)], before)
        state = stream.state()
        expected = [next(stream).clone() for _ in range(4)]
    with make(book, name="bytes", sequence=128, micro_batch=4) as wide:
        wide.resume(state)
        assert next(wide)[0].flatten().tolist() == torch.cat([batch[0] for batch in expected]).flatten().tolist()


@pytest.mark.parametrize("split", ["all", "train", "val"])
def test_an_epoch_passes_every_byte_of_the_files_once(book: Path, split: str) -> None:
    """The share of an epoch that is shown: held-out documents are passed over, and passed all the same."""
    with make(book, name="bytes", split=split, source={"val_fraction": 0.3}) as stream:
        chunks, ended, passed = module.lane_chunks(stream._text, module.START, range(module.LANES)), 0, 0
        while ended < module.LANES:
            chunk = next(chunks)
            ended, passed = ended + chunk.ends, passed + chunk.passed
        assert passed == sum(file.stat().st_size for file in book.iterdir())
        shown = [stream.epoch]
        while shown[-1] < 1:
            next(stream)
            shown.append(stream.epoch)
    assert shown[0] == 0
    assert shown == sorted(shown)
    assert len(set(shown)) > 5


def test_train_and_val_are_the_split_of_prepare(book: Path, tmp_path: Path) -> None:
    from redline.data.prepare import Preparation, prepare
    from redline.data.shards import open_dataset

    prepare(Preparation(sources=(str(book),), out=tmp_path / "out", tokenizer="bytes", val_fraction=0.3, processes=1))
    data = open_dataset(tmp_path / "out")
    for name, split in (("train", data.train), ("val", data.val)):
        with make(book, name="bytes", sequence=16, split=name, source={"val_fraction": 0.3}) as stream:
            row = epoch_inputs(stream, split.tokens)
            assert (
                numpy.bincount(row, minlength=257).tolist()
                == numpy.bincount(split.gather([0], split.tokens)[0], minlength=257).tolist()
            )


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 6},
        {"rank": 1, "ranks": 2},
        {"source": {"reading": Reading(separator="x")}},
        {"source": {"val_fraction": 0.1}},
        {"part_bytes": 200},
        {"split": "train"},
        {"name": "gpt2"},
    ],
)
def test_the_state_of_another_stream_is_refused(book: Path, changes: dict) -> None:
    with make(book, name="bytes") as stream:
        state = stream.state()
    other = make(book, **{"name": "bytes", **changes})
    with pytest.raises(UserError, match="state of another stream"):
        other.resume(state)


def test_mistakes_are_told(book: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match="1 parts of text cannot be dealt to 2 ranks"):
        make(tmp_path / "a.txt", name="bytes", ranks=2)
    with pytest.raises(UserError, match="no rank 3 of 2"):
        make(book, name="bytes", ranks=2, rank=3)
    with pytest.raises(UserError, match="unknown split 'dev'"):
        make(book, name="bytes", split="dev")
    with pytest.raises(UserError, match="no text for this split"):
        next(make(tmp_path / "a.txt", name="bytes", split="val", source={"val_fraction": 1e-12}))


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("kind", ["hub", "saved"])
def test_a_data_set_of_hugging_face(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files, through the same calls that reach the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "d").mkdir()
    path, documents = write_corpus(tmp_path / "d", [30] * 40)
    if kind == "saved":
        rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        rows.save_to_disk(tmp_path / "saved")
    with make(f"hf:{tmp_path / 'd'}" if kind == "hub" else tmp_path / "saved") as stream:
        text = "".join(map(chr, epoch_inputs(stream, 31 * 40)))
        assert isinstance(stream.epoch, int) == (kind == "hub")  # nobody says how long an epoch of the hub is
    assert sorted(text.split(chr(END))[:-1]) == sorted("".join(map(chr, document)) for document in documents)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_text_is_told_with_its_place(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"good words " * 10 + b"\xff" + b" and more" * 10)
    with pytest.raises(UserError, match="byte 110 is not UTF-8"):
        first(tmp_path / "a.txt", 100, workers=workers)


def test_a_short_text_goes_round_and_round(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    [batch] = first(tmp_path / "a.txt", 1, sequence=6, micro_batch=2)
    encoder = tokenizer("bytes")
    assert encoder.decode(batch[0].flatten().tolist()) == "abc<|endoftext|>" * 3


@pytest.fixture
def leftovers() -> Iterator[None]:
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    assert {child.pid for child in multiprocessing.active_children()} <= before


@pytest.mark.usefixtures("leftovers")
def test_closing_ends_the_workers_and_a_dead_one_is_told(book: Path) -> None:
    with make(book, name="bytes", workers=2) as stream:
        next(stream)
        workers = multiprocessing.active_children()
        assert len(workers) >= 2
        os.kill(max(worker.pid for worker in workers), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has ended .SIGKILL"):
            list(islice(stream, 20_000))


def test_waiting_is_measured(book: Path) -> None:
    with make(book, name="bytes") as stream:
        assert stream.waited_seconds == 0
        next(stream)
        assert stream.waited_seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_the_batches_and_states_are_the_same(book: Path, workers: int) -> None:
    """One batch is always ahead there, and a state must not be."""
    plain = first(book, 30)
    with make(book, name="bytes", sequence=64, workers=workers, device=torch.device("cuda")) as stream:
        found = [next(stream).cpu() for _ in range(20)]
        state = stream.state()
    assert same(found, plain[:20])
    with make(book, name="bytes", sequence=64) as other:
        other.resume(state)
        assert same([next(other).clone() for _ in range(10)], plain[20:])
