"""The ladder as GitHub Markdown: the README's table, with where, when and how it was measured below.

    markdown_table(document) -> "| rung | ms/step | ..."

The columns are those of the terminal and the page (`report/table.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from redline.report import Document, one_line
from redline.report.table import (
    cells_of,
    machine_text,
    notes_of,
    rows_of,
    shown_columns,
    versions_text,
    workload_text,
)


def markdown_table(document: Document) -> str:
    """Return the table, a caption and the notes."""
    columns = shown_columns(document)
    lines = [_markdown_line(column.name for column in columns)]
    lines.append(_markdown_line("---:" if column.number else ":---" for column in columns))
    lines += [_markdown_line(map(markdown_text, cells_of(row, columns))) for row in rows_of(document)]
    lines += ["", caption(document), ""]
    lines += [f"- {markdown_text(note.about)}: {markdown_text(note.text)}" for note in notes_of(document)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def caption(document: Document) -> str:
    """Say where, with what, when and how: a number without these is a rumour."""
    parts = [markdown_text(text) for text in (workload_text(document), machine_text(document), versions_text(document))]
    parts.append(markdown_text(document.get("date") or "date not known"))
    command = one_line(document.get("command") or "").replace("`", "'")
    return "*" + "; ".join(parts) + ("*; `" + command + "`" if command else "*")


def markdown_text(text: object) -> str:
    """Escape text so that Markdown reads neither markup nor columns in it."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + character if character in "\\`*_|[]~" else character for character in escaped)
