"""The ladder's document: the keys of the contract in every row, nulls where nothing is known, and JSON throughout."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.measurement import Proof
from redline.predict.memory import predict_memory
from redline.report.table import notes_beside_rows, notes_of
from redline.rungs import plan_of
from redline.search.document import best_row, ladder_document, step_spread

made_up = runpy.run_path(str(Path(__file__).with_name("test_climb.py")))
Machine, climbed, climb_with, measurement = (
    made_up[name] for name in ("Machine", "climbed", "climb_with", "measurement")
)
ALL, CURVE, OOM, TIMEOUT, H200 = (made_up[name] for name in ("ALL", "CURVE", "OOM", "TIMEOUT", "H200"))
TIED_CURVE = made_up["TIED_CURVE"]

RUN = {
    "versions": {"redline": "0.1.0", "torch": "2.13.0", "cuda": None},
    "command": "redline ladder tiny",
    "date": "2026-11-15T03:00:00+00:00",
    "settings": {"check_steps": 5},
}
# DESIGN section 5, word by word
DOCUMENT_KEYS = {"workload", "hardware", "versions", "reference", "rows", "best"}
ROW_KEYS = {
    "rung",
    "status",
    "reason",
    "micro_batch",
    "step_seconds",
    "tokens_per_second",
    "unit",
    "speedup_total",
    "speedup_step",
    "mfu",
    "mfu_convention",
    "hfu",
    "peak_bytes",
    "predicted_peak_bytes",
    "compile_seconds",
    "compile_note",
    "loss_first",
    "loss_last",
    "equivalence",
    "kernels",
}
NUMBERS = ROW_KEYS - {"rung", "status", "reason", "micro_batch", "unit", "mfu_convention", "equivalence", "kernels"}
OUR_ROW_KEYS = {"title", "kept", "recipe", "within_noise", "outside_bytes", "loss_curve", "reference_curve"}
OUR_ROW_KEYS |= {"rebatched", "memory", "roofline", "sharing", "speedup_quick", "cores_missing"}
WRONG = tuple(loss + 1 for loss in CURVE)


def document_of(climb, finished=True):
    return ladder_document(climb, RUN, finished)


def document(machine=None, *args, **choices):
    return document_of(climbed(machine or Machine(), *args, **choices))


def row_of(shown, name):
    return next(row for row in shown["rows"] if row["rung"] == name)


def strictly_json(value):
    """As a strict reader sees it: NaN and Infinity are no JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


# the contract


def test_the_document_has_the_keys_of_the_contract():
    shown = document()
    assert shown.keys() >= DOCUMENT_KEYS
    assert shown["workload"]["name"] == "tiny"
    assert shown["hardware"]["name"] == "NVIDIA H200"
    assert shown["hardware"]["peak_tflops"]["bf16"] == 989.4
    assert {name: shown[name] for name in RUN} == RUN
    assert shown["reference"] == {"precision": "fp32", "ln_vocab": math.log(257), "loss_curve": list(CURVE)}
    assert shown["best"].keys() == {"rung", "micro_batch", "tokens_per_second"}
    assert [row["rung"] for row in shown["rows"]] == ["baseline", *ALL]


def every_kind_of_row(cpu):
    mixed = document(Machine(failures={"compile": TIMEOUT}, curves={"bf16": WRONG}), cpu, again=True, repeats=2)
    broken = document(Machine(failures={"baseline": OOM, "reference": OOM}))
    return [*mixed["rows"], *broken["rows"]]


def test_every_row_has_every_key_whatever_became_of_it(cpu):
    rows = every_kind_of_row(cpu)
    assert {row["status"] for row in rows} == {"ok", "skipped", "failed"}
    for row in rows:
        assert row.keys() == ROW_KEYS | OUR_ROW_KEYS
        assert row["equivalence"].keys() == {"class", "verdict", "detail"}
        assert row["equivalence"]["class"] in ("bit-exact", "rounding-only", "changes-maths")
        assert row["equivalence"]["verdict"] in ("same", "rounding", "changed", "different", "not-checked")
        assert "attention" in row["kernels"]
        assert isinstance(row["equivalence"]["detail"], str)


def test_a_row_that_did_not_run_knows_no_number_but_its_reason(cpu):
    for row in every_kind_of_row(cpu):
        if row["status"] == "ok":
            continue
        assert {row[name] for name in NUMBERS - {"predicted_peak_bytes"}} == {None}
        assert row["status"] == "failed" or row["predicted_peak_bytes"] is None
        assert row["reason"]
        assert row["equivalence"]["verdict"] == "not-checked"
        assert row["equivalence"]["detail"] == row["reason"]
        assert row["kernels"] == {"attention": None}
        assert row["micro_batch"] == 4


