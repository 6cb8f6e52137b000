"""Lint findings for the terminal: a table of what, where, the fix and the gains; the reasons follow in full.

    print_lint(document, Console())        the document is that of `redline lint --json`

A clean shape gets one line that says what was checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, batch_text
from redline.report import Document, one_line
from redline.report.estimate import model_sizes
from redline.report.table import Note, notes_grid

KIND_STYLES = {"alignment": "yellow", "tile": "cyan", "wave": "blue", "rule-of-thumb": "magenta"}


def print_lint(document: Document, console: Console) -> None:
    console.print(Text(subject_text(document), overflow="fold"))
    console.print()
    if not document["findings"]:
        console.print(Text(clean_text(document), style="bold green", overflow="fold"))
    else:
        console.print(findings_table(document))
        console.print()
    notes = list(notes_of(document))
    if notes:
        console.print(notes_grid(notes))


def subject_text(document: Document) -> str:
    shape, settings, hardware = document["shape"], document["settings"], document["hardware"]
    traced = [f"{shape['parameters']:,} parameters"] if "parameters" in shape else []
    parts = [
        f"{one_line(document['name'])}: {', '.join([*traced, *model_sizes(shape)])}",
        *([] if settings["micro_batch"] is None else [batch_text(settings["micro_batch"], shape)]),
        settings["dtype"],
        *([f"tp {settings['tp']}"] if "heads" in document["shape"] or settings["tp"] > 1 else []),
        one_line(hardware["name"] or "unknown device"),
    ]
    return ", ".join(parts)


def clean_text(document: Document) -> str:
    """Say what was checked, so that silence means something."""
    if document["settings"]["micro_batch"] is None:
        return "nothing ugly: the rows of every layer's matrix"
    if "parameters" in document["shape"]:
        return "nothing ugly: the rows of every layer that ran, attention, and lines that make the host wait"
    known = document["hardware"]["name"] is not None
    checked = "alignment, tiles, waves and rules of thumb" if known else "alignment and rules of thumb"
    return f"nothing ugly: {checked} of every GEMM, forward and backward"


def findings_table(document: Document) -> Table:
    measured = any(finding["measured_gain"] is not None for finding in document["findings"])
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("kind", "what", "where", "fix"):
        table.add_column(name, overflow="fold", no_wrap=name == "kind")
    table.add_column("predicted", justify="right", no_wrap=True)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
    for finding in document["findings"]:
        table.add_row(*_cells(finding, measured))
        table.add_section()
    return table


def _cells(finding: dict[str, Any], measured: bool) -> Iterator[Text]:
    yield Text(finding["kind"], style=KIND_STYLES.get(finding["kind"], ""))
    for text in (finding["problem"], where_text(finding["where"]), finding["fix"]):
        yield Text(one_line(text))
    yield Text(gain_text(finding["predicted_gain"]))
    if measured:
        yield Text(gain_text(finding["measured_gain"]), style="bold")


def where_text(where: list[str]) -> str:
    """Name only the layers: ['head forward 16384x50257x768', 'head dgrad ...'] -> 'head'. --json has the sizes."""
    return ", ".join(dict.fromkeys(name.split()[0] for name in where)) or UNKNOWN


def gain_text(gain: float | None) -> str:
    return UNKNOWN if gain is None else f"{100 * gain:+.1f} %"


def notes_of(document: Document) -> Iterator[Note]:
    findings = document["findings"]
    known = document["hardware"]["name"] is not None
    for finding in findings:
        yield Note(about=finding["rule"], text=one_line(finding["why"]))
        if known and finding["no_predicted_gain"]:  # for an unknown device one note covers all
            yield Note(about="", text=one_line(f"no gain is predicted: {finding['no_predicted_gain']}"))
        if finding["mild"]:
            yield Note(about="", text="mild: --strict lets it pass")
    if any(finding["predicted_gain"] is not None for finding in findings):
        yield Note(about="gains", text=one_line(document["gain_convention"]))
    if sum(finding["predicted_gain"] is not None for finding in findings) > 1:
        text = f"predicted {gain_text(document['predicted_gain'])}"
        if document["measured_gain"] is not None:
            text += f", measured {gain_text(document['measured_gain'])}"
        yield Note(about="all together", text=text)
    for note in document["notes"]:
        yield Note(about="note", text=one_line(note))
