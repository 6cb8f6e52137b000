"""What to do after a ladder or a tune: the three most important steps, each with its figures and a command.

    ladder_steps(document) -> [Step(what="Try a larger micro batch", why="the best recipe takes 8.40 GiB of ...", ...)]

A rule is a function over the document that yields a step, or nothing. Rules are ordered by importance: what is wrong,
what is unfinished, what would be faster, what would be more certain. Figures and the options of the run come from the
document; paths start at `document["directory"]`, which is set when a run directory is drawn. A document on its own has
none: its recipe is on the page, to be saved as best.json.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from redline.core.job import BEST_FILE, REBATCHED_FILE
from redline.core.units import counted, human_bytes, human_percent, human_rate, human_ratio, rate_unit
from redline.core.workload import SAMPLE_CORPUS
from redline.report import Document, Row, has_implausible_peak, one_line, reason_of, rung_name, status_of, verdict_of
from redline.report.table import best_row, disturbance_of, disturbed_among, layout_of, most_disturbed, rows_of, unit_of

SHOWN = 3
ROOM = 0.5  # of the device's memory: below this, larger micro batches are worth trying
WORTH = 1.02  # a gain that a run would notice
SURER = ("--repeats", "3", "--aa")
MINUTES = 30  # of a search that goes on: at least


@dataclass(frozen=True, kw_only=True)
class Step:
    what: str
    why: str
    command: str = ""


Rule = Callable[[Document], Iterator[Step]]


def ladder_steps(document: Document) -> list[Step]:
    return first_steps(LADDER_RULES, document)


def tune_steps(document: Document) -> list[Step]:
    return first_steps(TUNE_RULES, document)


def first_steps(rules: Sequence[Rule], document: Document) -> list[Step]:
    """Return the first steps that the rules yield; a command that serves two steps is listed only with the first."""
    steps: list[Step] = []
    for step in (step for rule in rules for step in rule(document)):
        if not step.command or step.command not in {one.command for one in steps}:
            steps.append(step)
    return steps[:SHOWN]


# --- commands ---------------------------------------------------------------------------------------------------------


def command(document: Document, name: str, *more: str) -> str:
    """Return `redline NAME` for the same workload."""
    workload = document.get("workload") or {}
    words = ["redline", name, workload.get("words") or workload.get("name") or "gpt2", *more]
    return shlex.join(map(one_line, words))


def text_options(document: Document) -> list[str]:
    """Return the options that make any command use the same text on the same devices."""
    workload, typed = document.get("workload") or {}, typed_arguments(document)
    shape = workload.get("shape") or {}
    words = []
    if shape.get("max_positions") is not None and shape.get("sequence"):  # sequences shorter than the context
        words += ["--sequence", str(shape["sequence"])]
    if workload.get("corpus") not in (None, SAMPLE_CORPUS):
        words += ["--data", str(workload["corpus"])]
    if device := value_of(typed, "--device"):
        words += ["--device", device]
    words += layout_of(document).options().split()
    return words


def typed_arguments(document: Document) -> list[str]:
    """Return what was typed after `redline ladder` or `redline tune`; nothing for a resumed run or one from Python."""
    try:
        words = shlex.split(one_line(document.get("command") or ""))
    except ValueError:  # an unclosed quote: no command of ours
        return []
    return words[2:] if words[:1] == ["redline"] and "--resume" not in words else []


def value_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of '--option value' or '--option=value'; None if the option was not typed."""
    for word, after in zip(words, [*words[1:], None], strict=False):  # without words the second is longer
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return None


def ladder_again(document: Document, *more: str) -> str:
    """Return the command for the same ladder with something changed, in a run directory of its own."""
    typed = typed_arguments(document)
    if not typed:
        start = (document.get("settings") or {}).get("start") or {}
        size = start.get("micro_batch") or (document.get("workload") or {}).get("micro_batch")
        fixed = [] if size is None else ["--micro-batch", str(size)]
        return command(document, "ladder", *fixed, *text_options(document), *more)
    return shlex.join(["redline", "ladder", *without_options(typed, {*more, *NOT_AGAIN}), *more])


NOT_AGAIN = ("--out", "--json", "--debug")
ALONE = ("--json", "--debug", "--aa", "--rebatch")  # options without a value


def without_options(words: Sequence[str], names: Collection[str]) -> Iterator[str]:
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in names and name.startswith("--"):
            skip = not equals and name not in ALONE
        else:
            yield word


