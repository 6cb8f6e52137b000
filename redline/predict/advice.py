"""Advice on a profile: what to do, largest gain first, in words and in seconds, each with the rung to take.

    advise(profile, shape=shape, plan=plan, micro_batch=16, candidates=candidates, rates=rates)
    -> (Advice(what="take flash", why="attention takes 41.2 ms of ...", gain_seconds=0.031, rung="flash"), ...)

The time with a rung is the measured time multiplied by a predicted ratio: for each pool of operations, the time that
the roofline expects with the rung over the time without. So a wrong peak cancels out to first order, and a pool that
the rung does not touch gains nothing. Idle time of a phase shrinks with the phase's launches as far as the host issues
them late, and with the number of kernels as far as the device itself pauses. Each gain is an estimate for that rung
alone; two rungs together gain less than the sum. To measure: `redline ladder --from RECIPE`.

If that leaves fewer than three items, bounds follow: how far the kernels of a group fall short of the rates that the
machine reaches. Bounds say where time is lost, not how to save it, and are marked `at_most`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from redline.core.devices import Device
from redline.core.hardware import MeasuredPeaks
from redline.core.plan import Plan
from redline.core.profile import (
    ATTENTION,
    CONTRACTION,
    DATA_WAIT,
    ELEMENTWISE,
    IDLE,
    LOSS,
    MOVEMENT,
    NORMALISATION,
    OPTIMIZER,
    Profile,
)
from redline.core.traced import Traced
from redline.core.units import human_percent, human_seconds
from redline.core.workload import Shape
from redline.predict.idle import idle_gains, idle_of, keeps_up
from redline.predict.noise import noise_of_ratio, spread_error
from redline.predict.operations import Operation
from redline.predict.reach import Reach, fastest_seen, reach_of
from redline.predict.roofline import IDEAL, TYPICAL, Peaks, peaks_for, roofline

THINGS = 3  # bounds are added if rungs and lines give fewer items
LEAST_SHARE = 0.01  # of the step: less is within the measurement noise
IDLE_SHARE = 0.05
NO_SYNC = "no-sync"
KERNELS_LOSE = replace(TYPICAL, gap_seconds=0.0)  # idle time is measured
MEMORY_BOUND = "memory-bound"  # fusing moves work between these groups, so they are weighed together
POOLS = {
    CONTRACTION: CONTRACTION,
    ATTENTION: ATTENTION,
    LOSS: LOSS,
    OPTIMIZER: OPTIMIZER,
    NORMALISATION: MEMORY_BOUND,
    ELEMENTWISE: MEMORY_BOUND,
    MOVEMENT: MEMORY_BOUND,
}
POOL_NAMES = {
    CONTRACTION: "tensor contractions take",
    ATTENTION: "attention takes",
    LOSS: "the loss takes",
    OPTIMIZER: "the optimizer takes",
    MEMORY_BOUND: "normalisations, element-wise work and copies take",
    IDLE: "nothing runs for",
}
# By group: the change whose gain is bounded.
FASTER = {
    CONTRACTION: "faster tensor contractions",
    ATTENTION: "a faster attention kernel",
    NORMALISATION: "faster normalisations",
    ELEMENTWISE: "faster element-wise kernels",
    LOSS: "a faster loss kernel",
    OPTIMIZER: "a faster update",
    MOVEMENT: "faster copies",
}
# Why a rung helps, if its title alone does not say so.
REASONS = {
    "tf32": "fp32 matmuls leave the tensor cores unused",
    "bf16": "16-bit matmuls run at a multiple of the rate and move half the bytes",
    "fp16": "16-bit matmuls run at a multiple of the rate and move half the bytes",
    "compile": "every operator is a kernel of its own and its numbers cross the memory bus each time",
    "flash": "the T x T scores are written to memory and read back several times",
    "cudnn-attention": "another kernel for the same attention may be faster here",
    "padded-vocab": "rows of the head start at unaligned addresses, which tensor cores cannot load at full speed",
    "fused-adamw": "the update reads and writes every number several times, in kernels of one tensor each",
    "fused-loss": "the logits are copied, kept and read again for their gradient",
    "fused-backward": "gradients are read once more for every bias before them",
    "cuda-graphs": "the host launches kernels one by one and does not keep up",
}
HOST_KEEPS_UP = {"cuda-graphs": "the host keeps up; the device pauses before each kernel, less so in a recorded graph"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A rung that applies here and is not in the recipe, and the plan that includes it."""

    rung: str
    title: str
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that the machine reaches, from which ratios are computed."""

    matmul_tflops: Mapping[str, float]
    """TFLOP/s by precision."""
    bandwidth: float
    source: str
    reachable: bool = True
    """False if these are the best kernels of the profile itself: the machine may be faster, so they give no bound."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    what: str
    why: str
    gain_seconds: float | None
    """Seconds per step; None if unknown."""
    rung: str | None = None
    at_most: bool = False
    """True if `gain_seconds` is a bound, not an estimate: nothing here is known to achieve it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    profile: Profile
    shape: Shape | Traced
    plan: Plan
    micro_batch: int
    candidates: Sequence[Candidate]
    rates: Rates | None

    @property
    def step(self) -> float:
        return self.profile.step_seconds.median

    def candidate(self, rung: str) -> Candidate | None:
        return next((each for each in self.candidates if each.rung == rung), None)

    def share(self, seconds: float) -> str:
        return f"{human_seconds(seconds)} of {human_seconds(self.step)} ({human_percent(seconds / self.step, 0)})"


def advise(
    profile: Profile,
    *,
    shape: Shape | Traced,
    plan: Plan,
    micro_batch: int,
    candidates: Sequence[Candidate],
    rates: Rates | None,
) -> tuple[Advice, ...]:
    """Return advice, largest gain first, then advice without a known gain, then bounds if there are fewer than three
    items."""
    case = Case(profile=profile, shape=shape, plan=plan, micro_batch=micro_batch, candidates=candidates, rates=rates)
    found = [advice for rule in RULES for advice in rule(case)]
    worth = [each for each in found if each.gain_seconds is None or each.gain_seconds >= LEAST_SHARE * case.step]
    worth.sort(key=lambda each: -1.0 if each.gain_seconds is None else each.gain_seconds, reverse=True)
    return (*worth, *bounds(case, worth)[: max(0, THINGS - len(worth))])


def rates_of(profile: Profile, plan: Plan, device: Device | None, measured: MeasuredPeaks | None) -> Rates | None:
    """Return the rates measured here, else those that such a device is known to reach, else those of the profile's best
    kernels; None if the profile has none."""
    if measured is not None:
        source = f"redline hardware --measure, {measured.date[:10]}"
        return Rates(matmul_tflops=measured.matmul_tflops, bandwidth=measured.bandwidth, source=source)
    if device is not None:
        reached = {dtype: device.reachable_tflops(dtype) for dtype in device.peak_tflops}
        return Rates(matmul_tflops=reached, bandwidth=device.reachable_bandwidth, source=f"{device.label}, reachable")
    flops = [kernel.flops / kernel.seconds for kernel in profile.kernels if kernel.flops and kernel.seconds]
    moved = [kernel.bytes / kernel.seconds for kernel in profile.kernels if kernel.bytes and kernel.seconds]
    if not flops or not moved:
        return None
    return Rates(
        matmul_tflops={plan.usual_precision: max(flops) / 1e12},
        bandwidth=max(moved),
        source="the best kernels of this profile",
        reachable=False,
    )


# rungs


def rungs_to_take(case: Case) -> Iterator[Advice]:
    """Advise the rungs that gain, at most one per changed part of the plan: of two that change the same field, the one
    that gains more."""
    weighed = [(gains_of(case, each), each) for each in case.candidates]
    weighed.sort(key=lambda pair: -sum(pair[0].values()))
    changed: set[str] = set()
    for gains, candidate in weighed:
        fields = changed_fields(case.plan, candidate.plan)
        if fields & changed or sum(gains.values()) <= 0:
            continue
        changed |= fields
        yield rung_advice(case, candidate, gains)


def gains_of(case: Case, candidate: Candidate) -> dict[str, float]:
    """Return the seconds gained, by pool."""
    before, after = pools_of(case, case.plan), pools_of(case, candidate.plan)
    if before is None or after is None:
        return {}
    measured: dict[str, float] = defaultdict(float)
    for group, seconds in case.profile.by_group().items():
        if group in POOLS:
            measured[POOLS[group]] += seconds
    gains = {pool: measured[pool] * (1 - after.get(pool, 0.0) / before[pool]) for pool in before if before[pool] > 0}
    gains[IDLE] = sum(fewer_launches(case, candidate.plan).values())
    return {pool: gain for pool, gain in gains.items() if abs(gain) > 1e-12}


def pools_of(case: Case, plan: Plan) -> dict[str, float] | None:
    """Return the seconds that the roofline expects of each pool; None if no rate is known for the plan's precision, and
    for traced models, whose operations nobody described."""
    peaks = None if case.rates is None else _peaks(plan, case.rates)
    if peaks is None or isinstance(case.shape, Traced):
        return None
    lost = KERNELS_LOSE if case.profile.device == "cuda" else IDEAL  # kernel losses were seen on GPUs
    rows = roofline(case.shape, plan, micro_batch=case.micro_batch, peaks=peaks, assumptions=lost).rows
    pools: dict[str, float] = defaultdict(float)
    for row in rows:
        pools[pool_of(row.operation)] += row.seconds
    return dict(pools)


def _peaks(plan: Plan, rates: Rates) -> Peaks | None:
    return peaks_for(plan, rates.matmul_tflops, rates.bandwidth, rates.source)


def pool_of(operation: Operation) -> str:
    """Return the pool in which the profile counts an operation: the core of attention is one pool, whatever computes
    it, and so is the loss."""
    if operation.part == "core":
        return ATTENTION
    if operation.name.startswith("loss"):
        return LOSS
    return POOLS[operation.group]


def fewer_launches(case: Case, plan: Plan) -> dict[str, float]:
    """Return the seconds of idle time saved, by phase."""
    assert not isinstance(case.shape, Traced)  # `pools_of` returns None for one
    return idle_gains(case.profile, shape=case.shape, micro_batch=case.micro_batch, before=case.plan, after=plan)


def changed_fields(before: Plan, after: Plan) -> set[str]:
    """Return the names of the fields that differ. All fields that set the precision count as one, 'precision'."""
    changed = {
        field.name for field in dataclasses.fields(Plan) if getattr(before, field.name) != getattr(after, field.name)
    }
    if changed & {"matmul_precision", "autocast", "loss_scaling"}:
        changed = changed - {"matmul_precision", "autocast", "loss_scaling"} | {"precision"}
    return changed


def rung_advice(case: Case, candidate: Candidate, gains: Mapping[str, float]) -> Advice:
    pool = max(gains, key=lambda each: gains[each])
    groups = case.profile.by_group()
    spent = sum(groups[group] for group, of in POOLS.items() if of == pool)
    if pool == IDLE:
        idle = idle_of(case.profile)
        spent = sum(idle[phase] for phase, gain in fewer_launches(case, candidate.plan).items() if gain > 0)
    reason = REASONS.get(candidate.rung, candidate.title)
    if keeps_up(case.profile):
        reason = HOST_KEEPS_UP.get(candidate.rung, reason)
    return Advice(
        what=f"take {candidate.rung}",
        why=f"{POOL_NAMES[pool]} {case.share(spent)}: {reason}",
        gain_seconds=sum(gains.values()),
        rung=candidate.rung,
    )


# waiting


def data_wait(case: Case) -> Iterator[Advice]:
    waited = case.profile.by_group()[DATA_WAIT]
    workers = case.candidate("loader-workers")
    if waited > 0:
        yield Advice(
            what="take loader-workers" if workers else "make batches faster than the step takes them",
            why=f"the step waits for its batch for {case.share(waited)}",
            gain_seconds=waited,
            rung=None if workers is None else workers.rung,
        )


def communication(case: Case) -> Iterator[Advice]:
    """Communication between ranks that nothing hides. How much can be saved is unknown, so the gain is a bound."""
    sharing = case.profile.sharing
    if sharing is None:
        return
    if case.plan.tensor_parallel:
        what = "share layers among fewer ranks (--tensor), or give them more work: a larger micro batch"
    else:
        what = "send less often: a larger micro batch, or more of them to an update"
    late = sharing.straggler_seconds
    straggler = f"; the slowest rank alone is {human_seconds(late)} late" if late >= LEAST_SHARE * case.step else ""
    yield Advice(
        what=what,
        why=f"ranks wait for one another, and nothing else runs, for {case.share(sharing.exposed_seconds)}{straggler}",
        gain_seconds=sharing.exposed_seconds,
        at_most=True,
    )


def synchronisations(case: Case) -> Iterator[Advice]:
    """Idle time after the host waited for the device. Reading the loss every n steps leaves one wait in n steps."""
    idle = case.profile.sync_idle_seconds
    if idle <= 0:
        return
    found = [each for each in case.profile.findings if each.kind == "synchronisation"]
    lines = [each.where for each in found if each.rung is None and each.where]
    # A wait without a known line may be the recipe's own. The rung does not fix a user's lines.
    recipe = not lines or any(each.rung == NO_SYNC for each in found)
    rung = case.candidate(NO_SYNC) if recipe else None
    kept = 1 / rung.plan.read_loss_every if rung is not None and rung.plan.read_loss_every else 0.0
    todo = ([] if rung is None else [f"take {rung.rung}"]) + ([f"fix {', '.join(lines[:3])}"] if lines else [])
    yield Advice(
        what=" and ".join(todo) or "let the host wait for the device less often",
        why=f"the device runs dry for {case.share(idle)} while the host waits for it",
        gain_seconds=idle * (1 - kept),
        rung=None if rung is None else rung.rung,
    )


def idle_gaps(case: Case) -> Iterator[Advice]:
    """The other idle time, if no rung would save much of it by launching fewer kernels."""
    idle = case.profile.by_group()[IDLE] - case.profile.sync_idle_seconds
    if case.profile.device == "cuda" and idle > IDLE_SHARE * case.step and not launches_less(case):
        yield more_work(case, idle)


def launches_less(case: Case) -> bool:
    return any(gains_of(case, each).get(IDLE, 0.0) >= LEAST_SHARE * case.step for each in case.candidates)


def more_work(case: Case, idle: float) -> Advice:
    whose = "the device pauses between kernels" if keeps_up(case.profile) else "the device waits for the host"
    return Advice(
        what="give each launch more work: a larger micro batch",
        why=f"{whose} for {case.share(idle)}, {case.profile.launches:,.0f} launches a step",
        gain_seconds=idle,
    )


# what the findings say


def fp32_matmuls(case: Case) -> Iterator[Advice]:
    """Fp32 matmuls that autocast was meant to catch: at the 16-bit rate they would take less time."""
    lines = [each.where for each in case.profile.findings if each.kind == "fp32-matmul" and each.where]
    if not lines or case.plan.autocast is None:
        return
    spent = sum(
        kernel.seconds
        for kernel in case.profile.kernels
        if kernel.dtype == "fp32" and kernel.group in (CONTRACTION, ATTENTION) and kernel.flops
    )
    tflops = {} if case.rates is None else case.rates.matmul_tflops
    slow, fast = tflops.get("tf32" if case.plan.matmul_precision == "high" else "fp32"), tflops.get(case.plan.autocast)
    known = slow is not None and fast is not None and fast > slow
    yield Advice(
        what=f"let autocast see the matmuls at {', '.join(lines[:3])}",
        why=f"fp32 matmuls take {case.share(spent)} though autocast is on",
        gain_seconds=spent * (1 - slow / fast) if known and slow is not None and fast is not None else None,
    )


def other_findings(case: Case) -> Iterator[Advice]:
    for kind, words in (
        ("math-attention", "attention falls back to plain matmuls"),
        ("graph-break", "the compiled code is cut in pieces"),
        ("recompile", "code is compiled again while training"),
        ("host-copy", "tensors travel between host and device inside the step"),
    ):
        found = [each for each in case.profile.findings if each.kind == kind]
        if found:
            places = ", ".join(each.where or "an unknown line" for each in found[:3])
            yield Advice(what=f"fix {places}", why=f"{words}: {found[0].detail}", gain_seconds=None)


def written_out_attention(case: Case) -> Iterator[Advice]:
    """Attention written out in a user's own model, which no rung can change from outside."""
    found = case.shape.attention if isinstance(case.shape, Traced) else ()
    if found:
        places = ", ".join(dict.fromkeys(str(each.place) for each in found))
        call = "F.scaled_dot_product_attention" + ("(..., is_causal=True)" if found[0].causal else "")
        yield Advice(
            what=f"call {call} at {places}",
            why="attention is written out there: its scores are stored and read back several times",
            gain_seconds=None,
        )


