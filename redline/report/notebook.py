"""Results in a notebook: each page in a frame of its own, so that its style and the notebook's do not mix.

    in_notebook(render_estimate_page(document))  ->  '<iframe srcdoc="..." ...></iframe>'

Ladders, tunes, profiles and lints have pages already; those of all other results are made here from the terminal's
tables. The frame is self-contained and runs no script. All text is escaped twice: in the page, and with the page in the
frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table

from redline.core.units import GIB, UNKNOWN, human_bytes, human_percent, human_rate, human_seconds
from redline.report import Document, estimate, hardware, lint, meter, one_line
from redline.report.bars import Bar, stacked_chart
from redline.report.lint_page import render_lint_page
from redline.report.page import date_text, drawings, render, table_row
from redline.report.svg import plain_tick
from redline.report.table import Note

HEIGHT_PX = 640
NEAR = 0.25  # of the device's memory: smaller totals are drawn without its limit


def in_notebook(page: str) -> str:
    style = f"width: 100%; height: {HEIGHT_PX}px; border: 0; resize: vertical; overflow: auto"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}" title="redline"></iframe>'


@dataclass(frozen=True, kw_only=True)
class Part:
    title: str
    chart: list[tuple[str, Any]] | None = None
    table: dict[str, Any] | None = None


def page_table(title: str, table: Table) -> dict[str, Any]:
    """Convert a terminal table for the page."""
    kinds = ["number" if column.justify == "right" else "words" for column in table.columns]
    columns = [(str(column.header), kind) for column, kind in zip(table.columns, kinds, strict=True)]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return {
        "label": title,
        "columns": columns,
        "rows": [table_row([str(cell).strip() for cell in row]) for row in rows],
    }


def lines_table(label: str, names: tuple[str, ...], lines: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Build a table in which every column is text."""
    rows = [table_row([one_line(cell) for cell in line]) for line in lines]
    return {"label": label, "columns": [(name, "words") for name in names], "rows": rows}


def _page(document: Document, *, title: str, parts: Iterable[Part], notes: Iterable[Any], **view: Any) -> str:
    shared = {
        "alarms": [],
        "facts": [],
        "date": date_text(document),
        "command": one_line(document.get("command") or ""),
    }
    return render(
        "notebook.html.j2", {**shared, **view, "title": title, "parts_shown": list(parts), "notes": list(notes)}
    )


# --- estimate ---------------------------------------------------------------------------------------------------------


def render_estimate_page(document: Document) -> str:
    total, roofline = document["memory"]["total"], document["roofline"]
    headline = [
        (f"{document['parameters']:,}", "parameters", ""),
        (human_bytes(total), "at the peak", one_line(document["memory_detail"]["moment"])),
    ]
    if document["tokens_per_second"] is not None:
        headline.append((human_rate(document["tokens_per_second"]), "tokens per second expected", ""))
    parts = [
        Part(
            title="Memory",
            chart=drawings(lambda px: _memory_chart(document, px)),
            table=page_table("memory by part", without_first(estimate.memory_table(document))),
        ),
        Part(title="FLOPs", table=page_table("FLOPs per token", estimate.flops_table(document))),
    ]
    if document["what_to_change"]:
        parts.append(Part(title="To make it fit", table=page_table("changes", estimate.changes_table(document))))
    if roofline is not None:
        # For a user's own model no step time is predicted, only what it cannot be faster than.
        chart = drawings(lambda px: _roofline_chart(roofline, px)) if roofline["expected"] else None
        parts.append(Part(title="Speed", chart=chart, table=page_table("roofline", estimate.roofline_table(roofline))))
    return _page(
        document,
        title=f"Estimate of {one_line(document['name'])}",
        device=one_line(document["hardware"]["name"] or ""),
        workload=estimate.subject_text(document),
        headline=headline,
        parts=parts,
        notes=estimate.notes_of(document),
    )


def without_first(table: Table) -> Table:
    """Drop the first column, which is the key to the terminal's bar."""
    table.columns = table.columns[1:]
    return table


def _memory_chart(document: Document, width_px: int) -> str:
    parts = {name: size for name, size in estimate.parts_of(document).items() if size}
    lines = [f"{estimate.LABELS.get(name, name)} {human_bytes(size)}" for name, size in parts.items()]
    total, memory = document["memory"]["total"], document["hardware"]["memory_bytes"]
    if memory is not None and total < NEAR * memory:
        memory = None  # at that scale the parts could not be told apart
    bar = Bar(
        name="predicted",
        parts=tuple((estimate.LABELS.get(name, name), float(size)) for name, size in parts.items()),
        label=human_bytes(total),
        marker=memory,
        tip="\n".join(lines),
    )
    unit, axis = (GIB, "GiB") if total >= GIB else (1024**2, "MiB")
    return stacked_chart(
        [bar],
        names=[name for name, _ in bar.parts],
        title="Memory at the peak by part",
        axis=axis,
        width_px=width_px,
        show=plain_tick,
        unit=unit,
        marker="the device's memory" if memory else "",
    )


def _roofline_chart(roofline: Document, width_px: int) -> str:
    groups = {one_line(name): seconds for name, seconds in roofline["expected"]["groups"].items() if seconds > 0}
    bar = Bar(
        name="expected step",
        parts=tuple(groups.items()),
        label=human_seconds(roofline["expected"]["seconds"]),
        tip="\n".join(f"{name} {human_seconds(seconds)}" for name, seconds in groups.items()),
    )
    return stacked_chart(
        [bar],
        names=list(groups),
        title="Expected time of a step by group of operations",
        axis="ms",
        width_px=width_px,
        show=plain_tick,
        unit=1e-3,
    )


# --- lint -------------------------------------------------------------------------------------------------------------


