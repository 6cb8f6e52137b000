"""Find the micro batch that trains fastest: seldom the largest that fits, and always one that was run.

    choice = best_batch(ask, start=280, limit=302, noise=0.02, sequence=1024, memory_bytes=card.memory_bytes)
    choice.micro_batch, choice.tokens_per_second, choice.reason

`ask(size)` runs one size in a process of its own and returns a Measurement or a Failure. The search rests on two lines.
Memory is affine in the size: a prediction says where to begin, and without one two measured sizes do. The time of a
step is a constant plus a part per sequence, and bends only upwards: two neighbouring sizes therefore bound what the
sizes beside them could reach, and where that is less than the noise nothing more is run. docs/batch-size.md has the
reasons. Several ranks answer as one: a size fits when it fits all of them, and the worst rank decides
(`engine/measure.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import Job, Result
from redline.core.layout import Layout
from redline.core.measurement import Failure, Measurement, Spread, spread_of
from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.units import human_bytes, human_percent
from redline.core.workload import BUILT_IN, Shape, Workload, check_positive
from redline.predict.fitting import case_of
from redline.predict.memory import FRAGMENTATION
from redline.predict.parallel import divisors, layout_for_batch

HEADROOM = 0.05  # share of the memory left free for what comes beside a step: a checkpoint, a longer evaluation
SAME = 0.25  # share of the noise: sizes closer than this are equal, and the smaller one leaves more memory
GROWTH = 4  # a measured line is trusted up to this many times the fastest size so far
TRIAL_CHECK_STEPS = 5
LOST = 1.25  # give up a trial whose quickest steps take this many times as long per sequence as the best
# Seconds that the steps of a trial may take in all, and how many steps that is: both gradients, curve, warm-up, timing.
STEPPING_SECONDS = {"cuda": 60.0, "cpu": 20.0}
STEPS_PER_TRIAL = 25
# The most that a ladder chooses by itself, as a multiple of the preset's usual size, which is for small cards. Its
# first rows take longer by as much.
MOST_OF_ITSELF = 4
MEMORY_KINDS = ("oom", "killed")  # a host that runs out of memory kills the worker

Point = tuple[int, float]
"""A size and its step time in seconds."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size that was run."""

    micro_batch: int
    status: str
    """'ok', or why it cannot be chosen: 'oom', 'no-headroom', 'retries', 'failed'."""
    tokens_per_second: float | None = None
    step_seconds: Spread | None = None
    peak_bytes: int | None = None
    outside_bytes: int | None = None
    alloc_retries: int | None = None
    reason: str | None = None
    """Why the size cannot be chosen; None for 'ok'."""

    @property
    def eligible(self) -> bool:
        return self.status == "ok"

    @property
    def footprint(self) -> int | None:
        """Bytes in use on the device: the allocator's peak and everything outside the allocator."""
        return None if self.peak_bytes is None else self.peak_bytes + (self.outside_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    micro_batch: int | None
    """None if no size runs; `reason` says why."""
    tokens_per_second: float | None
    trials: tuple[Trial, ...]
    """In the order in which they ran."""
    reason: str
    accumulation: int | None = None
    """Micro batches per update; None without a global batch."""

    @property
    def trial(self) -> Trial | None:
        """The trial that was chosen."""
        return next((trial for trial in self.trials if trial.micro_batch == self.micro_batch), None)


def size_of_ladder(workload: Workload, plan: Plan, hardware: Hardware) -> tuple[int, tuple[str, ...]]:
    """Return the micro batch of all rows if none was named, and a note if it is not the usual one. Where memory is
    predicted tensor by tensor, it is four times the usual one, halved until the first row fits (it needs most
    memory)."""
    usual, room = workload.micro_batch, hardware.memory_bytes
    if hardware.kind != "cuda" or room is None or workload.source != BUILT_IN or not isinstance(workload.shape, Shape):
        return usual, ()
    case = case_of(workload.shape, plan, hardware.arranged)
    size = MOST_OF_ITSELF * usual
    while size > 1 and case.memory(size).total > (1 - HEADROOM) * room:
        size //= 2
    if size == usual:
        return usual, ()
    taken = f"{human_bytes(case.memory(size).total)} of {human_bytes(room)}"
    return size, (f"micro batch {size}: the first row is predicted to take {taken} with it (--micro-batch sets it)",)


def best_batch(
    ask: Callable[[int], Result],
    *,
    start: int,
    limit: int | None,
    noise: float,
    sequence: int,
    ranks: int = 1,
    memory_bytes: int | None = None,
    headroom: float = HEADROOM,
    global_sequences: int | None = None,
    known: Sequence[int] = (),
) -> BatchChoice:
    """Return the fastest micro batch. `start`: where to begin, best near the predicted limit; `limit`: nothing larger
    is run (None: unknown). `noise`: smaller gains do not count. `sequence`: tokens per sequence. `ranks`: how many run
    a size together, each on that many sequences. `memory_bytes`: the device's memory, of which the share `headroom`
    stays free. `global_sequences`: sequences per update of all ranks; only sizes that divide a rank's part of them are
    run. `known`: sizes that `ask` answers without running anything."""
    check_positive("start", start)
    check_headroom(headroom)
    search = _Search(
        ask=ask,
        limit=limit,
        noise=noise,
        sequence=ranks * sequence,
        usable_bytes=None if memory_bytes is None else math.floor((1 - headroom) * memory_bytes),
        headroom=headroom,
        divisors=None if global_sequences is None else divisors(global_sequences // ranks),
        ranks=ranks,
    )
    for free in sorted(set(known)):
        if search.allowed(free, free, free) is not None:
            search.run(free)
    search.begin(start)
    while (size := search.next_size()) is not None:
        search.run(size)
    return search.choice(global_sequences)


def check_headroom(share: float) -> None:
    if not 0 <= share < 1:  # NaN fails both
        raise UserError(
            f"headroom is {share:g}", "it is the share of the memory that stays free", "set it from 0 to below 1"
        )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Step time in seconds: a constant plus a part per sequence."""

    constant: float
    per_sequence: float

    def seconds(self, size: int) -> float:
        return self.constant + self.per_sequence * size

    def meets(self, other: _Line) -> tuple[int, ...]:
        """Return the integers around the crossing, or none for parallel lines."""
        slope = other.per_sequence - self.per_sequence
        if slope == 0:
            return ()
        crossing = (self.constant - other.constant) / slope
        return (math.floor(crossing), math.ceil(crossing))


def _line(points: Sequence[Point], *, at: int) -> _Line:
    """Return the line through two points. A larger size never takes less time, so if noise makes the line fall it
    becomes level, through the point of index `at`. A single point on the left of a gap gives a level line too; one on
    the right says nothing."""
    if len(points) == 2:
        (small, low), (large, high) = points
        per_sequence = max(0.0, (high - low) / (large - small))
        size, seconds = points[at]
        return _Line(constant=seconds - per_sequence * size, per_sequence=per_sequence)
    level = points[0][1] if points and at == -1 else 0.0
    return _Line(constant=level, per_sequence=0.0)


def _gain(seconds: float, size: int, fastest: Trial, sequence: int) -> float:
    """Return what a size would gain over the fastest trial if its step took only `seconds`, a lower bound."""
    return math.inf if seconds <= 0 else size * sequence / seconds / _rate(fastest) - 1


@dataclass
class _Search:
    ask: Callable[[int], Result]
    limit: int | None
    noise: float
    sequence: int
    """Tokens that one more sequence in the micro batch adds to a step, over all ranks."""
    usable_bytes: int | None
    headroom: float
    divisors: tuple[int, ...] | None
    ranks: int = 1
    trials: dict[int, Trial] = field(default_factory=dict)

    def run(self, size: int) -> Trial:
        self.trials[size] = self._trial(size, self.ask(size))
        return self.trials[size]

    def _trial(self, size: int, result: Result) -> Trial:
        if isinstance(result, Failure):
            status = "oom" if result.kind in MEMORY_KINDS else "failed"
            return Trial(micro_batch=size, status=status, reason=result.reason)
        trial = Trial(
            micro_batch=size,
            status="ok",
            tokens_per_second=size * self.sequence / statistics.median(result.step_seconds),
            step_seconds=spread_of(result.step_seconds),
            peak_bytes=result.peak_bytes,
            outside_bytes=result.outside_bytes,
            alloc_retries=result.alloc_retries,
        )
        if trial.alloc_retries:
            reason = f"the allocator ran out of memory and gave its cache back (retries: {trial.alloc_retries})"
            return replace(trial, status="retries", reason=reason)
        if self.usable_bytes is not None and trial.footprint is not None and trial.footprint > self.usable_bytes:
            reason = f"leaves less than {human_percent(self.headroom, 0)} of the memory free"
            return replace(trial, status="no-headroom", reason=reason)
        return trial

    def begin(self, start: int) -> None:
        """Run the size near the limit, then halve it until one runs. After a failure unrelated to memory, try one
        sequence at once: a recipe that cannot run at all should not be tried at every size."""
        failed = [size for size, trial in self.trials.items() if not trial.eligible]
        size = self.allowed(start, 1, self._most(min(failed, default=None)))
        while size is not None and size not in self.trials:
            trial = self.run(size)
            if trial.eligible:
                return
            below = size // 2 if trial.status != "failed" else 1
            size = self.allowed(below, 1, size - 1)
            if any(other.eligible for other in self.trials.values()):
                return  # a known size runs: the search continues between the two

    def next_size(self) -> int | None:
        """Return the size with the largest possible gain, or None if no gain beyond the noise is possible."""
        if self.fastest is None:
            return None
        gaps = [gap for gap in (self._below(self.fastest), self._above(self.fastest)) if gap is not None]
        gain, size = max(gaps, key=lambda gap: gap[0], default=(0.0, 0))
        return size if gain > (1 - SAME) * self.noise else None

    @property
    def fastest(self) -> Trial | None:
        return max((trial for trial in self.trials.values() if trial.eligible), key=_rate, default=None)

    def _points(self) -> list[Point]:
        """Return the sizes that can be chosen with their step times, smallest first."""
        return [
            (size, size * self.sequence / _rate(trial)) for size, trial in sorted(self.trials.items()) if trial.eligible
        ]

    def _above(self, fastest: Trial) -> tuple[float, int] | None:
        """Return a larger size's possible gain and the size to run, by the line through the fastest and a smaller
        one."""
        at = fastest.micro_batch
        tried = min(
            (size for size, trial in self.trials.items() if size > at and not self._is_near(trial, fastest)),
            default=None,
        )
        most = self._most(tried)
        furthest = GROWTH * at if most is None else min(most, GROWTH * at)
        # Below a size that was run, the next one is found by halving; a limit nobody has tried is tried itself.
        target = furthest if tried is None or furthest < tried - 1 else round(math.sqrt(at * tried))
        size = self.allowed(target, at + 1, furthest)
        if size is None or size in self.trials:
            return None
        upwards = [point for point in self._points() if point[0] <= at]
        # From a point at half the size or less: noise tilts a line through close neighbours too much.
        apart = [point for point in upwards if 2 * point[0] <= at][-1:] or upwards[-2:-1]
        ahead = _line([*apart, upwards[-1]], at=-1)
        return _gain(ahead.seconds(furthest), furthest, fastest, self.sequence), size

    def _is_near(self, trial: Trial, fastest: Trial) -> bool:
        """True if noise may have put this size behind one a few sequences smaller: no reason to stop there."""
        close = trial.eligible and trial.micro_batch < 2 * fastest.micro_batch
        return close and _rate(trial) >= (1 - self.noise) * _rate(fastest)

    def _below(self, fastest: Trial) -> tuple[float, int] | None:
        """Return the same for smaller sizes, by the lines on both sides: times that bend only upwards lie below
        neither."""
        at, smallest = fastest.micro_batch, min(self.trials)
        if 2 * smallest > at and (half := self.allowed(at // 2, 1, smallest - 1)) is not None:
            return math.inf, half  # neighbours a few sequences apart say little
        tried = max((size for size in self.trials if size < at), default=0)
        size = self.allowed(round(math.sqrt(tried * at)), tried + 1, at - 1)
        if size is None:
            return None
        left = _line([point for point in self._points() if point[0] < at][-2:], at=-1)
        right = _line([point for point in self._points() if point[0] >= at][:2], at=0)
        # Along a line the rate only rises or only falls, so the maximum is at an end or where the lines meet.
        places = {min(max(place, tried + 1), at - 1) for place in (tried, at, *left.meets(right))}
        return max(
            _gain(max(left.seconds(place), right.seconds(place)), place, fastest, self.sequence) for place in places
        ), size

    def _most(self, failed: int | None) -> int | None:
        """Return the largest size that may still be run: below one that failed, within the limit, and within what the
        measured line of memory allows."""
        sizes = [self.limit, None if failed is None else failed - 1, self._most_by_memory()]
        known = [size for size in sizes if size is not None]
        return max(1, min(known)) if known else None

    def _most_by_memory(self) -> int | None:
        points = [(size, trial.footprint) for size, trial in sorted(self.trials.items()) if trial.footprint is not None]
        if self.usable_bytes is None or len(points) < 2:
            return None
        (small, low), (large, high) = points[-2:]
        per_sequence = (high - low) / (large - small)
        if per_sequence <= 0:
            return None  # a host's resident set need not grow: the line says nothing
        return math.floor(large + (self.usable_bytes - high) / per_sequence)

    def allowed(self, target: int, least: int, most: int | None) -> int | None:
        """Return the size that may be run nearest to the target, in ratio; None if there is none in these bounds."""
        if most is not None and most < least:
            return None
        if self.divisors is None:
            return max(least, target if most is None else min(target, most))
        inside = [size for size in self.divisors if size >= least and (most is None or size <= most)]
        return min(inside, key=lambda size: abs(math.log(size / max(target, 1))), default=None)

    def choice(self, global_sequences: int | None) -> BatchChoice:
        trials, fastest = tuple(self.trials.values()), self.fastest
        if fastest is None:
            return BatchChoice(micro_batch=None, tokens_per_second=None, trials=trials, reason=_no_reason(trials))
        equal = [
            trial for trial in trials if trial.eligible and _rate(trial) >= (1 - SAME * self.noise) * _rate(fastest)
        ]
        chosen = min(equal, key=lambda trial: trial.micro_batch)
        passes = None
        if global_sequences is not None:
            layout = layout_for_batch(gpus=self.ranks, micro_batch=chosen.micro_batch, global_batch=global_sequences)
            passes = layout.accumulation
        return BatchChoice(
            micro_batch=chosen.micro_batch,
            tokens_per_second=chosen.tokens_per_second,
            trials=trials,
            reason="; ".join(self._reasons(chosen, global_sequences, passes)),
            accumulation=passes,
        )

    def _reasons(self, chosen: Trial, global_sequences: int | None, passes: int | None) -> Iterator[str]:
        sizes = ", ".join(map(str, sorted(self.trials)))
        one = len(self.trials) == 1
        yield f"the only size that was run ({sizes})" if one else f"the fastest of {len(self.trials)} sizes ({sizes})"
        yield self._why_no_larger(chosen.micro_batch)
        if passes is not None:
            times = "once makes" if passes == 1 else f"{passes} times make"
            yield f"{times} the global batch of {global_sequences}; sizes that do not divide it were not run"

    def _why_no_larger(self, size: int) -> str:
        above = [trial for _, trial in sorted(self.trials.items()) if trial.micro_batch > size]
        if any(trial.eligible for trial in above):
            return f"larger ones are not faster beyond the noise ({human_percent(self.noise, 0)})"
        if above:
            return f"{above[0].micro_batch} cannot be chosen: {above[0].reason}"
        most = self._most(None)
        if most is not None and self.allowed(size + 1, size + 1, most) is None:
            return f"the largest within the limit of {most}"
        return f"a larger one could gain less than the noise ({human_percent(self.noise, 0)})"


def _rate(trial: Trial) -> float:
    assert trial.tokens_per_second is not None
    return trial.tokens_per_second


def _no_reason(trials: Sequence[Trial]) -> str:
    if not trials:
        return "no size may be run"
    smallest = min(trials, key=lambda trial: trial.micro_batch)
    return f"no micro batch runs, down to {smallest.micro_batch}: {smallest.reason}"


# --- sizes as jobs ----------------------------------------------------------------------------------------------------


@dataclass
class SizedJobs:
    """The `ask` of best_batch in terms of jobs: one recipe, any micro batch. A size that falls far behind the fastest
    so far is given up after a first look; one that keeps up is measured and its gradients are checked."""

    ask: Callable[[Job], Result]
    job: Job
    """The job to run; its micro batch is replaced."""
    fault: Callable[[Measurement], str | None]
    """Returns why a measurement is not the same training any more, or None."""
    known: dict[int, Result] = field(default_factory=dict)
    """Results that exist already, by size."""
    on_size: Callable[[int], None] = lambda size: None

    def __post_init__(self) -> None:
        self.seconds_per_sequence = min(
            (_seconds_per_sequence(size, result) for size, result in self.known.items()), default=math.inf
        )

    def __call__(self, size: int) -> Result:
        if size in self.known:
            return self.known[size]
        self.on_size(size)
        slowest = LOST * self.seconds_per_sequence * size
        result = self.ask(
            replace(
                self.job,
                kind="trial",
                recipe=replace(self.job.recipe, micro_batch=size),
                check_steps=TRIAL_CHECK_STEPS,
                bit_exact_rung=None,
                repeat=0,
                give_up_seconds=slowest if math.isfinite(slowest) else None,
            )
        )
        if isinstance(result, Measurement) and (fault := self.fault(result)) is not None:
            return Failure(kind="different", reason=f"not the same training at this size: {fault}")
        self.seconds_per_sequence = min(self.seconds_per_sequence, _seconds_per_sequence(size, result))
        return result


def _seconds_per_sequence(size: int, result: Result) -> float:
    return math.inf if isinstance(result, Failure) else statistics.median(result.step_seconds) / size


@dataclass(frozen=True, kw_only=True)
class Range:
    """Where a search begins, and the size it does not exceed; None if unknown."""

    start: int
    limit: int | None


def range_of(
    shape: Shape | Traced,
    plan: Plan,
    *,
    device: str,
    micro_batch: int,
    seconds_per_sequence: float | None,
    memory_bytes: int | None,
    headroom: float = HEADROOM,
    layout: Layout | None = None,
) -> Range:
    """Derive the range from the predicted line of memory and from the time of a step. `micro_batch`: a size that was
    run, the start if there is no prediction. A CPU's resident set is not predicted: there measured sizes make the
    line."""
    by_time = None
    if seconds_per_sequence is not None:
        by_time = max(micro_batch, int(STEPPING_SECONDS[device] / STEPS_PER_TRIAL / seconds_per_sequence))
    if device != "cuda" or memory_bytes is None:
        return Range(start=micro_batch, limit=by_time)
    case, usable = case_of(shape, plan, layout), math.floor((1 - headroom) * memory_bytes)
    context = case.memory(1).context
    # The limit is for an allocator that loses nothing to fragmentation; the start allows for the usual loss.
    unfragmented = round((1 + FRAGMENTATION) * (usable - context) + context)
    most = [case.largest(usable), case.largest(unfragmented)]
    start, limit = (max(1, size if by_time is None else min(size, by_time)) for size in most)
    return Range(start=start, limit=limit)


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return what a new process could get without swapping, by the kernel's estimate and by the container's limit."""
    available = _number_in(root / "proc/meminfo", after="MemAvailable:")
    control_group = root / "sys/fs/cgroup"
    limit, used = (_number_in(control_group / name) for name in ("memory.max", "memory.current"))
    rooms = [
        None if available is None else 1024 * available,
        None if limit is None or used is None else max(limit - used, 0),
    ]
    return min((room for room in rooms if room is not None), default=None)


def _number_in(path: Path, after: str = "") -> int | None:
    """Return the number that follows a word in a kernel file, or None if there is no such file or number."""
    text = path.read_text(encoding="ascii") if path.exists() else ""
    words = text.partition(after)[2].split() if after else text.split()
    return int(words[0]) if words and words[0].isdigit() else None
