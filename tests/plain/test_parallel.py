"""Batches over GPUs: products that must hold, and refusals that must name what would work."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.workload import Shape
from redline.predict.parallel import Layout, check_layout, gpus_in_a_node, heads_divide, layout_for_batch
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape  # 12 heads, 12 layers
GROUPED = Shape(layers=32, heads=32, kv_heads=8, d_model=4096, d_ff=14336, vocab=128256, sequence=8192, gated=True)
DIVISIBLE = replace(GPT2, layers=27720, heads=27720, d_model=27720, d_ff=27720)  # by 1 to 12
quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test
few = st.integers(1, 12)


@quick
@given(few, few, few, few, few)
def test_the_products(dp, tp, pp, micro_batch, accumulation):
    layout = Layout(gpus=dp * tp * pp, tp=tp, pp=pp, micro_batch=micro_batch, accumulation=accumulation)
    assert layout.dp == dp
    assert layout.global_batch == micro_batch * dp * accumulation
    again = layout_for_batch(gpus=layout.gpus, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=layout.global_batch)
    assert again == layout


def test_it_explains_itself_in_one_sentence():
    """384 GPUs as BLOOM's (arXiv 2211.05100): TP 4, PP 12, 2048 sequences in micro batches of 2."""
    layout = layout_for_batch(gpus=384, tp=4, pp=12, micro_batch=2, global_batch=2048)
    assert layout.explain() == (
        "384 GPUs / (TP 4 x PP 12) = DP 8; MBS 2 x DP 8 x GAS 128 = a global batch of 2048 sequences."
    )


def test_gpus_that_cannot_be_cut():
    with pytest.raises(UserError) as error:
        Layout(gpus=10, tp=4, pp=2)
    assert error.value.problem == "10 GPUs cannot be cut into replicas of 4 x 2"
    assert error.value.fix == "use 8 or 16 GPUs, or --tensor 5 --pipeline 2 or --tensor 5 --pipeline 1"
    with pytest.raises(UserError, match="use 8 GPUs, or --tensor 4 or --tensor 2$"):
        Layout(gpus=4, tp=8)  # fewer GPUs than one replica takes: zero is not proposed


def test_a_batch_that_is_not_whole_passes():
    with pytest.raises(UserError) as error:
        layout_for_batch(gpus=8, micro_batch=5, global_batch=96)
    assert error.value.problem == "a global batch of 96 is not a number of passes of 40"
    assert error.value.fix == "set --global-batch to 80 or 120, or --micro-batch to 4 or 6"
    with pytest.raises(UserError, match="set --global-batch to 96 or 128$"):
        layout_for_batch(gpus=8, micro_batch=4, global_batch=100)  # 8 replicas do not divide 100 either
    with pytest.raises(UserError, match="set --global-batch to 32, or to 8 with --micro-batch 1$"):
        layout_for_batch(gpus=8, micro_batch=4, global_batch=7)


@pytest.mark.parametrize(
    ("shape", "cut", "problem", "fix"),
    [
        (GPT2, {"gpus": 16, "tp": 8}, "12 heads cannot be shared by --tensor 8", "--tensor 4 or --tensor 2"),
        (GPT2, {"gpus": 30, "tp": 5}, "12 heads cannot be shared by --tensor 5", "--tensor 6 or --tensor 3"),
        (
            GROUPED,
            {"gpus": 64, "tp": 16},
            "8 key-value heads cannot be shared by --tensor 16",
            "--tensor 8 or --tensor 4",
        ),
        (
            replace(GROUPED, kv_heads=1),
            {"gpus": 2, "tp": 2},
            "1 key-value head cannot be shared by --tensor 2",
            "--tensor 1",
        ),
        (
            replace(GPT2, d_ff=3070),
            {"gpus": 8, "tp": 4},
            "3,070 MLP columns cannot be shared by --tensor 4",
            "--tensor 2 or --tensor 1",
        ),
        (GPT2, {"gpus": 60, "pp": 5}, "12 layers cannot be shared by --pipeline 5", "--pipeline 6 or --pipeline 4"),
        (
            GPT2,
            {"gpus": 64, "tp": 4, "pp": 5},
            "12 layers cannot be shared by --pipeline 5",
            "--tensor 4 --pipeline 4 or --tensor 2 --pipeline 4",
        ),
    ],
)
def test_a_model_that_cannot_be_cut(shape, cut, problem, fix):
    with pytest.raises(UserError) as error:
        layout_for_batch(**cut, micro_batch=1, shape=shape)
    assert (error.value.problem, error.value.fix) == (problem, f"use {fix}")


def test_gpus_that_the_model_cannot_be_cut_among_either():
    """7 GPUs could hold TP 7, but 12 heads cannot."""
    with pytest.raises(UserError, match="use 6 or 8 GPUs, or --tensor 1$"):
        layout_for_batch(gpus=7, tp=2, micro_batch=1, shape=GPT2)


@pytest.mark.parametrize(("shape", "cut"), [(GPT2, {"tp": 6, "pp": 4}), (GROUPED, {"tp": 8, "pp": 16})])
def test_a_model_that_can(shape, cut):
    check_layout(shape, Layout(gpus=384, **cut))