def file_in(document: Document, name: str) -> str:
    folder = document.get("directory")
    return name if not folder else str(PurePath(one_line(folder)) / name)


def resume_command(document: Document, name: str, *more: str) -> str:
    """Return the command that resumes the run; empty if the run directory is unknown."""
    folder = document.get("directory")
    return shlex.join(["redline", name, "--resume", one_line(folder), *more]) if folder else ""


def profile_command(document: Document) -> str:
    return command(document, "profile", "--recipe", file_in(document, BEST_FILE), *text_options(document))


def train_command(document: Document, recipe: str | None = None) -> str:
    """Return the command that trains with the recipe, on the same text and with the same global batch."""
    chosen = (document.get("best") or {}).get("global_batch") or (document.get("settings") or {}).get("global_batch")
    update = [] if chosen is None else ["--global-batch", str(chosen)]
    path = recipe or file_in(document, BEST_FILE)
    return command(document, "train", "--recipe", path, *text_options(document), *update)


# --- a ladder ---------------------------------------------------------------------------------------------------------


def drop_what_is_wrong(document: Document) -> Iterator[Step]:
    wrong = [rung_name(row) for row in climbed_rows(document) if verdict_of(row) == "different"]
    if wrong:
        yield Step(
            what=f"Leave out {', '.join(wrong)}",
            why="it is not the same training any more, however fast it is; the detail is under the loss curves",
            command=ladder_again(document, "--without", ",".join([*left_out(document), *wrong])),
        )


def climbed_rows(document: Document) -> list[Row]:
    """Return the rows that a ladder can do without: not its first, and not the recipe that was measured again."""
    return [row for row in rows_of(document)[1:] if row.get("rung") != "a/a"]


def left_out(document: Document) -> list[str]:
    """Return what the user had already left out."""
    typed = value_of(typed_arguments(document), "--without")
    return [] if typed is None else [typed]


def finish(document: Document) -> Iterator[Step]:
    if document.get("finished") is False and not document.get("under_way"):
        yield Step(
            what="Finish the ladder",
            why=f"it was interrupted after {counted(len(rows_of(document)), 'rung')}; what is there is not measured "
            "again",
            command=resume_command(document, "ladder"),
        )


def look_at_failures(document: Document) -> Iterator[Step]:
    failed = [row for row in rows_of(document) if status_of(row) == "failed"]
    if failed:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield Step(what=f"See why {rung_name(failed[0])}{others} failed", why=reason_of(failed[0]))


def take_the_own_batch(document: Document) -> Iterator[Step]:
    """Suggest the re-batched winner if there is one, else a search for it if memory is left."""
    best, own = document.get("best") or {}, document.get("best_rebatched") or {}
    rate, own_rate = best.get("tokens_per_second"), own.get("tokens_per_second")
    if rate and own_rate:
        if own_rate / rate >= WORTH:
            yield Step(
                what=f"Train at micro batch {one_line(own.get('micro_batch'))}",
                why=f"{rate_text(document, own_rate)} with {one_line(own.get('rung'))}, {human_ratio(own_rate / rate)} "
                f"the best at the ladder's own size",
                command=train_command(document, file_in(document, REBATCHED_FILE)),
            )
        return
    yield from _room_for_more(document)


def _room_for_more(document: Document) -> Iterator[Step]:
    row, memory = best_row(document) or {}, (document.get("hardware") or {}).get("memory_bytes")
    peak = None if has_implausible_peak(row) else row.get("peak_bytes")
    if peak and memory and peak < ROOM * memory and (document.get("hardware") or {}).get("kind") == "cuda":
        yield Step(
            what="Try larger micro batches",
            why=f"the best recipe holds {human_bytes(peak)} of {human_bytes(memory)} at micro batch "
            f"{row.get('micro_batch')}: larger ones keep the device busier",
            command=ladder_again(document, "--rebatch"),
        )


def measure_again(document: Document) -> Iterator[Step]:
    disturbed = disturbed_among(rows_of(document))
    if disturbed:
        yield Step(
            what="Measure again on a quiet machine",
            why=f"{disturbance_of(most_disturbed(disturbed))}: something else ran",
            command=ladder_again(document, *SURER),
        )


