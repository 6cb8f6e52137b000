"""One self-contained HTML page of a tune: every trial as a point of speed against memory, and what each knob gained.

    Path("report.html").write_text(render_tune_page(document), encoding="utf-8")

The document is that of `redline tune --json`. Nothing is chosen here: winner, ties and gains come from the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from redline.core.units import (
    UNKNOWN,
    counted,
    human_bytes,
    human_percent,
    human_rate,
    human_ratio,
    human_seconds,
    rate_unit,
    spelled_rate_unit,
)
from redline.report import Document, Row, has_implausible_peak, one_line, shown_mfu
from redline.report.bars import Gain, gain_chart
from redline.report.next_steps import tune_steps
from redline.report.page import date_text, drawings, fact_groups, render, table_row
from redline.report.points import Point, front_of, points_chart
from redline.report.table import Note, damage_notes, device_name, milliseconds, model_notes, unit_of, workload_text
from redline.report.tune import (
    UNDER_WAY,
    break_even_texts,
    change_text,
    disturbed_notes,
    is_best,
    left_out_notes,
    peak_notes,
    peak_text,
    roofline_notes,
    search_text,
    sharing_notes,
    tie_notes,
    unproved_text,
    verdict_of,
)

NOT_TRIED_SHOWN = 60


def render_tune_page(document: Document) -> str:
    return render("tune.html.j2", view_of(document))


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    name = one_line((document.get("workload") or {}).get("name") or "unknown workload")
    points, knobs = points_of(document), gains_of(document)
    light = (document.get("roofline") or {}).get("light")
    return {
        "title": f"Tuning {name}",
        "workload": workload_text(document),
        "device": device_name(document),
        "date": date_text(document),
        "sections": list(sections(document, bool(knobs))),
        "headline": headline_figures(document),
        "alarms": list(alarms(document)),
        "todo": tune_steps(document),
        "search": search_text(document),
        "points": drawings(lambda px: points_chart(points, width_px=px, light=light)) if points else [],
        "kinds": sorted({point.kind for point in points}),
        "has_front": len(front_of(points)) > 1,
        "no_point": [row["number"] for row in document["rows"] if row["number"] not in {one.number for one in points}],
        "doubtful": not all(point.trusted for point in points),
        "knob_chart": drawings(lambda px: gain_chart(knobs, title="What each knob brought", width_px=px))
        if knobs
        else [],
        "knob_table": knob_table(document),
        "trials": trial_table(document),
        "not_tried": not_tried_table(document),
        "not_tried_text": not_tried_text(document),
        "notes": [
            *peak_notes(document),
            *tie_notes(document),
            *sharing_notes(document),
            *compiling_notes(document),
            *roofline_notes(document),
            *left_out_notes(document),
            *damage_notes(document),
            *model_notes(document),
        ],
        "facts": fact_groups(document),
        "command": one_line(document.get("command") or ""),
        "recipe": best_recipe(document),
        "unproved": unproved_text(document),
    }


def sections(document: Document, has_gains: bool) -> Iterator[tuple[str, str]]:
    yield "trials", "Trials"
    if has_gains or document["knobs"]:
        yield "knobs", "Knobs"
    yield "table", "Every trial"
    yield "machine", "Machine"
    if document.get("command"):
        yield "again", "Do it again"


def best_recipe(document: Document) -> str:
    """Return the recipe as best.json holds it."""
    best = document["best"]
    return "" if best is None else json.dumps({"rungs": best["rungs"], "micro_batch": best["micro_batch"]})


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of each headline."""
    best = document["best"]
    if best is None:
        return []
    row: Row = next((row for row in document["rows"] if is_best(row, document)), {})
    figures = [
        (
            human_rate(best["tokens_per_second"]),
            spelled_rate_unit(unit_of(document)),
            f"the winner, at micro batch {best['micro_batch']}",
        )
    ]
    baseline = (document["baseline"] or {}).get("tokens_per_second")
    if best["speedup"] is not None:
        unit = rate_unit(unit_of(document), short=False)
        before = "" if baseline is None else f"{human_rate(baseline)} {unit} before"
        figures.append((f"{best['speedup']:.2f}×", "the plain way's speed", before))
    if shown_mfu(row) is not None:
        convention = one_line(row.get("mfu_convention") or "convention not stated")
        figures.append((human_percent(shown_mfu(row)), "model FLOP utilisation", convention))
    budget = document["budget"]
    if len(figures) < 3:
        tried = f"in {human_seconds(budget['spent_seconds'])} of {human_seconds(budget['seconds'])}"
        figures.append((f"{budget['trials']:,}", "recipes tried", tried))
    return figures


