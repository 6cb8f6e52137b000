"""Two runs side by side: ratios and noise by hand, the gate and its exit codes, what is refused, and what is said.

The documents are ladders, tunes and training runs of machines that other tests made up, and the records of an H200.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import runpy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.cli import main
from redline.core.errors import UserError
from redline.core.layout import Layout
from redline.core.measurement import spread_of
from redline.core.values import to_json
from redline.predict.noise import noise_of_ratio, seen_noise, spread_error
from redline.report.compare import compare, kind_of
from redline.report.compare_page import render_comparison
from redline.report.compare_table import print_comparison, row_cells
from redline.search.document import ladder_document

HERE = Path(__file__)
CLIMBS, PAGES = (runpy.run_path(str(HERE.with_name(name))) for name in ("test_climb.py", "test_report_page.py"))
Outline, assert_loads_nothing = PAGES["Outline"], PAGES["assert_loads_nothing"]
RUN = {
    "versions": {"redline": "0.1.0", "torch": "2.13.0", "cuda": None},
    "command": "redline ladder tiny",
    "date": "2026-11-15T03:00:00+00:00",
    "settings": {"check_steps": 5, "repeats": 1, "start": {"rungs": [], "micro_batch": 4}},
}
SCRIPT = "<script>alert('x')</script>"
WRONG = tuple(loss + 1 for loss in CLIMBS["CURVE"])


def ladder(
    run: dict[str, Any] = RUN,
    micro_batch: int = 4,
    rungs: Any = ("bf16", "flash"),
    ranks: int = 1,
    layout: Layout | None = None,
    repeats: int = 1,
    **machine: Any,
) -> Any:
    """Each rung makes a step 0.9 times as long unless `factors` say otherwise; all its steps take the same."""
    hardware = replace(CLIMBS["H200"], ranks=ranks, layout=layout, count=8)
    start = ("ddp",) if ranks > 1 else ()
    choices = {"rungs": rungs, "micro_batch": micro_batch, "start": start, "repeats": repeats}
    climb = CLIMBS["climbed"](CLIMBS["Machine"](**machine), hardware, **choices)
    return json.loads(json.dumps(ladder_document(climb, run, True)))


def training(rates: list[float], ended: str | None = "steps") -> dict[str, Any]:
    made = runpy.run_path(str(HERE.with_name("test_training_page.py")))
    history = made["TrainingHistory"]()
    history("session", command="redline train", date="2026-11-15", hardware={"kind": "cuda", "name": "NVIDIA H200"})
    for number, rate in enumerate(rates, 1):
        history("cycle", **made["cycle"](number, 3.0, tokens_per_second=rate))
    if ended is not None:
        history("end", ended=ended, reason=None, checkpoint=None)
    order = {"workload": ladder()["workload"], "recipe": {"rungs": ["bf16"], "micro_batch": 4}, "settings": {}}
    return json.loads(json.dumps(history.document({**made["RUN"], "order": order})))


def row_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in document["rows"] if row["name"] == name)


def words_of(document: dict[str, Any], about: str) -> list[str]:
    return [note["text"] for note in document["words"] if note["about"] == about]


def with_spread(document: dict[str, Any], **spread: float) -> dict[str, Any]:
    """The same with other steps in every row."""
    rows = [{**row, "step_seconds": {**row["step_seconds"], **spread}} for row in document["rows"]]
    return {**document, "rows": rows}


# --- noise ------------------------------------------------------------------------------------------------------------


def test_the_error_of_a_median_by_hand() -> None:
    """p10 and p90 of a normal distribution lie 1.2816 deviations from its middle; a median scatters by 1.2533 times
    what a mean does: 0.01 / 2.5631 * 1.2533 / 5, over 0.1."""
    assert spread_error({"median": 0.1, "p10": 0.095, "p90": 0.105, "n": 25}) == pytest.approx(0.009780, rel=1e-3)


def test_the_error_of_a_median_is_how_medians_scatter() -> None:
    dice = random.Random(3)
    runs = [[dice.gauss(1.0, 0.03) for _ in range(41)] for _ in range(600)]
    scatter = statistics.stdev(statistics.median(run) for run in runs)
    told = statistics.mean(spread_error(to_json(spread_of(run))) or 0.0 for run in runs)
    assert told == pytest.approx(scatter, rel=0.12)


@pytest.mark.parametrize("lost", ["median", "p10", "p90", "n"])
def test_without_a_spread_the_error_is_not_known(lost: str) -> None:
    spread = {"median": 0.1, "p10": 0.1, "p90": 0.1, "n": 8, lost: None}
    assert spread_error(spread) is None
    assert spread_error(None) is None


def test_noise_is_two_errors_and_at_least_what_was_seen_between_runs() -> None:
    assert noise_of_ratio(0.03, 0.04, device="cuda", repeats=1) == pytest.approx(0.10)
    assert noise_of_ratio(0.0, 0.0, device="cuda", repeats=1) == 0.02
    assert noise_of_ratio(0.0, 0.0, device="cuda", repeats=4) == 0.005
    assert noise_of_ratio(0.0, 0.0, device="cpu", repeats=1) == 0.10
    few = noise_of_ratio(0.03, 0.04, device="cuda", repeats=1, degrees_of_freedom=3)
    assert few == pytest.approx(3.18 * 0.05), "Student's t: errors that were computed from a few values are uncertain"


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_a_run_against_itself_is_the_same_everywhere() -> None:
    found = compare(ladder(), ladder())
    assert [row["ratio"] for row in found["rows"]] == [1.0, 1.0, 1.0]
    assert [row["significant"] for row in found["rows"]] == [False] * 3
    assert found["figure"]["ratio"] == 1.0
    assert words_of(found, "the same") == ["machine, versions, workload, settings, recipe"]
    assert "as fast (1.00x), inside the noise of 2.0 %" in words_of(found, "speed")[0]


def test_ratios_are_those_of_the_steps() -> None:
    """B's flash takes 0.45 instead of 0.9 of the step below it: twice as fast, and nothing else moved."""
    found = compare(ladder(), ladder(factors={"flash": 0.45}))
    ratios = {row["name"]: row["ratio"] for row in found["rows"]}
    assert ratios == {"baseline": 1.0, "bf16": 1.0, "flash": pytest.approx(2.0)}
    assert {row["name"] for row in found["rows"] if row["significant"]} == {"flash"}
    assert found["figure"]["of"] == "best"
    assert found["figure"]["ratio"] == pytest.approx(2.0)
    assert words_of(found, "faster") == ["beyond the noise: flash 2.00x"]
    assert words_of(found, "slower") == []
    back = compare(ladder(factors={"flash": 0.45}), ladder())
    assert back["figure"]["ratio"] == pytest.approx(0.5)
    assert words_of(back, "slower") == ["beyond the noise: flash 0.50x"]
    assert "B is 50.0 % slower (0.50x), more than the noise of 2.0 %" in words_of(back, "speed")[0]


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        ({}, 0.02),
        ({"noise": {"fraction": 0.07}}, 0.07),
        ({"settings": {"repeats": 4}, "noise": {"fraction": None}}, 0.02),
        ({"settings": {"repeats": 4}, "noise": {"fraction": 0.01}}, 0.02),
        ({"hardware": {"kind": "cpu", "name": "a CPU"}}, 0.10),
        ({"hardware": {"name": "nobody knows"}}, 0.10),
    ],
    ids=["one run", "learned", "repeats", "repeats, learned", "cpu", "unknown device"],
)
def test_noise_takes_what_the_documents_say(changes: dict[str, Any], noise: float) -> None:
    document = {**ladder(), **changes}
    assert compare(document, document)["figure"]["noise"] == pytest.approx(noise)


