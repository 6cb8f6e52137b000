"""Batches of a prepared set: every window of an epoch once, for any number of workers and ranks, resumed anywhere."""

from __future__ import annotations

import json
import os
import time
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.data.loader import Loader, Permutation, WindowBatches
from redline.data.shards import Split, TokenizerId, open_shard, write_shard

CPU = torch.device("cpu")
VOCAB = 60_000
COUNTED = TokenizerId(name="counted", vocab=VOCAB, end_of_text=0, fingerprint="f")
T = 7


def make_split(folder: Path, tokens: int, shards: int) -> Split:
    """Token n of the whole row is n + 1, except that every document ends with 0: a token tells its place."""
    made, number = [], 0
    sizes = [tokens // shards + (index < tokens % shards) for index in range(shards)]
    for index, size in enumerate(sizes):
        documents, left = [], size
        while left:
            length = min(left, 5 + number % 11)
            documents.append(numpy.arange(number + 1, number + length, dtype=numpy.uint32))  # and its end of text
            number, left = number + length, left - length
        write_shard(folder / f"{index}.tokens", COUNTED, documents)
        made.append(open_shard(folder / f"{index}.tokens"))
    return Split(shards=tuple(made))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return make_split(tmp_path_factory.mktemp("loader"), 1000, 3)


def windows_of(batch: torch.Tensor) -> list[tuple[int, ...]]:
    """Rows as [T + 1] again."""
    assert torch.equal(batch[0, :, 1:], batch[1, :, :-1])
    return [(*map(int, inputs), int(targets[-1])) for inputs, targets in zip(batch[0], batch[1], strict=True)]


def whole_row(split: Split) -> list[int]:
    return [int(token) for token in split.gather([0], split.tokens)[0]]


def samples(
    split: Split, *, micro_batch: int, ranks: int, count: int, start: int = 0, seed: int = 1, sequence: int = T
):
    """What the ranks together make of `count` samples, in the order of the samples."""
    fields = {"split": split, "seed": seed, "micro_batch": micro_batch, "sequence": sequence, "ranks": ranks}
    each = [WindowBatches(**fields, rank=rank, start=start) for rank in range(ranks)]
    found: list[tuple[int, ...]] = []
    for index in range(-(-count // (micro_batch * ranks))):
        for batches in each:
            found += windows_of(batches[index])
    return found[:count]


# the order


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
@settings(deadline=None)
def test_a_permutation_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size=size, seed=seed, epoch=epoch)
    assert sorted(order.at(numpy.arange(size)).tolist()) == list(range(size))


def test_a_permutation_is_the_same_whoever_asks_for_which_places() -> None:
    order = Permutation(size=10**12 + 39, seed=3, epoch=5)
    places = numpy.random.default_rng(0).integers(order.size, size=100)
    together = order.at(places)
    assert together.tolist() == [int(order.at(numpy.array([place]))[0]) for place in places]
    assert len(set(together.tolist())) == len(set(places.tolist()))
    assert together.min() >= 0
    assert together.max() < order.size


def test_permutations_look_like_chance() -> None:
    """Any number is as likely in any place; neighbours do not stay together; seeds and epochs differ."""
    size, orders = 10, 4000
    seen = numpy.zeros((size, size))
    neighbours = 0
    for epoch in range(orders):
        order = Permutation(size=size, seed=7, epoch=epoch).at(numpy.arange(size))
        seen[numpy.arange(size), order] += 1
        neighbours += int((numpy.diff(order) == 1).sum())
    spread = numpy.sqrt(orders * 0.1 * 0.9)
    assert abs(seen - orders / size).max() < 5 * spread
    assert neighbours / orders == pytest.approx(0.9, abs=0.08)  # (n - 1) pairs, each with chance 1/n
    rows = {
        tuple(Permutation(size=50, seed=seed, epoch=epoch).at(numpy.arange(50)))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(rows) == 25


def plain_permutation(size: int, seed: int, epoch: int) -> list[int]:
    """The same in Python's own integers, place by place: the order that checkpoints rely on."""
    keys = [int(word) for word in numpy.random.SeedSequence((seed, epoch)).generate_state(6, numpy.uint64)]
    half = max(1, -(-(size - 1).bit_length() // 2))

    def mix(value: int) -> int:
        left, right = value >> half, value % 2**half
        for key in keys:
            word = right ^ key
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (word ^ word >> 31) % 2**half
        return left << half | right

    found = []
    for place in range(size):
        value = mix(place)
        while value >= size:
            value = mix(value)
        found.append(value)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 1000])
def test_the_order_of_a_seed_stays_what_it_is(size: int) -> None:
    assert Permutation(size=size, seed=1337, epoch=2).at(numpy.arange(size)).tolist() == plain_permutation(
        size, 1337, 2
    )


# the windows


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(2, 160),
    shards=st.integers(1, 4),
    sequence=st.integers(1, 12),
    micro_batch=st.integers(1, 6),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_window_of_an_epoch_once(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: int,
    shards: int,
    sequence: int,
    micro_batch: int,
    ranks: int,
    seed: int,
) -> None:
    split = make_split(tmp_path_factory.mktemp("windows"), tokens, min(shards, tokens))
    row = whole_row(split)
    expected = [tuple(row[start : start + sequence + 1]) for start in range(0, len(row) - sequence, sequence)]
    count = len(expected)
    if not count:
        return
    two = {"micro_batch": micro_batch, "ranks": ranks, "count": 2 * count, "seed": seed, "sequence": sequence}
    found = samples(split, **two)
    assert sorted(found[:count]) == sorted(found[count:]) == sorted(expected)
    assert found == samples(split, **{**two, "micro_batch": 1, "ranks": 1})  # nobody's number changes the order


@settings(max_examples=20, deadline=None)
@given(
    start=st.integers(0, 400),
    before=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 3)),
)
def test_resuming_anywhere_with_other_ranks_is_no_interruption(
    split: Split, start: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    (B, R), (other_B, other_R) = before, after
    start -= start % (B * R)
    uninterrupted = samples(split, micro_batch=B, ranks=R, count=start + 60)
    assert samples(split, micro_batch=other_B, ranks=other_R, count=60, start=start) == uninterrupted[start:]


def test_every_epoch_and_every_seed_has_its_own_order(split: Split) -> None:
    windows = (split.tokens - 1) // T
    found = samples(split, micro_batch=4, ranks=1, count=2 * windows)
    other = samples(split, micro_batch=4, ranks=1, count=windows, seed=2)
    assert found[:windows] != found[windows:]
    assert found[:windows] != other
    assert found[:windows] != sorted(found[:windows])


def test_form(split: Split) -> None:
    batch = WindowBatches(split=split, seed=1, micro_batch=4, sequence=T)[0]
    assert batch.dtype == torch.int64
    assert batch.shape == (2, 4, T)
    assert batch.is_contiguous()


# the loader


def first(split: Split, count: int, **changes) -> list[torch.Tensor]:
    fields = {"seed": 1, "micro_batch": 4, "sequence": T, "device": CPU, "workers": 0}
    with Loader(split, **{**fields, **changes}) as loader:
        return [batch.clone() for batch in islice(loader, count)]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(split: Split, workers: int) -> None:
    plain = first(split, 50)
    assert all(torch.equal(one, other) for one, other in zip(first(split, 50, workers=workers), plain, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 17, 36])
def test_a_resumed_loader_goes_on(split: Split, workers: int, taken: int) -> None:
    whole = first(split, taken + 10)
    with Loader(split, seed=1, micro_batch=4, sequence=T, device=CPU, workers=workers) as loader:
        for _ in range(taken):
            next(loader)
        state = json.loads(json.dumps(loader.state()))
    assert state["position"] == taken * 4
    rest = first(split, 10, workers=workers, position=state["position"])
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[taken:], strict=True))