def slower_compiled(case: Case) -> Iterator[Advice]:
    """Compare with the same step without compile, which was measured for its modules. Its scatter is assumed to equal
    this step's."""
    eager = case.profile.uncompiled
    if eager is None or eager.micro_batch != case.micro_batch:
        return
    error = spread_error(dataclasses.asdict(case.profile.step_seconds)) or 0.0
    noise = noise_of_ratio(error, error, device=case.profile.device, repeats=1)
    if case.step > (1 + noise) * eager.step_seconds:
        yield Advice(
            what=f"leave {', '.join(eager.undone)} out",
            why=f"the same step without takes {human_seconds(eager.step_seconds)} "
            f"instead of {human_seconds(case.step)}",
            gain_seconds=case.step - eager.step_seconds,
        )


def rungs_to_measure(case: Case) -> Iterator[Advice]:
    """For a user's own model, the gain of a rung cannot be predicted, so list the rungs that apply."""
    if isinstance(case.shape, Traced) and case.candidates:
        names = ", ".join(each.rung for each in case.candidates)
        yield Advice(
            what="measure what rungs bring with `redline ladder`",
            why=f"{names} apply; their gain cannot be predicted for a model of your own",
            gain_seconds=None,
        )


def recomputation(case: Case) -> Iterator[Advice]:
    """Checkpointing trades time for memory: worth undoing if memory is left."""
    if case.plan.checkpointing == "none":
        return
    kept = Candidate(rung="", title="", plan=replace(case.plan, checkpointing="none"))
    gain = sum(gain for pool, gain in gains_of(case, kept).items() if pool != IDLE)
    yield Advice(
        what=f"leave {case.plan.checkpointing} checkpointing out, if the memory allows it",
        why="activations are computed again in the backward pass",
        gain_seconds=gain or None,
    )


