"""Is it still right? Broken optimisations are planted and must come out as *different*; honest ones as their class
promises. What the check is known to miss stands in MISSED, with the reason, as expected failures.

A fault reaches the measured run and never the plain reference. Each is tried in bf16, whose wider bounds are where a
fault would hide, and in fp32. `make test` tries fp32 only where bf16 misses the fault, and nothing that is known to be
missed; `make test-all` tries all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import redline.engine.build as build_module
import redline.model.adapter as adapter_module
from redline.core.cut import Cut
from redline.core.job import Job, RunDirectory
from redline.core.layout import Layout
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.engine import equivalence, measure
from redline.engine.build import Training
from redline.engine.equivalence import (
    Distances,
    beside,
    check_gradients,
    put_together,
    reference_gradients,
    relative_errors,
)
from redline.model.attention import ATTENTION
from redline.model.gpt import GPT, initialise
from redline.predict.verdict import judge
from redline.rungs import Maths, plan_of, reference_plan
from redline.search.launch import launch

JudgeRow = Callable[..., Any]
Plant = Callable[..., None]
both_precisions = pytest.mark.parametrize("precision", [(), ("bf16",)], ids=["fp32", "bf16"])


# --- faults: each takes a training that was built rightly and breaks it -----------------------------------------------


def after_gradients(training: Training, change: Callable[[torch.Tensor], object]) -> None:
    compute = training.step.compute_gradients

    def compute_and_change(batch: torch.Tensor) -> torch.Tensor:
        loss = compute(batch)
        for parameter in training.step.parameters:
            change(parameter.grad)
        return loss

    training.step.compute_gradients = compute_and_change  # type: ignore[method-assign]


def after_update(training: Training, change: Callable[[torch.Tensor], object]) -> None:
    apply = training.step.apply_gradients

    @torch.no_grad()
    def apply_and_change() -> None:
        apply()
        for parameter in training.step.parameters:
            change(parameter)

    training.step.apply_gradients = apply_and_change  # type: ignore[method-assign]


def attend_with(training: Training, attention: Callable[..., torch.Tensor]) -> None:
    for block in training.model.h:
        block.attn.attend = attention


def mask_shifted_by_one(training: Training) -> None:
    def peeking(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~future.triu(2))

    attend_with(training, peeking)


def scale_of_1_over_d(training: Training) -> None:
    attend_with(
        training, lambda q, k, v, future: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.size(-1))
    )


def gradients_doubled(training: Training) -> None:
    after_gradients(training, lambda gradient: gradient.mul_(2))


def gradients_left_scaled(training: Training) -> None:
    after_gradients(training, lambda gradient: gradient.mul_(2.0**14))


def targets_one_further(training: Training) -> None:
    loss_of = training.step.loss_of
    training.step.loss_of = lambda inputs, targets: loss_of(inputs, targets.roll(-1, dims=1))


def last_target_left_out(training: Training) -> None:
    loss_of = training.step.loss_of

    def shorter(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets.clone()
        targets[:, -1] = -100  # cross_entropy's ignore_index
        return loss_of(inputs, targets)

    training.step.loss_of = shorter


def learning_rate_times(factor: float) -> Callable[[Training], None]:
    def fault(training: Training) -> None:
        rate = training.step.learning_rate
        training.step.learning_rate = lambda step: factor * rate(step)

    return fault


def no_warm_up(training: Training) -> None:
    training.step.learning_rate = lambda step: training.workload.learning_rate


def frozen(name: str) -> Callable[[Training], None]:
    def fault(training: Training) -> None:
        training.model.get_parameter(name).requires_grad_(False)

    return fault


def zero_gradient(training: Training) -> None:
    """There is a gradient, and nothing in it."""
    training.model.h[1].attn.c_attn.weight.register_hook(torch.zeros_like)


def left_out_of_the_optimizer(name: str) -> Callable[[Training], None]:
    def fault(training: Training) -> None:
        parameter = training.model.get_parameter(name)
        for group in training.step.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one is not parameter]

    return fault


def never_clipped(training: Training) -> None:
    training.step.clip_norm = math.inf


def swapped(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        one, other = next(batches), next(batches)
        yield from (other, one)


def batches_in_another_order(training: Training) -> None:
    training.batches = swapped(training.batches)  # type: ignore[assignment]


def batches_in_another_order_later(training: Training) -> None:
    """The gradient check sees only the first batch: the curve has to notice."""

    def later(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield next(batches)
        yield from swapped(batches)

    training.batches = later(training.batches)  # type: ignore[assignment]


def the_first_batch_for_ever(training: Training) -> None:
    def repeated(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        batch = next(batches)
        while True:
            yield batch

    training.batches = repeated(training.batches)  # type: ignore[assignment]


def sgd_instead(training: Training) -> None:
    training.step.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)


def other_betas(training: Training) -> None:
    for group in training.step.optimizer.param_groups:
        group["betas"] = (0.9, 0.999)


def no_update_at_all(training: Training) -> None:
    training.step.optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]


def gradients_never_cleared(training: Training) -> None:
    training.step.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def dropout_left_on(training: Training) -> None:
    for block in training.model.h:
        block.mlp.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1))


def layernorm_eps(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-3


def weights_rounded_to_bf16(training: Training) -> None:
    after_update(training, lambda weight: weight.copy_(weight.bfloat16()))


def no_weight_decay(training: Training) -> None:
    for group in training.step.optimizer.param_groups:
        group["weight_decay"] = 0.0


def everything_decays(training: Training) -> None:
    for group in training.step.optimizer.param_groups:
        group["weight_decay"] = training.workload.weight_decay


def other_eps(training: Training) -> None:
    for group in training.step.optimizer.param_groups:
        group["eps"] = 1e-5


def exact_gelu(training: Training) -> None:
    for block in training.model.h:
        block.mlp.forward = MethodType(lambda mlp, x: mlp.c_proj(F.gelu(mlp.c_fc(x))), block.mlp)


def gradients_doubled_after_the_check(training: Training) -> None:
    apply = training.step.apply_gradients

    def double_and_apply() -> None:
        for parameter in training.step.parameters:
            parameter.grad.mul_(2)
        apply()

    training.step.apply_gradients = double_and_apply  # type: ignore[method-assign]


def clipped_at_half(training: Training) -> None:
    training.step.clip_norm /= 2


FAULTS: dict[str, Callable[[Training], None]] = {
    "mask shifted by one": mask_shifted_by_one,
    "gradients doubled": gradients_doubled,
    "gradients left scaled": gradients_left_scaled,
    "targets one further": targets_one_further,
    "last target left out": last_target_left_out,
    "dropout left on": dropout_left_on,
    "LayerNorm eps 1e-3": layernorm_eps,
    "positions frozen": frozen("wpe.weight"),
    "one bias frozen": frozen("h.0.ln_1.bias"),
    "gradient of zeros": zero_gradient,
    "learning rate doubled": learning_rate_times(2.0),
    "learning rate 10 % high": learning_rate_times(1.1),
    "no warm-up": no_warm_up,
    "batches in another order": batches_in_another_order,
    "batches in another order later": batches_in_another_order_later,
    "the first batch for ever": the_first_batch_for_ever,
    "SGD": sgd_instead,
    "beta2 of 0.999": other_betas,
    "no update at all": no_update_at_all,
    # Only the curve can tell these, and in bf16 it does not.
    "never clipped": never_clipped,
    "gradients never cleared": gradients_never_cleared,
    "weights rounded to bf16": weights_rounded_to_bf16,
    "embedding never updated": left_out_of_the_optimizer("wte.weight"),
    "attention never updated": left_out_of_the_optimizer("h.0.attn.c_attn.weight"),
    "everything decays": everything_decays,
    "AdamW eps 1e-5": other_eps,
    # Nothing tells these.
    "attention scaled by 1/d, width 64": scale_of_1_over_d,
    "one bias never updated": left_out_of_the_optimizer("h.1.mlp.c_fc.bias"),
    "no weight decay": no_weight_decay,
    "exact GELU": exact_gelu,
    "gradients doubled after the check": gradients_doubled_after_the_check,
    "clipped at half": clipped_at_half,
}

HONEST = "honest bf16 keeps within 0.001"
MISSED = {
    ("never clipped", "bf16"): f"0.028 nats in 20 steps, bf16 may leave by 0.03; {HONEST}",
    ("everything decays", "bf16"): "0.003 nats",
    ("AdamW eps 1e-5", "bf16"): "0.007 nats",
    ("attention scaled by 1/d, width 64", "bf16"): "so narrow a model attends evenly at first: 0.9 % of a gradient; "
    "bf16's floor is 1 %. Caught from width 128 on",
    ("no weight decay", "fp32"): "20 warm-up steps decay 0.3 % of a weight: 0.0015 nats, fp32 may leave by 0.002",
    ("no weight decay", "bf16"): "20 warm-up steps decay 0.3 % of a weight: 0.0015 nats",
    ("exact GELU", "fp32"): "differs from tanh by 1e-5 of a gradient while activations are small; the floor is 1e-4",
    ("exact GELU", "bf16"): "differs from tanh by 1e-5 of a gradient while activations are small",
    ("gradients doubled after the check", "fp32"): "clipping and AdamW divide it out: harmless",
    ("gradients doubled after the check", "bf16"): "clipping and AdamW divide it out: harmless",
    ("clipped at half", "fp32"): "every step is clipped, and AdamW divides a constant factor out",
    ("clipped at half", "bf16"): "every step is clipped, and AdamW divides a constant factor out",
}


def planted(name: str, precision: str) -> Any:
    """Expected failures are strict: whoever sharpens the check takes the fault out of MISSED."""
    reason = MISSED.get((name, precision))
    marks = [pytest.mark.xfail(reason=reason)] if reason else []
    if reason or (precision == "fp32" and (name, "bf16") not in MISSED):
        marks.append(pytest.mark.long)  # what is found within bf16's bounds is far outside fp32's
    return pytest.param(
        FAULTS[name], () if precision == "fp32" else (precision,), marks=marks, id=f"{precision} {name}"
    )


@pytest.mark.parametrize(
    ("fault", "onto"), [planted(name, precision) for name in FAULTS for precision in ("fp32", "bf16")]
)
def test_a_broken_optimisation_is_different(
    judge_row: JudgeRow, plant: Plant, fault: Callable[[Training], None], onto: tuple[str, ...]
) -> None:
    rungs = (*onto, "fused-adamw")
    plant(fault, on=rungs)
    row = judge_row(*rungs)
    assert row.verdict == "different", row.detail
    assert row.detail


def test_there_was_something_to_clip(train: Callable[..., Training], small: Workload) -> None:
    training = train(plan_of(()))
    training.step.compute_gradients(next(training.batches))
    norm = torch.stack([parameter.grad.norm() for parameter in training.model.parameters()]).norm()
    assert norm > small.clip_norm


@both_precisions
def test_flash_attention_without_the_causal_mask_is_different(
    judge_row: JudgeRow, monkeypatch: pytest.MonkeyPatch, precision: tuple[str, ...]
) -> None:
    monkeypatch.setitem(ATTENTION, "flash", lambda q, k, v, future: F.scaled_dot_product_attention(q, k, v))
    row = judge_row(*precision, "flash")
    assert row.verdict == "different", row.detail
    assert "gradient" in row.detail
    assert row.measurement.gradients.loss == pytest.approx(math.log(257), abs=0.5), "its loss starts as it should"


@both_precisions
def test_attention_scaled_by_1_over_d_is_different(
    judge_row: JudgeRow, plant: Plant, small: Workload, precision: tuple[str, ...]
) -> None:
    """At the width of `tiny`. Narrower models attend almost evenly at first: see MISSED."""
    wide = replace(small, shape=replace(small.shape, d_model=128, d_ff=512))
    rungs = (*precision, "flash")
    plant(scale_of_1_over_d, on=rungs)
    row = judge_row(*rungs, workload=wide, check_steps=4)
    assert row.verdict == "different", row.detail
    assert "gradient" in row.detail


def tied_embedding_of_std(std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise_loudly(model: GPT, seed: int) -> None:
        initialise(model, seed)
        if model.lm_head.weight is model.wte.weight:
            with torch.no_grad():
                model.wte.weight.mul_(std / 0.02)

    monkeypatch.setattr(adapter_module, "initialise", initialise_loudly)


def test_a_tied_embedding_of_n01_is_different(
    judge_row: JudgeRow, small: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of the published ladder. Its reference is tied too and has the same fault: ln V alone tells."""
    tied_embedding_of_std(1.0, monkeypatch)
    row = judge_row("tied-weights", workload=replace(small, name="loud"))
    assert row.verdict == "different", row.detail
    assert "not near ln V = 5.549" in row.detail


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@both_precisions
def test_padding_left_in_the_softmax_is_different(
    judge_row: JudgeRow, plant: Plant, precision: tuple[str, ...], tied: bool
) -> None:
    """The loss over all 384 columns. The padded rows are zeros, and still take a third of the probability."""

    def show_the_padding(training: Training) -> None:
        assert training.model.lm_head.out_features == 384
        training.model.lm_head.bias.zero_()

    rungs = (*precision, *(("tied-weights",) if tied else ()), "padded-vocab")
    plant(show_the_padding, on=rungs)
    row = judge_row(*rungs)
    assert row.verdict == "different", row.detail


