"""What to do after a ladder or a tune, in words: the three that matter most, each with its figures and a command.

    ladder_steps(document) -> [Step(what="Try a larger micro batch", why="the best recipe takes 8.40 GiB of ...", ...)]

A rule is a function over the document that gives a step, or nothing where it has nothing to say. The order of the rules
is the order of importance: what is wrong, what is unfinished, what would be faster, what would be surer. Every figure
is one of the document.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redline.core.units import human_bytes, human_percent, human_rate, human_ratio
from redline.report import Document, Row, one_line, reason_of, rung_name, status_of, verdict_of
from redline.report.table import MOST_SWING, best_row, rows_of, swing_of

SHOWN = 3
ROOM = 0.5  # of the device's memory: below this a larger micro batch is worth a look
WORTH = 1.02  # a gain that a run would notice


@dataclass(frozen=True, kw_only=True)
class Step:
    what: str
    why: str
    command: str = ""


Rule = Callable[[Document], Iterator[Step]]


def ladder_steps(document: Document) -> list[Step]:
    return [step for rule in LADDER_RULES for step in rule(document)][:SHOWN]


def tune_steps(document: Document) -> list[Step]:
    return [step for rule in TUNE_RULES for step in rule(document)][:SHOWN]


def workload_name(document: Document) -> str:
    """As a shell takes it."""
    workload = document.get("workload") or {}
    return shlex.quote(one_line(workload.get("words") or workload.get("name") or "gpt2"))


# --- a ladder ---------------------------------------------------------------------------------------------------------


def drop_what_is_wrong(document: Document) -> Iterator[Step]:
    wrong = [rung_name(row) for row in rows_of(document) if verdict_of(row) == "different"]
    if wrong:
        yield Step(
            what=f"Leave out {', '.join(wrong)}",
            why="it is not the same training any more, however fast it is; the detail is under the loss curves",
            command=f"redline ladder {workload_name(document)} --without {','.join(wrong)}",
        )


def finish(document: Document) -> Iterator[Step]:
    if document.get("finished") is False and not document.get("under_way"):
        yield Step(
            what="Finish the ladder",
            why=f"it was interrupted after {len(rows_of(document))} rungs; what is there is not measured again",
            command="redline ladder --resume DIR",
        )


def look_at_failures(document: Document) -> Iterator[Step]:
    failed = [row for row in rows_of(document) if status_of(row) == "failed"]
    if failed:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield Step(what=f"See why {rung_name(failed[0])}{others} failed", why=reason_of(failed[0]))


def take_the_own_batch(document: Document) -> Iterator[Step]:
    """The re-batched winner where there is one, else a look for it where memory is left."""
    best, own = document.get("best") or {}, document.get("best_rebatched") or {}
    rate, own_rate = best.get("tokens_per_second"), own.get("tokens_per_second")
    if rate and own_rate:
        if own_rate / rate >= WORTH:
            yield Step(
                what=f"Train at micro batch {one_line(own.get('micro_batch'))}",
                why=f"{human_rate(own_rate)} tokens/s with {one_line(own.get('rung'))}, {human_ratio(own_rate / rate)} "
                f"the best at the ladder's own size",
                command=f"redline train {workload_name(document)} --recipe DIR/best-rebatched.json",
            )
        return
    yield from _room_for_more(document)


def _room_for_more(document: Document) -> Iterator[Step]:
    row, memory = best_row(document) or {}, (document.get("hardware") or {}).get("memory_bytes")
    peak = row.get("peak_bytes")
    if peak and memory and peak < ROOM * memory and (document.get("hardware") or {}).get("kind") == "cuda":
        yield Step(
            what="Try larger micro batches",
            why=f"the best recipe holds {human_bytes(peak)} of {human_bytes(memory)} at micro batch "
            f"{row.get('micro_batch')}: larger ones keep the device busier",
            command=f"redline ladder {workload_name(document)} --rebatch",
        )


def measure_again(document: Document) -> Iterator[Step]:
    disturbed = [row for row in rows_of(document) if swing_of(row) > MOST_SWING]
    if disturbed:
        worst = max(disturbed, key=swing_of)
        yield Step(
            what="Measure again on a quiet machine",
            why=f"slow steps of {rung_name(worst)} took {swing_of(worst):.1f} times its quick ones: something else ran",
            command=f"redline ladder {workload_name(document)} --repeats 3 --aa",
        )


def profile_the_gap(document: Document) -> Iterator[Step]:
    row = best_row(document) or {}
    light, rate = (row.get("roofline") or {}).get("light"), row.get("tokens_per_second")
    if light and rate:
        yield Step(
            what="See where the rest of the time goes",
            why=f"{rung_name(row)} reaches {human_percent(rate / light, 0)} of its recipe's speed of light "
            f"({human_rate(light)} tokens/s); a profile names the operations that lose the rest",
            command=f"redline profile {workload_name(document)} --recipe DIR/best.json",
        )


def settle_the_noise(document: Document) -> Iterator[Step]:
    unsure = [rung_name(row) for row in rows_of(document) if row.get("within_noise") and row.get("kept") is not False]
    if unsure and (document.get("settings") or {}).get("repeats") in (None, 1):
        yield Step(
            what=f"Find out whether {listed(unsure)} {'pays' if len(unsure) == 1 else 'pay'}",
            why="what they changed is inside the noise of single runs; repeats make that smaller",
            command=f"redline ladder {workload_name(document)} --repeats 3 --aa",
        )


def search_on(document: Document) -> Iterator[Step]:
    if document.get("best") and document.get("finished") is not False:
        yield Step(
            what="Search beyond the ladder",
            why="the ladder tries one order of one set; tune weighs rungs, kernels and micro batches together",
            command=f"redline tune {workload_name(document)}",
        )


def train_with_it(document: Document) -> Iterator[Step]:
    best = document.get("best")
    if best:
        yield Step(
            what="Train with it",
            why=f"best.json in the run directory is the recipe of {human_rate(best.get('tokens_per_second'))} tokens/s",
            command=f"redline train {workload_name(document)} --recipe DIR/best.json",
        )


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LADDER_RULES: tuple[Rule, ...] = (
    drop_what_is_wrong,
    finish,
    look_at_failures,
    take_the_own_batch,
    measure_again,
    profile_the_gap,
    settle_the_noise,
    search_on,
    train_with_it,
)


# --- a tune -----------------------------------------------------------------------------------------------------------


def train_the_winner(document: Document) -> Iterator[Step]:
    best: dict[str, Any] | None = document.get("best")
    if best:
        yield Step(
            what="Train with the winner",
            why=f"{human_rate(best['tokens_per_second'])} tokens/s at micro batch {best['micro_batch']}; best.json in "
            "the run directory is its recipe",
            command=f"redline train {workload_name(document)} --recipe DIR/best.json",
        )


def search_longer(document: Document) -> Iterator[Step]:
    why, left = (document.get("stopped") or {}).get("why"), len(document.get("not_tried") or [])
    if why in ("minutes", "interrupted"):
        ending = "the time was used up" if why == "minutes" else "it was interrupted"
        untried = f" with {left} neighbours of the winner not tried" if left else ""
        yield Step(
            what="Search longer",
            why=f"{ending}{untried}; what was measured is remembered",
            command="redline tune --resume DIR --minutes 30",
        )


def settle_ties(document: Document) -> Iterator[Step]:
    ties = (document.get("best") or {}).get("ties") or []
    if ties:
        yield Step(
            what=f"Do not read much into the order of the first {len(ties) + 1}",
            why=f"noise cannot tell the winner from {listed([f'#{number}' for number in ties])}: take the one that "
            "needs least memory, or repeat them with more minutes",
        )


def profile_the_winner(document: Document) -> Iterator[Step]:
    roofline: Row = document.get("roofline") or {}
    share = roofline.get("of_light")
    if share is not None:
        yield Step(
            what="See where the rest of the time goes",
            why=f"the winner reaches {human_percent(share, 0)} of its recipe's speed of light "
            f"({human_rate(roofline.get('light'))} tokens/s)",
            command=f"redline profile {workload_name(document)} --recipe DIR/best.json",
        )


TUNE_RULES: tuple[Rule, ...] = (train_the_winner, search_longer, settle_ties, profile_the_winner)
