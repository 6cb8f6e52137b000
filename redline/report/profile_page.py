"""One self-contained HTML page of a profile: what to do first, where the time goes, the kernels, and the memory.

    Path("report.html").write_text(render_profile_page(document), encoding="utf-8")

The document is that of `redline profile --json`. A profile that failed is a page too: it says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from redline.core.places import short
from redline.core.profile import DATA_WAIT, GROUPS, IDLE
from redline.core.units import (
    GIB,
    MIB,
    UNKNOWN,
    human_bytes,
    human_percent,
    human_rate,
    human_seconds,
    spelled_rate_unit,
)
from redline.report import Document, Row, one_line
from redline.report.bars import Bar, stacked_chart
from redline.report.curves import Panel, curve_chart
from redline.report.history import thin
from redline.report.next_steps import Step
from redline.report.page import date_text, drawings, fact_groups, render, table_row
from redline.report.profile import (
    IDLE_ON_CPU,
    SHOWN_ADVICE,
    folded_modules,
    memory_by_module,
    notes_of,
    place_of,
    plain_kernel,
    plain_rate,
    uncompiled_shares,
    uncompiled_text,
    unnamed_modules,
)
from redline.report.svg import plain_tick
from redline.report.table import device_name, milliseconds, unit_of, workload_text

SHOWN_KERNELS, SHOWN_MODULES, SHOWN_LINES = 30, 20, 15
MEMORY_PX = 190
# Beyond these, measured and predicted memory are split differently: what is left of either is one part.
KNOWN_PARTS = {"weights": ("weights", "buffers"), "gradients": ("gradients",), "optimizer": ("optimizer",)}
REST = "activations and others"


def render_profile_page(document: Document) -> str:
    return render("profile.html.j2", view_of(document))


def view_of(document: Document) -> dict[str, Any]:
    """Every string the template shows."""
    recipe = document.get("recipe") or {}
    workload = {**(document.get("workload") or {}), "micro_batch": recipe.get("micro_batch")}
    named = {
        **document,
        "workload": workload,
        "settings": {"rungs": recipe.get("rungs"), "trace": document.get("trace")},
    }
    common = {
        "title": f"Profile of {one_line(workload.get('name') or 'unknown workload')}",
        "workload": workload_text(named),
        "device": device_name(document),
        "date": date_text(document),
        "facts": fact_groups(named),
        "command": one_line(document.get("command") or ""),
        "recipe": json.dumps(recipe) if recipe else "",
    }
    return {**common, **(measured_view(document) if document["status"] == "ok" else failed_view(document))}


def failed_view(document: Document) -> dict[str, Any]:
    reason = one_line(document.get("reason") or "no reason was given")
    return {"ran": False, "headline": [], "alarms": [("different", f"Nothing was profiled: {reason}")]}


def measured_view(document: Document) -> dict[str, Any]:
    memory = document["memory"]
    return {
        "ran": True,
        "sections": list(sections(document)),
        "headline": headline_figures(document),
        "alarms": [],
        "todo": todo_of(document),
        "overhead": overhead_text(document),
        "time": drawings(lambda px: time_chart(document, px)),
        "groups": group_table(document),
        "module_title": module_title(document),
        "modules": module_table(document),
        "kernels": kernel_table(document),
        "kernel_word": "Kernels" if document["device"] == "cuda" else "Operators",
        "findings": finding_table(document),
        "memory_chart": drawings(lambda px: memory_chart(memory, px)) if memory else [],
        "memory_curve": drawings(lambda px: memory_curve(memory, px)) if memory and memory["timeline_bytes"] else [],
        "memory_modules": memory_module_table(memory) if memory and memory["modules"] else {"rows": []},
        "memory_lines": line_table(memory) if memory else {"rows": []},
        "notes": list(notes_of(document)),
    }


def todo_of(document: Document) -> list[Step] | None:
    """Return the advice as steps; None for a user's own step, which has no workload to advise on."""
    advice = document["advice"]
    if advice is None:
        return None
    return [Step(what=one_line(short(each["what"])), why=advice_text(each)) for each in advice[:SHOWN_ADVICE]]


def sections(document: Document) -> Iterator[tuple[str, str]]:
    yield "time", "Time"
    yield "kernels", "Kernels"
    if document["findings"]:
        yield "findings", "Found in the code"
    if document["memory"]:
        yield "memory", "Memory"
    yield "machine", "Machine"
    yield "again", "Do it again"


