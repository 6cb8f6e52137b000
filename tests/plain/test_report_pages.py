"""The pages of a tune, a profile and a lint: one file each that loads nothing, every figure the document's own.

Their documents are made by the commands and by the search itself, from machines that the tests of those made up.
"""

from __future__ import annotations

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from redline.cli import main
from redline.core.units import human_rate
from redline.report import has_implausible_peak, is_implausible_peak
from redline.report.lint_page import gemms_of, pairs_of, render_lint_page
from redline.report.next_steps import tune_steps
from redline.report.points import front_of
from redline.report.profile_page import render_profile_page
from redline.report.training_page import render_training_page
from redline.report.tune_page import points_of, render_tune_page
from redline.search import launch

HERE = Path(__file__)
PAGES: dict[str, Any] = runpy.run_path(str(HERE.with_name("test_report_page.py")))
Outline, assert_loads_nothing = PAGES["Outline"], PAGES["assert_loads_nothing"]
SCRIPT = "<script>alert('x')</script>"


def poisoned(value: Any, key: str = "") -> Any:
    """Every text an attack, but for the words that decide something."""
    kept = {"status", "kind", "why", "verdict", "state", "name", "direction", "dtype", "device", "group", "phase"}
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    return SCRIPT if isinstance(value, str) and key not in kept else value


# --- tune -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tune_document() -> dict[str, Any]:
    """A search on an H200 that was made up; its memory is what was predicted."""
    made = runpy.run_path(str(HERE.with_name("test_tune.py")))
    machine = made["Machine"](wrong=("bf16-residual",), failures={"chunked-loss": made["OOM"]})
    tuner = made["tuned"](machine, made["open_space"](made["GPT2"], made["H200"], rungs=made["KNOBS"]))
    document = json.loads(json.dumps(made["tune_document"](tuner, made["RUN"])))
    for row in document["rows"]:
        row["peak_bytes"] = row["predicted_peak_bytes"] if row["status"] == "ok" else None
    return document


def trials_of(page: str) -> dict[int, float]:
    found = re.findall(r'data-kind="trial" data-number="(\d+)" data-tokens-per-second="([^"]+)"', page)
    numbers = [int(number) for number, _ in found]
    assert all(numbers.count(number) == 2 for number in numbers), "once in each width"
    return {int(number): float(rate) for number, rate in found}


def test_every_trial_that_ran_is_a_point(tune_document: dict[str, Any]) -> None:
    page = render_tune_page(tune_document)
    outline = Outline(page)
    assert_loads_nothing(outline)
    ran = {row["number"]: row["tokens_per_second"] for row in tune_document["rows"] if row["status"] == "ok"}
    assert len(ran) > 8
    assert trials_of(page) == ran
    failed = [row["number"] for row in tune_document["rows"] if row["status"] != "ok"]
    assert failed
    assert all(f"#{number}" in outline.text for number in failed)
    assert page.count('class="point best"') == 2
    wrong = sum(row["equivalence"]["verdict"] == "different" for row in tune_document["rows"])
    assert wrong
    assert page.count('class="point bad"') == 2 * wrong


def test_the_page_of_a_tune_says_everything(tune_document: dict[str, Any]) -> None:
    text = Outline(render_tune_page(tune_document)).text
    best = tune_document["best"]
    wanted = [human_rate(best["tokens_per_second"]), f"at micro batch {best['micro_batch']}", "the winner"]
    wanted += [knob["text"] for knob in tune_document["knobs"]]
    wanted += [row["reason"] for row in tune_document["rows"] if row["reason"]]
    wanted += [json.dumps({"rungs": best["rungs"], "micro_batch": best["micro_batch"]}), "redline tune"]
    wanted += ["not the same training any more, so they cannot win", "speed of light of the winner"]
    assert [part for part in wanted if part not in text] == []


def test_knobs_that_were_compared_are_bars(tune_document: dict[str, Any]) -> None:
    page = render_tune_page(tune_document)
    drawn = [float(gain) for gain in re.findall(r'data-kind="gain"[^>]* data-gain="([^"]+)"', page)]
    known = sorted((knob["gain"] for knob in tune_document["knobs"] if knob["gain"] is not None), reverse=True)
    assert known
    assert drawn == known + known, "the largest first, in both widths"


