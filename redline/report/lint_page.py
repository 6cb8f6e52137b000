"""One self-contained HTML page of a lint: the findings, and every GEMM with its efficiency, before and after.

    Path("lint.html").write_text(render_lint_page(document), encoding="utf-8")

The document is that of `redline lint --json`. The page predicts GEMM times from its shapes, with the arithmetic behind
the findings, and shows measured times where the document has them. An unknown device has no efficiency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redline.core.devices import Device, find_device
from redline.core.units import UNKNOWN, human_percent, human_seconds
from redline.core.values import from_json
from redline.core.workload import Shape
from redline.predict.gemms import Gemm
from redline.predict.subject import Subject
from redline.predict.tiles import estimate
from redline.report import Document, Row, one_line
from redline.report.bars import Pair, pair_chart
from redline.report.lint import clean_text, gain_text, notes_of, subject_text, where_text
from redline.report.page import date_text, drawings, fact_groups, render, table_row

Key = tuple[str, str]
"""(where, direction) of a GEMM: the same before and after a fix."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A GEMM and what is known about the time of one call."""

    gemm: Gemm
    predicted: float | None
    measured: float | None
    peak: float | None
    """FLOP/s of the data sheet at the GEMM's dtype."""

    @property
    def seconds(self) -> float | None:
        return self.predicted if self.measured is None else self.measured

    def share(self, seconds: float | None) -> float | None:
        """Return the share of the peak that a call of this length reaches."""
        rate = None if not seconds else self.gemm.flops / self.gemm.count / seconds
        return None if rate is None or self.peak is None else rate / self.peak


