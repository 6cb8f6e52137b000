"""One self-contained HTML page of a ladder: no network, light or dark by the reader's setting, prints well.

    Path("report.html").write_text(render_page(document), encoding="utf-8")

This file turns the document into plain strings; page.html.j2 next to it places them, and base.html.j2 holds what every
page shares. Autoescape is on, so text from outside stays text; only our own SVG is passed through, and svg.py escapes
what it puts in. The one script copies text to the clipboard; its hash is in the page's policy: no other can run.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from redline.core.units import (
    GIB,
    UNKNOWN,
    human_bytes,
    human_percent,
    human_rate,
    human_seconds,
    rate_unit,
    spelled_rate_unit,
)
from redline.core.workload import NO_TOKENIZER
from redline.report import Document, Row, is_dropped, one_line, reason_of, rung_name, shown_mfu, status_of, verdict_of
from redline.report.bars import Bar, stacked_chart
from redline.report.charts import ladder_chart, loss_chart
from redline.report.groups import groups_chart, groups_table, has_groups
from redline.report.next_steps import ladder_steps
from redline.report.steps import limits_text, shows_limits, steps_chart, steps_key
from redline.report.svg import STYLE, plain_tick
from redline.report.table import (
    best_row,
    cells_of,
    device_name,
    notes_beside_rows,
    notes_of,
    nothing_found,
    ranks_of,
    ranks_text,
    rebatched_columns,
    rebatched_notes,
    rebatched_rows,
    rows_of,
    shown_columns,
    unit_of,
    workload_text,
)

if TYPE_CHECKING:
    from jinja2 import Template

WIDE_PX, NARROW_PX = 960, 320  # the page shows the chart that suits the window
VERDICT_MEANINGS = {
    "same": "no bit differs: from the fp32 reference, or, where a rung may change no bit, from the steps without it",
    "rounding": "inside the band that rounding explains",
    "changed": "another model by design; it starts at ln V and learns as the reference does",
    "different": "outside the band: not the same training any more",
    "not-checked": "no curve to compare",
}
# What holds memory, in the order of the predicted anatomy; colours follow this order in every chart.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "temporary")
RECIPE_NOTE = "A file that --recipe and --from take."
# Buttons are shown only if this script runs. Some browsers deny local files the clipboard: then the text is selected
# and copied the old way.
SCRIPT = """(function () {
  "use strict";
  document.documentElement.classList.add("js");
  function said(button, word) {
    var before = button.textContent;
    button.textContent = word;
    setTimeout(function () { button.textContent = before; }, 1500);
  }
  function selected(text) {
    var area = document.createElement("textarea");
    area.value = text;
    document.body.appendChild(area);
    area.select();
    var done = document.execCommand("copy");
    area.remove();
    return done;
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest("button.copy");
    if (!button) { return; }
    var text = document.getElementById(button.dataset.copy).textContent;
    var old = function () { said(button, selected(text) ? "copied" : "not copied"); };
    if (!navigator.clipboard) { old(); return; }
    navigator.clipboard.writeText(text).then(function () { said(button, "copied"); }, old);
  });
})();"""


def render_page(document: Document) -> str:
    return render("page.html.j2", view_of(document))


def render(name: str, view: dict[str, Any]) -> str:
    """Render a template with what every page needs: the charts' style, and the script with its hash."""
    from markupsafe import Markup

    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    shared = {"chart_style": Markup(STYLE), "script": Markup(SCRIPT), "script_hash": Markup(f"sha256-{digest}")}
    return template(name).render({**SHARED_VIEW, **shared, **view})


# Defaults for what a page may leave out.
SHARED_VIEW: dict[str, Any] = {"sections": [], "recipe": "", "recipe_note": RECIPE_NOTE}