RULES = (
    rungs_to_take,
    data_wait,
    communication,
    synchronisations,
    idle_gaps,
    fp32_matmuls,
    written_out_attention,
    other_findings,
    recomputation,
    slower_compiled,
    rungs_to_measure,
)


# bounds


def bounds(case: Case, advised: Sequence[Advice]) -> list[Advice]:
    """Return bounds on what the advice above does not cover, largest first. A group that an advised rung helps has no
    bound."""
    rungs = [rung for each in advised if each.rung is not None and (rung := case.candidate(each.rung)) is not None]
    least = LEAST_SHARE * case.step
    helped = {pool for rung in rungs for pool, gain in gains_of(case, rung).items() if gain >= least}
    found = [each for group in FASTER if POOLS[group] not in helped for each in group_bound(case, group)]
    found += [] if IDLE in helped else idle_bound(case)
    worth = [each for each in found if (each.gain_seconds or 0.0) >= least]
    return sorted(worth, key=lambda each: each.gain_seconds or 0.0, reverse=True)


def group_bound(case: Case, group: str) -> Iterator[Advice]:
    """Say how far the kernels of a group fall short of the machine's rates."""
    spent = case.profile.by_group()[group]
    if case.rates is None or not case.rates.reachable or spent < LEAST_SHARE * case.step:
        return
    rates = limits(case, case.rates)
    reach = reach_of(
        (kernel for kernel in case.profile.kernels if kernel.group == group),
        matmul_tflops=rates.matmul_tflops,
        bandwidth=rates.bandwidth,
        tf32=case.plan.matmul_precision == "high",
    )
    if reach is None:
        return
    yield Advice(
        what=FASTER[group],
        why=f"{group} takes {case.share(spent)}; {known_text(reach, spent)}{work_text(case, group, reach)} would "
        f"take {human_seconds(reach.least_seconds)} at {rates_text(rates, reach)}"
        f"{beaten_text(case.rates, rates, reach)}{other_kernels(case, group)}",
        gain_seconds=reach.gain_seconds,
        at_most=True,
    )