def alarms(document: Document) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what a reader must know before any number."""
    wrong = [f"#{row['number']}" for row in document["rows"] if verdict_of(row) == "different"]
    if wrong:
        yield "different", f"{', '.join(wrong)}: not the same training any more, so they cannot win."
    for note in disturbed_notes(document):
        yield "unfinished", f"{note.about}: {note.text}"
    why, detail = document["stopped"]["why"], document["stopped"]["detail"]
    if why == UNDER_WAY:
        yield "unfinished", "This search goes on: what follows is what it has found so far."
    if why in ("interrupted", "device-lost"):
        words = "This search was interrupted." if why == "interrupted" else "The device no longer answered."
        yield "unfinished", f"{words} {one_line(detail or '')}".strip()


# --- trials -----------------------------------------------------------------------------------------------------------


def points_of(document: Document) -> list[Point]:
    """Return the trials that ran and whose memory is known; the others appear only in the table."""
    return [
        Point(
            number=row["number"],
            memory=float(row["peak_bytes"]),
            rate=float(row["tokens_per_second"]),
            kind=kind_of(row, document),
            tip=trial_tip(row, document),
            trusted=not has_implausible_peak(row),
        )
        for row in document["rows"]
        if row["tokens_per_second"] is not None and row["peak_bytes"]
    ]


def kind_of(row: Row, document: Document) -> str:
    if is_best(row, document):
        return "best"
    if verdict_of(row) == "different":
        return "bad"
    return "lost" if verdict_of(row) == "lost" or row["reason"] else "sound"


def trial_tip(row: Row, document: Document) -> str:
    seconds = row["step_seconds"] or {}
    median, p10, p90 = (human_seconds(seconds.get(name)) for name in ("median", "p10", "p90"))
    lines = [
        f"#{row['number']}: {change_text(row, document)}",
        f"{human_rate(row['tokens_per_second'])} {rate_unit(row.get('unit'), short=False)}, micro batch "
        f"{row['micro_batch']}",
        f"step {median} (p10 {p10}, p90 {p90}, n {seconds.get('n', UNKNOWN)})",
        f"{human_percent(row['of_best'])} of the best, {human_ratio(row['speedup_total'])} the plain way",
        f"MFU {human_percent(shown_mfu(row))}, peak memory {human_bytes(row['peak_bytes'])}",
        f"this peak cannot be right: {human_bytes(row['predicted_peak_bytes'])} predicted"
        if has_implausible_peak(row)
        else "",
        f"verdict {verdict_of(row)}",
        one_line(row["reason"] or ""),
    ]
    return "\n".join(line for line in lines if line)


TRIAL_COLUMNS = (
    ("#", "words"),
    ("change from the winner", "words"),
    ("batch", "number"),
    ("ms/step", "number"),
    ("tok/s", "number"),
    ("of best", "number"),
    ("MFU", "number"),
    ("peak", "number"),
    ("predicted", "number"),
    ("compile", "number"),
    ("verdict", "verdict"),
)


def trial_table(document: Document) -> dict[str, Any]:
    rows = [
        table_row(
            [
                str(row["number"]),
                change_text(row, document),
                str(row["micro_batch"]),
                milliseconds((row["step_seconds"] or {}).get("median")) or UNKNOWN,
                human_rate(row["tokens_per_second"]),
                human_percent(row["of_best"]),
                human_percent(shown_mfu(row)),
                peak_text(row),
                human_bytes(row["predicted_peak_bytes"]),
                human_seconds(row["compile_seconds"]),
                verdict_of(row),
            ],
            kind=row_kind(row, document),
            why=one_line(row["reason"] or ""),
        )
        for row in document["rows"]
    ]
    unit = rate_unit(unit_of(document))
    columns = [(name.replace("tok/s", unit), kind) for name, kind in TRIAL_COLUMNS]
    return {"label": "every trial, the winner first", "columns": columns, "rows": rows}


def row_kind(row: Row, document: Document) -> str:
    if is_best(row, document):
        return "best"
    return "failed" if row["status"] != "ok" else "lost" if verdict_of(row) == "lost" else ""


def not_tried_text(document: Document) -> str:
    count = len(document["not_tried"])
    more = f", the first {NOT_TRIED_SHOWN}" if count > NOT_TRIED_SHOWN else ""
    return counted(count, "neighbour") + more


def not_tried_table(document: Document) -> dict[str, Any]:
    columns = [("change from the winner", "words"), ("batch", "number"), ("reason", "detail")]
    rows = [
        table_row([one_line(each["change"]), str(each["micro_batch"]), one_line(each["reason"])])
        for each in document["not_tried"][:NOT_TRIED_SHOWN]
    ]
    return {"label": "what was not tried", "columns": columns, "rows": rows}


# --- knobs ------------------------------------------------------------------------------------------------------------


def gains_of(document: Document) -> list[Gain]:
    """Return the gain of the winner's choice over each alternative that was tried, largest first."""
    known = [knob for knob in document["knobs"] if knob["gain"] is not None]
    gains = [Gain(name=knob_name(knob), share=knob["gain"], noise=knob["noise"], tip=knob_tip(knob)) for knob in known]
    return sorted(gains, key=lambda gain: -gain.share)


def knob_name(knob: Row) -> str:
    """Name the winner's choice and what it was compared with; 'no X' if the winner does without X."""
    chosen, other = knob["choice"], knob["against"]
    if chosen is None:
        return one_line(f"no {other}")
    return one_line(chosen if other is None else f"{chosen} / {other}")


def knob_tip(knob: Row) -> str:
    noise = "unknown" if knob["noise"] is None else human_percent(knob["noise"])
    sure = "more than the noise" if knob["significant"] else "inside the noise"
    return f"{knob_name(knob)}\n{one_line(knob['text'])}\nnoise of the comparison {noise}: {sure}"


def knob_table(document: Document) -> dict[str, Any]:
    columns = [("knob", "words"), ("choice", "words"), ("against", "words"), ("gain", "number"), ("noise", "number")]
    columns.append(("in words", "detail"))
    rows = [
        table_row(
            [
                one_line(knob["knob"]),
                one_line(knob["choice"] or "off"),
                one_line(knob["against"] or "off"),
                UNKNOWN if knob["gain"] is None else f"{100 * knob['gain']:+.1f} %",
                human_percent(knob["noise"]),
                one_line(knob["text"]),
            ]
        )
        for knob in document["knobs"]
    ]
    return {"label": "what each knob brought", "columns": columns, "rows": rows}


def compiling_notes(document: Document) -> Iterator[Note]:
    for text in break_even_texts(document):
        yield Note(about="compiling", text=text)