def test_of_two_machines_the_less_steady_counts() -> None:
    steady = {**ladder(), "noise": {"fraction": None}}
    assert compare(steady, {**steady, "hardware": {"kind": "cpu"}})["figure"]["noise"] == pytest.approx(0.10)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_repeats_of_one_session_do_not_make_another_session_a_difference(repeats: int) -> None:
    """B's clocks are 1.5 % slower, in all its repeats alike."""
    run = {**RUN, "settings": {**RUN["settings"], "repeats": repeats}}
    a, b = ladder(run, repeats=repeats), ladder(run, repeats=repeats, factors={"bf16": 0.9 * 1.015})
    found = compare(a, b)
    assert found["figure"]["ratio"] == pytest.approx(1 / 1.015)
    assert not any(row["significant"] for row in found["rows"])


def test_wide_steps_are_noise_by_hand() -> None:
    """Both errors are 0.00978: the square root of the sum of their squares is 0.01383, and t a little above 2."""
    document = ladder()
    wide = with_spread(document, median=0.1, p10=0.095, p90=0.105, n=25)
    faster = copy.deepcopy(wide)
    for row in faster["rows"]:
        row["tokens_per_second"] *= 1.025  # beyond the 2 % between runs, inside this
    found = compare(wide, faster)["figure"]
    assert found["noise"] == pytest.approx(seen_noise(0.00978, 0.00978, 48), rel=1e-3)
    assert found["noise"] == pytest.approx(2.02 * 0.01383, rel=0.02)
    assert found["significant"] is False
    assert compare(document, faster | {"rows": [*document["rows"][:-1], faster["rows"][-1]]})["figure"]["significant"]


