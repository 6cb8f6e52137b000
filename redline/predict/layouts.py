"""A step on many GPUs: the memory, traffic and time of each, and which layout to choose.

    step = predict_parallel(case, fabric, peaks)         # case.layout says how the GPUs share the step
    step.tokens_per_second, step.efficiency, step.time.exposed_seconds
    recommend(Search(case=case, fabric=fabric, gpus=64, memory_bytes=80 * 1024**3, global_batch=512, peaks=peaks)).best

The work of one GPU is the roofline of its piece: `piece_of` makes a model of the heads, the MLP width, the vocabulary
rows and the layers that the GPU holds. predict/memory.py predicts memory and predict/communication.py traffic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from redline.core.devices import Device
from redline.core.errors import UserError
from redline.core.hardware import MeasuredPeaks
from redline.core.interconnects import Interconnect
from redline.core.plan import Plan
from redline.core.units import counted
from redline.core.values import to_json
from redline.core.workload import Shape
from redline.predict.activations import Rank
from redline.predict.communication import (
    Collective,
    Compute,
    Fabric,
    StepTime,
    bubble,
    sent_bytes,
    step_time,
    traffic,
    usual_model,
    wait_seconds,
)
from redline.predict.fitting import Case
from redline.predict.flops import parameters
from redline.predict.memory import ZERO_STAGES, Memory
from redline.predict.operations import Operation
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout, divisors, layout_for_batch, multiples_near, possible_cuts
from redline.predict.roofline import TYPICAL, Peaks, Timed, at_most, reachable, roofline, sheet_peaks, typical

SAME_SPEED = 0.05  # the model is no closer to the published series, so less is no reason to cut more
SHOWN_OTHERS = 3
# Tokens per step of models with fewer parameters than the limit (arXiv 2005.14165, table 2.1: 0.5M up to 760M
# parameters, 1M up to 2.7B, 2M up to 13B, 3.2M for 175B); the limits lie between the rows of that table.
USUAL_TOKENS = ((1e9, 0.5e6), (4e9, 1e6), (40e9, 2e6), (math.inf, 3.2e6))
MUCH_WAITING = 0.1  # of a step
SHORTEST_PUBLISHED = 0.4  # seconds of a step in the series to which the wait is fitted
DOES_NOT_FIT = "it does not fit"
MOST_SIZES = 16  # micro batches tried per layout


@dataclass(frozen=True, kw_only=True)
class ParallelStep:
    """One layout. Traffic and time are those of the slowest pipeline stage; without a time, traffic is that of the
    stage that sends most."""

    layout: Layout
    zero: int
    sequence: int
    memory: Memory
    traffic: tuple[Collective, ...]
    time: StepTime | None
    reason: str | None
    """Why there is no time."""
    alone_seconds: float | None
    """Seconds of the same micro batches on one GPU that holds the whole model, even if it would not fit."""
    plan: Plan
    """What each GPU runs."""
    work_seconds: float | None = None
    """Seconds without traffic: the work of the stage that has most, and its bubble. None if the peaks are unknown."""

    @property
    def tokens(self) -> int:
        return self.layout.global_batch * self.sequence

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.tokens / self.time.seconds

    @property
    def efficiency(self) -> float | None:
        """Tokens per second per GPU, relative to one GPU alone."""
        if self.time is None or self.alone_seconds is None:
            return None
        return self.alone_seconds / (self.layout.tp * self.layout.pp * self.time.seconds)

    @property
    def words(self) -> str:
        layout = self.layout
        return f"DP {layout.dp} x TP {layout.tp} x PP {layout.pp}, ZeRO {self.zero}, micro batch {layout.micro_batch}"


def predict_parallel(case: Case, fabric: Fabric, peaks: Peaks | None, reason: str | None = None) -> ParallelStep:
    """Predict the step of `case.layout`. `reason`: why there are no peaks."""
    layout = case.layout or Layout(gpus=1)
    bench = None if peaks is None else Bench(peaks=peaks)
    return _predict(replace(case, layout=layout), case.memory(layout.micro_batch), fabric, bench, reason)


def _predict(case: Case, memory: Memory, fabric: Fabric, bench: Bench | None, reason: str | None) -> ParallelStep:
    assert case.layout is not None
    layout = case.layout
    ranks = list(_stages(case, layout))
    sent = [traffic(rank, fabric.gpus_per_node) for rank in ranks]
    missing = reason if bench is None else fabric.missing_link(itertools.chain.from_iterable(sent))
    heaviest, time, alone = max(sent, key=lambda one: sum(sent_bytes(one).values())), None, None
    works = [] if bench is None else [bench.work(rank) for rank in ranks]
    if bench is not None and missing is None:
        times = [step_time(work, one, fabric, usual_model(), layout) for work, one in zip(works, sent, strict=True)]
        time, heaviest = max(zip(times, sent, strict=True), key=lambda pair: pair[0].seconds)
        alone = bench.alone(case.shape, case.plan, layout)
    return ParallelStep(
        layout=layout,
        zero=case.zero,
        sequence=case.shape.sequence,
        memory=memory,
        traffic=heaviest,
        time=time,
        reason=missing,
        alone_seconds=alone,
        plan=case.plan,
        work_seconds=max((step_time(work, (), fabric, usual_model(), layout).seconds for work in works), default=None),
    )


def expected_peaks(plan: Plan, device: Device, measured: MeasuredPeaks | None) -> Peaks | None:
    """Return the peaks that a step will reach, as in `predict_step`; None if the device lacks the plan's precision."""
    sheet = sheet_peaks(plan, device)
    if sheet is None:
        return None
    reached = reachable(plan, device, measured)
    return typical(sheet) if reached is None else at_most(reached, sheet)