def test_nothing_is_built_on_a_peak_that_cannot_be_right(tune_document: dict[str, Any], repository: Path) -> None:
    """The H200's winner ran from a recorded graph, whose memory was not counted once."""
    calm = render_tune_page(tune_document)
    assert "cannot be right" not in calm
    assert "data-doubtful" not in calm
    record = json.loads((repository / "records" / "2026-11-15-h200-tune-gpt2.json").read_text())
    winner, second, third = record["rows"][:3]
    winner["peak_bytes"], third["peak_bytes"] = 1_501_100_544, second["peak_bytes"]
    page = render_tune_page(record)
    text = Outline(page).text
    assert "#3: 1.40 GiB measured, 26.3 GiB predicted: this peak cannot be right" in text
    assert "1.40 GiB?" in text
    assert set(re.findall(r'data-number="(\d+)"[^>]*data-doubtful', page)) == {"3"}
    front = front_of(points_of(record))
    assert [point.number for point in front] == [1], "not the winner"
    assert 'class="front"' not in page.split("<svg")[1]
    (step,) = [step for step in tune_steps(record) if step.what.startswith("Do not read")]
    assert "least memory" not in step.why
    assert "the peak of #3 cannot be right" in step.why
    for row in record["rows"]:
        row["predicted_peak_bytes"] = row["peak_bytes"]
    (step,) = [step for step in tune_steps(record) if step.what.startswith("Do not read")]
    assert "take #3, which needs least memory (1.40 GiB)" in step.why
    assert [point.number for point in front_of(points_of(record))] == [3]


@pytest.mark.parametrize(
    ("measured", "predicted", "is_so"),
    [(10, 19, False), (10, 21, True), (21, 10, False), (None, 10, False), (10, None, False), (0, 10, False)],
)
def test_which_peaks_cannot_be_right(measured: int | None, predicted: int | None, is_so: bool) -> None:
    """Far less than its tensors; what is more than predicted was held."""
    assert is_implausible_peak(measured, predicted) is is_so
    assert has_implausible_peak({"peak_bytes": measured, "predicted_peak_bytes": predicted}) is is_so


def test_a_tune_that_was_disturbed_says_so_before_any_number(tune_document: dict[str, Any]) -> None:
    assert "disturbed" not in Outline(render_tune_page(tune_document)).text
    document = copy.deepcopy(tune_document)
    row = document["rows"][1]
    row["step_seconds"].update(p10=0.1, p90=0.35)
    page = render_tune_page(document)
    assert f"disturbed: slow steps of #{row['number']} took 3.5 times as long as its quick ones" in Outline(page).text
    start = page.index("<main>")
    assert page.index("disturbed: ", start) < page.index('<div class="figures">')


def test_what_to_do_after_a_tune(tune_document: dict[str, Any]) -> None:
    first, *_ = tune_steps(tune_document)
    assert first.command == "redline train gpt2 --recipe best.json"
    stopped = {**tune_document, "stopped": {"why": "minutes", "detail": None}, "directory": "runs/t"}
    _, longer, *_ = tune_steps({**stopped, "not_tried": [{}] * 7})
    assert "7 neighbours of the winner not tried" in longer.why
    for why, seconds, minutes in (("minutes", 480, 30), ("minutes", 2400, 80), ("interrupted", 2400, 40)):
        ended = {**stopped, "stopped": {"why": why}, "budget": {"seconds": seconds}}
        longer = next(step for step in tune_steps(ended) if step.what == "Search longer")
        assert longer.command == f"redline tune --resume runs/t --minutes {minutes}", "more than it had"
    assert "with 1 neighbour of the winner" in tune_steps({**stopped, "not_tried": [{}]})[1].why
    assert tune_steps(stopped)[0].command == "redline train gpt2 --recipe runs/t/best.json"
    one = [{"change": "x", "micro_batch": 1, "reason": "y"}]
    assert "Not tried: 1 neighbour\n" in Outline(render_tune_page({**stopped, "not_tried": one})).text.replace(
        "<", "\n"
    )
    assert not [step for step in tune_steps(tune_document) if step.what == "Search longer"], "it converged"


