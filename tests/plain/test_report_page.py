"""The page is one file that loads nothing, says everything the document says, and keeps foreign text text."""

from __future__ import annotations

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from redline.report.page import VERDICT_MEANINGS, date_text, headline_figures, proof_view, render_page, short_kernel

DOCUMENTS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_documents.py")))
full_document = DOCUMENTS["full_document"]
VOID = {"meta", "br", "hr", "link", "img", "input"}


class Outline(HTMLParser):
    """Tags in order, their attributes, the text; fails on a tag that closes another."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.mark.parametrize("name", DOCUMENTS["DOCUMENTS"])
def test_page_is_well_formed_and_loads_nothing(name: str) -> None:
    outline = Outline(render_page(DOCUMENTS["DOCUMENTS"][name]()))
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not {"src", "href"} & {key for key, _ in outline.attributes}
    assert not [key for key, _ in outline.attributes if key.startswith("on")]


def test_styles_load_nothing() -> None:
    assert not re.search(r"url\(|@import|https?:(?!//www\.w3\.org/2000/svg)", render_page(full_document()))


def test_planted_script_stays_text() -> None:
    document = full_document()
    document["rows"][7]["reason"] = DOCUMENTS["SCRIPT"]
    page = render_page(document)
    assert "<script" not in page
    assert DOCUMENTS["SCRIPT"] in Outline(page).text


def test_headline_is_best_speedup_and_mfu_with_its_convention() -> None:
    figures = headline_figures(full_document())
    assert [figure for figure, _, _ in figures] == ["650,159", "5.50×", "56.2 %"]
    assert figures[2][2] == DOCUMENTS["CONVENTION"]
    assert len(headline_figures(DOCUMENTS["unknown_device_document"]())) == 2


def test_page_says_everything() -> None:
    text = Outline(render_page(full_document())).text
    wanted = (
        "gpt2 on NVIDIA H200",
        "2026-11-15 03:00 UTC",
        "failed: " + DOCUMENTS["LONG_REASON"],
        "largest gap 0.0031",
    )
    wanted += (
        "flash_fwd_kernel",
        "redline ladder gpt2",
        "torch",
        "2.11.0",
        "within-run",
        "not kept: slower than bf16: 0.98x",
    )
    wanted += ("check steps", "540 MiB", "48.2 s", "132")
    assert [part for part in wanted if part not in text] == []


def test_alarms_come_before_the_headline() -> None:
    document = full_document()
    document["finished"] = False
    page = render_page(document)
    start = page.index("<main>")
    assert page.index("DIFFERENT", start) < page.index("This run was interrupted") < page.index('<div class="figures">')
    calm = {**document, "finished": True, "rows": document["rows"][:3]}
    assert 'role="alert"' not in render_page(calm)


def test_rows_of_the_table_are_the_rows_of_the_document() -> None:
    page = render_page(full_document())
    body = page.split("<table>")[1].split("</table>")[0]
    names = re.findall(r'<th scope="row"[^>]*>([^<]+)</th>', body)
    assert names == [row["rung"] for row in full_document()["rows"]]


def test_proof_leaves_out_what_nobody_knows() -> None:
    view = proof_view([DOCUMENTS["ok_row"]("tf32", 10.0, 1.0, hfu=None, kernels=None)])
    assert view["columns"] == ["peak", "predicted", "outside"]
    assert proof_view([{"rung": "tf32", "status": "ok"}])["rows"] == []


CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (CUDNN, "cudnn sdpa sm90 flash"),
        (CUDNN.replace("fprop", "bprop"), "cudnn sdpa sm90 flash"),
        (CUDNN.replace("sm90", "sm100"), "cudnn sdpa sm100 flash"),
        ("pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_fwd_kernel"),
        (
            "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
            "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        ),
        ("bmm + softmax", "bmm + softmax"),
        ("cudnn_generated_", "cudnn "),
    ],
)
def test_a_kernel_is_called_as_people_call_it(name: str, short: str) -> None:
    assert short_kernel(name) == short


def test_a_shortened_kernel_is_whole_in_its_tooltip() -> None:
    document = full_document()
    document["rows"][6]["kernels"] = {"attention": CUDNN, "matmul": 'nvjet_"sm90"'}
    page = render_page(document)
    assert f'title="{CUDNN}">cudnn sdpa sm90 flash</td>' in page
    assert CUDNN not in Outline(page).text
    assert page.count('title="nvjet') == 0, "what is not shortened needs no second telling"


def test_same_promises_no_more_than_was_compared() -> None:
    """A loader is compared with the same steps without it, at bf16 too: its bits are not those of the reference."""
    assert VERDICT_MEANINGS["same"] != "bit for bit the reference"
    assert "from the steps without it" in VERDICT_MEANINGS["same"]
    assert VERDICT_MEANINGS["same"] in Outline(render_page(full_document())).text


def test_every_figure_carries_its_column_name_for_windows_too_narrow_for_columns() -> None:
    page = render_page(full_document())
    tables = re.findall(r"<table>.*?</table>", page, flags=re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        columns = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', table)
        cells = re.findall(r"<td([^>]*)>", table.split("</thead>")[1])
        assert cells
        labels = {label for cell in cells for label in re.findall(r'data-label="([^"]*)"', cell)}
        assert labels <= set(columns)
        assert labels >= set(columns) - {"rung", "detail"}
        for cell in cells:  # words that explain themselves take the whole width; what is empty is left out
            assert "data-label" in cell or re.search(r'class="(reason|detail)"|colspan', cell) or cell == "", cell
    narrow = page.split("@media screen and (max-width: 920px) {")[1].split("@media")[0]
    for rule in ("content: attr(data-label)", "overflow: visible", "thead { display: none; }", "display: grid"):
        assert rule in narrow


def test_a_reason_stays_with_its_rung_in_a_narrow_window() -> None:
    """A body is a card there: one for each rung, the reason in it."""
    table = re.findall(r"<table>.*?</table>", render_page(full_document()), flags=re.DOTALL)[0]
    bodies = re.findall(r"<tbody>.*?</tbody>", table, flags=re.DOTALL)
    assert len(bodies) == 12
    (fp16,) = [body for body in bodies if ">fp16<" in body]
    assert "not kept: slower than bf16: 0.98x" in fp16
    (failed,) = [body for body in bodies if ">cudnn-attention<" in body]
    assert DOCUMENTS["LONG_REASON"] in failed


def test_page_adapts_to_dark_phone_and_paper() -> None:
    page = render_page(full_document())
    for rule in (
        "prefers-color-scheme: dark",
        "max-width: 720px",
        "@media print",
        "overflow-x: auto",
        'name="viewport"',
    ):
        assert rule in page


@pytest.mark.parametrize(
    ("date", "shown"), [("2026-11-15T03:00:00+00:00", "2026-11-15 03:00 UTC"), ("last week", "last week"), (None, "")]
)
def test_dates(date: str | None, shown: str) -> None:
    assert date_text({"date": date}) == shown