def render_lint_page(document: Document) -> str:
    return render("lint.html.j2", view_of(document))


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    before, after = gemms_of(document, "before"), gemms_of(document, "after")
    pairs = pairs_of(before, after)
    return {
        "title": f"Lint of {one_line(document['name'])}",
        "workload": subject_text(document),
        "device": one_line(document["hardware"]["name"] or ""),
        "date": date_text(document),
        "sections": [("findings", "Findings"), ("gemms", "GEMMs"), ("machine", "Where"), ("again", "Do it again")],
        "headline": headline_figures(document),
        "alarms": [],
        "clean": "" if document["findings"] else clean_text(document),
        "findings": finding_table(document),
        "chart": drawings(lambda px: pair_chart(pairs, title="Share of the matmul peak of every GEMM", width_px=px))
        if pairs
        else [],
        "changes": bool(after),
        "source": "Measured here." if any(one.measured for one in before.values()) else "Predicted, not measured.",
        "no_chart": "" if pairs else no_chart_text(document),
        "gemms": gemm_table(before, after),
        "notes": list(notes_of(document)),
        "facts": fact_groups(facts_of(document)),
        "command": one_line(document.get("command") or ""),
    }


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of each headline."""
    findings = document["findings"]
    mild = sum(bool(finding["mild"]) for finding in findings)
    more = f"{mild} of them mild" if mild else "sizes that cost speed" if findings else "nothing ugly"
    figures = [(str(len(findings)), "findings" if len(findings) != 1 else "finding", more)]
    for name, word in (("predicted_gain", "predicted"), ("measured_gain", "measured")):
        if findings and document[name] is not None:
            figures.append((gain_text(document[name]), f"{word} with every fix", "useful work per second of GEMM time"))
    return figures


def no_chart_text(document: Document) -> str:
    if document["hardware"]["name"] is None:
        return f"No efficiency is known: {one_line(document['hardware']['reason'] or 'the device is unknown')}."
    return (
        "No efficiency is predicted: the sizes do not divide evenly among the ranks, or the data sheet lacks the type."
    )


# --- findings ---------------------------------------------------------------------------------------------------------


def finding_table(document: Document) -> dict[str, Any]:
    columns = [("rule", "words"), ("kind", "words"), ("problem", "detail"), ("where", "words"), ("fix", "detail")]
    columns += [("predicted", "number"), ("measured", "number")]
    measured = any(finding["measured_gain"] is not None for finding in document["findings"])
    rows = []
    for finding in document["findings"]:
        cells = [finding["rule"], finding["kind"], finding["problem"], where_text(finding["where"]), finding["fix"]]
        gains = [gain_text(finding["predicted_gain"]), gain_text(finding["measured_gain"])]
        rows.append(table_row([*map(one_line, cells), *gains[: 2 if measured else 1]]))
    return {"label": "findings", "columns": columns if measured else columns[:-1], "rows": rows}


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def subject_of(document: Document, state: str) -> Subject | None:
    """Return the shape as it is ('before') or with every fix; None if there is nothing to change."""
    shape, settings = (
        (document["shape"], document["settings"])
        if state == "before"
        else (document["suggested"], document["suggested_settings"])
    )
    if shape is None or settings is None:
        return None
    return Subject(
        shape=from_json(Shape, shape),
        micro_batch=settings["micro_batch"],
        tp=settings["tp"],
        dtype=settings["dtype"],
        device=device_of(document),
    )


def device_of(document: Document) -> Device | None:
    name = document["hardware"]["name"]
    return None if name is None else find_device(name)


def gemms_of(document: Document, state: str) -> dict[Key, Timed]:
    subject = subject_of(document, state)
    if subject is None:
        return {}
    measured = {
        (row["where"], row["direction"]): row["seconds"] for row in document["gemms"] or [] if row["state"] == state
    }
    return {(gemm.where, gemm.direction): timed(gemm, subject, measured) for gemm in subject.gemms}


def timed(gemm: Gemm, subject: Subject, measured: dict[Key, float | None]) -> Timed:
    device, dtype = subject.device, subject.dtype_of(gemm)
    known = device is not None and not subject.undivided and dtype in device.peak_tflops
    return Timed(
        gemm=gemm,
        predicted=estimate(gemm, device, dtype).seconds if known and device is not None else None,
        measured=measured.get((gemm.where, gemm.direction)),
        peak=1e12 * device.peak_tflops[dtype] if device is not None and dtype in device.peak_tflops else None,
    )


def pairs_of(before: dict[Key, Timed], after: dict[Key, Timed]) -> list[Pair]:
    """Return a pair per GEMM in the order of the step, with a second bar only where the size changes."""
    pairs = []
    for key, one in before.items():
        share, other = one.share(one.seconds), after.get(key)
        if share is None:
            continue
        changed = other is not None and sizes(other.gemm) != sizes(one.gemm)
        then = other.share(other.seconds) if other is not None and changed else None
        pairs.append(
            Pair(name=" ".join(key), before=share, after=then, tip=gemm_tip(key, one, other if changed else None))
        )
    return pairs


def gemm_tip(key: Key, one: Timed, other: Timed | None) -> str:
    lines = [" ".join(key), *(f"as it is: {line}" for line in figures_of(one))]
    lines += [f"fixed: {line}" for line in figures_of(other)] if other is not None else []
    calls = one.gemm.count
    return "\n".join([*lines, f"{calls} call{'s' if calls > 1 else ''} a step"])


def figures_of(one: Timed) -> Iterator[str]:
    yield sizes(one.gemm)
    for word, seconds in (("predicted", one.predicted), ("measured", one.measured)):
        if seconds is not None:
            yield f"{word} {human_seconds(seconds)}, {human_percent(one.share(seconds), 0)} of the peak"


def sizes(gemm: Gemm) -> str:
    return f"{gemm.m:,} x {gemm.n:,} x {gemm.k:,}" + (f", {gemm.batch:,} at once" if gemm.batch > 1 else "")


def gemm_table(before: dict[Key, Timed], after: dict[Key, Timed]) -> dict[str, Any]:
    """Tabulate each GEMM as it is, followed by its fixed version where a fix changes it."""
    columns = [("GEMM", "words"), ("m x n x k", "words")]
    columns += [(name, "number") for name in ("calls", "predicted", "share", "measured", "measured share")]
    rows = []
    for key, one in before.items():
        rows.append(gemm_row(" ".join(key), one))
        other = after.get(key)
        if other is not None and sizes(other.gemm) != sizes(one.gemm):
            rows.append(gemm_row(f"{' '.join(key)}, fixed", other))
    return {"label": "every GEMM of a step", "columns": columns, "rows": rows}


def gemm_row(name: str, one: Timed) -> Row:
    cells = [name, sizes(one.gemm), f"{one.gemm.count:,}"]
    for seconds in (one.predicted, one.measured):
        cells += [UNKNOWN if seconds is None else human_seconds(seconds), human_percent(one.share(seconds), 0)]
    return table_row(cells)


def facts_of(document: Document) -> Document:
    """Return the facts in the form that `fact_groups` expects."""
    hardware: dict[str, Any] = document["hardware"]
    measured = hardware.get("measured") or {}
    return {
        "hardware": {
            "name": hardware["name"] or hardware["reason"],
            "multiprocessors": hardware.get("multiprocessors"),
            "driver": measured.get("driver"),
        },
        "workload": {"name": document["name"], "shape": document["shape"], **document["settings"]},
        "versions": measured.get("versions") or {},
        "settings": {"origin": document["origin"], "data sheet": hardware.get("source")},
    }
