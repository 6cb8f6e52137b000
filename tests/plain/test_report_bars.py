"""The terminal's picture: bars as long as the figures, after the table, of signs that the terminal has."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.report.table import print_ladder, speed_bars
from redline.report.tune import MOST_BARS, bar_rows, print_tune


def row(name: str, rate: float | None, kept: bool = True) -> dict[str, Any]:
    return {"rung": name, "status": "ok", "kept": kept, "tokens_per_second": rate}


def printed(show: Any, document: dict[str, Any], width: int, encoding: str = "utf-8") -> str:
    """As a terminal of this encoding would get it; what it cannot show would raise."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict" if encoding == "utf-8" else "replace")
    show(document, Console(file=stream, width=width, color_system=None))
    stream.seek(0)
    return stream.read()


@pytest.fixture(scope="module")
def records(repository: Path) -> dict[str, dict[str, Any]]:
    names = {"ladder": "ladder-gpt2-b16", "tune": "tune-gpt2"}
    return {
        kind: json.loads((repository / f"records/2026-11-15-h200-{name}.json").read_text())
        for kind, name in names.items()
    }


def test_plain_bars_are_ascii_and_as_long_as_the_figures() -> None:
    rows = [row("baseline", 250.0), row("tf32", 1000.0), row("fp16", 500.0, kept=False), row("none", None)]
    bars = [line.plain for line in speed_bars(rows, 100, plain=True)]
    assert all(line.isascii() for line in bars)
    full = bars[1].count("#")
    assert [bars[0].count("#"), bars[2].count(".")] == [pytest.approx(full / 4, abs=1), pytest.approx(full / 2, abs=1)]
    assert "." not in bars[1]
    assert len(bars) == 3, "what has no speed has no bar"
    assert max(map(len, bars)) == 100


@pytest.mark.parametrize(("encoding", "sign"), [("utf-8", "█"), ("ascii", "#"), ("latin-1", "#")])
@pytest.mark.parametrize(("kind", "show"), [("ladder", print_ladder), ("tune", print_tune)], ids=["ladder", "tune"])
def test_a_terminal_gets_signs_that_it_has(records: Any, kind: str, show: Any, encoding: str, sign: str) -> None:
    text = printed(show, records[kind], 100, encoding)
    table, bars = text.rpartition("\n\nbest  ")[0].rsplit("\n\n", 1)
    rates = [one["tokens_per_second"] for one in records[kind]["rows"] if one["tokens_per_second"] is not None]
    lines = bars.splitlines()
    assert len(lines) == (min(len(rates), MOST_BARS) if kind == "tune" else len(rates))
    longest = max(lines, key=lambda line: line.count(sign))
    assert longest.rstrip().endswith(f"  {max(rates):,.0f}")
    assert sign * 20 in longest
    assert sign * 20 not in table
    assert max(map(len, text.splitlines())) <= 100


def test_of_a_tune_the_fastest_are_drawn_and_what_cannot_win_is_lighter(records: Any) -> None:
    document = json.loads(json.dumps(records["tune"]))
    first = document["rows"][0]
    document["rows"] += [{**first, "number": 10 + place, "tokens_per_second": 1000.0 + place} for place in range(20)]
    document["rows"][1]["equivalence"]["verdict"] = "different"
    rows = list(bar_rows(document))
    rates = [one["tokens_per_second"] for one in rows]
    assert rates == sorted((one["tokens_per_second"] for one in document["rows"]), reverse=True)[:MOST_BARS]
    lighter = [one["rung"].split()[0] for one in rows if not one["kept"]]
    assert lighter == ["#1", "#5", "#2"], "different, given up, and only looked at"
    assert max(len(one["rung"]) for one in rows) <= 36
