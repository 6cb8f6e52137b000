"""The verdict on a row: same, rounding, changed, different or not-checked, with the numbers it rests on.

    judge(Maths class, measurement, reference curve, ...) -> Equivalence(verdict="rounding", detail="...")

A row is compared with the plain fp32 model with the same maths: at step 0 by its loss (near ln V) and every gradient,
and over the first K steps by its loss curve. A row with 8-bit matmuls is *changed* at best, whatever its last rung
promises. Nothing here needs torch: the figures come from a worker.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from redline.core.measurement import GradientCheck, Measurement

YARDSTICK_FACTOR = 1.25  # a recipe may err a quarter more than plain code at its precision
# Below the floor a gradient's relative error is rounding whatever the yardstick says; above the ceiling it never is.
# In fp8 an operand has a root-mean-square error of 2.7 % of its size (e4m3), and gradients computed
# from many of them are up to 9 % off in small tensors; the yardstick is bf16's (docs/fp8.md).
GRADIENT_FLOOR = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 1.5e-1}
GRADIENT_CEILING = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1, "fp8": 2e-1}
# ReLUs make the gradient discontinuous, and 16-bit rounding carries many inputs across zero: plain bf16 is 17 % off in
# a ResNet. The ceiling then rises with how far plain fp32 moves when weights move by the precision's epsilon, up to
# this limit.
MOST_CEILING = 0.5  # doubled or missing gradients have an error of 1
# In a small mixture of experts, rounding that sends one token to another expert is 14 % of that expert's gradient, and
# 2 % of the whole gradient. So while the error of the whole gradient is below this share of the ceiling, a tensor may
# exceed the ceiling as far as plain code at the precision does (by YARDSTICK_FACTOR), up to MOST_CEILING: a recipe
# cannot make plain code worse, and a fault in all tensors shows in the whole gradient.
WELL_WITHIN = 0.5
# An error may be this many times the gradient's noise (GradientCheck.tensor_noise): one ReLU that rounding carries
# across zero is 0.5 % of a batch norm's gradient in a small ResNet, and other code carries other ReLUs across.
NOISE_FACTOR = 2.0
# Above this noise a tensor's gradient is rounding alone. Biases of softmax's keys and biases before batch norm have 0.5
# to 1; all other tensors of GPTs, MLPs and ResNets have less than 0.01.
NULL_NOISE = 0.1
# The errors of such a tensor are relative to its rounding, and other code rounds differently: compiled batch norm
# reached 15 times eager's, 16-bit rows 4 times plain code's at that precision. A gradient that should not exist is far
# above the bound.
NULL_BOUND, NULL_YARDSTICK_FACTOR = 100.0, 10.0
NULL_NAMES = 2  # how many of them are named
# Largest distance of a loss curve from the reference, in nats, over the first steps.
CURVE_TOLERANCE = {"fp32": 0.002, "tf32": 0.01, "fp16": 0.03, "bf16": 0.03, "fp8": 0.06}
# Where the loss moves by less than that, a model that never learns would be within it. So nothing further away than
# this share of what the reference moves passes without a comparison with plain code (see DOUBT_FACTOR), unless it is
# rounding beside the loss itself, in proportion.
MOVED_SHARE = 0.5
# One step in ODD_STEPS may be further away, up to ODD_FACTOR times the tolerance, if it is not the last: some batches
# swing, and the curve comes back. On a CPU, plain fp32 from weights moved by bf16's epsilon left the tiny model's curve
# by 0.047, 0.013 and 0.008 nats in three of twenty steps and by 0.001 in the others, and correct bf16 was as far away
# in the same steps (0.046, 0.027, 0.008).
ODD_STEPS, ODD_FACTOR = 10, 3.0
# A curve that is off by more, but at most DOUBT_FACTOR times the tolerance, is in doubt: it is compared with plain code
# at its precision, which has none of the recipe's faults, and may be CURVE_FACTOR times as far away in each step.
DOUBT_FACTOR, CURVE_FACTOR = ODD_FACTOR, 2.0
USUAL_LOSS = 12.0  # above ln V of every vocabulary here; a user's own loss may be larger, and rounds in proportion
# A first update this far from the reference's, relative to its size, is not rounding: 1 is a tensor that never moves or
# moves twice as far. AdamW's first step is the gradient's sign, and the sign of rounding is chance. Elements whose
# gradient is rounding alone (the keys' third of a fused bias, half of a fused pair) are left out by the worker, whole
# tensors of that kind here.
UPDATE_BOUND = 0.95
START_TOLERANCE = 0.5  # nats around ln V: logits of an N(0, 0.02) head add 0.01 to 0.3, an N(0, 1) one adds 25
LEARNING_STEPS = 5  # `learned` takes the median of so many; over fewer, batches differ by more than is learned
LEAST_LEARNING = 0.8  # a changed model must shed this share of the unchanged model's nats, or its rung's own share


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    maths: str
    """The class the rung declares."""
    verdict: str
    """same, rounding, changed, different or not-checked."""
    detail: str


def gradient_bound(precision: str, yardstick_error: float, swing: float = 0.0) -> float:
    if math.isnan(yardstick_error):  # plain code at this precision breaks: it excuses nothing
        yardstick_error = 0.0
    ceiling = max(GRADIENT_CEILING[precision], min(NOISE_FACTOR * swing, MOST_CEILING))
    return min(max(YARDSTICK_FACTOR * yardstick_error, GRADIENT_FLOOR[precision]), ceiling)


def is_null(gradients: GradientCheck, name: str) -> bool:
    """True if the tensor's true gradient is zero, as far as plain fp32 can tell."""
    return gradients.tensor_noise.get(name, 0.0) > NULL_NOISE


