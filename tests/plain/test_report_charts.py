"""The SVG parses, its marks are the rows' figures, its texts do not meet and what comes from outside stays text."""

from __future__ import annotations

import random
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from redline.report.bars import Bar, Gain, Pair, gain_chart, pair_chart, stacked_chart
from redline.report.charts import ladder_chart, loss_chart
from redline.report.groups import groups_chart, groups_table
from redline.report.points import Point, front_of, points_chart
from redline.report.steps import limits_text, shows_limits, steps_chart, steps_key
from redline.report.svg import CHAR_PX, Scale, name_lines, short_number
from redline.rungs import LADDER

DOCUMENTS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_documents.py")))
full_document, ok_row = DOCUMENTS["full_document"], DOCUMENTS["ok_row"]
SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = (960, 760, 320)


def marks(svg: str, kind: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if kind in element.get("class", "").split()]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d", ""))]


def loss_points(chart: str, rung: str) -> list[tuple[float, float]]:
    plain = [mark for mark in marks(chart, "curve") if "gap" not in mark.get("class", "")]
    return points(next(mark for mark in plain if mark.get("data-rung") == rung))


@pytest.mark.parametrize("width_px", WIDTHS)
def test_bars_are_proportional_to_tokens_per_second(width_px: int) -> None:
    rows = full_document()["rows"]
    chart = ladder_chart(rows, width_px)
    groups = {group.get("data-rung"): group for group in marks(chart, "rung")}
    measured = [row for row in rows if row["status"] == "ok"]
    bars = {row["rung"]: next(e for e in groups[row["rung"]] if e.get("class") == "bar") for row in measured}
    scale = {float(bars[row["rung"]].get("width", 0)) / row["tokens_per_second"] for row in measured}
    assert max(scale) == pytest.approx(min(scale), rel=1e-3)
    told = {mark.get("data-rung"): mark.get("data-tokens-per-second") for mark in marks(chart, "hot")}
    assert told == {row["rung"]: str(rate) if (rate := row["tokens_per_second"]) else None for row in rows}


def test_every_rung_has_its_marks() -> None:
    chart = ladder_chart(full_document()["rows"])
    counts = {kind: len(marks(chart, kind)) for kind in ("rung", "bar", "whisker", "absent", "dropped", "value")}
    assert counts == {"rung": 12, "bar": 10, "whisker": 10, "absent": 2, "dropped": 1, "value": 10}
    assert len(marks(chart, "gain")) == 8, "baseline has no gain, no-sync is inside the noise"


def test_gain_is_the_part_above_the_recipe_before() -> None:
    chart = ladder_chart([ok_row("baseline", 100.0, None), ok_row("tf32", 50.0, 2.0)])
    bar, gain = marks(chart, "bar")[1], marks(chart, "gain")[0]
    assert float(gain.get("width", 0)) == pytest.approx(float(bar.get("width", 0)) / 2, abs=0.02)


def test_whisker_spans_p90_to_p10() -> None:
    row = ok_row("tf32", 100.0, None, step_seconds={"median": 0.1, "p10": 0.08, "p90": 0.125, "n": 9})
    chart = ladder_chart([row])
    start = float(marks(chart, "bar")[0].get("x", 0))
    median = float(marks(chart, "bar")[0].get("width", 0))
    slow, _, fast = (float(x) for x in re.findall(r"M([\d.]+)", marks(chart, "whisker")[0].get("d", "")))
    assert (slow - start) / median == pytest.approx(0.8, abs=0.01)
    assert (fast - start) / median == pytest.approx(1.25, abs=0.01)


def tips(svg: str) -> dict[str, str]:
    """By rung, what its mark tells a screen reader; the box that a pointer sees must say the same."""
    told = {}
    for mark in marks(svg, "hot"):
        (box,) = [part for part in mark if part.get("class") == "tip"]
        shown = " ".join(line.text or "" for line in box.iter(f"{SVG}text"))
        label = mark.get("aria-label", "")
        assert label.replace("; ", " ") == shown.replace("; ", " ")
        assert mark.get("tabindex") == "0"
        told[mark.get("data-rung", "")] = label
    return told


def test_titles_hold_the_figures_and_the_whole_reason() -> None:
    told = tips(ladder_chart(full_document()["rows"]))
    flash = told["flash"]
    for part in (
        "597,956 tokens/s",
        "27.4 ms",
        "1.32x this step",
        "5.05x in total",
        "MFU 51.7 %",
        "24.2 GiB",
        "41.0 s",
    ):
        assert part in flash
    assert DOCUMENTS["LONG_REASON"] in told["cudnn-attention"]


