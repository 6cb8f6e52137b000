"""A tune as one JSON document: what `redline tune --json` prints and its report is drawn from.

    tune_document(tuner, run)["best"] -> {"rungs": [...], "micro_batch": 64, "tokens_per_second": 571234.5, ...}

Everything that was run is a row, the winner first. What a knob brought is read from two rows that differ in it alone.
An unknown number is null, with a reason beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.units import human_percent
from redline.core.values import to_json
from redline.predict.efficiency import efficiency, trusted_hfu
from redline.predict.fitting import case_of
from redline.predict.noise import exceeds
from redline.rungs import find_rung, plan_of
from redline.search.document import hardware_json, losses_json, most_missing, sharing_json, step_spread
from redline.search.noise import noise_between
from redline.search.space import Knob, compiled_part
from redline.search.trials import Trial
from redline.search.tune import Tuner, compile_factor, difference


def tune_document(tuner: Tuner, run: dict[str, Any]) -> dict[str, Any]:
    """`run` is run.json: it carries command, date, versions and settings as they were when the run began."""
    space, best = tuner.space, tuner.best
    return {
        "workload": to_json(space.workload),
        "hardware": hardware_json(space.hardware),
        "versions": run["versions"],
        "command": run["command"],
        "date": run["date"],
        "settings": run["settings"],
        "finished": tuner.stopped in ("converged", "minutes"),
        "stopped": {"why": tuner.stopped, "detail": tuner.trouble},
        "budget": budget_json(tuner),
        "space": {
            "knobs": [to_json(knob) for knob in space.knobs],
            "combinations": math.prod(len(knob.choices) for knob in space.knobs),
            "published": list(space.published),
            "left_out": space.left_out,
            "memory_limit": space.memory_limit,
        },
        "baseline": None if tuner.baseline is None else row_json(tuner, tuner.baseline),
        "rows": [row_json(tuner, trial) for trial in ranked(tuner)],
        "not_tried": [
            {"rungs": list(recipe.rungs), "micro_batch": recipe.micro_batch, "change": change, "reason": reason}
            for recipe, change, reason in not_tried(tuner)
        ],
        "knobs": [] if best is None else list(knob_rows(tuner, best)),
        "break_even": [] if best is None else list(break_even_rows(tuner, best)),
        "roofline": None if best is None else roofline_json(tuner, best),
        "best": None if best is None else best_json(tuner, best),
        "unproved": None if best is not None else unproved_json(tuner),
    }


def budget_json(tuner: Tuner) -> dict[str, Any]:
    trials = tuner.trials.values()
    return {
        "seconds": tuner.budget.seconds,
        "spent_seconds": tuner.budget.spent,
        "remembered_seconds": tuner.budget.remembered,
        "trials": len(tuner.trials),
        "remembered_trials": sum(trial.remembered for trial in trials),
        "answers": tuner.asked,
    }


# rows


def ranked(tuner: Tuner) -> list[Trial]:
    """Return the winner, then trials without a known fault, then trials that were checked and cannot win, then those
    that did not run; the fastest first in each group."""
    best = tuner.best

    def place(trial: Trial) -> tuple[bool, bool, bool, float]:
        return trial is not best, not trial.ran, not tuner.is_sound(trial) and trial.checked, -tuner.rate(trial)

    return sorted(tuner.trials.values(), key=place)


def row_json(tuner: Tuner, trial: Trial) -> dict[str, Any]:
    first = trial.measurements[0] if trial.ran else None
    rate = tuner.rate(trial) if trial.ran else None
    space = tuner.space
    each = None if rate is None else rate / space.hardware.ranks  # the share of all peaks is a rank's of its own
    share = None if each is None else efficiency(space.workload.shape, plan(trial), space.hardware, each)
    peak, predicted = first.peak_bytes if first else None, predicted_peak(tuner, trial.recipe)
    return {
        "number": trial.number,
        "change": trial.label,
        "onto": None if trial.onto is None else trial.onto.number,
        "status": "ok" if trial.ran else "failed",
        "reason": reason_of(tuner, trial),
        "rungs": list(trial.recipe.rungs),
        "micro_batch": trial.recipe.micro_batch,
        "step_seconds": to_json(step_spread(trial.steady)) if trial.ran else None,
        "cores_missing": most_missing(trial.measurements),
        "repeats": len(trial.measurements),
        "tokens_per_second": rate,
        "unit": tuner.space.workload.unit,
        "speedup_total": ratio(rate, tuner.baseline, tuner),
        "speedup_step": ratio(rate, trial.onto, tuner),
        "of_best": ratio(rate, tuner.best, tuner),
        "mfu": share.mfu if share else None,
        "mfu_convention": share.convention if share else None,
        "hfu": trusted_hfu(share, plan(trial), peak, predicted),
        "peak_bytes": peak,
        "outside_bytes": first.outside_bytes if first else None,
        "predicted_peak_bytes": predicted,
        "compile_seconds": cold_compile_seconds(tuner, trial),
        "seconds": sum(trial.seconds),
        "remembered": trial.remembered,
        "loss_curve": losses_json(first.loss_curve) if first and first.loss_curve else None,
        "reference_curve": losses_json(trial.reference_curve),
        "equivalence": equivalence_json(tuner, trial),
        "kernels": to_json(first.proof) if first and trial.checked else None,
        "sharing": sharing_json(first.sharing) if first else None,
    }


def plan(trial: Trial) -> Any:
    return plan_of(trial.recipe.rungs)


def ratio(rate: float | None, other: Trial | None, tuner: Tuner) -> float | None:
    return None if rate is None or other is None or not other.ran else rate / tuner.rate(other)


def predicted_peak(tuner: Tuner, recipe: Recipe) -> int | None:
    """Return what the allocator should need. None on a CPU, which reports its resident set, another figure."""
    if tuner.space.hardware.kind != "cuda":
        return None
    shape = tuner.space.workload.shape
    return case_of(shape, plan_of(recipe.rungs), tuner.space.hardware.arranged).memory(recipe.micro_batch).allocated


def cold_compile_seconds(tuner: Tuner, trial: Trial) -> float | None:
    """Return what compiling would cost a new run: the longest time among trials of the same code, since later ones find
    it in the cache."""
    if trial.compile_seconds is None:
        return None
    part = compiled_part(trial.recipe)
    same = [other.compile_seconds for other in tuner.trials.values() if compiled_part(other.recipe) == part]
    return max(seconds for seconds in same if seconds is not None)


def reason_of(tuner: Tuner, trial: Trial) -> str | None:
    """Return why a trial is not the winner, if its speed does not show it."""
    if trial.failure is not None:
        return trial.failure.reason
    if trial.over_limit is not None:
        return trial.over_limit
    if trial.equivalence is not None and trial.equivalence.verdict == "different":
        return trial.equivalence.detail
    if not trial.checked and trial is not tuner.baseline:
        return "given up after a short look: too slow to win"
    return None


def equivalence_json(tuner: Tuner, trial: Trial) -> dict[str, str]:
    maths = tuner.maths_of(trial.recipe).value
    if trial.equivalence is None:
        return {"class": maths, "verdict": "not-checked", "detail": "only its time was measured"}
    return {"class": maths, "verdict": trial.equivalence.verdict, "detail": trial.equivalence.detail}


def not_tried(tuner: Tuner) -> Iterator[tuple[Recipe, str, str]]:
    """Yield recipes that were considered and never run, each as a change of the winner, with the reason."""
    best = tuner.best
    for recipe, reason in tuner.not_tried.items():
        if recipe not in tuner.trials:
            yield recipe, difference(best.recipe, recipe) if best is not None else ", ".join(recipe.rungs), reason


# what each knob brought


def knob_rows(tuner: Tuner, best: Trial) -> Iterator[dict[str, Any]]:
    """Yield a comparison of the winner's choice with every other choice, for each knob."""
    for knob in tuner.space.knobs:
        chosen = tuner.space.choice_of(best.recipe.rungs, knob)
        for other in knob.choices:
            if other != chosen:
                yield knob_row(tuner, best, knob, chosen, other)


