"""The page of a run without results yet: what was requested, on which machine, and that nothing is there so far.

render_waiting_page(run_json)
"""

from __future__ import annotations

from redline.report import Document, one_line
from redline.report.page import date_text, fact_groups, render
from redline.report.table import device_name, workload_text


def render_waiting_page(run: Document) -> str:
    kind = one_line(run.get("kind") or "run")
    name = one_line((run.get("workload") or {}).get("name") or "unknown workload")
    view = {
        "title": f"{kind.capitalize()} of {name}",
        "workload": workload_text(run),
        "device": device_name(run),
        "date": date_text(run),
        "headline": [],
        "alarms": [("unfinished", f"This {kind} has no result yet: it goes on, or it was interrupted.")],
        "facts": fact_groups(run),
        "command": one_line(run.get("command") or ""),
    }
    return render("waiting.html.j2", view)