def tensor_bound(gradients: GradientCheck, name: str, precision: str) -> float:
    yardstick = gradients.tensor_yardsticks[name]
    if is_null(gradients, name):
        return max(NULL_BOUND, NULL_YARDSTICK_FACTOR * yardstick)
    bound = _usual_bound(gradients, name, precision)
    if gradients.error <= WELL_WITHIN * GRADIENT_CEILING[precision]:
        return max(bound, min(YARDSTICK_FACTOR * yardstick, MOST_CEILING))
    return bound


def _usual_bound(gradients: GradientCheck, name: str, precision: str) -> float:
    """Return the bound without the allowance for flipped choices. A row can only be held to what plain fp32 determines.
    Old records have no noise."""
    yardstick, swing = gradients.tensor_yardsticks[name], gradients.tensor_swing.get(name, 0.0)
    return max(gradient_bound(precision, yardstick, swing), NOISE_FACTOR * gradients.tensor_noise.get(name, 0.0))


def judge(
    *,
    maths: str,
    precision: str,
    measurement: Measurement,
    reference: Sequence[float] | None,
    base: Sequence[float] | None,
    plain: Sequence[float] | None,
    ln_vocab: float | None,
    yardstick: Sequence[float] | None = None,
    least_learning: float = LEAST_LEARNING,
    unchecked: str | None = None,
) -> Equivalence:
    """Return the verdict on a row. `reference`: the fp32 curve with the recipe's maths; `base`: the curve of the recipe
    to which this rung was added; `plain`: the fp32 curve of the unchanged maths, with which a rung that changes the
    maths is compared; `yardstick`: the curve of plain code at the recipe's precision, for a curve that `is_in_doubt`;
    `ln_vocab`: None if the loss at the start is unknown; `unchecked`: why nothing can be compared."""
    if unchecked is not None:
        finite = _is_finite(measurement.loss_curve)
        detail = unchecked if finite else "the loss is not finite"
        return Equivalence(maths=maths, verdict="not-checked" if finite else "different", detail=detail)
    changes = maths == "changes-maths"
    # If part of the reference is missing, the rest still shows faults: a wrong gradient needs no curve.
    faults = [
        *(_step_faults(measurement.gradients, precision, ln_vocab) if measurement.gradients else []),
        *_curve_faults(measurement.loss_curve, reference, precision, yardstick),
        *(_learning_faults(measurement.loss_curve, plain, least_learning) if changes else []),
    ]
    if measurement.pair_bitwise is False:
        faults.append("declared bit-exact, but plain steps with and without it differ in their bits")
    if faults:
        return Equivalence(maths=maths, verdict="different", detail="; ".join(faults))
    if measurement.gradients is None or reference is None:
        return Equivalence(maths=maths, verdict="not-checked", detail="the fp32 reference could not be run")
    if not _is_finite(reference) or (changes and not _is_finite(plain)):
        return Equivalence(maths=maths, verdict="not-checked", detail="the fp32 reference has no finite loss curve")
    if changes and _is_finite(plain) and (detail := why_no_learning(plain)):
        return Equivalence(maths=maths, verdict="not-checked", detail=detail)
    return Equivalence(
        maths=maths,
        verdict="changed" if precision == "fp8" else _agreement(maths, measurement, reference, base),
        detail=_figures(measurement, precision, reference, base, yardstick),
    )


def _agreement(maths: str, measurement: Measurement, reference: Sequence[float], base: Sequence[float] | None) -> str:
    """`same` needs equal bits: a whole curve equal to the reference's, or, for a bit-exact rung, a curve equal to that
    of the recipe to which it was added, or plain steps that agree with and without it."""
    curve = measurement.loss_curve
    if maths == "changes-maths":
        return "changed"
    exact = maths == "bit-exact" or (measurement.gradients is not None and measurement.gradients.error == 0)
    if curve == tuple(reference) and exact:  # losses are rounded to 24 bits: gradients must not differ unseen
        return "same"
    equal_to_base = measurement.pair_bitwise is True or (base is not None and curve == tuple(base))
    return "same" if maths == "bit-exact" and equal_to_base else "rounding"


