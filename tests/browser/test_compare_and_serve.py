"""The page of a comparison and a page that is served, in a real browser; skipped as test_pages.py is."""

from __future__ import annotations

import copy
import json
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest

from redline.commands import serve
from redline.commands.serve import Pages, open_server
from redline.report.compare import compare
from redline.report.compare_page import render_comparison

pytestmark = pytest.mark.browser
HERE = Path(__file__)
PAGES = runpy.run_path(str(HERE.with_name("test_pages.py")))
TRAINING = runpy.run_path(str(HERE.parents[1] / "plain" / "test_training_page.py"))
browser, Opened, PLANTED = PAGES["browser"], PAGES["Opened"], PAGES["PLANTED"]  # its fixture is ours too


@pytest.fixture(scope="module")
def comparison(repository: Path) -> dict[str, Any]:
    """An H200's ladder against itself with a reason that is an attack and rows that moved."""
    one = json.loads((repository / "records/2026-11-15-h200-ladder-gpt2-b16.json").read_text())
    other = copy.deepcopy(one)
    for place, row in enumerate(other["rows"]):
        row["tokens_per_second"] *= 1 + 0.03 * (place - 5)
        row["reason"] = PLANTED
    return compare(one, other, sources=("monday", PLANTED))


@pytest.fixture(scope="module")
def page(comparison: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "compare.html"
    path.write_text(render_comparison({**comparison, "command": PLANTED}), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
def test_a_comparison_opens_quietly_with_every_row(
    browser: Any, page: Path, comparison: dict[str, Any], width: int, scheme: str
) -> None:
    opened = Opened(browser, page, width=width, color_scheme=scheme)
    assert opened.complaints == []
    assert opened.requests == [page.as_uri()]
    assert opened.page.evaluate("window.planted") is None
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    shown = {mark["name"]: float(mark["gain"]) for mark in opened.marks("gain")}
    assert shown == {row["name"]: row["ratio"] - 1 for row in comparison["rows"]}
    grip = opened.grip('.hot[data-name="fused-loss"]')
    grip.hover()
    tip = opened.page.locator('.hot[data-name="fused-loss"] .tip').locator("visible=true")
    rates = next(row for row in comparison["rows"] if row["name"] == "fused-loss")
    assert (
        f"{rates['a']['tokens_per_second']:,.0f} -> {rates['b']['tokens_per_second']:,.0f} tokens/s"
        in tip.text_content()
    )
    opened.context.close()


@pytest.mark.parametrize("width", [1100, 360])
def test_nothing_lies_over_a_box_of_figures(browser: Any, page: Path, width: int) -> None:
    opened = Opened(browser, page, width=width, bypass_csp=True)
    assert PAGES["covered_tips"](opened, "gain") == []
    opened.context.close()


def test_a_served_page_follows_its_run(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REFRESH_SECONDS", 1)
    (tmp_path / "run.json").write_text(json.dumps(TRAINING["RUN"]))
    events = [{"kind": "session"}, {"kind": "cycle", **TRAINING["cycle"](1, 3.0)}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with open_server(Pages(tmp_path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            window = browser.new_context(viewport={"width": 1000, "height": 400}).new_page()
            complaints: list[str] = []
            window.on("console", lambda message: complaints.append(message.text))
            window.goto(f"http://127.0.0.1:{server.server_port}/")
            window.evaluate("window.scrollTo(0, 300)")
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"kind": "cycle", **TRAINING["cycle"](7777, 3.0)}) + "\n")
            window.get_by_text("7,777").first.wait_for(timeout=20_000)
            assert complaints == []
            assert window.evaluate("window.scrollY") == 300, "the reader stays where he was"
        finally:
            server.shutdown()
            thread.join()
