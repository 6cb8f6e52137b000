"""Is it still right? Step 0 of a recipe against the plain fp32 model, tensor by tensor, in the worker that is timed.

The loss alone proves little: AdamW forgives gradients that are twice too large, and a model without its causal mask
starts at ln V like any other. Gradients forgive neither. The reference is the plain model in true fp32 on the same
batch; the yardstick is the plain model at the row's own precision: what that precision costs by itself. This file
measures; `predict/verdict.py` judges.

Of several ranks, rank 0 takes the reference's step alone, on the batch that all of them share; each rank then holds its
own gradients against it, and the worst counts: a rank that was left out of a reduction, or that read another's share of
the batch, is as wrong as any other fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redline.core.job import Job
from redline.core.measurement import GradientCheck
from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.engine.build import Training, build
from redline.engine.distributed import Ranks, alone
from redline.engine.fit import in_pieces_that_fit
from redline.engine.shard import whole
from redline.rungs import find_rung, reference_plan

REFERENCE_CHUNK = 4  # sequences at a time, fewer if they do not fit: plain attention in fp32 takes most of all
PAIR_STEPS, PAIR_BATCH = 3, 4


@dataclass(frozen=True)
class Expected:
    """Step 0 of the plain fp32 model, on the host, and the yardstick's error for each gradient."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    """After the first update."""
    update_norms: dict[str, float]
    yardstick_errors: dict[str, float]
    yardstick_error: float


