"""The ladder as a table for the terminal, and the columns and notes that the README and the HTML page share with it.

    print_ladder(document, Console())        header, table, notes, bars, the best row
    ladder_table(document, 80)               the table alone, at most 80 columns wide

COLUMNS is the one list of what a row shows. A column that no row can fill is left out and a note says why. Reasons are
never cut: they follow below the table in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.layout import Layout
from redline.core.traced import TOKEN
from redline.core.units import (
    UNKNOWN,
    counted,
    human_bytes,
    human_percent,
    human_rate,
    human_ratio,
    human_seconds,
    rate_unit,
)
from redline.core.values import from_json
from redline.predict.efficiency import is_kept
from redline.predict.noise import MOST_SWING, MOST_TAKEN
from redline.report import Document, Row, is_dropped, one_line, reason_of, rung_name, shown_mfu, status_of, verdict_of

WIDTH_COLUMNS = 100
VERDICT_STYLES = {
    "same": "green",
    "rounding": "green",
    "changed": "yellow",
    "different": "bold red",
    "not-checked": "dim",
}
MOST_NAMED = 4  # rows in one note
MOST_UNEVEN = 1.05  # from here on, two ways to time a row's steps do not agree
LOUD_NOISE = 0.1  # from a tenth on, a speed-up is printed with more digits than were measured
ONE_PROCESS = ""  # a single process does not communicate: such a column is left out without a note
STATUS_STYLES = {"skipped": "dim", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a row. `cell` returns None if the figure is unknown."""

    name: str
    meaning: str
    cell: Callable[[Row], str | None]
    why_unknown: str = "no row reported it"
    """Printed under the table if the figure is unknown for every row, with `{device}` filled in; '' prints nothing."""
    number: bool = True
    shed: int = 0
    """Order in which a narrow terminal drops columns; 0 stays."""


def milliseconds(seconds: float | None) -> str | None:
    """Format in ms always, so that a column of them compares at a glance."""
    if seconds is None:
        return None
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread_fraction(row: Row) -> float | None:
    """Return half the distance from p10 to p90, as a share of the median."""
    seconds = row.get("step_seconds") or {}
    median, p10, p90 = (seconds.get(name) for name in ("median", "p10", "p90"))
    return None if not median or p10 is None or p90 is None else float((p90 - p10) / 2 / median)


def _rung_cell(row: Row) -> str:
    return f"({rung_name(row)})" if is_dropped(row) else rung_name(row)


def _spread_cell(row: Row) -> str | None:
    share = spread_fraction(row)
    return None if share is None else f"±{100 * share:.1f}%" if share < 0.0995 else f"±{100 * share:.0f}%"


def _step_cell(row: Row) -> str | None:
    mark = "~" if row.get("within_noise") else ""
    return _known(row.get("speedup_step"), lambda ratio: mark + human_ratio(ratio))


def _loss_cell(row: Row) -> str | None:
    ends = (row.get("loss_first"), row.get("loss_last"))
    return None if ends == (None, None) else "→".join(UNKNOWN if loss is None else f"{loss:.2f}" for loss in ends)


def _shared(show: Callable[[dict[str, float]], str | None]) -> Callable[[Row], str | None]:
    """Make the cell of a figure that only several ranks have."""
    return lambda row: show(row["sharing"]) if row.get("sharing") else None


def _communication_cell(sharing: dict[str, float]) -> str:
    times = (milliseconds(sharing[name]) for name in ("exposed_seconds", "communication_seconds"))
    return "/".join(str(time) for time in times)


def _known(value: float | None, show: Callable[[float], str]) -> str | None:
    return None if value is None else show(value)


