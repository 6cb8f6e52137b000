"""The verdict on hand-made measurements: what passes as same, rounding or changed, and that nothing else ever does."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redline.core.measurement import GradientCheck, Measurement
from redline.core.values import from_json, to_json
from redline.predict.verdict import (
    CURVE_TOLERANCE,
    GRADIENT_CEILING,
    GRADIENT_FLOOR,
    LEAST_LEARNING,
    MOST_CEILING,
    NOISE_FACTOR,
    NULL_BOUND,
    NULL_NOISE,
    NULL_YARDSTICK_FACTOR,
    START_TOLERANCE,
    UPDATE_BOUND,
    WELL_WITHIN,
    YARDSTICK_FACTOR,
    curve_gap,
    gradient_bound,
    is_in_doubt,
    judge,
    learned,
    usual_gap,
)

LN_VOCAB = math.log(50257)  # 10.82
REFERENCE = tuple(10.97 - 0.15 * step for step in range(20))
CLASSES = ("bit-exact", "rounding-only", "changes-maths")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
NOT_FINITE = (math.nan, math.inf, -math.inf)
quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test
every_class = pytest.mark.parametrize("maths", CLASSES)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def gradients(loss=10.97, yardsticks=None, **errors):
    """Tensors as keywords; what is not said is well inside every bound."""
    errors = {"wte": 1e-6, "head": 1e-6, **errors}
    return GradientCheck(
        loss=loss,
        reference_loss=10.97,
        error=max(errors.values()),
        yardstick=0.0,
        tensor_errors=errors,
        tensor_yardsticks={**dict.fromkeys(errors, 0.0), **(yardsticks or {})},
    )


def measured(curve=REFERENCE, check=None, **fields):
    return Measurement(loss_curve=tuple(curve), gradients=check or gradients(), **fields)


def verdict_on(
    measurement,
    maths="rounding-only",
    precision="bf16",
    reference=REFERENCE,
    base=None,
    plain=REFERENCE,
    yardstick=None,
):
    return judge(
        maths=maths,
        precision=precision,
        measurement=measurement,
        reference=reference,
        base=base,
        plain=plain,
        yardstick=yardstick,
        ln_vocab=LN_VOCAB,
    )


def shifted(by, at=7):
    return tuple(loss + (by if step == at else 0.0) for step, loss in enumerate(REFERENCE))


NEAR = shifted(0.001)  # inside every tolerance, equal to nothing


# what passes


@pytest.mark.parametrize(
    ("maths", "curve", "verdict"),
    [
        ("bit-exact", REFERENCE, "same"),
        ("bit-exact", NEAR, "rounding"),
        ("rounding-only", REFERENCE, "rounding"),  # equal losses, but the gradients are 1e-6 apart
        ("rounding-only", NEAR, "rounding"),
        ("changes-maths", REFERENCE, "changed"),
        ("changes-maths", NEAR, "changed"),
    ],
)
def test_a_right_row_by_its_class(maths, curve, verdict):
    equivalence = verdict_on(measured(curve), maths)
    assert (equivalence.maths, equivalence.verdict) == (maths, verdict)


@pytest.mark.parametrize(
    ("pair", "base", "verdict"),
    [
        (True, None, "same"),
        (True, REFERENCE, "same"),
        (None, NEAR, "same"),  # the curve of the recipe below, bit for bit
        (None, REFERENCE, "rounding"),
        (None, None, "rounding"),
        (False, None, "different"),
        (False, NEAR, "different"),  # equal losses do not outweigh weights that differ
    ],
)
def test_a_bit_exact_rung_needs_bits(pair, base, verdict):
    assert verdict_on(measured(NEAR, pair_bitwise=pair), "bit-exact", base=base).verdict == verdict


def test_equal_losses_and_equal_gradients_are_the_same_whatever_was_promised():
    exact = gradients(wte=0.0, head=0.0)
    assert verdict_on(measured(REFERENCE, exact), "rounding-only").verdict == "same"
    assert verdict_on(measured(NEAR, exact), "rounding-only").verdict == "rounding"


def test_a_pair_whose_bits_differ_is_never_the_same():
    """Losses print 20 numbers, the pair compares every weight: when they disagree, the weights are right."""
    for base in (None, REFERENCE, NEAR):
        equivalence = verdict_on(measured(REFERENCE, pair_bitwise=False), "bit-exact", base=base)
        assert equivalence.verdict == "different"
        assert "differ in their bits" in equivalence.detail


def test_bits_equal_to_the_rung_below_prove_nothing_for_a_rung_that_promised_rounding():
    assert verdict_on(measured(NEAR), "rounding-only", base=NEAR).verdict == "rounding"


@every_class
def test_a_pair_of_bits_does_not_excuse_a_wrong_gradient(maths):
    wrong = measured(REFERENCE, gradients(wte=0.5), pair_bitwise=True)
    assert verdict_on(wrong, maths, base=REFERENCE).verdict == "different"


def test_the_detail_gives_the_figures():
    check = replace(gradients(), error=0.0123, yardstick=0.0456)
    detail = verdict_on(measured(NEAR, check, skipped_updates=3, pair_bitwise=True), "bit-exact", base=NEAR).detail
    for figure in (
        "10.970",
        "1.2e-02",
        "4.6e-02",
        "1.0e-03 nats",
        "3 updates skipped",
        "every bit equal",
        "bit for bit",
    ):
        assert figure in detail
    assert "skipped" not in verdict_on(measured(NEAR)).detail


# the start


@every_class
@pytest.mark.parametrize("start", [37.0, 0.0, LN_VOCAB + 0.501, LN_VOCAB - 0.501, *NOT_FINITE])
def test_a_start_away_from_ln_v_is_different(maths, start):
    """An N(0, 1) embedding tied to the head starts at 37."""
    equivalence = verdict_on(measured(check=gradients(loss=start)), maths)
    assert equivalence.verdict == "different"
    assert "not near ln V = 10.825" in equivalence.detail


@pytest.mark.parametrize("offset", [-0.499, 0.0, 0.3, 0.499])
def test_a_start_near_ln_v_passes(offset):
    assert verdict_on(measured(check=gradients(loss=LN_VOCAB + offset))).verdict == "rounding"
    assert START_TOLERANCE == 0.5


def test_tying_a_wide_embedding_is_caught_with_all_its_symptoms():
    curve = tuple(37.0 - 0.5 * step for step in range(20))
    equivalence = verdict_on(measured(curve, gradients(loss=37.0)), "changes-maths", reference=curve)
    assert equivalence.verdict == "different"
    assert "37.000" in equivalence.detail


# gradients


@every_precision
def test_a_bound_is_a_quarter_over_the_yardstick_between_floor_and_ceiling(precision):
    floor, ceiling = GRADIENT_FLOOR[precision], GRADIENT_CEILING[precision]
    assert 0 < floor < ceiling < 1
    assert YARDSTICK_FACTOR == 1.25
    assert gradient_bound(precision, 0.0) == floor
    assert gradient_bound(precision, floor / 2) == floor
    assert gradient_bound(precision, floor * 2) == pytest.approx(2.5 * floor)
    assert gradient_bound(precision, ceiling) == ceiling
    assert gradient_bound(precision, math.inf) == ceiling


@every_precision
@pytest.mark.parametrize("yardstick", [0.0, 3.0, 1e6], ids=["floor", "factor", "ceiling"])
def test_a_gradient_at_its_bound_passes_and_above_it_fails(precision, yardstick):
    yardsticks = {"wte": yardstick * GRADIENT_FLOOR[precision]}
    bound = gradient_bound(precision, yardsticks["wte"])
    for factor, verdict in ((0.999, "rounding"), (1.0, "rounding"), (1.001, "different")):
        check = gradients(yardsticks=yardsticks, wte=factor * bound)
        assert verdict_on(measured(NEAR, check), precision=precision).verdict == verdict, factor


def test_finer_arithmetic_has_tighter_bounds():
    for table in (GRADIENT_FLOOR, GRADIENT_CEILING, CURVE_TOLERANCE):
        assert table.keys() == {*PRECISIONS, "fp8"}
        assert table["fp32"] < table["tf32"] <= table["fp16"] <= table["bf16"] < table["fp8"]


@every_class
def test_8_bits_change_the_maths_whatever_the_last_rung_promises(maths):
    assert verdict_on(measured(NEAR), maths, precision="fp8").verdict == "changed"
    off = measured(check=gradients(head=1.01 * GRADIENT_CEILING["fp8"], yardsticks={"head": 1.0}))
    assert verdict_on(off, maths, precision="fp8").verdict == "different"
    flat = measured([REFERENCE[0]] * len(REFERENCE))
    assert verdict_on(flat, maths, precision="fp8").verdict == "different"


def test_a_tensor_over_its_bound_is_named():
    detail = verdict_on(measured(check=gradients(head=0.5))).detail
    assert "gradient of head is 0.5 off fp32, bound 0.01" in detail
    assert "wte" not in detail
    assert "tensors" not in detail


def test_of_many_wrong_tensors_the_worst_against_its_own_bound_is_named():
    """0.3 against a bound of 0.01 is worse than 0.9 against one of 0.1."""
    check = gradients(yardsticks={"loud": 10.0}, loud=0.9, quiet=0.3)
    detail = verdict_on(measured(check=check)).detail
    assert "gradient of quiet is 0.3 off" in detail
    assert "(2 of 4 tensors)" in detail


@every_class
@every_precision
@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("yardstick", [0.0, math.inf, math.nan])
def test_a_gradient_that_is_no_number_is_different(maths, precision, error, yardstick):
    check = gradients(yardsticks={"bad": yardstick}, bad=error, large=0.9)
    equivalence = verdict_on(measured(check=check), maths, precision)
    assert equivalence.verdict == "different"
    assert "gradient of bad is" in equivalence.detail


def test_doubled_gradients_are_caught_though_adamw_forgives_them():
    """A relative error of 1 in every tensor while start and curve agree bit for bit."""
    assert verdict_on(measured(check=gradients(wte=1.0, head=1.0)), "bit-exact").verdict == "different"


@quick
@given(
    st.sampled_from(CLASSES),
    st.sampled_from(PRECISIONS),
    st.floats(min_value=0.1000001, allow_infinity=False, allow_nan=False),
    st.floats(min_value=0) | st.just(math.nan),
    st.sampled_from([True, False, None]),
    st.sampled_from([REFERENCE, NEAR]),
)
@example("bit-exact", "bf16", 0.11, math.inf, True, REFERENCE)
def test_a_large_gradient_error_is_never_excused(maths, precision, error, yardstick, pair, curve):
    """Not by a yardstick that is as bad, nor by equal curves, nor by the pair."""
    check = gradients(yardsticks={"wte": yardstick}, wte=error)
    measurement = measured(curve, check, pair_bitwise=pair)
    assert verdict_on(measurement, maths, precision, base=curve).verdict == "different"


# tensors over the ceiling in a gradient that is not


def of_an_expert(error, yardstick, whole, **fields):
    """One small tensor, so that the whole gradient is closer to fp32 than it is."""
    return replace(gradients(expert=error, yardsticks={"expert": yardstick}, **fields), error=whole)


def test_plain_code_over_the_ceiling_in_a_tensor_is_rounding_where_the_whole_gradient_is_far_below_it():
    """The figures of bf16 on a small mixture of experts: one token went to another expert."""
    found = verdict_on(measured(NEAR, of_an_expert(0.1406, 0.1406, whole=0.0175)))
    assert found.verdict == "rounding"
    assert "1 of 3 tensors over the ceiling 0.1 (expert 0.14, plain code at this precision 0.14)" in found.detail
    assert "ceiling" not in verdict_on(measured(NEAR, of_an_expert(0.09, 0.09, whole=0.0175))).detail


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp8"])
def test_a_tensor_over_the_ceiling_and_worse_than_plain_code_is_different(precision):
    whole, yardstick = 0.1 * GRADIENT_CEILING[precision], 1.5 * GRADIENT_CEILING[precision]
    for factor, fine in ((0.99, True), (1.01, False)):
        check = of_an_expert(factor * YARDSTICK_FACTOR * yardstick, yardstick, whole)
        assert (verdict_on(measured(NEAR, check), precision=precision).verdict != "different") is fine
    check = of_an_expert(yardstick, 0.001 * yardstick, whole)
    assert verdict_on(measured(NEAR, check), precision=precision).verdict == "different"


@every_precision
def test_a_whole_gradient_near_the_ceiling_excuses_no_tensor(precision):
    ceiling = GRADIENT_CEILING[precision]
    for factor, fine in ((0.99, True), (1.01, False), (2 / WELL_WITHIN, False), (math.nan, False)):
        check = of_an_expert(1.4 * ceiling, 1.4 * ceiling, whole=factor * WELL_WITHIN * ceiling)
        assert (verdict_on(measured(NEAR, check), precision=precision).verdict != "different") is fine


@every_precision
@pytest.mark.parametrize("yardstick", [1.0, 9.0, math.inf, math.nan])
def test_a_gradient_that_is_missing_is_never_excused(precision, yardstick):
    for error in (1.01 * MOST_CEILING, 1.0, math.inf, math.nan):
        check = of_an_expert(error, yardstick, whole=0.0)
        assert verdict_on(measured(NEAR, check), precision=precision).verdict == "different"


# gradients that are zero but for rounding


def with_noise(check, updates=None, swing=None, **noise):
    return replace(check, tensor_noise=noise, update_errors=updates or {}, tensor_swing=swing or {})


@every_class
@every_precision
def test_a_tensor_of_rounding_alone_is_judged_by_its_rounding(maths, precision):
    """6.3 and 2.5 are what a correct ResNet had, compiled."""
    for error, fine in ((6.3, True), (NULL_BOUND, True), (1.01 * NULL_BOUND, False), (1e6, False)):
        found = verdict_on(measured(check=with_noise(gradients(k=error), k=1.0)), maths, precision)
        assert (found.verdict != "different") is fine, found.detail
    assert "gradient of k is 1e+06 times fp32's, which is rounding alone, bound 1e+02" in found.detail


@every_class
@every_precision
def test_a_record_without_noise_is_judged_as_before(maths, precision):
    """Those of earlier versions: nothing is excused that nobody measured."""
    old = to_json(gradients(k=6.3))
    del old["tensor_noise"], old["tensor_swing"]
    found = verdict_on(measured(check=from_json(GradientCheck, old)), maths, precision)
    assert found.verdict == "different"
    assert "gradient of k is 6.3 off fp32" in found.detail


def test_at_another_precision_rounding_is_as_large_as_plain_codes():
    for factor, verdict in ((0.99, "rounding"), (1.01, "different")):
        error = factor * NULL_YARDSTICK_FACTOR * 1e4
        check = with_noise(gradients(k=error, yardsticks={"k": 1e4}), k=1.0)
        assert verdict_on(measured(check=check)).verdict == verdict


@every_precision
@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("yardstick", [0.0, math.inf, math.nan])
def test_what_is_no_number_is_not_rounding(precision, error, yardstick):
    check = with_noise(gradients(k=error, yardsticks={"k": yardstick}), k=1.0)
    found = verdict_on(measured(check=check), precision=precision)
    assert found.verdict == "different"
    assert "gradient of k is" in found.detail


@pytest.mark.parametrize(("noise", "judged"), [(NULL_NOISE * 0.99, True), (NULL_NOISE * 1.01, False)])
def test_the_update_of_rounding_is_chance_and_of_the_others_is_not(noise, judged):
    updates = {"k": 2.5, "wte": 0.1}
    found = verdict_on(measured(check=with_noise(gradients(), updates, k=noise)))
    assert (found.verdict == "different") is judged
    wrong = {"k": 2.5, "wte": 1.01 * UPDATE_BOUND}
    found = verdict_on(measured(check=with_noise(gradients(), wrong, k=1.0)))
    assert "the first update of wte" in found.detail


@pytest.mark.parametrize("noise", [1e-6, 3e-3, 0.09])
def test_a_gradient_with_some_noise_may_err_by_twice_that(noise):
    """A ReLU that rounding carries over zero; below half of the floor it makes no difference."""
    bound = max(GRADIENT_FLOOR["fp32"], NOISE_FACTOR * noise)
    for factor, verdict in ((0.99, "rounding"), (1.01, "different")):
        check = with_noise(gradients(wte=factor * bound), wte=noise)
        assert verdict_on(measured(NEAR, check), precision="fp32").verdict == verdict


@pytest.mark.parametrize(
    ("yardstick", "swing", "bound"),
    [
        (0.2, 0.0, 0.1),  # the ceiling
        (0.2, 0.04, 0.1),  # a smooth model's: as before
        (0.2, 0.1, 0.2),
        (0.2, 0.2, 0.25),  # never more than a quarter over plain code
        (0.001, 0.2, 0.01),  # and the floor stays
        (9.0, 9.0, MOST_CEILING),
    ],
)
def test_the_ceiling_gives_way_to_what_plain_fp32_does_with_such_weights(yardstick, swing, bound):
    assert gradient_bound("bf16", yardstick, swing) == pytest.approx(bound)
    for factor, verdict in ((0.99, "rounding"), (1.01, "different")):
        check = gradients(wte=factor * bound, yardsticks={"wte": yardstick})
        assert verdict_on(measured(NEAR, with_noise(check, swing={"wte": swing}))).verdict == verdict


def test_the_detail_says_which_tensors_have_no_gradient():
    check = gradients(k=1e-6, l=1e-6, m=1e-6)
    said = [verdict_on(measured(NEAR, with_noise(check, **dict.fromkeys(names, 1.0)))).detail for names in ("k", "klm")]
    assert "1 of 5 tensors has no gradient but rounding (k)" in said[0]
    assert "3 of 5 tensors have no gradient but rounding (k, l and 1 more)" in said[1]
    assert "rounding" not in verdict_on(measured(NEAR)).detail


# the curve


@every_class
@every_precision
def test_a_curve_may_leave_the_reference_by_its_tolerance(maths, precision):
    """And in one step of ten, which is two of these twenty, by three times that, if it comes back."""
    tolerance = CURVE_TOLERANCE[precision]

    def judged(amount, *steps):
        curve = list(NEAR)
        for step in steps:
            curve[step] = shifted(amount, step)[step]
        return verdict_on(measured(tuple(curve)), maths, precision)

    for sign in (1, -1):
        assert judged(sign * tolerance * 0.999, *range(20)).verdict != "different"
        for odd in ((0,), (0, 18), (17, 18)):
            assert judged(sign * tolerance * 2.999, *odd).verdict != "different"
        for amount, steps in ((1.001, (0, 7, 18)), (3.001, (0,)), (1.001, (19,)), (2.0, (18, 19))):
            equivalence = judged(sign * tolerance * amount, *steps)
            assert equivalence.verdict == "different"
            assert f"tolerance {tolerance:g}" in equivalence.detail


@every_class
@every_precision
def test_a_curve_in_doubt_may_be_twice_as_far_away_as_plain_code_and_no_further(maths, precision):
    tolerance, short = CURVE_TOLERANCE[precision], REFERENCE[:5]

    def away(by):
        return (short[0], *(loss + by for loss in short[1:]))

    def judged(by, plain_by):
        same = {"reference": short, "plain": short}
        return verdict_on(measured(away(by)), maths, precision, **same, yardstick=away(plain_by))

    for by in (1.5 * tolerance, -2.9 * tolerance):
        assert is_in_doubt(away(by), short, precision) == (precision != "fp32")
        assert judged(by, 0.51 * by).verdict != "different"
        wrong = judged(by, 0.49 * by)
        assert wrong.verdict == "different"
        assert f"plain code at this precision by {abs(0.49 * by):.3f}" in wrong.detail
    assert "plain code at this precision" in judged(1.5 * tolerance, tolerance).detail
    assert judged(3.1 * tolerance, 3.1 * tolerance).verdict == "different", "whatever plain code does"
    odd = (*short[:-1], short[-1] + 2 * tolerance)
    drifting = measured(away(1.5 * tolerance))
    judged_so = verdict_on(drifting, maths, precision, reference=short, plain=short, yardstick=odd)
    assert judged_so.verdict == "different", "one step that swings excuses no other"
    for certain in (0.9 * tolerance, 3.1 * tolerance, math.nan):
        assert not is_in_doubt(away(certain), short, precision)
    assert not is_in_doubt(away(2 * tolerance), None, precision)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0.300, 0.273), (0.0250, 0.0006), (0.69, 0.66)],
    ids=["a small loss", "a smaller one", "a binary loss"],
)
def test_a_model_that_never_learns_is_found_where_the_loss_hardly_moves(first, last):
    """bf16's tolerance is 0.03 nats, more than these losses move in all of the steps."""
    falling = tuple(first + (last - first) * step / 19 for step in range(20))
    known = {"reference": falling, "plain": falling, "yardstick": tuple(loss + 1e-3 for loss in falling)}
    frozen = (first,) * 20
    assert is_in_doubt(frozen, falling, "bf16")
    assert verdict_on(measured(frozen), **known).verdict == "different"
    rounded = tuple(loss * 1.005 for loss in falling)
    assert verdict_on(measured(rounded), **known).verdict == "rounding"
    off_as_plain = tuple(loss + 0.02 for loss in falling)
    known["yardstick"] = tuple(loss + 0.011 for loss in falling)
    assert verdict_on(measured(off_as_plain), **known).verdict == "rounding", "plain code is as far away"