def _step_faults(gradients: GradientCheck, precision: str, ln_vocab: float | None) -> list[str]:
    """Return the faults of the first step, which each worker compares with its own fp32 model."""
    return [
        *_start_faults(gradients, ln_vocab),
        *_gradient_faults(gradients, precision),
        *_update_faults(gradients),
    ]


def _start_faults(gradients: GradientCheck, ln_vocab: float | None) -> list[str]:
    if ln_vocab is None or abs(gradients.loss - ln_vocab) <= START_TOLERANCE:
        return []
    return [f"starts at {gradients.loss:.3f}, not near ln V = {ln_vocab:.3f}"]


def _gradient_faults(gradients: GradientCheck, precision: str) -> list[str]:
    """Name the tensor furthest above its bound, if any is. NaN is above every bound."""
    errors = gradients.tensor_errors
    bounds = {name: tensor_bound(gradients, name, precision) for name in errors}
    over = {
        name: error / bounds[name] for name, error in errors.items() if not error <= bounds[name] or error == math.inf
    }
    if not over:
        return []
    worst = max(over, key=lambda name: math.inf if math.isnan(over[name]) else over[name])
    more = f" ({len(over)} of {len(bounds)} tensors)" if len(over) > 1 else ""
    off = "times fp32's, which is rounding alone," if is_null(gradients, worst) else "off fp32,"
    return [f"gradient of {worst} is {errors[worst]:.2g} {off} bound {bounds[worst]:.2g}{more}"]


def _update_faults(gradients: GradientCheck) -> list[str]:
    judged = {name: error for name, error in gradients.update_errors.items() if not is_null(gradients, name)}
    over = {name: error for name, error in judged.items() if not error <= UPDATE_BOUND}
    if not over:
        return []
    worst = max(over, key=lambda name: math.inf if math.isnan(over[name]) else over[name])
    return [f"the first update of {worst} is {over[worst]:.2g} of its size off fp32 ({len(over)} tensors)"]


def _curve_faults(
    curve: Sequence[float], reference: Sequence[float] | None, precision: str, yardstick: Sequence[float] | None
) -> list[str]:
    if not _is_finite(curve):
        return [] if _breaks_first(reference, curve) else ["the loss is not finite"]
    if not _is_finite(reference):  # max() passes over a NaN that is not first: the gap would look small
        return []
    gaps = _gaps(curve, reference)
    gap, unasked = max(gaps), unasked_tolerance(reference, precision)
    comes_back = gaps[-1] <= unasked and usual_gap(curve, reference) <= unasked
    if gap <= unasked or (gap <= ODD_FACTOR * unasked and comes_back):
        return []
    fault = f"loss curve leaves fp32 by {gap:.3f} nats, tolerance {unasked:.3g}"
    if not _is_finite(yardstick):
        return [fault]
    by_itself = f"plain code at this precision by {curve_gap(yardstick, reference):.3f}"
    return [] if _is_as_plain(curve, reference, yardstick, precision) else [f"{fault}, {by_itself}"]


def _breaks_first(reference: Sequence[float] | None, curve: Sequence[float]) -> bool:
    """True if the reference is not finite where the curve first is not, or before: what it shows is the model's own."""
    broken = next(step for step, loss in enumerate(curve) if not math.isfinite(loss))
    return reference is not None and not _is_finite(reference[: broken + 1])


def _is_as_plain(
    curve: Sequence[float], reference: Sequence[float], yardstick: Sequence[float], precision: str
) -> bool:
    """Compare step by step: a step in which plain code swings excuses no drift in the others. Within the tolerance its
    largest gap counts for all, since that of one step may be small by chance."""
    steps = zip(_gaps(curve, reference), _gaps(yardstick, reference), strict=True)
    tolerance, unasked = curve_tolerance(reference, precision), unasked_tolerance(reference, precision)
    by_chance = max(unasked, min(CURVE_FACTOR * curve_gap(yardstick, reference), tolerance))
    return all(own <= min(max(by_chance, CURVE_FACTOR * plain), DOUBT_FACTOR * tolerance) for own, plain in steps)


def is_in_doubt(curve: Sequence[float], reference: Sequence[float] | None, precision: str) -> bool:
    """True if plain code at this precision should decide how far the curve may be from fp32's."""
    if precision == "fp32" or not _is_finite(curve) or not _is_finite(reference):
        return False
    within = curve_gap(curve, reference) <= DOUBT_FACTOR * curve_tolerance(reference, precision)
    return within and bool(_curve_faults(curve, reference, precision, None))


