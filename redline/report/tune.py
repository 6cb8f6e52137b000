"""A tune for the terminal: the ranking, what each knob gained, the cost of compiling, the remaining gap, the winner.

    print_tune(document, Console())

Draws the document of `redline tune --json`. It fits 100 columns and cuts nothing that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
from redline.report import Document, Row, has_implausible_peak, one_line
from redline.report.svg import clipped
from redline.report.table import (
    STATUS_STYLES,
    VERDICT_STYLES,
    WIDTH_COLUMNS,
    Note,
    damage_notes,
    disturbed_among,
    disturbed_text,
    machine_text,
    milliseconds,
    model_notes,
    notes_grid,
    print_bars,
    ranks_of,
    sharing_text,
    unit_of,
    versions_text,
    workload_text,
)

COLUMNS = ("#", "change from the winner", "batch", "ms/step", "tok/s", "of best", "peak", "compile", "verdict")
NUMBERS = ("#", "batch", "ms/step", "tok/s", "of best", "peak", "compile")
ENDINGS = {
    "converged": "nothing is left to try",
    "minutes": "nothing more would end in the time left",
    "interrupted": "interrupted",
    "device-lost": "the device no longer answers",
}
MOST_BARS, BAR_LETTERS = 12, 36  # the table above has all of them
UNDER_WAY = "under-way"  # the `why` of a search that is still running when it is looked at


def print_tune(document: Document, console: Console) -> None:
    header = [("workload", workload_text(document)), ("machine", machine_text(document))]
    header += [("versions", versions_text(document)), ("search", search_text(document))]
    for name, text in header:
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=False)
    console.print()
    console.print(ranking_table(document, min(console.width, WIDTH_COLUMNS)))
    console.print()
    console.print(notes_grid(list(notes_of(document))))
    console.print()
    print_bars(list(bar_rows(document)), console)
    console.print(Text.assemble(("\nbest  ", "bold"), (best_text(document), "bold green" if document["best"] else "")))


def search_text(document: Document) -> str:
    budget, stopped = document["budget"], document["stopped"]
    reason = ENDINGS.get(stopped["why"], one_line(stopped["why"]))
    ending = "it goes on" if stopped["why"] == UNDER_WAY else f"ended because {reason}"
    detail = f" ({one_line(stopped['detail'])})" if stopped["detail"] else ""
    remembered = f", {budget['remembered_trials']} of them remembered" if budget["remembered_trials"] else ""
    used = f"{human_seconds(budget['spent_seconds'])} of {human_seconds(budget['seconds'])}"
    return f"{counted(budget['trials'], 'recipe')} in {used}{remembered}; {ending}{detail}"


def ranking_table(document: Document, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in COLUMNS:
        heading = name.replace("tok/s", rate_unit(unit_of(document)))
        table.add_column(heading, justify="right" if name in NUMBERS else "left", overflow="fold")
    table.width = None if width >= WIDTH_COLUMNS else width
    for row in document["rows"]:
        table.add_row(*styled_cells(row, document))
    return table


def bar_rows(document: Document) -> Iterator[Row]:
    """Yield the fastest trials as rows of a ladder; trials that cannot win are 'not kept'."""
    measured = [row for row in document["rows"] if row["tokens_per_second"] is not None]
    for row in sorted(measured, key=lambda row: -row["tokens_per_second"])[:MOST_BARS]:
        name = clipped(f"#{row['number']} {change_text(row, document)}", BAR_LETTERS)
        yield {**row, "rung": name, "kept": verdict_of(row) not in ("lost", "different")}


def styled_cells(row: Row, document: Document) -> Iterator[Text]:
    verdict = verdict_of(row)
    style = STATUS_STYLES.get(verdict, "bold" if is_best(row, document) else "")
    cells = (
        str(row["number"]),
        change_text(row, document),
        str(row["micro_batch"]),
        milliseconds((row["step_seconds"] or {}).get("median")) or UNKNOWN,
        human_rate(row["tokens_per_second"]),
        human_percent(row["of_best"]),
        peak_text(row),
        human_seconds(row["compile_seconds"]),
    )
    for cell in cells:
        yield Text(cell, style=style)
    yield Text(verdict, style=VERDICT_STYLES.get(verdict, style))


def verdict_of(row: Row) -> str:
    """Return the verdict; 'lost' if the trial was given up before it was checked, because it could not win. Unchecked
    trials that are faster than the winner could have won and ran out of time: they stay 'not-checked'."""
    if row["status"] != "ok":
        return "failed"
    verdict = one_line(row["equivalence"]["verdict"])
    slower = row["of_best"] is None or row["of_best"] <= 1
    return "lost" if verdict == "not-checked" and row["loss_curve"] is None and slower else verdict


def is_best(row: Row, document: Document) -> bool:
    return bool(document["best"]) and row["number"] == document["best"]["number"]


def change_text(row: Row, document: Document) -> str:
    """Return the difference from the winner, whatever the trial built on; without a winner, what the trial changed."""
    best = document["best"]
    if best is None:
        return one_line(row["change"])
    if is_best(row, document):
        return "the winner"
    if document["baseline"] and row["number"] == document["baseline"]["number"]:
        return "the plain way"
    went = [name for name in best["rungs"] if name not in row["rungs"]]
    came = [name for name in row["rungs"] if name not in best["rungs"]]
    words = [f"+ {', '.join(came)}"] if came else []
    words += [f"- {', '.join(went)}"] if went else []
    return one_line("  ".join(words) or "its rungs, another batch")


def notes_of(document: Document) -> Iterator[Note]:
    """Yield what is wrong first, then what each knob gained, then the rest."""
    yield from slower_notes(document)
    for row in document["rows"]:
        if verdict_of(row) == "different":
            detail = one_line(row["equivalence"]["detail"])
            yield Note(
                about=f"#{row['number']}",
                text=f"DIFFERENT: this is not the same training any more, so it cannot win. {detail}",
                kind="different",
            )
    for row in document["rows"]:
        if row["status"] != "ok" or (row["reason"] and verdict_of(row) not in ("different", "lost")):
            kind = "failed" if row["status"] != "ok" else "plain"
            yield Note(
                about=f"#{row['number']}", text=f"{one_line(row['change'])}: {one_line(row['reason'])}", kind=kind
            )
    yield from disturbed_notes(document)
    yield from peak_notes(document)
    for knob in document["knobs"]:
        yield Note(about=knob["knob"], text=one_line(knob["text"]))
    yield from tie_notes(document)
    yield from sharing_notes(document)
    for text in break_even_texts(document):
        yield Note(about="compiling", text=text)
    yield from roofline_notes(document)
    yield from left_out_notes(document)
    yield from damage_notes(document)
    yield from model_notes(document)


def sharing_notes(document: Document) -> Iterator[Note]:
    """Say how much time the winner's ranks cost one another."""
    for row in document["rows"]:
        if is_best(row, document) and row.get("sharing"):
            yield Note(about=f"{ranks_of(document)} ranks", text=f"#{row['number']}: {sharing_text(row['sharing'])}")


