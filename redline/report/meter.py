"""What a meter in a user's own training loop measured, for the terminal.

print_meter(document, Console())        the document is that of `redline.Meter.summary`
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate, human_seconds
from redline.report import Document, one_line
from redline.report.profile import place_of
from redline.report.table import Note, notes_grid


def print_meter(document: Document, console: Console) -> None:
    console.print(Text(subject_text(document), overflow="fold"))
    console.print()
    console.print(figures_table(document))
    console.print()
    console.print(notes_grid(list(notes_of(document))))


def subject_text(document: Document) -> str:
    steps, left_out = document["steps"], document["warmup_steps"]
    tokens = f"{document['tokens_per_step']:,} tokens each"
    return f"{one_line(document['device'])}: {steps:,} steps of {tokens}, the first {left_out} left out"


def figures_table(document: Document) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, number in (("", False), ("median", True), ("p10", True), ("p90", True)):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    rates = [document[f"tokens_per_second{end}"] for end in ("", "_p10", "_p90")]
    step = document["step_seconds"] or {}
    table.add_row("tokens/s", *map(human_rate, rates))
    table.add_row("step", *(human_seconds(step.get(name)) for name in ("median", "p10", "p90")))
    table.add_row("MFU", human_percent(document["mfu"]), "", "")
    table.add_row("peak memory", human_bytes(document["peak_bytes"]), "", "")
    table.add_row("waiting for data", human_percent(document["data_wait_share"]), "", "")
    syncs = document["syncs_per_step"]
    table.add_row("syncs in a step", UNKNOWN if syncs is None else f"{syncs:g}", "", "")
    return table


def notes_of(document: Document) -> Iterator[Note]:
    yield Note(about="MFU", text=one_line(document["mfu_convention"]))
    yield Note(about="memory", text="the most since the process began, or since its statistics were reset")
    if document["data_wait_share"] is None:
        yield Note(about="data", text="not known: loop over meter.data(loader)")
    if document["syncs_per_step"] is None:
        yield Note(about="syncs", text="counted on GPUs, in the last step of the warm-up")
    for each in document["syncs"] or ():
        yield Note(about="sync", text=one_line(f"{place_of(each)}, {each['per_step']:g} in a step"))
