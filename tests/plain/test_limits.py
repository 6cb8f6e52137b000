"""What a page draws above the measured figures: computed from the recipe, in agreement with the record of an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.search.limits import anatomy_json, limits_json, roofline_json, with_limits
from redline.workloads import PRESETS

SHAPE = PRESETS["gpt2"].shape
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "temporary")


@pytest.fixture(scope="module")
def record(repository: Path) -> dict[str, Any]:
    """As it was measured, without what is computed here."""
    document = json.loads((repository / "records" / "2026-11-15-h200-ladder-gpt2-b16.json").read_text())
    computed = ("limits", "memory", "roofline")
    document["rows"] = [{name: row[name] for name in row if name not in computed} for row in document["rows"]]
    return {name: document[name] for name in document if name not in computed}


def test_the_sheets_limit_is_an_mfu_of_one(record: dict[str, Any]) -> None:
    sheet, best = with_limits(record)["limits"]
    assert (sheet["name"], sheet["tflops"]) == ("data-sheet peak", 989.4)
    for row in record["rows"]:
        assert row["tokens_per_second"] / sheet["tokens_per_second"] == pytest.approx(row["mfu"])
    assert best["tokens_per_second"] / sheet["tokens_per_second"] == pytest.approx(best["tflops"] / 989.4)
    assert "MAMF" in best["source"]


def test_the_parts_add_up_to_the_peak_that_was_predicted(record: dict[str, Any]) -> None:
    for row in with_limits(record)["rows"]:
        total = sum(row["memory"][part] for part in PARTS)
        assert total == pytest.approx(row["predicted_peak_bytes"], rel=0.02), row["rung"]
        assert total == pytest.approx(row["peak_bytes"], rel=0.02), row["rung"]


def test_nothing_that_was_measured_is_faster_than_light(record: dict[str, Any]) -> None:
    for row in with_limits(record)["rows"]:
        assert row["tokens_per_second"] < row["roofline"]["light"] < row["roofline"]["floor"], row["rung"]


def test_what_a_document_says_itself_stays(record: dict[str, Any]) -> None:
    said = {**record, "limits": [], "rows": [{**record["rows"][0], "memory": None}, *record["rows"][1:]]}
    filled = with_limits(said)
    assert filled["limits"] == []
    assert filled["rows"][0]["memory"] is None
    assert filled["rows"][1]["memory"] is not None
    assert {name: value for name, value in filled["rows"][2].items() if name in record["rows"][2]} == record["rows"][2]


def test_a_rung_that_was_skipped_predicts_nothing(record: dict[str, Any]) -> None:
    rows = [{**record["rows"][0], "status": "skipped", "recipe": []}]
    (row,) = with_limits({**record, "rows": rows})["rows"]
    assert (row["memory"], row["roofline"]) == (None, None)


def test_devices_that_nobody_knows_have_no_lines(h200: Hardware, cpu: Hardware) -> None:
    plan = Plan()
    unknown = replace(h200, name="NVIDIA Unheard-of")
    assert limits_json(SHAPE, unknown) == limits_json(SHAPE, cpu) == []
    assert roofline_json(SHAPE, plan, 16, unknown) is roofline_json(SHAPE, plan, 16, cpu) is None
    assert anatomy_json(SHAPE, plan, 16, cpu) is None
    assert anatomy_json(SHAPE, plan, 16, unknown) is not None, "memory needs no data sheet"


def test_a_card_without_bf16_has_the_limits_of_fp16(t4: Hardware) -> None:
    assert [(limit["name"], limit["dtype"]) for limit in limits_json(SHAPE, t4)] == [("data-sheet peak", "fp16")]


def test_a_model_that_is_no_decoder_of_ours_has_no_lines(h200: Hardware) -> None:
    traced = object()
    assert limits_json(traced, h200) == []
    assert roofline_json(traced, Plan(), 16, h200) is anatomy_json(traced, Plan(), 16, h200) is None