@cache
def template(name: str) -> Template:
    """Load a page that extends base.html.j2, which holds the style."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("redline.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name in the template fails the tests and not the reader
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    rows = rows_of(document)
    return {
        "title": one_line((document.get("workload") or {}).get("name") or "unknown workload"),
        "workload": workload_text(document),
        "device": device_name(document),
        "date": date_text(document),
        "sections": list(sections(document)),
        "headline": headline_figures(document),
        "alarms": alarms(document),
        "todo": ladder_steps(document),
        "key": steps_key(document, WIDE_PX),
        "limits_text": limits_text(document),
        "limits_drawn": shows_limits(document, WIDE_PX),
        "charts": _charts(document),
        "memory_table": memory_table(rows),
        "groups_table": groups_table(rows),
        "table": ladder_view(document),
        "nothing": f"{(words := nothing_found(document))[0].upper()}{words[1:]}.",
        "notes": [note for note in notes_beside_rows(document) if note.about != "unfinished"],  # that is an alarm
        "verdicts": [verdict_view(row) for row in rows if status_of(row) == "ok"],
        "meanings": {name: text for name, text in VERDICT_MEANINGS.items() if name in map(verdict_of, rows)},
        "proofs": proof_view(rows),
        "rebatched": rebatched_view(document),
        "facts": fact_groups(document),
        "command": one_line(document.get("command") or ""),
        "recipe": best_recipe(document),
    }


def sections(document: Document) -> Iterator[tuple[str, str]]:
    """Yield (id, words) of each section, for the line of links at the top of the page."""
    rows = rows_of(document)
    yield "ladder", "Ladder"
    if rebatched_rows(document):
        yield "own-batch", "Own micro batch"
    if has_groups(rows):
        yield "time", "Time"
    if has_anatomy(rows):
        yield "memory", "Memory"
    yield "training", "Same training?"
    if proof_view(rows)["rows"]:
        yield "kernels", "Kernels"
    yield "machine", "Machine"
    if document.get("command"):
        yield "again", "Do it again"


def best_recipe(document: Document) -> str:
    """Return the recipe as best.json holds it."""
    row = best_row(document)
    if row is None or row.get("recipe") is None:
        return ""
    return json.dumps({"rungs": row["recipe"], "micro_batch": row.get("micro_batch")})


def date_text(document: Document) -> str:
    """'2026-11-15T03:00:00+00:00' -> '2026-11-15 03:00 UTC'; anything else stays as it is."""
    from datetime import datetime

    text = one_line(document.get("date") or "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".rstrip()


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of the three numbers people quote."""
    best = document.get("best")
    if not best:
        return []
    row = best_row(document) or {}
    figures = [(human_rate(best.get("tokens_per_second")), spelled_rate_unit(unit_of(document)), _best_place(best))]
    if row.get("speedup_total") is not None:
        figures.append(
            (f"{row['speedup_total']:.2f}×", f"the {rung_name(rows_of(document)[0])}'s speed", _baseline_rate(document))
        )
    if shown_mfu(row) is not None:
        convention = one_line(row.get("mfu_convention") or "convention not stated")
        figures.append((human_percent(shown_mfu(row)), "model FLOP utilisation", convention))
    return figures


def _best_place(best: dict[str, Any]) -> str:
    batch = best.get("micro_batch")
    return f"up to {one_line(best.get('rung') or UNKNOWN)}" + (f", micro batch {batch}" if batch is not None else "")


def _baseline_rate(document: Document) -> str:
    """Return the rate of the first measured row, which total speed-ups are relative to."""
    first = next((row for row in rows_of(document) if status_of(row) == "ok"), {})
    unit = rate_unit(first.get("unit"), short=False)
    return f"{human_rate(first.get('tokens_per_second'))} {unit} before" if first.get("tokens_per_second") else ""


def alarms(document: Document) -> list[tuple[str, str]]:
    """Return (kind, text) of what a reader must know before any number."""
    lines = [(note.kind, f"{note.about}: {note.text}") for note in notes_of(document) if note.kind == "different"]
    if document.get("under_way"):
        lines.append(("unfinished", "This run goes on: the rows below are those so far."))
    elif document.get("finished") is False:
        left = (
            "The rows below were measured; later rungs are missing." if rows_of(document) else "Nothing was measured."
        )
        lines.append(("unfinished", f"This run was interrupted. {left}"))
    return lines


def _charts(document: Document) -> dict[str, Any]:
    rows, reference = rows_of(document), document.get("reference")
    return {
        "ladder": drawings(lambda px: steps_chart(document, px) if px == WIDE_PX else ladder_chart(rows, px)),
        "groups": drawings(lambda px: groups_chart(rows, px)) if has_groups(rows) else [],
        "memory": drawings(lambda px: memory_chart(rows, px)) if has_anatomy(rows) else [],
        "loss": drawings(lambda px: loss_chart(rows, reference, px)),
    }


def drawings(draw: Callable[[int], str], wide_px: int = WIDE_PX) -> list[tuple[str, Any]]:
    """Draw a chart for a wide window and for a narrow one."""
    from markupsafe import Markup

    return [(size, Markup(draw(px))) for size, px in (("wide", wide_px), ("narrow", NARROW_PX))]


# --- memory -----------------------------------------------------------------------------------------------------------


def has_anatomy(rows: Iterable[Row]) -> bool:
    return any(row.get("memory") for row in rows)