def test_where_a_spread_is_missing_nobody_claims_a_difference() -> None:
    bare = ladder(factors={"flash": 0.2})
    for row in bare["rows"]:
        row["step_seconds"] = None
    found = compare(ladder(), bare)
    assert found["figure"]["ratio"] == pytest.approx(4.5)
    assert (found["figure"]["noise"], found["figure"]["significant"]) == (None, None)
    assert "the noise is not known" in words_of(found, "speed")[0]
    assert words_of(found, "faster") == []


def test_a_rung_of_both_is_compared_by_name() -> None:
    found = compare(ladder(), ladder(factors={"bf16": 1.8, "flash": 0.45}), rung="bf16")
    assert found["figure"]["of"] == "bf16"
    assert found["figure"]["ratio"] == pytest.approx(0.5)


def test_rungs_of_one_side_alone_and_other_recipes_are_said() -> None:
    found = compare(ladder(), ladder(rungs=("tf32", "bf16")))
    assert words_of(found, "only in A") == ["flash"]
    assert words_of(found, "only in B") == ["tf32"]
    assert words_of(found, "recipes") == ["on another recipe or micro batch in B: bf16"]
    assert row_of(found, "flash")["b"] is None
    assert row_of(found, "flash")["ratio"] is None
    assert row_of(found, "baseline")["same_recipe"] is True
    assert found["recipe"] == {"only_a": ["flash"], "only_b": ["tf32"], "micro_batch": {"a": 4, "b": 4}}
    assert words_of(found, "recipe") == ["+ tf32; - flash"]


# --- what differs -----------------------------------------------------------------------------------------------------


def test_everything_that_is_not_the_same_is_said() -> None:
    other = ladder({**RUN, "versions": {**RUN["versions"], "torch": "2.14.0", "triton": "3.7"}}, micro_batch=8)
    other["hardware"] |= {"driver": "600.1", "features": ["tf32", "bf16"]}
    other["settings"] |= {"repeats": 3, "start": {"rungs": [], "micro_batch": 8}, "new_in_this_version": 1}
    other["workload"] |= {"corpus": "novels.txt"}
    found = compare(ladder(), other)
    assert words_of(found, "versions") == ["torch 2.13.0 -> 2.14.0; triton none -> 3.7"]
    assert words_of(found, "settings") == ["repeats 1 -> 3; start micro batch 4 -> 8"]
    assert words_of(found, "workload") == ["corpus sample -> novels.txt"]
    machine = words_of(found, "machine")[0]
    assert "driver none -> 600.1" in machine
    assert "features fp16, flash, cudnn-attention, compile, triton -> none" in machine
    assert words_of(found, "recipe") == ["micro batch 4 -> 8"]
    assert words_of(found, "the same") == []


def test_memory_and_verdicts_that_changed_are_said() -> None:
    other = ladder(curves={"flash": WRONG})
    other["rows"][1]["peak_bytes"] = 2 * 10**9
    found = compare(ladder(rungs=("bf16", "flash")), other, rung="bf16")
    assert words_of(found, "memory") == ["peak 954 MiB -> 1.86 GiB, 2.00x of A's"]
    loud = [note for note in found["words"] if note["about"] == "flash"]
    assert [note["kind"] for note in loud] == ["different"]
    assert loud[0]["text"].startswith("was rounding, is different: ")