def test_a_measured_row_by_hand():
    """4 sequences of 16 tokens in 0.9 s."""
    row = row_of(document(rungs=("tf32",)), "tf32")
    assert row["step_seconds"] == pytest.approx({"median": 0.9, "p10": 0.9, "p90": 0.9, "n": 8, "mean": 0.9})
    assert row["tokens_per_second"] == pytest.approx(64 / 0.9)
    assert row["speedup_total"] == row["speedup_step"] == row["speedup_quick"] == pytest.approx(1 / 0.9)
    assert row["within_noise"] is False
    assert row["peak_bytes"] == 10**9
    assert row["loss_first"] == pytest.approx(5.6001)
    assert row["loss_last"] == pytest.approx(5.2001)
    assert 0 < row["hfu"] == row["mfu"] < 1e-6
    assert "bf16 dense peak" in row["mfu_convention"]
    assert row["recipe"] == ["tf32"]
    assert row["compile_seconds"] is row["outside_bytes"] is None


def test_a_gpu_row_carries_its_predicted_peak_and_a_cpu_row_does_not(cpu):
    row = row_of(document(rungs=("tf32",)), "tf32")
    assert (
        row["predicted_peak_bytes"] == predict_memory(made_up["TINY"].shape, plan_of(["tf32"]), micro_batch=4).allocated
    )
    assert row_of(document(None, cpu), "compile")["predicted_peak_bytes"] is None


def test_on_a_cpu_mfu_is_null_and_the_convention_says_why(cpu):
    row = row_of(document(None, cpu), "compile")
    assert row["status"] == "ok"
    assert row["mfu"] is row["hfu"] is None
    assert row["mfu_convention"] == "no MFU: a CPU is not in the table of device peaks"


def test_what_really_ran_is_passed_on():
    proof = Proof(attention="flash_fwd_kernel", matmul_dtypes=("bf16",), graph_breaks=0, syncs_per_step=0.1)

    class Proving(Machine):
        def answer(self, job):
            result = super().answer(job)
            return replace(result, proof=proof) if job.kind == "measure" else result

    kernels = document(Proving(), rungs=())["rows"][0]["kernels"]
    assert kernels["attention"] == "flash_fwd_kernel"
    assert (kernels["graph_breaks"], kernels["syncs_per_step"]) == (0, 0.1)
    assert kernels["matmul_dtypes"] == ["bf16"]


def test_an_interrupted_climb_is_a_document_too():
    climb = climb_with(Machine())
    assert strictly_json(document_of(climb, finished=False))["rows"] == []
    rows = climb.rows()
    next(rows)
    shown = strictly_json(document_of(climb, finished=False))
    assert [row["rung"] for row in shown["rows"]] == ["baseline"]
    assert shown["best"]["rung"] == "baseline"
    assert shown["finished"] is False


# strict JSON


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_null(loss):
    """A diverging fp16 row is ordinary. `NaN` in the output is not JSON: jq, browsers and most parsers refuse it."""
    shown = strictly_json(document(Machine(curves={"tf32": (*CURVE[:-1], loss)}), rungs=("tf32",)))
    row = row_of(shown, "tf32")
    assert row["loss_first"] == CURVE[0]
    assert row["loss_last"] is None
    assert row["loss_curve"] == [*CURVE[:-1], None]
    assert row["equivalence"]["verdict"] == "different"
    assert shown["best"]["rung"] == "baseline"


def test_a_reference_that_diverges_is_null_where_it_did():
    class Diverging(Machine):
        def answer(self, job):
            result = super().answer(job)
            return replace(result, loss_curve=(*CURVE[:-1], math.nan)) if job.kind == "reference" else result

    shown = strictly_json(document(Diverging(), rungs=()))
    assert shown["reference"]["loss_curve"] == [*CURVE[:-1], None]


@pytest.mark.parametrize(("again", "repeats"), [(False, 1), (True, 2)])
def test_every_measured_row_carries_the_reference_of_its_own_maths(again, repeats):
    shown = document(again=again, repeats=repeats)
    measured = [row for row in shown["rows"] if row["status"] == "ok"]
    assert {"tied-weights" in row["recipe"] for row in measured} == {True, False}
    for row in measured:
        own = TIED_CURVE if "tied-weights" in row["recipe"] else CURVE
        assert row["reference_curve"] == list(own), row["rung"]
    assert shown["reference"]["loss_curve"] == list(CURVE)