def test_junk_in_the_padding_changes_nothing_while_the_loss_leaves_it_out(judge_row: JudgeRow, plant: Plant) -> None:
    @torch.no_grad()
    def junk(training: Training) -> None:
        training.model.lm_head.weight[257:] = 3.0

    plant(junk, on=("padded-vocab",))
    assert judge_row("padded-vocab").verdict in ("same", "rounding")


# --- bits -------------------------------------------------------------------------------------------------------------


def test_a_bit_exact_rung_that_rounds_its_weights_is_found_out(judge_row: JudgeRow, plant: Plant) -> None:
    plant(weights_rounded_to_bf16, on=("no-sync",))
    row = judge_row("no-sync")
    assert row.measurement.pair_bitwise is False
    assert row.verdict == "different", row.detail


@torch.no_grad()
def nudge(training: Training) -> None:
    weight = training.model.h[0].mlp.c_fc.weight
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))


def nudge_at_every_update(training: Training) -> None:
    apply = training.step.apply_gradients
    training.step.apply_gradients = lambda: (apply(), nudge(training))[0]  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [nudge_at_every_update, nudge])
def test_a_bit_exact_rung_that_moves_one_bit_is_not_the_same(
    judge_row: JudgeRow, plant: Plant, fault: Callable[[Training], None]
) -> None:
    """Too little for any tolerance: only the pair of plain runs can tell. The second is undone by `restore`, so that
    even the loss curve is the reference's, and the pair still saw other bits."""
    plant(fault, on=("no-sync",))
    row = judge_row("no-sync")
    assert row.measurement.pair_bitwise is False
    assert row.verdict == "different", row.detail


