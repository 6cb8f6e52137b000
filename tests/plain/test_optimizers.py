"""Bytes of an optimizer's state and of its update, by hand, and the rungs that take its place in a recipe. That real
optimizers have them is tested in tests/cpu/test_optim.py."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict import fitting
from redline.predict.fitting import Case
from redline.predict.memory import predict_memory
from redline.predict.operations import operations, tensors
from redline.predict.optimizers import OPTIMIZERS, find_optimizer
from redline.rungs import LADDER, Maths, find_rung, group_of, plan_of
from redline.rungs.ladder import check_alternatives, with_optimizer

MATRIX, VECTOR = (96, 512), (96,)  # 49152 numbers: 192 blocks of 256


def state_of(name, sizes, *, of_layer=False):
    return OPTIMIZERS[name].state_bytes(sizes, of_layer=of_layer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_large_matrix_of_a_layer_has_the_bytes_of_the_table(name):
    """Scales, rows and columns come on top: 2 % at most."""
    row, numbers = OPTIMIZERS[name], 4096 * 1024
    assert row.state * numbers <= state_of(name, (4096, 1024), of_layer=True) <= 1.02 * row.state * numbers


@pytest.mark.parametrize("name", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_adamw_keeps_two_fp32_moments_of_everything(name):
    assert state_of(name, MATRIX, of_layer=True) == state_of(name, MATRIX) == 8 * 49152
    assert state_of(name, VECTOR) == 8 * 96


def test_8bit_adamw_adds_a_scale_per_block_and_a_table_per_moment():
    assert state_of("adamw-8bit", MATRIX) == 2 * 49152 + 2 * 4 * 192 + 2 * 4 * 256


@pytest.mark.parametrize("sizes", [VECTOR, (64, 63), (257, 64)], ids=["small", "below 4096", "not of whole blocks"])
def test_8bit_adamw_leaves_small_and_odd_tensors_in_fp32(sizes):
    assert state_of("adamw-8bit", sizes) == OPTIMIZERS["adamw-fused"].state_bytes(sizes, of_layer=False)


def test_8bit_adamw_quantises_from_4096_numbers_on():
    assert state_of("adamw-8bit", (64, 64)) == 2 * 4096 + 2 * 4 * 16 + 2 * 4 * 256


def test_adafactor_keeps_rows_and_columns_of_matrices_and_two_moments_of_vectors():
    assert state_of("adafactor", MATRIX) == 4 * 49152 + 4 * (96 + 512)
    assert state_of("adafactor", VECTOR) == 8 * 96


def test_muon_has_one_moment_inside_the_layers_and_adamw_elsewhere():
    assert state_of("muon", MATRIX, of_layer=True) == 4 * 49152
    assert state_of("muon", MATRIX) == 8 * 49152
    assert state_of("muon", VECTOR) == 8 * 96


@pytest.mark.parametrize(("name", "total"), [("adamw-bf16", 8), ("adamw-bf16-kahan", 10), ("adamw-fused", 16)])
def test_bytes_per_parameter_in_all(name, total):
    """Weight, gradient and state. The 8 that people quote for pure bf16 are without Kahan's second tensor."""
    row = OPTIMIZERS[name]
    assert 2 * row.weights + row.state == total
    assert state_of(name, MATRIX) == row.state * 49152


def test_one_fp32_moment():
    for name in ("lion", "sgd-momentum"):
        assert state_of(name, MATRIX, of_layer=True) == state_of(name, MATRIX) == 4 * 49152
        assert state_of(name, VECTOR) == 4 * 96


def test_an_unknown_name_lists_the_known():
    with pytest.raises(UserError, match=r"unknown optimizer 'adamw-16bit'.*did you mean 'adamw-8bit'.*muon"):
        find_optimizer("adamw-16bit")


# the update

GPT2 = Shape(layers=12, heads=12, d_model=768, d_ff=3072, vocab=50257, sequence=1024)
HALF = Plan(autocast="bf16", tied=True)
COUNT, LAYERS = 124_439_808, 12 * 12 * 768**2  # parameters, and those of the layers' matrices


def plan_for(name):
    return replace(plan_of(("bf16", "tied-weights", *with_optimizer((), name))), matmul_precision="highest")


def updates_of(plan, **settings):
    return {op.name: op for op in operations(GPT2, plan, micro_batch=1, **settings) if op.direction == "update"}


@pytest.mark.parametrize(
    ("name", "bytes_each", "kernels"),
    [
        ("adamw-loop", 80, 8 * 50 + 7 * 98),  # 12 layers of 4 matrices, 4 biases, 2 norms of 2; 2 tables, 1 norm
        ("adamw-foreach", 80, 8),
        ("adamw-fused", 28, 1),
        ("adamw-8bit", 16 + 4 * 4 / 256, 148),
        ("adamw-bf16", 192, 25 * 148),
        ("adamw-bf16-kahan", 164, 20 * 148),
        ("adafactor", 84, 20 * 50 + 13 * 98),
        ("lion", 52, 5 * 148),
        ("sgd-momentum", 20, 1),
    ],
)
def test_the_update_of_gpt2_by_hand(name, bytes_each, kernels):
    update = updates_of(plan_for(name))[name]
    assert update.bytes == pytest.approx(bytes_each * COUNT)
    assert (update.kernels, update.flops) == (kernels, 0)
    assert tensors(GPT2, HALF) == 148


