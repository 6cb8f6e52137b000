"""Shows a ladder document: in the terminal while it runs and afterwards, as charts, as one HTML page. Never runs one.

    print_ladder(document, console);  Path("report.html").write_text(render_page(document))

A document is the plain dict of `redline ladder --json`; here are the few questions every view asks of its rows.
Nothing in this folder imports torch, so a report can be drawn anywhere.
"""

from __future__ import annotations

from typing import Any

from redline.core.units import UNKNOWN

Document = dict[str, Any]
Row = dict[str, Any]
MOST_BELOW = 2.0  # times: predicted peaks are right to per cents


def one_line(text: object) -> str:
    """Text from outside, safe to print: escape sequences, newlines and direction marks become single spaces."""
    printable = (character if character.isprintable() else " " for character in str(text))
    return " ".join("".join(printable).split())


def rung_name(row: Row) -> str:
    return one_line(row.get("rung") or UNKNOWN)


def status_of(row: Row) -> str:
    return one_line(row.get("status") or "unknown")


def verdict_of(row: Row) -> str:
    """A row that did not run has a status instead of a verdict."""
    if status_of(row) != "ok":
        return status_of(row)
    return one_line((row.get("equivalence") or {}).get("verdict") or "not-checked")


def reason_of(row: Row) -> str:
    return one_line(row.get("reason") or "no reason was given")


def is_dropped(row: Row) -> bool:
    """Measured, and then the climb went on without it."""
    return status_of(row) == "ok" and row.get("kept") is False


def is_implausible_peak(measured: float | None, predicted: float | None) -> bool:
    """Far less than the tensors that must be there: a recorded graph's memory, for one, is not counted by the
    allocator. Such a peak is shown and nothing is built on it. More than predicted was really held."""
    return bool(measured and predicted and MOST_BELOW * measured < predicted)


def has_implausible_peak(row: Row) -> bool:
    return is_implausible_peak(row.get("peak_bytes"), row.get("predicted_peak_bytes"))


def shown_mfu(row: Row) -> float | None:
    """More than the peak is a wrong peak or a wrong count, never a result: it is not shown, and a note says so."""
    mfu = row.get("mfu")
    return None if mfu is None or mfu > 1 else float(mfu)
