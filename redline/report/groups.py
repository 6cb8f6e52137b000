"""Where the time of each rung's step goes, as bars and as a table.

    groups_chart(rows, 960);  groups_table(rows)

The seconds come from the profile that proves what ran (engine/proof.py) and add up to the step that was timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redline.core.profile import GROUPS, WAITING
from redline.core.units import UNKNOWN
from redline.report import Row, rung_name
from redline.report.bars import Bar, stacked_chart
from redline.report.svg import plain_tick
from redline.report.table import milliseconds


def groups_in(row: Row) -> dict[str, float]:
    """Return seconds by group; empty for a row that was not profiled."""
    return {name: float(spent) for name, spent in ((row.get("kernels") or {}).get("groups") or {}).items()}


def has_groups(rows: Iterable[Row]) -> bool:
    return any(map(groups_in, rows))


def groups_chart(rows: Iterable[Row], width_px: int) -> str:
    bars = [
        Bar(
            name=rung_name(row),
            parts=tuple((group, 1e3 * groups_in(row).get(group, 0.0)) for group in GROUPS),
            label=f"{milliseconds(sum(groups_in(row).values()))} ms",
            tip=_groups_tip(row),
        )
        for row in rows
        if groups_in(row)
    ]
    return stacked_chart(
        bars,
        names=GROUPS,
        title="Time of a step of every rung by what it goes into",
        axis="ms",
        width_px=width_px,
        show=plain_tick,
        hollow=WAITING,
    )


def _groups_tip(row: Row) -> str:
    spent = groups_in(row)
    whole = sum(spent.values())
    lines = [
        f"{group} {milliseconds(spent[group])} ms, {spent[group] / whole:.0%}" for group in GROUPS if group in spent
    ]
    return "\n".join([f"{rung_name(row)}: {milliseconds(whole)} ms a step", *lines])


def groups_table(rows: Iterable[Row]) -> dict[str, Any]:
    measured = [row for row in rows if groups_in(row)]
    used = [group for group in GROUPS if any(groups_in(row).get(group) for row in measured)]
    lines = [
        {
            "cells": [rung_name(row), *(milliseconds(groups_in(row).get(group)) or UNKNOWN for group in used)],
            "kind": "",
            "why": "",
            "title": "",
        }
        for row in measured
    ]
    columns = [("rung", "words"), *((f"{group}, ms", "number") for group in used)]
    return {"label": "time by group", "columns": columns, "rows": lines}
