"""Is it still right? Step 0 of a recipe against the plain fp32 model, tensor by tensor, in the worker that is timed.

The loss alone proves little: AdamW forgives gradients that are twice too large, and a model without its causal mask
starts at ln V like any other. Gradients forgive neither. The reference is the plain model in true fp32 on the same
batch; the yardstick is the plain model at the row's own precision: what that precision costs by itself. This file
measures; `predict/verdict.py` judges.

Of several ranks, rank 0 takes the reference's step alone, on the batch that all of them share; each rank then holds its
own gradients against it, and the worst counts: a rank that was left out of a reduction, or that read another's share of
the batch, is as wrong as any other fault. Of a tensor that a tensor group has cut each rank compares its piece with the
same numbers of the reference's (`core/cut.py` says which), and the group's pieces make one error together, of the whole
tensor: what a precision costs is known of that alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redline.core.cut import Cut
from redline.core.job import Job
from redline.core.layout import Layout
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
    errors, overall = worst_errors(ranks, distances(gradients_of(training), expected.gradients))
    training.step.apply_gradients()  # from equal weights, a distance between weights is one between updates
    updates = distances(weights_of(training), expected.weights, expected.update_norms)
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
    """Tensors by published name and without padding, so that padded and plain variants can be compared. One that FSDP
    has cut is put together when it is asked for: no rank has room for all of them. Of one that a tensor group has cut
    there is this rank's piece, padding included: `beside` says what it is to be compared with."""

    def __init__(self, training: Training, tensors: dict[str, torch.Tensor]) -> None:
        self._training, self._tensors = training, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        training, tensor = self._training, whole(self._tensors[name])
        return tensor if name in self.cuts else training.adapter.unpadded(training.model, name, tensor)

    @property
    def cuts(self) -> Mapping[str, Cut]:
        return self._training.step.shared.cuts

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class Distances:
    """Of a rank's tensors, or of its pieces of them, from a reference."""

    distances: dict[str, float]
    norms: dict[str, float]
    """Of the reference's whole tensors."""
    cut: frozenset[str] = frozenset()
    """Names of those that a tensor group holds in pieces."""

    def relative(self) -> tuple[dict[str, float], float]:
        """Of each tensor, and of all as one vector."""
        errors = {name: _share(self.distances[name], norm) for name, norm in self.norms.items()}
        total, norm = (math.hypot(*numbers.values()) for numbers in (self.distances, self.norms))
        return errors, total / norm if norm else 0.0


def _share(distance: float, norm: float) -> float:
    return distance / norm if norm else (0.0 if distance == 0 else float("inf"))


def worst_errors(ranks: Ranks, own: Distances) -> tuple[dict[str, float], float]:
    """Tensor by tensor and in all, over the ranks."""
    found = [each.relative() for each in put_together(ranks.gather(own), ranks.layout)]
    return {name: worst(errors[name] for errors, _ in found) for name in own.norms}, worst(each for _, each in found)


def put_together(own: Sequence[Distances], layout: Layout) -> list[Distances]:
    """Every rank's, with the pieces of its whole tensor group in the place of its own."""
    together = []
    for rank, mine in enumerate(own):
        place = layout.place(rank)
        group = [one for other, one in enumerate(own) if replace(layout.place(other), tensor=place.tensor) == place]
        pieces = {name: math.hypot(*(one.distances[name] for one in group)) for name in mine.cut}
        together.append(replace(mine, distances={**mine.distances, **pieces}))
    return together


def worst(errors: Iterable[float]) -> float:
    """One that is no number is the worst of all."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def relative_errors(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], norms: dict[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """L2 error of each tensor, and of all as one vector, relative to the reference's norm or to the given ones."""
    return distances(found, reference, norms).relative()


def distances(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], norms: dict[str, float] | None = None
) -> Distances:
    cuts = found.cuts if isinstance(found, Published) else {}
    apart, lengths = {}, {}
    for name, expected in reference.items():
        lengths[name] = expected.double().norm().item() if norms is None else norms[name]
        mine = found.get(name)
        if mine is None:  # a parameter that gets no gradient is as wrong as can be
            apart[name] = math.inf
            continue
        if name in cuts:
            mine, expected = beside(mine, expected, cuts[name])
        apart[name] = (mine.double() - expected.to(mine.device).double()).norm().item()
    return Distances(apart, lengths, frozenset(cuts) & frozenset(apart))


def beside(piece: torch.Tensor, whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's piece, and the same numbers of the whole tensor. Rows that pad the vocabulary are in the piece only, and
    at its end."""
    size = whole.size(cut.dim)
    runs = [(run.here, run.there, max(0, min(run.length, size - run.there))) for run in cut.runs]
    mine = [piece.narrow(cut.dim, here, length) for here, _, length in runs]
    theirs = [whole.narrow(cut.dim, min(there, size), length) for _, there, length in runs]
    return torch.cat(mine, dim=cut.dim), torch.cat(theirs, dim=cut.dim)


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