def test_muons_update_by_hand():
    """Inside the layers 54 bytes a number and 23 kernels a matrix; elsewhere the fused AdamW's 28 in one. Newton-Schulz
    has five rounds: 4 r^2 c + 2 r^3 FLOPs each, r = 768 and c = 2304, 768, 3072 and 3072."""
    found = updates_of(plan_for("muon"))
    assert found["muon"].bytes == 54 * LAYERS + 28 * (COUNT - LAYERS)
    assert found["muon"].kernels == 1 + 23 * 48
    by_hand = 12 * 5 * (4 * 768**2 * (2304 + 768 + 2 * 3072) + 4 * 2 * 768**3)
    assert found["muon matmuls"].flops == by_hand
    assert found["muon matmuls"].kind == "gemm"
    assert updates_of(replace(plan_for("muon"), autocast=None))["muon matmuls"].flops == 0  # not at fp32's rate


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_moves_less_than_it_must(name):
    """Weight in and out, gradient in, state in and out; what is in 16 bit moves half."""
    row = OPTIMIZERS[name]
    least = 3 * row.weights + 2 * (row.state if row.state_of_rest is None else 0)
    assert row.traffic >= least
    assert updates_of(plan_for(name))["clip"].bytes == 3 * row.weights * COUNT


def test_bf16_weights_are_not_cast():
    assert not [op for op in operations(GPT2, plan_for("adamw-bf16"), micro_batch=1) if op.name == "weight casts"]
    twice = operations(GPT2, plan_for("adamw-bf16"), micro_batch=1, accumulation=2)
    assert next(op for op in twice if op.name == "gradient sums").bytes == 3 * 2 * COUNT


# the rungs


def test_every_optimizer_has_its_rung_and_only_one():
    rungs = [rung for rung in LADDER if group_of(rung) == "fused-adamw"]
    found = {rung.apply(Plan()).optimizer for rung in rungs}
    assert found == set(OPTIMIZERS) - {Plan().optimizer}
    assert len(rungs) == len(found)
    for rung in rungs[1:]:
        assert rung.when_named
        assert rung.stand_in == (rung.maths is Maths.CHANGES), "how fast a step is says nothing about what it learns"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_stores_what_its_optimizer_updates(name):
    plan = plan_of(("bf16", *with_optimizer((), name)))
    assert plan.optimizer == name
    assert {"fp32": 4, "bf16": 2}[plan.weights] == OPTIMIZERS[name].weights
    for rung in map(find_rung, with_optimizer((), name)):  # also on top of one with other weights
        assert rung.apply(plan_of(["adamw-bf16"])).weights == plan.weights


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rung_predicts_what_the_optimizer_alone_does(name):
    """`predict_memory(optimizer=...)` asks for another optimizer on top of a plan; a plan may have it itself."""
    usual = plan_of(("bf16", "tied-weights", "fused-adamw"))
    asked = predict_memory(GPT2, usual, micro_batch=4, optimizer=name)
    assert predict_memory(GPT2, plan_of(with_optimizer(("bf16", "tied-weights"), name)), micro_batch=4) == asked


def test_a_recipe_has_one_optimizer():
    assert with_optimizer(("muon", "bf16", "tf32"), "lion") == ("tf32", "bf16", "lion")
    assert with_optimizer(("fused-adamw", "tf32"), "adamw-loop") == ("tf32",)
    with pytest.raises(UserError, match=r"unknown optimizer 'lyon'.*did you mean 'lion'"):
        with_optimizer((), "lyon")
    check_alternatives(("tf32", "bf16", "muon"))
    for pair in (("lion", "muon"), ("fused-adamw", "lion"), ("flash", "cudnn-attention")):
        with pytest.raises(UserError, match=f"{pair[0]} and {pair[1]} were given together"):
            check_alternatives(pair)


def test_8bit_needs_its_package_where_that_was_looked_for(tiny, h200, cpu):
    rung = find_rung("adamw-8bit")
    assert rung.needs(tiny, h200, Plan()) is None
    without = replace(h200, missing={"torchao": "the package torchao is not installed"})
    assert rung.needs(tiny, without, Plan()) == "the package torchao is not installed"
    features = tuple(feature for feature in h200.features if feature != "compile")
    assert "compile" in rung.needs(tiny, replace(h200, features=features), Plan())


@pytest.mark.parametrize("name", ["adamw-bf16", "adamw-bf16-kahan"])
def test_bf16_weights_want_bf16_matmuls(name, tiny, h200, t4):
    rung = find_rung(name)
    assert rung.needs(tiny, h200, Plan(autocast="bf16")) is None
    assert "add bf16" in rung.needs(tiny, h200, Plan(autocast="fp16"))
    assert rung.needs(tiny, t4, Plan(autocast="fp16")) == "Tesla T4 has no bf16"


def test_the_page_shows_what_an_update_moves_and_launches(repository):
    page = (repository / "docs" / "optimizers.md").read_text(encoding="utf-8")
    table = page[page.index("| name | moved |") :].split("\n\n")[0]
    shown = re.findall(r"^\| `(\S+)` \| ([\d.]+)[^|]* \| ([\d,]+)[^|]* \|", table, re.MULTILINE)
    assert [name for name, *_ in shown] == list(OPTIMIZERS)
    for name, moved, kernels in shown:
        update = updates_of(plan_for(name))[name]
        assert float(moved) == pytest.approx(OPTIMIZERS[name].traffic, abs=0.05)
        assert int(kernels.replace(",", "")) == update.kernels


def test_what_to_change_leaves_the_optimizer_that_was_chosen():
    """Fused AdamW is a gain over the other two alone; 8 bits save nothing where weights are in bf16."""

    def offered(name):
        case = Case(shape=GPT2, plan=plan_for(name))
        return {option.what for option in fitting._options(case) if option.apply(case, 64) is not None}

    for name in OPTIMIZERS:
        assert ("fused-adamw" in offered(name)) == (name in ("adamw-loop", "adamw-foreach"))
        assert ("optimizer adamw-8bit" in offered(name)) == (
            name not in ("adamw-8bit", "adamw-bf16", "adamw-bf16-kahan")
        )