COLUMNS = (
    Column(name="rung", meaning="in parentheses: measured, not kept", cell=_rung_cell, number=False),
    Column(
        name="ms/step",
        meaning="median time of a step",
        cell=lambda row: milliseconds((row.get("step_seconds") or {}).get("median")),
    ),
    Column(name="±", meaning="half of p90 - p10, as a share of the median", cell=_spread_cell, shed=1),
    Column(
        name="tok/s",
        meaning="tokens trained per second",
        cell=lambda row: _known(row.get("tokens_per_second"), human_rate),
    ),
    Column(
        name="step", meaning="speed-up over the recipe the rung was put onto; ~ is inside the noise", cell=_step_cell
    ),
    Column(
        name="total",
        meaning="speed-up over the baseline",
        cell=lambda row: _known(row.get("speedup_total"), human_ratio),
    ),
    Column(
        name="MFU",
        meaning="model FLOP utilisation: the share of the data-sheet peak",
        cell=lambda row: _known(shown_mfu(row), human_percent),
        why_unknown="no data-sheet peak is known for {device}, and another device's peak would give a wrong MFU",
    ),
    Column(
        name="peak",
        meaning="peak memory of a timed step",
        cell=lambda row: _known(row.get("peak_bytes"), human_bytes),
        why_unknown="{device} did not report its peak memory",
        shed=3,
    ),
    Column(
        name="comm ms",
        meaning="communication: what the step waits for, of all there is",
        cell=_shared(_communication_cell),
        why_unknown=ONE_PROCESS,
    ),
    Column(
        name="lag ms",
        meaning="what the slowest rank computes longer than the middle one",
        cell=_shared(lambda sharing: milliseconds(sharing["straggler_seconds"])),
        why_unknown=ONE_PROCESS,
        shed=4,  # dropped last: users of several ranks look for stragglers
    ),
    Column(name="loss", meaning="first and last loss of the checked curve", cell=_loss_cell, shed=2),
    Column(name="verdict", meaning="the loss curve against the fp32 reference", cell=verdict_of, number=False),
)


def _own(name: str, show: Callable[[Any], str]) -> Callable[[Row], str | None]:
    """Make the cell of a figure at the row's own micro batch."""
    return lambda row: _known((row.get("rebatched") or {}).get(name), show)


REBATCHED_COLUMNS = (
    Column(name="rung", meaning="in parentheses: measured, not kept", cell=_rung_cell, number=False),
    Column(
        name="fixed tok/s",
        meaning="tokens per second at the ladder's own micro batch",
        cell=lambda row: _known(row.get("tokens_per_second"), human_rate),
    ),
    Column(name="own batch", meaning="the micro batch that is fastest for it", cell=_own("micro_batch", str)),
    Column(name="tok/s", meaning="tokens per second there", cell=_own("tokens_per_second", human_rate)),
    Column(name="gain", meaning="over the fixed micro batch", cell=_own("speedup_fixed", human_ratio)),
    Column(name="passes", meaning="micro batches per update of the global batch", cell=_own("accumulation", str)),
    Column(
        name="MFU",
        meaning="model FLOP utilisation there",
        cell=lambda row: _known(shown_mfu(row.get("rebatched") or {}), human_percent),
    ),
    Column(name="peak", meaning="peak memory there", cell=_own("peak_bytes", human_bytes)),
    Column(name="predicted", meaning="the same before the run", cell=_own("predicted_peak_bytes", human_bytes)),
    Column(name="sizes", meaning="how many were run", cell=_own("trials", lambda trials: str(len(trials)))),
)


def rebatched_rows(document: Document) -> list[Row]:
    return [row for row in rows_of(document) if row.get("rebatched")]


def rebatched_columns(document: Document) -> tuple[Column, ...]:
    rows = rebatched_rows(document)
    columns = counting(REBATCHED_COLUMNS, document)
    return tuple(column for column in columns if any(column.cell(row) is not None for row in rows))


def rebatched_table(document: Document, width: int = WIDTH_COLUMNS) -> Table:
    """Build the second table, with each rung at its own micro batch; its gaps shrink if space is tight."""
    rows, columns = rebatched_rows(document), rebatched_columns(document)
    gap = 2 if _width({"rows": rows}, columns, 2) <= width else 1
    return _table(rows, columns, gap)