@pytest.mark.parametrize("rungs", [("no-sync",), ("bf16", "no-sync"), ("loader-workers",)], ids="+".join)
def test_bit_exact_rungs_are_the_same(judge_row: JudgeRow, rungs: tuple[str, ...]) -> None:
    row = judge_row(*rungs)
    assert row.measurement.pair_bitwise is True
    assert row.verdict == "same", row.detail


# --- honest rungs -----------------------------------------------------------------------------------------------------


def test_the_baseline_is_its_own_reference_bit_for_bit(judge_row: JudgeRow) -> None:
    row = judge_row()
    assert row.verdict == "same", row.detail
    assert row.measurement.loss_curve == row.reference


PARTS_OF_THE_NEXT = [("bf16",), ("bf16", "flash"), ("bf16", "flash", "padded-vocab")]


@pytest.mark.parametrize(
    "rungs",
    [
        ("flash",),
        ("padded-vocab",),
        ("fused-adamw",),
        *(pytest.param(one, marks=pytest.mark.long) for one in PARTS_OF_THE_NEXT),
        ("bf16", "flash", "padded-vocab", "tied-weights", "fused-adamw"),
        ("chunked-loss",),
        ("bf16", "padded-vocab", "tied-weights", "fused-loss"),
        ("bf16", "bf16-residual"),
        ("sigmoid-gelu",),
        ("bf16", "bf16-residual", "fused-backward"),
        ("checkpointing",),
        ("bf16", "selective-checkpointing", "chunked-loss"),
    ],
    ids="+".join,
)
def test_rounding_rungs_only_round(judge_row: JudgeRow, rungs: tuple[str, ...]) -> None:
    row = judge_row(*rungs)
    assert row.verdict in ("same", "rounding"), row.detail
    if "bf16" in rungs:
        assert row.verdict == "rounding"
        assert row.measurement.gradients.yardstick > 1e-4


