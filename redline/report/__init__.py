"""Draws the documents of runs: tables in the terminal, live and afterwards, charts, and self-contained HTML pages.

    print_ladder(document, console);  Path("report.html").write_text(render_page(document))

A document is the plain dict that a command such as `redline ladder` prints with `--json`. This module answers the few
questions that every view asks about its rows. Nothing in this folder measures or imports torch, so a report can be
drawn anywhere.
"""

from __future__ import annotations

from typing import Any

from redline.core.units import UNKNOWN

Document = dict[str, Any]
Row = dict[str, Any]
MOST_BELOW = 2.0  # times: predicted peaks are accurate to a few per cent


def one_line(text: object) -> str:
    """Make outside text safe to print: escape sequences, newlines and direction marks become single spaces."""
    printable = (character if character.isprintable() else " " for character in str(text))
    return " ".join("".join(printable).split())


def rung_name(row: Row) -> str:
    return one_line(row.get("rung") or UNKNOWN)


def status_of(row: Row) -> str:
    return one_line(row.get("status") or "unknown")


def verdict_of(row: Row) -> str:
    """Return the verdict, or the status of a row that did not run."""
    if status_of(row) != "ok":
        return status_of(row)
    return one_line((row.get("equivalence") or {}).get("verdict") or "not-checked")


def reason_of(row: Row) -> str:
    return one_line(row.get("reason") or "no reason was given")


def is_dropped(row: Row) -> bool:
    """True if the rung was measured and the climb continued without it."""
    return status_of(row) == "ok" and row.get("kept") is False


def is_implausible_peak(measured: float | None, predicted: float | None) -> bool:
    """True if the peak is far below the size of the tensors that must exist: the allocator does not count a recorded
    graph's memory, for one. Such a peak is shown but never relied on. A peak above its prediction is real."""
    return bool(measured and predicted and MOST_BELOW * measured < predicted)


def has_implausible_peak(row: Row) -> bool:
    return is_implausible_peak(row.get("peak_bytes"), row.get("predicted_peak_bytes"))


def shown_mfu(row: Row) -> float | None:
    """Return the MFU; None if it is above 1, which is a wrong peak or a wrong count and never a result (a note says
    so)."""
    mfu = row.get("mfu")
    return None if mfu is None or mfu > 1 else float(mfu)
