"""What a tuner may change: the groups of the one table of rungs, as far as they apply here, and the micro batch.

    space = open_space(workload, hardware, allow="rounding")
    space.knobs                      # (Knob(name="flash", choices=(None, "flash", "cudnn-attention")), ...)
    space.start()                    # where the usual rungs and the predictions say to begin
    space.change(recipe, knob, "cudnn-attention")

Rungs that replace one another are the choices of one knob; every other rung is a knob of its own, on or off. There is
no second list: a new rung in `rungs/ladder.py` is a new choice here. How several ranks share a step is a knob that
always has a choice: `ddp`, unless it does not fit. The published model is not up for choice: a head that was published
tied stays tied, since the tokens per second of two models are not comparable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from redline.core.errors import unknown_name
from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.traced import Traced
from redline.core.units import human_bytes
from redline.core.values import to_json
from redline.core.workload import BUILT_IN, Workload
from redline.predict.fitting import Case, TracedCase, case_of
from redline.predict.parallel import divisors
from redline.predict.roofline import Prediction, predict_step, reachable, sheet_peaks
from redline.rungs import LADDER, Maths, Rung, find_rung, group_of, plan_of, published_rungs, usual_rungs, why_not
from redline.rungs.ladder import cuts_of, in_order, why_not_among
from redline.rungs.parallel import DDP
from redline.search.batch_size import HEADROOM
from redline.search.ranks import not_measured, rate_of_ranks, refused_beside, usual_way

# What may win: the promises of the rungs a recipe may hold (ALLOW), and the verdicts it may have (VERDICTS).
ALLOW = {
    "bit-exact": (Maths.BIT_EXACT,),
    "rounding": (Maths.BIT_EXACT, Maths.ROUNDING),
    "changes-maths": tuple(Maths),
}
VERDICTS = {"bit-exact": ("same",), "rounding": ("same", "rounding"), "changes-maths": ("same", "rounding", "changed")}
# Plan fields that compiled code does not depend on.
NOT_COMPILED = ("optimizer", "loader_workers", "read_loss_every", "expandable_segments")
EFFICIENT = 0.98  # share of the highest predicted rate: start at the smallest size that reaches it, to save time
ROUGHLY = 2  # times the memory limit: where a rough prediction refuses
WORTH_A_CHANGE = 0.005  # a prediction must promise more than this to depart from the usual rungs


@dataclass(frozen=True, kw_only=True)
class Knob:
    name: str
    """The group's first rung."""
    choices: tuple[str | None, ...]
    """Rungs, and None for none of them."""