def test_fp16_with_its_scaler_only_rounds(judge_row: JudgeRow) -> None:
    """No CPU is offered this rung, but the path is the GPU's: scale, unscale, check, update."""
    row = judge_row("fp16", check_steps=4, micro_batch=2)  # CPUs multiply fp16 slowly
    assert row.verdict == "rounding", row.detail
    assert row.measurement.skipped_updates == 0


@pytest.mark.parametrize("rungs", [("tied-weights",), ("bf16", "padded-vocab", "tied-weights")], ids="+".join)
def test_tied_weights_change_the_maths_and_learn(judge_row: JudgeRow, rungs: tuple[str, ...]) -> None:
    row = judge_row(*rungs)
    assert row.verdict == "changed", row.detail


def test_another_seed_agrees(judge_row: JudgeRow, small: Workload) -> None:
    rungs = ("bf16", "flash", "padded-vocab", "fused-adamw")
    row = judge_row(*rungs, workload=replace(small, seed=1))
    assert row.verdict == "rounding", row.detail


@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
def test_a_compiled_row_only_rounds(small: Workload, tokens: Path, bench: Callable[..., measure.Bench]) -> None:
    """In a worker of its own, as a ladder does it: a compiler leaves state and processes behind."""
    rungs = ("compile", "flash", "padded-vocab")
    small = replace(small, shape=replace(small.shape, layers=1))  # half the code to compile
    job = Job(
        workload=small, recipe=Recipe(rungs=rungs, micro_batch=6), device="cpu", tokens=tokens.name, timed_steps=2
    )
    reference = measure.measure_reference(bench(workload=small, kind="reference")).loss_curve
    answer = launch(RunDirectory(tokens.parent), job, 250, lambda *_, **__: None)
    assert isinstance(answer, Measurement), answer
    row = judge(
        maths=Maths.ROUNDING.value,
        precision=plan_of(rungs).precision,
        measurement=answer,
        reference=reference,
        base=None,
        plain=reference,
        ln_vocab=small.shape.ln_vocab,
    )
    assert row.verdict == "rounding", row.detail
    assert answer.proof.graph_breaks == 0
    assert answer.compile_seconds is not None
    assert answer.compile_seconds > 0
    assert "flash_attention" in (answer.proof.attention or "")


