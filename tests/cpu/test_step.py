"""The step against the same step written out plainly; in chunks, under a loss scaler, through an overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.data.batches import TokenBatches
from redline.engine.build import Training
from redline.engine.step import INITIAL_LOSS_SCALE
from redline.model.gpt import GPT, initialise

STEPS = 5
SCALED = Plan(loss_scaling=True)
Train = Callable[..., Training]


def gradients_of(training: Training) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in training.model.parameters() if parameter.grad is not None]


def weights_of(training: Training) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def losses_of(training: Training, count: int = STEPS) -> list[float]:
    return [training.step(next(training.batches)).item() for _ in range(count)]


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_five_steps_equal_a_loop_written_out_bit_for_bit(
    train: Train, small: Workload, tokens: Path, tied: bool
) -> None:
    training = train(Plan(tied=tied))
    ours = losses_of(training)

    model = GPT(small.shape, tied=tied)
    initialise(model, small.seed)
    decaying = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1.0,  # overwritten at every step, as the schedule does
        betas=(0.9, 0.95),
        foreach=False,
        fused=False,
    )
    batches = TokenBatches(path=tokens, seed=small.seed, micro_batch=6, sequence=small.shape.sequence)
    theirs = []
    for step in range(STEPS):
        inputs, targets = batches[step]
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, small.shape.vocab), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * ((step + 1) / 20)
        optimizer.step()
        theirs.append(loss.item())

    assert ours == theirs
    assert_same_bits(weights_of(training), [parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("chunk", [1, 2, 4, 5])  # 4 and 5 leave a smaller last piece of the 6
def test_chunks_add_up_to_the_whole_batch(train: Train, chunk: int) -> None:
    whole, pieces = train(Plan()), train(Plan(), chunk=chunk)
    batch = next(whole.batches)
    loss, piecewise = whole.step.compute_gradients(batch), pieces.step.compute_gradients(batch)
    torch.testing.assert_close(piecewise, loss, rtol=1e-6, atol=0)
    for one, other in zip(gradients_of(pieces), gradients_of(whole), strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-6


def test_chunks_of_the_whole_batch_are_the_whole_batch(train: Train) -> None:
    assert losses_of(train(Plan(), chunk=6)) == losses_of(train(Plan()))


def test_chunked_training_follows_the_same_curve(train: Train) -> None:
    assert losses_of(train(Plan(), chunk=4)) == pytest.approx(losses_of(train(Plan())), abs=1e-5)


def test_the_learning_rate_warms_up_with_the_steps(train: Train) -> None:
    training = train(Plan())
    seen = []
    for _ in range(3):
        training.step(next(training.batches))
        seen.append([group["lr"] for group in training.step.optimizer.param_groups])
    assert seen == [[pytest.approx(3e-3 * k / 20)] * 2 for k in (1, 2, 3)]


def test_gradients_are_clipped_to_the_norm(train: Train, small: Workload) -> None:
    training = train(Plan(), workload=replace(small, clip_norm=0.25))
    training.step.compute_gradients(next(training.batches))
    norms = []
    update = training.step.optimizer.step
    training.step.optimizer.step = lambda: (norms.append(total_norm(training)), update())  # type: ignore[method-assign]
    before = total_norm(training)
    training.step.apply_gradients()
    assert before > 0.25, "nothing to clip"
    assert norms == [pytest.approx(0.25, rel=1e-4)]


def total_norm(training: Training) -> float:
    return torch.stack([gradient.norm() for gradient in gradients_of(training)]).norm().item()


def test_gradients_do_not_outlive_their_step(train: Train) -> None:
    training = train(Plan())
    training.step(next(training.batches))
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_autocast_covers_the_forward_and_leaves_parameters_and_gradients_fp32(train: Train) -> None:
    training = train(Plan(autocast="bf16"))
    inside, outside = [], []
    training.model.lm_head.register_forward_hook(lambda *seen: inside.append((seen[-1].dtype, autocast_on())))
    training.model.wte.weight.register_hook(lambda gradient: outside.append(autocast_on()))
    loss = training.step.compute_gradients(next(training.batches))
    assert inside == [(torch.bfloat16, True)]
    assert outside == [False]
    assert loss.dtype == torch.float32
    assert {tensor.dtype for tensor in [*weights_of(training), *gradients_of(training)]} == {torch.float32}


def autocast_on() -> bool:
    return torch.is_autocast_enabled("cpu")


# --- the loss scaler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_scaled_gradients_come_back_unscaled(train: Train, autocast: str | None, chunk: int | None) -> None:
    plain, scaled = train(Plan(autocast=autocast), chunk=chunk), train(replace(SCALED, autocast=autocast), chunk=chunk)
    batch = next(plain.batches)
    assert torch.equal(scaled.step.compute_gradients(batch), plain.step.compute_gradients(batch))
    # The scale is a power of two, so nothing rounds; under autocast a tiny bf16 gradient may be saved from flushing.
    for one, other in zip(gradients_of(scaled), gradients_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_updates_under_the_scaler_are_the_plain_updates(train: Train, optimizer: str) -> None:
    plain, scaled = train(Plan(optimizer=optimizer)), train(replace(SCALED, optimizer=optimizer))
    assert losses_of(scaled) == pytest.approx(losses_of(plain), abs=1e-6)
    for one, other in zip(weights_of(scaled), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert scaled.step.skipped_updates() == 0
    assert plain.step.skipped_updates() == 0


@pytest.mark.parametrize("optimizer", ["adamw-loop", "adamw-fused"])
def test_an_overflow_skips_the_update_and_is_counted(train: Train, optimizer: str) -> None:
    training = train(replace(SCALED, optimizer=optimizer))
    losses_of(training, 2)
    before, moments = weights_of(training), optimizer_state(training)
    hook = training.model.wpe.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    training.step(next(training.batches))
    assert_same_bits(weights_of(training), before)
    assert_same_bits(optimizer_state(training), moments)
    assert training.step.skipped_updates() == 1
    assert training.step.scaler.get_scale() == INITIAL_LOSS_SCALE / 2

    training.step(next(training.batches))
    assert training.step.skipped_updates() == 2
    hook.remove()
    assert math.isfinite(training.step(next(training.batches)).item())
    assert not all(map(torch.equal, weights_of(training), before))
    assert all(weight.isfinite().all() for weight in weights_of(training))
    assert training.step.skipped_updates() == 2


def optimizer_state(training: Training) -> list[torch.Tensor]:
    return [value.clone() for state in training.step.optimizer.state.values() for value in state.values()]


def test_without_a_scaler_no_update_is_ever_skipped(train: Train) -> None:
    training = train(Plan())
    training.model.wpe.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    training.step(next(training.batches))
    assert training.step.skipped_updates() == 0
    assert not all(weight.isfinite().all() for weight in weights_of(training))  # the loss curve will tell


# --- reading the loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_the_loss_is_read_when_the_plan_says(train: Train, every: int) -> None:
    training = train(Plan(read_loss_every=every))
    assert math.isnan(training.step.last_read_loss)
    expected = math.nan
    for number in range(1, 8):
        loss = training.step(next(training.batches))
        assert isinstance(loss, torch.Tensor)
        assert not loss.requires_grad, "a kept loss would keep its whole graph"
        if number % every == 0:
            expected = loss.item()
        assert training.step.last_read_loss == pytest.approx(expected, abs=0, nan_ok=True)


def test_reset_starts_counting_again(train: Train) -> None:
    training = train(replace(SCALED, read_loss_every=2))
    hook = training.model.wpe.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    losses_of(training, 1)
    hook.remove()
    training.step.reset()
    assert training.step.steps_taken == 0
    assert training.step.skipped_updates() == 0
    assert training.step.scaler.get_scale() == INITIAL_LOSS_SCALE
    training.step(next(training.batches))
    assert training.step.optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 / 20)


# --- gradients that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-loop", "adamw-foreach"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(train: Train, optimizer: str, value: float) -> None:
    """A fused optimizer is told on the device; the others where the host may look. The next good step is the one that
    would have been taken anyway."""
    training, other = (train(Plan(optimizer=optimizer)) for _ in range(2))
    first, second = (next(training.batches) for _ in range(2))
    for step in (training.step, other.step):
        step.may_wait = not step.skips_on_device
        step(first)
    training.step.compute_gradients(second)
    next(training.model.parameters()).grad.view(-1)[3] = value
    training.step.apply_gradients()
    assert not math.isfinite(training.step.gradient_norm.item())
    assert all(map(torch.equal, training.model.parameters(), other.model.parameters()))
    for step in (training.step, other.step):
        step(second)
        assert math.isfinite(step.gradient_norm.item())
    assert all(map(torch.equal, training.model.parameters(), other.model.parameters()))


def test_the_norm_is_that_of_the_unclipped_gradients(train: Train) -> None:
    training = train(Plan())
    training.step.compute_gradients(next(training.batches))
    by_hand = torch.stack([p.grad.norm() for p in training.model.parameters()]).norm().item()
    training.step.apply_gradients()
    assert training.step.gradient_norm.item() == pytest.approx(by_hand, rel=1e-5)
