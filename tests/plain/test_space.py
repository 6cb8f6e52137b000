"""What a tuner may change: read off the one table of rungs, only recipes that apply, and never another model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import Job
from redline.core.recipe import Recipe
from redline.rungs import LADDER, Maths, find_rung, group_of, plan_of
from redline.search.answers import graph_key
from redline.search.space import NOT_COMPILED, compiled_part, open_space
from redline.search.tune import compile_factor
from redline.workloads import resolve_workload

GIB = 1024**3
GPT2 = resolve_workload("gpt2")
H200 = Hardware(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    cpu_cores=16,
    multiprocessors=132,
    memory_bytes=140 * GIB,
    features=("tf32", "bf16", "fp16", "flash", "cudnn-attention", "compile", "triton"),
)
NO_BF16 = replace(H200, name="a card without bf16", features=("fp16", "flash", "compile", "triton"))


def choices(space) -> dict[str, tuple]:
    return {knob.name: knob.choices for knob in space.knobs}


def test_groups_of_the_table_are_the_knobs():
    space = open_space(GPT2, H200)
    found = choices(space)
    assert found["flash"] == (None, "flash", "cudnn-attention")
    assert found["fused-loss"] == (None, "fused-loss", "chunked-loss")
    assert found["selective-checkpointing"] == (
        None,
        "selective-checkpointing",
        "checkpointing",
        "budget-checkpointing",
    )
    assert found["compile"] == (None, "compile")
    offered = {choice for knob in space.knobs for choice in knob.choices if choice}
    assert offered | set(space.left_out) | set(space.published) == {rung.name for rung in LADDER[1:]}
    assert not offered & (set(space.left_out) | set(space.published))
    assert all(group_of(find_rung(choice)) == knob for knob in found for choice in found[knob] if choice)


def test_every_rung_that_is_no_choice_has_a_reason(cpu):
    for hardware in (H200, NO_BF16, cpu):
        assert all(len(reason.split()) >= 3 for reason in open_space(GPT2, hardware).left_out.values())


@pytest.mark.parametrize(
    ("allow", "promises"),
    [
        ("bit-exact", {Maths.BIT_EXACT}),
        ("rounding", {Maths.BIT_EXACT, Maths.ROUNDING}),
    ],
)
def test_what_is_allowed_is_what_is_offered(allow, promises):
    space = open_space(GPT2, H200, allow=allow)
    offered = [find_rung(choice) for knob in space.knobs for choice in knob.choices if choice]
    assert {rung.maths for rung in offered} == promises


def test_an_unknown_permission_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown class of maths to allow 'anything'") as caught:
        open_space(GPT2, H200, allow="anything")
    assert "rounding" in caught.value.fix


def test_a_tied_model_stays_tied_and_an_untied_one_is_another_model():
    tied, shape = open_space(GPT2, H200, allow="changes-maths"), replace(GPT2.shape, tied=False)
    assert tied.published == ("tied-weights",)
    assert "tied-weights" not in choices(tied)
    untied = replace(GPT2, shape=shape)
    assert open_space(untied, H200).left_out["tied-weights"].startswith("changes-maths")
    assert "tied-weights" in choices(open_space(untied, H200, allow="changes-maths"))


def test_a_stand_in_is_a_choice_where_it_stands_in():
    assert "fp16" in open_space(GPT2, H200).left_out
    assert choices(open_space(GPT2, NO_BF16))["bf16"] == (None, "fp16")


def test_only_and_without():
    space = open_space(GPT2, H200, rungs=("bf16", "compile", "flash"), without=("flash",))
    assert set(choices(space)) == {"bf16", "compile"}
    assert space.left_out["flash"] == space.left_out["tf32"] == "left out by request"


def test_the_start_is_what_the_ladder_knows_and_what_was_predicted():
    start = open_space(GPT2, H200).start()
    assert {"bf16", "compile", "padded-vocab", "fused-adamw", "fused-loss", "tied-weights"} <= set(start.rungs)
    assert "cudnn-attention" in start.rungs  # the roofline says it is faster than flash on such a card
    assert not any(find_rung(name).when_named for name in start.rungs)
    unknown = open_space(GPT2, replace(H200, name="a card nobody knows")).start()
    assert "flash" in unknown.rungs
    assert unknown.micro_batch == GPT2.micro_batch


def test_the_start_is_the_smallest_size_that_is_predicted_to_be_fast():
    space = open_space(GPT2, H200)
    start = space.start()
    rates = {size: space.predicted_rate(replace(start, micro_batch=size)) for size in (2**power for power in range(9))}
    best = max(rate for size, rate in rates.items() if size <= space.largest(start))
    assert start.micro_batch == min(size for size, rate in rates.items() if rate >= 0.98 * best)


@pytest.mark.parametrize("limit", [10, 20, 60])
def test_the_start_fits(limit):
    space = open_space(GPT2, H200, memory_limit=limit * GIB)
    assert space.refuses(space.start()) is None
    assert space.refuses(space.baseline()) is None
    too_large = replace(space.start(), micro_batch=space.largest(space.start()) + 1)
    assert f"of the {limit}" in space.refuses(too_large)


def test_a_size_that_was_given_is_not_changed():
    space = open_space(GPT2, H200, micro_batch=7)
    assert space.start().micro_batch == space.baseline().micro_batch == 7


@pytest.mark.parametrize("total", [30, 96, 512])
def test_sizes_divide_the_global_batch(total):
    space = open_space(GPT2, H200, global_batch=total)
    start = space.start()
    sizes = [start.micro_batch, space.baseline().micro_batch, space.smaller(start).micro_batch]
    sizes += [recipe.micro_batch for recipe in [space.larger(start)] if recipe is not None]
    assert all(total % size == 0 for size in sizes)


def test_what_needs_something_goes_with_it():
    space = open_space(GPT2, H200)
    knobs = {knob.name: knob for knob in space.knobs}
    recipe = space.change(space.start(), knobs["cuda-graphs"], "cuda-graphs")
    eager = space.change(recipe, knobs["compile"], None)
    assert not {"compile", "cuda-graphs", "bf16-residual", "sigmoid-gelu"} & set(eager.rungs)
    assert space.change(eager, knobs["cuda-graphs"], "cuda-graphs") is None  # it is a way of compiling
    fp32 = space.change(recipe, knobs["bf16"], None)
    assert "cudnn-attention" not in fp32.rungs  # its kernel takes 16 bit
    assert space.change(recipe, knobs["selective-checkpointing"], "selective-checkpointing") is None


SPACES = [open_space(GPT2, H200), open_space(GPT2, NO_BF16, allow="changes-maths")]


@given(st.sampled_from(SPACES), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_recipe_on_the_way_applies(space, turns):
    recipe = space.start()
    for which, choice in turns:
        knob = space.knobs[which % len(space.knobs)]
        recipe = space.change(recipe, knob, knob.choices[choice % len(knob.choices)]) or recipe
        for name in recipe.rungs:
            others = plan_of(other for other in recipe.rungs if other != name)
            assert find_rung(name).needs(GPT2, space.hardware, others) is None
        assert all(sum(choice in recipe.rungs for choice in knob.choices if choice) <= 1 for knob in space.knobs)
        assert set(space.published) <= set(recipe.rungs)
        assert recipe.rungs == tuple(rung.name for rung in LADDER if rung.name in recipe.rungs)


def test_all_recipes_are_those_that_apply_each_once():
    space = open_space(GPT2, H200, rungs=("bf16", "compile", "flash", "cudnn-attention", "cuda-graphs"))
    found = {frozenset(recipe.rungs) - {"tied-weights"} for recipe in space.recipes(8)}
    attentions = [frozenset(), frozenset({"flash"}), frozenset({"cudnn-attention"})]
    compiled = [frozenset(), frozenset({"compile"}), frozenset({"compile", "cuda-graphs"})]
    expected = {one | two | {"bf16"} for one in attentions for two in compiled} | set(compiled)
    assert found == expected  # fused attention takes 16 bit, graphs are a way of compiling
    assert len(space.recipes(8)) == len(expected)


def test_jobs_share_compiled_code_only_when_it_is_the_same():
    start = open_space(GPT2, H200).start()

    def key(recipe: Recipe) -> str:
        return graph_key(Job(workload=GPT2, recipe=recipe, device="cuda", tokens="tokens.npy"))

    def without(name: str) -> Recipe:
        return replace(start, rungs=tuple(rung for rung in start.rungs if rung != name))

    for name in start.rungs:
        changed = set(_changed_fields(name))
        assert (key(without(name)) == key(start)) == (changed <= set(NOT_COMPILED)), name
    assert key(replace(start, micro_batch=start.micro_batch + 1)) != key(start)
    assert compiled_part(without("loader-workers")) == compiled_part(start)


def _changed_fields(name: str) -> list[str]:
    before, after = plan_of(()), plan_of((name,))
    return [field for field in vars(before) if getattr(before, field) != getattr(after, field)]


def test_how_long_compiling_takes():
    assert compile_factor(Recipe(rungs=("bf16",), micro_batch=1)) == 0
    assert compile_factor(Recipe(rungs=("compile", "cuda-graphs"), micro_batch=1)) == 1
    assert compile_factor(Recipe(rungs=("compile", "max-autotune"), micro_batch=1)) == 10