# --- the parts --------------------------------------------------------------------------------------------------------


def test_relative_errors_of_tensors_and_of_the_whole() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    errors, overall = relative_errors({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0])}, reference)
    assert errors == {"a": pytest.approx(0.1), "b": 0.0}
    assert overall == pytest.approx(0.5 / 13)


def test_a_missing_gradient_is_as_wrong_as_can_be() -> None:
    errors, overall = relative_errors({}, {"a": torch.ones(2)})
    assert errors == {"a": math.inf}
    assert overall == math.inf


def test_a_gradient_where_there_should_be_none_is_wrong_too() -> None:
    zero = {"a": torch.zeros(2)}
    assert relative_errors(zero, zero) == ({"a": 0.0}, 0.0)
    errors, _ = relative_errors({"a": torch.ones(2)}, zero)
    assert errors == {"a": math.inf}


def test_a_gradient_of_nan_is_no_agreement() -> None:
    errors, overall = relative_errors({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)})
    assert math.isnan(errors["a"])
    assert math.isnan(overall)


@pytest.mark.parametrize("rungs", [("padded-vocab",), ("tied-weights", "padded-vocab")], ids="+".join)
def test_padded_gradients_are_compared_under_published_names_and_shapes(
    train: Callable[..., Training], small: Workload, tokens: Path, rungs: tuple[str, ...]
) -> None:
    plan = plan_of(rungs)
    where = {"micro_batch": 6, "tokens": tokens, "device": torch.device("cpu")}
    expected = reference_gradients(small, reference_plan(rungs), plan, **where)
    assert expected.gradients["wte.weight"].shape == (257, small.shape.d_model)
    assert ("lm_head.weight" in expected.gradients) == ("tied-weights" not in rungs)
    training = train(plan)
    found = check_gradients(training, next(training.batches), expected)
    assert set(found.tensor_errors) == set(expected.gradients)
    assert max(found.tensor_errors.values()) < 1e-5