def knob_row(tuner: Tuner, best: Trial, knob: Knob, chosen: str | None, other: str | None) -> dict[str, Any]:
    pair = nearest_pair(tuner, best, knob, chosen, other)
    row: dict[str, Any] = {"knob": knob.name, "choice": chosen, "against": other}
    if pair is None:
        reason = why_not_compared(tuner, best, knob, other)
        return {**row, "gain": None, "noise": None, "significant": None, "seconds": None, "text": reason}
    mine, theirs = pair
    gain = tuner.rate(mine) / tuner.rate(theirs) - 1
    noise = noise_between(mine.steady, theirs.steady, tuner.kind)
    return {
        **row,
        "gain": gain,
        "noise": noise,
        "significant": exceeds(1 + gain, noise),
        "seconds": theirs.seconds[0],
        "text": gain_text(chosen, other, gain, noise, theirs),
    }


def nearest_pair(
    tuner: Tuner, best: Trial, knob: Knob, chosen: str | None, other: str | None
) -> tuple[Trial, Trial] | None:
    """Return two trials that differ in this knob alone (and in what depends on it), nearest to the winner."""
    pairs = []
    for mine in tuner.trials.values():
        if not mine.ran or tuner.space.choice_of(mine.recipe.rungs, knob) != chosen:
            continue
        changed = tuner.space.change(mine.recipe, knob, other)
        theirs = None if changed is None else tuner.trials.get(changed)
        if theirs is not None and theirs.ran:
            pairs.append((mine, theirs))
    return min(pairs, key=lambda pair: distance(pair[0].recipe, best.recipe), default=None)