@quick
@given(st.integers(1, 200), few, few, st.integers(1, 48), st.integers(1, 24))
def test_what_is_proposed_works_and_nothing_is_nearer(gpus, tp, pp, heads, layers):
    """Every cut in a refusal is one that these GPUs and this model accept, and so is every number of GPUs."""
    shape = Shape(layers=layers, heads=heads, d_model=64 * heads, d_ff=5040, vocab=100, sequence=8)
    try:
        check_layout(shape, layout_for_batch(gpus=gpus, tp=tp, pp=pp, micro_batch=1, shape=shape))
    except UserError as error:
        proposed = cuts_in(error.fix)
        for t, p in proposed:
            check_layout(shape, Layout(gpus=gpus, tp=t, pp=p))
        possible = [(t, p) for t in range(1, gpus + 1) for p in range(1, gpus // t + 1) if can_cut(shape, gpus, t, p)]
        nearest = min(distance(cut, (tp, pp)) for cut in possible)
        assert distance(proposed[0], (tp, pp)) == pytest.approx(nearest)
        for number in gpus_in(error.fix):
            check_layout(shape, Layout(gpus=number, tp=tp, pp=pp))


@quick
@given(st.integers(1, 60), few, few, st.sampled_from([None, 1, 2, 3, 4]))
def test_gpus_that_are_proposed_work_in_their_nodes(gpus, tp, pp, nodes):
    """Another number of GPUs is in other nodes: `estimate` has 8 in each, or what divides, or as many nodes as said."""
    node = partial(gpus_in_a_node, nodes=nodes)
    assume(gpus % (nodes or 1) == 0)
    try:
        layout_for_batch(gpus=gpus, tp=tp, pp=pp, micro_batch=1, shape=DIVISIBLE, gpus_per_node=node)
    except UserError as error:
        for t, p in cuts_in(error.fix):
            layout_for_batch(gpus=gpus, tp=t, pp=p, micro_batch=1, shape=DIVISIBLE, gpus_per_node=node)
        for number in gpus_in(error.fix):
            layout_for_batch(gpus=number, tp=tp, pp=pp, micro_batch=1, shape=DIVISIBLE, gpus_per_node=node)


@quick
@given(st.integers(1, 100), st.integers(1, 12))
def test_nodes_that_are_proposed_work(gpus, nodes):
    try:
        gpus_in_a_node(gpus, nodes)
    except UserError as error:
        first, second = error.fix.split(", or ")
        for number in map(int, re.findall(r"\d+", first)):
            gpus_in_a_node(gpus, number)
        for number in map(int, re.findall(r"\d+", second)):
            gpus_in_a_node(number, nodes)


def cuts_in(fix: str) -> list[tuple[int, int]]:
    """'use 6 or 8 GPUs, or --tensor 2 --pipeline 3 or --tensor 2 --pipeline 1'."""
    if "neither --tensor nor --pipeline" in fix:
        return [(1, 1)]
    words = re.findall(r"(?:--tensor \d+ ?)?(?:--pipeline \d+)?", fix)
    found = [dict(re.findall(r"--(tensor|pipeline) (\d+)", word)) for word in words if word]
    assert found, fix
    return [(int(cut.get("tensor", 1)), int(cut.get("pipeline", 1))) for cut in found]


def gpus_in(fix: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+)(?= or \d+ GPUs| GPUs?)", fix)]


def can_cut(shape: Shape, gpus: int, tp: int, pp: int) -> bool:
    return not (shape.heads % tp or shape.d_ff % tp or shape.layers % pp or gpus % (tp * pp))


def distance(cut: tuple[int, int], wanted: tuple[int, int]) -> float:
    return sum(abs(math.log(one / other)) for one, other in zip(cut, wanted, strict=True))


@quick
@given(few, few, st.integers(1, 300))
def test_batches_that_are_proposed_work(gpus, micro_batch, global_batch):
    try:
        layout_for_batch(gpus=gpus, micro_batch=micro_batch, global_batch=global_batch)
    except UserError as error:
        first, *others = error.fix.removeprefix("set --global-batch to ").split(", or ")
        for batch in map(int, first.split(" or ")):
            layout_for_batch(gpus=gpus, micro_batch=micro_batch, global_batch=batch)
        for other in others:
            if other.startswith("--micro-batch to "):
                for size in map(int, other.removeprefix("--micro-batch to ").split(" or ")):
                    layout_for_batch(gpus=gpus, micro_batch=size, global_batch=global_batch)
            else:
                batch, size = map(int, other.removeprefix("to ").split(" with --micro-batch "))
                layout_for_batch(gpus=gpus, micro_batch=size, global_batch=batch)
                assert abs(batch - global_batch) < min(abs(int(b) - global_batch) for b in first.split(" or "))


@pytest.mark.parametrize("shape", [GPT2, GROUPED], ids=["gpt2", "grouped"])
def test_heads_divide_where_the_layout_says_so(shape):
    """One check for lint and estimate: what one accepts the other does."""
    for tp in range(1, 33):
        cut = replace(shape, d_ff=math.lcm(*range(1, 33)))
        try:
            check_layout(cut, Layout(gpus=tp, tp=tp))
        except UserError:
            assert not heads_divide(cut, tp)
        else:
            assert heads_divide(cut, tp)


@pytest.mark.parametrize("name", ["gpus", "tp", "pp", "micro_batch", "accumulation"])
def test_counts_are_counts(name):
    with pytest.raises(UserError, match=f"{name} is 0"):
        Layout(**{"gpus": 1, name: 0})
    with pytest.raises(UserError, match="global_batch is -1"):
        layout_for_batch(gpus=1, micro_batch=1, global_batch=-1)
