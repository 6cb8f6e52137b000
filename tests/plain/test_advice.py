"""Advice on profiles made by hand: the right rung, a gain that the times allow, and silence where it is due."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from redline.core import profile as names
from redline.core.devices import find_device
from redline.core.measurement import Sharing, Spread
from redline.core.plan import Plan
from redline.core.profile import Finding, Kernel, ModuleTime, Part, Profile, Uncompiled
from redline.core.values import from_json
from redline.core.workload import Shape
from redline.predict.advice import Advice, Candidate, Rates, advise, pools_of, rates_of
from redline.predict.idle import GRAPH_GAIN
from redline.predict.reach import fastest_seen, reach_of
from redline.rungs import LADDER, Maths, plan_of
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape
H200 = Rates(matmul_tflops={"fp32": 50.0, "tf32": 400.0, "bf16": 790.0}, bandwidth=4.3e12, source="by hand")
BEST = ("tf32", "no-sync", "bf16", "compile", "flash", "padded-vocab", "fused-adamw", "loader-workers", "fused-loss")


def profile(groups: dict[str, float], **changes: Any) -> Profile:
    """A step made of these groups, in milliseconds."""
    step = sum(groups.values()) / 1e3
    found = Profile(
        device="cuda",
        steps=3,
        step_seconds=Spread(median=step, p10=step, p90=step, n=10),
        profiled_seconds=step,
        parts=tuple(Part(phase=names.FORWARD, group=group, seconds=ms / 1e3) for group, ms in groups.items()),
        modules=(),
        kernels=(),
        launches=100.0,
        busy_share=0.9,
        host_seconds=step,
        cpu_seconds=step,
        sync_idle_seconds=0.0,
        attention=None,
        compiled=False,
    )
    return replace(found, **changes)


EVEN = {
    names.CONTRACTION: 40.0,
    names.ATTENTION: 40.0,
    names.NORMALISATION: 10.0,
    names.ELEMENTWISE: 10.0,
    names.MOVEMENT: 5.0,
    names.LOSS: 20.0,
    names.OPTIMIZER: 20.0,
}


def advice_on(found: Profile, rungs: tuple[str, ...] = (), rates: Rates | None = H200) -> tuple[Advice, ...]:
    plan = plan_of(rungs)
    candidates = [
        Candidate(rung=rung.name, title=rung.title, plan=rung.apply(plan))
        for rung in LADDER[1:]
        if rung.name not in rungs and rung.maths is not Maths.CHANGES and not rung.when_named
    ]
    return advise(found, shape=GPT2, plan=plan, micro_batch=16, candidates=candidates, rates=rates)


def gains(found: tuple[Advice, ...]) -> dict[str | None, float | None]:
    return {each.rung: each.gain_seconds for each in found}


def test_naive_attention_asks_for_a_fused_kernel():
    found = advice_on(profile(EVEN), ("tf32", "bf16"))
    fused = next(each for each in found if each.rung in ("flash", "cudnn-attention"))
    assert 0.030 < (fused.gain_seconds or 0) < 0.040  # most of the 40 ms, never all
    assert "attention takes 40.0 ms of 145 ms (28 %)" in fused.why


def test_of_two_attention_kernels_one_is_advised():
    rungs = [each.rung for each in advice_on(profile(EVEN), ("tf32", "bf16"))]
    assert len({"flash", "cudnn-attention"} & set(rungs)) == 1
    assert len(rungs) == len(set(rungs))


def test_fp32_asks_for_the_tensor_cores_once():
    found = advice_on(profile(EVEN))
    precise = [each for each in found if each.rung in ("tf32", "bf16", "fp16")]
    assert len(precise) == 1  # the one with the larger gain, not one after the other
    assert precise[0].rung in ("tf32", "bf16")  # fp16 has no rate here
    assert (precise[0].gain_seconds or 0) > 0.8 * 0.040  # 50 -> 400 TFLOP/s or more in 40 ms of products alone


def test_the_loss_and_the_optimizer_have_their_rungs():
    found = gains(advice_on(profile(EVEN), ("tf32", "bf16")))
    assert 0.010 < (found["fused-loss"] or 0) <= 0.020
    assert (found["fused-adamw"] or 0) == pytest.approx(0.020 * (80 - 28) / (80 + 12), rel=0.05)  # bytes a parameter


def test_a_rung_gains_nothing_where_no_time_is_spent():
    found = gains(advice_on(profile({**EVEN, names.ATTENTION: 0.0, names.OPTIMIZER: 0.0}), ("tf32", "bf16")))
    assert "flash" not in found
    assert "fused-adamw" not in found


def test_gains_never_exceed_the_step():
    for rungs in ((), ("tf32", "bf16"), ("tf32", "bf16", "compile")):
        assert all((each.gain_seconds or 0) < 0.145 for each in advice_on(profile(EVEN), rungs))


def test_a_finished_recipe_is_left_alone():
    advised = advice_on(profile(EVEN), (*BEST, "fused-backward"))
    assert [each.rung for each in advised if each.rung not in (None, "cudnn-attention")] in (
        [],
        ["bf16-residual"],
        ["bf16-residual", "sigmoid-gelu"],
    )


def test_compile_is_for_launches_and_for_traffic():
    idle = {**EVEN, names.IDLE: 100.0}
    rungs = ("tf32", "bf16", "fused-adamw")  # the loop's launches stay, compiled or not
    with_idle, without = (gains(advice_on(profile(each), rungs))["compile"] for each in (idle, EVEN))
    assert (without or 0) + 0.020 < (with_idle or 0) < (without or 0) + 0.100


def test_waiting_for_data_asks_for_workers():
    found = advice_on(profile({**EVEN, names.DATA_WAIT: 30.0}), ("tf32", "bf16"))
    workers = next(each for each in found if each.rung == "loader-workers")
    assert workers.gain_seconds == pytest.approx(0.030)
    again = advice_on(profile({**EVEN, names.DATA_WAIT: 30.0}), (*BEST[:7], "loader-workers"))
    assert any(each.rung is None and "batches" in each.what for each in again)


@pytest.mark.parametrize(("tensor", "what"), [((), "send less often"), (("tensor-parallel",), "--tensor")])
def test_communication_that_nothing_hides_is_told_with_its_straggler(tensor, what):
    sharing = Sharing(communication_seconds=0.050, exposed_seconds=0.040, compute_seconds=(0.100, 0.100, 0.108))
    found = advice_on(profile(EVEN, sharing=sharing), (*BEST, *tensor))
    told = next(each for each in found if "ranks wait for one another" in each.why)
    assert what in told.what
    assert told.gain_seconds == 0.040
    assert told.at_most
    assert "slowest rank alone is 8.00 ms late" in told.why
    hidden = advice_on(profile(EVEN, sharing=replace(sharing, exposed_seconds=0.0005)), (*BEST, *tensor))
    assert not any("ranks wait" in each.why for each in hidden)


OWN_LINE = Finding(kind="synchronisation", detail="", file="model.py", line=12)
READ_LOSS = Finding(kind="synchronisation", detail="", rung="no-sync")


@pytest.mark.parametrize(
    ("found", "what", "rung", "left"),
    [
        ((READ_LOSS,), "take no-sync", "no-sync", 0.1),  # one read in ten steps is left
        ((), "take no-sync", "no-sync", 0.1),  # nobody could watch
        ((OWN_LINE,), "fix model.py:12", None, 0.0),  # which no rung can
        ((READ_LOSS, OWN_LINE), "take no-sync and fix model.py:12", "no-sync", 0.1),
    ],
    ids=["the-recipe", "unknown", "a-line", "both"],
)
def test_idle_time_behind_synchronisations_is_the_recipes_or_a_lines(found, what, rung, left):
    waiting = profile({**EVEN, names.IDLE: 30.0}, sync_idle_seconds=0.030, findings=found)
    (quiet,) = [each for each in advice_on(waiting, ("tf32", "bf16")) if "runs dry" in each.why]
    assert (quiet.what, quiet.rung) == (what, rung)
    assert quiet.gain_seconds == pytest.approx(0.030 * (1 - left))


def test_idle_time_that_no_rung_mends_asks_for_more_work_per_launch():
    plan = plan_of(BEST)
    found = advise(profile({**EVEN, names.IDLE: 30.0}), shape=GPT2, plan=plan, micro_batch=1, candidates=(), rates=H200)
    assert [each.gain_seconds for each in found] == [pytest.approx(0.030)]
    assert "micro batch" in found[0].what


def test_fp32_matmuls_under_autocast_cost_their_time_over_the_16_bit_rate():
    line = Finding(kind="fp32-matmul", detail="", file="model.py", line=7)
    slow = Kernel(name="sgemm", group=names.CONTRACTION, calls=1, seconds=0.02, flops=1e12, bytes=1e9, dtype="fp32")
    found = advice_on(profile(EVEN, findings=(line,), kernels=(slow,)), BEST)
    mended = next(each for each in found if "model.py:7" in each.what)
    assert mended.gain_seconds == pytest.approx(0.02 * (1 - 400 / 790))  # fp32 runs as TF32 in this recipe


@pytest.mark.parametrize("kind", ["math-attention", "graph-break", "recompile", "host-copy"])
def test_findings_without_a_time_come_last_and_say_where(kind):
    line = Finding(kind=kind, detail="because", file="model.py", line=7)
    found = advice_on(profile(EVEN, findings=(line,)), ("tf32", "bf16"))
    assert found[-1] == Advice(what="fix model.py:7", why=found[-1].why, gain_seconds=None)
    assert "because" in found[-1].why


def test_checkpointing_is_named_as_what_it_costs():
    found = advice_on(profile(EVEN), (*BEST, "checkpointing"))
    kept = next(each for each in found if "checkpointing" in each.what)
    assert 0.2 * 0.080 < (kept.gain_seconds or 0) < 0.5 * 0.145


def test_without_rates_only_what_was_measured_is_promised():
    found = advice_on(profile({**EVEN, names.DATA_WAIT: 30.0}), ("tf32", "bf16"), rates=None)
    assert [each.rung for each in found if each.gain_seconds is not None] == ["loader-workers"]


def test_most_to_gain_comes_first():
    found = advice_on(profile(EVEN), ("tf32",))
    known = [each.gain_seconds for each in found if each.gain_seconds is not None]
    assert known == sorted(known, reverse=True)
    assert len(known) >= 3


def test_rates_come_from_the_data_sheet_or_from_the_profile_itself():
    device = find_device("H200")
    assert rates_of(profile(EVEN), Plan(), device, None).bandwidth == device.reachable_bandwidth  # type: ignore[union-attr]
    kernels = (
        Kernel(name="mm", group=names.CONTRACTION, calls=1, seconds=0.5, flops=1e12, bytes=1e9, dtype="fp32"),
        Kernel(name="add", group=names.ELEMENTWISE, calls=1, seconds=0.1, flops=None, bytes=1e9, dtype=None),
    )
    found = rates_of(profile(EVEN, kernels=kernels), Plan(), None, None)
    best = "the best kernels of this profile"
    assert found == Rates(matmul_tflops={"fp32": 2.0}, bandwidth=1e10, source=best, reachable=False)
    assert rates_of(profile(EVEN), Plan(), None, None) is None


def test_every_predicted_operation_has_a_pool():
    shape = Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=257, sequence=16)
    for plan in (Plan(), plan_of(BEST), replace(plan_of(BEST), checkpointing="full")):
        from redline.predict.advice import Case

        case = Case(profile=profile(EVEN), shape=shape, plan=plan, micro_batch=2, candidates=(), rates=H200)
        assert set(pools_of(case, plan) or {}) >= {names.CONTRACTION, names.ATTENTION, names.LOSS, names.OPTIMIZER}


# idle time: whose it is, and which phase's


def recorded_profile(repository) -> tuple[dict[str, Any], Profile]:
    """The record of an H200, as far as advice reads it."""
    text = (repository / "records" / "2026-11-15-h200-profile-gpt2-b64.json").read_text(encoding="utf-8")
    document = json.loads(text)
    same = ("device", "launches", "busy_share", "host_seconds", "cpu_seconds", "sync_idle_seconds", "compiled")
    kernels = [{name: row[name] for name in Kernel.__dataclass_fields__} for row in document["kernels"]]
    found = profile(
        {},
        **{name: document[name] for name in same},
        step_seconds=from_json(Spread, document["step_seconds"]),
        parts=tuple(from_json(Part, row) for row in document["parts"]),
        kernels=tuple(from_json(Kernel, row) for row in kernels),
    )
    return document, found


def with_graphs(found: Profile, rungs: tuple[str, ...], rates: Rates) -> tuple[Advice, ...]:
    plan = plan_of(rungs)
    graphs = Candidate(rung="cuda-graphs", title="", plan=replace(plan, cuda_graphs=True))
    return advise(found, shape=GPT2, plan=plan, micro_batch=64, candidates=(graphs,), rates=rates)


def test_graphs_gain_what_was_measured_where_the_host_keeps_up(repository):
    """The share is a quotient of two records; a step whose host is early gains little, one whose host is late much."""
    document, found = recorded_profile(repository)
    text = (repository / "records" / "2026-11-15-h200-tune-gpt2.json").read_text(encoding="utf-8")
    rows = {row["change"]: row["step_seconds"]["median"] for row in json.loads(text)["rows"]}
    gained = rows["the usual rungs, as predicted best"] - rows["with cuda-graphs"]
    assert gained / found.by_group()[names.IDLE] == pytest.approx(GRAPH_GAIN, rel=0.01)
    rungs, rates = tuple(document["recipe"]["rungs"]), from_json(Rates, document["rates"])
    assert found.host_seconds < 0.6 * found.step_seconds.median
    early = with_graphs(found, rungs, rates)
    assert all(each.rung is None and "does not keep up" not in each.why for each in early)  # below a hundredth
    late = replace(found, host_seconds=found.step_seconds.median)
    (graphs,) = [each for each in with_graphs(late, rungs, rates) if each.rung]
    assert (graphs.gain_seconds or 0) > 0.9 * 0.00282  # nearly all that is idle in forward and backward
    assert "does not keep up" in graphs.why


def test_idle_time_counts_for_graphs_as_far_as_the_host_is_late():
    """100 ms of work and 10 ms idle: at 104 ms the host is the reason for 4 of them, and for 6 the device is."""
    busy = profile({names.CONTRACTION: 100.0, names.IDLE: 10.0}, host_seconds=0.104)
    (graphs,) = [each for each in with_graphs(busy, BEST, H200) if each.rung]
    assert graphs.gain_seconds == pytest.approx(0.004 + 0.006 * GRAPH_GAIN, abs=0.0001)  # one launch is left
    assert graphs.why.endswith("the host keeps up; the device pauses before each kernel, less so in a recorded graph")
    assert with_graphs(replace(busy, host_seconds=0.108), BEST, H200)[0].why.endswith("does not keep up")


@pytest.mark.parametrize(
    ("host_seconds", "words"), [(0.05, "pauses between kernels"), (0.2, "waits for the host")], ids=["early", "late"]
)
def test_idle_time_that_no_rung_removes_says_whose_it_is(host_seconds, words):
    found = profile({**EVEN, names.IDLE: 30.0}, host_seconds=host_seconds)
    (more,) = advise(found, shape=GPT2, plan=plan_of(BEST), micro_batch=1, candidates=(), rates=H200)
    assert f"the device {words} for 30.0 ms" in more.why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rung_of_one_phase_gains_the_idle_time_of_that_phase_at_most(device):
    """fused-adamw where the optimizer takes 3.7 ms, 1.7 of them idle, and 20 ms are idle elsewhere."""
    times = (
        (names.FORWARD, names.CONTRACTION, 10.0),
        (names.FORWARD, names.IDLE, 10.0),
        (names.BACKWARD, names.IDLE, 10.0),
        (names.UPDATE, names.OPTIMIZER, 2.0),
        (names.UPDATE, names.IDLE, 1.7),
    )
    parts = tuple(Part(phase=phase, group=group, seconds=ms / 1e3) for phase, group, ms in times)
    found = profile({names.IDLE: 33.7}, parts=parts, device=device)
    gained = gains(advice_on(found, ("tf32", "bf16")))["fused-adamw"] or 0
    assert 0.0017 < gained <= 0.0037
    without = replace(found, parts=(*parts[:-1], replace(parts[-1], phase=names.DATA)))
    assert gained - (gains(advice_on(without, ("tf32", "bf16")))["fused-adamw"] or 0) == pytest.approx(0.0017, rel=0.1)


# compiled code that is slower


@pytest.mark.parametrize(
    ("eager_ms", "micro_batch", "gain"),
    [(100.0, 16, 0.045), (140.0, 16, None), (150.0, 16, None), (100.0, 8, None)],
    ids=["faster", "inside-the-noise", "slower", "another-micro-batch"],
)
def test_compile_is_left_out_where_the_same_step_is_faster_without(eager_ms, micro_batch, gain):
    row = ModuleTime(module="", forward=0.01, backward=0.02)
    eager = Uncompiled(
        micro_batch=micro_batch, step_seconds=eager_ms / 1e3, undone=("compile", "bf16-residual"), modules=(row,)
    )
    found = profile(EVEN, device="cpu", compiled=True, uncompiled=eager)  # 145 ms; two runs on a CPU differ by 10 %
    left = [each for each in advice_on(found, BEST) if each.what == "leave compile, bf16-residual out"]
    assert [each.gain_seconds for each in left] == ([] if gain is None else [pytest.approx(gain)])
    assert all(each.why == "the same step without takes 100 ms instead of 145 ms" for each in left)


# bounds

TUNED = {names.CONTRACTION: 60.0, names.ATTENTION: 20.0, names.ELEMENTWISE: 10.0, names.LOSS: 0.5, names.IDLE: 2.0}
GEMM = Kernel(name="mm", group=names.CONTRACTION, calls=9, seconds=0.060, flops=39.5e12, bytes=4.3e9, dtype="bf16")
FLASH = Kernel(name="bwd", group=names.ATTENTION, calls=9, seconds=0.014, flops=3.95e12, bytes=4.3e9, dtype="bf16")
HELPER = Kernel(name="dot", group=names.ATTENTION, calls=9, seconds=0.006, flops=None, bytes=None, dtype=None)
ADD = Kernel(name="add", group=names.ELEMENTWISE, calls=9, seconds=0.010, flops=None, bytes=34.4e9, dtype=None)
SMALL = Kernel(name="ce", group=names.LOSS, calls=1, seconds=0.0005, flops=None, bytes=1.0, dtype=None)
KERNELS = (GEMM, FLASH, HELPER, ADD, SMALL)


def tuned(candidates: tuple[Candidate, ...] = (), rates: Rates | None = H200, **changes: Any) -> tuple[Advice, ...]:
    found = profile(TUNED, **{"kernels": KERNELS, **changes})
    return advise(found, shape=GPT2, plan=plan_of(BEST), micro_batch=16, candidates=candidates, rates=rates)


def test_a_finished_recipe_shows_how_far_its_kernels_are_from_the_machine():
    found = tuned()
    # 39.5 TFLOP at 790 TFLOP/s take 50 ms, 3.95 take 5, 34.4 GB at 4.3 TB/s take 8
    assert [(each.what, round(1e3 * (each.gain_seconds or 0), 6)) for each in found] == [
        ("faster tensor contractions", 10.0),
        ("a faster attention kernel", 9.0),
        ("faster element-wise kernels", 2.0),
    ]
    assert all(each.at_most and each.rung is None for each in found)
    gemm, attention, add = (each.why for each in found)
    assert (
        gemm == "tensor contraction takes 60.0 ms of 92.5 ms (65 %); its 39.5 TFLOP would take 50.0 ms at 790 TFLOP/s"
    )
    assert attention == (
        "attention takes 20.0 ms of 92.5 ms (22 %); of 70 % of that the work is known: 14.0 ms, where its 3.95 TFLOP "
        "(without pairs that a causal mask hides) would take 5.00 ms at 790 TFLOP/s; no rung here brings another kernel"
    )
    assert add == "element-wise takes 10.0 ms of 92.5 ms (11 %); its 34.4 GB would take 8.00 ms at 4.3 TB/s"


def test_no_bound_rests_on_a_rate_that_a_kernel_of_the_profile_beats(repository):
    document, found = recorded_profile(repository)
    rates = from_json(Rates, document["rates"])
    best = max(kernel.flops / kernel.seconds for kernel in found.kernels if kernel.flops)
    assert best > 1e12 * rates.matmul_tflops["bf16"]  # 824 against 795 TFLOP/s
    bound = {each.what: each for each in with_graphs(found, tuple(document["recipe"]["rungs"]), rates)}
    products = bound["faster tensor contractions"]
    known = [each for each in found.kernels if each.group == names.CONTRACTION and each.flops]
    least = sum(max((each.flops or 0) / best, (each.bytes or 0) / rates.bandwidth) for each in known)
    assert products.gain_seconds == pytest.approx(sum(each.seconds for each in known) - least)
    assert products.why.endswith(" at 824 TFLOP/s, as fast as the fastest kernel here")


def test_the_fastest_rates_are_by_precision_and_of_bytes():
    quick = replace(ADD, seconds=0.005)  # 34.4 GB in 5 ms
    assert fastest_seen((GEMM, FLASH, HELPER, ADD, quick), tf32=True) == (
        {"bf16": pytest.approx(39.5 / 0.060)},
        pytest.approx(34.4e9 / 0.005),
    )
    single = replace(GEMM, dtype="fp32")
    assert [set(fastest_seen((single,), tf32=each)[0]) for each in (True, False)] == [{"tf32"}, {"fp32"}]
    assert fastest_seen((HELPER,), tf32=True) == ({}, 0.0)
    slow, fast = (replace(ADD, seconds=seconds) for seconds in (0.040, 0.005))
    (bound,) = [each for each in tuned(kernels=(slow, fast)) if "element-wise" in each.what]
    assert bound.gain_seconds == pytest.approx(0.040 - 0.005)
    assert bound.why.endswith("at 6.88 TB/s, as fast as the fastest kernel here")


def test_bounds_come_after_everything_that_can_be_done_and_fill_up_to_three():
    line = Finding(kind="graph-break", detail="", file="model.py", line=7)
    wait = Part(phase=names.DATA, group=names.DATA_WAIT, seconds=0.001)
    parts = (*profile(TUNED).parts, wait)
    found = tuned(findings=(line,), parts=parts)
    assert [each.at_most for each in found] == [False, False, True]
    assert found[0].gain_seconds == pytest.approx(0.001)  # however small beside the bound
    assert found[1].gain_seconds is None
    assert (found[2].gain_seconds or 0) == pytest.approx(0.010)
    more = tuple(replace(line, line=at, kind=kind) for at, kind in enumerate(("recompile", "host-copy")))
    assert not any(each.at_most for each in tuned(findings=(line, *more), parts=parts))


def test_what_an_advised_rung_helps_is_no_bound():
    slow = replace(plan_of(BEST), attention="naive")
    rung = Candidate(rung="flash", title="", plan=plan_of(BEST))
    found = advise(
        profile(TUNED, kernels=KERNELS), shape=GPT2, plan=slow, micro_batch=16, candidates=(rung,), rates=H200
    )
    assert found[0].rung == "flash"
    assert [each.what for each in found[1:]] == ["faster tensor contractions", "faster element-wise kernels"]


def test_a_rung_for_idle_time_leaves_the_bounds_of_kernels():
    graphs = Candidate(rung="cuda-graphs", title="", plan=replace(plan_of(BEST), cuda_graphs=True))
    assert [each.rung or each.what for each in tuned((graphs,))] == [
        "cuda-graphs",
        "faster tensor contractions",
        "a faster attention kernel",
    ]


def test_another_attention_kernel_is_named():
    """One that the roofline expects nothing of: it knows no kernel that well."""
    other = Candidate(rung="flash", title="", plan=plan_of(BEST))
    plan = replace(plan_of(BEST), attention="cudnn")
    found = advise(
        profile(TUNED, kernels=KERNELS), shape=GPT2, plan=plan, micro_batch=16, candidates=(other,), rates=H200
    )
    (attention,) = [each for each in found if each.what == "a faster attention kernel"]
    assert attention.why.endswith("; flash would be another kernel")


def test_written_out_attention_counts_the_full_square():
    found = advise(
        profile(TUNED, kernels=KERNELS),
        shape=GPT2,
        plan=Plan(autocast="bf16"),
        micro_batch=16,
        candidates=(),
        rates=H200,
    )
    assert any("3.95 TFLOP (the full square of scores)" in each.why for each in found)


@pytest.mark.parametrize(
    ("rates", "kernels"),
    [
        (None, KERNELS),
        (replace(H200, reachable=False), KERNELS),
        (H200, (HELPER, SMALL)),
        (H200, (replace(GEMM, seconds=0.0505), replace(FLASH, dtype="fp8"), replace(GEMM, dtype=None))),
    ],
    ids=["no-rates", "rates-of-the-profile", "unknown-work", "nothing-to-gain"],
)
def test_no_bound_without_rates_and_work_or_below_a_hundredth(rates, kernels):
    assert [each.what for each in tuned(rates=rates, kernels=kernels)] == [
        "give each launch more work: a larger micro batch"
    ]


def test_idle_time_that_no_rung_removes_is_a_bound_and_one_that_a_rung_removes_is_not():
    (idle,) = tuned(kernels=())
    assert (idle.gain_seconds, idle.at_most) == (pytest.approx(0.002), True)
    graphs = Candidate(rung="cuda-graphs", title="", plan=replace(plan_of(BEST), cuda_graphs=True))
    assert [(each.rung, each.at_most) for each in tuned((graphs,), kernels=())] == [("cuda-graphs", False)]
    assert not any(each.at_most for each in tuned(kernels=(), sync_idle_seconds=0.0015))  # known to be waits for it


def test_the_least_time_is_of_the_slower_of_arithmetic_and_bytes_kernel_by_kernel():
    rates: dict[str, Any] = {"matmul_tflops": {"fp32": 10.0, "tf32": 100.0}, "bandwidth": 1e12}
    product = Kernel(name="", group="", calls=1, seconds=0.5, flops=1e12, bytes=2e10, dtype="fp32")
    narrow = replace(product, bytes=3e11)
    plain = reach_of([product, narrow], **rates, tf32=False)
    assert plain is not None
    assert plain.least_seconds == pytest.approx(0.1 + 0.3)
    assert (plain.tflops, plain.by_bytes) == ((10.0,), True)
    tensor = reach_of([product, narrow], **rates, tf32=True)
    assert tensor is not None
    assert tensor.least_seconds == pytest.approx(0.02 + 0.3)  # 0.01 s of arithmetic behind 0.02 s of bytes
    assert tensor.tflops == ()
    quick = replace(product, seconds=0.05)  # beats the rate, and makes up for no other
    assert reach_of([product, quick], **rates, tf32=False).gain_seconds == pytest.approx(0.4)  # type: ignore[union-attr]
    assert reach_of([replace(product, bytes=None), replace(product, dtype="bf16")], **rates, tf32=False) is None
