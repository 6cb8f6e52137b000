"""A comparison for the terminal: what A and B are, the rows with their ratios, and what changed in words.

print_comparison(compare(one, other), Console())
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate, human_ratio, rate_unit
from redline.report import Document, one_line
from redline.report.compare_words import KIND_WORDS
from redline.report.table import VERDICT_STYLES, WIDTH_COLUMNS, Note, machine_text, notes_grid, versions_text

NARROW_COLUMNS, SHED = 80, ("noise", "A peak", "B peak")
COLUMNS = ("rung", "A {rate}", "B {rate}", "B/A", "noise", "A peak", "B peak", "verdict")


def print_comparison(document: Document, console: Console) -> None:
    for label in ("A", "B"):
        console.print(notes_grid([Note(about=label, text=side_text(document[label.lower()]))]))
    console.print()
    if document["rows"]:
        width = min(console.width, WIDTH_COLUMNS)
        console.print(rows_table(document, narrow=width < NARROW_COLUMNS), width=width)
        console.print()
        if legend := list(legend_notes(document)):
            console.print(notes_grid(legend))
    console.print(notes_grid([Note(**note) for note in document["words"]]))


def side_text(side: Document) -> str:
    date = f", {one_line(side['date'])}" if side["date"] else ""
    name = one_line((side["workload"] or {}).get("name") or "unknown workload")
    what = f"{side['source']}: {KIND_WORDS[side['kind']]} of {name}"
    return f"{what}{date}; {machine_text(side)}; {versions_text(side)}"


def rows_table(document: Document, narrow: bool) -> Table:
    """Build the table of rows. A narrow one leaves out the columns in SHED, which --json and the page have."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    names = column_names(document)
    shown = [place for place, name in enumerate(names) if not (narrow and name in SHED)]
    for name in (names[place] for place in shown):
        justify = "left" if name in ("rung", "verdict") else "right"
        table.add_column(name, justify=justify, no_wrap=name == "rung", overflow="fold")  # type: ignore[arg-type]
    for row in document["rows"]:
        cells, verdict = row_cells(row), (row["b"] or {}).get("verdict") or ""
        styles = ["" if row["significant"] else "dim"] * (len(names) - 1) + [VERDICT_STYLES.get(verdict, "")]
        table.add_row(*(Text(cells[place], style=styles[place]) for place in shown))
    return table


def column_names(document: Document) -> list[str]:
    return [name.replace("{rate}", rate_unit(document["unit"])) for name in COLUMNS]


def row_cells(row: Document) -> list[str]:
    """Return the cells in the order of COLUMNS, with an em dash for what a side lacks."""
    a, b = row["a"] or {}, row["b"] or {}
    mark = "" if row["ratio"] is None or row["significant"] else "~"
    return [
        row["name"],
        human_rate(a.get("tokens_per_second")),
        human_rate(b.get("tokens_per_second")),
        mark + human_ratio(row["ratio"]),
        UNKNOWN if row["noise"] is None else f"±{human_percent(row['noise'])}",
        peak_text(a),
        peak_text(b),
        verdict_cell(a.get("verdict"), b.get("verdict")),
    ]


def peak_text(entry: Document) -> str:
    """Return the peak, with a `?` if it is not to be trusted."""
    return human_bytes(entry.get("peak_bytes")) + ("" if entry.get("peak_trusted", True) else "?")


def legend_notes(document: Document) -> Iterator[Note]:
    """Explain the signs that occur in the rows."""
    rows = document["rows"]
    if any(row["ratio"] is not None and not row["significant"] for row in rows):
        yield Note(about="~", text="inside the noise of its two rows, or the noise is not known")
    if any(not (row[side] or {}).get("peak_trusted", True) for row in rows for side in ("a", "b")):
        yield Note(about="?", text="a peak far below its prediction: not to be trusted")


def verdict_cell(a: str | None, b: str | None) -> str:
    if a == b:
        return a or UNKNOWN
    return f"{a or UNKNOWN} -> {b or UNKNOWN}"
