"""What fits a card: the largest micro batch, and what to change if none fits or the wanted one does not.

    Case(shape=shape, plan=plan).largest(80 * 1024**3) -> 171
    what_to_change(Case(shape=shape, plan=plan), micro_batch=64, memory_bytes=24 * 1024**3) -> (Change(...), ...)

The peak grows with the micro batch at every moment of a step, so the largest is found by bisection on the prediction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from redline.core.layout import Layout as Ranked
from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.workload import Shape, check_positive
from redline.predict.memory import Memory, inference_precision, predict_memory
from redline.predict.optimizers import OPTIMIZERS
from redline.predict.parallel import Layout

MOST_SEQUENCES = 2**20  # in one micro batch: beyond any use
MOST_REPLICAS = 1024
# The ZeRO stage of each `Plan.parallel`. `Rank.keeps` and `Rank.gathers_all` say what `fsdp-keep` and `fsdp-whole` hold
# in addition within an update.
ZERO = {"none": 0, "ddp": 0, "fsdp-keep": 3, "fsdp-whole": 3, "fsdp": 3}
FASTER = "nothing: faster too"
SAME = 0.005  # a change that moves the peak by less is not worth naming


class Fitting(ABC):
    @abstractmethod
    def memory(self, micro_batch: int) -> Memory:
        """The predicted peak."""

    def largest(self, memory_bytes: int) -> int:
        """The largest micro batch whose total fits; 0 if none does."""
        check_positive("memory_bytes", memory_bytes)
        fits, beyond = 0, 1
        while beyond <= MOST_SEQUENCES and self.memory(beyond).total <= memory_bytes:
            fits, beyond = beyond, 2 * beyond
        while beyond - fits > 1 and fits < MOST_SEQUENCES:
            middle = (fits + beyond) // 2
            if self.memory(middle).total <= memory_bytes:
                fits = middle
            else:
                beyond = middle
        return fits


@dataclass(frozen=True, kw_only=True)
class TracedCase(Fitting):
    """A user's own model on one GPU."""

    shape: Traced
    plan: Plan

    def memory(self, micro_batch: int) -> Memory:
        return predict_memory(self.shape, self.plan, micro_batch=micro_batch)