def rebatched_notes(document: Document) -> list[Note]:
    """Say why each size was chosen, or why none was."""
    notes = []
    for row in rebatched_rows(document):
        failed = row["rebatched"].get("status") == "failed"
        text = f"{'failed: ' if failed else ''}{reason_of(row['rebatched'])}"
        notes.append(Note(about=rung_name(row), text=text, kind="failed" if failed else "plain"))
    return notes


def shown_columns(document: Document) -> tuple[Column, ...]:
    """Return the columns that some row can fill; before the first measurement, all but those of several ranks."""
    measured = [row for row in rows_of(document) if status_of(row) == "ok"]
    columns = counting(COLUMNS, document)
    if not measured:
        return tuple(column for column in columns if column.why_unknown)
    return tuple(column for column in columns if any(column.cell(row) is not None for row in measured))


def counting(columns: Sequence[Column], document: Document) -> tuple[Column, ...]:
    """Return the columns in terms of what the document's rates count: samples for a user's own model."""
    unit = unit_of(document)
    if unit in (None, TOKEN):
        return tuple(columns)
    return tuple(
        replace(
            column,
            name=column.name.replace("tok/s", rate_unit(unit)),
            meaning=column.meaning.replace("tokens", f"{unit}s"),
        )
        for column in columns
    )


def rows_of(document: Document) -> list[Row]:
    return list(document.get("rows") or [])


def cells_of(row: Row, columns: Sequence[Column]) -> list[str]:
    return [column.cell(row) or UNKNOWN for column in columns]


def ladder_table(document: Document, width: int = WIDTH_COLUMNS) -> Table:
    """Build a table at most `width` wide: gaps shrink first, then columns are dropped in the order of Column.shed."""
    columns, gap = _fit(document, width)
    return _table(rows_of(document), columns, gap)


def unit_of(document: Document) -> str | None:
    """Return what the rates count, such as samples for a user's own model; None also means tokens."""
    shape = (document.get("workload") or {}).get("shape") or {}
    return shape.get("unit")