def disturbed_notes(document: Document) -> Iterator[Note]:
    disturbed = disturbed_among([{**row, "rung": f"#{row['number']}"} for row in document["rows"]])
    if disturbed:
        text = disturbed_text(disturbed, instead=": another run takes none of them from memory")
        yield Note(about="disturbed", text=text, kind="failed")


def peak_notes(document: Document) -> Iterator[Note]:
    """Yield the peaks that are not relied on; `?` marks them in the tables."""
    for row in document["rows"]:
        if has_implausible_peak(row):
            measured, predicted = human_bytes(row["peak_bytes"]), human_bytes(row["predicted_peak_bytes"])
            text = f"#{row['number']}: {measured} measured, {predicted} predicted: this peak cannot be right"
            yield Note(about="memory", text=f"{text}, so its memory is not compared with other trials'")


def peak_text(row: Row) -> str:
    return human_bytes(row["peak_bytes"]) + ("?" if has_implausible_peak(row) else "")


def left_out_notes(document: Document) -> Iterator[Note]:
    """Yield the rungs that cannot be chosen, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in document["space"]["left_out"].items():
        reasons.setdefault(one_line(reason), []).append(one_line(name))
    for reason, names in reasons.items():
        yield Note(about="not available", text=f"{', '.join(names)}: {reason}")


def tie_notes(document: Document) -> Iterator[Note]:
    best = document["best"]
    if best and best["ties"]:
        ties = ", ".join(f"#{number}" for number in best["ties"])
        yield Note(about="ties", text=f"noise cannot tell the winner from {ties}; more --minutes would repeat them")


def break_even_texts(document: Document) -> Iterator[str]:
    for row in document["break_even"]:
        rival = one_line(row["against"])
        if row["tokens"] is None:
            yield f"against {rival}: {UNKNOWN} ({one_line(row.get('reason') or 'no break-even is known')})"
            continue
        yield (
            f"{human_seconds(row['compile_seconds'])} more than {rival}: pays in runs of more than "
            f"{row['tokens']:,.0f} tokens ({human_seconds(row['training_seconds'])} of training)"
        )


def roofline_notes(document: Document) -> Iterator[Note]:
    roofline = document["roofline"]
    if roofline is None:
        return
    if roofline["of_light"] is None:
        yield Note(about="roofline", text=f"the gap is not known: {one_line(roofline['reason'])}")
        return
    yield Note(
        about="roofline",
        text=f"{human_percent(roofline['of_light'])} of this recipe's speed of light, {human_rate(roofline['light'])} "
        f"tokens/s at the data sheet's peaks; {human_rate(roofline['expected'])} were predicted",
    )


def best_text(document: Document) -> str:
    best: dict[str, Any] | None = document["best"]
    if best is None:
        return f"no recipe was measured and found right{unproved_text(document)}"
    unit = rate_unit(unit_of(document), short=False)
    parts = [f"{human_rate(best['tokens_per_second'])} {unit} at micro batch {best['micro_batch']}"]
    if best["accumulation"] is not None:
        parts.append(f"{best['accumulation']} of them per update of {best['global_batch']}")
    if best["speedup"] is not None:
        parts.append(f"{human_ratio(best['speedup'])} the plain way")
    parts.append(f"{one_line(best['verdict'])}: {' + '.join(map(one_line, best['rungs'])) or 'no rung'}")
    return ", ".join(parts)


def slower_notes(document: Document) -> Iterator[Note]:
    """Warn of a winner that is slower than the plain way."""
    speedup = (document["best"] or {}).get("speedup")
    if speedup is not None and speedup < 1:
        text = (
            f"SLOWER than the plain way, at {human_ratio(speedup)} its speed: nothing faster was proved right in this "
            "time, and the plain way was not either. Give more --minutes"
        )
        yield Note(about="the winner", text=text, kind="failed")


def unproved_text(document: Document) -> str:
    """Return ': why; what helps' for a run without a winner; empty for an older document, which does not say."""
    unproved = document.get("unproved") or {}
    said = [one_line(unproved[part]) for part in ("why", "fix") if unproved.get(part)]
    return f": {'; '.join(said)}" if said else ""