def case_of(shape: Shape | Traced, plan: Plan, ranks: Ranked | None = None) -> Case | TracedCase:
    """Return the case of a shape. `ranks` share the step as the plan says; of a traced model, each rank is assumed to
    hold all of it."""
    if isinstance(shape, Traced):
        return TracedCase(shape=shape, plan=plan)
    if ranks is None or ranks.ranks == 1:
        return Case(shape=shape, plan=plan)
    layout = Layout(gpus=ranks.ranks, tp=ranks.tensor, pp=ranks.pipeline, replicas=ranks.replicas)
    return Case(shape=shape, plan=plan, layout=layout, zero=ZERO[plan.parallel] if layout.shards > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Case(Fitting):
    """The arguments of `predict_memory`, except the micro batch."""

    shape: Shape
    plan: Plan
    layout: Layout | None = None
    zero: int = 0
    optimizer: str | None = None
    inference: bool | str = False

    @property
    def optimizer_name(self) -> str:
        return self.plan.optimizer if self.optimizer is None else self.optimizer

    def memory(self, micro_batch: int) -> Memory:
        return predict_memory(
            self.shape,
            self.plan,
            micro_batch=micro_batch,
            layout=self.layout,
            zero=self.zero,
            optimizer=self.optimizer,
            inference=self.inference,
        )


# what to change


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step towards fitting, on top of those before it."""

    what: str
    """A rung's name, or what to set."""
    cost: str
    """What it costs, in words."""
    micro_batch: int
    memory: Memory
    """Predicted with this change and those before it."""
    fits: bool


Tried = tuple[Case, int]  # a case and a micro batch


@dataclass(frozen=True, kw_only=True)
class Option:
    what: str
    cost: str
    apply: Callable[[Case, int], Tried | None]
    """Returns None if the option does not apply."""
    free: bool = False
    """True if it costs nothing; it is then named whenever it helps."""

    @property
    def rungs(self) -> set[str]:
        return set(self.what.split(" and "))


def what_to_change(
    case: Case, *, micro_batch: int, memory_bytes: int, without: Collection[str] = ()
) -> tuple[Change, ...]:
    """Return the cheapest changes that make the case fit, in order; none if it fits already. If even all of them are
    not enough, the last change does not fit either. `without`: rungs that do not apply on the device."""

    def total(options: list[Option]) -> int:
        changed, size = _after(options, case, micro_batch)
        return changed.memory(size).total

    chosen: list[Option] = []
    for option in _options(case):
        if option.rungs & set(without):
            continue
        if total(chosen) <= memory_bytes:
            break
        if option.apply(*_after(chosen, case, micro_batch)) is not None:
            chosen.append(option)
    for option in reversed(chosen[:-1]):  # most expensive first: drop what is not needed after all
        fewer = [other for other in chosen if other is not option]
        enough = (1 + SAME) * total(chosen) if option.free else max(total(chosen), memory_bytes)
        if total(fewer) <= enough and (total(fewer) <= memory_bytes) == (total(chosen) <= memory_bytes):
            chosen = fewer
    return tuple(_steps(chosen, case, micro_batch, memory_bytes))


def _after(options: list[Option], case: Case, micro_batch: int) -> Tried:
    for option in options:
        case, micro_batch = option.apply(case, micro_batch) or (case, micro_batch)
    return case, micro_batch


def _steps(options: list[Option], case: Case, micro_batch: int, memory_bytes: int) -> Iterator[Change]:
    for option in options:
        case, micro_batch = option.apply(case, micro_batch) or (case, micro_batch)
        memory = case.memory(micro_batch)
        fits = memory.total <= memory_bytes
        yield Change(what=option.what, cost=option.cost, micro_batch=micro_batch, memory=memory, fits=fits)


def _options(case: Case) -> Iterator[Option]:
    """Yield the options, cheapest first: those that are faster anyway, then those that cost a little speed, then those
    that change the maths, then those that cost money."""
    yield Option(what=_attention_text(case), cost=FASTER, apply=_fused_attention, free=True)
    if case.inference:
        yield Option(what="16-bit weights", cost="rounding", apply=_precision("half", ("fp32", "mixed")))
        yield Option(what="8-bit weights", cost="quality, to be checked", apply=_precision("int8", ("half",)))
        yield Option(what="micro batch 1", cost="speed", apply=_one_sequence)
        return
    yield Option(what="compile", cost="time to compile", apply=_planned("compile", True))
    if case.shape.tied:
        yield Option(what="tied-weights", cost="nothing: as published", apply=_planned("tied", True), free=True)
    if case.optimizer_name in ("adamw-loop", "adamw-foreach"):
        yield Option(what="fused-adamw", cost=FASTER, apply=_planned("optimizer", "adamw-fused"), free=True)
    if case.plan.loss == "full":
        yield Option(what="fused-loss", cost=FASTER, apply=_planned("loss", "fused"), free=True)
    yield Option(what="chunked-loss", cost="a little speed", apply=_planned("loss", "chunked"))
    yield Option(what="selective-checkpointing", cost="attention's forward once more", apply=_selective_checkpointing)
    yield Option(what="checkpointing", cost="the layers' forward once more", apply=_planned("checkpointing", "full"))
    yield Option(what="micro batch 1", cost="speed; accumulate gradients", apply=_one_sequence)
    yield Option(what="optimizer adamw-8bit", cost="rounding of the optimizer's state", apply=_eight_bit)
    replicas = max(2, case.layout.dp if case.layout else 1)
    while replicas <= MOST_REPLICAS:
        yield Option(what=f"ZeRO 3 among {replicas} replicas", cost="GPUs and traffic", apply=_sharded(replicas))
        replicas *= 2


def _planned(field: str, value: bool | str) -> Callable[[Case, int], Tried | None]:
    def apply(case: Case, micro_batch: int) -> Tried | None:
        if getattr(case.plan, field) == value:
            return None
        return replace(case, plan=replace(case.plan, **{field: value})), micro_batch  # type: ignore[arg-type]

    return apply


def _attention_text(case: Case) -> str:
    """The fused kernels accept only 16 bit."""
    return "flash" if case.plan.autocast else "bf16 and flash"


def _fused_attention(case: Case, micro_batch: int) -> Tried | None:
    if case.plan.attention != "naive":
        return None
    plan = replace(case.plan, attention="flash", autocast=case.plan.autocast or "bf16")
    return replace(case, plan=plan), micro_batch


def _selective_checkpointing(case: Case, micro_batch: int) -> Tried | None:
    """A fused kernel keeps no scores: nothing to save."""
    if case.plan.attention != "naive" or case.plan.checkpointing != "none":
        return None
    return replace(case, plan=replace(case.plan, checkpointing="selective")), micro_batch


def _one_sequence(case: Case, micro_batch: int) -> Tried | None:
    return None if micro_batch == 1 else (case, 1)


def _eight_bit(case: Case, micro_batch: int) -> Tried | None:
    own, other = OPTIMIZERS[case.optimizer_name], OPTIMIZERS["adamw-8bit"]
    if own.state + 2 * own.weights <= other.state + 2 * other.weights:  # bf16 weights need less in total
        return None
    return replace(case, optimizer="adamw-8bit"), micro_batch


def _precision(name: str, instead_of: tuple[str, ...]) -> Callable[[Case, int], Tried | None]:
    def apply(case: Case, micro_batch: int) -> Tried | None:
        if inference_precision(case.plan, case.inference) not in instead_of:
            return None
        return replace(case, inference=name), micro_batch

    return apply


def _sharded(replicas: int) -> Callable[[Case, int], Tried]:
    def apply(case: Case, micro_batch: int) -> Tried:
        layout = case.layout or Layout(gpus=1)
        gpus = replicas * layout.tp * layout.pp
        return replace(case, layout=replace(layout, gpus=gpus, replicas=1), zero=3), micro_batch

    return apply
