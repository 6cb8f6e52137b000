"""The pages in a real browser: Debian's Chromium, headless, through Playwright. Skipped where either is missing.

A run is made by the commands themselves, with machines that other tests made up, so that a page is held against the
results.jsonl of its own run directory. `apt-get install chromium` and `pip install playwright`; no browser is
downloaded.
"""

from __future__ import annotations

import json
import runpy
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.cli import main
from redline.core.measurement import Failure
from redline.report.lint_page import render_lint_page
from redline.report.page import render_page
from redline.report.profile_page import render_profile_page
from redline.report.training_page import render_training_page
from redline.report.tune_page import render_tune_page
from redline.search import ladder as ladder_module
from redline.search.limits import with_limits

pytestmark = pytest.mark.browser
PLAIN = Path(__file__).resolve().parents[1] / "plain"
PLANTED = "<script>window.planted = true</script><img src=x onerror='window.planted = true'>"
PAGES = ("ladder", "tune", "train", "profile", "lint")
MICRO_BATCH, SEQUENCE = 4, 256
STEPS = (1.0, 0.98, 1.03, 0.97, 1.01, 1.0, 1.05, 0.99)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    path = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Opened:
    """A page in a window of its own, and everything it complained about or asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1100, **choices: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **choices)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def marks(self, kind: str) -> list[dict[str, str]]:
        """data-* of the marks that can be seen, in their order."""
        script = "marks => marks.filter(m => m.checkVisibility()).map(m => ({...m.dataset}))"
        return self.page.eval_on_selector_all(f'.hot[data-kind="{kind}"]', script)

    def grip(self, selector: str) -> Any:
        return self.page.locator(f"{selector} > .grip").locator("visible=true").first


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    windows: list[Opened] = []

    def open_page(name: str, **choices: Any) -> Opened:
        windows.append(Opened(browser, pages[name], **choices))
        return windows[-1]

    yield open_page
    for window in windows:
        window.context.close()


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `redline ladder tiny`, climbed on an H200 that was made up: one rung fails, with markup in
    its reason, and every step has its noise."""
    made = runpy.run_path(str(PLAIN / "test_climb.py"))
    failure = Failure(kind="error", reason=f"it broke: {PLANTED}")
    machine = made["Machine"](factors={"bf16": 0.5, "flash": 0.7, "no-sync": 1.2}, failures={"padded-vocab": failure})
    out = tmp_path_factory.mktemp("ladder") / "run"

    def launch(directory: Any, job: Any, timeout_seconds: float, on_phase: Any, *, compile_cache: str) -> Any:
        answer = machine.ask(job)
        if isinstance(answer, Failure) or not answer.step_seconds:
            return answer
        noisy = tuple(answer.step_seconds[0] * factor for factor in STEPS)
        return made["replace"](answer, step_seconds=noisy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "launch", launch)
        patch.setattr("redline.search.words.probe_machine", lambda device: (made["H200"], {"torch": "2.13.0"}))
        main(["ladder", "tiny", "--micro-batch", str(MICRO_BATCH), "--check-steps", "5", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def pages(run: Path, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    lint = json.loads((repository / "records" / "2026-11-15-h200-lint.json").read_text())["documents"][1]
    record = with_limits(json.loads((repository / "records" / "2026-11-15-h200-ladder-gpt2-b16.json").read_text()))
    last = record["rows"][-1]
    more = [{**last, "rung": f"more-{number}"} for number in range(18 - len(record["rows"]))]
    texts = {
        "record": render_page(record),
        "long": render_page({**record, "rows": [*record["rows"], *more]}),
        "tune": render_tune_page(tune_document()),
        "train": render_training_page(training_document()),
        "profile": render_profile_page(profile_document(folder)),
        "lint": render_lint_page(lint),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {"ladder": run / "report.html", **{name: folder / f"{name}.html" for name in texts}}


def tune_document() -> dict[str, Any]:
    """Two hundred trials."""
    made = runpy.run_path(str(PLAIN / "test_tune.py"))
    tuner = made["tuned"](made["Machine"](), made["open_space"](made["GPT2"], made["H200"], rungs=made["KNOBS"]))
    document = json.loads(json.dumps(made["tune_document"](tuner, made["RUN"])))
    first = document["rows"][0]
    for number in range(len(document["rows"]), 200):
        rate = first["tokens_per_second"] * (0.4 + 0.59 * ((number * 37) % 100) / 100)
        peak = int(first["predicted_peak_bytes"] * (0.2 + 0.7 * ((number * 61) % 100) / 100))
        row = {**first, "number": 1000 + number, "tokens_per_second": rate, "predicted_peak_bytes": peak}
        document["rows"].append({**row, "reason": PLANTED if number == 77 else None})
    for row in document["rows"]:
        row["peak_bytes"] = row["predicted_peak_bytes"]
    return document


def training_document() -> dict[str, Any]:
    made = runpy.run_path(str(PLAIN / "test_training_page.py"))
    history = made["history_of"](300, **made["FINISHED"])
    history("sample", updates=300, text=PLANTED)
    return history.document(made["RUN"])


def profile_document(folder: Path) -> dict[str, Any]:
    import redline
    from redline.core.hardware import Hardware
    from redline.search import launch

    made = runpy.run_path(str(PLAIN / "test_profile_command.py"))
    features = ("tf32", "bf16", "flash")
    machine = Hardware(kind="cuda", name="NVIDIA H200", capability=(9, 0), cpu_cores=16, features=features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(launch, "probe_machine", lambda device: (machine, {"torch": "2.13"}))
        patch.setattr(launch, "launch_profile", lambda *_: made["PROFILE"])
        document: dict[str, Any] = redline.profile("tiny", rungs="tf32,bf16", out=folder / "profile")
    document["findings"][0]["detail"] = PLANTED
    return document


# --- what must show ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_it_opens_without_a_complaint_and_asks_for_nothing(
    name: str, scheme: str, opened: Any, pages: dict[str, Path]
) -> None:
    window = opened(name, color_scheme=scheme)
    window.page.wait_for_load_state()
    assert window.complaints == []
    assert window.requests == [pages[name].as_uri()]
    assert window.page.locator("svg.redline-chart").locator("visible=true").count() >= 1


@pytest.mark.parametrize("width", [1100, 360])
def test_the_marks_are_the_rungs_and_their_values_those_of_the_results(width: int, opened: Any, run: Path) -> None:
    """The lines of results.jsonl in their order are the measured rungs in theirs."""
    lines = (run / "results.jsonl").read_text().splitlines()
    steps = [found for line in lines if (found := find_key(json.loads(line), "step_seconds"))]
    rates = [MICRO_BATCH * SEQUENCE / statistics.median(found) for found in steps]
    marks = opened("ladder", width=width).marks("rung")
    shown = [float(mark["tokensPerSecond"]) for mark in marks if "tokensPerSecond" in mark]
    assert len(rates) > 6
    assert shown == pytest.approx(rates)
    by_status = [mark["status"] for mark in marks]
    assert by_status.count("ok") == len(rates)
    assert by_status.count("failed") == 1
    assert [mark["rung"] for mark in marks][:4] == ["baseline", "tf32", "no-sync", "bf16"]


def find_key(value: Any, key: str) -> Any:
    """The first value of a key, however deep."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        return next((found for item in value.values() if (found := find_key(item, key))), None)
    return None


def test_every_step_is_drawn_as_high_as_it_is(opened: Any) -> None:
    """In the browser's own pixels, after layout."""
    window = opened("ladder")
    boxes = window.page.evaluate(
        """() => [...document.querySelectorAll('.wide .rung')].map(group => {
            const blocks = [...group.querySelectorAll('.bar, .gain')].map(block => block.getBoundingClientRect());
            if (!blocks.length) { return null; }
            return Math.max(...blocks.map(b => b.bottom)) - Math.min(...blocks.map(b => b.top));
        })"""
    )
    rates = [float(mark.get("tokensPerSecond", 0)) for mark in window.marks("rung")]
    pairs = [(box, rate) for box, rate in zip(boxes, rates, strict=True) if box]
    ratios = [box / rate for box, rate in pairs if box > 20]
    assert len(ratios) > 4
    assert max(ratios) == pytest.approx(min(ratios), rel=0.02)


@pytest.mark.parametrize("width", [1100, 360])
def test_pointing_at_a_rung_shows_its_figures(width: int, opened: Any) -> None:
    window = opened("ladder", width=width)
    mark = '.hot[data-kind="rung"][data-rung="bf16"]'
    tip = window.page.locator(f"{mark} > .tip")
    assert [one.is_visible() for one in tip.all()] == [False, False]
    window.grip(mark).hover()
    (shown,) = [one for one in tip.all() if one.is_visible()]
    rate = next(float(one["tokensPerSecond"]) for one in window.marks("rung") if one["rung"] == "bf16")
    assert f"{rate:,.0f} tokens/s" in shown.text_content()
    assert "MFU" in shown.text_content()
    assert "this step" in shown.text_content()


@pytest.mark.parametrize(
    ("name", "kind"), [("tune", "trial"), ("profile", "bar"), ("lint", "pair"), ("train", "slice")]
)
def test_pointing_shows_figures_on_every_page(name: str, kind: str, opened: Any) -> None:
    window = opened(name)
    grips = window.page.locator(f'.hot[data-kind="{kind}"] > .grip').locator("visible=true")
    grips.first.hover(force=True)
    assert window.page.locator(".tip").locator("visible=true").count() == 1


TOPMOST = """([mark, cells]) => {
    const tip = [...mark.querySelectorAll(':scope > .tip')].find(one => one.checkVisibility());
    const box = tip.querySelector('rect').getBoundingClientRect();
    const covered = [];
    for (let row = 0; row < cells; row++) for (let column = 0; column < cells; column++) {
        const x = box.left + box.width * (column + .5) / cells, y = box.top + box.height * (row + .5) / cells;
        const found = document.elementFromPoint(x, y);
        if (!tip.contains(found)) covered.push([column, row, found && found.outerHTML.slice(0, 60)]);
    }
    return covered;
}"""


def covered_tips(window: Any, kind: str) -> list[Any]:
    """Of the last mark of a kind, pointed at and then with the focus: what lies over its box. A box lets the pointer
    through, so that it hides no neighbour; to be found it must not."""
    page = window.page
    page.add_style_tag(content=".redline-chart .tip { pointer-events: auto !important; }")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": 2400})  # the box is in view as well
    mark = page.locator(f'.hot[data-kind="{kind}"]').locator("visible=true").last
    grip = mark.locator(".grip")
    grip.scroll_into_view_if_needed()
    grip.hover(force=True, position={"x": 3, "y": 3})
    pointed = mark.evaluate("(mark, topmost) => eval(topmost)([mark, 5])", TOPMOST)
    page.mouse.move(1, 1)
    mark.focus()
    return [*pointed, *mark.evaluate("(mark, topmost) => eval(topmost)([mark, 5])", TOPMOST)]


@pytest.mark.parametrize("width", [1100, 360])
@pytest.mark.parametrize(
    ("name", "kind"), [("ladder", "rung"), ("long", "rung"), ("lint", "pair"), ("profile", "bar"), ("tune", "gain")]
)
def test_nothing_lies_over_a_box_of_figures(name: str, kind: str, width: int, opened: Any) -> None:
    """The last mark's box reaches over what follows its chart."""
    assert covered_tips(opened(name, width=width, bypass_csp=True), kind) == []


def test_limits_are_lines_or_words_at_every_width(opened: Any) -> None:
    cases = (("record", 1100, True), ("record", 360, False), ("long", 1100, False), ("ladder", 1100, False))
    for name, width, drawn in cases:  # those of a tiny model are far above its steps
        window = opened(name, width=width)
        count = "lines => lines.filter(line => line.checkVisibility()).length"
        lines = window.page.eval_on_selector_all("svg line.limit", count)
        keys = window.page.locator(".key i.limit").locator("visible=true").count()
        words = window.page.locator("p.limits").locator("visible=true").count()
        assert (bool(lines), bool(keys), bool(words)) == (drawn, drawn, not drawn), (name, width)


def test_words_of_a_table_have_the_width_of_a_phone(opened: Any) -> None:
    widths = opened("lint", width=360).page.eval_on_selector_all(
        "td.detail, td.words",
        """cells => cells.filter(c => c.checkVisibility())
            .map(c => [c.getBoundingClientRect().width, getComputedStyle(c).textAlign])""",
    )
    assert widths
    assert {align for _, align in widths} == {"left"}
    assert min(width for width, _ in widths) > 250


def test_the_first_printed_page_holds_the_ladder(opened: Any) -> None:
    """A4 less the margins of a browser is some 718 by 1045 px: a chart that does not fit leaves half a page blank."""
    window = opened("record", width=718)
    window.page.emulate_media(media="print")
    card = window.page.locator("#ladder ~ .card").first.bounding_box()
    assert card["y"] + card["height"] < 1045


def test_the_keyboard_reaches_the_marks_and_shows_them_too(opened: Any) -> None:
    window = opened("ladder")
    window.page.locator(".skip").first.focus()
    names = []
    for _ in range(3):
        window.page.keyboard.press("Tab")
        focused = window.page.evaluate("({...document.activeElement.dataset, label: document.activeElement.ariaLabel})")
        names.append(focused["rung"])
        assert focused["label"].startswith(f"{focused['rung']}; ")
        (shown,) = window.page.locator(".tip").locator("visible=true").all_text_contents()
        assert focused["rung"] in shown
    assert names == ["baseline", "tf32", "no-sync"]


@pytest.mark.parametrize("name", PAGES)
def test_everything_that_takes_the_focus_has_a_name(name: str, opened: Any) -> None:
    nameless = opened(name).page.evaluate(
        """() => [...document.querySelectorAll('a, button, summary, [tabindex]')].filter(element =>
            !(element.ariaLabel || element.textContent.trim())).map(element => element.outerHTML.slice(0, 80))"""
    )
    assert nameless == []


CONTRAST = """() => {
    const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const paper = light(parse(getComputedStyle(document.body).backgroundColor));
    const card = light(parse(getComputedStyle(document.querySelector('.card')).backgroundColor));
    const found = {paper};
    for (const [name, selector] of Object.entries(
            {ink: 'h1', muted: '.quiet', good: 'td.rounding', tick: '.wide .tick', limit: '.wide text.limit'})) {
        const element = document.querySelector(selector);
        const style = getComputedStyle(element);
        const colour = element.namespaceURI.includes('svg') ? style.fill : style.color;
        found[name] = ratio(light(parse(colour)), element.closest('.card, table') ? card : paper);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_reader_wants_and_can_be_read(scheme: str, opened: Any) -> None:
    found = opened("ladder", color_scheme=scheme).page.evaluate(CONTRAST)
    paper = found.pop("paper")
    assert paper > 0.8 if scheme == "light" else paper < 0.05
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}, "WCAG AA"


@pytest.mark.parametrize("name", ["ladder", "tune", "train", "profile"])
def test_planted_markup_stays_text(name: str, opened: Any) -> None:
    window = opened(name)
    assert window.page.evaluate("window.planted") is None
    assert window.page.locator("img").count() == 0
    assert window.page.locator("script").count() == 1
    assert PLANTED in window.page.locator("main").text_content()


def test_even_a_script_that_got_in_would_not_run(opened: Any) -> None:
    """The page's policy names the hash of its own script."""
    window = opened("ladder")
    window.page.evaluate(
        """() => { const script = document.createElement('script');
                   script.textContent = 'window.planted = true'; document.body.appendChild(script); }"""
    )
    assert window.page.evaluate("window.planted") is None
    assert any("Content Security Policy" in complaint for complaint in window.complaints)


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_does_not_scroll_sideways(name: str, opened: Any) -> None:
    window = opened(name, width=360)
    window.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    wide = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert window.page.evaluate(wide) == [360, 360]
    for grip in window.page.locator(".hot > .grip").locator("visible=true").all()[:30:3]:
        grip.hover(force=True)
        assert window.page.evaluate(wide) == [360, 360]


@pytest.mark.parametrize("name", PAGES)
def test_no_window_scrolls_sideways(name: str, opened: Any) -> None:
    page = opened(name).page
    for width in (480, 721, 800, 921, 1000, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_text_is_copied_and_the_buttons_are_there_only_where_they_work(opened: Any, run: Path) -> None:
    window = opened("ladder", permissions=["clipboard-read", "clipboard-write"])
    command = json.loads((run / "run.json").read_text())["command"]
    button = window.page.locator('button[data-copy="command"]')
    button.click()
    button.get_by_text("copied").wait_for()
    assert window.page.evaluate("navigator.clipboard.readText()") == command
    window.page.locator('button[data-copy="facts-text"]').click()
    window.page.locator('button[data-copy="facts-text"]').get_by_text("copied").wait_for()
    assert "device: NVIDIA H200" in window.page.evaluate("navigator.clipboard.readText()")
    still = opened("ladder", java_script_enabled=False)
    assert [one.is_visible() for one in still.page.locator("button.copy").all()] == [False] * 3
    assert still.page.locator("svg.redline-chart").first.is_visible()
    assert command in still.page.locator("main").text_content()


def test_it_prints(opened: Any) -> None:
    window = opened("ladder")
    window.page.emulate_media(media="print")
    assert not window.page.locator("button.copy").first.is_visible()
    assert window.page.locator(".wide svg").first.is_visible()
    assert window.page.pdf().startswith(b"%PDF")


def test_two_hundred_trials_are_all_there(opened: Any) -> None:
    window = opened("tune")
    trials = window.marks("trial")
    assert len({mark["number"] for mark in trials}) == len(trials) == 200
    assert window.page.locator("#table ~ .scroll tbody").count() == 200
    assert window.page.evaluate("document.querySelectorAll('*').length") < 20_000


def test_pictures_are_taken_of_a_record(browser: Any, tmp_path: Path, repository: Path) -> None:
    """In a process of its own: Playwright drives one browser per thread."""
    import subprocess
    import sys

    record = repository / "records" / "2026-11-15-h200-ladder-gpt2-b16.json"
    command = [sys.executable, str(repository / "tools" / "screenshots.py"), str(record), str(tmp_path / "in" / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    parts, schemes = ("ladder", "memory", "training"), ("light", "dark")
    assert set(found) == {f"x-{part}-{scheme}.png" for part in parts for scheme in schemes}
    assert all(picture.startswith(b"\x89PNG") and len(picture) < 200_000 for picture in found.values())
    assert found["x-ladder-light.png"] != found["x-ladder-dark.png"]