def test_a_tune_of_a_machine_that_tells_nothing(tune_document: dict[str, Any]) -> None:
    document = copy.deepcopy(tune_document)
    for row in document["rows"]:
        row.update(peak_bytes=None, predicted_peak_bytes=None, mfu=None, compile_seconds=None)
    page = render_tune_page(
        {**document, "roofline": {**document["roofline"], "light": None, "of_light": None, "reason": "no"}}
    )
    assert 'data-kind="trial"' not in page
    assert "None" not in Outline(page).text


def test_a_tune_without_a_winner(tune_document: dict[str, Any]) -> None:
    nothing = {"best": None, "knobs": [], "break_even": [], "roofline": None, "rows": [], "baseline": None}
    text = Outline(render_tune_page({**tune_document, **nothing})).text
    assert "No recipe was measured and found right." in text
    assert "None" not in text
    said = {"why": "#1 is not proved: <b>", "fix": "give it more --minutes"}
    text = Outline(render_tune_page({**tune_document, **nothing, "unproved": said})).text
    assert "found right: #1 is not proved: <b>; give it more --minutes." in text


def test_text_from_outside_stays_text_on_the_page_of_a_tune(tune_document: dict[str, Any]) -> None:
    outline = Outline(render_tune_page(poisoned(tune_document)))
    assert_loads_nothing(outline)
    assert outline.text.count(SCRIPT) > 10


def many_trials(document: dict[str, Any], count: int = 200) -> dict[str, Any]:
    rows = [{**copy.deepcopy(document["rows"][n % 8]), "number": 1000 + n} for n in range(count)]
    return {**document, "rows": [document["rows"][0], *rows[1:]]}


def test_two_hundred_trials_are_a_page_of_bounded_size(tune_document: dict[str, Any]) -> None:
    page = render_tune_page(many_trials(tune_document))
    assert len(trials_of(page)) == 200
    assert len(page) < 1_000_000