# one GPU's work


def _stages(case: Case, layout: Layout) -> Iterator[Rank]:
    """Yield the only stage; or the first, one from the middle if there is one, and the last."""
    ends = [(True, True)] if layout.pp == 1 else [(True, False), (False, False), (False, True)]
    for first, last in ends:
        if layout.pp == 2 and not first and not last:
            continue
        yield Rank(
            shape=case.shape,
            plan=case.plan,
            micro_batch=layout.micro_batch,
            layout=layout,
            zero=case.zero,
            optimizer=find_optimizer(case.optimizer_name),
            first=first,
            last=last,
        )


def piece_of(shape: Shape, plan: Plan, layout: Layout) -> tuple[Shape, Plan]:
    """Return the model that one GPU computes. TP leaves it whole heads and a part of the MLP and of the vocabulary, all
    at the full width of the stream; PP leaves it its stage's layers, and one table at each end."""
    tp, pp = layout.tp, layout.pp
    windowed = shape.windowed_layers
    piece = replace(
        shape,
        layers=shape.layers // pp,
        heads=shape.heads // tp,
        kv_heads=shape.key_value_heads // tp,
        head_dim=shape.head_width,
        d_ff=shape.d_ff // tp,
        vocab=-(-plan.vocab_rows(shape.vocab) // tp),
        windowed_layers=None if windowed is None else max(1, round(windowed / pp)),
    )
    return piece, replace(plan, vocab_multiple=1, tied=plan.tied or pp > 1)  # the rows are padded already


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Times pieces at given peaks, each piece once: layouts that differ only in ZeRO compute the same."""

    peaks: Peaks
    known: dict[tuple[Shape, Plan, int, int], tuple[Timed, ...]] = field(default_factory=dict)

    def work(self, rank: Rank) -> Compute:
        """Return the seconds of a rank's own work. ZeRO divides the update among the GPUs that share one copy."""
        shape, plan = piece_of(rank.shape, rank.plan, rank.layout)
        rows = [row for row in self._rows(shape, plan, rank.layout) if _held(row.operation, rank)]
        seconds = {name: sum(row.seconds for row in rows if row.operation.direction in names) for name, names in PASSES}
        return Compute(**{**seconds, "update": seconds["update"] / (rank.layout.shards if rank.zero else 1)})

    def alone(self, shape: Shape, plan: Plan, layout: Layout) -> float:
        return sum(row.seconds for row in self._rows(shape, plan, layout))

    def _rows(self, shape: Shape, plan: Plan, layout: Layout) -> tuple[Timed, ...]:
        key = (shape, plan, layout.micro_batch, layout.accumulation)
        if key not in self.known:
            self.known[key] = roofline(
                shape,
                plan,
                micro_batch=layout.micro_batch,
                accumulation=layout.accumulation,
                peaks=self.peaks,
                assumptions=TYPICAL,
            ).rows
        return self.known[key]


PASSES = (("forward", ("forward",)), ("backward", ("backward", "recompute")), ("update", ("update",)))


def _held(operation: Operation, rank: Rank) -> bool:
    """True if the rank's stage does this work: the first has the embedding, the last has head and loss."""
    if operation.part != "rest":
        return True
    if operation.name.startswith(("head", "loss")):
        return rank.last
    return rank.first or operation.name != "embedding"


# which layout


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    best: ParallelStep
    others: tuple[ParallelStep, ...]
    """The next best, fastest first."""
    tried: int
    """How many layouts divide evenly: cuts times ZeRO stages."""
    fitting: int
    undivided: int
    """How many cuts of these GPUs the model, the node, the global batch or the trainer does not allow."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """The layouts to compare: all that cut these GPUs and give this global batch."""

    case: Case
    """The search chooses its layout and ZeRO stage."""
    fabric: Fabric
    gpus: int
    memory_bytes: int
    """Memory of one GPU."""
    global_batch: int
    micro_batch: int | None = None
    """None: each layout uses its best."""
    peaks: Peaks | None = None
    reason: str | None = None
    """Why there are no peaks."""
    plan_of: Callable[[int, int, int], Plan | None] | None = None
    """Returns the trainer's plan for a TP, PP and ZeRO stage, or None if the trainer cannot run it. Without `plan_of`
    all layouts use the case's own plan."""

    def planned(self, tp: int, pp: int, zero: int) -> Case | None:
        plan = self.case.plan if self.plan_of is None else self.plan_of(tp, pp, zero)
        return None if plan is None else replace(self.case, plan=plan, zero=zero)

    def sizes(self, dp: int) -> tuple[int, ...]:
        """Return micro batches that give the global batch, smallest first, thinned out if there are many."""
        if self.global_batch % dp:
            return ()
        sizes = divisors(self.global_batch // dp)
        if self.micro_batch is not None:
            return (self.micro_batch,) if self.micro_batch in sizes else ()
        return sizes[:: -(-len(sizes) // MOST_SIZES)]

    def cases(self, tp: int, pp: int, zero: int) -> Iterator[tuple[Case, Memory]]:
        """Yield the case with each micro batch that fits and could be the fastest; if none fits, with the smallest."""
        fits, sizes, planned = False, self.sizes(self.gpus // (tp * pp)), self.planned(tp, pp, zero)
        for size in reversed(sizes) if planned else ():
            assert planned is not None
            layout = layout_for_batch(
                gpus=self.gpus, tp=tp, pp=pp, micro_batch=size, global_batch=self.global_batch, shape=self.case.shape
            )
            case = replace(planned, layout=layout)
            memory = case.memory(size)
            fits_now = memory.total <= self.memory_bytes
            if fits_now or (size == sizes[0] and not fits):
                yield case, memory
            fits |= fits_now
            if fits and pp == 1:
                return  # the largest is the fastest; only in a pipeline do smaller ones make a smaller bubble


def usual_global_batch(shape: Shape, gpus: int, micro_batch: int = 1) -> int:
    """Return the default number of sequences per step: about as many tokens as GPT-3's models of that size used, and a
    power of two of micro batches per GPU."""
    count = parameters(shape).total
    tokens = next(tokens for most, tokens in USUAL_TOKENS if count < most)
    passes = tokens / (shape.sequence * gpus * micro_batch)
    return int(gpus * micro_batch * 2 ** max(0, round(math.log2(passes))))


def recommend(search: Search) -> Recommendation:
    """Recommend the layout predicted to be fastest among those that fit; of equally fast ones, the one that cuts least.
    If none fits, the one that needs least memory."""
    tried = list(_tried(search))
    if not tried:
        raise _no_layout(search)
    fitting = [step for step in tried if step.memory.total <= search.memory_bytes]
    ranked = sorted(fitting, key=_fastest_first) or sorted(tried, key=lambda step: step.memory.total)
    best = _least_cut(ranked) if fitting else ranked[0]
    cuts = {(step.layout.tp, step.layout.pp) for step in tried}
    return Recommendation(
        best=best,
        others=tuple(step for step in ranked if step is not best)[:SHOWN_OTHERS],
        tried=len(tried),
        fitting=len(fitting),
        undivided=len(possible_cuts(None, search.gpus)) - len(cuts),
        reason=_why(best, ranked[0], tried, fitting),
    )


def _no_layout(search: Search) -> UserError:
    """Return the error, which proposes the nearest batches that some cut of these GPUs allows."""
    size, wanted = search.micro_batch or 1, search.global_batch
    cuts = possible_cuts(search.case.shape, search.gpus, search.fabric.gpus_per_node)
    ranks = {search.gpus // (t * p) for t, p in cuts if any(search.planned(t, p, zero) for zero in ZERO_STAGES)}
    near = {batch for dp in ranks for batch in multiples_near(wanted, dp * size)}
    below, above = (batch for batch in near if batch < wanted), (batch for batch in near if batch > wanted)
    batches = [str(batch) for batch in (max(below, default=None), min(above, default=None)) if batch is not None]
    into = " or ".join(map(str, sorted(ranks)))
    return UserError(
        f"a global batch of {wanted} is not a number of passes of any layout of {search.gpus} GPUs",
        f"a pass takes {counted(size, 'sequence')} on every data-parallel rank; with this model there can be {into}",
        f"set --global-batch to {' or '.join(batches)}",
    )


def best_that_fits(search: Search) -> ParallelStep | None:
    """Return the layout that `recommend` would choose; None if nothing fits."""
    fitting = [step for step in _tried(search) if step.memory.total <= search.memory_bytes]
    return _least_cut(sorted(fitting, key=_fastest_first)) if fitting else None


def _tried(search: Search) -> Iterator[ParallelStep]:
    """Yield each cut and ZeRO stage once, with its best micro batch."""
    bench = None if search.peaks is None else Bench(peaks=search.peaks)
    for tp, pp in possible_cuts(search.case.shape, search.gpus, search.fabric.gpus_per_node):
        for zero in ZERO_STAGES if search.gpus > tp * pp else (0,):
            steps = [
                _predict(case, memory, search.fabric, bench, search.reason)
                for case, memory in search.cases(tp, pp, zero)
            ]
            if steps:
                yield min(steps, key=_best_size)


def _best_size(step: ParallelStep) -> tuple[float, float]:
    """Sort key for the micro batches of one cut. Small ones have a small bubble and slow matmuls; that much is known
    without a link."""
    idle = bubble(step.layout)
    return -(step.tokens_per_second or 0), 1 / (1 - idle) if step.work_seconds is None else step.work_seconds


def _fastest_first(step: ParallelStep) -> tuple[float, ...]:
    """Sort key: the fastest first; if no speed is known, the least cut first."""
    return (-(step.tokens_per_second or 0), *_cuts(step))


def _cuts(step: ParallelStep) -> tuple[int, int, int]:
    return step.layout.tp, step.layout.pp, step.zero


def _least_cut(ranked: list[ParallelStep]) -> ParallelStep:
    fastest = ranked[0].tokens_per_second or 0
    return min((step for step in ranked if (step.tokens_per_second or 0) >= (1 - SAME_SPEED) * fastest), key=_cuts)


# why, in words


def _why(best: ParallelStep, fastest: ParallelStep, tried: list[ParallelStep], fitting: list[ParallelStep]) -> str:
    counts = f"{counted(len(tried), 'layout')} can be cut and {len(fitting)} of them fit{'s' * (len(fitting) == 1)}"
    if not fitting:
        return f"{counts}: this one needs least memory"
    if best.tokens_per_second is None:
        first = f"{counts}; no speed is known, so this is the one that cuts least"
    elif best is fastest:
        first = f"{counts}; this is the fastest"
    else:
        first = f"{counts}; this is within {SAME_SPEED:.0%} of the fastest ({fastest.words}) and cuts less"
    return ". ".join([first, *(_why_so_much(name, pick, best, tried, fitting) for name, pick in AXES)])


AXES: tuple[tuple[str, Callable[[ParallelStep], int]], ...] = (
    ("TP", lambda step: step.layout.tp),
    ("PP", lambda step: step.layout.pp),
    ("ZeRO", lambda step: step.zero),
)
# By axis: the degree at which nothing is cut, and what that means.
LEAST = {
    "TP": (1, "a GPU holds whole layers"),
    "PP": (1, "a GPU holds all layers"),
    "ZeRO": (0, "each replica holds all state"),
}


def _why_so_much(
    name: str,
    pick: Callable[[ParallelStep], int],
    best: ParallelStep,
    tried: list[ParallelStep],
    fitting: list[ParallelStep],
) -> str:
    own, (least, meaning) = pick(best), LEAST[name]
    if own == least:
        return f"{name} {own}: {meaning}"
    idle = f", and its stages stand idle for {bubble(best.layout):.0%} of the passes" if name == "PP" else ""
    return f"{name} {own}: {_why_not_less(pick, own, best, tried, fitting)}{idle}"


def _why_not_less(
    pick: Callable[[ParallelStep], int],
    own: int,
    best: ParallelStep,
    tried: list[ParallelStep],
    fitting: list[ParallelStep],
) -> str:
    if not any(pick(step) < own for step in tried):
        return "less does not give this batch"
    less = [step for step in fitting if pick(step) < own]
    if not less:
        return "with less nothing fits"
    rival = min(less, key=_fastest_first).tokens_per_second
    if rival is None or best.tokens_per_second is None:
        return "with less another cut grows"
    return f"the best with less reaches {rival / best.tokens_per_second:.1%} of its speed"


# the document


def step_notes(step: ParallelStep) -> Iterator[str]:
    """Yield a note wherever the prediction goes beyond the data it was fitted to."""
    over_nodes = any(one.group.nodes > 1 for one in step.traffic)
    if step.time is not None and over_nodes and step.time.seconds < SHORTEST_PUBLISHED:
        yield (
            f"the wait between nodes is known from steps of {SHORTEST_PUBLISHED:g} s and more; in one this short it "
            "weighs more, and the speed is less certain (docs/parallel.md)"
        )
    waits = [one for one in step.traffic if wait_seconds(one, usual_model())]
    calls, waited = sum(one.calls for one in waits), sum(wait_seconds(one, usual_model()) for one in waits)
    if step.time is not None and waited > MUCH_WAITING * step.time.seconds:
        yield (
            f"{waited / step.time.seconds:.0%} of this step is waiting for the slowest node, {counted(calls, 'time')}: "
            "that was fitted on FSDP's calls and is taken for every other kind (docs/parallel.md)"
        )


def parallel_json(
    step: ParallelStep, fabric: Fabric, advice: Recommendation | None, fits: bool | None
) -> dict[str, Any]:
    """Return `parallel` of `estimate --json`; docs/parallel.md has the keys. A layout that does not fit has no rate;
    its `step` is how long a step would take if it did."""
    runs = fits is not False
    return {
        "layout": layout_json(step, fabric.gpus_per_node),
        "interconnect": {
            "inside": _link_json(fabric.links.inside),
            "between": _link_json(fabric.links.between),
            "model": to_json(usual_model()),
        },
        "collectives": [_collective_json(one, seconds) for one, seconds in _with_seconds(step)],
        "sent_bytes": sent_bytes(step.traffic),
        "step": None if step.time is None else _time_json(step.time),
        "bubble": bubble(step.layout),
        "tokens_per_second": step.tokens_per_second if runs else None,
        "tokens_per_second_per_gpu": _per_gpu(step) if runs else None,
        "scaling_efficiency": step.efficiency if runs else None,
        "reason": step.reason if runs else DOES_NOT_FIT,
        "recommendation": None if advice is None else _advice_json(advice, fabric.gpus_per_node),
    }


def layout_json(step: ParallelStep, gpus_per_node: int) -> dict[str, Any]:
    layout = step.layout
    return {
        "gpus": layout.gpus,
        "nodes": layout.gpus // gpus_per_node,
        "gpus_per_node": gpus_per_node,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "zero": step.zero,
        "replicas": layout.replicas,
        "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation,
        "global_batch": layout.global_batch,
    }


def _per_gpu(step: ParallelStep) -> float | None:
    return None if step.tokens_per_second is None else step.tokens_per_second / step.layout.gpus


def _link_json(link: Interconnect | None) -> dict[str, Any] | None:
    return None if link is None else {**to_json(link), "reached": link.reached}


def _with_seconds(step: ParallelStep) -> Iterator[tuple[Collective, float | None]]:
    seconds = [None] * len(step.traffic) if step.time is None else step.time.seconds_of
    return zip(step.traffic, seconds, strict=True)


def _collective_json(one: Collective, seconds: float | None) -> dict[str, Any]:
    return {
        "what": one.what,
        "kind": one.kind,
        "axis": one.axis,
        "during": one.during,
        "ranks": one.group.ranks,
        "nodes": one.group.nodes,
        "calls": one.calls,
        "bytes": one.bytes,
        "sent_bytes": one.sent,
        "overlaps": one.hides,
        "seconds": seconds,
    }


def _time_json(time: StepTime) -> dict[str, float]:
    return {
        "forward_seconds": time.compute.forward,
        "backward_seconds": time.compute.backward,
        "update_seconds": time.compute.update,
        "communication_seconds": time.communication_seconds,
        "hidden_seconds": time.hidden_seconds,
        "exposed_seconds": time.exposed_seconds,
        "bubble_seconds": time.bubble_seconds,
        "seconds": time.seconds,
    }


def row_json(step: ParallelStep, gpus_per_node: int, *, fits: bool = True) -> dict[str, Any]:
    return {
        "layout": layout_json(step, gpus_per_node),
        "memory_bytes": step.memory.total,
        "tokens_per_second": step.tokens_per_second if fits else None,
        "scaling_efficiency": step.efficiency if fits else None,
    }


def _advice_json(advice: Recommendation, gpus_per_node: int) -> dict[str, Any]:
    fits = advice.fitting > 0  # all rows fit, or none does
    return {
        "reason": advice.reason,
        "tried": advice.tried,
        "fitting": advice.fitting,
        "undivided": advice.undivided,
        "best": row_json(advice.best, gpus_per_node, fits=fits),
        "others": [row_json(step, gpus_per_node, fits=fits) for step in advice.others],
    }