@every_precision
def test_rounding_beside_a_loss_that_stands_still_is_rounding(precision):
    """A head of zeros, or a rate of almost nothing: what the loss moves by says nothing of what it rounds to."""
    still = (2.302585,) * 20
    off = tuple(loss * (1 + 0.1 * CURVE_TOLERANCE[precision] / 12) for loss in still)
    known = {"reference": still, "plain": None, "yardstick": None}
    assert verdict_on(measured(off), precision=precision, **known).verdict == "rounding"


def test_plain_code_that_is_near_by_chance_in_one_step_accuses_nobody():
    """Both round on their own: in some steps one is close and the other is not."""
    draw = random.Random(0)
    moves = tuple(0.7 - 0.001 * step for step in range(20))
    wrong = 0
    for _ in range(200):
        one, other = (tuple(loss + draw.gauss(0, 0.006) for loss in moves) for _ in range(2))
        known = {"reference": moves, "plain": moves, "yardstick": other}
        wrong += verdict_on(measured(one), **known).verdict == "different"
    assert wrong <= 10, "they were right all along, and the old tolerance has room for them"


def test_a_reference_that_breaks_first_accuses_nobody():
    """The model's own loss ends in NaN after some steps: its rows cannot be checked, but they are not wrong."""
    broken = (*REFERENCE[:3], *(math.nan,) * 17)
    assert verdict_on(measured(broken), reference=broken, plain=broken).verdict == "not-checked"
    later = (*NEAR[:5], *(math.inf,) * 15)
    assert verdict_on(measured(later), reference=broken, plain=broken).verdict == "not-checked"
    earlier = (*NEAR[:2], *(math.nan,) * 18)
    assert verdict_on(measured(earlier), reference=broken, plain=broken).verdict == "different"
    assert verdict_on(measured(later), reference=None, plain=None).verdict == "different"


