"""Ranks and their coordinates: everybody has a place of his own, neighbours hold a layer together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core.layout import Layout, Place
from redline.core.values import from_json, to_json

degree = st.integers(1, 5)


@given(tensor=degree, pipeline=degree, replicas=degree, shards=degree)
def test_every_place_has_one_rank(tensor: int, pipeline: int, replicas: int, shards: int) -> None:
    data = replicas * shards
    layout = Layout(ranks=tensor * pipeline * data, tensor=tensor, pipeline=pipeline, replicas=replicas)
    assert (layout.data, layout.shards) == (data, shards)
    places = [layout.place(rank) for rank in range(layout.ranks)]
    assert places == [
        Place(pipeline=p, data=d, tensor=t) for p in range(pipeline) for d in range(data) for t in range(tensor)
    ]
    assert from_json(Layout, to_json(layout)) == layout


def test_sixteen_ranks_by_hand() -> None:
    layout = Layout(ranks=16, tensor=2, pipeline=2, replicas=2)
    assert layout.place(5) == Place(pipeline=0, data=2, tensor=1)
    assert layout.place(8) == Place(pipeline=1, data=0, tensor=0)
    assert layout.words() == "16 ranks: pipeline 2 x replicas 2 x tensor 2 x shards 2"
    assert not layout.is_plain
    assert Layout(ranks=16).is_plain
    assert Layout(ranks=4, tensor=2).words() == "4 ranks: tensor 2 x data 2"
    assert Layout(ranks=4, tensor=2).words("fsdp") == "4 ranks: tensor 2 x data 2 (fsdp)"
    assert Layout(ranks=2).words("ddp") == "2 ranks: data 2 (ddp)"


@pytest.mark.parametrize(
    "degrees",
    [{"ranks": 4, "tensor": 3}, {"ranks": 4, "replicas": 3}, {"ranks": 0}, {"ranks": 4, "tensor": 2, "pipeline": 4}],
    ids=["tensor", "replicas", "none", "product"],
)
def test_what_no_ranks_can_be(degrees: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"ranks do not divide|count from 1"):
        Layout(**degrees)


def test_there_is_no_rank_beyond_the_last() -> None:
    with pytest.raises(ValueError, match="no rank 4 of 4"):
        Layout(ranks=4).place(4)


def test_a_layout_is_told_as_train_takes_it() -> None:
    assert Layout(ranks=8, tensor=2, pipeline=2).options() == "--gpus 8 --tensor 2 --pipeline 2"
    assert Layout(ranks=4, replicas=2).options() == "--gpus 4 --replicas 2"
    assert Layout().options() == ""
