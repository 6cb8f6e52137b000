"""Is it still right? Compares step 0 of a recipe with the plain fp32 model, tensor by tensor, in the timed worker.

The loss alone proves little: AdamW forgives gradients that are twice too large, and a model without its causal mask
starts at ln V like any other. Gradients forgive neither. The reference is the plain model in true fp32 on the same
batch. The yardstick is the plain model at the row's own precision, and shows what that precision costs by itself. This
file measures; `predict/verdict.py` judges.

Some gradients are zero except for rounding: softmax cancels the keys' bias, and batch norm the bias of the layer before
it. No two correct programs agree on those, and AdamW turns them into full-size updates. Their size does not identify
them, so they are measured: the plain fp32 model repeats step 0 from weights moved in their last bits, and whatever
changes in a gradient is noise. The noise of each tensor is part of the result, and updates are compared only where
gradients exceed it.

With several ranks, rank 0 alone takes the reference's step, on the batch that all ranks share. Each rank then compares
its own gradients with it, and the worst rank counts: one that was left out of a reduction, or that read another's share
of the batch, is as wrong as any other. Where a tensor group has cut a tensor, each rank compares its piece with the
same part of the reference (`core/cut.py` says which), and the errors of the pieces are combined into one for the whole
tensor, since what a precision costs is known only for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from redline.rungs import find_rung, plain_at_precision, reference_plan

REFERENCE_CHUNK = 4  # sequences at a time, fewer if they do not fit: plain fp32 attention needs the most memory
PAIR_STEPS, PAIR_BATCH = 3, 4
# Weights are moved by sixteen epsilons of fp32. That changes activations a little more than summing in another order
# does, so that some of the ReLU inputs which reordering carries across zero are carried across here too. It is done
# once up and once down, with a sign per weight, since only one of the two directions meets the zero. In 192 trials of
# small ResNets with other rounding (weights moved by another epsilon or two, images in another memory format) none
# exceeded its bounds; with eight epsilons two did.
NUDGES = (16 * 2.0**-23, -16 * 2.0**-23)
EPSILONS = {"tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-7}  # fp8's yardstick is bf16
STANDS_OUT = 10.0  # an element's gradient is more than rounding from this multiple of its tensor's noise on


@dataclass(frozen=True)
class Expected:
    """Step 0 of the plain fp32 model, on the host, with the yardstick's error for each gradient."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    sizes: dict[str, float]
    """What gradient errors are relative to: the gradient's norm, or its noise if that is larger."""
    noise: dict[str, float]
    """How far rounding moves each gradient, relative to its size."""
    swing: dict[str, float]
    """How far each gradient moves, relative to its norm, in fp32 with weights moved by the epsilon of the row's
    precision; empty for fp32."""
    weights: Mapping[str, torch.Tensor]
    """The weights after the first update."""
    update_norms: dict[str, float]
    """Norms of the first updates, over settled elements only."""
    yardstick_errors: dict[str, float]
    yardstick_error: float

    def settled(self, name: str) -> torch.Tensor | None:
        """Return a mask of the elements whose first update means something; None for all. Adam's first update is the
        gradient's sign, which is chance where the gradient is rounding."""
        gradient = self.gradients.get(name)
        if gradient is None:
            return None
        return stands_out(gradient, self.noise[name] * self.sizes[name])


def stands_out(gradient: torch.Tensor, noise: float) -> torch.Tensor:
    """Return a mask of the elements that are more than rounding. An exact zero is included, since rounding leaves none
    (it is a row nobody looked up), and so is NaN, which must not be hidden."""
    typical = noise / math.sqrt(max(gradient.numel(), 1))
    return (gradient.abs() <= STANDS_OUT * typical).logical_not_() | (gradient == 0)


class FromRankZero(Mapping[str, torch.Tensor]):
    """Rank 0's tensors, broadcast one at a time on access: all ranks must access them together, in the same order."""

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


def share_expected(expected: Expected | None, ranks: Ranks, device: torch.device) -> Expected:
    """Return rank 0's `expected` on all ranks. The others wait for it as long as it takes."""
    if not ranks.joined:
        assert expected is not None
        return expected
    if expected is not None:
        ranks.say(
            "expected",
            {
                "loss": expected.loss,
                "gradients": {name: list(tensor.shape) for name, tensor in expected.gradients.items()},
                "sizes": expected.sizes,
                "noise": expected.noise,
                "swing": expected.swing,
                "weights": {name: list(tensor.shape) for name, tensor in expected.weights.items()},
                "update_norms": expected.update_norms,
                "yardstick_errors": expected.yardstick_errors,
                "yardstick_error": expected.yardstick_error,
            },
        )
    said = ranks.hear("expected")
    for name in ("gradients", "weights"):
        said[name] = FromRankZero(ranks, said[name], {} if expected is None else getattr(expected, name), device)
    return Expected(**said)