def test_a_yardstick_that_is_no_number_excuses_nothing_and_accuses_nobody():
    assert gradient_bound("fp16", math.nan) == GRADIENT_FLOOR["fp16"]


def test_in_a_short_curve_no_step_is_odd():
    assert usual_gap((1.0,) * 9, (1.0,) * 8 + (1.5,)) == 0.5
    assert usual_gap((1.0,) * 10, (1.0,) * 9 + (1.5,)) == 0.0


def test_the_tolerance_itself_passes():
    half = tuple(0.5 * step for step in range(20))  # numbers that add without rounding
    tolerance = CURVE_TOLERANCE["bf16"]
    at_edge = (tolerance, *half[1:])
    assert curve_gap(at_edge, half) == tolerance
    assert verdict_on(measured(at_edge), reference=half, plain=half).verdict == "rounding"


@every_class
@pytest.mark.parametrize("loss", NOT_FINITE)
@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_loss_that_is_no_number_is_different(maths, loss, at):
    equivalence = verdict_on(measured(shifted(loss, at)), maths, base=shifted(loss, at))
    assert equivalence.verdict == "different"
    assert "the loss is not finite" in equivalence.detail


@every_class
@pytest.mark.parametrize("loss", NOT_FINITE)
@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_reference_that_is_no_number_proves_nothing(maths, loss, at):
    """max() passes over a NaN that is not first: the gap looked small where there was nothing to compare with."""
    broken = shifted(loss, at)
    assert verdict_on(measured(NEAR), maths, reference=broken).verdict in ("different", "not-checked")
    assert verdict_on(measured(broken), maths, reference=broken).verdict in ("different", "not-checked")