def profile_the_gap(document: Document) -> Iterator[Step]:
    row = best_row(document) or {}
    light, rate = (row.get("roofline") or {}).get("light"), row.get("tokens_per_second")
    if light and rate:
        yield Step(
            what="See where the rest of the time goes",
            why=f"{rung_name(row)} reaches {human_percent(rate / light, 0)} of its recipe's speed of light "
            f"({rate_text(document, light)}); a profile names the operations that lose the rest",
            command=profile_command(document),
        )


def settle_the_noise(document: Document) -> Iterator[Step]:
    kept = [row for row in climbed_rows(document) if row.get("kept") is not False]
    unsure = [rung_name(row) for row in kept if row.get("within_noise")]
    if unsure and (document.get("settings") or {}).get("repeats") in (None, 1):
        yield Step(
            what=f"Find out whether {listed(unsure)} {'pays' if len(unsure) == 1 else 'pay'}",
            why="what they changed is inside the noise that single runs are taken for; repeats measure it on this "
            "machine",
            command=ladder_again(document, *SURER),
        )


def search_on(document: Document) -> Iterator[Step]:
    if document.get("best") and document.get("finished") is not False:
        yield Step(
            what="Search beyond the ladder",
            why="the ladder tries one order of one set; tune weighs rungs, kernels and micro batches together",
            command=command(document, "tune", *text_options(document)),
        )


def train_with_it(document: Document) -> Iterator[Step]:
    best = document.get("best")
    if best:
        yield Step(
            what="Train with it",
            why=f"best.json in the run directory is the recipe of {rate_text(document, best.get('tokens_per_second'))}",
            command=train_command(document),
        )


def rate_text(document: Document, rate: float | None) -> str:
    """Return '32,239 tokens/s', or samples/s for a user's own model."""
    return f"{human_rate(rate)} {rate_unit(unit_of(document), short=False)}"


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
            why=f"{rate_text(document, best['tokens_per_second'])} at micro batch {best['micro_batch']}; best.json in "
            "the run directory is its recipe",
            command=train_command(document),
        )


def search_longer(document: Document) -> Iterator[Step]:
    why, left = (document.get("stopped") or {}).get("why"), len(document.get("not_tried") or [])
    if why in ("minutes", "interrupted"):
        used_up = why == "minutes"
        ending = "the time was used up" if used_up else "it was interrupted"
        untried = f" with {counted(left, 'neighbour')} of the winner not tried" if left else ""
        yield Step(
            what="Search longer",
            why=f"{ending}{untried}; what was measured is remembered",
            command=resume_command(document, "tune", "--minutes", str(more_minutes(document, used_up))),
        )


def more_minutes(document: Document, used_up: bool) -> int:
    """Return the --minutes of the whole search, in which what was used so far counts."""
    given = ((document.get("budget") or {}).get("seconds") or 0.0) / 60
    return max(MINUTES, math.ceil(2 * given if used_up else given))


def settle_ties(document: Document) -> Iterator[Step]:
    ties = (document.get("best") or {}).get("ties") or []
    if ties:
        yield Step(
            what=f"Do not read much into the order of the first {len(ties) + 1}",
            why=f"noise cannot tell the winner from {listed([f'#{number}' for number in ties])}: "
            f"{tie_advice(document)}",
        )


def tie_advice(document: Document) -> str:
    """Advise taking the trial with the least memory, provided that every peak is plausible."""
    best = document["best"]
    equals = [row for row in rows_of(document) if row.get("number") in (best.get("number"), *best["ties"])]
    doubted = [f"#{row['number']}" for row in equals if has_implausible_peak(row)]
    known = [row for row in equals if row.get("peak_bytes")]
    if doubted:
        return f"repeat them with more minutes; memory cannot decide, for the peak of {listed(doubted)} cannot be right"
    if len(known) < 2:
        return "repeat them with more minutes"
    least = min(known, key=lambda row: row["peak_bytes"])
    size = human_bytes(least["peak_bytes"])
    return f"take #{least['number']}, which needs least memory ({size}), or repeat them with more minutes"


def profile_the_winner(document: Document) -> Iterator[Step]:
    roofline: Row = document.get("roofline") or {}
    share = roofline.get("of_light")
    if share is not None:
        yield Step(
            what="See where the rest of the time goes",
            why=f"the winner reaches {human_percent(share, 0)} of its recipe's speed of light "
            f"({rate_text(document, roofline.get('light'))})",
            command=profile_command(document),
        )


TUNE_RULES: tuple[Rule, ...] = (train_the_winner, search_longer, settle_ties, profile_the_winner)