def text_boxes(svg: str) -> list[tuple[str, float, float, float]]:
    """(text, left, right, middle) of every text, with the width that charts.py itself allows for."""
    boxes = []
    root = ElementTree.fromstring(svg)
    hidden = {text for tip in root.iter() if tip.get("class") == "tip" for text in tip.iter(f"{SVG}text")}
    for element in root.iter(f"{SVG}text"):
        if element in hidden:
            continue
        text, x, width = element.text or "", float(element.get("x", 0)), CHAR_PX * len(element.text or "")
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
        boxes.append((text, left, left + width, float(element.get("y", 0))))
    return boxes


@pytest.mark.parametrize("width_px", WIDTHS)
def test_no_two_texts_overlap_and_none_leaves_the_chart(width_px: int) -> None:
    rows = [{**row, "rung": f"{row['rung']:x<15}"} for row in full_document()["rows"]]
    for chart in (ladder_chart(rows, width_px), loss_chart(rows, full_document()["reference"], width_px)):
        boxes = text_boxes(chart)
        for index, (text, left, right, middle) in enumerate(boxes):
            assert left >= -1, text
            assert right <= width_px + CHAR_PX * 2, text  # a last tick is centred on the end of its axis
            for other, other_left, other_right, other_middle in boxes[index + 1 :]:
                apart = right <= other_left or other_right <= left or abs(middle - other_middle) >= 11
                assert apart, f"{text!r} meets {other!r}"


def test_loss_points_are_the_values_of_the_rows() -> None:
    document = full_document()
    chart = loss_chart(document["rows"], document["reference"])
    reference = points(marks(chart, "reference")[0])
    curve = loss_points(chart, "bf16")
    row = next(row for row in document["rows"] if row["rung"] == "bf16")
    assert len(curve) == len(reference) == 20
    base = document["reference"]["loss_curve"]
    px_per_loss = (reference[-1][1] - reference[0][1]) / (base[-1] - base[0])
    for (x, y), (base_x, base_y), loss, base_loss in zip(curve, reference, row["loss_curve"], base, strict=True):
        assert x == base_x
        assert y - base_y == pytest.approx((loss - base_loss) * px_per_loss, abs=0.02)


def test_loss_chart_has_a_curve_a_gap_and_a_legend_entry_per_rung() -> None:
    document = full_document()
    chart = loss_chart(document["rows"], document["reference"])
    curves = [mark for mark in marks(chart, "curve") if mark.get("data-rung")]
    assert len([mark for mark in curves if "gap" not in mark.get("class", "")]) == 10
    assert len([mark for mark in curves if "gap" in mark.get("class", "")]) == 10
    labels = {mark.text for mark in marks(chart, "legend")}
    assert {"fp32 reference", "ln V = 10.82", "baseline", "tied-weights"} <= labels
    assert len(labels) == 12


def gap_heights(chart: str) -> dict[str, list[float]]:
    """By rung, how far above the reference's line each point of the lower plot is."""
    zero = float(next(mark for mark in marks(chart, "reference") if mark.tag == f"{SVG}line").get("y1", 0))
    return {mark.get("data-rung", ""): [zero - y for _, y in points(mark)] for mark in marks(chart, "gap")}


def tied_rows() -> list[dict[str, Any]]:
    """Each lies 0.01 above the fp32 curve of its own maths; tying moves that curve down by half a nat."""
    plain, tied = [10.0, 9.0, 8.0], [9.5, 8.5, 7.5]
    maths = {"class": "changes-maths", "verdict": "changed", "detail": ""}

    def row(rung: str, own: list[float], recipe: list[str], **changes: Any) -> dict[str, Any]:
        curve = [loss + 0.01 for loss in own]
        return ok_row(rung, 1.0, 1.0, loss_curve=curve, reference_curve=own, recipe=recipe, **changes)

    return [
        row("baseline", plain, []),
        row("bf16", plain, ["bf16"]),
        row("tied-weights", tied, ["bf16", "tied-weights"], equivalence=maths),
        row("flash", tied, ["bf16", "tied-weights", "flash"]),
        row("a/a", tied, ["bf16", "tied-weights", "flash"]),
    ]


REFERENCE = {"ln_vocab": 10.0, "precision": "fp32", "loss_curve": [10.0, 9.0, 8.0]}