def headline_figures(document: Document) -> list[tuple[str, str, str]]:
    """Return (figure, label, detail) of each headline."""
    step, roofline = document["step_seconds"], document["roofline"]
    spread = f"p10 {human_seconds(step['p10'])}, p90 {human_seconds(step['p90'])}, without the profiler"
    figures = [
        (human_seconds(step["median"]), "a step", spread),
    ]
    if document["tokens_per_second"] is not None:
        figures.append((human_rate(document["tokens_per_second"]), spelled_rate_unit(unit_of(document)), ""))
    if roofline is not None:
        light = roofline["light_seconds"]
        share = human_percent(light / step["median"])
        figures.append((share, "of its speed of light", f"{human_seconds(light)} a step at the data sheet's peaks"))
    else:
        busy = "of the step the device works" if document["device"] == "cuda" else "of the step operators work"
        own = not (document["workload"]["shape"] or {}).get("heads")  # only a described decoder has them
        reason = "how fast a model of one's own could be is not known" if own else "no peaks are known for this device"
        why = reason if document["recipe"] else ""
        figures.append((human_percent(document["busy_share"]), busy, why))
    return figures


def advice_text(advice: Row) -> str:
    gain = advice["gain_seconds"]
    about = "At most" if advice.get("at_most") else "About"  # documents of older runs have no bounds
    worth = "" if gain is None else f" {about} {human_seconds(gain)} of a step."
    return f"{one_line(short(advice['why']))}.{worth}"


def overhead_text(document: Document) -> str:
    return (
        f"{human_seconds(document['profiled_step_seconds'])} under the profiler "
        f"({100 * document['profiler_overhead']:+.0f} %); times below are of the step without it."
    )


# --- time -------------------------------------------------------------------------------------------------------------


def group_name(group: str, document: Document) -> str:
    return IDLE_ON_CPU if group == IDLE and document["device"] == "cpu" else group


def time_chart(document: Document, width_px: int) -> str:
    """Draw a bar for the whole step and one for each phase, by groups of operations."""
    names = [group_name(group, document) for group in GROUPS]
    whole = [(each["group"], each["seconds"]) for each in document["groups"]]
    bars = [_time_bar("whole step", whole, document)]
    for phase in document["phases"]:
        parts = [(part["group"], part["seconds"]) for part in document["parts"] if part["phase"] == phase["phase"]]
        if phase["seconds"] > 0:
            bars.append(_time_bar(one_line(phase["phase"]), parts, document))
    return stacked_chart(
        bars,
        names=names,
        title="Time of a step by phase and group of operations",
        axis="ms",
        width_px=width_px,
        show=plain_tick,
        unit=1e-3,
        hollow=(IDLE, IDLE_ON_CPU, DATA_WAIT),
    )


def _time_bar(name: str, parts: list[tuple[str, float]], document: Document) -> Bar:
    spent = dict.fromkeys(GROUPS, 0.0)
    for group, seconds in parts:
        spent[group] += seconds
    total, step = sum(spent.values()), document["step_seconds"]["median"]
    known = [(group_name(group, document), seconds) for group, seconds in spent.items() if seconds > 0]
    largest = sorted(known, key=lambda part: -part[1])
    lines = [f"{name}: {human_seconds(total)}, {human_percent(total / step)} of the step"]
    lines += [f"{group} {human_seconds(seconds)}, {human_percent(seconds / step)}" for group, seconds in largest]
    return Bar(name=name, parts=tuple(known), label=f"{milliseconds(total)} ms", tip="\n".join(lines))


def group_table(document: Document) -> dict[str, Any]:
    phases = [each["phase"] for each in document["phases"] if each["seconds"] > 0]
    columns = [("group", "words"), *((one_line(name), "number") for name in phases), ("step, ms", "number")]
    columns.append(("share", "number"))
    rows = []
    for each in sorted(document["groups"], key=lambda one: -one["seconds"]):
        if each["seconds"] > 0:
            spent = [_phase_seconds(document, phase, each["group"]) for phase in phases]
            figures = [milliseconds(seconds) if seconds else UNKNOWN for seconds in spent]
            cells = [group_name(each["group"], document), *(figure or UNKNOWN for figure in figures)]
            rows.append(table_row([*cells, milliseconds(each["seconds"]) or UNKNOWN, human_percent(each["share"])]))
    return {"label": "time by group and phase, in milliseconds", "columns": columns, "rows": rows}


def _phase_seconds(document: Document, phase: str, group: str) -> float:
    return math.fsum(part["seconds"] for part in document["parts"] if (part["phase"], part["group"]) == (phase, group))


def module_title(document: Document) -> str:
    return f"By module, {uncompiled_text(document)}" if document.get("modules_without_compile") else "By module"


def module_table(document: Document) -> dict[str, Any]:
    if document.get("modules_without_compile"):  # documents of older runs have none
        return uncompiled_table(document)
    columns = [("module", "words"), *((name, "number") for name in ("forward, ms", "backward, ms", "share"))]
    step = document["step_seconds"]["median"]
    rows = [
        table_row(
            [
                name,
                milliseconds(forward) or UNKNOWN,
                milliseconds(backward) or UNKNOWN,
                human_percent((forward + backward) / step),
            ]
        )
        for name, (forward, backward) in folded_modules(document["modules"], unnamed_modules(document))[:SHOWN_MODULES]
    ]
    return {"label": "time by module", "columns": columns, "rows": rows}