def _table(rows: Sequence[Row], columns: Sequence[Column], gap: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
    for column in columns:
        justify = "right" if column.number else "left"
        table.add_column(column.name, justify=justify, no_wrap=column.name == "rung", overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*_styled_cells(row, columns))
    return table


def _fit(document: Document, width: int) -> tuple[tuple[Column, ...], int]:
    """Return the fullest layout that fits: its columns and the gap between them."""
    shown = shown_columns(document)
    levels = range(1 + max(column.shed for column in COLUMNS))
    layouts = [(tuple(c for c in shown if c.shed == 0 or c.shed > level), gap) for level in levels for gap in (2, 1)]
    return next((layout for layout in layouts if _width(document, *layout) <= width), layouts[-1])


def _width(document: Document, columns: Sequence[Column], gap: int) -> int:
    lines = [
        [column.name for column in columns],
        *(cells_of(row, columns) for row in rows_of(document)),
    ]
    return sum(max(map(len, cells)) for cells in zip(*lines, strict=True)) + gap * len(columns)


def shed_columns(document: Document, width: int) -> list[str]:
    """Return the names of the columns that ladder_table leaves out at this width."""
    kept, _ = _fit(document, width)
    return [column.name for column in shown_columns(document) if column not in kept]


def _styled_cells(row: Row, columns: Sequence[Column]) -> Iterator[Text]:
    verdict = verdict_of(row)
    line_style = STATUS_STYLES.get(verdict, "dim" if is_dropped(row) else "")
    for column, cell in zip(columns, cells_of(row, columns), strict=True):
        style = VERDICT_STYLES.get(verdict, line_style) if column.name == "verdict" else line_style
        yield Text(cell, style=style)


@dataclass(frozen=True, kw_only=True)
class Note:
    """A line under the table: `about` is a rung or a subject; `kind` is 'plain', 'failed' or 'different'."""

    about: str
    text: str
    kind: str = "plain"


def notes_of(document: Document) -> list[Note]:
    """Return everything the table has no room for, starting with what is wrong."""
    return [*row_notes(document), *_subject_notes(document)]


def notes_beside_rows(document: Document) -> list[Note]:
    """Return the notes that a table with a line of its own for each reason leaves out."""
    return [*_unchecked_notes(document), *_compile_notes(document), *_subject_notes(document)]


def row_notes(document: Document) -> list[Note]:
    """Return the notes on single rows: *different* ones first and loudly, then every reason."""
    reasons = (*_unchecked_notes(document), *_reason_notes(document), *_compile_notes(document))
    return [*_different_notes(document), *reasons]


def _different_notes(document: Document) -> Iterator[Note]:
    for row in rows_of(document):
        if verdict_of(row) == "different":
            detail = one_line((row.get("equivalence") or {}).get("detail") or "no detail was given")
            yield Note(
                about=rung_name(row),
                text=f"DIFFERENT: this is not the same training any more. {detail}",
                kind="different",
            )


def _unchecked_notes(document: Document) -> Iterator[Note]:
    """Say why rows were not checked, once per reason; the model's own notes already give its reasons."""
    known = " ".join(note.text for note in model_notes(document))
    rungs: dict[str, list[str]] = {}
    for row in rows_of(document):
        detail = one_line((row.get("equivalence") or {}).get("detail") or "")
        if status_of(row) == "ok" and verdict_of(row) == "not-checked" and detail and detail not in known:
            rungs.setdefault(detail, []).append(rung_name(row))
    for detail, names in rungs.items():
        yield Note(about="not checked", text=f"{', '.join(names)}: {detail}")


def _reason_notes(document: Document) -> Iterator[Note]:
    for row in rows_of(document):
        word = "not kept" if is_dropped(row) else status_of(row)
        if row.get("reason") or word in ("skipped", "failed"):
            text = reason_of(row) if word == "ok" else f"{word}: {reason_of(row)}"
            yield Note(about=rung_name(row), text=text, kind="failed" if word == "failed" else "plain")


def _compile_notes(document: Document) -> Iterator[Note]:
    """Say what was not compiled, for the first row that reports it: later rungs run the same code."""
    told = {row.get("reason") for row in rows_of(document)}
    for row in rows_of(document):
        text = row.get("compile_note")
        if text and text not in told:
            told.add(text)
            yield Note(about=rung_name(row), text=one_line(text))


def _subject_notes(document: Document) -> Iterator[Note]:
    rows = rows_of(document)
    if rows:
        yield Note(
            about="speed-ups",
            text=f"step is against the recipe the rung was put onto, total against {rung_name(rows[0])}",
        )
        yield Note(about="noise", text=noise_text(document))
    yield from rank_notes(document)
    disturbed = disturbed_among(rows)
    if disturbed:
        yield Note(about="disturbed", text=disturbed_text(disturbed), kind="failed")
    noise = (document.get("noise") or {}).get("fraction") or 0.0
    yield from uneven_notes([row for row in rows if row not in disturbed], noise)  # of those, that is said already
    yield from (Note(about="MFU", text=text) for text in mfu_texts(rows))
    yield from (Note(about="memory", text=text) for text in memory_texts(rows))
    yield from damage_notes(document)
    yield from model_notes(document)
    yield from _missing_notes(document)
    if document.get("under_way"):
        yield Note(about="unfinished", text="the run goes on: later rungs are not here yet")
    elif document.get("finished") is False:
        yield Note(about="unfinished", text="the run was interrupted: later rungs are not here", kind="failed")


def rank_notes(document: Document) -> Iterator[Note]:
    layout = layout_of(document)
    if layout.ranks > 1:
        text = (
            f"{step_of_ranks(layout)}: {rate_unit(unit_of(document))} counts all of them, step "
            "and peak are the worst rank's; comm is what the step waits for / all communication, lag what the slowest "
            "rank computes longer than the middle one"
        )
        yield Note(about=f"{layout.ranks} ranks", text=text)


def step_of_ranks(layout: Layout) -> str:
    """'a step is 2 micro batches, one on each group of 2 ranks'"""
    if layout.data == 1:
        return f"a step is one micro batch, which {layout.tensor} ranks compute together"
    group = "" if layout.tensor == 1 else f" group of {layout.tensor} ranks"
    return f"a step is {layout.data} micro batches, one on each{group}"


def sharing_text(sharing: dict[str, Any]) -> str:
    groups = sharing.get("by_group") or {}  # a single group has all of it
    parts = ", ".join(
        f"{human_seconds(seconds)} about {WHAT_IS_SHARED.get(name, name)}" for name, seconds in groups.items()
    )
    told = f" ({parts})" if len(groups) > 1 else ""
    return (
        f"{human_seconds(sharing['communication_seconds'])} of communication a step{told}, of which "
        f"{human_seconds(sharing['exposed_seconds'])} with nothing else to do meanwhile; the slowest rank computes "
        f"{human_seconds(sharing['straggler_seconds'])} longer than the middle one"
    )


def ranks_of(document: Document) -> int:
    return int((document.get("hardware") or {}).get("ranks") or 1)


WHAT_IS_SHARED = {"tensor": "layers", "data": "gradients and weights"}


def layout_of(document: Document) -> Layout:
    """Return the layout. The ranks of a damaged document, or of one older than layouts, differ only in their data."""
    stored = (document.get("hardware") or {}).get("layout")
    try:
        return from_json(Layout, stored)
    except (TypeError, ValueError):
        return Layout(ranks=ranks_of(document))


def ranks_text(document: Document) -> str:
    """'8 ranks', or '8 ranks: tensor 2 x data 4'."""
    layout = layout_of(document)
    return f"{layout.ranks} ranks" if layout.is_plain else layout.words()


def swing_of(row: Row) -> float:
    """Return how many times as long as its quick steps (p10) a row's slow ones (p90) take: 1 is even."""
    spread = row.get("step_seconds") or {}
    slow, quick = spread.get("p90"), spread.get("p10")
    return float(slow / quick) if slow and quick else 1.0


def disturbed_among(rows: Sequence[Row]) -> list[Row]:
    """Return the rows beside which something else ran: by the kernel's accounts, or by steps that swing."""
    return [row for row in rows if taken_from(row) > MOST_TAKEN or swing_of(row) > MOST_SWING]


def taken_from(row: Row) -> float:
    """Return how many cores that a row's step needed other programs had; 0 if that is not known."""
    return float(row.get("cores_missing") or 0.0)


def disturbance_of(row: Row) -> str:
    """Say by what it shows that a row was disturbed."""
    if taken_from(row) > MOST_TAKEN:
        return f"other programs had {taken_from(row):.1f} of the cores that {rung_name(row)} needed"
    return f"slow steps of {rung_name(row)} took {swing_of(row):.1f} times as long as its quick ones"


def disturbed_text(rows: Sequence[Row], instead: str = ", or with --repeats") -> str:
    """Say that something else ran on the machine, so that these figures are shown but not to be relied on. `instead`
    is what else helps besides a quiet machine, or what another run does."""
    others = f", and {counted(len(rows) - 1, 'row')} more had such company" if len(rows) > 1 else ""
    return (
        f"{disturbance_of(most_disturbed(rows))}{others}: speed-ups from and to such rows mean little; measure again "
        f"on a quiet machine{instead}"
    )


def most_disturbed(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (taken_from(row), swing_of(row)))


def uneven_notes(rows: Sequence[Row], noise: float) -> Iterator[Note]:
    """Name the rows whose median is not what a reader takes it for. A few steps that wait for something leave it as it
    is, while a long run takes as long as the mean says. And where something else slowed most steps of a row or of its
    base, the quick steps of the two differ by another factor."""
    stalled = sorted((row for row in rows if stall_of(row) > MOST_UNEVEN), key=stall_of, reverse=True)
    if stalled:
        text = "some steps take far longer, so a long run is slower than the row says"
        yield Note(about="stalls", text=f"{named(stalled, stall_text)}: {text}", kind="failed")
    most = max(MOST_UNEVEN, 1 + noise)
    slowed = [row for row in rows if not 1 / most <= slowing_of(row) <= most]
    if slowed:
        text = "something else slowed most steps of the row or of the one it was put onto"
        yield Note(about="quick steps", text=f"{named(slowed, slowing_text)}: {text}", kind="failed")


def named(rows: Sequence[Row], text: Callable[[Row], str]) -> str:
    more = f"; and {counted(len(rows) - MOST_NAMED, 'row')} more" if len(rows) > MOST_NAMED else ""
    return "; ".join(f"{rung_name(row)} {text(row)}" for row in rows[:MOST_NAMED]) + more


def stall_text(row: Row) -> str:
    mean, median = (milliseconds(row["step_seconds"][name]) for name in ("mean", "median"))
    return f"takes {mean} ms a step on average and {median} in the median"


def slowing_text(row: Row) -> str:
    return (
        f"is {human_ratio(row['speedup_step'])} by the medians and {human_ratio(row['speedup_quick'])} by quick steps"
    )


def stall_of(row: Row) -> float:
    """Return the mean step over the median one: 1 is even. Older documents have no mean."""
    spread = row.get("step_seconds") or {}
    mean, median = spread.get("mean"), spread.get("median")
    return float(mean / median) if mean and median else 1.0


def slowing_of(row: Row) -> float:
    """Return by which factor a row's step by the medians is above its step by quick ones (p10)."""
    ratio, quick_ratio = row.get("speedup_step"), row.get("speedup_quick")
    return float(ratio / quick_ratio) if ratio and quick_ratio else 1.0


def noise_text(document: Document) -> str:
    noise = document.get("noise") or {}
    if noise.get("fraction") is None:
        return "the noise floor is not known, so no step is marked ~"
    source = f" ({one_line(noise['source'])})" if noise.get("source") else ""
    floor = human_percent(noise["fraction"])
    return f"typically ±{floor}{source}; ~ marks a step inside the noise of its own two rows"


def mfu_texts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each convention once, and every figure that is not shown."""
    measured = [row for row in rows if row.get("mfu") is not None]
    for convention in dict.fromkeys(one_line(row["mfu_convention"]) for row in measured if row.get("mfu_convention")):
        yield f"convention: {convention}"
    for row in measured:
        if shown_mfu(row) is None:
            share = human_percent(row["mfu"])
            yield f"{rung_name(row)}: {share} is above the peak, so the peak or the count is wrong; not shown"


def memory_texts(rows: Sequence[Row]) -> Iterator[str]:
    """Say how far off the worst predicted peak is, and which rows kept blocks that were to be recomputed."""
    errors = {
        rung_name(row): row["predicted_peak_bytes"] / row["peak_bytes"] - 1
        for row in rows
        if row.get("predicted_peak_bytes") and row.get("peak_bytes")
    }
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        yield f"peaks predicted before the run are at most {abs(errors[worst]):.1%} off the measured ones ({worst})"
    for row in rows:
        kept = is_kept(row.get("peak_bytes"), row.get("predicted_peak_bytes"))
        if kept and "checkpointing" in (row.get("recipe") or ()):
            yield f"{rung_name(row)}: blocks should have been recomputed, but the peak says they were kept: no HFU"


def damage_notes(document: Document) -> Iterator[Note]:
    if lost := document.get("unreadable_lines"):
        text = f"{counted(lost, 'line')} of results.jsonl could not be read: what they held is missing here"
        yield Note(about="damaged", text=text, kind="failed")


def model_notes(document: Document) -> Iterator[Note]:
    """Yield what was chosen for the user when the model was resolved."""
    texts = (document.get("workload") or {}).get("notes") or ()
    yield from (Note(about="model", text=one_line(text)) for text in texts)


def _missing_notes(document: Document) -> Iterator[Note]:
    shown = shown_columns(document)
    device = device_name(document)
    for column in counting(COLUMNS, document):
        if column not in shown and column.why_unknown:
            yield Note(about=column.name, text="column left out: " + column.why_unknown.replace("{device}", device))


def device_name(document: Document) -> str:
    return one_line((document.get("hardware") or {}).get("name") or "this device")


def best_row(document: Document) -> Row | None:
    """Return the row behind document["best"]; None if the best came from elsewhere, such as a larger batch."""
    best = document.get("best") or {}
    same = (row for row in rows_of(document) if all(row.get(key) == best.get(key) for key in ("rung", "micro_batch")))
    return next(same, None) if best else None


def workload_text(document: Document) -> str:
    """Return 'gpt2: 12 layers, 12 heads, ..., micro batch 16'; unknown parts are left out."""
    workload = document.get("workload") or {}
    shape = workload.get("shape") or {}
    words = [
        ("layers", "{} layers"),
        ("heads", "{} heads"),
        ("d_model", "d_model {}"),
        ("vocab", "vocabulary {}"),
        ("sequence", "{} tokens of context"),
    ]
    kv = f" ({_count(shape['kv_heads'])} for keys and values)" if shape.get("kv_heads") else ""
    parts = [
        form.format(_count(shape[key])) + (kv if key == "heads" else "")
        for key, form in words
        if shape.get(key) is not None
    ]
    parts += [f"{_count(shape['parameters'])} parameters"] if shape.get("parameters") is not None else []
    # A tune's settings hold the requested micro batch, or None if the search is to find one.
    size = {**workload, **(document.get("settings") or {})}.get("micro_batch")
    parts += [f"micro batch {_count(size)}"] if size is not None else []
    return f"{one_line(workload.get('name') or 'unknown workload')}: {', '.join(parts) or 'shape not known'}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else one_line(value)


def machine_text(document: Document) -> str:
    hardware = document.get("hardware") or {}
    count = hardware.get("count") or 1
    parts = [f"{count} x {device_name(document)}" if count > 1 else device_name(document)]
    parts += [ranks_text(document)] if ranks_of(document) > 1 else []
    if hardware.get("memory_bytes") is not None:
        parts.append(human_bytes(hardware["memory_bytes"]))
    if hardware.get("driver"):
        parts.append(f"driver {one_line(hardware['driver'])}")
    if hardware.get("cpu_name") and hardware["cpu_name"] != hardware.get("name"):
        parts.append(f"host {one_line(hardware['cpu_name'])}")
    if hardware.get("cpu_cores"):
        parts.append(f"{hardware['cpu_cores']} cores")
    return ", ".join(parts)


def versions_text(document: Document) -> str:
    versions = document.get("versions") or {}
    return (
        ", ".join(f"{one_line(name)} {one_line(version)}" for name, version in versions.items() if version) or UNKNOWN
    )


def nothing_found(document: Document) -> str:
    """Say why there is no best row."""
    measured = [row for row in rows_of(document) if row.get("tokens_per_second") is not None]
    if not measured:
        return "no row has been measured"
    if all(verdict_of(row) == "not-checked" for row in measured):
        return f"{counted(len(measured), 'row')} measured, and none could be checked"
    return "no row was measured and found right"


def best_text(document: Document) -> str:
    best = document.get("best")
    if not best:
        return nothing_found(document)
    row = best_row(document) or {}
    unit = rate_unit(unit_of(document), short=False)
    parts = [f"{human_rate(best.get('tokens_per_second'))} {unit} with {one_line(best.get('rung') or UNKNOWN)}"]
    parts += [f"micro batch {best['micro_batch']}"] if best.get("micro_batch") is not None else []
    if row.get("speedup_total") is not None:
        noise = (document.get("noise") or {}).get("fraction") or 0.0
        caveat = f" (with a noise of ±{human_percent(noise)})" if noise >= LOUD_NOISE else ""
        parts.append(f"{human_ratio(row['speedup_total'])} the {rung_name(rows_of(document)[0])}{caveat}")
    parts += [f"{human_percent(shown_mfu(row))} MFU"] if shown_mfu(row) is not None else []
    return ", ".join(parts)


def print_ladder(document: Document, console: Console) -> None:
    """Print the whole result: what ran where, the table, its notes, bars, the best row."""
    rows = rows_of(document)
    _print_header(document, console)
    console.print(ladder_table(document, console.width) if rows else Text("nothing was measured yet", style="bold"))
    shed = shed_columns(document, console.width) if rows else []
    notes = notes_of(document)
    if shed:
        notes.append(
            Note(about="width", text=f"{console.width} columns leave no room for: {', '.join(shed)} (--json has them)")
        )
    console.print()
    console.print(notes_grid(notes))
    if not rows:
        return
    console.print()
    if rebatched_rows(document):
        _print_rebatched(document, console)
    print_bars(rows, console)
    console.print(
        Text.assemble(("\nbest  ", "bold"), (best_text(document), "bold green" if document.get("best") else ""))
    )


def _print_rebatched(document: Document, console: Console) -> None:
    console.print(Text("each rung at its own micro batch", style="bold"))
    console.print(rebatched_table(document, console.width))
    console.print()
    console.print(notes_grid(rebatched_notes(document)))
    if best := document.get("best_rebatched"):
        unit = rate_unit(unit_of(document), short=False)
        words = f"{human_rate(best.get('tokens_per_second'))} {unit} with {one_line(best.get('rung') or UNKNOWN)}"
        console.print(Text.assemble(("fastest there  ", "bold"), f"{words}, micro batch {best.get('micro_batch')}"))
    console.print()


def _print_header(document: Document, console: Console) -> None:
    grid = _two_columns()
    for name, text in (("workload", workload_text), ("machine", machine_text), ("versions", versions_text)):
        grid.add_row(Text(name, style="bold"), Text(text(document), overflow="fold"))
    console.print(grid)
    console.print()


def notes_grid(notes: Sequence[Note]) -> Table:
    """Subjects on the left, their text wrapped beside them; nothing is cut."""
    styles = {"failed": "red", "different": "bold red"}
    grid = _two_columns()
    for note in notes:
        style = styles.get(note.kind, "dim")
        grid.add_row(Text(note.about, style=style), Text(note.text, style=style, overflow="fold"))
    return grid


def _two_columns() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def print_bars(rows: Sequence[Row], console: Console) -> None:
    for line in speed_bars(rows, console.width, plain=console.options.ascii_only):
        console.print(line)


def speed_bars(rows: Sequence[Row], width: int, plain: bool = False) -> Iterator[Text]:
    """Draw tokens per second as bars; rungs that were not kept are lighter. `plain` draws them in ASCII."""
    measured = [row for row in rows if row.get("tokens_per_second") is not None]
    if not measured:
        return
    names = max(len(_rung_cell(row)) for row in measured)
    values = max(len(human_rate(row["tokens_per_second"])) for row in measured)
    room = max(8, min(width, WIDTH_COLUMNS) - names - values - 4)
    fastest = max(row["tokens_per_second"] for row in measured)
    draw = _plain_bar if plain else _bar
    for row in measured:
        bar = draw(row["tokens_per_second"] / fastest * room if fastest else 0, light=is_dropped(row))
        value = human_rate(row["tokens_per_second"])
        yield Text.assemble(
            f"{_rung_cell(row):<{names}}  ", (bar, "dim" if is_dropped(row) else "cyan"), f"  {value}", no_wrap=True
        )


def _bar(length: float, light: bool) -> str:
    """Return a bar of `length` cells, to an eighth of a cell; the light form has no eighths."""
    if light:
        return "░" * max(1, round(length))
    eighths = max(1, round(length * 8))
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _plain_bar(length: float, light: bool) -> str:
    return ("." if light else "#") * max(1, round(length))