def test_memory_that_cannot_be_right_is_marked_and_has_no_ratio(repository: Path) -> None:
    records = repository / "records"
    ladders = json.loads((records / "2026-11-15-h200-ladder-gpt2-b16.json").read_text())
    tunes = json.loads((records / "2026-11-15-h200-tune-gpt2.json").read_text())
    tunes["rows"][0]["peak_bytes"] = 1_501_100_544  # as long as the pool of a recorded graph was not counted
    found = compare(ladders, tunes)
    (memory,) = words_of(found, "memory")
    assert memory.endswith("-> 1.40 GiB; B's is far below its prediction: not to be trusted, and no ratio")
    itself = compare(tunes, tunes)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_comparison(itself, console)
    table = console.file.getvalue()
    assert table.count("1.40 GiB?") == 2, "of the one trial, on both sides"
    assert table.count("?") == 3, "and what it means"
    assert max(map(len, table.splitlines())) <= 100
    page = Outline(render_comparison(itself)).text
    assert page.count("1.40 GiB?") == 2
    assert "a peak far below its prediction: not to be trusted" in page
    assert "?" not in "".join(cell for row in compare(ladders, ladders)["rows"] for cell in row_cells(row))


def test_the_page_has_commands_to_copy() -> None:
    one, other = ladder(), ladder(run={**RUN, "command": "redline ladder tiny --repeats 2"})
    page = render_comparison(compare(one, other, sources=("runs/a b", "B"), rung="bf16", fail_below=0.5))
    shown = dict(re.findall(r'<code id="(command[^"]*)">([^<]*)</code>', page))
    assert shown == {
        "command": "redline report &#39;runs/a b&#39; B --rung bf16 --fail-below 0.5",
        "command-A": "redline ladder tiny",
        "command-B": "redline ladder tiny --repeats 2",
    }
    buttons = re.findall(r'data-copy="(command[^"]*)"', page)
    assert sorted(buttons) == sorted(shown)
    ids = {value for key, value in Outline(page).attributes if key == "id"}
    assert {value[1:] for key, value in Outline(page).attributes if key == "href" and value} <= ids


def test_the_number_of_ranks_and_their_layout_are_not_the_same_machine() -> None:
    """Older documents have no layout, and those of one process no number either."""
    found = compare(ladder(ranks=2), ladder(ranks=4))
    assert words_of(found, "machine") == ["ranks 2 -> 4"]
    assert "machine" not in words_of(found, "the same")[0]
    cut = Layout(ranks=4, tensor=2)
    assert words_of(compare(ladder(ranks=4), ladder(ranks=4, layout=cut)), "machine") == [
        "layout none -> 4 ranks: tensor 2 x data 2"
    ]
    for document in (ladder(), ladder(ranks=4, layout=cut)):
        assert "machine" in words_of(compare(document, document), "the same")[0]
    old = ladder()
    del old["hardware"]["ranks"], old["hardware"]["layout"]
    assert "machine" in words_of(compare(old, ladder(), fail_below=0.5), "the same")[0]


def test_an_unfinished_run_is_said_to_be_one() -> None:
    assert words_of(compare({**ladder(), "finished": False}, ladder()), "unfinished") == [
        "A did not come to its end: more may be missing"
    ]
    assert words_of(compare(ladder(), ladder()), "unfinished") == []


# --- other models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["sequence", "layers", "vocab", "gated"])
def test_tokens_of_another_model_are_no_ratio(size: str) -> None:
    other = ladder(factors={"flash": 0.2})
    other["workload"]["shape"][size] = 2 * other["workload"]["shape"][size] or True
    found = compare(ladder(), other)
    assert not found["comparable"]
    assert {found["figure"][name] for name in ("ratio", "noise", "significant", "passed")} == {None}
    assert all(row["ratio"] is None for row in found["rows"])
    assert found["figure"]["b"]["tokens_per_second"] is not None, "shown all the same"
    note = found["words"][0]
    assert (note["about"], note["kind"]) == ("NOT COMPARABLE", "different")
    assert size in note["text"]
    with pytest.raises(UserError) as refused:
        compare(ladder(), other, fail_below=0.5)
    assert size in refused.value.why


def test_sizes_that_are_said_or_left_to_the_default_are_the_same_model() -> None:
    """An older record has no kv_heads; a config states what a preset leaves out."""
    said, unsaid = ladder(), ladder()
    said["workload"]["shape"] |= {"kv_heads": 2, "max_positions": 16}
    for name in ("kv_heads", "max_positions", "gated", "norm", "window"):
        del unsaid["workload"]["shape"][name]
    assert compare(said, unsaid)["comparable"]