class Told(Mapping[str, torch.Tensor]):
    """Rank 0's tensors on every rank, one at a time: all ranks go through them together, in one order."""

    def __init__(
        self, ranks: Ranks, shapes: Mapping[str, list[int]], tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self._ranks, self._shapes, self._tensors, self._device = ranks, shapes, tensors, device

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._ranks.leads:
            tensor = self._tensors[name].to(self._device, torch.float32).contiguous()
        else:
            tensor = torch.empty(self._shapes[name], device=self._device)
        return self._ranks.spread(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def told(expected: Expected | None, ranks: Ranks, device: torch.device) -> Expected:
    """What rank 0 expects, on all ranks. The others wait for it as long as it takes."""
    if not ranks.joined:
        assert expected is not None
        return expected
    if expected is not None:
        ranks.say(
            "expected",
            {
                "loss": expected.loss,
                "gradients": {name: list(tensor.shape) for name, tensor in expected.gradients.items()},
                "weights": {name: list(tensor.shape) for name, tensor in expected.weights.items()},
                "update_norms": expected.update_norms,
                "yardstick_errors": expected.yardstick_errors,
                "yardstick_error": expected.yardstick_error,
            },
        )
    said = ranks.hear("expected")
    for name in ("gradients", "weights"):
        said[name] = Told(ranks, said[name], {} if expected is None else getattr(expected, name), device)
    return Expected(**said)


def reference_gradients(
    workload: Workload, reference: Plan, plan: Plan, *, micro_batch: int, tokens: Path, device: torch.device
) -> Expected:
    where: dict[str, Any] = {"micro_batch": micro_batch, "tokens": tokens, "device": device}
    fit: dict[str, Any] = {"chunk": min(REFERENCE_CHUNK, micro_batch), "device": device}
    if not workload.splits:
        fit["chunk"] = None
    # Two functions, so that the first model is gone before the second is made.
    expected = in_pieces_that_fit(partial(_reference_step, workload, reference, where), **fit)
    if plan.precision == "fp32":
        return expected
    plain_at_precision = replace(
        reference,
        matmul_precision=plan.matmul_precision,
        autocast=plan.autocast,
        loss_scaling=plan.loss_scaling,
        fp8_head=False,
        fp8_linears=False,  # 8 bits are held against 16: a yardstick of 8 would have the same faults
    )
    errors, overall = in_pieces_that_fit(
        partial(_yardstick_errors, workload, plain_at_precision, expected.gradients, where), **fit
    )
    return replace(expected, yardstick_errors=errors, yardstick_error=overall)


def _reference_step(workload: Workload, reference: Plan, where: dict[str, Any], chunk: int | None) -> Expected:
    """The first step of the plain fp32 model, which is its own yardstick."""
    training, loss = _plain_gradients(workload, reference, **where, chunk=chunk)
    gradients = _on_host(gradients_of(training))
    before = _on_host(weights_of(training))
    training.step.apply_gradients()
    weights = _on_host(weights_of(training))
    return Expected(
        loss=loss,
        gradients=gradients,
        weights=weights,
        update_norms={name: (after - before[name]).norm().item() for name, after in weights.items()},
        yardstick_errors=dict.fromkeys(gradients, 0.0),
        yardstick_error=0.0,
    )


def _yardstick_errors(
    workload: Workload, plan: Plan, gradients: Mapping[str, torch.Tensor], where: dict[str, Any], chunk: int | None
) -> tuple[dict[str, float], float]:
    """What the row's precision costs plain code by itself."""
    training, _ = _plain_gradients(workload, plan, **where, chunk=chunk)
    return relative_errors(gradients_of(training), gradients)


def check_gradients(
    training: Training, batch: torch.Tensor, expected: Expected, ranks: Ranks | None = None
) -> GradientCheck:
    """Takes the first step: gradients are compared as they come, the update as the optimizer leaves it."""
    ranks = ranks or alone()
    loss = ranks.mean(training.step.compute_gradients(batch).float()).item()
    errors, overall = worst_errors(ranks, relative_errors(gradients_of(training), expected.gradients))
    training.step.apply_gradients()  # from equal weights, a distance between weights is one between updates
    updates = relative_errors(weights_of(training), expected.weights, expected.update_norms)
    update_errors, _ = worst_errors(ranks, updates)
    return GradientCheck(
        loss=loss,
        reference_loss=expected.loss,
        error=overall,
        yardstick=expected.yardstick_error,
        tensor_errors=errors,
        tensor_yardsticks=expected.yardstick_errors,
        update_errors=update_errors,
    )


def gradients_of(training: Training) -> Mapping[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in training.model.named_parameters()}
    return Published(training, {name: gradient for name, gradient in found.items() if gradient is not None})


def weights_of(training: Training) -> Mapping[str, torch.Tensor]:
    return Published(training, {name: parameter.detach() for name, parameter in training.model.named_parameters()})


class Published(Mapping[str, torch.Tensor]):
    """Tensors by published name and without padding, so that padded and plain variants can be compared. One that is cut
    among ranks is put together when it is asked for: no rank has room for all of them."""

    def __init__(self, training: Training, tensors: dict[str, torch.Tensor]) -> None:
        self._training, self._tensors = training, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        training = self._training
        return training.adapter.unpadded(training.model, name, whole(self._tensors[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def worst_errors(ranks: Ranks, own: tuple[dict[str, float], float]) -> tuple[dict[str, float], float]:
    """Tensor by tensor and in all, over the ranks."""
    found = ranks.gather(own)
    return {name: worst(errors[name] for errors, _ in found) for name in own[0]}, worst(each for _, each in found)


def worst(errors: Iterable[float]) -> float:
    """One that is no number is the worst of all."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def relative_errors(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], norms: dict[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """L2 error of each tensor, and of all as one vector, relative to the reference's norm or to the given ones."""
    errors, squared_error, squared_norm = {}, 0.0, 0.0
    for name, expected in reference.items():
        # A parameter that gets no gradient is as wrong as can be.
        mine = found.get(name, torch.full_like(expected, torch.inf)).double()
        expected = expected.to(mine.device).double()
        difference = (mine - expected).norm().item()
        norm = expected.norm().item() if norms is None else norms[name]
        errors[name] = difference / norm if norm else (0.0 if difference == 0 else float("inf"))
        squared_error, squared_norm = squared_error + difference**2, squared_norm + norm**2
    return errors, (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0


def pair_is_bitwise(job: Job, tokens: Path, device: torch.device) -> bool | None:
    """A few plain fp32 steps with and without the rung. Plain eager steps repeat bit for bit, which compiled ones and
    flash backward do not, so this can prove what a loss curve of the whole recipe cannot. None where even plain steps
    do not repeat themselves: then nothing can be proved."""
    plain = reference_plan(job.recipe.rungs)
    plans = (plain, plain, _with_rung(job, plain))
    once, again, with_it = (_short_run(job.workload, plan, tokens, device) for plan in plans)
    return _equal_bits(once, with_it) if _equal_bits(once, again) else None


def _equal_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def _with_rung(job: Job, plan: Plan) -> Plan:
    assert job.bit_exact_rung is not None
    return find_rung(job.bit_exact_rung).apply(plan)


def _short_run(workload: Workload, plan: Plan, tokens: Path, device: torch.device) -> list[torch.Tensor]:
    """Losses and final weights, on the host."""
    training = build(workload, plan, micro_batch=PAIR_BATCH, tokens=tokens, device=device)
    losses = [training.step(next(training.batches)).cpu() for _ in range(PAIR_STEPS)]
    training.close()
    return losses + [parameter.detach().cpu() for parameter in training.model.parameters()]


def _plain_gradients(workload: Workload, plan: Plan, **where: Any) -> tuple[Training, float]:
    training = build(workload, plan, **where)
    loss = training.step.compute_gradients(next(training.batches)).item()
    training.close()
    return training, loss


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, also on a CPU: clipping works on gradients in place."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
