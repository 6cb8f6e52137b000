"""Two runs side by side: what differs, each figure as a ratio with its noise, and whether B keeps up with A.

    document = compare(read(a), read(b), sources=("runs/monday", "runs/tuesday"), rung=None, fail_below=0.95)
    document["figure"]["ratio"], document["figure"]["significant"], document["figure"]["passed"]

A run is the document of a ladder, a tune or a training run (`kind_of`); the two may differ in kind. Ratios are B over
A. Tokens of different models are not the same work: then there is no ratio, `why_not` holds the reason, and a gate is
refused. `compare_words.py` puts the result into words; this file computes and shows nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redline.core.errors import UserError, unknown_name
from redline.core.measurement import spread_of
from redline.core.traced import TOKEN
from redline.core.units import human_bytes
from redline.core.values import to_json
from redline.core.workload import Shape
from redline.predict.noise import UNSEEN_RUN_TO_RUN, exceeds, noise_of_ratio, spread_error
from redline.report import (
    Document,
    Row,
    has_implausible_peak,
    one_line,
    reason_of,
    rung_name,
    shown_mfu,
    status_of,
    verdict_of,
)
from redline.report.compare_words import notes_of
from redline.report.table import best_row, layout_of, rows_of, unit_of

KINDS = ("ladder", "tune", "train")
MOST_SHARE = 2.0  # of --fail-below: a larger number was meant as a percentage
MACHINE = (
    *("name", "count", "memory_bytes", "capability", "driver", "cpu_name", "cpu_cores", "features"),
    *("ranks", "layout"),
)
MOST_SIZES = 6  # named in one sentence
TRACED = ("unit", "items_per_sample", "parameters", "flops_forward", "flops_backward")
NOT_SETTINGS = ("shape", "notes", "cannot", "words", "source")
"""Workload fields that are not compared as settings: sizes are compared as the model, the rest follows from it or is
reported elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One measured speed, or the reason there is none."""

    name: str
    rungs: tuple[str, ...] | None
    micro_batch: int | None
    tokens_per_second: float | None
    error: float | None
    """The standard error of its median, as a fraction; None if the document has no spread."""
    steps: int
    """How many steps or cycles that error was computed from."""
    peak_bytes: int | None
    peak_trusted: bool
    """False if the peak is far below its prediction and must not be relied on."""
    mfu: float | None
    verdict: str | None
    """None for a training run, which is not compared with fp32."""
    reason: str | None

    @property
    def counts(self) -> bool:
        """True if the speed is known and the training is not *different*, which would make it meaningless."""
        return self.tokens_per_second is not None and self.verdict != "different"


@dataclass(frozen=True, kw_only=True)
class Side:
    label: str
    source: str
    kind: str
    document: Document
    entries: tuple[Entry, ...]
    best: Entry | None


def kind_of(document: object) -> str | None:
    """Return the command that made the document, judging by its fields; None if it cannot be compared."""
    if not isinstance(document, dict):
        return None
    if document.get("kind") == "train" and isinstance(document.get("curves"), dict):
        return "train"
    rows, best = document.get("rows"), document.get("best", "absent")
    if not isinstance(rows, list) or not (best is None or isinstance(best, dict)):
        return None
    if not all(isinstance(row, dict) for row in rows):
        return None
    if "budget" in document and "stopped" in document:
        return "tune"
    return "ladder" if all("rung" in row for row in rows) and "reference" in document else None


def compare(
    one: Document,
    other: Document,
    *,
    sources: tuple[str, str] = ("A", "B"),
    rung: str | None = None,
    fail_below: float | None = None,
) -> Document:
    check_share(fail_below)
    a, b = side_of("A", sources[0], one), side_of("B", sources[1], other)
    why_not = why_not_comparable(a.document, b.document)
    found: Document = {
        "kind": "comparison",
        "a": side_json(a),
        "b": side_json(b),
        "comparable": why_not is None,
        "why_not": why_not,
        "unit": unit_of(a.document) or "token",
        "figure": figure_json(a, b, rung, fail_below, why_not),
        "differences": differences(a, b),
        "recipe": recipe_json(*chosen(a, b, rung)),
        "rows": [pair_json(mine, theirs, a, b, why_not is None) for mine, theirs in pairs(a, b)],
    }
    return {**found, "words": [dataclasses.asdict(note) for note in notes_of(found)]}


def check_share(share: float | None) -> None:
    if share is not None and not 0 < share <= MOST_SHARE:  # NaN is refused too
        raise UserError(
            f"--fail-below is {share:g}",
            "it is the share of A's speed that B must reach",
            "write 0.95 to allow 5 % less",
        )


# --- the two sides ----------------------------------------------------------------------------------------------------


def side_of(label: str, source: str, document: Document) -> Side:
    kind = kind_of(document)
    if kind is None:
        raise UserError(
            f"{source} holds no results that can be compared",
            f"it is none of: {', '.join(KINDS)}",
            "give a run directory, or what `redline ladder --json`, `tune --json` or `report DIR --json` printed",
        )
    entries = tuple(ENTRIES[kind](document))
    return Side(
        label=label, source=source, kind=kind, document=document, entries=entries, best=best_entry(kind, document)
    )


def ladder_entries(document: Document) -> Iterator[Entry]:
    for row in rows_of(document):
        yield row_entry(row, rung_name(row), row.get("recipe"), verdict_of(row))


def tune_entries(document: Document) -> Iterator[Entry]:
    for row in rows_of(document):
        yield row_entry(row, f"#{row.get('number')}", row.get("rungs"), verdict_of(row))


def row_entry(row: Row, name: str, rungs: Any, verdict: str) -> Entry:
    return Entry(
        name=name,
        rungs=None if rungs is None else tuple(map(one_line, rungs)),
        micro_batch=row.get("micro_batch"),
        tokens_per_second=speed(row.get("tokens_per_second")),
        error=spread_error(row.get("step_seconds")),
        steps=(row.get("step_seconds") or {}).get("n") or 0,
        peak_bytes=row.get("peak_bytes"),
        peak_trusted=not has_implausible_peak(row),
        mfu=shown_mfu(row),
        verdict=verdict,
        reason=reason_of(row) if row.get("reason") or status_of(row) != "ok" else None,
    )


def training_entries(document: Document) -> Iterator[Entry]:
    """Yield one entry: the median of the last session's cycles, with the scatter of the whole speed curve."""
    recipe, settings = document.get("recipe") or {}, document.get("settings") or {}
    rates = [rate for _, rate in document["curves"].get("tokens_per_second") or []]
    yield Entry(
        name="training",
        rungs=None if recipe.get("rungs") is None else tuple(map(one_line, recipe["rungs"])),
        micro_batch=settings.get("micro_batch", recipe.get("micro_batch")),
        tokens_per_second=speed(document.get("tokens_per_second")),
        error=spread_error(to_json(spread_of(rates))) if len(rates) > 1 else None,
        steps=len(rates),
        peak_bytes=document.get("peak_bytes"),
        peak_trusted=True,  # a training run has no predicted peak
        mfu=shown_mfu(document),
        verdict=None,
        reason=None,
    )