def without_reference_curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As documents were before 2026-11-16."""
    return [{name: value for name, value in row.items() if name != "reference_curve"} for row in rows]


def test_a_row_is_drawn_against_the_reference_of_its_own_maths() -> None:
    for reference in (REFERENCE, {}):  # the rows need no other
        heights = gap_heights(loss_chart(tied_rows(), reference))
        assert list(heights) == ["baseline", "bf16", "tied-weights", "flash", "a/a"]
        flat = [height for heights in heights.values() for height in heights]
        assert min(flat) == pytest.approx(max(flat), abs=0.02)
        assert min(flat) > 40, "0.01 nats are all there is to show, so they fill the plot"


def test_an_older_document_leaves_out_what_it_has_no_reference_for() -> None:
    heights = gap_heights(loss_chart(without_reference_curves(tied_rows()), REFERENCE))
    assert list(heights) == ["baseline", "bf16"]
    flat = [height for heights in heights.values() for height in heights]
    assert min(flat) == pytest.approx(max(flat), abs=0.02)


def test_an_older_climb_from_a_recipe_that_changes_the_maths_has_no_lower_plot() -> None:
    """Its first row is the whole recipe: nothing says which of its rungs tied the weights."""
    first, *others = tied_rows()[2:]
    rows = without_reference_curves([{**first, "rung": "recipe"}, *others])
    chart = loss_chart(rows, REFERENCE)
    assert gap_heights(loss_chart(tied_rows(), REFERENCE)).keys() >= {"flash", "a/a"}
    assert marks(chart, "gap") == []
    assert len(marks(chart, "curve")) == 2 * len(rows), "the losses themselves and their legend are there"


def test_an_older_a_a_row_of_the_tied_recipe_says_nothing_about_the_rungs_below() -> None:
    rows = tied_rows()[:3]
    rows.append({**rows[2], "rung": "a/a"})  # it has the class of the row it repeats
    assert list(gap_heights(loss_chart(without_reference_curves(rows), REFERENCE))) == ["baseline", "bf16"]


def test_a_reference_that_failed_leaves_its_rows_out_of_the_lower_plot() -> None:
    rows = tied_rows()
    rows[3]["reference_curve"] = None
    assert "flash" not in gap_heights(loss_chart(rows, REFERENCE))
    assert len(loss_points(loss_chart(rows, REFERENCE), "flash")) == 3


def test_looks_tell_the_curves_of_a_plain_ladder_apart() -> None:
    names = [rung.name for rung in LADDER if not rung.when_named]
    rows = [ok_row(name, 10.0, 1.0, reference_curve=None) for name in names]
    looks = {(m.get("class"), m.get("stroke-dasharray")) for m in marks(loss_chart(rows, None), "curve")}
    assert len(looks) == len(names)


def test_a_curve_that_blows_up_does_not_flatten_the_others_or_break_the_file() -> None:
    document = full_document()
    wild = ok_row("wild", 10.0, 1.0, loss_curve=[10.9, 1e30, float("inf"), float("nan"), None, 12.0])
    chart = loss_chart([*document["rows"], wild], document["reference"])
    numbers = [value for mark in ElementTree.fromstring(chart).iter() for key, value in mark.items() if key != "class"]
    assert not [value for value in numbers if re.search(r"\b[MLxy]?(nan|inf)\b", value)]
    assert len(loss_points(chart, "wild")) == 3
    ys = [y for _, y in loss_points(chart, "bf16")]
    assert max(ys) - min(ys) > 80


@pytest.mark.parametrize(
    "reference", [None, {}, {"ln_vocab": None, "loss_curve": None}, {"ln_vocab": 5.5, "loss_curve": []}]
)
def test_loss_chart_without_a_reference(reference: dict[str, Any] | None) -> None:
    rows = without_reference_curves(full_document()["rows"])
    assert len(marks(loss_chart(rows, reference), "reference")) == 0
    assert "no loss curve was recorded" in loss_chart([], reference)


def test_one_point_and_one_value_are_drawn() -> None:
    rows = [ok_row("baseline", 1.0, None, loss_curve=[5.0])]
    ElementTree.fromstring(loss_chart(rows, {"ln_vocab": 5.0, "loss_curve": [5.0]}))
    ElementTree.fromstring(ladder_chart([ok_row("baseline", 1.0, None, tokens_per_second=0.0)]))


def test_charts_escape_text_from_outside() -> None:
    document = DOCUMENTS["hostile_document"]()
    document["rows"][1]["rung"] = '"><script>x'
    for chart in (ladder_chart(document["rows"]), loss_chart(document["rows"], document["reference"])):
        tags = {element.tag for element in ElementTree.fromstring(chart).iter()}
        assert tags <= {SVG + name for name in ("svg", "style", "g", "title", "rect", "path", "line", "text")}
        assert "<script" not in chart


def test_ticks_are_round_and_inside() -> None:
    assert Scale(low=0, high=650_000, start_px=0, end_px=500).ticks(70) == [0, 1e5, 2e5, 3e5, 4e5, 5e5, 6e5]
    assert [short_number(value) for value in (0, 500, 1500, 2e5, 1.5e6)] == ["0", "500", "1.5k", "200k", "1.5M"]


# --- the staircase ----------------------------------------------------------------------------------------------------


def climbed(**changes: Any) -> dict[str, Any]:
    """Every kind of row, with the limits of an H200 and a second view of two rungs."""
    document = full_document()
    for row in document["rows"]:
        if row["status"] == "ok":
            row["roofline"] = {"light": 2.5 * row["tokens_per_second"], "expected": None, "floor": None}
    for row, size in ((document["rows"][3], 64), (document["rows"][10], 48)):
        rate = 1.25 * row["tokens_per_second"]
        row["rebatched"] = {"micro_batch": size, "tokens_per_second": rate, "speedup_fixed": 1.25, "status": "ok"}
    peak = document["rows"][0]["tokens_per_second"] / document["rows"][0]["mfu"]
    sheet = {"name": "data-sheet peak", "tflops": 989.4, "tokens_per_second": peak}
    best = {"name": "best measured matmul", "tflops": 795.0, "tokens_per_second": 795.0 / 989.4 * peak}
    return {**document, "limits": [best, sheet], **changes}


def rungs_of(chart: str) -> list[ElementTree.Element]:
    return marks(chart, "rung")


def rects(group: ElementTree.Element, kind: str) -> list[dict[str, float]]:
    """Boxes of one kind inside a group, as numbers."""
    found = [part for part in group if kind in part.get("class", "").split() and part.tag == f"{SVG}rect"]
    return [{name: float(part.get(name, 0)) for name in ("x", "y", "width", "height")} for part in found]


def test_a_step_is_as_high_as_its_rate() -> None:
    document = climbed()
    rows, groups = document["rows"], rungs_of(steps_chart(document, 960))
    assert len(groups) == len(rows)
    scales = []
    for row, group in zip(rows, groups, strict=True):
        if row["status"] == "ok":
            blocks = rects(group, "bar") + rects(group, "gain")
            scales.append(sum(block["height"] for block in blocks) / row["tokens_per_second"])
            assert {block["x"] for block in blocks} == {blocks[0]["x"]}
        else:
            assert rects(group, "bar") == []
            assert len(rects(group, "absent")) == 1
    assert max(scales) == pytest.approx(min(scales), rel=2e-3)


def test_the_cap_of_a_step_is_what_the_rung_added() -> None:
    document = climbed()
    groups = dict(zip([row["rung"] for row in document["rows"]], rungs_of(steps_chart(document, 960)), strict=True))
    (bar,), (gain,) = rects(groups["tf32"], "bar"), rects(groups["tf32"], "gain")
    assert (bar["height"] + gain["height"]) / bar["height"] == pytest.approx(1.916, rel=5e-3)
    assert gain["y"] + gain["height"] == pytest.approx(bar["y"], abs=0.02)
    assert rects(groups["no-sync"], "gain") == [], "inside the noise"
    assert rects(groups["baseline"], "gain") == []


def test_the_second_view_stands_beside_the_first() -> None:
    document = climbed()
    groups = dict(zip([row["rung"] for row in document["rows"]], rungs_of(steps_chart(document, 960)), strict=True))
    fixed = sum(block["height"] for kind in ("bar", "gain") for block in rects(groups["bf16"], kind))
    (own,) = rects(groups["bf16"], "own")
    assert own["height"] / fixed == pytest.approx(1.25, rel=5e-3)
    (bar,) = rects(groups["bf16"], "bar")
    assert own["x"] >= bar["x"] + bar["width"]
    assert sum(len(rects(group, "own")) for group in groups.values()) == 2
    told = {mark.get("data-rung"): mark for mark in marks(steps_chart(document, 960), "hot")}
    assert float(told["bf16"].get("data-own-tokens-per-second", 0)) == 1.25 * document["rows"][3]["tokens_per_second"]
    assert "at its own micro batch 64: " in told["bf16"].get("aria-label", "")
    assert len(marks(ladder_chart(document["rows"], 320), "own")) == 2


def heights(path: str) -> list[float]:
    """The y of each flat piece of a line of steps."""
    found, level = [], 0.0
    for word, numbers in re.findall(r"([MVH])([-\d. ]+)", path):
        if word in "MV":
            level = float(numbers.split()[-1])
        else:
            found.append(level)
    return found


def test_the_stair_goes_on_from_what_was_kept() -> None:
    document = climbed()
    rows, chart = document["rows"], steps_chart(document, 960)
    (stair,) = marks(chart, "stair")
    levels = heights(stair.get("d", ""))
    assert len(levels) == len(rows)
    place = {row["rung"]: index for index, row in enumerate(rows)}
    assert levels[place["fp16"]] == levels[place["bf16"]], "fp16 was not kept"
    assert levels[place["cudnn-attention"]] == levels[place["flash"]], "it failed"
    assert levels[place["compile"]] < levels[place["bf16"]]


def test_the_limits_are_on_the_scale_of_the_steps() -> None:
    document = climbed()
    chart = steps_chart(document, 960)
    baseline = rects(rungs_of(chart)[0], "bar")[0]
    foot = baseline["y"] + baseline["height"]
    per_px = document["rows"][0]["tokens_per_second"] / baseline["height"]
    lines = [mark for mark in marks(chart, "limit") if mark.tag == f"{SVG}line"]
    drawn = [per_px * (foot - float(line.get("y1", 0))) for line in lines]
    assert drawn == pytest.approx([limit["tokens_per_second"] for limit in document["limits"]], rel=0.01)
    (light,) = marks(chart, "light")
    lights = [per_px * (foot - y) for y in heights(light.get("d", ""))]
    assert lights == pytest.approx(
        [2.5 * r["tokens_per_second"] for r in document["rows"] if r["status"] == "ok"], rel=0.03
    )
    percent = {mark.text: float(mark.get("y", 0)) for mark in marks(chart, "tick") if (mark.text or "").endswith("%")}
    assert foot - percent["100 %"] == pytest.approx(foot - float(lines[-1].get("y1", 0)), abs=0.1), "MFU 1 is the peak"


def test_limits_far_above_are_told_in_words_and_leave_the_steps_their_room() -> None:
    document = climbed()
    slow = [
        {**row, "tokens_per_second": (row["tokens_per_second"] or 0) / 50 or None, "rebatched": None}
        for row in document["rows"]
    ]
    chart = steps_chart({**document, "rows": slow}, 960)
    assert [mark.tag for mark in marks(chart, "limit")] == [f"{SVG}text"] * 2
    assert all((mark.text or "").startswith("above the chart: ") for mark in marks(chart, "limit"))
    assert marks(chart, "light") == [], "50 times 2.5"
    assert {kind for kind, _ in steps_key({**document, "rows": slow}, 960)} & {"light", "limit"} == set()
    assert not shows_limits({**document, "rows": slow}, 960), "the page must"
    assert shows_limits(document, 960)
    tallest = max(
        sum(block["height"] for block in rects(group, "bar") + rects(group, "gain")) for group in rungs_of(chart)
    )
    assert tallest > 200


def test_what_is_not_known_is_not_drawn() -> None:
    document = climbed(limits=[])
    for row in document["rows"]:
        row.update(roofline=None, mfu=None)
    chart = steps_chart(document, 960)
    assert marks(chart, "limit") == marks(chart, "light") == []
    assert "MFU" not in {mark.text for mark in marks(chart, "muted")}
    assert ("limit", "peaks of the device") not in steps_key(document, 960)
    assert ("limit", "peaks of the device") in steps_key(climbed(), 960)


def test_a_ladder_too_long_for_steps_is_drawn_as_bars() -> None:
    rows = [ok_row(f"rung-{index}", 10.0, 1.0) for index in range(40)]
    assert marks(steps_chart({"rows": rows}, 960), "stair") == []
    assert len(rungs_of(steps_chart({"rows": rows}, 960))) == 40


def test_a_legend_lists_what_its_chart_draws() -> None:
    """Bars have neither a stair nor limits: those are told in words there."""
    long = climbed(rows=[{**climbed()["rows"][1], "rung": f"rung-{index}"} for index in range(18)])
    for document, stairs in ((climbed(), 1), (long, 0)):
        chart, key = steps_chart(document, 960), {kind for kind, _ in steps_key(document, 960)}
        assert len(marks(chart, "stair")) == stairs
        drawn = {kind for kind in ("stair", "light", "limit") if marks(chart, kind)}
        assert key & {"stair", "light", "limit"} == drawn == ({"stair", "light", "limit"} if stairs else set())
    words = limits_text(long)
    rate = long["rows"][0]["tokens_per_second"]
    assert [f"{limit['tokens_per_second']:,.0f} tokens/s" in words for limit in long["limits"]] == [True, True]
    assert f"the recipe up to rung-0: {2.5 * rate:,.0f} tokens/s" in words
    assert limits_text({"rows": full_document()["rows"]}) == ""


def spans(path: ElementTree.Element) -> tuple[float, float]:
    """(low, high) of an upright whisker, in pixels from the top."""
    low, high = re.findall(r"M[-\d.]+ ([-\d.]+)h8", path.get("d", ""))
    return float(low), float(high)


def test_a_whisker_of_the_staircase_spans_p90_to_p10_of_both_views() -> None:
    """Each end is held against the height of the step, in tokens per second."""
    spread, own = {"median": 0.1, "p10": 0.08, "p90": 0.125, "n": 9}, {"median": 0.4, "p10": 0.25, "p90": 0.5, "n": 9}
    row = ok_row("tf32", 100.0, None, step_seconds=spread)
    row["rebatched"] = {"micro_batch": 64, "tokens_per_second": 2 * row["tokens_per_second"], "step_seconds": own}
    quiet = ok_row("bf16", 100.0, None)
    quiet["rebatched"] = {"micro_batch": 64, "tokens_per_second": quiet["tokens_per_second"]}
    groups = rungs_of(steps_chart({"rows": [row, quiet]}, 960))
    (bar,), (beside,) = rects(groups[0], "bar"), rects(groups[0], "own")
    foot = bar["y"] + bar["height"]
    right, left = [part for part in groups[0] if part.get("class") == "whisker"]
    slow, fast = ((foot - y) / bar["height"] for y in spans(left))
    assert (slow, fast) == pytest.approx((0.8, 1.25), abs=0.01)
    slow, fast = ((foot - y) / beside["height"] for y in spans(right))
    assert (slow, fast) == pytest.approx((0.8, 1.6), abs=0.01)
    assert len([part for part in groups[1] if part.get("class") == "whisker"]) == 1, "its own noise is not known"
    bars = rungs_of(ladder_chart([row, quiet], 320))
    assert [len([part for part in group if part.get("class") == "whisker"]) for group in bars] == [2, 1]


@pytest.mark.parametrize("width_px", [960, 320])
def test_each_of_a_pair_has_its_own_figure(width_px: int) -> None:
    document = climbed()
    chart = steps_chart(document, 960) if width_px == 960 else ladder_chart(document["rows"], 320)
    for row, group in zip(document["rows"], rungs_of(chart), strict=True):
        if row["status"] == "ok":
            rate, own = row["tokens_per_second"], (row.get("rebatched") or {}).get("tokens_per_second")
            texts = [part.text for part in group if "value" in part.get("class", "").split()]
            figures = [text.rstrip(" !").replace(",", "") for text in texts if text]
            shown = [1e3 * float(text[:-1]) if text.endswith("k") else float(text) for text in figures]
            assert shown == pytest.approx([rate] if own is None else [rate, own], rel=5e-3)
            looks = ["own-figure" in part.get("class", "") for part in group if "value" in part.get("class", "")]
            assert looks == ([False] if own is None else [False, True])


def test_no_figure_is_struck_through_by_the_dotted_line() -> None:
    """The speed of light is laid through the place of every label in turn."""
    for factor in (1.0, 1.02, 1.05, 1.08, 1.12):
        document = climbed()
        for row in document["rows"]:
            if row["status"] == "ok":
                row["roofline"] = {"light": factor * row["tokens_per_second"]}
        chart = steps_chart(document, 960)
        (light,) = marks(chart, "light")
        lines = dict(
            zip([r["rung"] for r in document["rows"] if r["status"] == "ok"], heights(light.get("d", "")), strict=True)
        )
        for row, group in zip(document["rows"], rungs_of(chart), strict=True):
            for part in group:
                if "value" in part.get("class", "").split():
                    assert abs(float(part.get("y", 0)) - lines[row["rung"]]) > 6, (factor, row["rung"], part.text)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("tf32", ["tf32"]),
        ("cudnn-attention", ["cudnn-", "attention"]),
        ("selective-checkpointing", ["selective-", "checkpoin…"]),
        ("unbreakably-long", ["unbreakab…"]),
    ],
)
def test_names_under_the_steps(name: str, lines: list[str]) -> None:
    assert name_lines(name, 10) == lines


def test_texts_of_the_staircase_do_not_meet() -> None:
    boxes = text_boxes(steps_chart(climbed(), 960))
    for index, (text, left, right, middle) in enumerate(boxes):
        assert left >= -1, text
        assert right <= 960 + CHAR_PX, text
        for other, other_left, other_right, other_middle in boxes[index + 1 :]:
            # names are set at 11 px: nine tenths of what is allowed for
            apart = right - 0.1 * (right - left) <= other_left or other_right <= left + 0.1 * (right - left)
            assert apart or abs(middle - other_middle) >= 9, f"{text!r} meets {other!r}"


# --- boxes of figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width_px", WIDTHS)
def test_a_box_of_figures_stays_inside_the_width(width_px: int) -> None:
    """Or a phone would scroll sideways when it is shown."""
    document = climbed()
    points_of = [Point(number=n, memory=1e9 + n * 1e8, rate=1e5 - n, kind="sound", tip="x" * 80) for n in range(9)]
    charts = [ladder_chart(document["rows"], width_px), loss_chart(document["rows"], document["reference"], width_px)]
    charts += [steps_chart(document, width_px), points_chart(points_of, width_px=width_px)]
    for chart in charts:
        boxes = [tip[0] for tip in marks(chart, "tip")]
        assert boxes
        for box in boxes:
            left, width = float(box.get("x", 0)), float(box.get("width", 0))
            assert left >= 0
            assert left + width <= width_px


# --- bars of parts, gains, points -------------------------------------------------------------------------------------


def test_parts_add_up_and_the_marker_stands_where_it_was_measured() -> None:
    bars = (
        Bar(name="a", parts=(("weights", 2e9), ("logits", 6e9)), tip="a", marker=6e9),
        Bar(name="b", parts=(("weights", 0.0), ("logits", 4e9)), tip="b"),
    )
    chart = stacked_chart(
        bars, names=("weights", "logits"), title="t", axis="GB", width_px=760, show=str, unit=1e9, marker="measured"
    )
    parts = [mark for mark in marks(chart, "part") if float(mark.get("height", 0)) == 16]
    widths = [float(part.get("width", 0)) + 0.6 for part in parts]  # less the gap between neighbours
    assert len(parts) == 3, "what is zero is not drawn"
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert parts[1].get("class") == parts[2].get("class") != parts[0].get("class"), "a name keeps its colour"
    start = float(parts[0].get("x", 0))
    assert float(parts[1].get("x", 0)) == pytest.approx(start + widths[0], abs=0.1), "one after the other"
    assert float(parts[2].get("x", 0)) == start
    marker = marks(chart, "measured")[-1]  # the one before it is the legend's
    assert float(marker.get("x1", 0)) - start == pytest.approx(3 * widths[0], rel=0.01)
    assert {mark.text for mark in marks(chart, "legend")} == {"weights", "logits", "measured"}


def px_per_unit(chart: str, strip: str = "") -> float:
    """Of a chart of bars, from the places of its own ticks."""
    ticks = {float((mark.text or "").strip(strip)): float(mark.get("x", 0)) for mark in marks(chart, "tick")}
    low, high = min(ticks), max(ticks)
    return (ticks[high] - ticks[low]) / (high - low)


@pytest.mark.parametrize("width_px", [960, 320])
def test_the_time_of_a_group_is_as_long_as_it_took(width_px: int) -> None:
    """Lengths are held against the axis, in milliseconds."""
    spent = {"tf32": {"tensor contraction": 0.030, "attention": 0.008, "idle": 0.002, "data wait": 0.001}}
    spent["bf16"] = {"tensor contraction": 0.012, "idle": 0.005}
    rows = [ok_row(name, 10.0, None, kernels={"groups": groups}) for name, groups in spent.items()]
    chart = groups_chart([*rows, ok_row("nobody-looked", 10.0, None)], width_px)
    drawn = [mark for mark in marks(chart, "part") if float(mark.get("height", 0)) == 16]
    wanted = [1e3 * seconds for groups in spent.values() for seconds in groups.values()]
    scale = px_per_unit(chart)
    assert [(float(mark.get("width", 0)) + 0.6) / scale for mark in drawn] == pytest.approx(wanted, rel=0.05, abs=0.1)
    told = {mark.get("data-name"): float(mark.get("data-total", 0)) for mark in marks(chart, "hot")}
    assert told == pytest.approx({name: 1e3 * sum(groups.values()) for name, groups in spent.items()})
    assert [mark.text for mark in marks(chart, "value")] == ["41.0 ms", "17.0 ms"]
    looks = [mark.get("class") for mark in drawn[:4]]
    assert len(set(looks)) == 4, "idle and waiting for data are told apart"
    assert looks[2] == drawn[-1].get("class"), "a name keeps its look"
    cells = [row["cells"] for row in groups_table(rows)["rows"]]
    assert cells == [["tf32", "30.0", "8.00", "2.00", "1.00"], ["bf16", "12.0", "—", "5.00", "—"]]


@pytest.mark.parametrize("width_px", [960, 320])
def test_a_pair_is_drawn_before_and_after(width_px: int) -> None:
    pairs = (
        Pair(name="head", before=0.2, after=0.7, tip="head"),
        Pair(name="qkv", before=0.5, after=None, tip="qkv"),
        Pair(name="slower", before=0.6, after=0.4, tip="slower"),
    )
    chart = pair_chart(pairs, title="t", width_px=width_px)
    scale = 100 * px_per_unit(chart, " %")
    shares = {
        kind: [float(mark.get("width", 0)) / scale for mark in marks(chart, kind) if mark.tag == f"{SVG}rect"]
        for kind in ("bar", "gain")
    }
    assert shares["bar"] == pytest.approx([0.2, 0.5, 0.6], abs=0.01)
    assert shares["gain"] == pytest.approx([0.7, 0.4], abs=0.01)
    (first, *_), (second, *_) = ([float(m.get("y", 0)) for m in marks(chart, kind)] for kind in ("bar", "gain"))
    assert first < second, "as it is stands above"
    assert [mark.text for mark in marks(chart, "value")] == ["70 %", "50 %", "40 %"]


def test_a_long_name_has_two_lines_on_a_phone_and_is_whole() -> None:
    gain = Gain(name="cudnn-attention / flash", share=0.05, noise=None, tip="x")
    for chart in (
        gain_chart([gain], title="t", width_px=320),
        ladder_chart([ok_row("selective-recompute", 9, 1)], 320),
    ):
        texts = [mark for mark in marks(chart, "small") if mark.get("text-anchor") == "end"]
        assert len(texts) == 2
        assert not [mark.text for mark in texts if "…" in (mark.text or "")]
        assert float(texts[1].get("y", 0)) - float(texts[0].get("y", 0)) >= 11


def test_gains_left_and_right_of_nothing() -> None:
    gains = (
        Gain(name="up", share=0.5, noise=0.02, tip="up"),
        Gain(name="down", share=-0.25, noise=0.02, tip="down"),
        Gain(name="unsure", share=0.01, noise=0.02, tip="unsure"),
    )
    chart = gain_chart(gains, title="t", width_px=760)
    (up,), (down,), (unsure,) = marks(chart, "gain"), marks(chart, "loss"), marks(chart, "bar")
    zero = float(marks(chart, "start")[0].get("x1", 0))
    assert float(up.get("x", 0)) == pytest.approx(zero, abs=0.1)
    assert float(down.get("x", 0)) + float(down.get("width", 0)) == pytest.approx(zero, abs=0.1)
    assert float(up.get("width", 0)) == pytest.approx(2 * float(down.get("width", 0)), rel=0.01)
    assert float(unsure.get("x", 0)) == pytest.approx(zero, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_beats_the_front_and_the_front_beats_the_rest(seed: int) -> None:
    dice = random.Random(seed)
    kinds = ("sound", "sound", "sound", "lost", "bad")
    points = [
        Point(number=n, memory=dice.randint(1, 30), rate=dice.randint(1, 30), kind=dice.choice(kinds), tip="")
        for n in range(40)
    ]
    sound = [point for point in points if point.kind == "sound"]

    def beaten(point: Point) -> bool:
        return any(
            other.memory <= point.memory
            and other.rate >= point.rate
            and (other.memory, other.rate) != (point.memory, point.rate)
            for other in sound
        )

    front = front_of(points)
    assert {(one.memory, one.rate) for one in front} == {(one.memory, one.rate) for one in sound if not beaten(one)}
    assert [one.memory for one in front] == sorted(one.memory for one in front)


def test_memory_that_cannot_be_right_is_on_no_front() -> None:
    low = Point(number=1, memory=1.0, rate=50.0, kind="best", tip="", trusted=False)
    others = [Point(number=2, memory=20.0, rate=40.0, kind="sound", tip="")]
    others.append(Point(number=3, memory=30.0, rate=45.0, kind="sound", tip=""))
    assert [point.number for point in front_of([low, *others])] == [2, 3]
    assert [point.number for point in front_of([replace(low, trusted=True), *others])] == [1]
    chart = points_chart([low, *others], width_px=960)
    assert len(marks(chart, "doubtful")) == 1
    assert [mark.get("data-number") for mark in marks(chart, "hot") if mark.get("data-doubtful")] == ["1"]


@pytest.mark.parametrize("width_px", WIDTHS)
def test_the_speed_of_light_has_its_whole_figure_at_every_width(width_px: int) -> None:
    points = [Point(number=1, memory=1e9, rate=1e5, kind="sound", tip="")]
    chart = points_chart(points, width_px=width_px, light=911_634.0)
    (text,) = [mark.text for mark in marks(chart, "limit") if mark.tag == f"{SVG}text"]
    assert text is not None
    assert "light" in text
    assert text.endswith("911,634 tokens/s")


def test_points_are_where_their_figures_are() -> None:
    points = [
        Point(number=number, memory=memory * 1024**3, rate=rate, kind="sound", tip=f"#{number}")
        for number, (memory, rate) in enumerate([(10, 1e5), (20, 2e5), (40, 4e5)])
    ]
    chart = points_chart(points, width_px=960, light=5e5)
    circles = sorted(marks(chart, "point"), key=lambda mark: float(mark.get("cx", 0)))
    (x0, y0), (x1, y1), (x2, y2) = ((float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles)
    assert (x2 - x0) / (x1 - x0) == pytest.approx(3, rel=0.01)
    assert (y2 - y0) / (y1 - y0) == pytest.approx(3, rel=0.01)
    (light,) = [mark for mark in marks(chart, "limit") if mark.tag == f"{SVG}line"]
    assert (float(light.get("y1", 0)) - y0) / (y1 - y0) == pytest.approx(4, rel=0.01)
    assert len(marks(chart, "front")) == 1
    assert [mark.get("data-number") for mark in marks(chart, "hot")] == ["2", "1", "0"], "the fastest first"
    for grip, place in zip(marks(chart, "grip"), ((x2, y2), (x1, y1), (x0, y0)), strict=True):
        left, top, width = (float(grip.get(name, 0)) for name in ("x", "y", "width"))
        assert (left + width / 2, top + width / 2) == pytest.approx(place, abs=0.1)