def test_documents_are_counted_once_an_epoch(split: Split) -> None:
    with Loader(split, seed=1, micro_batch=1, sequence=T, device=CPU, workers=0) as loader:
        row, seen = whole_row(split), 0
        for _ in range(loader.batches.windows):
            seen += int((next(loader)[0] == 0).sum())
            assert loader.documents == seen
        assert loader.epoch == 1.0
        assert seen == row[: loader.batches.windows * T].count(0)
        assert seen > 100


def test_the_time_spent_waiting_is_measured(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Split.gather

    def slow(self: Split, starts: list[int], length: int) -> numpy.ndarray:
        time.sleep(0.05)
        return quick(self, starts, length)

    with Loader(split, seed=1, micro_batch=2, sequence=T, device=CPU, workers=0) as loader:
        next(loader)
        quickly = loader.waited_seconds
        monkeypatch.setattr(Split, "gather", slow)
        for _ in range(4):
            next(loader)
            time.sleep(0.02)  # the step: not waiting
        assert 0.2 <= loader.waited_seconds - quickly < 0.28


# what is told


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_changes_under_way_is_told_as_itself(tmp_path: Path, workers: int) -> None:
    split = make_split(tmp_path, 500, 1)
    with Loader(split, seed=1, micro_batch=2, sequence=T, device=CPU, workers=workers) as loader:
        next(loader)
        os.utime(tmp_path / "0.tokens", ns=(1, 1))
        with pytest.raises(UserError, match=r"0\.tokens changed while it was being read"):
            list(islice(loader, 40))  # what was made ahead is still good


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sequence": 1000}, "has 1,000 tokens; a sequence of 1,000 needs 1,001"),
        ({"rank": 2, "ranks": 2}, "no rank 2 of 2"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"position": -1}, "from sample -1"),
    ],
)
def test_mistakes_are_told_before_the_first_batch(split: Split, changes: dict[str, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        first(split, 0, **changes)


def test_a_sequence_that_just_fits(split: Split) -> None:
    [batch] = first(split, 1, sequence=999, micro_batch=2)
    assert windows_of(batch) == [tuple(whole_row(split))] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_the_batches_are_the_same(split: Split, workers: int) -> None:
    plain = first(split, 20)
    found = first(split, 20, workers=workers, device=torch.device("cuda"))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, plain, strict=True))