def memory_chart(rows: Iterable[Row], width_px: int) -> str:
    """Draw predicted parts against the measured peak, also for a rung that ran out of memory and has no peak."""
    bars = [
        Bar(
            name=rung_name(row),
            parts=tuple((part, float(row["memory"].get(part) or 0)) for part in MEMORY_PARTS),
            label=human_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "",
            marker=row.get("peak_bytes"),
            tip=_memory_tip(row),
        )
        for row in rows
        if row.get("memory")
    ]
    return stacked_chart(
        bars,
        names=MEMORY_PARTS,
        title="Peak memory of every rung by part",
        axis="GiB",
        width_px=width_px,
        show=plain_tick,
        unit=GIB,
        marker="measured",
    )


def _memory_tip(row: Row) -> str:
    memory = row["memory"]
    measured, predicted = row.get("peak_bytes"), sum(memory.get(part) or 0 for part in MEMORY_PARTS)
    off = f" ({predicted / measured - 1:+.1%})" if measured else ""
    lines = [rung_name(row), f"measured {human_bytes(measured)}, predicted {human_bytes(predicted)}{off}"]
    lines += [f"{part} {human_bytes(memory[part])}" for part in MEMORY_PARTS if memory.get(part)]
    return "\n".join([*lines, f"fullest at the {one_line(memory.get('moment') or 'peak')}"])


def memory_table(rows: Iterable[Row]) -> dict[str, Any]:
    columns = [("rung", "words"), *((part, "number") for part in MEMORY_PARTS)]
    columns += [("predicted", "number"), ("measured", "number"), ("fullest at the", "words")]
    lines = []
    for row in rows:
        if memory := row.get("memory"):
            sizes = [memory.get(part) or 0 for part in MEMORY_PARTS]
            cells = [
                rung_name(row),
                *map(human_bytes, sizes),
                human_bytes(sum(sizes)),
                human_bytes(row.get("peak_bytes")),
            ]
            lines.append(table_row([*cells, one_line(memory.get("moment") or UNKNOWN)]))
    return {"label": "memory by part", "columns": columns, "rows": lines}


def table_row(cells: list[str], kind: str = "", why: str = "", title: str = "") -> dict[str, Any]:
    """Return a row for the plain table of parts.html.j2. `title` is the full text of a long name, whose cell may
    wrap."""
    return {"cells": cells, "kind": kind, "why": why, "title": title}


# --- tables -----------------------------------------------------------------------------------------------------------


def ladder_view(document: Document) -> dict[str, Any]:
    """Columns and rows of the main table; a rung that did not run has one cell with its reason."""
    columns = shown_columns(document)
    return {"columns": columns, "rows": [_row_view(row, columns) for row in rows_of(document)]}


def _row_view(row: Row, columns: Any) -> dict[str, Any]:
    ran = status_of(row) == "ok"
    return {
        "rung": rung_name(row),
        "title": one_line(row.get("title") or ""),
        "cells": cells_of(row, columns)[1:] if ran else [],
        "verdict": verdict_of(row),
        "kind": "dropped" if is_dropped(row) else status_of(row),
        "reason": reason_of(row) if row.get("reason") or not ran else "",
    }


def rebatched_view(document: Document) -> dict[str, Any]:
    """Return the second table: each rung at its own micro batch, and why that one was chosen."""
    columns, rows = rebatched_columns(document), rebatched_rows(document)
    reasons = (note.text for note in rebatched_notes(document))
    lines = [(cells_of(row, columns), reason) for row, reason in zip(rows, reasons, strict=True)]
    return {"columns": columns, "rows": lines}


def verdict_view(row: Row) -> dict[str, str]:
    equivalence = row.get("equivalence") or {}
    return {
        "rung": rung_name(row),
        "verdict": verdict_of(row),
        "class": one_line(equivalence.get("class") or UNKNOWN),
        "detail": one_line(equivalence.get("detail") or ""),
    }


PROOF_WORDS = ("attention kernel", "matmul kernel", "matmul types")
PROOF_COLUMNS = (*PROOF_WORDS, "graph breaks", "syncs/step", "compiling", "HFU", "peak", "predicted", "outside")


def proof_view(rows: Iterable[Row]) -> dict[str, Any]:
    """Return what the profile saw, and memory against its prediction unless a panel of its own shows that; columns
    without a value are left out."""
    measured = [row for row in rows if status_of(row) == "ok"]
    table = [_proof_cells(row) for row in measured]
    told = ("peak", "predicted") if has_anatomy(measured) else ()
    filled = [
        index
        for index, name in enumerate(PROOF_COLUMNS)
        if name not in told and any(cells[index][0] != UNKNOWN for cells in table)
    ]
    lines = [(rung_name(row), [cells[index] for index in filled]) for row, cells in zip(measured, table, strict=True)]
    columns = [PROOF_COLUMNS[index] for index in filled]
    return {"columns": columns, "words": PROOF_WORDS, "rows": lines if filled else []}


