"""Rungs with 8-bit products: where they apply, what undoes them, and what the predictions make of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from redline.core.devices import find_device
from redline.core.hardware import MeasuredPeaks
from redline.core.plan import Plan
from redline.predict.efficiency import efficiency
from redline.predict.memory import predict_memory
from redline.predict.operations import FUSIONS, operations
from redline.predict.roofline import compute_floor, peaks_for, predict_step, reachable, sheet_peaks
from redline.rungs import find_rung, plan_of, reference_plan, usual_rungs
from redline.workloads import PRESETS

GPT2, H200, A100 = PRESETS["gpt2"], find_device("H200"), find_device("A100-80-SXM")
FAST = ("tf32", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw", "fused-loss")
BEFORE, HEAD = plan_of(FAST), plan_of((*FAST, "fp8-head"))
ROWS, WIDTH, SEQUENCE, MICRO_BATCH = 50304, 768, 1024, 64
TOKENS = MICRO_BATCH * SEQUENCE
NUMBERS = TOKENS * ROWS


LINEARS = plan_of((*FAST, "fp8-linears"))
BOTH = plan_of((*FAST, "fp8-head", "fp8-linears"))
MLPS = plan_of((*FAST, "fused-backward", "tuned-matmuls", "fused-matmuls", "fp8-linears", "fp8-mlps"))
SOME = plan_of((*FAST, "fused-backward", "tuned-matmuls", "fp8-linears"))


def refusal(hardware, plan, workload=GPT2, rung="fp8-head"):
    return find_rung(rung).needs(workload, hardware, plan)


def shaped(**sizes):
    return replace(GPT2, shape=replace(GPT2.shape, **sizes))


def test_a_narrow_head_on_an_h200(h200):
    assert refusal(h200, BEFORE) is None
    assert refusal(h200, replace(BEFORE, parallel="ddp")) is None
    assert refusal(h200, replace(BEFORE, loss="chunked")) is None


def test_what_a_narrow_head_needs(h200, t4, cpu):
    assert "add fused-loss" in refusal(h200, replace(BEFORE, loss="full"))
    assert "add bf16" in refusal(h200, replace(BEFORE, autocast="fp16"))
    assert "add bf16" in refusal(h200, replace(BEFORE, autocast=None))
    assert "50,257: add padded-vocab" in refusal(h200, replace(BEFORE, vocab_multiple=1))
    assert refusal(t4, BEFORE) == "Tesla T4 has no fp8"
    assert refusal(cpu, BEFORE) == "a CPU has no fp8"


def test_rows_are_whole_sixteens(h200):
    assert refusal(h200, replace(BEFORE, vocab_multiple=1), shaped(vocab=50256)) is None
    assert "width is 776" in refusal(h200, BEFORE, shaped(d_model=776, heads=8))
    assert "1000 tokens" in refusal(h200, BEFORE, shaped(sequence=1000))
    assert refusal(h200, BEFORE, shaped(sequence=64)) is None
    assert "an eighth of a sequence's 64" in refusal(h200, replace(BEFORE, loss="chunked"), shaped(sequence=64))


def test_what_narrow_layers_need(h200, t4, cpu):
    ask = partial(refusal, rung="fp8-linears")
    assert ask(h200, BEFORE) is None
    assert ask(h200, replace(BEFORE, loss="full", vocab_multiple=1, backward="fused")) is None
    assert "add compile" in ask(h200, replace(BEFORE, compile=False))
    assert "add bf16" in ask(h200, replace(BEFORE, autocast="fp16"))
    assert ask(t4, BEFORE) == "Tesla T4 has no fp8"
    assert ask(cpu, BEFORE) == "a CPU has no fp8"
    assert "776 wide" in ask(h200, BEFORE, shaped(d_model=776, heads=8))
    assert "3080 wide" in ask(h200, BEFORE, shaped(d_ff=3080))
    assert ask(h200, BEFORE, shaped(sequence=1000)) is None  # no product of theirs sums over tokens


def test_narrow_and_tuned_layers_meet_in_the_blocks_of_fused_backward(h200):
    for first, then in (("fp8-linears", "tuned-matmuls"), ("tuned-matmuls", "fp8-linears")):
        plan = plan_of((*FAST, first))
        reason = refusal(h200, plan, rung=then)
        assert f"beside {first}" in reason
        assert "add it" in reason
        assert refusal(h200, replace(plan, backward="fused"), rung=then) is None
    assert SOME.narrows_what_pays
    assert not plan_of((*FAST, "tuned-matmuls", "fp8-linears")).narrows_what_pays
    assert not replace(SOME, autocast=None).narrows_what_pays


def test_8_bit_gradients_are_counted_where_there_are_some():
    """Where blocks are computed again and the loss is in pieces, the peak is inside a block."""
    small = {"checkpointing": "full", "loss": "chunked"}
    plans = [replace(plan, **small) for plan in (replace(SOME, fp8_linears=False), SOME, MLPS)]
    none, some, mlps = (predict_memory(GPT2.shape, plan, micro_batch=MICRO_BATCH).temporary for plan in plans)
    assert some - none == TOKENS * WIDTH
    assert mlps - none == TOKENS * 4 * WIDTH


def test_what_narrow_mlps_need(h200):
    before = replace(MLPS, fp8_mlps=False)
    assert refusal(h200, before, rung="fp8-mlps") is None
    assert "add it" in refusal(h200, replace(before, fp8_linears=False), rung="fp8-mlps")
    assert "fused-matmuls" in refusal(h200, replace(before, fused_matmuls=False), rung="fp8-mlps")
    assert MLPS.narrows_mlps
    assert not replace(MLPS, fused_matmuls=False).narrows_mlps
    assert not plan_of((*FAST, "fp8-mlps", "fsdp")).fp8_mlps


@pytest.mark.parametrize("way", ["fsdp", "fsdp-keep", "tensor-parallel", "pipeline-parallel", "pipeline-gpipe"])
def test_a_model_that_is_cut_undoes_it(way, h200):
    plan = plan_of((*FAST, "fp8-head", "fp8-linears", way))
    assert (plan.fp8_head, plan.fp8_linears) == (False, False)
    cut = replace(plan_of((*FAST, way)), loss="fused")
    for rung in ("fp8-head", "fp8-linears"):
        assert "a model that is cut undoes them" in refusal(h200, cut, rung=rung)


def test_a_model_that_is_gathered_as_one_has_them(h200):
    plan = plan_of((*FAST, "fp8-head", "fp8-linears", "fsdp-whole"))
    assert (plan.fp8_head, plan.fp8_linears) == (True, True)
    for rung in ("fp8-head", "fp8-linears"):
        assert refusal(h200, plan_of((*FAST, "fsdp-whole")), rung=rung) is None


def test_they_are_taken_by_name_only(h200):
    assert not {"fp8-head", "fp8-linears"} & set(usual_rungs(GPT2, h200))


def test_the_reference_has_no_8_bits():
    """Its plan says so, but there is no autocast whose products could be narrow."""
    reference = reference_plan((*FAST, "fp8-head", "fp8-linears"))
    assert reference == Plan(tied=True, fp8_head=True, fp8_linears=True)
    assert reference.precision == "fp32"


# predictions


def of_head(plan, fusion=None):
    listed = operations(GPT2.shape, plan, micro_batch=MICRO_BATCH, fusion=fusion)
    return {(each.name, each.direction): each for each in listed if "head" in each.name or each.name == "loss"}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_same_flops_at_another_rate(fusion):
    before, after = of_head(BEFORE, fusion), of_head(HEAD, fusion)
    products = [name for name in before if name[0].startswith("head")]
    assert len(products) == 3
    for name in products:
        assert after[name].flops == before[name].flops == 2 * TOKENS * ROWS * WIDTH
        assert (before[name].kind, after[name].kind) == ("gemm", "fp8")
    others = {
        each.kind for each in operations(GPT2.shape, HEAD, micro_batch=1, fusion=fusion) if "head" not in each.name
    }
    assert "fp8" not in others


def test_bytes_by_hand():
    found = of_head(HEAD)
    stream, table = TOKENS * WIDTH, ROWS * WIDTH
    assert found["head", "forward"].bytes == stream + table + 2 * NUMBERS
    assert found["head dgrad", "backward"].bytes == NUMBERS + table + 2 * stream
    assert found["head wgrad", "backward"].bytes == NUMBERS + stream + 2 * table
    assert found["loss", "forward"].bytes == 3 * NUMBERS  # bf16 in, 8 bits out
    assert found["head gradient turned", "forward"].bytes == 2 * NUMBERS
    # Twice read (bf16, fp32), written in 8 bits, and turned.
    assert found["head casts", "forward"].bytes == (2 * 2 + 1 + 2) * stream + (2 * 4 + 1 + 2) * table


@pytest.mark.parametrize(
    ("plan", "fusion", "read", "again"),
    [
        (LINEARS, None, 0, 2),  # Inductor: only what attention writes is read once more
        (replace(LINEARS, backward="fused"), None, 2, 2),  # and the gradients of hand-written kernels
        (LINEARS, "ideal", 0, 0),
        (LINEARS, "eager", 2 * 2 + 4 * 4, 2 * 2 + 4 * 4),
    ],
    ids=["inductor", "fused backward", "ideal", "eager"],
)
def test_bytes_of_layers_by_hand(plan, fusion, read, again):
    listed = operations(GPT2.shape, plan, micro_batch=MICRO_BATCH, fusion=fusion)
    found = {(each.name, each.direction): each.bytes for each in listed}
    numbers = 12 * TOKENS * WIDTH  # of the stream, in all layers
    read_forward = read if fusion == "eager" else 0
    assert found["qkv casts", "forward"] == found["up casts", "forward"] == (read_forward + 1) * numbers
    assert found["down casts", "forward"] == 4 * (read_forward + 1) * numbers
    assert found["proj casts", "forward"] == (again + 1) * numbers
    for name, widths in (("qkv", 3), ("proj", 1), ("up", 4), ("down", 1)):
        assert found[f"{name} casts", "backward"] == widths * (read + 1) * numbers
    weights = 12 * 12 * WIDTH**2
    assert found["8-bit weights", "forward"] == 5 * weights
    assert found["8-bit weights", "backward"] == 9 * weights


def test_weights_gradients_stay_in_16_bit():
    kinds = {
        (each.name, each.direction): each.kind
        for each in operations(GPT2.shape, LINEARS, micro_batch=1)
        if each.kind in ("gemm", "fp8")
    }
    for name in ("qkv", "proj", "up", "down"):
        assert kinds[name, "forward"] == kinds[f"{name} dgrad", "backward"] == "fp8"
        assert kinds[f"{name} wgrad", "backward"] == "gemm"
    assert {kinds["head", "forward"], kinds["head dgrad", "backward"], kinds["head wgrad", "backward"]} == {"gemm"}


def test_beside_tuned_products_those_that_pay_are_narrow():
    listed = operations(GPT2.shape, SOME, micro_batch=MICRO_BATCH)
    narrow = {each.name for each in listed if each.kind == "fp8"}
    assert narrow == {"qkv", "up", "down dgrad"}
    found = {(each.name, each.direction): each.bytes for each in listed}
    numbers = 12 * TOKENS * WIDTH
    casts = {name: size for name, size in found.items() if name[0].endswith("casts") and name[0] != "weight casts"}
    assert casts == {
        ("qkv casts", "forward"): numbers,
        ("up casts", "forward"): numbers,
        ("down casts", "backward"): 3 * numbers,  # a hand-written kernel writes the stream's gradient
    }
    assert found["8-bit weights", "forward"] == 5 * 7 * 12 * WIDTH**2
    assert found["8-bit weights", "backward"] == 9 * 4 * 12 * WIDTH**2
    in_16_bits = operations(GPT2.shape, replace(SOME, fp8_linears=False), micro_batch=MICRO_BATCH)
    assert found["weight casts", "forward"] == next(
        each.bytes for each in in_16_bits if (each.name, each.direction) == ("weight casts", "forward")
    )


def test_8_bits_that_a_product_writes_besides_are_read_by_the_next():
    listed = operations(GPT2.shape, MLPS, micro_batch=MICRO_BATCH)
    assert {each.name for each in listed if each.kind == "fp8"} == {"qkv", "up", "down", "up dgrad", "down dgrad"}
    found = {(each.name, each.direction): each.bytes for each in listed}
    numbers = 12 * TOKENS * WIDTH
    assert (
        found["down casts", "forward"] == found["up casts", "backward"] == 4 * numbers
    )  # written, and not read before
    assert found["down casts", "backward"] == 3 * numbers


def test_the_heads_16_bit_copy_is_gone():
    def casts(plan):
        listed = operations(GPT2.shape, plan, micro_batch=1)
        return {each.direction: each.bytes for each in listed if each.name == "weight casts"}

    before, after = casts(BEFORE), casts(HEAD)
    assert before["forward"] - after["forward"] == 6 * ROWS * WIDTH
    assert before["backward"] == after["backward"] == casts(BOTH)["backward"]
    assert "forward" not in casts(BOTH)


def test_the_floor_has_two_rates():
    sheet = sheet_peaks(HEAD, H200)
    assert (sheet.matmul_tflops, sheet.fp8_tflops) == (H200.peak_tflops["bf16"], H200.peak_tflops["fp8"])
    before = compute_floor(GPT2.shape, BEFORE, micro_batch=MICRO_BATCH, peaks=sheet_peaks(BEFORE, H200))
    after = compute_floor(GPT2.shape, HEAD, micro_batch=MICRO_BATCH, peaks=sheet)
    work = 6 * NUMBERS * WIDTH / 1e12
    gain = 1 / sheet.matmul_tflops - 1 / sheet.fp8_tflops
    assert before - after == pytest.approx(work * gain)
    both = compute_floor(GPT2.shape, BOTH, micro_batch=MICRO_BATCH, peaks=sheet)
    assert after - both == pytest.approx(4 * TOKENS * 12 * 12 * WIDTH**2 / 1e12 * gain)


def test_the_step_gains_less_than_the_products():
    """Turning the gradient takes back some of it, and writing fewer bytes of it gives some."""
    steps = [
        predict_step(
            GPT2.shape, plan, micro_batch=MICRO_BATCH, sheet=sheet_peaks(plan, H200), reached=reachable(plan, H200)
        )
        for plan in (BEFORE, HEAD)
    ]
    for side in ("light", "expected"):
        before, after = (
            {(r.operation.name, r.operation.direction): r.seconds for r in getattr(s, side).rows} for s in steps
        )
        products = [name for name in before if name[0].startswith("head")]
        gained = sum(before[name] - after[name] for name in products)
        assert 0 < sum(before.values()) - sum(after.values()) < gained
        assert after["head gradient turned", "forward"] > before["loss", "forward"] - after["loss", "forward"]


def test_a_device_without_8_bits_has_no_prediction():
    assert sheet_peaks(HEAD, A100) is None
    assert reachable(HEAD, A100) is None
    assert sheet_peaks(BEFORE, A100) is not None
    assert peaks_for(HEAD, {"fp8": 2.0}, 1.0, "a card of which bf16 is not known") is None


def test_what_was_measured_here_without_8_bits_says_nothing_of_them():
    measured = MeasuredPeaks(
        name="NVIDIA H200",
        driver=None,
        kind="cuda",
        matmul_tflops={"bf16": 700.0},
        bandwidth=4e12,
        bandwidths={},
        rates=(),
        workload="gpt2",
        micro_batch=16,
        date="2026-11-15",
        versions={},
        command="",
    )
    assert reachable(BEFORE, H200, measured).matmul_tflops == 700
    assert reachable(HEAD, H200, measured).matmul_tflops == H200.best_tflops["bf16"]


def test_there_is_no_mfu(h200):
    share = efficiency(GPT2.shape, HEAD, h200, 600_000)
    assert share.mfu is None
    assert "no single peak" in share.convention


def test_a_gradient_lies_beside_its_8_bits():
    """Where blocks are computed again and the loss is in pieces, the peak is inside a block."""
    small = {"loss": "chunked", "checkpointing": "full"}
    before, after = (
        predict_memory(GPT2.shape, replace(plan, **small), micro_batch=MICRO_BATCH) for plan in (BEFORE, LINEARS)
    )
    assert before.moment == after.moment == "backward of the last layer"
    assert after.allocated - before.allocated == TOKENS * 4 * WIDTH


@pytest.mark.parametrize(("loss", "piece"), [("fused", NUMBERS), ("chunked", NUMBERS // 8)])
def test_logits_and_their_gradient_lie_apart(loss, piece):
    before, after = (
        predict_memory(GPT2.shape, replace(plan, loss=loss), micro_batch=MICRO_BATCH) for plan in (BEFORE, HEAD)
    )
    assert before.logits == 2 * piece  # the gradient lies where the logits were
    assert after.moment == before.moment == "forward of the loss"
    assert after.logits in (3 * piece, 2 * piece)
    assert after.allocated > before.allocated


def test_estimate_says_what_it_costs(capsys):
    from redline.cli import main

    assert (
        main(["estimate", "gpt2", "--gpu", "H200", "--micro-batch", "64", "--rungs", ",".join((*FAST, "fp8-head"))])
        == 0
    )
    said = capsys.readouterr().out
    assert "fp8" in said
    assert "reasoned, not measured, for 8-bit products" in " ".join(said.split())
    assert main(["estimate", "gpt2", "--gpu", "A100-80-SXM", "--rungs", ",".join((*FAST, "fp8-head"))]) == 2
    assert "fp8" in capsys.readouterr().err
