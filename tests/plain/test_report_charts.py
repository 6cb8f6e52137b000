"""The SVG parses, its marks are the rows' figures, its texts do not meet and what comes from outside stays text."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from redline.report.charts import ladder_chart, loss_chart
from redline.report.svg import CHAR_PX, Scale, short_number

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
    groups = {group.get("data-rung"): group for group in marks(ladder_chart(rows, width_px), "rung")}
    measured = [row for row in rows if row["status"] == "ok"]
    bars = {row["rung"]: next(e for e in groups[row["rung"]] if e.get("class") == "bar") for row in measured}
    scale = {float(bars[row["rung"]].get("width", 0)) / row["tokens_per_second"] for row in measured}
    assert max(scale) == pytest.approx(min(scale), rel=1e-3)
    for row in measured:
        assert float(groups[row["rung"]].get("data-tokens-per-second", 0)) == row["tokens_per_second"]


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


def test_titles_hold_the_figures_and_the_whole_reason() -> None:
    groups = {group.get("data-rung"): group for group in marks(ladder_chart(full_document()["rows"]), "rung")}
    flash = groups["flash"].findtext(f"{SVG}title") or ""
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
    assert DOCUMENTS["LONG_REASON"] in (groups["cudnn-attention"].findtext(f"{SVG}title") or "")


def text_boxes(svg: str) -> list[tuple[str, float, float, float]]:
    """(text, left, right, middle) of every text, with the width that charts.py itself allows for."""
    boxes = []
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
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


def test_looks_tell_twelve_curves_apart() -> None:
    rows = [ok_row(f"rung-{index}", 10.0, 1.0, reference_curve=None) for index in range(12)]
    looks = {(m.get("class"), m.get("stroke-dasharray")) for m in marks(loss_chart(rows, None), "curve")}
    assert len(looks) == 12


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