def uncompiled_table(document: Document) -> dict[str, Any]:
    """Tabulate shares only: the times are those of another step."""
    columns = [("module", "words"), *((name, "number") for name in ("forward", "backward", "share"))]
    rows = [
        table_row([name, *(human_percent(share) for share in (forward, backward, forward + backward))])
        for name, forward, backward in uncompiled_shares(document)[:SHOWN_MODULES]
    ]
    return {"label": "share of the work by module, without compile", "columns": columns, "rows": rows}


def kernel_table(document: Document) -> dict[str, Any]:
    columns = [("name", "words"), ("group", "words")]
    columns += [(name, "number") for name in ("calls", "ms", "TFLOP/s", "GB/s", "of roofline")]
    columns.append(("bound", "words"))
    rows = [
        table_row(
            [
                plain_kernel(each["name"]),
                one_line(each["group"]),
                f"{each['calls']:,.0f}",
                milliseconds(each["seconds"]) or UNKNOWN,
                plain_rate(each["tflops"]),
                plain_rate(each["bytes_per_second"], 1e9),
                human_percent(each["roofline_share"], 0),
                one_line(each["bound"] or UNKNOWN),
            ],
            title=one_line(each["name"]),
        )
        for each in document["kernels"][:SHOWN_KERNELS]
    ]
    return {"label": "kernels, most time first", "columns": columns, "rows": rows}


def finding_table(document: Document) -> dict[str, Any]:
    columns = [("what", "words"), ("where", "words"), ("per step", "number"), ("detail", "detail"), ("fix", "detail")]
    rows = [
        table_row(
            [
                one_line(each["kind"]),
                one_line(place_of(each)),
                UNKNOWN if each["per_step"] is None else f"{each['per_step']:g}",
                one_line(each["detail"]),
                one_line(each["fix"]),
            ]
        )
        for each in document["findings"]
    ]
    return {"label": "found in the code", "columns": columns, "rows": rows}


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_chart(memory: Document, width_px: int) -> str:
    """Draw memory measured at its peak beside the prediction; what the two split differently is one part."""
    unit, name = _unit(max(memory["peak_bytes"], (memory["predicted"] or {}).get("allocated", 0)))
    measured = {part: sum(memory["categories"].get(one, 0) for one in own) for part, own in KNOWN_PARTS.items()}
    measured[REST] = sum(memory["categories"].values()) - sum(measured.values())
    bars = [_memory_bar("measured", measured)]
    if memory["predicted"] is not None:
        predicted = {part: memory["predicted"][part] for part in KNOWN_PARTS}
        predicted[REST] = memory["predicted"]["allocated"] - sum(predicted.values())
        bars.append(_memory_bar("predicted", predicted))
    return stacked_chart(
        bars,
        names=tuple(measured),
        title="Memory at the peak, " + " and ".join(bar.name for bar in bars),
        axis=name,
        width_px=width_px,
        show=plain_tick,
        unit=unit,
    )


def _memory_bar(name: str, sizes: dict[str, int]) -> Bar:
    total = sum(sizes.values())
    lines = [f"{name}: {human_bytes(total)}", *(f"{part} {human_bytes(size)}" for part, size in sizes.items() if size)]
    parts = tuple((part, float(size)) for part, size in sizes.items())
    return Bar(name=name, parts=parts, label=human_bytes(total), tip="\n".join(lines))


def memory_curve(memory: Document, width_px: int) -> str:
    unit, name = _unit(memory["peak_bytes"])
    places = [1e3 * seconds for seconds in memory["timeline_seconds"]]
    points = thin([(place, size / unit) for place, size in zip(places, memory["timeline_bytes"], strict=True)])
    panel = Panel(
        title="Memory over the step",
        curves=(("alive", points),),
        show=lambda size: f"{size:.4g} {name}",
        from_zero=True,
        axis="ms since the start of the step, as the host runs it",
        place=lambda place: f"{place:.4g} ms",
    )
    return curve_chart(panel, end=places[-1], width_px=width_px, height_px=MEMORY_PX)


def memory_module_table(memory: Document) -> dict[str, Any]:
    columns = [("module", "words"), ("alive at the peak", "number")]
    rows = [table_row([name, human_bytes(size)]) for name, size in memory_by_module(memory)[:SHOWN_MODULES]]
    return {"label": "modules whose tensors are alive at the peak", "columns": columns, "rows": rows}


def line_table(memory: Document) -> dict[str, Any]:
    columns = [("line", "words"), ("function", "words"), ("alive at the peak", "number")]
    rows = [
        table_row(
            [one_line(f"{short(each['file'])}:{each['line']}"), one_line(each["function"]), human_bytes(each["bytes"])]
        )
        for each in memory["lines"][:SHOWN_LINES]
    ]
    return {"label": "lines of Python whose tensors are alive at the peak", "columns": columns, "rows": rows}


def _unit(size: float) -> tuple[int, str]:
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")