def builds_that_hold(sequences: int, attempts: list[int], monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """A device on which a backward pass over more sequences than these runs out of memory."""
    real = build_module.build

    def build(*words: Any, chunk: int, **where: Any) -> Training:
        attempts.append(chunk)
        training = real(*words, chunk=chunk, **where)
        if chunk > sequences:
            training.step._backward = raise_error  # type: ignore[method-assign]
        return training

    def raise_error(*_: object) -> torch.Tensor:
        raise RuntimeError(says)

    monkeypatch.setattr(equivalence, "build", build)


@pytest.mark.parametrize(("holds", "tried"), [(4, [4]), (2, [4, 2]), (1, [4, 2, 1])])
def test_the_reference_step_halves_until_it_fits_and_stays_the_same(
    small: Workload, tokens: Path, monkeypatch: pytest.MonkeyPatch, holds: int, tried: list[int]
) -> None:
    where = {"micro_batch": 6, "tokens": tokens, "device": torch.device("cpu")}
    plans = reference_plan(("bf16",)), plan_of(("bf16",))
    whole = reference_gradients(small, *plans, **where)
    builds_that_hold(holds, attempts := [], monkeypatch, "DefaultCPUAllocator: can't allocate memory")
    found = reference_gradients(small, *plans, **where)
    assert attempts == tried * 2, "the reference, then the yardstick"
    assert found.loss == pytest.approx(whole.loss, abs=1e-5)
    assert relative_errors(found.gradients, whole.gradients)[1] < 1e-5
    assert relative_errors(found.weights, whole.weights)[1] < 1e-4
    assert found.yardstick_error == pytest.approx(whole.yardstick_error, rel=0.1)
    assert found.yardstick_error > 1e-3


def test_a_reference_step_of_one_sequence_that_does_not_fit_fails(
    small: Workload, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"micro_batch": 2, "tokens": tokens, "device": torch.device("cpu")}
    builds_that_hold(0, attempts := [], monkeypatch, "CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        reference_gradients(small, reference_plan(()), plan_of(()), **where)
    assert attempts == [2, 1], "a batch of two is no batch of four"


def test_an_error_that_is_not_of_memory_is_not_tried_again(
    small: Workload, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"micro_batch": 6, "tokens": tokens, "device": torch.device("cpu")}
    builds_that_hold(0, attempts := [], monkeypatch, "shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        reference_gradients(small, reference_plan(()), plan_of(()), **where)
    assert attempts == [4]


def test_the_yardstick_is_plain_code_at_the_precision_of_the_row(small: Workload, tokens: Path) -> None:
    where = {"micro_batch": 6, "tokens": tokens, "device": torch.device("cpu")}
    plain = plan_of(())
    assert reference_gradients(small, plain, plan_of(("flash",)), **where).yardstick_error == 0.0
    bf16, with_flash = (
        reference_gradients(small, plain, plan_of(rungs), **where) for rungs in (("bf16",), ("bf16", "flash"))
    )
    assert 1e-4 < bf16.yardstick_error < 5e-2
    assert with_flash.yardstick_errors == bf16.yardstick_errors, "it must not depend on the optimisation it judges"


# --- what gets past, besides MISSED ----------------------------------------------------------------------------------


@pytest.mark.xfail(
    reason="starts within 0.02 of ln V and learns faster; its reference is tied and so has the fault too"
)
def test_a_slightly_loud_tied_embedding_gets_past(
    judge_row: JudgeRow, small: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied_embedding_of_std(0.05, monkeypatch)
    assert judge_row("tied-weights", workload=replace(small, name="louder")).verdict == "different"


# --- tensors that a tensor group has cut ------------------------------------------------------------------------------


def test_a_piece_stands_beside_the_same_numbers_of_the_whole() -> None:
    """Thirds of a fused matrix, and rows of a vocabulary of 5 that is padded to 8: worked out by hand."""
    fused = torch.arange(12.0).reshape(6, 2)
    cut = Cut(shape=(6, 2), dim=0, parts=3, rank=1, ranks=2)
    mine, theirs = beside(fused[[1, 3, 5]], fused, cut)
    assert torch.equal(mine, theirs)
    assert theirs.tolist() == [[2, 3], [6, 7], [10, 11]]
    columns = Cut(shape=(2, 4), dim=1, rank=0, ranks=2)
    assert beside(torch.zeros(2, 2), torch.ones(2, 4), columns)[1].shape == (2, 2)
    rows = torch.arange(5.0).unsqueeze(1)
    padded = [Cut(shape=(8, 1), dim=0, rank=rank, ranks=4) for rank in range(4)]
    found = [beside(torch.full((2, 1), 9.0), rows, each) for each in padded]
    assert [theirs.flatten().tolist() for _, theirs in found] == [[0, 1], [2, 3], [4], []]
    assert [len(mine) for mine, _ in found] == [2, 2, 1, 0]


def test_pieces_of_a_group_make_one_error_and_ranks_with_other_data_another() -> None:
    """Distances of 3 and 4 from a tensor of norm 10 are one of 5; what is not cut is each rank's own."""
    layout = Layout(ranks=4, tensor=2)  # ranks 0 and 1 hold a layer together, and 2 and 3

    def rank(piece: float, own: float) -> Distances:
        return Distances({"cut": piece, "own": own}, {"cut": 10.0, "own": 2.0}, frozenset({"cut"}))

    together = put_together([rank(3, 0), rank(4, 1), rank(0, 0), rank(1, 0)], layout)
    found = [each.relative() for each in together]
    assert [errors["cut"] for errors, _ in found] == pytest.approx([0.5, 0.5, 0.1, 0.1])
    assert [errors["own"] for errors, _ in found] == pytest.approx([0.0, 0.5, 0.0, 0.0])
    assert found[1][1] == pytest.approx(math.sqrt((25 + 1) / 104))