def limits(case: Case, rates: Rates) -> Rates:
    """Return the machine's rates, raised to those of the profile's fastest kernels: a rate that a kernel beats is no
    bound."""
    seen, bandwidth = fastest_seen(case.profile.kernels, tf32=case.plan.matmul_precision == "high")
    tflops = {dtype: max(rate, seen.get(dtype, 0.0)) for dtype, rate in rates.matmul_tflops.items()}
    return replace(rates, matmul_tflops=tflops, bandwidth=max(rates.bandwidth, bandwidth))


def beaten_text(stated: Rates, rates: Rates, reach: Reach) -> str:
    """If a kernel is faster than the stated rate, say that the rate is that kernel's."""
    faster = reach.by_bytes and rates.bandwidth > stated.bandwidth
    faster |= any(rate not in stated.matmul_tflops.values() for rate in reach.tflops)
    return ", as fast as the fastest kernel here" if faster else ""


def known_text(reach: Reach, spent: float) -> str:
    """If only part of the group can be judged, say how much."""
    if reach.seconds > 0.995 * spent:
        return ""
    share, seconds = human_percent(reach.seconds / spent, 0), human_seconds(reach.seconds)
    return f"of {share} of that the work is known: {seconds}, where "


def work_text(case: Case, group: str, reach: Reach) -> str:
    """'its 4.33 TFLOP', 'its 35.1 GB'; for attention, also which scores are counted."""
    flops = f"{reach.flops / 1e12:.3g} TFLOP" if reach.flops >= 1e11 else f"{reach.flops / 1e9:.3g} GFLOP"
    size = f"{reach.bytes / 1e9:.3g} GB"
    work = [flops] * bool(reach.tflops) + [size] * reach.by_bytes
    hidden = "without pairs that a causal mask hides"
    fused = hidden if case.plan.attention != "naive" else "the full square of scores"
    return f"its {' and '.join(work)}" + (f" ({fused})" if group == ATTENTION and reach.tflops else "")


def rates_text(rates: Rates, reach: Reach) -> str:
    bandwidth = rates.bandwidth / 1e9
    moved = f"{bandwidth / 1e3:.3g} TB/s" if bandwidth >= 1e3 else f"{bandwidth:.3g} GB/s"
    computed = [f"{' or '.join(f'{rate:.4g}' for rate in reach.tflops)} TFLOP/s"] * bool(reach.tflops)
    return " and ".join([*computed, *[moved] * reach.by_bytes])


def other_kernels(case: Case, group: str) -> str:
    """For attention, name the rungs that choose another kernel. Which kernel is faster cannot be predicted."""
    if group != ATTENTION:
        return ""
    others = [each.rung for each in case.candidates if each.plan.attention != case.plan.attention]
    return f"; {' or '.join(others)} would be another kernel" if others else "; no rung here brings another kernel"


def idle_bound(case: Case) -> list[Advice]:
    """Bound idle time that is too short for advice of its own and that no rung removes."""
    idle = case.profile.by_group()[IDLE] - case.profile.sync_idle_seconds
    if case.profile.device != "cuda" or idle > IDLE_SHARE * case.step or launches_less(case):
        return []
    return [replace(more_work(case, idle), at_most=True)]