@quick
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=6),
    st.sampled_from(CLASSES),
    st.sampled_from(PRECISIONS),
)
@example([math.nan], "rounding-only", "bf16")
def test_a_curve_passes_only_inside_the_band(curve, maths, precision):
    reference = REFERENCE[: len(curve)]
    passes = verdict_on(measured(curve), maths, precision, reference=reference, plain=reference).verdict != "different"
    inside = all(
        abs(mine - theirs) <= CURVE_TOLERANCE[precision] for mine, theirs in zip(curve, reference, strict=True)
    )
    if passes:
        assert inside
    if inside and maths != "changes-maths":
        assert passes


def test_a_curve_of_another_length_is_no_agreement():
    with pytest.raises(ValueError, match="zip"):
        verdict_on(measured(REFERENCE[:10]))


# learning


def curve_shedding(nats, steps=20):
    """Down in a straight line, so that the median of the last five is two steps short of the end."""
    return tuple(10.97 - nats * step / (steps - 3) for step in range(steps))


def test_learned_is_the_first_loss_less_the_median_of_the_last_five():
    assert learned((9.0, 8.0, 3.0, 1.0, 2.0, 100.0, 1.5)) == 9.0 - 2.0
    assert learned((4.0,)) == 0.0
    assert learned(curve_shedding(2.0)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("shed", "verdict"),
    [(1.0, "changed"), (0.81, "changed"), (0.79, "different"), (0.0, "different"), (-1.0, "different")],
)
def test_a_changed_model_must_learn_as_the_unchanged_one_does(shed, verdict):
    """It agrees with its own fp32 reference throughout: only the plain curve shows that it does not learn."""
    mine = curve_shedding(shed)
    equivalence = verdict_on(measured(mine), "changes-maths", reference=mine, plain=curve_shedding(1.0))
    assert equivalence.verdict == verdict
    assert LEAST_LEARNING == 0.8
    if verdict == "different":
        assert f"sheds {shed:.3f} nats where the unchanged model sheds 1.000" in equivalence.detail