def curve_tolerance(reference: Sequence[float], precision: str) -> float:
    return CURVE_TOLERANCE[precision] * max(1.0, abs(reference[0]) / USUAL_LOSS)


def unasked_tolerance(reference: Sequence[float], precision: str) -> float:
    """Return how far a curve may be away without a look at plain code. A few steps show nothing of how it moves."""
    tolerance = curve_tolerance(reference, precision)
    if len(reference) < LEARNING_STEPS:
        return tolerance
    in_proportion = CURVE_TOLERANCE[precision] * max(map(abs, reference)) / USUAL_LOSS
    return min(tolerance, max(MOVED_SHARE * (max(reference) - min(reference)), in_proportion))


def _learning_faults(curve: Sequence[float], plain: Sequence[float] | None, least: float) -> list[str]:
    if not _is_finite(plain) or why_no_learning(plain):
        return []
    shed, plain_shed = learned(curve), learned(plain)
    return (
        []
        if shed >= least * plain_shed
        else [f"sheds {shed:.3f} nats where the unchanged model sheds {plain_shed:.3f}"]
    )


def why_no_learning(plain: Sequence[float]) -> str:
    """Return why this curve of the unchanged model cannot show whether a changed one learns as much; '' if it can."""
    if len(plain) < LEARNING_STEPS:
        return f"too few steps to judge what it learns: {len(plain)}, it takes {LEARNING_STEPS} (--check-steps)"
    if learned(plain) <= 0:
        return f"the unchanged model learns nothing in {len(plain)} steps to compare with (--check-steps)"
    return ""


def _is_finite(curve: Sequence[float] | None) -> TypeGuard[Sequence[float]]:
    return curve is not None and all(math.isfinite(loss) for loss in curve)


def curve_gap(curve: Sequence[float], reference: Sequence[float]) -> float:
    return max(_gaps(curve, reference))


def usual_gap(curve: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest gap, without the steps that may be odd."""
    gaps = sorted(_gaps(curve, reference))
    return gaps[-1 - len(gaps) // ODD_STEPS]


def _gaps(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(mine - theirs) for mine, theirs in zip(curve, reference, strict=True)]


def learned(curve: Sequence[float]) -> float:
    """Return the nats shed from the first step to the median of the last few."""
    return curve[0] - statistics.median(curve[-LEARNING_STEPS:])


def _figures(
    measurement: Measurement,
    precision: str,
    reference: Sequence[float],
    base: Sequence[float] | None,
    yardstick: Sequence[float] | None,
) -> str:
    gradients, curve = measurement.gradients, measurement.loss_curve
    assert gradients is not None
    parts = [f"starts at {gradients.loss:.3f}"]
    if measurement.pair_bitwise is not None:
        parts.append("plain steps with and without it: every bit equal")
    if base is not None and tuple(base) == curve:
        parts.append("curve equal bit for bit to the rung before")
    parts.append(f"gradients {gradients.error:.1e} off fp32 (plain code at this precision {gradients.yardstick:.1e})")
    parts.extend(_high_figures(gradients, precision))
    parts.extend(_null_figures(gradients))
    by_itself = f" (plain code at this precision {curve_gap(yardstick, reference):.1e})" if yardstick else ""
    parts.append(f"curve within {curve_gap(curve, reference):.1e} nats of fp32{by_itself}")
    if measurement.skipped_updates:
        parts.append(f"{measurement.skipped_updates} updates skipped by the loss scaler")
    return "; ".join(parts)


def _high_figures(gradients: GradientCheck, precision: str) -> list[str]:
    """Describe the tensors that only the small error of the whole gradient excuses."""
    errors = gradients.tensor_errors
    high = [
        name
        for name, error in errors.items()
        if error > _usual_bound(gradients, name, precision) and not is_null(gradients, name)
    ]
    if not high:
        return []
    worst = max(high, key=errors.__getitem__)
    plain = f"plain code at this precision {gradients.tensor_yardsticks[worst]:.2g}"
    return [
        f"{len(high)} of {len(errors)} tensors over the ceiling {GRADIENT_CEILING[precision]:g} ({worst} "
        f"{errors[worst]:.2g}, {plain}), the whole gradient far below it: rounding that flips a choice, such as a "
        "router's, does that"
    ]


def _null_figures(gradients: GradientCheck) -> list[str]:
    names = [name for name in gradients.tensor_errors if is_null(gradients, name)]
    if not names:
        return []
    more = f" and {len(names) - NULL_NAMES} more" if len(names) > NULL_NAMES else ""
    have = "has" if len(names) == 1 else "have"
    total = len(gradients.tensor_errors)
    return [f"{len(names)} of {total} tensors {have} no gradient but rounding ({', '.join(names[:NULL_NAMES])}{more})"]