def distance(one: Recipe, other: Recipe) -> int:
    return len(set(one.rungs) ^ set(other.rungs)) + (one.micro_batch != other.micro_batch)


def why_not_compared(tuner: Tuner, best: Trial, knob: Knob, other: str | None) -> str:
    changed = tuner.space.change(best.recipe, knob, other)
    name = other or f"without {tuner.space.choice_of(best.recipe.rungs, knob)}"
    if changed is None:
        return f"{name}: does not apply beside the winner's other rungs"
    failed = [trial for trial in tuner.trials.values() if trial.failure is not None and trial.recipe == changed]
    if failed and failed[0].failure is not None:
        return f"{name}: failed: {failed[0].failure.reason}"
    return f"{name}: not tried: {tuner.not_tried.get(changed, 'the search ended before its turn')}"


def gain_text(chosen: str | None, other: str | None, gain: float, noise: float, theirs: Trial) -> str:
    """'cudnn-attention +6.2 % over flash', 'max-autotune no gain after 240 s'."""
    if chosen is not None and gain > noise:
        over = f" over {other}" if other is not None else ""
        return f"{chosen} {signed(gain)}{over}"
    inside = "" if exceeds(1 + gain, noise) else f", inside the noise of {human_percent(noise)}"
    if other is None:
        return f"{chosen} no gain: {signed(gain)}{inside}"
    after = f" after {theirs.seconds[0]:.0f} s" if find_rung(other).compile_factor > 1 else ""
    if gain > noise:
        return f"{other} {signed(-gain / (1 + gain))}{after}"
    return f"{other} no gain{after}: {signed(-gain / (1 + gain))}{inside}"


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


# the price of compiling


def break_even_rows(tuner: Tuner, best: Trial) -> Iterator[dict[str, Any]]:
    """Yield how long a run must be before the winner's compiling pays off. It is compared with its eager twin, since
    against any other recipe compiling would get the credit for the other differences, and with the fastest of those
    that compile for less time."""
    eager = tuner.eager_twin(best)
    if eager is not None:
        yield break_even_row(tuner, best, eager)
    ran = [trial for trial in tuner.trials.values() if trial.ran]
    for level in sorted({compile_factor(trial.recipe) for trial in ran}):
        if 0 < level < compile_factor(best.recipe):
            alike = [trial for trial in ran if compile_factor(trial.recipe) == level]
            yield break_even_row(tuner, best, max(alike, key=tuner.rate).recipe)


def break_even_row(tuner: Tuner, best: Trial, recipe: Recipe) -> dict[str, Any]:
    row = {
        "against": difference(best.recipe, recipe),
        "rungs": list(recipe.rungs),
        "micro_batch": recipe.micro_batch,
    }
    rival, own = tuner.trials.get(recipe), cold_compile_seconds(tuner, best)
    if rival is None or not rival.ran:
        failed = rival is not None and rival.failure is not None
        reason = "unknown: its eager twin " + ("did not run" if failed else "was not measured")
        return {**row, "compile_seconds": own, "tokens": None, "training_seconds": None, "reason": reason}
    extra = None if own is None else own - (cold_compile_seconds(tuner, rival) or 0.0)
    found = break_even(extra, tuner.rate(best), tuner.rate(rival))
    unknown = "unknown: its compile time was not measured" if extra is None else "never: it is as fast"
    return {**row, "compile_seconds": extra, **found, "reason": unknown if found["tokens"] is None else None}