def test_only_a_rung_that_changes_the_maths_is_held_to_learning():
    flat = curve_shedding(0.0)
    for maths in ("bit-exact", "rounding-only"):
        assert verdict_on(measured(flat), maths, reference=flat, plain=curve_shedding(1.0)).verdict != "different"


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("rises", [0.5, -0.5])
def test_over_a_few_steps_nobody_can_say_what_a_changed_model_learns(steps, rises):
    """The first batches differ by more than a model learns from them: one may shed -0.033 nats and another -0.007."""
    plain, mine = REFERENCE[:steps], (10.97, *(10.97 + rises * step for step in range(1, steps)))
    found = verdict_on(measured(mine), "changes-maths", reference=mine, plain=plain)
    assert (found.verdict, f"too few steps to judge what it learns: {steps}, it takes 5" in found.detail) == (
        "not-checked",
        True,
    )
    wrong = verdict_on(measured(mine, gradients(wte=0.9)), "changes-maths", reference=mine, plain=plain)
    assert wrong.verdict == "different"
    assert "sheds" not in wrong.detail


@pytest.mark.parametrize("shed", [0.0, -0.5])
def test_an_unchanged_model_that_learns_nothing_is_no_measure(shed):
    found = verdict_on(measured(), "changes-maths", plain=curve_shedding(shed))
    assert found.verdict == "not-checked"
    assert "the unchanged model learns nothing in 20 steps" in found.detail


