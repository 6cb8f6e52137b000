"""What a run came to, by its events: extremes survive thinning, repetitions replace, damaged lines are passed over."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.report.history import (
    CURVES,
    MOST_POINTS,
    MOST_SAMPLES,
    TrainingHistory,
    read_history,
    read_training,
    thin,
)

EACH = 256  # tokens of an update


def cycle(start: int, losses: list[float | None], **changes: Any) -> dict[str, Any]:
    """The event of a cycle of these losses after `start` updates, a tenth of a second each."""
    updates = start + len(losses)
    fields = {
        "updates": updates,
        "tokens": updates * EACH,
        "losses": losses,
        "gradient_norms": [1.0] * len(losses),
        "loss": losses[-1],
        "learning_rate": 1e-3,
        "seconds": 0.1 * len(losses),
        "total_seconds": 0.1 * updates,
        "tokens_per_second": EACH / 0.1,
        "data_wait": 0.25,
        "skipped": 0,
        "skipped_at": [],
        "peak_bytes": 1000 + updates,
        "documents": updates,
        "epoch": updates / 100,
        "epoch_seconds": 10.0,
        "mfu": None,
    }
    return {**fields, **changes}


def written(path: Path, *events: tuple[str, dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"kind": kind, "time": 0.0, **fields}) + "\n" for kind, fields in events))
    return path


points_lists = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400).map(
    lambda values: [(float(place), value) for place, value in enumerate(values)]
)


@given(points=points_lists, most=st.integers(4, 50))
def test_thinning_keeps_ends_extremes_and_order(points: list[tuple[float, float]], most: int) -> None:
    thinned = thin(points, most)
    assert len(thinned) <= most
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]
    assert set(thinned) <= set(points)
    assert thinned == sorted(thinned)
    values = [value for _, value in points]
    assert {min(values), max(values)} <= {value for _, value in thinned}
    if len(points) <= most:
        assert thinned == points


def test_thinned_points_are_spread_over_the_tokens() -> None:
    """Also when they have been thinned many times over: no stretch is left bare, the oldest least of all."""
    history = TrainingHistory()
    for start in range(0, 40_000, 10):
        history("cycle", **cycle(start, [math.sin(start + number) for number in range(10)]))
    places = [place for place, _ in history.document({})["curves"]["loss"]]
    assert len(places) <= MOST_POINTS
    gaps = [after - before for before, after in zip(places, places[1:], strict=False)]
    assert max(gaps) < 3 * 40_000 * EACH / (MOST_POINTS / 2)  # there are two points to a stretch


def test_a_spike_of_one_update_in_a_long_run_is_seen() -> None:
    history = TrainingHistory()
    for start in range(0, 30_000, 10):
        losses = [3.0 + 0.001 * (number % 7) for number in range(10)]
        if start == 12_340:
            losses[4] = 11.5
        history("cycle", **cycle(start, losses))
    curve = history.document({})["curves"]["loss"]
    assert (12_345 * EACH, 11.5) in curve
    assert len(curve) <= MOST_POINTS


def test_the_summary_adds_up() -> None:
    history = TrainingHistory()
    history("session", command="redline train", hardware={"name": "NVIDIA H200"}, mfu_convention="full")
    history("cycle", **cycle(0, [5.0, 4.0], tokens_per_second=100.0, mfu=0.1))
    history("cycle", **cycle(2, [3.5, 3.0], tokens_per_second=300.0, mfu=0.3, peak_bytes=5000))
    history("validation", updates=4, tokens=4 * EACH, loss=3.25, validation_tokens=512)
    history("cycle", **cycle(4, [None, 2.5], tokens_per_second=200.0, mfu=0.2, skipped=1, skipped_at=[5]))
    history("validation", updates=6, tokens=6 * EACH, loss=3.5, validation_tokens=1024)
    history("end", ended="steps", reason=None, checkpoint="checkpoints/step-00000006")
    found = history.summary()
    assert found["tokens"] == {"train": 6 * EACH, "validation": 1024, "total": 6 * EACH + 1024}
    assert found["tokens_per_second"] == statistics.median([100, 300, 200])
    assert (found["mfu"], found["data_wait"], found["peak_bytes"]) == (0.2, pytest.approx(0.25), 5000)
    assert (found["validation_loss"], found["best_validation_loss"]) == (3.5, 3.25)
    assert (found["ended"], found["updates"], found["skipped"]) == ("steps", 6, 1)
    document = history.document({"order": {"recipe": {"rungs": []}}, "date": "today"})
    assert [place for place, _ in document["curves"]["loss"]] == [EACH * update for update in (1, 2, 3, 4, 6)]
    assert document["skipped_at"] == [5 * EACH]
    assert document["hardware"] == {"name": "NVIDIA H200"}
    assert document["sessions"][0]["from_updates"] == 0
    assert set(document["curves"]) == set(CURVES)
    json.dumps(document, allow_nan=False)


def test_a_run_without_an_event_is_a_document_too() -> None:
    document = TrainingHistory().document({})
    assert document["updates"] == 0
    assert document["tokens_per_second"] is document["ended"] is document["loss"] is None


def test_a_run_that_was_killed_repeats_and_the_repetition_counts(tmp_path: Path) -> None:
    """Killed at update 13, resumed from the checkpoint at 10 with other cycles."""
    whole = TrainingHistory()
    for start in range(0, 20, 5):
        whole("cycle", **cycle(start, [float(start)] * 5))
        whole("validation", updates=start + 5, tokens=(start + 5) * EACH, loss=9.0, validation_tokens=start + 5)
    killed = written(
        tmp_path / "metrics.jsonl",
        ("session", {"command": "a"}),
        ("cycle", cycle(0, [0.0] * 5)),
        ("validation", {"updates": 5, "tokens": 5 * EACH, "loss": 9.0, "validation_tokens": 5}),
        ("cycle", cycle(5, [5.0] * 5)),
        ("validation", {"updates": 10, "tokens": 10 * EACH, "loss": 9.0, "validation_tokens": 10}),
        ("cycle", cycle(10, [99.0] * 3, skipped=3, skipped_at=[11, 12, 13])),
        ("sample", {"updates": 13, "text": "lost"}),
        ("session", {"command": "b"}),
        ("cycle", cycle(10, [10.0] * 5)),
        ("validation", {"updates": 15, "tokens": 15 * EACH, "loss": 9.0, "validation_tokens": 15}),
        ("cycle", cycle(15, [15.0] * 5)),
        ("validation", {"updates": 20, "tokens": 20 * EACH, "loss": 9.0, "validation_tokens": 20}),
    )
    found, wanted = read_history(killed).document({}), whole.document({})
    for name in ("curves", "tokens", "skipped_at", "samples", "tokens_per_second", "data_wait"):
        assert found[name] == wanted[name], name
    assert [session["from_updates"] for session in found["sessions"]] == [0, 10]


def test_the_speed_is_that_of_the_last_session_that_trained() -> None:
    """What it said itself: sessions may be on other machines, and the next has said nothing while it starts."""
    history = TrainingHistory()
    for start, rates in ((0, [10.0, 20.0, 30.0]), (2, [400.0, 600.0])):
        history("session", command="redline train")
        for number, rate in enumerate(rates, start):
            history("cycle", **cycle(number, [3.0], tokens_per_second=rate, mfu=rate / 1000))
    assert [history.summary()[name] for name in ("tokens_per_second", "mfu", "cycles")] == [500.0, 0.5, 2]
    history("session", command="redline train")
    assert history.summary()["tokens_per_second"] == 500.0
    history("cycle", **cycle(4, [3.0], tokens_per_second=7.0, mfu=None))
    assert [history.summary()[name] for name in ("tokens_per_second", "mfu", "cycles")] == [7.0, None, 1]


def test_an_evaluation_that_is_repeated_counts_once() -> None:
    history = TrainingHistory()
    history("cycle", **cycle(0, [5.0]))
    for loss in (3.0, 4.0):
        history("validation", updates=1, tokens=EACH, loss=loss, validation_tokens=8)
    document = history.document({})
    assert document["curves"]["validation_loss"] == [(EACH, 4.0)]
    assert document["best_validation_loss"] == 4.0


def test_damaged_lines_and_events_of_another_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"kind": "cycle", **cycle(0, [5.0])})
    old = {name: value for name, value in cycle(1, [4.0]).items() if name != "gradient_norms"}
    lines = [good, '{"kind": "cyc', "", "[]", "17", json.dumps({"kind": "cycle", **old}), '{"kind": "dance", "x": 1}']
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    found = read_history(path).document({})
    assert found["updates"] == 1
    assert found["curves"]["loss"] == [(EACH, 5.0)]
    assert read_history(tmp_path / "missing.jsonl").document({})["updates"] == 0


SESSION, CYCLES = ("session", {"command": "redline train"}), [("cycle", cycle(start, [5.0] * 5)) for start in (0, 5)]


def run_in(folder: Path, *events: tuple[str, dict[str, Any]], saved: tuple[str, ...] = (), **order: Any) -> Path:
    """A run directory with these checkpoints, by name."""
    for name in saved:
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"kind": "train", "order": order}))
    written(folder / "metrics.jsonl", *events)
    return folder


SAVED = ("step-00000005", "step-00000010", "step-00000010.2", "step-00000010.2.draft", "step-00000015.removing")


@pytest.mark.parametrize(
    "end",
    [
        [],
        [("end", {"ended": "failed", "reason": "a mistake", "checkpoint": None})],
        [("end", {"ended": "steps", "reason": None, "checkpoint": "elsewhere/checkpoints/step-00000010.2"})],
        [("end", {"ended": "interrupted", "checkpoint": "x"}), SESSION],
    ],
    ids=["killed", "failed", "moved", "resumed and killed"],
)
def test_the_checkpoint_is_the_newest_that_lies_there(tmp_path: Path, end: list[tuple[str, dict[str, Any]]]) -> None:
    run = run_in(tmp_path, SESSION, *CYCLES, ("checkpoint", {"updates": 10}), *end, saved=SAVED)
    assert read_training(run)["checkpoint"] == str(run / "checkpoints" / "step-00000010.2")


def test_a_checkpoint_that_was_passed_over_is_not_the_one_to_go_on_from(tmp_path: Path) -> None:
    """Step 10 was damaged: the second session went on from step 5 and has come to 8."""
    again = ("cycle", cycle(5, [4.0] * 3))
    run = run_in(tmp_path, SESSION, *CYCLES, SESSION, again, saved=("step-00000005", "step-00000010"))
    assert read_training(run)["checkpoint"] == str(run / "checkpoints" / "step-00000005")


def test_a_checkpoint_that_is_gone_or_cannot_be_read_is_none(tmp_path: Path) -> None:
    end = ("end", {"ended": "steps", "reason": None, "checkpoint": str(tmp_path / "checkpoints/step-00000010")})
    run = run_in(tmp_path, SESSION, *CYCLES, end)
    assert read_training(run)["checkpoint"] is None
    (run / "checkpoints").write_text("no folder")
    assert read_training(run)["checkpoint"] is None


def test_a_checkpoint_is_found_where_the_events_are_lost(tmp_path: Path) -> None:
    run = run_in(tmp_path, saved=("step-00000005",))
    assert read_training(run)["checkpoint"] == str(run / "checkpoints" / "step-00000005")


TENSOR, ALONE = ({"ranks": ranks, "tensor": ranks, "pipeline": 1, "replicas": 1} for ranks in (2, 1))


@pytest.mark.parametrize(
    ("sessions", "layout", "parallel"),
    [
        ([], TENSOR, None),
        ([{}], TENSOR, None),  # of a version that did not say it
        ([{"layout": TENSOR, "parallel": None}, {"layout": ALONE, "parallel": None}], ALONE, None),
        ([{"layout": ALONE, "parallel": None}, {"layout": TENSOR, "parallel": "fsdp"}], TENSOR, "fsdp"),
        ([{"layout": TENSOR, "parallel": "fsdp"}, {"layout": TENSOR, "parallel": None}], TENSOR, None),
    ],
    ids=["none", "old", "resumed alone", "resumed together", "no longer said"],
)
def test_the_layout_is_the_last_session_s(
    tmp_path: Path, sessions: list[dict[str, Any]], layout: dict[str, int], parallel: str | None
) -> None:
    run = run_in(tmp_path, *(("session", told) for told in sessions), layout=TENSOR, parallel=None)
    document = read_training(run)
    assert (document["layout"], document["parallel"]) == (layout, parallel)


@pytest.mark.parametrize(("shape", "unit"), [({"unit": "sample"}, "sample"), ({"layers": 2}, "token"), (None, "token")])
def test_the_unit_is_the_model_s(tmp_path: Path, shape: dict[str, Any] | None, unit: str) -> None:
    assert read_training(run_in(tmp_path, workload={"name": "mine", "shape": shape}))["unit"] == unit


def test_the_first_sample_and_the_newest_are_kept() -> None:
    history = TrainingHistory()
    for number in range(100):
        history("sample", updates=number, text=str(number))
    kept = [sample["updates"] for sample in history.samples]
    assert kept == [0, *range(100 - MOST_SAMPLES + 1, 100)]