def test_a_model_that_is_not_known_is_not_compared() -> None:
    assert compare(ladder(), {**ladder(), "workload": None})["why_not"] == "the model of B is not known"


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "share", "passed"),
    [(0.9, 0.95, True), (0.9, 1.0, True), (1.0, 0.95, False), (1.0, 0.89, True), (0.6, 1.4, True), (0.9, 1.01, False)],
    ids=str,
)
def test_the_gate_is_a_share_of_the_speed(factor: float, share: float, passed: bool) -> None:
    """A's bf16 takes 0.9 of the baseline; B's takes `factor` of it, so its ratio is 0.9 / factor."""
    a, b = ladder(rungs=("bf16",)), ladder(rungs=("bf16",), factors={"bf16": factor})
    found = compare(a, b, rung="bf16", fail_below=share)["figure"]
    assert found["ratio"] == pytest.approx(0.9 / factor)
    assert found["passed"] is passed


def test_different_training_passes_no_gate_however_fast() -> None:
    wrong = ladder(factors={"flash": 0.2}, curves={"flash": WRONG})
    found = compare(ladder(), wrong, rung="flash", fail_below=0.5)
    assert found["figure"]["ratio"] > 4
    assert found["figure"]["passed"] is False
    assert "its speed does not count" in words_of(found, "gate")[0]
    with pytest.raises(UserError, match="A's flash cannot serve"):
        compare(wrong, ladder(), rung="flash", fail_below=0.5)


def no_best() -> dict[str, Any]:
    return ladder(failures=dict.fromkeys(("baseline", "bf16", "flash"), CLIMBS["OOM"]))


@pytest.mark.parametrize(
    ("a", "b", "rung", "problem", "why"),
    [
        (ladder, no_best, None, "B (B) has no best figure", "no row was measured and found right"),
        (no_best, ladder, None, "A (A) has no best figure", "no row was measured and found right"),
        (ladder, no_best, "bf16", "B (B) has no figure of bf16", "out of memory"),
        (ladder, lambda: ladder(rungs=("bf16",)), "flash", "unknown rung in B 'flash'", "no rung"),
        (ladder, lambda: training([1e5, 1e5]), "flash", "--rung flash: B is no ladder", "a training run has no row"),
        (ladder, lambda: training([]), None, "B (B) has no best figure", "no row was measured"),
    ],
    ids=["best of B", "best of A", "failed", "absent", "training", "empty training"],
)
def test_a_gate_without_its_figures_is_refused(a: Any, b: Any, rung: str | None, problem: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        compare(a(), b(), rung=rung, fail_below=0.95)
    assert refused.value.problem == problem
    assert why in refused.value.why


def test_a_gate_does_not_compare_totals_of_other_numbers_of_ranks() -> None:
    """Each of B's ranks is half as fast as A's, and the total the same."""
    two, four = ladder(ranks=2), ladder(ranks=4, factors={"ddp": 1.8})
    assert compare(two, four)["figure"]["ratio"] == pytest.approx(1.0)
    for rung in (None, "bf16"):
        with pytest.raises(UserError, match="cannot compare 2 ranks with 4") as refused:
            compare(two, four, rung=rung, fail_below=0.95)
    assert "tokens/s counts all ranks together" in refused.value.why
    assert compare(four, four, fail_below=0.95)["figure"]["passed"] is True
    trained = training([1e3, 1e3])
    with pytest.raises(UserError, match="cannot compare 2 ranks with 1"):
        compare(two, trained, fail_below=0.95)
    assert compare(two, {**trained, "layout": to_json(Layout(ranks=2))}, fail_below=0.95)["figure"]["passed"]


@pytest.mark.parametrize("unfinished", ["A", "B"])
def test_a_gate_does_not_take_the_best_so_far_for_the_best(unfinished: str) -> None:
    """A stopped after bf16; B lost what bf16 had brought, and passed because of flash."""
    runs = {"A": ladder(), "B": ladder()}
    runs[unfinished] = {**ladder(rungs=("bf16",)), "finished": False}
    with pytest.raises(UserError) as refused:
        compare(runs["A"], runs["B"], fail_below=0.95)
    assert refused.value.problem == f"{unfinished} ({unfinished}) did not come to its end"
    assert "need not be its best" in refused.value.why
    assert compare(runs["A"], runs["B"], rung="bf16", fail_below=0.95)["figure"]["passed"], "this row was measured"
    ladders, killed = ladder(), training([1e5, 1e5], ended=None)
    with pytest.raises(UserError, match="did not come to its end"):
        compare(ladders, killed, fail_below=0.95)


def test_without_a_gate_what_is_not_known_is_shown() -> None:
    found = compare(ladder(), no_best())
    assert found["figure"]["b"] is None
    assert found["figure"]["ratio"] is None
    assert "— tokens/s, no ratio" in words_of(found, "speed")[0]


@pytest.mark.parametrize("share", [0.0, -1.0, 95.0, math.nan, math.inf], ids=str)
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match="share of A's speed"):
        compare(ladder(), ladder(), fail_below=share)