@quick
@given(st.lists(st.floats(min_value=9, max_value=12), min_size=1, max_size=20))
def test_equal_curves_never_fail_the_learning_check(curve):
    """A model that does exactly as the unchanged one has learned as much."""
    learns = len(curve) >= 5 and learned(curve) > 0
    found = verdict_on(measured(curve), "changes-maths", reference=curve, plain=curve)
    assert found.verdict == ("changed" if learns else "not-checked")


@pytest.mark.parametrize("loss", NOT_FINITE)
def test_an_unchanged_model_that_breaks_down_proves_nothing(loss):
    plain = shifted(loss, 19)
    assert verdict_on(measured(NEAR), "changes-maths", plain=plain).verdict in ("different", "not-checked")


# what could not be checked


@every_class
def test_without_a_reference_nothing_is_claimed(maths):
    for unchecked in (
        verdict_on(measured(), maths, reference=None),
        verdict_on(measured(), maths, reference=None, plain=None),
        verdict_on(Measurement(loss_curve=REFERENCE), maths),
    ):
        assert unchecked.verdict == "not-checked"
        assert "reference" in unchecked.detail


VISIBLE = {
    "not near ln V": measured(check=gradients(loss=37.0)),
    "gradient of wte is 0.9 off fp32": measured(check=gradients(wte=0.9)),
    "gradient of wte is nan": measured(check=gradients(wte=math.nan)),
    "the first update of head": measured(check=replace(gradients(), update_errors={"wte": 0.1, "head": 1.0})),
    "the loss is not finite": measured(shifted(math.nan)),
    "differ in their bits": measured(pair_bitwise=False),
}


