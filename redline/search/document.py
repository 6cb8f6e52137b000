"""The ladder as one JSON document: what `redline ladder --json` prints and every report is drawn from.

The keys are a contract (`tests/cpu/test_ladder.py`). An unknown number is null.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redline.core.hardware import Hardware
from redline.core.measurement import Measurement, Sharing, Spread, spread_of
from redline.core.places import short
from redline.core.values import to_json
from redline.predict.efficiency import Efficiency, efficiency, trusted_hfu
from redline.predict.fitting import case_of
from redline.predict.noise import UNSEEN_RUN_TO_RUN, exceeds
from redline.rungs import LADDER, plan_of
from redline.search.climb import AGAIN, Climb, Row
from redline.search.limits import anatomy_json, limits_json, roofline_json
from redline.search.noise import noise_between

MOST_NAMED = 4  # rows in one sentence


def ladder_document(climb: Climb, run: dict[str, Any], finished: bool) -> dict[str, Any]:
    """`run` is run.json: it carries command, date, versions and settings as they were when the run began."""
    rows = climb.finished
    return {
        "workload": to_json(climb.workload),
        "hardware": hardware_json(climb.hardware),
        "versions": run["versions"],
        "command": run["command"],
        "date": run["date"],
        "finished": finished,
        "settings": run["settings"],
        "reference": {
            "precision": "fp32",
            "ln_vocab": climb.workload.shape.ln_vocab,
            "loss_curve": losses_json(climb.plain_curve),
        },
        "noise": noise_json(climb),
        "limits": limits_json(climb.workload.shape, climb.hardware),
        "rows": [row_json(row, rows[0], climb) for row in rows],
        "best": best_json(climb),
        "best_rebatched": best_rebatched_json(rows),
    }


def hardware_json(hardware: Hardware) -> dict[str, Any]:
    return {**to_json(hardware), "peak_tflops": hardware.peak_tflops}


def row_json(row: Row, first: Row, climb: Climb) -> dict[str, Any]:
    measurement = row.measurements[0] if row.measurements else None
    rate = tokens_per_second(row, climb)
    share = share_of_peak(row, climb, rate)
    base = row.base if row.base is not None and row.base.measurements else None
    losses = losses_json(measurement.loss_curve if measurement else None)
    shape, plan, size = climb.workload.shape, plan_of(row.recipe.rungs), row.recipe.micro_batch
    predicts = row.status != "skipped"
    peak, predicted = measurement.peak_bytes if measurement else None, predicted_peak(row, climb)
    return {
        "rung": row.name,
        "title": row.title,
        "status": row.status,
        "reason": row.reason,
        "kept": row.kept,
        "recipe": list(row.recipe.rungs),
        "micro_batch": row.recipe.micro_batch,
        "step_seconds": to_json(step_spread(row.measurements)) if measurement else None,
        "tokens_per_second": rate,
        "unit": climb.workload.unit,
        "speedup_total": first.seconds / row.seconds if measurement and first.measurements else None,
        "speedup_step": base.seconds / row.seconds if measurement and base else None,
        "speedup_quick": base.quick_seconds / row.quick_seconds if measurement and base else None,
        "within_noise": within_noise(row, base, climb) if measurement and base else None,
        "mfu": share.mfu if share else None,
        "mfu_convention": share.convention if share else None,
        "hfu": trusted_hfu(share, plan, peak, predicted),
        "peak_bytes": peak,
        "outside_bytes": measurement.outside_bytes if measurement else None,
        "predicted_peak_bytes": predicted,
        "memory": anatomy_json(shape, plan, size, climb.hardware) if predicts else None,
        "roofline": roofline_json(shape, plan, size, climb.hardware) if predicts else None,
        "compile_seconds": measurement.compile_seconds if measurement else None,
        "compile_note": compile_note(measurement),
        "cores_missing": most_missing(row.measurements),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "loss_curve": losses,
        "reference_curve": losses_json(row.reference_curve),
        "equivalence": equivalence_json(row),
        "kernels": to_json(measurement.proof) if measurement else {"attention": None},
        "sharing": sharing_json(measurement.sharing) if measurement else None,
        "rebatched": rebatched_json(row, climb),
    }


def most_missing(measurements: Sequence[Measurement]) -> float | None:
    """Return how many cores other programs took from the run that lacked most; None if that is not known."""
    return max((one.cores_missing for one in measurements if one.cores_missing is not None), default=None)


def compile_note(measurement: Measurement | None) -> str | None:
    """Return what was not compiled, or not as a single graph; None if there is nothing to report."""
    compiled = None if measurement is None else measurement.proof.compiled
    trouble = None if compiled is None else compiled.trouble
    return None if trouble is None else short(trouble)


def sharing_json(sharing: Sharing | None) -> dict[str, Any] | None:
    """Return what the ranks cost one another, or None for one process."""
    return None if sharing is None else {**to_json(sharing), "straggler_seconds": sharing.straggler_seconds}


def rebatched_json(row: Row, climb: Climb) -> dict[str, Any] | None:
    """Return the row at its own micro batch, or None if it was not searched for."""
    choice = row.rebatched
    if choice is None:
        return None
    rate, fixed = choice.tokens_per_second, tokens_per_second(row, climb)
    share = share_of_peak(row, climb, rate)
    peak = choice.trial.peak_bytes if choice.trial else None
    predicted = predicted_peak(row, climb, choice.micro_batch) if choice.micro_batch else None
    return {
        "status": "ok" if choice.micro_batch else "failed",
        "reason": choice.reason,
        "micro_batch": choice.micro_batch,
        "accumulation": choice.accumulation,
        "tokens_per_second": rate,
        "step_seconds": to_json(choice.trial.step_seconds) if choice.trial else None,
        "speedup_fixed": rate / fixed if rate and fixed else None,
        "mfu": share.mfu if share else None,
        "hfu": trusted_hfu(share, plan_of(row.recipe.rungs), peak, predicted),
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "trials": to_json(choice.trials),
    }


def predicted_peak(row: Row, climb: Climb, micro_batch: int | None = None) -> int | None:
    """Return what the allocator should need, even for a row that ran out of memory. None on a CPU, which reports its
    resident set, another figure."""
    if climb.hardware.kind != "cuda" or row.status == "skipped":
        return None
    plan, size = plan_of(row.recipe.rungs), micro_batch or row.recipe.micro_batch
    return case_of(climb.workload.shape, plan, climb.hardware.arranged).memory(size).allocated


def losses_json(curve: Sequence[float] | None) -> list[float | None] | None:
    """Replace NaN and infinite losses, which JSON does not have, by null; the verdict mentions them."""
    return None if curve is None else [loss if math.isfinite(loss) else None for loss in curve]


def tokens_per_second(row: Row, climb: Climb) -> float | None:
    """Return the rate of all ranks; the tokens of a tensor group count once."""
    tokens = climb.hardware.arranged.data * row.recipe.micro_batch * climb.workload.shape.sequence
    return tokens / row.seconds if row.measurements else None


def share_of_peak(row: Row, climb: Climb, rate: float | None) -> Efficiency | None:
    """Return the share of all ranks' peaks together, which is one rank's share at its part of the tokens."""
    each = None if rate is None else rate / climb.hardware.ranks
    return efficiency(climb.workload.shape, plan_of(row.recipe.rungs), climb.hardware, each) if each else None


def step_spread(measurements: Sequence[Measurement]) -> Spread:
    """Return the spread over the steps of all repeats. Its median is that of the repeats' medians, which a single odd
    repeat cannot pull; its mean is that of their means."""
    pooled = spread_of([seconds for one in measurements for seconds in one.step_seconds])
    median = statistics.median(statistics.median(one.step_seconds) for one in measurements)
    mean = statistics.median(statistics.fmean(one.step_seconds) for one in measurements)
    return replace(pooled, median=median, mean=mean)


def within_noise(row: Row, base: Row, climb: Climb) -> bool:
    """True unless the quick steps show the difference too, the same way: what only the medians show was done by
    something else on the machine, to this row or to its base."""
    noise = max(noise_of_row(row, base, climb), again_floor(climb.finished) or 0.0)
    ratio, quick_ratio = base.seconds / row.seconds, base.quick_seconds / row.quick_seconds
    same_way = (ratio > 1) == (quick_ratio > 1)
    return not (same_way and exceeds(ratio, noise) and exceeds(quick_ratio, noise))


def noise_of_row(row: Row, base: Row, climb: Climb) -> float:
    rows = [one.measurements for one in climb.finished if one.measurements]
    return noise_between(row.measurements, base.measurements, climb.hardware.kind, rows)


def again_floor(rows: Sequence[Row]) -> float | None:
    """Return how far apart two measurements of the finished recipe are, or None if it was not measured again."""
    again = next((row for row in rows if row.name == AGAIN and row.measurements), None)
    if again is None or again.base is None or not again.base.measurements:
        return None
    ratio = again.base.seconds / again.seconds
    return max(ratio, 1 / ratio) - 1


def equivalence_json(row: Row) -> dict[str, str]:
    if row.equivalence is None:
        return {"class": row.maths.value, "verdict": "not-checked", "detail": row.reason or ""}
    return {"class": row.maths.value, "verdict": row.equivalence.verdict, "detail": row.equivalence.detail}


def noise_json(climb: Climb) -> dict[str, Any]:
    """Return the typical noise of a comparison, and where the figure comes from."""
    rows = climb.finished
    pairs = [(row, row.base) for row in rows if row.measurements and row.base is not None and row.base.measurements]
    if not pairs:
        return {"fraction": None, "source": "nothing to compare"}
    typical, floor = statistics.median(noise_of_row(row, base, climb) for row, base in pairs), again_floor(rows)
    source = noise_source(climb, floor)
    if floor is None:
        return {"fraction": typical, "source": source}
    return {
        "fraction": max(floor, typical),
        "source": f"a/a: a recipe against itself differs by {floor:.1%}; {source}",
    }


def noise_source(climb: Climb, floor: float | None) -> str:
    """Say which rows were run once only: their noise is an assumption."""
    measured = [row for row in climb.finished if row.measurements]
    single = [row.name for row in measured if len(row.measurements) == 1]
    if not single:
        return "repeats"
    names = ", ".join(single) if len(single) <= MOST_NAMED else f"{len(single)} rows"
    runs = "one run each" if len(single) == len(measured) else f"repeats, but one run of {names}"
    more = "; --repeats or --aa measure it" if climb.settings.repeats == 1 and floor is None else ""
    return f"{runs}: taken for at least {UNSEEN_RUN_TO_RUN[climb.hardware.kind]:.0%}{more}"


def best_json(climb: Climb) -> dict[str, Any] | None:
    best = best_row(climb.finished)
    if best is None:
        return None
    return {
        "rung": best.name,
        "micro_batch": best.recipe.micro_batch,
        "tokens_per_second": tokens_per_second(best, climb),
    }


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row that is right and that the climb kept, which excludes stand-ins and a/a rows."""
    trusted = [row for row in rows if row.trusted and row.kept]
    return min(trusted, key=lambda row: row.seconds, default=None)


def best_rebatched_json(rows: Sequence[Row]) -> dict[str, Any] | None:
    best = best_rebatched(rows)
    if best is None or best.rebatched is None:
        return None
    choice = best.rebatched
    return {
        "rung": best.name,
        "micro_batch": choice.micro_batch,
        "accumulation": choice.accumulation,
        "tokens_per_second": choice.tokens_per_second,
    }


def best_rebatched(rows: Sequence[Row]) -> Row | None:
    """Return the row that is fastest at its own micro batch, among those whose training is right. A rung that the climb
    left out may win here: checkpointing pays off through the batch it makes room for. Stand-ins are excluded too."""
    stand_ins = {rung.name for rung in LADDER if rung.stand_in}
    trusted = [row for row in rows if row.trusted and row.name not in stand_ins and _own_rate(row)]
    return max(trusted, key=_own_rate, default=None)


def _own_rate(row: Row) -> float:
    return (row.rebatched.tokens_per_second or 0.0) if row.rebatched is not None else 0.0
