"""Takes pictures of a ladder's page for the README and the docs, light and dark, with Debian's Chromium.

    python tools/screenshots.py records/2026-11-16-h200-ladder-gpt2-b64.json docs/images/h200

writes docs/images/h200-ladder-light.png, -ladder-dark.png, and the same for memory and training. What the page draws
but an older record lacks (limits, the memory's anatomy) is computed from its recipes. Needs Chromium and the Python
package playwright (`pip install playwright`; its own browsers are not needed).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.core.errors import UserError
from redline.report.page import render_page
from redline.search.limits import with_limits

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH_PX, SCALE = 1060, 1.3
MARGIN_PX = 12
MOST_BYTES = 200_000  # a README that takes longer to load than to read helps nobody
LEFT_OUT = "#next, .todo { display: none } .figures + h2, .todo + h2 { margin-top: 28px }"  # the picture is of a result
# Each shot goes from the top of the first element to the bottom of the second.
SHOTS = {
    "ladder": (".figures", "#ladder ~ .card"),
    "memory": ("#memory", "#memory ~ .card"),
    "training": ("#training", "#training ~ .card"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Take pictures of a ladder's page, light and dark.")
    parser.add_argument("record", type=Path, help="a document of `redline ladder --json`")
    parser.add_argument("prefix", type=Path, help="where the pictures go, such as docs/images/h200")
    options = parser.parse_args(arguments)
    try:
        document = json.loads(options.record.read_text(encoding="utf-8"))
        for path, picture in pictures(render_page(with_limits(document))):
            target = options.prefix.with_name(f"{options.prefix.name}-{path}.png")
            check_size(target, picture)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(picture)
            print(f"wrote {target.as_posix()}, {len(picture):,} bytes")
    except UserError as mistake:
        print(f"problem: {mistake.problem}\nwhy:     {mistake.why}\nfix:     {mistake.fix}", file=sys.stderr)
        return 2
    return 0


def check_size(target: Path, picture: bytes) -> None:
    if len(picture) > MOST_BYTES:
        raise UserError(
            f"{target.name} has {len(picture):,} bytes",
            f"pictures stay under {MOST_BYTES:,}, so that the README opens at once",
            "lower SCALE in tools/screenshots.py",
        )


def find_browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(
            "no browser to take pictures with", f"none of {', '.join(BROWSERS)} is here", "apt-get install chromium"
        )
    return found


def pictures(html: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, PNG) of every shot in both colour schemes."""
    from playwright.sync_api import sync_playwright

    browser_path = find_browser()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "report.html"
        file.write_text(html, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=browser_path)
        for scheme in ("light", "dark"):
            view: dict[str, Any] = {"viewport": {"width": WIDTH_PX, "height": 900}, "device_scale_factor": SCALE}
            page = browser.new_page(color_scheme=scheme, **view)
            page.goto(file.as_uri())
            page.add_style_tag(content=LEFT_OUT)
            for name, (first, last) in SHOTS.items():
                yield f"{name}-{scheme}", picture_of(page, first, last)
        browser.close()


def picture_of(page: Page, first: str, last: str) -> bytes:
    top, bottom = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
    if top is None or bottom is None:
        raise UserError(f"the page has no {first}", "the record lacks what is drawn there", "take another record")
    end = bottom["y"] + bottom["height"] + MARGIN_PX
    start = max(0.0, top["y"] - MARGIN_PX)
    area: Any = {"x": 0, "y": start, "width": WIDTH_PX, "height": end - start}
    shot: bytes = page.screenshot(full_page=True, clip=area)
    return shot


if __name__ == "__main__":
    sys.exit(main())