def test_a_row_that_has_no_reference_says_null(cpu):
    assert {row["reference_curve"] for row in document(Machine(failures={"reference": OOM}))["rows"]} == {None}
    by_status = {row["status"]: row for row in document(Machine(failures={"compile": TIMEOUT}), cpu)["rows"]}
    assert by_status["skipped"]["reference_curve"] is by_status["failed"]["reference_curve"] is None


FACTORS = st.dictionaries(st.sampled_from(ALL), st.floats(min_value=0.2, max_value=2.0))
FAILURES = st.dictionaries(
    st.sampled_from(["baseline", "reference", *ALL]), st.sampled_from([OOM, TIMEOUT]), max_size=4
)
CURVES = st.dictionaries(
    st.sampled_from(["baseline", *ALL]), st.tuples(*[st.floats(min_value=0, max_value=40)] * 5), max_size=3
)


@settings(deadline=None, max_examples=30)
@given(FACTORS, FAILURES, CURVES, st.integers(1, 3), st.booleans(), st.sampled_from(["faster", "all"]))
def test_any_climb_is_strict_json_and_equal_from_recorded_answers(factors, failures, curves, repeats, again, keep):
    choices = {"repeats": repeats, "again": again, "keep": keep}
    machine = Machine(factors=factors, failures=failures, curves=curves)
    first = strictly_json(document(machine, **choices))
    asked = len(machine.jobs)
    assert strictly_json(document(machine, **choices)) == first
    assert len(machine.jobs) == asked  # every answer was found
    for row in first["rows"]:
        assert row.keys() == ROW_KEYS | OUR_ROW_KEYS
        assert (row["step_seconds"] is None) == (row["tokens_per_second"] is None) == (row["status"] != "ok")
    trusted = [row for row in first["rows"] if row["status"] == "ok" and row["equivalence"]["verdict"] != "different"]
    if first["best"] is not None:
        assert first["best"]["rung"] in {row["rung"] for row in trusted} - {"a/a"}


# speed-ups


def test_speedups_are_against_the_first_row_and_the_row_below():
    shown = document(Machine(factors={"tf32": 0.5, "compile": 0.25}), rungs=("tf32", "compile"))
    assert [row["speedup_total"] for row in shown["rows"]] == pytest.approx([1.0, 2.0, 8.0])
    assert shown["rows"][0]["speedup_step"] is None
    assert [row["speedup_step"] for row in shown["rows"][1:]] == pytest.approx([2.0, 4.0])


def test_an_alternative_is_compared_with_the_base_both_were_put_onto():
    shown = document(Machine(factors={"bf16": 0.5, "fp16": 0.25}), rungs=("tf32", "bf16", "fp16"))
    assert row_of(shown, "fp16")["speedup_step"] == pytest.approx(4.0)


def test_a_baseline_that_failed_leaves_no_total():
    shown = document(Machine(failures={"baseline": OOM}), rungs=("tf32", "compile"))
    assert [row["speedup_total"] for row in shown["rows"]] == [None, None, None]
    assert [row["speedup_step"] for row in shown["rows"]] == [None, None, pytest.approx(1 / 0.9)]
    assert shown["rows"][1]["tokens_per_second"] == pytest.approx(64 / 0.9)
    assert shown["best"]["rung"] == "compile"


@pytest.mark.parametrize(
    ("factor", "inside"), [(1.0, True), (0.985, True), (1.015, True), (0.97, False), (1.03, False)]
)
def test_a_difference_inside_the_noise_is_marked(factor, inside):
    shown = document(Machine(factors={"compile": factor}), rungs=("compile",))
    assert row_of(shown, "compile")["within_noise"] is inside


# repeats and noise


def test_repeats_pool_their_steps_and_the_median_is_of_medians():
    odd = [measurement(1.0), measurement(1.0), measurement(9.0)]
    spread = step_spread(odd)
    assert (spread.median, spread.mean, spread.n) == (1.0, 1.0, 24)
    assert spread.p90 == 9.0


def test_the_median_of_a_row_is_what_its_rate_is_made_of():
    row = document(Machine(drift=0.1), rungs=("tf32",), repeats=3)["rows"][1]
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"]["median"])
    assert row["step_seconds"]["n"] == 24