@dataclass(frozen=True, kw_only=True)
class Space:
    workload: Workload
    hardware: Hardware
    knobs: tuple[Knob, ...]
    published: tuple[str, ...]
    """Rungs in every recipe that make the model the published one."""
    cuts: tuple[str, ...] = ()
    """Rungs in every recipe for the layout's degrees, which are not up for choice."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Rungs that are not choices, with the reason."""
    memory_limit: int | None = None
    """Bytes a recipe may take, predicted or measured; None if unknown."""
    micro_batch: int | None = None
    """The only micro batch to consider; None: searched."""
    global_batch: int | None = None
    """Sequences per update; the micro batch must divide a rank's part of them."""
    # Caches: a search asks for the same values thousands of times.
    _fitting: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _bytes: dict[Recipe, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _largest: dict[tuple[str, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rates: dict[Recipe, float | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def choice_of(self, rungs: Sequence[str], knob: Knob) -> str | None:
        return next((choice for choice in knob.choices if choice is not None and choice in rungs), None)

    def change(self, recipe: Recipe, knob: Knob, choice: str | None) -> Recipe | None:
        """Return the recipe with this choice, without rungs that needed something the change removed. None if the
        choice itself does not apply beside the others."""
        others = [name for name in recipe.rungs if name not in knob.choices]
        wanted = [*others, *([choice] if choice is not None else [])]
        rungs = self._applying(wanted)
        if choice is not None and choice not in rungs:
            return None
        return replace(recipe, rungs=rungs)

    def _applying(self, wanted: Collection[str]) -> tuple[str, ...]:
        """Return the wanted rungs in ladder order, without those that do not apply beside the rest."""
        names = frozenset(wanted)
        if names not in self._fitting:
            rungs = in_order(names)
            fitting = tuple(name for name in rungs if self._refusal(name, rungs) is None)
            if self.ways and not set(fitting) & set(self.ways):
                # Ranks must share a step in some way, and the layout's usual way goes with every choice.
                fitting = (*fitting, usual_way(self.hardware.arranged))
            self._fitting[names] = rungs if fitting == rungs else self._applying(fitting)
        return self._fitting[names]

    @property
    def ways(self) -> tuple[str, ...]:
        """How several ranks may share a step, the usual way first; empty for one process."""
        knob = next((knob for knob in self.knobs if knob.name == DDP), None)
        return () if knob is None else tuple(choice for choice in knob.choices if choice is not None)

    def shares_more(self, recipe: Recipe, changed: Recipe) -> bool:
        """True for a change to a way in which a rank holds less and sends more: worth a try if memory is short."""
        before, after = (next((way for way in self.ways if way in one.rungs), "") for one in (recipe, changed))
        return before != after and after != DDP

    def _refusal(self, name: str, rungs: Sequence[str]) -> str | None:
        return why_not_among(name, rungs, self.workload, self.hardware)

    def baseline(self) -> Recipe:
        """Return the published model and nothing else, at the workload's micro batch or at what fits."""
        shared = [*self.cuts, *self.ways[:1]]
        rungs = self._applying([*self.published, *shared]) if shared else self.published
        recipe = Recipe(rungs=rungs, micro_batch=self.micro_batch or self.workload.micro_batch)
        return replace(recipe, micro_batch=self._size_near(recipe, recipe.micro_batch))

    def start(self) -> Recipe:
        """Return the usual rungs, with knobs turned as long as that is predicted to be faster."""
        offered = {choice for knob in self.knobs for choice in knob.choices} | set(self.published)
        usual = [name for name in usual_rungs(self.workload, self.hardware) if name in offered]
        size = self.baseline().micro_batch
        starts = [
            self.efficient_size(
                Recipe(rungs=self._applying([*usual, *self.published, *self.cuts, *way]), micro_batch=size)
            )
            for way in ([[way] for way in self.ways] or [[]])
        ]
        # Take the first way to share that is predicted to fit: later ones hold less and send more.
        recipe = next((one for one in starts if self.refuses(one) is None), starts[0])
        while (better := self._best_predicted(recipe)) is not None:
            recipe = better
        return self.efficient_size(recipe)

    def _best_predicted(self, recipe: Recipe) -> Recipe | None:
        here = self.predicted_rate(recipe)
        if here is None:
            return None
        rates = {
            changed: self.predicted_rate(changed) or 0.0
            for changed in self.neighbours(recipe)
            if self.refuses(changed) is None and not self.shares_more(recipe, changed)
        }
        best = max(rates, key=lambda changed: rates[changed], default=recipe)
        return best if rates.get(best, 0.0) > (1 + WORTH_A_CHANGE) * here else None

    def neighbours(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield every recipe with one knob turned, at the same micro batch."""
        for knob in self.knobs:
            for choice in knob.choices:
                changed = self.change(recipe, knob, choice)
                if changed is not None and changed != recipe:
                    yield changed

    def chosen(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the rungs that a recipe could do without, in ladder order."""
        needed = {*self.published, *self.cuts, *self.ways}
        return tuple(name for name in recipe.rungs if name not in needed)

    def only(self, recipe: Recipe, chosen: Collection[str]) -> Recipe:
        """Return the recipe with no more than these of its chosen rungs, at a smaller size if it would not fit."""
        rungs = self._applying([name for name in recipe.rungs if name in chosen or name not in self.chosen(recipe)])
        reduced = replace(recipe, rungs=rungs)
        return replace(reduced, micro_batch=self._size_near(reduced, reduced.micro_batch))

    def recipes(self, micro_batch: int) -> list[Recipe]:
        """Return every possible recipe at this size."""
        every = itertools.product(*(knob.choices for knob in self.knobs))
        rungs = [self._applying([*self.published, *self.cuts, *(one for one in chosen if one)]) for chosen in every]
        return [Recipe(rungs=names, micro_batch=micro_batch) for names in dict.fromkeys(rungs)]

    # memory

    def refuses(self, recipe: Recipe) -> str | None:
        """Return why a recipe cannot be chosen, as far as predictions show; None if it may run."""
        if self.memory_limit is None or self.refused_above is None:
            return None
        total = self.predicted_bytes(recipe)
        if total <= self.refused_above:
            return None
        return f"predicted to take {human_bytes(total)} of the {human_bytes(self.memory_limit)} it may"

    @property
    def predicts_roughly(self) -> bool:
        """True for models that are not built in: only the built-in model's memory is predicted tensor by tensor."""
        return self.workload.source != BUILT_IN

    @property
    def refused_above(self) -> int | None:
        """Predicted bytes above which a recipe is not tried. A rough prediction must be far over the limit, or it would
        refuse what fits."""
        if self.memory_limit is None:
            return None
        return ROUGHLY * self.memory_limit if self.predicts_roughly else self.memory_limit

    def predicted_bytes(self, recipe: Recipe) -> int:
        if recipe not in self._bytes:
            memory = self._case(recipe).memory(recipe.micro_batch)
            # A CPU's process has neither a CUDA context nor an allocator that keeps what it freed.
            self._bytes[recipe] = memory.total if self.hardware.kind == "cuda" else memory.allocated
        return self._bytes[recipe]

    def largest(self, recipe: Recipe) -> int | None:
        """Return the largest micro batch predicted to fit: 0 if none fits, None if the limit is unknown."""
        if self.memory_limit is None:
            return None
        if recipe.rungs not in self._largest:
            case = self._case(recipe)
            least = case.memory(1)
            extra = 0 if self.hardware.kind == "cuda" else least.total - least.allocated  # as in `predicted_bytes`
            self._largest[recipe.rungs] = case.largest(self.memory_limit + extra)
        return self._largest[recipe.rungs]

    def _case(self, recipe: Recipe) -> Case | TracedCase:
        return case_of(self.workload.shape, plan_of(recipe.rungs), self.hardware.arranged)

    # sizes

    def efficient_size(self, recipe: Recipe) -> Recipe:
        """Return the recipe at the smallest micro batch predicted to be about as fast as any. Without a prediction it
        keeps its size, reduced if it would not fit."""
        if self.micro_batch is not None:
            return recipe
        rates = {size: self.predicted_rate(replace(recipe, micro_batch=size)) for size in self._sizes(recipe)}
        known = {size: rate for size, rate in rates.items() if rate is not None}
        if not known:
            return replace(recipe, micro_batch=self._size_near(recipe, recipe.micro_batch))
        enough = EFFICIENT * max(known.values())
        return replace(recipe, micro_batch=min(size for size, rate in known.items() if rate >= enough))

    def smaller(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe at half the size, or the next below that the global batch allows; None at one sequence."""
        half = recipe.micro_batch // 2
        sizes = [size for size in self._divisors if size <= half] if self._divisors else [half]
        return replace(recipe, micro_batch=max(sizes)) if sizes and max(sizes) >= 1 else None

    def larger(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe at twice the size, or as near to that as fits; None if nothing larger fits."""
        most = self.largest(recipe)
        room = 2 * recipe.micro_batch if most is None else min(2 * recipe.micro_batch, most)
        sizes = [size for size in self._divisors if size <= room] if self._divisors else [room]
        return replace(recipe, micro_batch=max(sizes)) if sizes and max(sizes) > recipe.micro_batch else None

    def _sizes(self, recipe: Recipe) -> list[int]:
        """Return the powers of two that fit, or the divisors of the global batch that do."""
        most = self.largest(recipe)
        if most is None or most < 1:
            return []
        sizes = self._divisors or [2**power for power in range(most.bit_length())]
        return [size for size in sizes if size <= most]

    def _size_near(self, recipe: Recipe, size: int) -> int:
        """Return the largest size up to this one that is predicted to fit and divides the global batch."""
        if self.micro_batch is not None:
            return self.micro_batch
        most = self.largest(recipe)
        room = size if most is None else max(1, min(size, most))
        return max((one for one in self._divisors if one <= room), default=room) if self._divisors else room

    @cached_property
    def _divisors(self) -> tuple[int, ...]:
        return () if self.global_batch is None else divisors(self.global_batch // self.hardware.arranged.data)

    # speed

    def predict(self, recipe: Recipe) -> Prediction | None:
        """Return the roofline of one device's step; None if the device's peaks are unknown or the model was traced."""
        shape = self.workload.shape
        device, plan = self.hardware.device, plan_of(recipe.rungs)
        sheet = None if device is None else sheet_peaks(plan, device)
        if device is None or sheet is None or isinstance(shape, Traced):
            return None
        return predict_step(
            shape,
            plan,
            micro_batch=recipe.micro_batch,
            sheet=sheet,
            reached=reachable(plan, device),
        )

    def predicted_rate(self, recipe: Recipe) -> float | None:
        if recipe not in self._rates:
            self._rates[recipe] = self._predicted_rate(recipe)
        return self._rates[recipe]

    def _predicted_rate(self, recipe: Recipe) -> float | None:
        if self.hardware.ranks > 1:
            plan = plan_of(recipe.rungs)
            return rate_of_ranks(self.workload.shape, plan, recipe.micro_batch, self.hardware)
        prediction = self.predict(recipe)
        return None if prediction is None else prediction.expected.tokens_per_second


def open_space(
    workload: Workload,
    hardware: Hardware,
    *,
    allow: str = "rounding",
    rungs: Collection[str] | None = None,
    without: Collection[str] = (),
    memory_limit: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> Space:
    """Return the search space. `rungs`: only these are choices; `without`: these are not."""
    if allow not in ALLOW:
        raise unknown_name("class of maths to allow", allow, ALLOW)
    published, layout = published_rungs(workload), hardware.arranged
    cuts, way = tuple(cuts_of((), layout)), usual_way(layout)
    reasons: dict[str, str] = {}
    for rung in LADDER[1:]:
        reason = _why_not(rung, workload, hardware, allow)
        chosen = rungs is None or rung.name in (*rungs, *cuts, way)  # ranks keep their usual way
        if reason is None and (rung.name in without or not chosen):
            reason = "left out by request"
        if reason is not None and rung.name not in published:
            reasons[rung.name] = reason
    limit = memory_limit
    if limit is None and hardware.memory_bytes is not None:
        limit = math.floor((1 - HEADROOM) * hardware.memory_bytes)
    return Space(
        workload=workload,
        hardware=hardware,
        knobs=tuple(_knobs([rung for rung in LADDER[1:] if rung.name not in {*reasons, *published, *cuts}], layout)),
        published=published,
        cuts=cuts,
        left_out=reasons,
        memory_limit=limit,
        micro_batch=micro_batch,
        global_batch=global_batch,
    )


def _knobs(rungs: Sequence[Rung], layout: Layout) -> Iterator[Knob]:
    for name in dict.fromkeys(group_of(rung) for rung in rungs):
        choices = tuple(rung.name for rung in rungs if group_of(rung) == name)
        yield Knob(name=name, choices=choices if name == DDP else (None, *choices))
    if layout.data > 1 and not any(group_of(rung) == DDP for rung in rungs):
        yield Knob(name=DDP, choices=(usual_way(layout),))  # even if left out by request


def _why_not(rung: Rung, workload: Workload, hardware: Hardware, allow: str) -> str | None:
    """Return why a rung is not a choice here, or None."""
    if rung.maths not in ALLOW[allow]:
        return f"{rung.maths.value}, and --allow is {allow}"
    if rung.stand_in and rung.instead_of is not None:
        kept = find_rung(rung.instead_of)
        if _refused_everywhere(kept, workload, hardware) is None:
            return f"stands in for {kept.name} where that does not apply"
    layout = hardware.arranged
    every = [*cuts_of((), layout), *([] if layout.replicas == 1 else [usual_way(layout)])]  # ddp goes with all rungs
    onto = [name for name in every if group_of(find_rung(name)) != group_of(rung)]
    return (
        not_measured(rung.name, layout)
        or _refused_everywhere(rung, workload, hardware)
        or refused_beside(rung, onto, workload, hardware)
    )


def _refused_everywhere(rung: Rung, workload: Workload, hardware: Hardware) -> str | None:
    """Return why no recipe has a place for a rung, or None if one has: with the usual rungs, alone, or with one
    other."""
    usual = plan_of(name for name in usual_rungs(workload, hardware) if group_of(find_rung(name)) != group_of(rung))
    plans = [usual, Plan(), *(other.apply(Plan()) for other in LADDER)]
    reasons = [why_not(rung, workload, hardware, plan) for plan in plans]
    return None if None in reasons else reasons[0]


def compiled_part(recipe: Recipe) -> dict[str, Any]:
    """Return what compiled code depends on: recipes that agree in it, for equal shapes, compile the same code."""
    plan = {name: value for name, value in to_json(plan_of(recipe.rungs)).items() if name not in NOT_COMPILED}
    return {**plan, "micro_batch": recipe.micro_batch}
