"""One self-contained HTML page of a comparison: the two figures, what changed in words, every row with its noise.

    Path("compare.html").write_text(render_comparison(document), encoding="utf-8")

The document is that of `redline report A B --json`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from redline.core.units import UNKNOWN, human_percent, human_rate, human_ratio
from redline.report import Document, one_line
from redline.report.bars import Gain, gain_chart
from redline.report.compare_table import column_names, legend_notes, row_cells
from redline.report.compare_words import KIND_WORDS, noise_summary
from redline.report.page import date_text, drawings, render, table_row
from redline.report.table import machine_text, versions_text, workload_text

WORDS = ("rung", "verdict")  # the other columns are numbers


def render_comparison(document: Document) -> str:
    return render("compare.html.j2", view_of(document))


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    gains = gains_of(document)
    differences = difference_table(document)
    return {
        "title": title_of(document),
        "device": "",
        "workload": workload_text(document["a"]),
        "date": "",
        "sections": list(sections(document, bool(differences["rows"]))),
        "headline": headline_figures(document),
        "alarms": list(alarms(document)),
        "words": [note for note in document["words"] if note["kind"] != "different"],
        "gains": drawings(lambda px: gain_chart(gains, title="B over A", width_px=px)) if gains else [],
        "rows": row_table(document),
        "legend": list(legend_notes(document)),
        "runs": [(label, text) for label, side in sides(document) if (text := one_line(side["command"] or ""))],
        "differences": differences,
        "facts": [(f"{label}: {side['source']}", side_facts(side)) for label, side in sides(document)],
        "command": one_line(document.get("command") or "") or command_of(document),
    }


def sides(document: Document) -> list[tuple[str, Document]]:
    return [("A", document["a"]), ("B", document["b"])]


def title_of(document: Document) -> str:
    names = [one_line((side["workload"] or {}).get("name") or "unknown workload") for _, side in sides(document)]
    kinds = [KIND_WORDS[side["kind"]] for _, side in sides(document)]
    what = f"two {kinds[0]}s" if kinds[0] == kinds[1] else f"a {kinds[0]} and a {kinds[1]}"
    return f"{names[0] if names[0] == names[1] else ' and '.join(names)}: {what}"


def sections(document: Document, differ: bool) -> Iterator[tuple[str, str]]:
    yield "words", "What changed"
    if any(row["ratio"] is not None for row in document["rows"]):
        yield "rows", "Row by row"
    if differ:
        yield "differences", "Not the same"
    if any(side["command"] for _, side in sides(document)):
        yield "runs", "The two runs"
    yield "machine", "Machines"
    yield "again", "Do it again"


def command_of(document: Document) -> str:
    """Return the command line that is equivalent to a comparison made from Python."""
    figure = document["figure"]
    words = ["redline", "report", *(side["source"] for _, side in sides(document))]
    words += [] if figure["of"] == "best" else ["--rung", one_line(figure["of"])]
    words += [] if figure["fail_below"] is None else ["--fail-below", f"{figure['fail_below']:g}"]
    return shlex.join(words)


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of each headline."""
    figure, unit = document["figure"], f"{document['unit']}s per second"
    figures = [
        (
            human_rate(entry["tokens_per_second"]),
            f"{label}: {unit}",
            f"{entry['name']}, {document[label.lower()]['source']}",
        )
        for label, entry in (("A", figure["a"]), ("B", figure["b"]))
        if entry is not None
    ]
    if figure["ratio"] is not None:
        figures.append((f"{figure['ratio']:.3f}×", "B over A", noise_summary(figure)))
    return figures


def alarms(document: Document) -> Iterator[tuple[str, str]]:
    for note in document["words"]:
        if note["kind"] == "different":
            yield "different", f"{note['about']}: {note['text']}"


def gains_of(document: Document) -> list[Gain]:
    """Return every row that has a ratio, in the ladder's order."""
    return [
        Gain(name=row["name"], share=row["ratio"] - 1, noise=row["noise"], tip=gain_tip(row, document["unit"]))
        for row in document["rows"]
        if row["ratio"] is not None
    ]


def gain_tip(row: Document, unit: str) -> str:
    rates = " -> ".join(human_rate(row[side]["tokens_per_second"]) for side in ("a", "b"))
    shares = " -> ".join(human_percent(row[side]["mfu"]) for side in ("a", "b"))
    return "\n".join(
        [row["name"], f"{rates} {unit}s/s, {human_ratio(row['ratio'])}", noise_summary(row), f"MFU {shares}"]
    )


def row_table(document: Document) -> dict[str, Any]:
    rows = [
        table_row(row_cells(row), kind="" if row["significant"] else "lost", why=row_reason(row))
        for row in document["rows"]
    ]
    columns = [(name, "words" if name in WORDS else "number") for name in column_names(document)]
    return {"label": "row by row", "columns": columns, "rows": rows}


def row_reason(row: Document) -> str:
    a, b = ((row[side] or {}).get("reason") or "" for side in ("a", "b"))
    return a if a == b else "; ".join(f"{label}: {text}" for label, text in (("A", a), ("B", b)) if text)


def difference_table(document: Document) -> dict[str, Any]:
    columns = [("what", "words"), ("of", "words"), ("A", "detail"), ("B", "detail")]
    rows = [
        table_row([part["name"], group, part["a"], part["b"]])
        for group, parts in document["differences"].items()
        for part in parts or []
    ]
    return {"label": "what is not the same", "columns": columns, "rows": rows}


def side_facts(side: Document) -> list[tuple[str, str]]:
    facts = [
        ("kind", KIND_WORDS[side["kind"]]),
        ("date", date_text(side)),
        ("machine", machine_text(side)),
        ("versions", versions_text(side)),
        ("workload", workload_text(side)),
    ]
    return [(name, text) for name, text in facts if text not in ("", UNKNOWN)]
