"""The table fits, loses nothing, says why a column is missing; the README's table has the same columns."""

from __future__ import annotations

import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.core.units import UNKNOWN
from redline.report.markdown import markdown_table
from redline.report.table import (
    COLUMNS,
    best_text,
    cells_of,
    ladder_table,
    notes_of,
    print_ladder,
    shed_columns,
    shown_columns,
    speed_bars,
    workload_text,
)

DOCUMENTS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_documents.py")))
full_document, ok_row, LONG_REASON = (DOCUMENTS[name] for name in ("full_document", "ok_row", "LONG_REASON"))

OF_RANKS = {"comm ms", "lag ms"}


def printed(document: dict[str, Any], width: int, color: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    print_ladder(document, console)
    return console.file.getvalue()


def table_lines(document: dict[str, Any], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(ladder_table(document, width))
    return console.file.getvalue().splitlines()


def widest_document() -> dict[str, Any]:
    """The longest text every column can meet."""
    seconds = {"median": 12.034, "p10": 9.0, "p90": 15.0, "n": 10}
    figures = {"tokens_per_second": 1234567.0, "speedup_total": 123.456, "step_seconds": seconds, "mfu": 0.536}
    row = ok_row("cudnn-attention", 25.0, 1.0, kept=False, within_noise=True, reason="slower", **figures)
    return {**full_document(), "rows": [{**row, "equivalence": {"verdict": "not-checked"}}]}


@pytest.mark.parametrize("make", [full_document, widest_document])
def test_at_100_columns_every_cell_is_whole(make: Any) -> None:
    document = make()
    lines = table_lines(document, 100)
    assert shed_columns(document, 100) == []
    assert max(map(len, lines)) <= 100
    assert len(lines) == 2 + len(document["rows"]), "a row takes one line"
    for row, line in zip(document["rows"], lines[2:], strict=True):
        assert line.split() == " ".join(cells_of(row, shown_columns(document))).split()


def test_at_80_columns_numbers_stay_whole_and_the_missing_columns_are_named() -> None:
    document = full_document()
    lines = table_lines(document, 80)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 14
    assert shed_columns(document, 80) == ["±", "loss"]
    assert "80 columns leave no room for: ±, loss" in printed(document, 80)


def test_table_made_for_100_loses_no_digit_at_80() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(ladder_table(full_document()))
    text = console.file.getvalue()
    assert "cudnn-attention" in text
    assert "…" not in text


def test_cells_say_what_the_row_says() -> None:
    row = ok_row("tf32", 72.3, 1.916, within_noise=True)
    cells = dict(zip((column.name for column in COLUMNS), cells_of(row, COLUMNS), strict=True))
    assert cells["ms/step"] == "72.3"
    assert cells["±"] == "±1.1%"  # (1.012 - 0.991) / 2
    assert cells["tok/s"] == "226,611"
    assert (cells["step"], cells["total"]) == ("~1.92x", "1.92x")
    assert (cells["MFU"], cells["peak"]) == ("19.6 %", "31.4 GiB")
    assert (cells["loss"], cells["verdict"]) == ("10.97→7.54", "rounding")


@pytest.mark.parametrize("width", [100, 80, 50])
def test_reasons_are_never_lost(width: int) -> None:
    text = "".join(printed(full_document(), width).split())  # wrapping may break a line anywhere
    assert "".join(LONG_REASON.split()) in re.sub(r"cudnn-attention(?=driver)", "", text)
    assert "notkept:slowerthanbf16:0.98x" in text


def test_columns_nobody_can_fill_are_left_out_with_the_reason() -> None:
    document = DOCUMENTS["unknown_device_document"]()
    missing = {column.name for column in COLUMNS} - {column.name for column in shown_columns(document)}
    assert missing == {"MFU", "peak", *OF_RANKS}
    text = " ".join(printed(document, 200).split())
    assert "MFU column left out: no data-sheet peak is known for AMD EPYC 9R14" in text
    assert "peak column left out: AMD EPYC 9R14 did not report its peak memory" in text
    assert "comm" not in text, "one process has nobody to talk to: nothing is missing"


def test_several_ranks_have_their_columns_at_100() -> None:
    sharing = {"communication_seconds": 0.0555, "exposed_seconds": 0.0403, "straggler_seconds": 0.0011}
    document = {**full_document(), "rows": [{**row, "sharing": sharing} for row in full_document()["rows"]]}
    document["hardware"] = {**document["hardware"], "ranks": 8}
    lines = table_lines(document, 100)
    assert max(map(len, lines)) <= 100
    assert "comm ms" in lines[0]
    assert "40.3/55.5" in lines[2]
    text = " ".join(printed(document, 100).split())
    assert "8 ranks" in text
    assert "comm is what the step waits for / all communication" in text
    for width in (80, 100, 200):
        lines = table_lines(document, width)
        assert max(map(len, lines)) <= width
        assert "lag ms" in lines[0], "a straggler is what one looks for"
        assert "1.10" in lines[2]
    assert shed_columns(document, 80) == ["±", "peak", "loss"]
    assert shed_columns(document, 70) == ["±", "peak", "lag ms", "loss"]


def test_mfu_above_the_peak_is_refused_with_a_note() -> None:
    document = {**full_document(), "rows": [ok_row("baseline", 138.5, None, mfu=1.04)]}
    assert "MFU" not in [column.name for column in shown_columns(document)]
    assert any("104.0 % is above the peak" in note.text for note in notes_of(document))


@pytest.mark.parametrize(
    ("rungs", "peak", "told"), [(("checkpointing",), 250, True), ((), 250, False), (("checkpointing",), 100, False)]
)
def test_blocks_that_were_kept_all_the_same_are_told_of(rungs: list[str], peak: int, told: bool) -> None:
    row = ok_row("checkpointing", 138.5, None, recipe=rungs, peak_bytes=peak, predicted_peak_bytes=92)
    texts = [note.text for note in notes_of({**full_document(), "rows": [row]})]
    assert any("says they were kept: no HFU" in text for text in texts) == told


def test_notes_say_noise_convention_and_interruption() -> None:
    text = printed(DOCUMENTS["unfinished_document"](), 100)
    assert "typically ±1.2 % (within-run)" in text
    assert text.count(DOCUMENTS["CONVENTION"]) == 1, "the convention is said once"
    assert "the run was interrupted" in text


def test_a_disturbed_row_is_warned_of() -> None:
    document = full_document()
    assert not any(note.about == "disturbed" for note in notes_of(document))
    row = ok_row("baseline", 138.5, None)
    row["step_seconds"] = {"median": 2.4, "p10": 0.5, "p90": 3.1, "n": 20}
    (note,) = [note for note in notes_of({**document, "rows": [row]}) if note.about == "disturbed"]
    assert "slow steps of baseline took 6.2 times as long as its quick ones" in note.text


@pytest.mark.parametrize(("taken", "warned"), [(None, False), (0.2, False), (0.9, True)])
def test_a_row_whose_cores_others_had_is_warned_of_though_its_steps_are_even(taken: float | None, warned: bool) -> None:
    """A program that is busy all the time slows all steps alike: by their spread nothing happened."""
    rows = [
        {**ok_row(name, 138.5, None), "cores_missing": cores} for name, cores in (("bf16", 0.0), ("compile", taken))
    ]
    notes = [note for note in notes_of({**full_document(), "rows": rows}) if note.about == "disturbed"]
    assert bool(notes) is warned
    if warned:
        assert "other programs had 0.9 of the cores that compile needed" in notes[0].text


@pytest.mark.parametrize(("noise", "told"), [(0.02, True), (0.10, False), (None, True)])
def test_quick_steps_that_differ_within_the_noise_are_not_told(noise: float | None, told: bool) -> None:
    row = {**ok_row("compile", 138.5, None), "speedup_step": 1.25, "speedup_quick": 1.34}
    document = {**full_document(), "rows": [row], "noise": {"fraction": noise, "source": "one run each"}}
    assert any(note.about == "quick steps" for note in notes_of(document)) is told


def test_different_is_bold_red_and_comes_first() -> None:
    document = full_document()
    assert notes_of(document)[0].about == "tied-weights"
    text = printed(document, 100, color=True)
    assert re.search(r"\x1b\[1;31mdifferent", text)
    assert re.search(r"\x1b\[1;31mDIFFERENT.*starts at 16\.42", text)


def test_text_from_outside_is_neither_markup_nor_an_escape_sequence() -> None:
    text = printed(DOCUMENTS["hostile_document"](), 200)
    assert "[bold red]x[/bold red] [/]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_bars_are_as_long_as_the_figures() -> None:
    rows = [ok_row("baseline", 100.0, None), ok_row("tf32", 50.0, 2.0), ok_row("fp16", 100.0, 1.0, kept=False)]
    bars = [line.plain for line in speed_bars(rows, 100)]
    full, half, light = bars[1].count("█"), bars[0].count("█"), bars[2].count("░")
    assert full == pytest.approx(2 * half, abs=1)
    assert light == pytest.approx(half, abs=1)
    assert max(map(len, bars)) <= 100


def test_best_row_is_printed_with_its_figures() -> None:
    expected = "650,159 tokens/s with fused-adamw, micro batch 16, 5.50x the baseline, 56.2 % MFU"
    assert best_text(full_document()) == expected
    assert best_text(DOCUMENTS["empty_document"]()) == "no row has been measured"
    assert "nothing was measured yet" in printed(DOCUMENTS["empty_document"](), 100)


def test_why_rows_were_not_checked_is_told_once() -> None:
    why = {"class": "changes-maths", "verdict": "not-checked", "detail": "too few steps"}
    rows = [{**ok_row(name, 100.0, None), "equivalence": why} for name in ("baseline", "tied-weights")]
    document = {**full_document(), "rows": rows}
    told = [note.text for note in notes_of(document) if note.about == "not checked"]
    assert told == ["baseline, tied-weights: too few steps"]
    document["workload"] = {**document["workload"], "notes": ["equivalence is not checked: too few steps"]}
    assert not [note for note in notes_of(document) if note.about == "not checked"]


def test_a_speed_up_amid_loud_noise_says_so() -> None:
    document = full_document()
    document["noise"]["fraction"] = 1.07
    assert "5.50x the baseline (with a noise of ±107.0 %), 56.2 % MFU" in best_text(document)
    document["noise"]["fraction"] = 0.03
    assert "noise" not in best_text(document)


def test_the_header_has_the_micro_batch_that_was_asked_for_and_shared_heads() -> None:
    document = {"workload": {"name": "a", "shape": {"layers": 2, "heads": 8, "kv_heads": 2}, "micro_batch": 16}}
    assert workload_text(document) == "a: 2 layers, 8 heads (2 for keys and values), micro batch 16"
    of_a_tune = {**document, "settings": {"micro_batch": 2}}
    assert workload_text(of_a_tune).endswith(", micro batch 2")
    assert "micro batch" not in workload_text({**document, "settings": {"micro_batch": None}})


def test_best_of_another_batch_size_claims_no_row() -> None:
    document = full_document()
    document["best"]["micro_batch"] = 32
    assert best_text(document) == "650,159 tokens/s with fused-adamw, micro batch 32"


def test_markdown_columns_agree_line_by_line() -> None:
    for make in DOCUMENTS["DOCUMENTS"].values():
        document = make()
        table = [line for line in markdown_table(document).splitlines() if line.startswith("| ")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(shown_columns(document)) + 1}
        assert len(table) == 2 + len(document["rows"])


def test_markdown_aligns_numbers_right_and_names_its_conditions() -> None:
    text = markdown_table(full_document())
    lines = text.splitlines()
    assert lines[1].split(" | ")[1:-1] == ["---:"] * 8
    assert lines[9].split(" | ")[1:-1] == [UNKNOWN] * 8
    caption = next(line for line in lines if line.startswith("*"))
    for part in ("NVIDIA H200", "torch 2.11.0", "2026-11-15", "`redline ladder gpt2`"):
        assert part in caption
    assert LONG_REASON in text


def test_markdown_escapes_what_github_would_read() -> None:
    text = re.sub(r"(?<!\\)`[^`]*`", "", markdown_table(DOCUMENTS["hostile_document"]()))  # in code nothing is read
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_bar_in_a_name_does_not_make_a_column() -> None:
    lines = markdown_table({**full_document(), "rows": [ok_row("a|b", 10.0, 1.0)]}).splitlines()
    assert lines[2].startswith("| a\\|b | 10.0 |")