def reference_gradients(
    workload: Workload, reference: Plan, plan: Plan, *, micro_batch: int, tokens: Path, device: torch.device
) -> Expected:
    where: dict[str, Any] = {"micro_batch": micro_batch, "tokens": tokens, "device": device}
    fit: dict[str, Any] = {"chunk": min(REFERENCE_CHUNK, micro_batch), "device": device}
    if not workload.splits:
        fit["chunk"] = None
    # Two functions, so that the first model is freed before the second is built.
    expected = in_pieces_that_fit(partial(_reference_step, workload, reference, plan.precision, where), **fit)
    if plan.precision == "fp32":
        return expected
    yardstick = plain_at_precision(reference, plan)
    errors, overall = in_pieces_that_fit(partial(_yardstick_errors, workload, yardstick, expected, where), **fit)
    return replace(expected, yardstick_errors=errors, yardstick_error=overall)


def _reference_step(
    workload: Workload, reference: Plan, precision: str, where: dict[str, Any], chunk: int | None
) -> Expected:
    """Take the first step of the plain fp32 model, which is its own yardstick."""
    training, batch, loss = _plain_gradients(workload, reference, **where, chunk=chunk)
    gradients = _on_host(gradients_of(training))
    before = _on_host(weights_of(training))
    training.step.apply_gradients()
    weights = _on_host(weights_of(training))
    sizes, noise = rounding_noise(training, batch, gradients)
    expected = Expected(
        loss=loss,
        gradients=gradients,
        sizes=sizes,
        noise=noise,
        swing=swing_at(precision, training, batch, gradients) if precision in EPSILONS else {},
        weights=weights,
        update_norms={},
        yardstick_errors=dict.fromkeys(gradients, 0.0),
        yardstick_error=0.0,
    )
    updates = distances(before, weights, dict.fromkeys(weights, 1.0), keep=expected.settled)
    return replace(expected, update_norms=updates.distances)


def rounding_noise(
    training: Training, batch: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sizes of the gradients and the share of each that is noise."""
    found = [changes(training, batch, gradients, amount) for amount in NUDGES]
    noise = {name: max(each.distances[name] for each in found) for name in gradients}
    sizes = {name: max(norm, noise[name]) for name, norm in found[0].norms.items()}
    return sizes, {name: _share(change, sizes[name]) for name, change in noise.items()}


def swing_at(
    precision: str, training: Training, batch: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return how far gradients move with weights moved by the precision's epsilon. Computed in plain fp32, so that a
    fault of code at that precision cannot excuse itself."""
    return changes(training, batch, gradients, EPSILONS[precision]).relative()[0]


def changes(training: Training, batch: torch.Tensor, gradients: Mapping[str, torch.Tensor], amount: float) -> Distances:
    """Return how far the gradients change when the weights move. If a gradient is NaN, infinite or missing for weights
    that are almost the same, it measures nothing and counts as unchanged, which excuses nothing."""
    training.restore()
    nudge(training.model.parameters(), amount)
    training.step.compute_gradients(batch)
    found = distances(gradients_of(training), gradients)
    return replace(found, distances={name: d if math.isfinite(d) else 0.0 for name, d in found.distances.items()})


@torch.no_grad()
def nudge(parameters: Iterable[torch.Tensor], amount: float) -> None:
    """Move each weight up or down at random by `amount` of its size, at least by its dtype's epsilon. Zeros stay."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in filter(torch.is_floating_point, parameters):
        device, least = parameter.device, torch.finfo(parameter.dtype).eps
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        signs = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        parameter.addcmul_(parameter, signs, value=math.copysign(max(abs(amount), least), amount))


def _yardstick_errors(
    workload: Workload, plan: Plan, expected: Expected, where: dict[str, Any], chunk: int | None
) -> tuple[dict[str, float], float]:
    """Return the errors that the row's precision alone causes in plain code."""
    training, *_ = _plain_gradients(workload, plan, **where, chunk=chunk)
    return relative_errors(gradients_of(training), expected.gradients, expected.sizes)


def check_gradients(
    training: Training, batch: torch.Tensor, expected: Expected, ranks: Ranks | None = None
) -> GradientCheck:
    """Take the first step, and compare its gradients (before clipping) and the update that the optimizer makes."""
    ranks = ranks or alone()
    loss = ranks.mean(training.step.compute_gradients(batch).float()).item()
    errors, overall = worst_errors(ranks, distances(gradients_of(training), expected.gradients, expected.sizes))
    training.step.apply_gradients()  # from equal weights, a distance between weights is one between updates
    updates = distances(weights_of(training), expected.weights, expected.update_norms, keep=expected.settled)
    update_errors, _ = worst_errors(ranks, updates)
    return GradientCheck(
        loss=loss,
        reference_loss=expected.loss,
        error=overall,
        yardstick=expected.yardstick_error,
        tensor_errors=errors,
        tensor_yardsticks=expected.yardstick_errors,
        update_errors=update_errors,
        tensor_noise=expected.noise,
        tensor_swing=expected.swing,
    )


def gradients_of(training: Training) -> Mapping[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in training.model.named_parameters()}
    return Published(training, {name: gradient for name, gradient in found.items() if gradient is not None})


def weights_of(training: Training) -> Mapping[str, torch.Tensor]:
    return Published(training, {name: parameter.detach() for name, parameter in training.model.named_parameters()})


class Published(Mapping[str, torch.Tensor]):
    """Tensors by published name and without padding, so that padded and plain variants can be compared. A tensor that
    FSDP has cut is gathered on access, since no rank has room for all of them. Of a tensor that a tensor group has cut,
    this holds the rank's piece with its padding; `beside` finds what to compare it with."""

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
    """L2 distances of a rank's tensors, or of its pieces of them, from a reference."""

    distances: dict[str, float]
    norms: dict[str, float]
    """What distances are relative to, by name: for whole tensors, even where a rank holds a piece."""
    cut: frozenset[str] = frozenset()
    """Names of the tensors that a tensor group holds in pieces."""

    def relative(self) -> tuple[dict[str, float], float]:
        """Return the relative error of each tensor, and of all tensors as one vector."""
        errors = {name: _share(self.distances[name], norm) for name, norm in self.norms.items()}
        total, norm = (math.hypot(*numbers.values()) for numbers in (self.distances, self.norms))
        return errors, total / norm if norm else 0.0


def _share(distance: float, norm: float) -> float:
    return distance / norm if norm else (0.0 if distance == 0 else float("inf"))


def worst_errors(ranks: Ranks, own: Distances) -> tuple[dict[str, float], float]:
    """Return the worst error over ranks, for each tensor and for all tensors as one vector."""
    found = [each.relative() for each in put_together(ranks.gather(own), ranks.layout)]
    return {name: worst(errors[name] for errors, _ in found) for name in own.norms}, worst(each for _, each in found)


def put_together(own: Sequence[Distances], layout: Layout) -> list[Distances]:
    """Return every rank's distances. For a cut tensor, the distances of its tensor group's pieces are combined."""
    together = []
    for rank, mine in enumerate(own):
        place = layout.place(rank)
        group = [one for other, one in enumerate(own) if replace(layout.place(other), tensor=place.tensor) == place]
        pieces = {name: math.hypot(*(one.distances[name] for one in group)) for name in mine.cut}
        together.append(replace(mine, distances={**mine.distances, **pieces}))
    return together


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN is the worst of all."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def relative_errors(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], norms: dict[str, float] | None = None
) -> tuple[dict[str, float], float]:
    """Return the L2 error of each tensor, and of all as one vector, relative to the reference's norms or to `norms`."""
    return distances(found, reference, norms).relative()