@pytest.mark.parametrize(
    ("choices", "fraction", "source"),
    [
        ({"rungs": ()}, None, "nothing to compare"),
        ({"rungs": ("tf32",)}, 0.02, "one run each"),
        ({"rungs": ("tf32",), "repeats": 2}, 0.01, "repeats"),
        ({"rungs": ("tf32",), "again": True}, 0.02, "a/a: a recipe against itself differs by 0.0%"),
        ({"rungs": (), "again": True, "repeats": 2}, 0.01, "a/a: a recipe against itself"),
    ],
)
def test_where_the_noise_comes_from(choices, fraction, source):
    noise = document(**choices)["noise"]
    assert noise["fraction"] == fraction
    assert noise["source"].startswith(source)
    asks_for_more = "--repeats or --aa" in noise["source"]
    assert asks_for_more == (choices == {"rungs": ("tf32",)}), "what was done is not proposed"


class Unrepeatable(Machine):
    """Recipes that end in one of `broken` run once."""

    broken = ("tf32",)

    def answer(self, job):
        return OOM if job.repeat and job.recipe.rungs[-1:] in [(name,) for name in self.broken] else super().answer(job)


def test_rows_without_their_repeats_are_named_beside_those_that_have_them():
    source = document(Unrepeatable(), rungs=("tf32", "compile"), repeats=3)["noise"]["source"]
    assert source == "repeats, but one run of tf32: taken for at least 2%"
    many = Unrepeatable()
    many.broken = ALL
    source = document(many, repeats=3)["noise"]["source"]
    measured = [row for row in document()["rows"][1:] if row["status"] == "ok"]
    assert source.startswith(f"repeats, but one run of {len(measured)} rows: taken for at least 2%")


def test_a_run_that_was_cut_short_before_its_repeats_does_not_ask_for_them():
    climb = climb_with(Machine(), rungs=("tf32",), repeats=3)
    rows = climb.rows()
    next(rows), next(rows)
    assert document_of(climb, finished=False)["noise"]["source"] == "one run each: taken for at least 2%"


class Timed(Machine):
    """Steps as they are told: by the last rung of the recipe, factors of the machine's step time."""

    shapes: dict[str, tuple[float, ...]] = {}

    def answer(self, job):
        result = super().answer(job)
        shape = self.shapes.get(job.recipe.rungs[-1] if job.recipe.rungs else "baseline")
        if shape is None or job.kind != "measure":
            return result
        return replace(result, step_seconds=tuple(result.step_seconds[0] * factor for factor in shape))


def timed(shapes, **choices):
    machine = Timed(factors=choices.pop("factors", {}))
    machine.shapes = shapes
    return document(machine, **choices)


SLOWED = (1.0,) * 4 + (1.12,) * 6  # most steps of this process were slowed by something else


@pytest.mark.parametrize("slowed", ["baseline", "tf32"])
def test_what_only_the_medians_show_is_inside_the_noise(slowed):
    """A rung that does nothing, put onto a row that was disturbed, or disturbed itself."""
    row = row_of(timed({slowed: SLOWED}, rungs=("tf32",), factors={"tf32": 1.0}), "tf32")
    assert row["speedup_step"] == pytest.approx(1.12 if slowed == "baseline" else 1 / 1.12)
    assert row["speedup_quick"] == pytest.approx(1.0)
    assert row["within_noise"] is True


def test_what_only_quick_steps_show_or_what_they_show_the_other_way_is_inside_the_noise_too():
    lucky = (0.8, 0.8, *[1.0] * 8)
    row = row_of(timed({"tf32": lucky}, rungs=("tf32",), factors={"tf32": 1.0}), "tf32")
    assert row["speedup_quick"] > 1.02
    assert row["within_noise"] is True
    row = row_of(timed({"tf32": (0.8, 0.8, *[1.1] * 8)}, rungs=("tf32",), factors={"tf32": 1.0}), "tf32")
    assert row["speedup_step"] < 1 < row["speedup_quick"]
    assert row["within_noise"] is True


def test_a_gain_that_both_show_counts_though_its_size_is_in_doubt():
    row = row_of(timed({"baseline": SLOWED}, rungs=("tf32",), factors={"tf32": 0.9}), "tf32")
    assert row["within_noise"] is False
    assert row["speedup_step"] == pytest.approx(1.12 * row["speedup_quick"])
    (note,) = [note for note in notes_of(timed({"baseline": SLOWED}, rungs=("tf32",))) if note.about == "quick steps"]
    assert note.text.startswith("tf32 is 1.24x by the medians and 1.11x by quick steps")