# --- kinds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ladder-gpt2-b16", "ladder"),
        ("recipe-gpt2-b64", "ladder"),
        ("tune-gpt2", "tune"),
        ("train-gpt2", None),
        ("memory", None),
        ("hardware", None),
        ("lint", None),
        ("overhead-gpt2-b16", None),
    ],
)
def test_records_are_known_by_what_they_hold(repository: Path, name: str, kind: str | None) -> None:
    assert kind_of(json.loads((repository / f"records/2026-11-15-h200-{name}.json").read_text())) == kind


def test_two_tunes_are_compared_by_the_recipes_that_both_tried(repository: Path) -> None:
    a = json.loads((repository / "records/2026-11-15-h200-tune-gpt2.json").read_text())
    b = copy.deepcopy(a)
    b["rows"] = b["rows"][:-1]
    for row in b["rows"]:
        row["number"] += 10
        row["tokens_per_second"] *= 0.5
    b["best"]["number"] += 10
    found = compare(a, b, fail_below=0.4)
    pairs = {f"#{row['number']} / #{row['number'] + 10}": 0.5 for row in a["rows"][:-1]}
    assert {row["name"]: row["ratio"] for row in found["rows"]} == pytest.approx(pairs)
    assert found["figure"]["ratio"] == pytest.approx(0.5)
    assert found["figure"]["passed"] is True
    error = spread_error(a["rows"][0]["step_seconds"])
    assert error is not None
    assert error < 0.005
    assert found["figure"]["noise"] == 0.02, "its repeats do not show what differs between two sessions"


def test_a_training_run_against_the_ladder_that_found_its_recipe() -> None:
    one = ladder()
    rate = one["rows"][1]["tokens_per_second"]
    rates = [rate * factor for factor in (0.94, 0.97, 0.98, 0.98, 0.98, 0.99, 1.0)]
    found = compare(one, training(rates), fail_below=0.9)
    assert [row["name"] for row in found["rows"]] == ["bf16 / training"]
    row = found["rows"][0]
    assert row["ratio"] == pytest.approx(0.98)
    cycles = spread_error(to_json(spread_of(rates)))
    steps = one["rows"][1]["step_seconds"]["n"]
    assert row["noise"] == pytest.approx(max(seen_noise(cycles, 0.0, steps + len(rates) - 2), 0.02))
    assert "without evaluations and checkpoints" in words_of(found, "two kinds")[0]
    assert found["differences"]["settings"] is None, "those of two commands mean different things"
    assert words_of(compare(one, training(rates, ended=None)), "unfinished")


def test_a_document_of_something_else_is_refused() -> None:
    for document in ({}, {"rows": []}, {"rows": [1], "best": None, "reference": {}}, {"kind": "train"}):
        with pytest.raises(UserError, match="holds no results"):
            compare(document, ladder())


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(ladder()))
    b.write_text(json.dumps(ladder(factors={"flash": 0.99})))
    return a, b