def render_lint(document: Document) -> str:
    """Render a described shape with its GEMMs, on the page of `lint_page`, and a user's own model with its findings."""
    if "parameters" not in document["shape"]:
        return render_lint_page(document)
    findings = document["findings"]
    table = page_table("findings", lint.findings_table(document)) if findings else None
    headline = [
        (f"{document['shape']['parameters']:,}", "parameters", ""),
        (f"{len(findings):,}", "findings", "" if findings else lint.clean_text(document)),
    ]
    return _page(
        document,
        title=f"Lint of {one_line(document['name'])}",
        device=one_line(document["hardware"]["name"] or ""),
        workload=lint.subject_text(document),
        headline=headline,
        parts=[Part(title="Findings", table=table)] if findings else [],
        notes=lint.notes_of(document),
    )


# --- hardware ---------------------------------------------------------------------------------------------------------


def render_hardware_page(document: Document) -> str:
    known, measured, this = document["known"], document["measured"], document["this"]
    name = one_line((this or known or {}).get("name") or "unknown device")
    lines = [*hardware.machine_lines(this), *hardware.known_lines(known)]
    parts = [Part(title="The device", table=lines_table("the device", ("", "is"), lines))] if lines else []
    if known or measured:
        chart = drawings(lambda px: _peaks_chart(document, px)) if _peaks(document) else None
        parts.append(Part(title="Peaks", chart=chart, table=page_table("peaks", hardware.peaks_table(document))))
    if measured:
        table = page_table("products", hardware.products_table(measured))
        parts.append(Part(title="Timed matmuls", table=table))
    return _page(
        {**document, "date": (measured or {}).get("date")},
        title=name,
        device="",
        workload=one_line(lines[0][1]) if lines else "nothing is known of it",
        headline=[],
        parts=parts,
        notes=hardware.notes_of(document),
    )


def _peaks(document: Document) -> dict[str, tuple[float, float | None]]:
    """Return (data-sheet rate, measured rate) by dtype; (measured rate, None) where the data sheet has none."""
    sheet = (document["known"] or {}).get("peak_tflops") or {}
    rates = (document["measured"] or {}).get("matmul_tflops") or {}
    names = dict.fromkeys([*sheet, *rates])
    pairs = {name: (sheet.get(name) or rates.get(name), rates.get(name) if sheet.get(name) else None) for name in names}
    return {name: (float(rate), found) for name, (rate, found) in pairs.items() if rate}


def _peaks_chart(document: Document, width_px: int) -> str:
    source = "data sheet" if document["known"] else "measured"
    bars = [
        Bar(
            name=one_line(name),
            parts=((source, rate),),
            label=hardware.tflops(rate),
            marker=found,
            tip=f"{one_line(name)}: {source} {hardware.tflops(rate)}, measured {hardware.tflops(found)}",
        )
        for name, (rate, found) in _peaks(document).items()
    ]
    return stacked_chart(
        bars,
        names=[source],
        title="Peaks by type",
        axis="TFLOP/s (int8: TOP/s)",
        width_px=width_px,
        show=plain_tick,
        marker="measured" if any(bar.marker for bar in bars) else "",
    )


# --- meter ------------------------------------------------------------------------------------------------------------


def render_meter_page(document: Document) -> str:
    step = document["step_seconds"] or {}
    headline = [
        (human_rate(document["tokens_per_second"]), "tokens per second", f"{human_seconds(step.get('median'))} a step"),
        (human_percent(document["mfu"]), "model FLOP utilisation", one_line(document["mfu_convention"])),
        (human_bytes(document["peak_bytes"]), "peak memory", ""),
    ]
    chart: Callable[[int], str] = lambda px: _loop_chart(document, px)  # noqa: E731
    parts = [
        Part(
            title="The loop",
            chart=drawings(chart) if document["data_wait_share"] is not None else None,
            table=page_table("figures", meter.figures_table(document)),
        )
    ]
    return _page(
        document,
        title="Meter",
        device=one_line(document["device"]),
        workload=meter.subject_text(document),
        headline=headline,
        parts=parts,
        notes=meter.notes_of(document),
    )


def _loop_chart(document: Document, width_px: int) -> str:
    share, seconds = document["data_wait_share"], document["step_seconds"]["median"]
    names = ("waiting for data", "the rest of the step")
    parts = ((names[0], share * seconds), (names[1], (1 - share) * seconds))
    tip = "\n".join(f"{name} {human_percent(part / seconds)}" for name, part in parts)
    return stacked_chart(
        [Bar(name="a step", parts=parts, label=human_seconds(seconds) or UNKNOWN, tip=tip)],
        names=names,
        title="A step of the loop",
        axis="ms",
        width_px=width_px,
        show=plain_tick,
        unit=1e-3,
        hollow=(names[0],),
    )


# --- prepare ----------------------------------------------------------------------------------------------------------


def render_prepared_page(
    *, name: str, device: str, done: Iterable[tuple[str, str]], left_out: Iterable[tuple[str, str]], said: Iterable[str]
) -> str:
    """`done`: rungs and what they are; `left_out`: rungs and why; `said`: choices that were made for the user."""
    done = list(done)
    lines = [*((rung, "done", what) for rung, what in done), *((rung, "left out", why) for rung, why in left_out)]
    table = lines_table("the recipe", ("rung", "was", "what, or why not"), lines)
    return _page(
        {},
        title=f"{one_line(name)} with a recipe on it",
        device=one_line(device),
        workload=f"done: {', '.join(rung for rung, _ in done) or 'nothing, the recipe is the baseline'}",
        headline=[],
        parts=[Part(title="The recipe", table=table)] if lines else [],
        notes=[Note(about="note", text=one_line(text)) for text in said],
    )