def test_steps_that_stall_now_and_then_are_said_with_both_figures():
    """Every 11th step takes 8 times as long: p10, median and p90 do not move."""
    stalling = ((1.0,) * 10 + (8.0,)) * 6
    shown = timed({"loader-workers": stalling}, rungs=("tf32", "loader-workers"))
    spread = row_of(shown, "loader-workers")["step_seconds"]
    assert spread["p90"] == spread["median"]
    assert spread["mean"] == pytest.approx(spread["median"] * 18 / 11)
    (note,) = [note for note in notes_of(shown) if note.about == "stalls"]
    assert note.text.startswith("loader-workers takes 1,325 ms a step on average and 810 in the median")
    assert note in notes_beside_rows(shown), "the page has it too"
    old = json.loads(json.dumps(shown))
    for row in old["rows"]:
        del row["step_seconds"]["mean"], row["speedup_quick"]
    assert not [note for note in notes_of(old) if note.about in ("stalls", "quick steps")]


def test_even_steps_are_no_note():
    shown = timed({"tf32": (1.0, 1.02, 1.04, 1.0, 1.01)}, rungs=("tf32", "compile"))
    assert not [note for note in notes_of(shown) if note.about in ("stalls", "quick steps")]


def test_many_rows_that_stall_are_counted_and_the_worst_come_first():
    shapes = {name: (1.0,) * 19 + (3.0 + place,) for place, name in enumerate(ALL)}
    (note,) = [note for note in notes_of(timed(shapes)) if note.about == "stalls"]
    stalled = [row for row in timed(shapes)["rows"] if row["step_seconds"] and row["rung"] != "baseline"]
    assert f"; and {len(stalled) - 4} rows more: " in note.text
    assert note.text.startswith(f"{stalled[-1]['rung']} takes ")


def test_the_a_a_floor_marks_every_row_inside_it():
    """The recipe differs from itself by 12 %: a rung that brings 5 % has shown nothing."""
    shown = document(Machine(factors={"tf32": 0.95}, drift=0.09), rungs=("tf32",), again=True)
    assert shown["noise"]["fraction"] > 0.05
    assert all(row["within_noise"] for row in shown["rows"][1:])


def test_the_a_a_row_shows_the_floor():
    """Jobs: reference 1, baseline 2, a/a 3; 10 % slower each."""
    noise = document(Machine(drift=0.1), rungs=(), again=True)["noise"]
    assert noise["fraction"] == pytest.approx(1.3 / 1.2 - 1)
    assert "8.3%" in noise["source"]


def test_an_a_a_row_whose_base_failed_compares_nothing():
    """The baseline ran out of time, its second measurement did not."""

    class Flaky(Machine):
        def answer(self, job):
            return TIMEOUT if job.kind == "measure" and job.repeat == 0 else super().answer(job)

    shown = strictly_json(document(Flaky(), rungs=(), again=True))
    assert [row["status"] for row in shown["rows"]] == ["failed", "ok"]
    assert shown["noise"]["fraction"] is None


# the best row


def test_the_best_row_is_the_fastest_that_is_right():
    machine = Machine(factors={"tf32": 0.5, "compile": 0.01, "padded-vocab": 0.9}, curves={"compile": WRONG})
    shown = document(machine, rungs=("tf32", "compile", "padded-vocab", "fused-adamw"))
    assert row_of(shown, "compile")["equivalence"]["verdict"] == "different"
    assert shown["best"] == {
        "rung": "fused-adamw",
        "micro_batch": 4,
        "tokens_per_second": pytest.approx(64 / (0.5 * 0.9 * 0.9)),
    }


@pytest.mark.parametrize("what", [{"failures": {"baseline": OOM}}, {"curves": {"baseline": WRONG}}])
def test_without_a_right_row_there_is_no_best(what):
    shown = document(Machine(**what), rungs=())
    assert shown["best"] is None


def test_an_a_a_row_is_never_the_best():
    machine = Machine(drift=-0.05)  # each measurement is faster than the last
    climb = climbed(machine, rungs=(), again=True)
    assert climb.finished[1].seconds < climb.finished[0].seconds
    assert best_row(climb.finished).name == "baseline"


def test_a_stand_in_is_never_the_recipe_of_best_json():
    """fp16 is faster here, and still only stands in for bf16 where that does not apply."""
    shown = document(Machine(factors={"bf16": 0.9, "fp16": 0.1}), rungs=("bf16", "fp16"))
    assert shown["best"]["rung"] == "bf16"
