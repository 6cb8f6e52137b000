"""The pieces of all ranks are the whole tensor, and each rank has the same rows of every matrix in it."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from redline.core.cut import Cut, Run


@given(each=st.integers(1, 40), parts=st.integers(1, 4), ranks=st.integers(1, 9), dim=st.integers(0, 1))
def test_the_pieces_are_the_whole(each: int, parts: int, ranks: int, dim: int) -> None:
    shape = (7, each * parts) if dim else (each * parts, 7)
    cuts = [Cut(shape=shape, dim=dim, parts=parts, rank=rank, ranks=ranks) for rank in range(ranks)]
    rows = [
        run.there + n
        for cut, part in product(cuts, range(parts))
        for run in [cut.runs[part]]
        for n in range(run.length)
    ]
    assert sorted(rows) == list(range(each * parts))
    for cut in cuts:
        assert {run.length for run in cut.runs} <= {each // ranks, -(-each // ranks)}
        assert [run.there - cut.runs[0].there for run in cut.runs] == [n * each for n in range(parts)]
        assert [run.here for run in cut.runs] == [n * cut.runs[0].length for n in range(parts)]
        assert cut.piece_shape[dim] == cut.size == sum(run.length for run in cut.runs)
        assert cut.piece_shape[1 - dim] == 7


def test_queries_keys_and_values_by_hand() -> None:
    cut = Cut(shape=(96, 32), dim=0, parts=3, rank=1, ranks=2)
    assert cut.runs == (
        Run(here=0, there=16, length=16),
        Run(here=16, there=48, length=16),
        Run(here=32, there=80, length=16),
    )
    assert cut.piece_shape == (48, 32)
