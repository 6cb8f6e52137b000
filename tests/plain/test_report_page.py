"""The page is one file that loads nothing, says everything the document says, and keeps foreign text text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import runpy
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from redline.report.next_steps import LADDER_RULES, SHOWN, ladder_steps
from redline.report.page import (
    MEMORY_PARTS,
    SCRIPT,
    VERDICT_MEANINGS,
    date_text,
    fact_groups,
    headline_figures,
    proof_view,
    render_page,
    short_kernel,
)

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
        self.scripts: list[str] = []
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
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data


def assert_loads_nothing(outline: Outline) -> None:
    """One script, our own; links that stay on the page; no handler in an attribute."""
    assert not {"link", "img", "iframe", "object", "base", "form", "use", "image"} & set(outline.tags)
    assert outline.tags.count("script") == 1
    assert outline.scripts == [SCRIPT]
    attributes = dict(outline.attributes)
    assert not {"src", "xlink:href", "style"} & set(attributes)
    assert all((value or "").startswith("#") for key, value in outline.attributes if key == "href")
    assert not [key for key in attributes if key.startswith("on")]


@pytest.mark.parametrize("name", DOCUMENTS["DOCUMENTS"])
def test_page_is_well_formed_and_loads_nothing(name: str) -> None:
    outline = Outline(render_page(DOCUMENTS["DOCUMENTS"][name]()))
    assert_loads_nothing(outline)


def test_styles_load_nothing() -> None:
    assert not re.search(r"url\(|@import|https?:(?!//www\.w3\.org/2000/svg)", render_page(full_document()))


def test_planted_script_stays_text() -> None:
    document = full_document()
    document["rows"][7]["reason"] = DOCUMENTS["SCRIPT"]
    page = render_page(document)
    outline = Outline(page)
    assert_loads_nothing(outline)
    assert DOCUMENTS["SCRIPT"] in outline.text


def test_the_policy_lets_our_script_run_and_no_other() -> None:
    page = render_page(full_document())
    (policy,) = [value for _, value in Outline(page).attributes if "default-src" in (value or "")]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert f"<script>{SCRIPT}</script>" in page


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


def test_rows_that_nobody_could_check_are_not_nothing() -> None:
    """Of a model that draws random numbers, say: measured, and no best; and what was not compiled stands there too."""
    document = full_document()
    document["best"] = None
    for row in document["rows"]:
        if row["status"] == "ok":
            row["equivalence"] = {"class": "rounding-only", "verdict": "not-checked", "detail": "my.py:19 draws"}
    first = next(row for row in document["rows"] if row["status"] == "ok")
    first["compile_note"] = "compiled in 3 graphs: my.py:16: print"
    text = Outline(render_page(document)).text
    assert "measured, and none could be checked" in text
    assert "my.py:19 draws" in text
    assert "compiled in 3 graphs: my.py:16: print" in text


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
    assert {"peak", "predicted"} & set(proof_view(rich_document()["rows"])["columns"]) == set(), (
        "the memory panel has them"
    )


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


# --- memory, limits, what to do next ----------------------------------------------------------------------------------

GIB = 1024**3


def rich_document() -> dict[str, Any]:
    """With everything that a document may hold: limits, anatomies, and each rung at its own micro batch."""
    document = full_document()
    for row in document["rows"]:
        if row["status"] != "skipped":
            row["memory"] = {
                "moment": "backward of the loss",
                **{part: GIB * size for size, part in enumerate(MEMORY_PARTS, 1)},
            }
        if row["status"] == "ok":
            rate = row["tokens_per_second"]
            row["roofline"] = {"light": 1_300_000.0, "expected": 900_000.0, "floor": 2e6}
            row["rebatched"] = {
                "status": "ok",
                "reason": "the fastest of 3 sizes",
                "micro_batch": 48,
                "tokens_per_second": 1.2 * rate,
                "speedup_fixed": 1.2,
            }
    best = document["best"]
    own = {"rung": best["rung"], "micro_batch": 48, "tokens_per_second": 1.2 * best["tokens_per_second"]}
    limits = [{"name": "data-sheet peak", "tflops": 989.4, "tokens_per_second": 1_157_000.0, "source": "a sheet"}]
    return {**document, "limits": limits, "best_rebatched": own}


def test_memory_is_shown_by_part_beside_what_was_measured() -> None:
    page = render_page(rich_document())
    outline = Outline(page)
    assert_loads_nothing(outline)
    bars = re.findall(r'data-kind="bar" data-name="([^"]+)" data-total="([^"]+)"(?: data-marker="(\d+)")?', page)
    assert len(bars) == 2 * 11, "eleven rungs ran or failed, each in two widths"
    assert {float(total) for _, total, _ in bars} == {21.0 * GIB}
    markers = {name: marker for name, _, marker in bars}
    assert markers["flash"] == str(int(24.2 * GIB))
    assert markers["cudnn-attention"] == "", "it failed: nothing was measured"
    flash = "flash; measured 24.2 GiB, predicted 21.0 GiB (-13.2%); weights 1.00 GiB; gradients 2.00 GiB"
    assert flash in page
    assert "fullest at the backward of the loss" in page
    assert 'id="memory"' not in render_page(full_document()), "no anatomy, no panel"


def test_time_is_shown_by_what_it_goes_into() -> None:
    document = full_document()
    assert 'id="time"' not in render_page(document), "nobody profiled, no panel"
    row = next(row for row in document["rows"] if row["status"] == "ok")
    row["kernels"] = {"attention": None, "groups": {"tensor contraction": 0.030, "attention": 0.008, "idle": 0.002}}
    page = render_page(document)
    assert 'id="time"' in page
    assert "40.0 ms a step" in page
    assert "tensor contraction 30.0 ms, 75%" in page
    assert "<th" in page.split('id="time"')[1].split('id="training"')[0], "a table beside the chart"


@pytest.mark.parametrize("key", ["limits", "best_rebatched", "roofline", "memory", "rebatched"])
def test_what_a_document_may_lack(key: str) -> None:
    for empty in (None, {}):
        document = rich_document()
        document = {**document, key: empty} if key in document else document
        document["rows"] = [{**row, key: empty} if key in row else row for row in document["rows"]]
        text = Outline(render_page(document)).text
        assert "None" not in text
        assert "gpt2 on NVIDIA H200" in text


def words_of(document: dict[str, Any]) -> list[str]:
    return [step.what for step in ladder_steps(document)]


def right_rows(document: dict[str, Any]) -> dict[str, Any]:
    """Without what is wrong or failed: those come first."""
    bad = ("tied-weights", "cudnn-attention")
    return {**document, "rows": [row for row in document["rows"] if row["rung"] not in bad]}


def test_what_is_wrong_comes_first_and_there_are_three() -> None:
    document = rich_document()
    assert words_of(document) == [
        "Leave out tied-weights",
        "See why cudnn-attention failed",
        "Train at micro batch 48",
    ]
    assert words_of({**document, "finished": False})[1] == "Finish the ladder"
    page = Outline(render_page(document)).text
    for step in ladder_steps(document):
        assert step.what in page
        assert step.why in page
        assert step.command in page
    assert len(ladder_steps(document)) == SHOWN


def test_a_larger_batch_is_proposed_where_there_is_room_and_taken_where_it_paid() -> None:
    document = right_rows(rich_document())
    (step,) = [step for step in ladder_steps(document) if step.what.startswith("Train at")]
    assert "780,190 tokens/s with fused-adamw, 1.20x" in step.why
    assert step.command == "redline train gpt2 --recipe best-rebatched.json", "it came alone: the recipe is on the page"
    (step,) = [step for step in ladder_steps({**document, "directory": "runs/a b"}) if step.what.startswith("Train at")]
    assert step.command == "redline train gpt2 --recipe 'runs/a b/best-rebatched.json'"
    nobody_looked = {**document, "best_rebatched": None}
    (step,) = [step for step in ladder_steps(nobody_looked) if step.what.startswith("Try larger")]
    assert "31.4 GiB of 140 GiB" in step.why
    full = {**nobody_looked, "hardware": {**document["hardware"], "memory_bytes": 40 * GIB}}
    assert not [step for step in ladder_steps(full) if "larger" in step.what]
    no_gain = {**document, "best_rebatched": {**document["best_rebatched"], "tokens_per_second": 650_200.0}}
    assert not [step for step in ladder_steps(no_gain) if step.what.startswith(("Train at", "Try larger"))]


def test_the_gap_and_the_noise_are_named_with_their_figures() -> None:
    document = right_rows({**rich_document(), "best_rebatched": None})
    document["hardware"]["memory_bytes"] = None
    gap, noise, search = ladder_steps(document)
    assert "fused-adamw reaches 50 % of its recipe's speed of light (1,300,000 tokens/s)" in gap.why
    assert noise.what == "Find out whether no-sync pays"
    assert "repeats measure it" in noise.why, "they need not make it smaller"
    assert search.what == "Search beyond the ladder"
    repeated = {**document, "settings": {"repeats": 3}}
    assert "no-sync" not in " ".join(words_of(repeated))
    slow = document["rows"][1]["step_seconds"]
    slow["p90"] = 3 * slow["p10"]
    assert words_of(document)[0] == "Measure again on a quiet machine"


def test_neither_the_first_row_nor_a_second_measurement_is_a_rung_to_leave_out_or_to_doubt() -> None:
    """`--without a/a` is a mistake, and `--without baseline` does nothing."""
    document = right_rows({**rich_document(), "best_rebatched": None})
    wrong = {"verdict": "different", "detail": "not the same"}
    again = {**document["rows"][-1], "rung": "a/a", "kept": None, "within_noise": True}
    document["rows"] = [row for row in document["rows"] if not row.get("within_noise")]
    for changes in ({"within_noise": True}, {"equivalence": wrong}):
        first, *others = document["rows"]
        rows = [{**first, **changes}, *others, {**again, **changes}]
        steps = [step for rule in LADDER_RULES for step in rule({**document, "rows": rows})]
        assert not [step for step in steps if step.what.startswith(("Leave out", "Find out"))]


def commands_of(document: dict[str, Any]) -> dict[str, str]:
    """By the first two words of what to do, every command that any rule has."""
    steps = [step for rule in LADDER_RULES for step in rule(document)]
    return {" ".join(step.what.split()[:2]): step.command for step in steps}


def test_commands_have_the_options_that_were_used_and_the_real_folder() -> None:
    document = {**rich_document(), "directory": "runs/mine", "best_rebatched": None, "finished": False}
    document["command"] = (
        "redline ladder gpt2 --micro-batch 8 --without fp16 --data 'my novel.txt' --out runs/mine --json"
    )
    document["workload"]["corpus"] = "my novel.txt"
    commands = commands_of(document)
    again = "redline ladder gpt2 --micro-batch 8"
    assert commands["Leave out"] == f"{again} --data 'my novel.txt' --without fp16,tied-weights"
    assert commands["Finish the"] == "redline ladder --resume runs/mine"
    assert commands["Try larger"] == f"{again} --without fp16 --data 'my novel.txt' --rebatch"
    assert commands["Find out"] == f"{again} --without fp16 --data 'my novel.txt' --repeats 3 --aa"
    assert commands["See where"] == "redline profile gpt2 --recipe runs/mine/best.json --data 'my novel.txt'"
    assert commands["Train with"] == "redline train gpt2 --recipe runs/mine/best.json --data 'my novel.txt'"
    assert not [command for command in commands.values() if "DIR" in command]
    assert commands_of({**document, "finished": True})["Search beyond"] == "redline tune gpt2 --data 'my novel.txt'"


@pytest.mark.parametrize("command", ["redline.ladder()", "redline ladder --resume runs/mine", 'a "quote', "", None])
def test_a_run_from_python_or_one_resumed_is_climbed_again_from_its_fields(command: str | None) -> None:
    document = {**rich_document(), "command": command, "settings": {"start": {"rungs": [], "micro_batch": 12}}}
    document["workload"]["shape"].update(sequence=512, max_positions=1024)
    again = "redline ladder gpt2 --micro-batch 12 --sequence 512"
    assert commands_of(document)["Leave out"] == f"{again} --without tied-weights"


def test_options_that_are_written_with_an_equals_sign_are_seen() -> None:
    typed = "redline ladder gpt2 --without=fp16 --device=cuda --out=x"
    commands = commands_of({**rich_document(), "command": typed})
    assert commands["Leave out"] == "redline ladder gpt2 --device=cuda --without fp16,tied-weights"
    assert commands["Train with"] == "redline train gpt2 --recipe best.json --device cuda"


def test_no_command_is_given_twice() -> None:
    """Noise and a machine that was not quiet are both settled by repeats."""
    document = right_rows({**rich_document(), "best_rebatched": None})
    document["hardware"]["memory_bytes"] = None
    document["rows"] = [{**row, "roofline": None} for row in document["rows"]]
    slow = document["rows"][1]["step_seconds"]
    slow["p90"] = 3 * slow["p10"]
    every = commands_of(document)
    assert every["Measure again"] == every["Find out"]
    shown = [step.command for step in ladder_steps(document)]
    assert len(shown) == len(set(shown)) == SHOWN
    assert words_of(document) == ["Measure again on a quiet machine", "Search beyond the ladder", "Train with it"]


def test_a_peak_that_cannot_be_right_leaves_no_room_to_speak_of() -> None:
    document = right_rows({**rich_document(), "best_rebatched": None})
    (row,) = [row for row in document["rows"] if row["rung"] == "fused-adamw"]
    row.update(peak_bytes=GIB, predicted_peak_bytes=30 * GIB)
    assert not [step for step in ladder_steps(document) if "larger" in step.what]


def test_names_from_outside_cannot_reach_a_shell_command() -> None:
    document = {**rich_document(), "command": "redline ladder 'a; b' $(c)", "directory": "x; rm -rf ~"}
    document["workload"]["name"] = "x; rm -rf ~"
    for command in filter(None, commands_of(document).values()):
        assert shlex.join(shlex.split(command)) == command, "nothing but words"
    assert "'x; rm -rf ~'" in commands_of({**document, "command": None})["Leave out"]
    assert commands_of(document)["Leave out"] == "redline ladder 'a; b' '$(c)' --without tied-weights"


def test_limits_are_told_in_words_where_no_line_is_drawn() -> None:
    document = rich_document()
    (words,) = re.findall(r'<p class="quiet limits([^"]*)">([^<]*)</p>', render_page(document))
    assert words[0] == " narrow", "the wide chart has the lines"
    assert "1,157,000 tokens/s" in words[1]
    assert "speed of light of the recipe up to fused-adamw: 1,300,000 tokens/s" in words[1]
    row = document["rows"][1]
    long = {**document, "rows": [{**row, "rung": f"rung-{index}"} for index in range(18)]}
    (words,) = re.findall(r'<p class="quiet limits([^"]*)">([^<]*)</p>', render_page(long))
    assert words[0] == "", "bars have none at any width"
    assert 'class="quiet limits' not in render_page(full_document())


def test_settings_are_written_as_people_write_them() -> None:
    document = full_document()
    document["workload"] |= {"seed": 1337, "source": {"kind": "gpt2", "config": None, "model_type": "x"}}
    document["settings"] = {"memory_limit": 2 * GIB, "seed": 1337, "start": {"rungs": [], "micro_batch": 1600}}
    facts = {title: dict(lines) for title, lines in fact_groups(document)}
    assert facts["Workload"]["model code"] == "gpt2"
    assert "source" not in facts["Workload"], "where a config lies on this disk is no fact of the model"
    assert facts["Workload"]["seed"] == facts["Settings"]["seed"] == "1337"
    assert facts["Settings"]["memory limit"] == "2.00 GiB"
    assert facts["Settings"]["start"] == "micro batch 1,600"


def test_the_recipe_is_that_of_the_best_row_and_can_be_copied() -> None:
    document = full_document()
    page = render_page(document)
    text = re.search(r'<code id="recipe-text">([^<]+)</code>', page)
    assert text is not None
    recipe = json.loads(text[1].replace("&#34;", '"'))
    assert recipe == {"rungs": ["fused-adamw"], "micro_batch": 16}
    ids = {value for key, value in Outline(page).attributes if key == "id"}
    wanted = {value for key, value in Outline(page).attributes if key == "data-copy"}
    assert wanted == {"command", "recipe-text", "facts-text"}
    assert wanted <= ids
    assert {value[1:] for key, value in Outline(page).attributes if key == "href" and value} <= ids
    assert "The recipe" not in Outline(render_page({**document, "best": None})).text


def test_what_was_seen_of_a_users_model_does_not_flood_the_facts() -> None:
    document = full_document()
    document["workload"]["shape"] = {
        "unit": "sample",
        "sequence": None,
        "products": [{"m": 12345}],
        "flops": {"k": 54321},
    }
    text = Outline(render_page(document)).text
    assert "sample" in text
    assert "12,345" not in text
    assert "54,321" not in text
