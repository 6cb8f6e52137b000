"""The page of a training run: one file, nothing loaded, every curve in it; foreign text stays text, long runs small."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from redline.cli import main
from redline.core.job import RunDirectory
from redline.report.curves import Panel, curve_chart
from redline.report.history import TrainingHistory, read_training
from redline.report.training_page import REDRAW_SECONDS, LivePage, loss_panel, render_training_page

PAGES: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_page.py")))
Outline, assert_loads_nothing = PAGES["Outline"], PAGES["assert_loads_nothing"]
SCRIPT = "<script>alert('x')</script>"
EACH = 1024
RUN: dict[str, Any] = {
    "kind": "train",
    "order": {
        "workload": {"name": "gpt2", "shape": {"layers": 12, "vocab": 50257}, "micro_batch": 4},
        "recipe": {"rungs": ["bf16", "flash"], "micro_batch": 8},
        "settings": {"micro_batch": 8, "schedule": "cosine", "budget": {"steps": 400, "tokens": None}},
        "data": "/data/books",
    },
    "hardware": {"name": "NVIDIA H200"},
    "versions": {"torch": "2.13.0"},
    "command": "redline train gpt2 --steps 400",
    "date": "2026-11-15T03:00:00+00:00",
}


def cycle(updates: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    fields = {
        "updates": updates,
        "tokens": updates * EACH,
        "losses": [loss],
        "gradient_norms": [1.5],
        "loss": loss,
        "learning_rate": 6e-4,
        "seconds": 0.1,
        "total_seconds": 0.1 * updates,
        "tokens_per_second": 10_240.0,
        "data_wait": 0.01,
        "skipped": 0,
        "skipped_at": [],
        "peak_bytes": 8 << 30,
        "documents": 344,
        "epoch": 0.5,
        "epoch_seconds": 24_480.0,
        "mfu": 0.413,
    }
    return {**fields, **changes}


def history_of(cycles: int = 50, **end: Any) -> TrainingHistory:
    history = TrainingHistory()
    history("session", command="redline train gpt2 --steps 400", date=RUN["date"], mfu_convention="full square")
    for updates in range(1, cycles + 1):
        history("cycle", **cycle(updates, 11.0 - 8 * updates / cycles))
    history("validation", updates=cycles, tokens=cycles * EACH, loss=3.21, validation_tokens=4096)
    history("sample", updates=cycles, text="It is a truth\nuniversally <b>acknowledged</b>")
    if end:
        history("end", **end)
    return history


def page_of(history: TrainingHistory, run: dict[str, Any] = RUN) -> str:
    return render_training_page(history.document(run))


FINISHED = {"ended": "steps", "reason": None, "checkpoint": "runs/x/checkpoints/step-00000050"}


@pytest.mark.parametrize(
    "history", [TrainingHistory(), history_of(1), history_of(**FINISHED)], ids=["empty", "going on", "finished"]
)
def test_the_page_is_well_formed_and_loads_nothing(history: TrainingHistory) -> None:
    page = page_of(history)
    outline = Outline(page)
    assert_loads_nothing(outline)
    assert not re.search(r"url\(|@import|https?:(?!//www\.w3\.org/2000/svg)", page)


def test_the_page_says_everything() -> None:
    text = Outline(page_of(history_of(**FINISHED))).text
    wanted = ["Training gpt2 on NVIDIA H200", "2026-11-15 03:00 UTC", "micro batch 8", "3.210", "best validation loss"]
    wanted += ["10,240", "median of 50 cycles; MFU 41.3 %", "51,200 train, 4,096 validation, 55,296 total", "344"]
    wanted += ["41.3 % (full square)", "6:48:00", "8.00 GiB", "1.0 % of the time", "runs/x/checkpoints/step-00000050"]
    wanted += ["It is a truth\nuniversally <b>acknowledged</b>", "after 50 updates", "redline train gpt2 --steps 400"]
    wanted += ['{"rungs": ["bf16", "flash"], "micro_batch": 8}', "torch", "2.13.0", "/data/books", "400 steps"]
    assert [part for part in wanted if part not in text] == []


def test_every_curve_is_there_in_both_widths() -> None:
    page = page_of(history_of(**FINISHED))
    for name in ("train", "validation", "tokens per second", "MFU", "learning rate", "gradient norm", "peak memory"):
        assert page.count(f'data-curve="{name}"') == 2, name
    assert page.count('data-curve="data wait"') == 2
    plots = re.findall(r"<h3[^>]*>([^<]+)</h3>\s*<div class=\"wide\">", page)
    assert plots == ["tokens per second", "MFU", "learning rate", "gradient norm", "peak memory", "data wait"]


def test_what_nobody_knows_has_no_plot() -> None:
    history = TrainingHistory()
    history("cycle", **cycle(1, 5.0, mfu=None, peak_bytes=None))
    page = page_of(history)
    assert 'data-curve="MFU"' not in page
    assert 'data-curve="peak memory"' not in page
    assert 'data-curve="learning rate"' in page


def test_text_from_outside_stays_text() -> None:
    history = history_of(ended="diverged", reason=SCRIPT, checkpoint=SCRIPT)
    history("sample", updates=50, text=SCRIPT)
    history("note", text=SCRIPT)
    history("session", command=SCRIPT, date=SCRIPT, hardware={"name": SCRIPT}, versions={SCRIPT: SCRIPT})
    history("end", ended="failed", reason=SCRIPT, checkpoint=SCRIPT)
    order = {**RUN["order"], "data": SCRIPT, "workload": {"name": SCRIPT}, "recipe": {"rungs": [SCRIPT]}}
    page = page_of(history, {**RUN, "order": order, "command": SCRIPT})
    assert_loads_nothing(Outline(page))
    assert Outline(page).text.count(SCRIPT) >= 10


@pytest.mark.parametrize(
    ("end", "words", "kind"),
    [
        ({"ended": "diverged", "reason": "5 updates in a row"}, "Training stopped: 5 updates in a row.", "different"),
        ({"ended": "failed", "reason": None}, "Training stopped: no reason was given.", "different"),
        ({"ended": "interrupted"}, "This run was interrupted", "unfinished"),
        ({}, "This run has no end yet", "unfinished"),
    ],
)
def test_how_it_ended_comes_first(end: dict[str, Any], words: str, kind: str) -> None:
    page = page_of(history_of(**end))
    alarm = re.findall(r'<div class="alarm (\w+)" role="alert">([^<]+)', page)
    assert [name for name, text in alarm if words in text] == [kind]
    assert page.index(words) < page.index('<div class="figures">')
    assert 'role="alert"' not in page_of(history_of(**FINISHED))


def test_skipped_updates_are_marked_where_they_were() -> None:
    history = history_of(100)
    history("cycle", **cycle(101, None, gradient_norms=[None], skipped=1, skipped_at=[101]))
    history("cycle", **cycle(202, 3.0, skipped=1))
    page = page_of(history)
    assert "1 update skipped" in page
    marks = re.findall(r'<line class="mark" x1="([\d.]+)"', page)
    assert [float(x) for x in marks] == pytest.approx([62 + (960 - 14 - 62) / 2, 62 + (320 - 14 - 62) / 2], abs=0.02)


def points_of(svg: str, name: str) -> list[tuple[float, float]]:
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    (path,) = [path.get("d") or "" for path in paths if path.get("data-curve") == name]
    pairs = [pair.split() for pair in path.removeprefix("M").split("L")]
    return [(float(x), float(y)) for x, y in pairs]


def test_points_are_where_their_values_are() -> None:
    panel = Panel(title="t", curves=(("a", [(0, 0.0), (50, 5.0), (100, 10.0)]),), show=str, from_zero=True)
    (x0, y0), (x1, y1), (x2, y2) = points_of(curve_chart(panel, end=100, width_px=440), "a")
    assert (x0, x2) == (62.0, 426.0)  # after the axis, and before the margin
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y0 > y1 > y2
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


def test_pointing_shows_the_values_there_and_the_end_tells_the_figures() -> None:
    points = [(float(place), float(place * place)) for place in range(101)]
    panel = Panel(title="t", curves=(("square", points),), show=lambda value: f"{value:g}", from_zero=True)
    svg = curve_chart(panel, end=100, width_px=440)
    marks = [mark for mark in ElementTree.fromstring(svg).iter() if mark.get("class") == "hot"]
    slices = [mark for mark in marks if mark.get("data-kind") == "slice"]
    assert len(slices) == 14
    for mark in slices:
        grip, tip = mark
        left, width = float(grip.get("x", 0)), float(grip.get("width", 0))
        place, value = ("".join(line.itertext()) for line in list(tip)[1:])
        seen = int(place.removesuffix(" tokens"))
        assert left - 1.9 <= 62 + seen * 3.64 <= left + width + 1.9, "half a token to either side"
        assert value == f"square: {seen * seen}"
    (end,) = [mark for mark in marks if mark.get("data-kind") == "end"]
    assert end.get("aria-label") == "square; 0 → 10000 at 100 tokens; lowest 0, highest 10000"
    x, y = points_of(svg, "square")[-1]
    left, top, width = (float(end[0].get(name, 0)) for name in ("x", "y", "width"))
    assert (left + width / 2, top + width / 2) == pytest.approx((x, y), abs=0.1)


def test_every_curve_is_in_the_table_with_its_ends() -> None:
    table = page_of(history_of(**FINISHED)).split("Every curve in figures")[1].split("</table>")[0]
    rows = re.findall(r'<th scope="row">([^<]+)</th>(.*?)</tr>', table)
    cells = {name: re.findall(r">([^<]*)</td>", rest) for name, rest in rows}
    assert list(cells)[:4] == ["train loss", "validation loss", "tokens per second", "MFU"]
    assert cells["train loss"] == ["10.840", "3.000", "3.000", "10.840", "50"]
    assert cells["validation loss"] == ["3.210", "3.210", "3.210", "3.210", "1"]
    assert cells["data wait"][0] == "1.0 %"
    assert len(cells) == 8


def test_one_value_that_blew_up_does_not_flatten_the_rest() -> None:
    history = TrainingHistory()
    for updates, loss in enumerate((11.0, 1e9, 3.0), 1):
        history("cycle", **cycle(updates, loss))
    panel = loss_panel(history.document(RUN), vocab=50257)
    (_, first), (_, spike), (_, last) = points_of(curve_chart(panel, end=3 * EACH, width_px=440), "train")
    assert 0 < spike < first < last
    assert last - first > 40


def test_a_single_point_is_a_dot_and_a_constant_curve_a_line() -> None:
    dot = curve_chart(Panel(title="t", curves=(("a", [(5, 3.0)]),), show=str), end=5, width_px=440)
    assert dot.count("<circle") == 1
    flat = Panel(title="t", curves=(("a", [(0, 0.0), (9, 0.0)]),), show=str, from_zero=True)
    assert all(math.isfinite(y) for _, y in points_of(curve_chart(flat, end=9, width_px=440), "a"))


def test_a_long_run_has_a_small_page() -> None:
    short = len(page_of(history_of(600, **FINISHED)))
    long = len(page_of(history_of(60_000, **FINISHED)))
    assert long < 1.2 * short
    assert long < 600_000


# --- when it is drawn -------------------------------------------------------------------------------------------------


def test_it_is_drawn_after_evaluations_but_not_all_the_time_and_at_the_end(tmp_path: Path) -> None:
    seconds = [1000.0]
    history = history_of()
    page = LivePage(RunDirectory(tmp_path), RUN, history, clock=lambda: seconds[0])
    file = tmp_path / "report.html"

    def is_drawn_by(kind: str) -> bool:
        file.unlink(missing_ok=True)
        page(kind, updates=1)
        return file.exists()

    assert not is_drawn_by("cycle")
    assert is_drawn_by("validation")
    seconds[0] += REDRAW_SECONDS - 1
    assert not is_drawn_by("validation")
    assert is_drawn_by("end")
    seconds[0] += REDRAW_SECONDS
    assert is_drawn_by("validation")
    assert "Training gpt2" in file.read_text()


def test_the_page_that_a_killed_run_leaves_names_its_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-00000040"
    saved.mkdir(parents=True)
    LivePage(RunDirectory(tmp_path), RUN, history_of())("validation", updates=50)
    assert str(saved) in Outline((tmp_path / "report.html").read_text()).text


def test_the_page_of_an_interrupted_run_says_with_which_layout_it_goes_on() -> None:
    document = history_of(ended="interrupted", reason=None, checkpoint="x").document(RUN)
    assert "It goes on with redline train --resume and its folder." in render_training_page(document)
    cut = {**document, "layout": {"ranks": 2, "tensor": 2}}
    wanted = "It goes on with redline train --resume, its folder and --gpus 2 --tensor 2."
    assert wanted in render_training_page(cut)


def test_a_page_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    page = LivePage(RunDirectory(tmp_path / "gone"), RUN, history_of())
    page("end", ended="steps")
    assert "No such file or directory" in page.trouble


# --- redline report ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    events = [("cycle", cycle(updates, 5.0)) for updates in range(1, 6)]
    events.append(("end", FINISHED))
    events.insert(0, ("session", {"command": "redline train", "hardware": {"name": "NVIDIA H200"}}))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": kind, **fields}) + "\n" for kind, fields in events)
    )
    return tmp_path


def test_report_recognises_a_training_run(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory)]) == 0
    shown = capsys.readouterr().out
    assert "ended     all steps are done: 5 updates" in shown
    assert f"page      {run_directory / 'report.html'}" in shown
    page = (run_directory / "report.html").read_text()
    assert page == render_training_page(read_training(run_directory))
    assert main(["report", str(run_directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "train"
    assert document["curves"]["loss"] == [[EACH * updates, 5.0] for updates in range(1, 6)]


def test_report_of_a_killed_run_says_what_it_saved_and_how_it_goes_on(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last session was on two ranks that hold each layer together, of a model that counts samples."""
    saved = run_directory / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    model = {"name": "mine", "shape": {"unit": "sample"}, "tokenizer": "none", "micro_batch": 4}
    (run_directory / "run.json").write_text(json.dumps({**RUN, "order": {**RUN["order"], "workload": model}}))
    layout = {"ranks": 2, "tensor": 2, "pipeline": 1, "replicas": 1}
    with open(run_directory / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"kind": "session", "layout": layout, "parallel": None}) + "\n")
    assert main(["report", str(run_directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"samples   {5 * EACH:,} train, 0 validation, {5 * EACH:,} total" in lines
    assert "speed     10,240 samples/s (median of the last session's cycles), MFU 41.3 %" in lines
    assert lines[-3:] == [
        f"saved     {saved}",
        f"page      {run_directory / 'report.html'}",
        f"go on     redline train --resume {run_directory} --gpus 2 --tensor 2",
    ]
    assert str(saved) in Outline((run_directory / "report.html").read_text()).text
    assert main(["report", str(run_directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document[name] for name in ("checkpoint", "layout", "parallel", "unit")] == [
        *(str(saved), layout, None, "sample")
    ]


def test_report_of_a_run_that_has_only_begun(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_directory / "metrics.jsonl").unlink()
    assert main(["report", str(run_directory)]) == 0
    assert "ended     still running, or killed: 0 updates" in capsys.readouterr().out


@pytest.mark.parametrize("left_out", ["order", "hardware", "versions", "command", "date"])
def test_report_of_a_run_whose_record_lacks_a_part(run_directory: Path, left_out: str) -> None:
    record = {name: value for name, value in RUN.items() if name != left_out}
    (run_directory / "run.json").write_text(json.dumps(record))
    assert main(["report", str(run_directory)]) == 0


def test_report_of_a_read_only_copy_shows_the_summary_and_warns(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_directory / "report.html.draft").mkdir()  # root may write anywhere, but not over a folder
    assert main(["report", str(run_directory)]) == 0
    caught = capsys.readouterr()
    assert caught.err.startswith(f"warning: cannot write {run_directory / 'report.html'}: ")
    assert "page " not in caught.out
