"""Is it still right? Step 0 of a recipe against the plain fp32 model, tensor by tensor, in the worker that is timed.

The loss alone proves little: AdamW forgives gradients that are twice too large, and a model without its causal mask
starts at ln V like any other. Gradients forgive neither. The reference is the plain model in true fp32 on the same
batch; the yardstick is the plain model at the row's own precision: what that precision costs by itself. This file
measures; `predict/verdict.py` judges.

Some gradients are zero but for rounding: softmax cancels the keys' bias, batch norm the bias of the layer before it. No
two correct programs agree on those, and AdamW makes an update of full size of them. Which they are is measured, since
no size tells: the plain fp32 model takes step 0 again from weights that are moved in their last bits, and what changes
with them is noise. It is sent along tensor by tensor, and updates are compared where gradients stand out of it.

Of several ranks, rank 0 takes the reference's step alone, on the batch that all of them share; each rank then holds its
own gradients against it, and the worst counts: a rank that was left out of a reduction, or that read another's share of
the batch, is as wrong as any other fault. Of a tensor that a tensor group has cut each rank compares its piece with the
same numbers of the reference's (`core/cut.py` says which), and the group's pieces make one error together, of the whole
tensor: what a precision costs is known of that alone.
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

REFERENCE_CHUNK = 4  # sequences at a time, fewer if they do not fit: plain attention in fp32 takes most of all
PAIR_STEPS, PAIR_BATCH = 3, 4
# Weights are moved by sixteen epsilons of fp32: a little more than other orders of the same sums do to activations, so
# that of the ReLUs whose inputs those carry over zero some are carried here too. Once up and once down, each weight by
# a sign of its own: one of the two meets the zero. Small ResNets rounded otherwise, 192 times (weights moved by another
# epsilon or two, images in another memory format), then never came over their bounds; with eight epsilons twice.
NUDGES = (16 * 2.0**-23, -16 * 2.0**-23)
EPSILONS = {"tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-7}  # fp8's yardstick is bf16
STANDS_OUT = 10.0  # an element's gradient is its own, not rounding's, from so many times its tensor's noise on


@dataclass(frozen=True)
class Expected:
    """Step 0 of the plain fp32 model, on the host, and the yardstick's error for each gradient."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    sizes: dict[str, float]
    """What errors of gradients are relative to: their norms, or their noise where that is larger."""
    noise: dict[str, float]
    """How far rounding moves each gradient, of its size."""
    swing: dict[str, float]
    """How far the rounding of the row's precision would move it, were all else exact; empty for fp32."""
    weights: Mapping[str, torch.Tensor]
    """After the first update."""
    update_norms: dict[str, float]
    """Over the elements that are settled."""
    yardstick_errors: dict[str, float]
    yardstick_error: float

    def settled(self, name: str) -> torch.Tensor | None:
        """Elements whose first update says anything: Adam's is the gradient's sign, and of rounding that is chance.
        None: all of them."""
        gradient = self.gradients.get(name)
        if gradient is None:
            return None
        return stands_out(gradient, self.noise[name] * self.sizes[name])


def stands_out(gradient: torch.Tensor, noise: float) -> torch.Tensor:
    """Elements that are more than rounding. Rounding leaves no zero, so that zero is one (a row nobody looked up); and
    what is no number is never hidden."""
    typical = noise / math.sqrt(max(gradient.numel(), 1))
    return (gradient.abs() <= STANDS_OUT * typical).logical_not_() | (gradient == 0)


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
    expected = in_pieces_that_fit(partial(_reference_step, workload, reference, plan.precision, where), **fit)
    if plan.precision == "fp32":
        return expected
    yardstick = plain_at_precision(reference, plan)
    errors, overall = in_pieces_that_fit(partial(_yardstick_errors, workload, yardstick, expected, where), **fit)
    return replace(expected, yardstick_errors=errors, yardstick_error=overall)


def _reference_step(
    workload: Workload, reference: Plan, precision: str, where: dict[str, Any], chunk: int | None
) -> Expected:
    """The first step of the plain fp32 model, which is its own yardstick."""
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
    """Sizes of the gradients and the share of them that is noise."""
    found = [changes(training, batch, gradients, amount) for amount in NUDGES]
    noise = {name: max(each.distances[name] for each in found) for name in gradients}
    sizes = {name: max(norm, noise[name]) for name, norm in found[0].norms.items()}
    return sizes, {name: _share(change, sizes[name]) for name, change in noise.items()}


def swing_at(
    precision: str, training: Training, batch: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """In plain fp32, so that no fault of code at that precision can excuse itself."""
    return changes(training, batch, gradients, EPSILONS[precision]).relative()[0]


def changes(training: Training, batch: torch.Tensor, gradients: Mapping[str, torch.Tensor], amount: float) -> Distances:
    """Of the gradients, when the weights move. One that comes out as no number, or not at all, from weights that are
    almost the same is no measure: it is taken for no change, which excuses nothing."""
    training.restore()
    nudge(training.model.parameters(), amount)
    training.step.compute_gradients(batch)
    found = distances(gradients_of(training), gradients)
    return replace(found, distances={name: d if math.isfinite(d) else 0.0 for name, d in found.distances.items()})


@torch.no_grad()
def nudge(parameters: Iterable[torch.Tensor], amount: float) -> None:
    """Moves each weight by `amount` of its own size, or by what its type can hold, up or down by chance. Zeros stay."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in filter(torch.is_floating_point, parameters):
        device, least = parameter.device, torch.finfo(parameter.dtype).eps
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        signs = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        parameter.addcmul_(parameter, signs, value=math.copysign(max(abs(amount), least), amount))


def _yardstick_errors(
    workload: Workload, plan: Plan, expected: Expected, where: dict[str, Any], chunk: int | None
) -> tuple[dict[str, float], float]:
    """What the row's precision costs plain code by itself."""
    training, *_ = _plain_gradients(workload, plan, **where, chunk=chunk)
    return relative_errors(gradients_of(training), expected.gradients, expected.sizes)


def check_gradients(
    training: Training, batch: torch.Tensor, expected: Expected, ranks: Ranks | None = None
) -> GradientCheck:
    """Takes the first step: gradients are compared as they come, the update as the optimizer leaves it."""
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
    found: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    norms: dict[str, float] | None = None,
    keep: Callable[[str], torch.Tensor | None] = lambda name: None,
) -> Distances:
    """`keep`: which elements of a tensor count; None is all of them."""
    cuts = found.cuts if isinstance(found, Published) else {}
    apart, lengths = {}, {}
    for name, expected in reference.items():
        lengths[name] = expected.double().norm().item() if norms is None else norms[name]
        mine, kept = found.get(name), keep(name)
        if mine is None:  # a parameter that gets no gradient is as wrong as can be
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


def _plain_gradients(workload: Workload, plan: Plan, **where: Any) -> tuple[Training, torch.Tensor, float]:
    training = build(workload, plan, **where)
    batch = next(training.batches)
    loss = training.step.compute_gradients(batch).item()
    training.close()
    return training, batch, loss


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, also on a CPU: clipping works on gradients in place."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