def _proof_cells(row: Row) -> list[tuple[str, str]]:
    """Return (text, title) of each column: the title is the full form of a shortened text, and empty otherwise."""
    kernels = row.get("kernels") or {}
    texts = [
        ", ".join(one_line(name) for name in kernels.get("matmul_dtypes") or [] if name) or UNKNOWN,
        _plain(kernels.get("graph_breaks")),
        _plain(kernels.get("syncs_per_step")),
        human_seconds(row.get("compile_seconds")),
        human_percent(row.get("hfu")),
        human_bytes(row.get("peak_bytes")),
        human_bytes(row.get("predicted_peak_bytes")),
        human_bytes(row.get("outside_bytes")),
    ]
    names = [_kernel_cell(kernels.get("attention")), _kernel_cell(kernels.get("matmul"))]
    return [*names, *((text, "") for text in texts)]


def _kernel_cell(name: object) -> tuple[str, str]:
    full = one_line(name or UNKNOWN)
    short = short_kernel(full)
    return short, full if short != full else ""


def short_kernel(name: str) -> str:
    """Reduce a cuDNN name, which contains the kernel's whole plan, to family, architecture and algorithm:
    'cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_...' -> 'cudnn sdpa sm90 flash'."""
    if not name.startswith("cudnn_generated_"):
        return name
    words = itertools.takewhile(lambda word: word not in ("fprop", "bprop"), name.split("_"))
    return " ".join(word for word in words if word not in ("generated", "fort", "native"))


def _plain(value: object) -> str:
    """Format a setting as people write it: 1000 -> '1,000', 0.5 -> '0.5', [9, 0] -> '9, 0'."""
    if value is None or value == "" or value == []:
        return UNKNOWN
    if isinstance(value, dict):  # what is unset is left out
        known = {key: text for key, item in value.items() if (text := _plain(item)) != UNKNOWN}
        return ", ".join(f"{one_line(key).replace('_', ' ')} {text}" for key, text in known.items()) or UNKNOWN
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else one_line(value)


def fact_groups(document: Document) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return machine, workload, versions and settings as (name, value) lists; unknown values are left out."""
    groups = [
        ("Machine", machine_facts(document)),
        ("Workload", workload_facts(document)),
        ("Versions", document.get("versions") or {}),
        ("Settings", document.get("settings") or {}),
    ]
    lists = [
        (title, [(one_line(name).replace("_", " "), _fact(name, value)) for name, value in facts.items()])
        for title, facts in groups
    ]
    known = [(title, [(name, value) for name, value in facts if value != UNKNOWN]) for title, facts in lists]
    return [(title, facts) for title, facts in known if facts]


def _fact(name: str, value: Any) -> str:
    """Format a fact: a memory limit is in bytes, and a seed has no thousands separators since it is not an amount."""
    if name == "memory_limit" and isinstance(value, int):
        return human_bytes(value)
    return one_line(value) if name == "seed" and value is not None else _plain(value)


def machine_facts(document: Document) -> dict[str, Any]:
    hardware = document.get("hardware") or {}
    return {
        "device": hardware.get("name"),
        "count": hardware.get("count"),
        "ranks": ranks_text(document) if ranks_of(document) > 1 else None,
        "memory": human_bytes(hardware.get("memory_bytes")),
        "compute capability": ".".join(map(str, hardware.get("capability") or [])),
        "multiprocessors": hardware.get("multiprocessors"),
        "driver": hardware.get("driver"),
        "processor": hardware.get("cpu_name"),
        "cores": hardware.get("cpu_cores"),
        "peak, dense TFLOP/s": hardware.get("peak_tflops"),
        "features": hardware.get("features"),
        "missing": "; ".join(f"{name}: {why}" for name, why in (hardware.get("missing") or {}).items()),
    }


def workload_facts(document: Document) -> dict[str, Any]:
    workload = document.get("workload") or {}
    hidden = ["shape", "source", "cannot", "notes"]
    if workload.get("tokenizer") == NO_TOKENIZER:
        hidden += ["tokenizer", "corpus"]  # a user's file makes its own batches
    plain = {name: value for name, value in workload.items() if name not in hidden}
    # The shape of a user's own model also holds lists of matmuls and modules, which are no facts to read here.
    sizes = {name: size for name, size in (workload.get("shape") or {}).items() if not isinstance(size, (list, dict))}
    source = workload.get("source") or {}
    return {"name": plain.pop("name", None), "model code": source.get("kind"), **sizes, **plain}