ENTRIES: dict[str, Callable[[Document], Iterator[Entry]]] = {
    "ladder": ladder_entries,
    "tune": tune_entries,
    "train": training_entries,
}


def speed(value: object) -> float | None:
    """Return a positive, finite number; None for anything else, since documents come from anywhere."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if known else None  # type: ignore[arg-type]


def best_entry(kind: str, document: Document) -> Entry | None:
    """Return what the run itself calls its best; a training run has a single entry."""
    entries = list(ENTRIES[kind](document))
    if kind == "train":
        return entries[0] if entries[0].tokens_per_second is not None else None
    best, rows = document["best"], rows_of(document)
    if not best:
        return None
    row = (
        best_row(document)
        if kind == "ladder"
        else next((r for r in rows if r.get("number") == best.get("number")), None)
    )
    if row is not None:
        return next(entry for entry, one in zip(entries, rows, strict=True) if one is row)
    # Measured elsewhere, such as at a larger batch: a figure without a spread.
    return row_entry(best, one_line(best.get("rung") or "best"), best.get("rungs"), "not-checked")


def side_json(side: Side) -> Document:
    document = side.document
    return {
        "source": one_line(side.source),
        "kind": side.kind,
        **{name: document.get(name) for name in ("workload", "hardware", "versions", "settings", "command", "date")},
        "finished": ended_well(side),
    }


def ended_well(side: Side) -> bool:
    if side.kind == "train":
        return side.document.get("ended") in ("steps", "tokens", "minutes")
    return side.document.get("finished") is not False


# --- may they be compared? --------------------------------------------------------------------------------------------


def model_of(document: Document) -> Document | None:
    """Return what the cost of a token depends on: the sizes or, for a traced module, what was counted in it."""
    shape = (document.get("workload") or {}).get("shape")
    if not isinstance(shape, dict) or not shape:
        return None
    if "d_model" not in shape:
        return {name: shape.get(name) for name in TRACED}
    known = dataclasses.fields(Shape)
    sizes = {**{one.name: None if one.default is dataclasses.MISSING else one.default for one in known}, **shape}
    # A size is the same whether it was stated or left to its default.
    implied = {"max_positions": sizes["sequence"], "kv_heads": sizes["heads"]}
    return {name: implied.get(name) if value is None else value for name, value in sizes.items()}


def why_not_comparable(one: Document, other: Document) -> str | None:
    mine, theirs = model_of(one), model_of(other)
    if mine is None or theirs is None:
        return f"the model of {'A' if mine is None else 'B'} is not known"
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not differing:
        return None
    pieces = [f"{name.replace('_', ' ')} {plain(mine.get(name))} and {plain(theirs.get(name))}" for name in differing]
    more = f" and {len(pieces) - MOST_SIZES} more" if len(pieces) > MOST_SIZES else ""
    return f"another model or length of sequences: {', '.join(pieces[:MOST_SIZES])}{more}"


# --- figures ----------------------------------------------------------------------------------------------------------


def chosen(a: Side, b: Side, rung: str | None) -> tuple[Entry | None, Entry | None]:
    """Return the two entries to compare: the best of each side, or one rung of both."""
    if rung is None:
        return a.best, b.best
    return named(a, rung), named(b, rung)


def named(side: Side, rung: str) -> Entry:
    if side.kind != "ladder":
        raise UserError(
            f"--rung {rung}: {side.source} is no ladder",
            f"a {'training run' if side.kind == 'train' else side.kind} has no row for each rung",
            "leave --rung out: the best of each is compared",
        )
    found = next((entry for entry in side.entries if entry.name == rung), None)
    if found is None:
        raise unknown_name(f"rung in {side.source}", rung, [entry.name for entry in side.entries])
    return found


def figure_json(a: Side, b: Side, rung: str | None, fail_below: float | None, why_not: str | None) -> Document:
    mine, theirs = chosen(a, b, rung)
    if fail_below is not None:
        check_known(a, b, mine, theirs, rung, why_not)
    found = ratio_json(mine, theirs, a, b, why_not is None)
    passed = None
    if fail_below is not None:
        assert theirs is not None
        passed = theirs.counts and found["ratio"] >= fail_below
    return {
        "of": "best" if rung is None else rung,
        "a": None if mine is None else entry_json(mine),
        "b": None if theirs is None else entry_json(theirs),
        **found,
        "fail_below": fail_below,
        "passed": passed,
    }


def check_known(
    a: Side, b: Side, mine: Entry | None, theirs: Entry | None, rung: str | None, why_not: str | None
) -> None:
    """Raise unless both figures are known, final and comparable: a gate must not pass without them."""
    if why_not is not None:
        raise UserError(
            "--fail-below has nothing to compare", why_not, "compare runs of the same model at the same sequence length"
        )
    if mine is not None and mine.tokens_per_second is not None and not mine.counts:
        raise UserError(
            f"A's {mine.name} cannot serve as a baseline for B",
            f"its training is different: {mine.reason or 'no reason was given'}",
            "choose an A that trains right, or another --rung",
        )
    check_ranks(a, b)
    for side, entry in ((a, mine), (b, theirs)):
        if rung is None and not ended_well(side):
            raise UserError(
                f"{side.label} ({side.source}) did not come to its end",
                "its best figure so far need not be its best",
                "let it finish first (--resume continues it), or compare one row of two ladders: --rung",
            )
        if entry is None or entry.tokens_per_second is None:
            what = "best figure" if rung is None else f"figure of {rung}"
            why = "no row was measured and found right" if entry is None else entry.reason or "its speed is not known"
            raise UserError(
                f"{side.label} ({side.source}) has no {what}",
                why,
                "--fail-below needs both: measure that run again, or choose another --rung",
            )


def check_ranks(a: Side, b: Side) -> None:
    mine, theirs = (machine_facts(side.document)["ranks"] for side in (a, b))
    if mine != theirs:
        raise UserError(
            f"--fail-below cannot compare {mine} {'rank' if mine == 1 else 'ranks'} with {theirs}",
            f"{unit_of(a.document) or TOKEN}s/s counts all ranks together, so more of them hide that each is slower",
            "compare runs on the same number of ranks",
        )


def ratio_json(mine: Entry | None, theirs: Entry | None, a: Side, b: Side, comparable: bool) -> Document:
    """Return B's speed over A's, the noise of this ratio, and whether the change exceeds it."""
    unknown = {"ratio": None, "noise": None, "significant": None}
    if mine is None or theirs is None or not comparable:
        return unknown
    if mine.tokens_per_second is None or theirs.tokens_per_second is None:
        return unknown
    ratio = theirs.tokens_per_second / mine.tokens_per_second
    noise = noise_of(mine, theirs, a.document, b.document)
    return {"ratio": ratio, "noise": noise, "significant": None if noise is None else exceeds(ratio, noise)}


def noise_of(mine: Entry, theirs: Entry, one: Document, other: Document) -> float | None:
    """Return the noise from both spreads, never less than what either ladder learned about its own machine; None if a
    spread is missing."""
    if mine.error is None or theirs.error is None:
        return None
    kinds = [(document.get("hardware") or {}).get("kind") for document in (one, other)]
    known = [kind for kind in kinds if kind in UNSEEN_RUN_TO_RUN] or list(UNSEEN_RUN_TO_RUN)
    device = max(known, key=lambda kind: UNSEEN_RUN_TO_RUN[kind])  # the less steady of two machines
    degrees_of_freedom = mine.steps + theirs.steps - 2
    # Repeats do not help: those of one session share its clocks, its temperature and its card.
    noise = noise_of_ratio(mine.error, theirs.error, device=device, repeats=1, degrees_of_freedom=degrees_of_freedom)
    learned = [(document.get("noise") or {}).get("fraction") or 0.0 for document in (one, other)]
    return max(noise, *learned)


def entry_json(entry: Entry) -> Document:
    return {**dataclasses.asdict(entry), "rungs": None if entry.rungs is None else list(entry.rungs)}


# --- rows -------------------------------------------------------------------------------------------------------------


def pairs(a: Side, b: Side) -> list[tuple[Entry | None, Entry | None]]:
    """Pair the rows of two ladders by rung, with None for a missing one; otherwise pair the recipes that both sides
    measured."""
    if a.kind == b.kind == "ladder":
        mine, theirs = ({entry.name: entry for entry in side.entries} for side in (a, b))
        return [(mine.get(name), theirs.get(name)) for name in {**mine, **theirs}]
    recipes = {recipe_key(entry): entry for entry in b.entries if recipe_key(entry) is not None}
    both = ((entry, recipes.get(recipe_key(entry))) for entry in a.entries)
    return [(entry, other) for entry, other in both if other is not None]


def recipe_key(entry: Entry) -> tuple[frozenset[str], int] | None:
    if entry.rungs is None or entry.micro_batch is None:
        return None
    return frozenset(entry.rungs), entry.micro_batch


def pair_json(mine: Entry | None, theirs: Entry | None, a: Side, b: Side, comparable: bool) -> Document:
    same = None if mine is None or theirs is None else recipe_key(mine) == recipe_key(theirs)
    name = mine.name if mine is not None else theirs.name if theirs is not None else ""
    return {
        "name": name if a.kind == b.kind == "ladder" or theirs is None else f"{name} / {theirs.name}",
        "a": None if mine is None else entry_json(mine),
        "b": None if theirs is None else entry_json(theirs),
        "same_recipe": same,
        **ratio_json(mine, theirs, a, b, comparable),
    }


# --- what differs -----------------------------------------------------------------------------------------------------


def recipe_json(mine: Entry | None, theirs: Entry | None) -> Document | None:
    """Return how the two compared recipes differ."""
    if mine is None or theirs is None or mine.rungs is None or theirs.rungs is None:
        return None
    return {
        "only_a": [name for name in mine.rungs if name not in theirs.rungs],
        "only_b": [name for name in theirs.rungs if name not in mine.rungs],
        "micro_batch": {"a": mine.micro_batch, "b": theirs.micro_batch},
    }


def differences(a: Side, b: Side) -> dict[str, list[Document] | None]:
    """Return what differs between the sides, by group, as text. A setting that only one side states comes from another
    version and is left out. `settings` is None for two different commands, whose settings mean different things."""
    one, other = a.document, b.document
    mine, theirs = one.get("versions") or {}, other.get("versions") or {}
    return {
        "machine": differing(machine_facts(one), machine_facts(other), MACHINE),
        "versions": differing(mine, theirs, {**mine, **theirs}),
        "workload": stated(workload_facts(one), workload_facts(other)),
        "settings": stated(flat(one.get("settings")), flat(other.get("settings"))) if a.kind == b.kind else None,
    }


def stated(one: Document, other: Document) -> list[Document]:
    return differing(one, other, [name for name in one if name in other])


def machine_facts(document: Document) -> Document:
    """Return what is known of the machine; a training run keeps its layout beside its hardware."""
    hardware = dict(document.get("hardware") or {})
    layout = layout_of({"hardware": {**hardware, "layout": document.get("layout") or hardware.get("layout")}})
    return {
        **hardware,
        "memory_bytes": human_bytes(hardware.get("memory_bytes")),
        "ranks": layout.ranks,
        "layout": None if layout.is_plain else layout.words(),
    }


def workload_facts(document: Document) -> Document:
    workload = document.get("workload") or {}
    plain_facts = {name: value for name, value in workload.items() if name not in NOT_SETTINGS}
    return {**plain_facts, "code": (workload.get("source") or {}).get("kind") or "gpt2", **(model_of(document) or {})}


def flat(settings: Document | None) -> Document:
    """Flatten nested settings (the budget, the starting recipe) into names such as 'budget minutes'."""
    parts: Document = {}
    for name, value in (settings or {}).items():
        inner = {f"{name} {key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        parts |= inner
    return parts


def differing(one: Document, other: Document, names: Iterable[str]) -> list[Document]:
    return [
        {
            "name": one_line(name).replace("_", " "),
            "a": value_text(one.get(name), other.get(name)),
            "b": value_text(other.get(name), one.get(name)),
        }
        for name in names
        if one.get(name) != other.get(name)
    ]


def value_text(value: Any, against: Any) -> str:
    """Return the value as text; for two lists of strings, only the items that the other lacks."""
    if isinstance(value, list) and isinstance(against, list) and all(isinstance(item, str) for item in value):
        return plain([item for item in value if item not in against]) if value else plain(value)
    return plain(value)


def plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(one_line, value)) or "none"
    return "none" if value is None else one_line(value)