def break_even(extra_seconds: float | None, rate: float, rival_rate: float) -> dict[str, float | None]:
    """Solve tokens / rival_rate = extra_seconds + tokens / rate; None if the rival is as fast."""
    if extra_seconds is None or rate <= rival_rate:
        return {"tokens": None, "training_seconds": None}
    tokens = max(extra_seconds, 0.0) / (1 / rival_rate - 1 / rate)
    return {"tokens": tokens, "training_seconds": tokens / rate}


# the gap that is left


def roofline_json(tuner: Tuner, best: Trial) -> dict[str, Any]:
    prediction, rate = tuner.space.predict(best.recipe), tuner.rate(best)
    if prediction is None:
        kind, name = tuner.space.hardware.kind, tuner.space.hardware.name
        why = "a CPU has no data sheet of peaks here" if kind == "cpu" else f"no peaks are known for {name}"
        why = why if tuner.space.workload.reads_text else "the operations of a Python file's model are not all known"
        return {"light": None, "expected": None, "floor": None, "of_light": None, "groups": None, "reason": why}
    light, ranks = prediction.light, tuner.space.hardware.ranks
    return {
        "light": ranks * light.tokens_per_second,
        "expected": tuner.space.predicted_rate(best.recipe),
        "floor": ranks * light.tokens / prediction.floor_seconds,
        "of_light": rate / (ranks * light.tokens_per_second),
        "groups": {name: seconds for name, seconds in light.by_group().items() if seconds},
        "reason": None,
    }


def best_json(tuner: Tuner, best: Trial) -> dict[str, Any]:
    global_batch, micro_batch = tuner.space.global_batch, best.recipe.micro_batch
    first: Measurement = best.measurements[0]
    parts = tuner.space.hardware.arranged.data
    rate = tuner.rate(best)
    return {
        "number": best.number,
        "rungs": list(best.recipe.rungs),
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "accumulation": None if global_batch is None else global_batch // (parts * micro_batch),
        "tokens_per_second": rate,
        "speedup": ratio(rate, tuner.baseline, tuner),
        "verdict": None if best.equivalence is None else best.equivalence.verdict,
        "peak_bytes": first.peak_bytes,
        "repeats": len(best.measurements),
        "ties": [trial.number for trial in tuner.trials.values() if is_tie(tuner, best, trial)],
    }


def is_tie(tuner: Tuner, best: Trial, trial: Trial) -> bool:
    """True if noise cannot tell a trial from the winner."""
    if trial is best or not tuner.is_sound(trial):
        return False
    return tuner.keeps_up(trial, best) and tuner.keeps_up(best, trial)


# where there is no winner


def unproved_json(tuner: Tuner) -> dict[str, str | None]:
    """Return why nothing was proved and what would help, null if unknown."""
    fixes = ["give it more --minutes"] if tuner.stopped == "minutes" else []
    if tuner.budget.remembered:
        fixes.append("start anew with --fresh, since remembered answers took part")
    return {"why": why_unproved(tuner), "fix": ", or ".join(fixes) or None}


def why_unproved(tuner: Tuner) -> str:
    """Explain the fastest trial that was right as far as it was checked, or else the first that has a reason."""
    sound = next(filter(tuner.is_sound, ranked(tuner)), None)
    if sound is not None and sound.equivalence is not None:
        detail = sound.equivalence.detail
        asked = any(recipe.micro_batch == sound.recipe.micro_batch for recipe in tuner.references)
        late = "" if asked or tuner.stopped != "minutes" else ", since the time was over"
        return f"#{sound.number} is not proved: {detail}{late}"
    reasons = ((trial.number, reason_of(tuner, trial)) for trial in tuner.trials.values())
    number, reason = next(((number, reason) for number, reason in reasons if reason is not None), (0, None))
    return "the time was over before anything was measured" if reason is None else f"#{number}: {reason}"