def report(capsys: Any, *words: object) -> tuple[int, str, str]:
    code = main(["report", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_exit_codes(capsys: Any, files: tuple[Path, Path]) -> None:
    """B's flash is 0.9 / 0.99 = 0.909 of A's."""
    assert report(capsys, *files)[0] == 0
    assert report(capsys, *files, "--fail-below", "0.9")[0] == 0
    code, out, _ = report(capsys, *files, "--fail-below", "0.95")
    assert code == 1
    assert "FAILED: 0.909 of A's speed" in out
    assert report(capsys, *files, "--fail-below", "0.95", "--rung", "bf16")[0] == 0
    assert report(capsys, *files, "--fail-below", "0.95", "--rung", "flsh")[0] == 2
    assert report(capsys, files[0], files[0].parent, "--fail-below", "0.95")[0] == 2


def test_json_is_the_comparison_and_nothing_else(capsys: Any, files: tuple[Path, Path]) -> None:
    code, out, err = report(capsys, *files, "--json", "--fail-below", "0.95")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["kind"] == "comparison"
    assert found["figure"]["passed"] is False
    assert [found[side]["source"] for side in "ab"] == [str(path) for path in files]


def test_the_page_is_written_where_it_was_asked(capsys: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, err = report(capsys, *files, "--html", tmp_path / "compare.html")
    assert code == 0
    assert err == f"page {tmp_path / 'compare.html'}\n"
    assert "What changed" in (tmp_path / "compare.html").read_text()
    code, _, err = report(capsys, *files, "--html", tmp_path / "absent" / "compare.html")
    assert code == 2
    assert "is no folder" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--fail-below", "0.9"), "--fail-below with one run"),
        (("--rung", "bf16"), "--rung with one run"),
        (("--serve",), "--serve with a file"),
        (("--port", "80"), "--port without --serve"),
        (("--serve", "--json"), "--serve with --json"),
        (("b.json", "--serve"), "--serve with two runs"),
        (("absent.json",), "cannot read absent.json"),
        (("b.json", "--fail-below", "95"), "--fail-below is 95"),
    ],
    ids=str,
)
def test_mistakes(capsys: Any, files: Any, words: Any, problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = report(capsys, "a.json", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == f"problem: {problem}"


@pytest.mark.parametrize("text", ["", "[]", '{"half', "\x00"], ids=["empty", "list", "half", "binary"])
def test_a_file_that_holds_no_document(capsys: Any, files: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    code, _, err = report(capsys, files[0], tmp_path / "c.json")
    assert code == 2
    assert "c.json is no results document" in err


# --- shown ------------------------------------------------------------------------------------------------------------


def printed(document: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_comparison(document, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_terminal_is_never_too_narrow(width: int) -> None:
    a, b = ladder(), ladder(factors={"bf16": 0.95}, curves={"flash": WRONG})
    for document in (a, b):
        document["rows"][2]["rung"] = "selective-checkpointing"  # the longest there is
    text = printed(compare(a, b), width)
    assert max(map(len, text.splitlines())) <= width
    assert "selective-checkpointing" in text
    squeezed = "".join(text.split())
    assert "wasrounding,isdifferent" in squeezed
    table = text.split("\n\n")[1]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 100


def test_the_page_has_every_ratio_and_loads_nothing() -> None:
    found = compare(ladder(), ladder(factors={"flash": 0.45}), sources=("one", "two"))
    page = render_comparison(found)
    outline = Outline(page)
    assert_loads_nothing(outline)
    marks = re.findall(r'data-kind="gain" data-name="([^"]+)" data-gain="([^"]+)"', page)
    assert {name: float(gain) + 1 for name, gain in marks} == {row["name"]: row["ratio"] for row in found["rows"]}
    assert len(marks) == 2 * len(found["rows"]), "once in each width"
    for note in found["words"]:
        assert note["text"] in outline.text
    for part in ("A: one", "B: two", "2.000×", "more than the noise of 2.0 %"):
        assert part in outline.text


def test_the_page_of_other_models_is_loud_and_has_no_chart() -> None:
    other = ladder()
    other["workload"]["shape"]["sequence"] = 32
    page = render_comparison(compare(ladder(), other))
    assert re.search(r'role="alert">NOT COMPARABLE: another model', page)
    assert 'data-kind="gain"' not in page


def poisoned(value: Any, key: str = "") -> Any:
    """Every text an attack, but for the words that decide something."""
    kept = {"status", "kind", "verdict", "positions", "norm"}
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    return SCRIPT if isinstance(value, str) and key not in kept else value


def test_text_from_outside_stays_text() -> None:
    found = compare(poisoned(ladder()), ladder(), sources=(SCRIPT, "\x1b[31mred"))
    page = render_comparison({**found, "command": SCRIPT})
    assert_loads_nothing(Outline(page))
    assert Outline(page).text.count(SCRIPT) > 5
    assert "\x1b" not in printed(found, 100)