# --- profile ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def profile_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, h200: Any) -> Any:
    """profile_run(*words) -> (exit code, run directory), with the answer that test_profile_command made up."""
    made = runpy.run_path(str(HERE.with_name("test_profile_command.py")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "probe_machine", lambda device: (h200, {"torch": "2.13"}))

    def run(*words: str, failure: str | None = None) -> tuple[int, Path]:
        answer = made["PROFILE"] if failure is None else made["Failure"](kind="oom", reason=failure)
        monkeypatch.setattr(launch, "launch_profile", lambda *_: answer)
        out = tmp_path / "run"
        return main(["profile", "tiny", "--rungs", "tf32,bf16", "--out", str(out), *words]), out

    return run


def test_a_profile_leaves_its_page_in_the_run_directory(profile_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = profile_run()
    assert code == 0
    assert f"page   {out / 'report.html'}" in capsys.readouterr().out
    document = json.loads((out / "profile.json").read_text())
    page = (out / "report.html").read_text()
    assert page == render_profile_page(document)
    assert_loads_nothing(Outline(page))


def test_a_profile_is_drawn_again_where_it_lies_now(profile_run: Any, tmp_path: Path) -> None:
    _, out = profile_run()
    moved = out.rename(tmp_path / "moved")
    (moved / "report.html").unlink()
    assert main(["report", str(moved)]) == 0
    assert (moved / "report.html").exists()
    assert not out.exists()


def test_the_bars_of_a_profile_are_its_phases_and_add_up(profile_run: Any) -> None:
    _, out = profile_run()
    document = json.loads((out / "profile.json").read_text())
    page = (out / "report.html").read_text()
    found = re.findall(r'data-kind="bar" data-name="([^"]+)" data-total="([^"]+)"', page)
    totals = {name: float(total) for name, total in found}
    step = document["step_seconds"]["median"]
    assert totals["whole step"] == pytest.approx(step)
    phases = {phase["phase"]: phase["seconds"] for phase in document["phases"] if phase["seconds"]}
    assert {name: totals[name] for name in phases} == pytest.approx(phases)
    assert totals["measured"] == sum(document["memory"]["categories"].values()) == document["memory"]["peak_bytes"]
    assert totals["predicted"] == document["memory"]["predicted"]["allocated"]
    assert "tensor contraction 50.0 ms, 50.0 %" in page
    assert page.count('data-curve="alive"') == 2


def test_the_page_of_a_profile_says_everything(profile_run: Any) -> None:
    _, out = profile_run()
    document = json.loads((out / "profile.json").read_text())
    text = Outline((out / "report.html").read_text()).text
    wanted = ["100 ms", "of its speed of light", "cutlass::Kernel2", "mystery", "h.*.attn", "500", "51 %", "compute"]
    wanted += ["model.py:57", "leave the value on the device", "model.py:12", "20.0 MiB", "+20 %", '"micro_batch"']
    wanted += [advice["what"] for advice in document["advice"][:3]]
    assert [part for part in wanted if part not in text] == []
    assert "None" not in text


def test_the_whole_name_of_a_kernel_is_on_the_page(profile_run: Any) -> None:
    _, out = profile_run()
    document = json.loads((out / "profile.json").read_text())
    long = "at::native::(anonymous namespace)::" + "multi_tensor_apply_" * 8 + "kernel"
    document["kernels"][0]["name"] = f"void {long}<float, 4>(int, float*)"
    page = render_profile_page(document)
    plain = long.replace("(anonymous namespace)::", "")
    assert f'title="void {long}&lt;float, 4&gt;(int, float*)">{plain}</th>' in page
    assert re.search(r"tbody th\.long \{[^}]*white-space: normal; overflow-wrap: anywhere", page)


def test_a_profile_that_failed_has_a_page_that_says_why(profile_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = profile_run(failure=f"out of memory {SCRIPT}")
    assert code == 1
    outline = Outline((out / "report.html").read_text())
    assert_loads_nothing(outline)
    assert f"Nothing was profiled: out of memory {SCRIPT}" in outline.text


def test_text_from_outside_stays_text_on_the_page_of_a_profile(profile_run: Any) -> None:
    _, out = profile_run()
    document = poisoned(json.loads((out / "profile.json").read_text()))
    document["kernels"][0]["name"] = SCRIPT
    document["modules"][0]["module"] = SCRIPT
    outline = Outline(render_profile_page(document))
    assert_loads_nothing(outline)
    assert outline.text.count(SCRIPT) > 5


def test_a_profile_without_memory_or_peaks(profile_run: Any) -> None:
    _, out = profile_run()
    document = json.loads((out / "profile.json").read_text())
    bare = {**document, "memory": None, "memory_reason": "nobody told", "roofline": None, "advice": [], "findings": []}
    text = Outline(render_profile_page(bare)).text
    assert "nobody told" in text
    assert "Nothing that the rules know of" in text
    assert "None" not in text


# --- lint -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lint_records(repository: Path) -> list[dict[str, Any]]:
    return json.loads((repository / "records" / "2026-11-15-h200-lint.json").read_text())["documents"]


def test_lint_writes_a_page_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "lint.html"
    assert main(["lint", "gpt2", "--gpu", "H200", "--html", str(target), "--json"]) == 0
    caught = capsys.readouterr()
    assert f"page {target}" in caught.err
    page = target.read_text()
    assert page == render_lint_page(json.loads(caught.out)), "standard output holds the document alone"
    assert_loads_nothing(Outline(page))
    text = Outline(page).text
    for part in ("Lint of gpt2 on H200", "pad it to 50304", "Predicted, not measured.", "head dgrad, fixed"):
        assert part in text


@pytest.mark.parametrize("place", [".", "missing/lint.html"])
def test_a_page_that_cannot_be_written_is_said_before_the_work(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", "gpt2", "--gpu", "H200", "--html", str(tmp_path / place)]) == 2
    caught = capsys.readouterr()
    assert "cannot write" in caught.err
    assert caught.out == ""


def test_efficiencies_are_flops_over_seconds_over_the_peak(lint_records: list[dict[str, Any]]) -> None:
    for document in lint_records:
        pairs = {pair.name: pair for pair in pairs_of(gemms_of(document, "before"), gemms_of(document, "after"))}
        befores = [row for row in document["gemms"] if row["state"] == "before"]
        assert len(pairs) == len(befores)
        for row in befores:
            flops = 2 * row["m"] * row["n"] * row["k"] * row["batch"]
            share = flops / row["seconds"] / 989.4e12
            assert pairs[f"{row['where']} {row['direction']}"].before == pytest.approx(share)
        changed = [pair for pair in pairs.values() if pair.after is not None]
        assert changed
        assert max(pair.after / pair.before for pair in changed) > 1.2, "a fix that a record shows to pay"


def test_pages_of_measured_lints(lint_records: list[dict[str, Any]]) -> None:
    for document in lint_records:
        page = render_lint_page(document)
        assert_loads_nothing(Outline(page))
        assert "Measured here." in page
        assert f"{100 * document['measured_gain']:+.1f} %" in page
        rows = len([row for row in document["gemms"] if row["state"] == "before"])
        assert page.count('data-kind="pair"') == 2 * rows


def test_a_lint_draws_what_was_measured_before_and_after(lint_records: list[dict[str, Any]]) -> None:
    """As long as FLOPs over seconds over the peak, in the wide chart's own scale."""
    for document in lint_records:
        shares: dict[str, dict[str, float]] = {"before": {}, "after": {}}
        for row in document["gemms"]:
            flops = 2 * row["m"] * row["n"] * row["k"] * row["batch"]
            shares[row["state"]][f"{row['where']} {row['direction']}"] = flops / row["seconds"] / 989.4e12
        chart = render_lint_page(document).split("<svg")[1].split("</svg>")[0]
        names = re.findall(r'data-kind="pair" data-name="([^"]+)" data-before="[^"]+" data-after="([^"]+)"', chart)
        ticks = re.findall(r'tick" x="([\d.]+)"[^>]*>(\d+) %<', chart)
        (zero, _), (whole, percent) = ticks[0], ticks[-1]
        scale = (float(whole) - float(zero)) / (int(percent) / 100)
        for kind, state in (("bar", "before"), ("gain", "after")):
            drawn = [float(width) / scale for width in re.findall(rf'class="{kind}"[^>]* width="([\d.]+)"', chart)]
            wanted = [shares[state][name] for name, after in names if state == "before" or after != "None"]
            assert wanted
            assert drawn == pytest.approx(wanted, abs=2e-3)


def test_an_unknown_device_has_findings_and_no_efficiencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "gpt2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    hardware = {**document["hardware"], "name": None, "reason": "a card that nobody knows"}
    page = render_lint_page({**document, "hardware": hardware})
    assert 'data-kind="pair"' not in page
    assert "No efficiency is known: a card that nobody knows." in Outline(page).text


def test_a_clean_shape_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "gpt2", "--gpu", "H200", "--ignore", "vocabulary", "--json"]) == 0
    text = Outline(render_lint_page(json.loads(capsys.readouterr().out))).text
    assert "nothing ugly" in text


def test_text_from_outside_stays_text_on_the_page_of_a_lint(lint_records: list[dict[str, Any]]) -> None:
    document = poisoned(lint_records[0])
    document.update(name=SCRIPT, settings=lint_records[0]["settings"], shape=lint_records[0]["shape"])
    document.update(suggested=lint_records[0]["suggested"], suggested_settings=lint_records[0]["suggested_settings"])
    document["gemms"] = lint_records[0]["gemms"]
    outline = Outline(render_lint_page(document))
    assert_loads_nothing(outline)
    assert outline.text.count(SCRIPT) > 5


# --- links ------------------------------------------------------------------------------------------------------------


def test_the_page_of_a_training_run_has_its_line_of_links() -> None:
    made = runpy.run_path(str(HERE.with_name("test_training_page.py")))
    document = made["history_of"](30, **made["FINISHED"]).document(made["RUN"])
    page = render_training_page(document)
    ids = {value for key, value in Outline(page).attributes if key == "id"}
    links = [value for key, value in Outline(page).attributes if key == "href"]
    assert {link[1:] for link in links if link} <= ids
    assert links == ["#loss", "#health", "#summary", "#samples", "#sessions", "#machine", "#again"]
    assert 'href="#samples"' not in render_training_page({**document, "samples": []})