def distances(
    found: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    norms: dict[str, float] | None = None,
    keep: Callable[[str], torch.Tensor | None] = lambda name: None,
) -> Distances:
    """Return the L2 distance of each tensor from the reference. `keep` returns a mask of what counts; None for all."""
    cuts = found.cuts if isinstance(found, Published) else {}
    apart, lengths = {}, {}
    for name, expected in reference.items():
        lengths[name] = expected.double().norm().item() if norms is None else norms[name]
        mine, kept = found.get(name), keep(name)
        if mine is None:  # a parameter without a gradient is as wrong as can be
            apart[name] = math.inf
            continue
        if name in cuts:
            kept = None if kept is None else beside(mine, kept, cuts[name])[1]
            mine, expected = beside(mine, expected, cuts[name])
        apart[name] = _distance(mine, expected, kept)
    return Distances(apart, lengths, frozenset(cuts) & frozenset(apart))


def _distance(mine: torch.Tensor, expected: torch.Tensor, kept: torch.Tensor | None) -> float:
    apart = mine.double() - expected.to(mine.device).double()
    return (apart if kept is None else apart[kept.to(mine.device)]).norm().item()


def beside(piece: torch.Tensor, whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's piece and the same part of the whole tensor. Rows that pad the vocabulary are only in the piece,
    at its end, and are left out."""
    size = whole.size(cut.dim)
    runs = [(run.here, run.there, max(0, min(run.length, size - run.there))) for run in cut.runs]
    mine = [piece.narrow(cut.dim, here, length) for here, _, length in runs]
    theirs = [whole.narrow(cut.dim, min(there, size), length) for _, there, length in runs]
    return torch.cat(mine, dim=cut.dim), torch.cat(theirs, dim=cut.dim)


def pair_is_bitwise(job: Job, tokens: Path, device: torch.device) -> bool | None:
    """True if a few plain fp32 steps agree in every bit with and without the rung. Plain eager steps repeat bit for
    bit, unlike compiled ones and flash backward, so this can prove what a loss curve of the whole recipe cannot. None
    if even plain steps do not repeat: then nothing can be proved."""
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
    """Return losses and final weights, on the host."""
    training = build(workload, plan, micro_batch=PAIR_BATCH, tokens=tokens, device=device)
    losses = [training.step(next(training.batches)).cpu() for _ in range(PAIR_STEPS)]
    training.close()
    return losses + [parameter.detach().cpu() for parameter in training.model.parameters()]


def _plain_gradients(workload: Workload, plan: Plan, **where: Any) -> tuple[Training, torch.Tensor, float]:
    training = build(workload, plan, **where)
    batch = next(training.batches)
    loss = training.step.compute_gradients(batch).item()
    training.close()
    return training, batch, loss


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the host, even of host tensors: clipping changes gradients in place."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