@every_class
@pytest.mark.parametrize("fault", VISIBLE)
def test_a_fault_that_needs_no_curve_is_told_without_one(maths, fault):
    """The reference job ran out of memory; step 0 was compared in the worker all the same."""
    for plain in (None, REFERENCE):
        equivalence = verdict_on(VISIBLE[fault], maths, reference=None, plain=plain)
        assert equivalence.verdict == "different"
        assert fault in equivalence.detail


def test_a_fault_of_the_curve_is_told_without_gradients():
    assert verdict_on(Measurement(loss_curve=shifted(1.0))).verdict == "different"
    flat = (10.97,) * 20
    assert "sheds" in verdict_on(Measurement(loss_curve=flat), "changes-maths", reference=None).detail


def test_without_the_unchanged_curve_nobody_can_say_that_a_changed_model_learns():
    assert verdict_on(measured(NEAR), "changes-maths", plain=None).verdict == "not-checked"
    assert verdict_on(measured(NEAR), "rounding-only", plain=None).verdict == "rounding"
    assert verdict_on(measured(check=gradients(loss=37.0)), "changes-maths", plain=None).verdict == "different"


@pytest.mark.parametrize("faults", [{"loss": 37.0}, {"wte": 0.9}, {"loss": 37.0, "wte": 0.9}])
def test_every_fault_is_told(faults):
    detail = verdict_on(measured(shifted(1.0), gradients(**faults))).detail
    assert ("37.000" in detail) == ("loss" in faults)
    assert ("gradient of wte" in detail) == ("wte" in faults)
    assert "leaves fp32 by 1.000 nats" in detail
