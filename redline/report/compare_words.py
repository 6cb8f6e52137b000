"""A comparison in words: warnings, the speed and the gate, which rows changed, then everything that is not the same.

    for note in notes_of(document): print(note.about, note.text)

The document comes from `compare.compare`; this file only chooses what to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redline.core.units import UNKNOWN, human_bytes, human_percent, human_rate, human_ratio
from redline.report import Document, one_line
from redline.report.table import Note

SAME = 0.0005  # a smaller change would be shown as 0.0 %
MOST_NAMED = 4  # rungs in one sentence; the table has all
KIND_WORDS = {"ladder": "ladder", "tune": "tune", "train": "training run"}


def notes_of(document: Document) -> list[Note]:
    return [
        *loud_notes(document),
        Note(about="speed", text=speed_text(document)),
        *gate_notes(document),
        *row_notes(document),
        *verdict_notes(document),
        *memory_notes(document),
        *difference_notes(document),
    ]


def loud_notes(document: Document) -> Iterator[Note]:
    """Yield what a reader must know before any number."""
    if not document["comparable"]:
        plural = f"{document['unit']}s"
        yield Note(
            about="NOT COMPARABLE",
            text=f"{document['why_not']}. {plural.capitalize()} of different models are different work, so there is no "
            "ratio; MFU can be compared",
            kind="different",
        )
    kinds = {label: document[label.lower()]["kind"] for label in ("A", "B")}
    if kinds["A"] != kinds["B"]:
        words = " and ".join(f"{label} a {KIND_WORDS[kind]}" for label, kind in kinds.items())
        more = ", whose speed is without evaluations and checkpoints" if "train" in kinds.values() else ""
        yield Note(about="two kinds", text=f"{words}{more}: recipes that both measured are compared, and the best")
    for label in ("A", "B"):
        if not document[label.lower()]["finished"]:
            yield Note(about="unfinished", text=f"{label} did not come to its end: more may be missing", kind="failed")


def speed_text(document: Document) -> str:
    figure, unit = document["figure"], f"{document['unit']}s/s"
    what = "the best of each" if figure["of"] == "best" else one_line(figure["of"])
    rates = " -> ".join(human_rate((figure[side] or {}).get("tokens_per_second")) for side in ("a", "b"))
    if figure["ratio"] is None:
        return f"{what}: {rates} {unit}, no ratio"
    change = figure["ratio"] - 1
    word = "as fast" if abs(change) < SAME else f"{human_percent(abs(change))} {'faster' if change > 0 else 'slower'}"
    return f"{what}: {rates} {unit}, B is {word} ({human_ratio(figure['ratio'])}), {noise_summary(figure)}"


def noise_summary(compared: Document) -> str:
    if compared["noise"] is None:
        return "the noise is not known: one of them has no spread"
    if compared["significant"]:
        return f"more than the noise of {human_percent(compared['noise'])}"
    return f"inside the noise of {human_percent(compared['noise'])}: no difference"


def gate_notes(document: Document) -> Iterator[Note]:
    figure = document["figure"]
    if figure["passed"] is None:
        return
    asked = f"--fail-below {figure['fail_below']:g}"
    if figure["passed"]:
        yield Note(about="gate", text=f"passed: {figure['ratio']:.3f} of A's speed, {asked}")
    elif figure["b"]["verdict"] == "different":
        yield Note(
            about="gate", text="FAILED: B's training is different, so its speed does not count", kind="different"
        )
    else:
        yield Note(about="gate", text=f"FAILED: {figure['ratio']:.3f} of A's speed, {asked}", kind="different")


def row_notes(document: Document) -> Iterator[Note]:
    """Yield which rows moved beyond their noise, which are on one side only, and which have another recipe."""
    rows = document["rows"]
    moved = sorted((row for row in rows if row["significant"]), key=lambda row: row["ratio"])
    slower = [row for row in moved if row["ratio"] < 1]
    faster = [row for row in reversed(moved) if row["ratio"] > 1]
    for word, found in (("slower", slower), ("faster", faster)):
        if found:
            yield Note(about=word, text=f"beyond the noise: {listed(found)}")
    compared = [row for row in rows if row["ratio"] is not None]
    if compared and not moved:
        yield Note(about="rows", text=f"none of {len(compared)} moved beyond its noise")
    for label, side in (("A", "b"), ("B", "a")):
        alone = [row["name"] for row in rows if row[side] is None]
        if alone:
            yield Note(about=f"only in {label}", text=", ".join(alone))
    other = [row["name"] for row in rows if row["same_recipe"] is False]
    if other:
        yield Note(about="recipes", text=f"on another recipe or micro batch in B: {', '.join(other)}")


def listed(rows: list[Document]) -> str:
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    return ", ".join(f"{row['name']} {human_ratio(row['ratio'])}" for row in rows[:MOST_NAMED]) + more


def verdict_notes(document: Document) -> Iterator[Note]:
    """Yield the rows whose verdict differs between A and B."""
    for row in document["rows"]:
        a, b = ((row[side] or {}).get("verdict") for side in ("a", "b"))
        if a is None or b is None or a == b:
            continue
        kind = {"different": "different", "failed": "failed"}.get(b, "plain")
        why = f": {row['b']['reason']}" if kind != "plain" and row["b"]["reason"] else ""
        yield Note(about=row["name"], text=f"was {a}, is {b}{why}", kind=kind)


def memory_notes(document: Document) -> Iterator[Note]:
    a, b = ((document["figure"][side] or {}).get("peak_bytes") for side in ("a", "b"))
    doubted = [label for label, side in (("A", "a"), ("B", "b")) if _is_doubted(document["figure"][side])]
    if a and b and doubted:
        whose = " and ".join(f"{label}'s" for label in doubted)
        why = "is far below its prediction: not to be trusted, and no ratio"
        yield Note(about="memory", text=f"peak {human_bytes(a)} -> {human_bytes(b)}; {whose} {why}")
    elif a and b:
        change = "the same" if a == b else f"{human_ratio(b / a)} of A's"
        yield Note(about="memory", text=f"peak {human_bytes(a)} -> {human_bytes(b)}, {change}")


def _is_doubted(entry: Document | None) -> bool:
    return entry is not None and not entry["peak_trusted"]


def difference_notes(document: Document) -> Iterator[Note]:
    """Yield each group that differs, then the names of those that do not: what is the same cannot be the cause."""
    known = {name: parts for name, parts in document["differences"].items() if parts is not None}
    found = {name: difference_text(parts) for name, parts in known.items()}
    found = {**found, "recipe": recipe_text(document["recipe"])}
    for name, text in found.items():
        if text:
            yield Note(about=name, text=text)
    same = [name for name, text in found.items() if text == ""]
    if same:
        yield Note(about="the same", text=", ".join(same))


def difference_text(parts: list[Document]) -> str:
    return "; ".join(f"{part['name']} {part['a']} -> {part['b']}" for part in parts)


def recipe_text(recipe: Document | None) -> str:
    """Return how the recipes of the two compared figures differ."""
    if recipe is None:
        return UNKNOWN
    parts = [f"+ {', '.join(recipe['only_b'])}"] if recipe["only_b"] else []
    parts += [f"- {', '.join(recipe['only_a'])}"] if recipe["only_a"] else []
    batch: dict[str, Any] = recipe["micro_batch"]
    if batch["a"] != batch["b"]:
        parts.append(f"micro batch {batch['a']} -> {batch['b']}")
    return "; ".join(parts)
