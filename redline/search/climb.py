"""The ladder: one rung after another, added to the recipe that has proved itself so far.

    for row in Climb(workload, hardware, settings, ask).rows(): ...

`ask(job)` answers a job, from a worker or from an earlier run's results. The climb asks the same questions in the same
order either way, which is all that resuming needs. A rung stays in the recipe if it is right and not slower than what
it was added to; a row that is not kept stays in the table with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from redline.core.hardware import Hardware
from redline.core.job import Job, Result
from redline.core.measurement import Failure, Measurement, spread_of
from redline.core.places import short
from redline.core.recipe import Recipe
from redline.core.workload import BUILT_IN, Workload
from redline.predict.noise import UNSEEN_RUN_TO_RUN, exceeds
from redline.predict.verdict import LEAST_LEARNING, Equivalence, is_in_doubt, judge
from redline.rungs import LADDER, Maths, Rung, find_rung, group_of, own_rungs, plan_of, why_not, yardstick_rungs
from redline.rungs.parallel import RANK_RUNGS
from redline.search.batch_size import HEADROOM, MEMORY_KINDS, BatchChoice, SizedJobs, best_batch, range_of
from redline.search.noise import is_crowded, scatter_between, tolerated_noise
from redline.search.ranks import not_measured, refused_beside

COMPILE = "compile"
CLEARLY_SLOWER = 0.9  # of what a row should reach; between the two, one unlucky process may have decided
AGAIN = "a/a"  # the row that measures the finished recipe a second time
TOKENS_FILE = "tokens.npy"

Ask = Callable[[Job], Result]


@dataclass(frozen=True, kw_only=True)
class LadderSettings:
    """What the user chose. Stored in run.json, so that a resumed run asks the same questions."""

    rungs: tuple[str, ...]
    """Rungs to climb, in the order of LADDER, without the baseline."""
    start: Recipe
    """The first row: the bare baseline or the recipe of --from, with the rungs that belong to the model itself."""
    device: str
    check_steps: int = 20
    timed_steps: int | None = None
    repeats: int = 1
    again: bool = False
    """Measure the finished recipe once more, as if it were a rung: the difference is the noise floor."""
    keep: str = "faster"
    """'faster' leaves rungs that slow the recipe down out of it; 'all' keeps every rung that works."""
    rebatch: bool = False
    """Add the second view: each row again, at the micro batch that is fastest for it."""
    headroom: float = HEADROOM
    """For the second view: the share of the memory that stays free."""
    global_batch: int | None = None
    """For the second view: sequences per update, which the micro batch must divide."""
    memory_bytes: int | None = None
    """For the second view: the memory of a rank; on a CPU, its part of what the host had free when the run began."""
    compile_ahead: int | None = None
    """How many rows compile at the same time before anything is measured; compile times are then those of a shared
    machine. None: each row compiles in its turn."""


@dataclass
class Row:
    """A rung's row of the table, during the climb."""

    name: str
    title: str
    maths: Maths
    recipe: Recipe
    job: Job | None = None
    measurements: list[Measurement] = field(default_factory=list)
    """One per repeat."""
    second_run: str | None = None
    """Set if it ran again because a decision was close: what to say of that. `measurements` has the quicker run."""
    tainted: bool = False
    """A recipe that it contains, or its own, was wrong when it ran again."""
    base: Row | None = None
    """The row that this one is compared with."""
    status: str = "ok"
    reason: str | None = None
    kept: bool | None = None
    failure: Failure | None = None
    equivalence: Equivalence | None = None
    reference_curve: tuple[float, ...] | None = None
    """The fp32 losses of this recipe's own maths, which the verdict rests on; None if they are not available."""
    rebatched: BatchChoice | None = None
    """This recipe at its own best micro batch, if the user asked for it."""

    @property
    def seconds(self) -> float:
        return statistics.median(statistics.median(one.step_seconds) for one in self.measurements)

    @property
    def quick_seconds(self) -> float:
        """The time of an undisturbed step: the p10, as the median over the repeats."""
        return statistics.median(spread_of(one.step_seconds).p10 for one in self.measurements)

    @property
    def trusted(self) -> bool:
        right = self.equivalence is not None and self.equivalence.verdict in ("same", "rounding", "changed")
        return right and not self.tainted


class Climb:
    def __init__(self, workload: Workload, hardware: Hardware, settings: LadderSettings, ask: Ask) -> None:
        self.workload, self.hardware, self.settings, self.ask = workload, hardware, settings, ask
        self.own = tuple(name for name in own_rungs(workload) if name in settings.start.rungs)
        """Rungs that belong to the model itself. Runs of versions that climbed them as rungs are drawn as they were."""
        self.finished: list[Row] = []
        self.plain_curve: tuple[float, ...] | None = None
        self.reference_trouble: str | None = None
        """Why a reference failed, and with it the check of its rows."""

    def rows(self, on_start: Callable[[str, str, int, int], None] = lambda *_: None) -> Iterator[Row]:
        """Yield each row when it is known; then each again, once per repeat, with more measurements in it; then once
        more at its own micro batch."""
        names = [*self.settings.rungs, *([AGAIN] if self.settings.again else [])]
        total = 1 + len(names)
        first = self._first_row()
        on_start(first.name, first.title, 1, total)
        self.plain_curve = self._reference_curve(Recipe(rungs=self.own, micro_batch=self.settings.start.micro_batch))
        yield self._done(self._measure(first))
        for number, name in enumerate(names, start=2):
            row = self._next_row(name)
            on_start(row.name, row.title, number, total)
            yield self._done(row if row.status == "skipped" else self._measure(row))
        yield from self._repeat(on_start)
        if self.settings.rebatch:
            yield from self._rebatch(on_start)

    def foreseen(self) -> list[Job]:
        """Return the jobs of the rows if every rung is kept, and of two that replace each other the later one, as the
        ladder goes from slow to fast. If the climb decides otherwise, later rows are other jobs."""
        jobs, recipe = [self._job(self.settings.start)], self.settings.start
        for rung in map(find_rung, self.settings.rungs):
            replaced = next((name for name in recipe.rungs if group_of(find_rung(name)) == group_of(rung)), None)
            onto = tuple(name for name in recipe.rungs if name != replaced)
            if self._refusal(rung, onto) is not None:
                continue
            changed = recipe.adding(rung.name, without=replaced)
            jobs.append(self._job(changed))
            if not (rung.stand_in and replaced):
                recipe = changed
        return jobs

    @property
    def current(self) -> Row:
        """The newest row that was kept; before there is one, the first row, measured or not."""
        return next((row for row in reversed(self.finished) if row.kept), self.finished[0])

    def _first_row(self) -> Row:
        start = self.settings.start
        added = tuple(name for name in start.rungs if name not in self.own)
        if set(added) <= set(RANK_RUNGS):  # ranks begin with the rungs of their layout, and otherwise as plainly
            first = find_rung(added[0]) if added else LADDER[0]
            title = first.title if len(added) < 2 else " + ".join(added)
            return Row(first.name, title, first.maths, start)
        strongest = max((find_rung(name).maths for name in added), key=list(Maths).index)
        return Row("recipe", " + ".join(start.rungs), strongest, start)

    def _next_row(self, name: str) -> Row:
        current = self.current
        if name == AGAIN:
            return Row(AGAIN, f"{current.name} measured again", current.maths, current.recipe, base=current)
        rung = find_rung(name)
        replaced = self._in_the_place_of(rung)
        onto = tuple(kept for kept in current.recipe.rungs if kept != replaced)
        reason = self._refusal(rung, onto)
        row = Row(rung.name, rung.title, rung.maths, current.recipe.adding(name, without=replaced))
        if reason is not None:
            row.status, row.reason = "skipped", reason
        row.base = self._row_of(onto) or current
        return row

    def _refusal(self, rung: Rung, onto: tuple[str, ...]) -> str | None:
        """Return why this rung cannot be added to those, or None."""
        return (
            not_measured(rung.name, self.hardware.arranged)
            or why_not(rung, self.workload, self.hardware, plan_of(onto))
            or refused_beside(rung, onto, self.workload, self.hardware)
        )

    def _in_the_place_of(self, rung: Rung) -> str | None:
        """Return the rung of the current recipe that this one would replace, or None."""
        kept = self.current.recipe.rungs
        return next((name for name in kept if group_of(find_rung(name)) == group_of(rung)), None)

    def _row_of(self, rungs: tuple[str, ...]) -> Row | None:
        """Return the row that measured exactly these rungs, or None."""
        return next((row for row in self.finished if row.recipe.rungs == rungs and row.measurements), None)

    def _measure(self, row: Row) -> Row:
        rung = None if row.name in (AGAIN, "recipe", "baseline") else find_rung(row.name)
        bit_exact = rung.name if rung is not None and rung.maths is Maths.BIT_EXACT else None
        # The finished recipe was measured already: a repeat number beyond all others gives this job a key of its own.
        row.job = self._job(
            row.recipe, bit_exact_rung=bit_exact, repeat=self.settings.repeats if row.name == AGAIN else 0
        )
        result = self.ask(row.job)
        if isinstance(result, Failure):
            row.status, row.reason, row.kept, row.failure = "failed", result.reason, False, result
            return row
        row.measurements.append(result)
        row.equivalence = self._judge(row, result)
        self._decide(row, rung)
        if result.alloc_retries and row.reason is None:
            row.reason = (
                f"the allocator ran out of memory {result.alloc_retries} times while timing, released its cache "
                "and tried again: a smaller micro batch may be faster"
            )
        return row

    def _judge(self, row: Row, measurement: Measurement) -> Equivalence:
        base_curve = row.base.measurements[0].loss_curve if row.base is not None and row.base.measurements else None
        row.reference_curve = self._reference_curve(row.recipe)
        precision = plan_of(row.recipe.rungs).precision
        found = judge(
            maths=row.maths.value,
            precision=precision,
            measurement=measurement,
            reference=row.reference_curve,
            base=base_curve,
            plain=self.plain_curve,
            yardstick=self._yardstick(row, measurement, precision),
            ln_vocab=self.workload.shape.ln_vocab,
            least_learning=least_learning(row.recipe),
            unchecked=self.workload.why_unchecked,
        )
        if found.verdict == "not-checked" and self.reference_trouble:
            return replace(found, detail=f"{found.detail}: {self.reference_trouble}")
        return found

    def _decide(self, row: Row, rung: Rung | None) -> None:
        """Keep the rung, or record why the climb continues without it."""
        current = self.current if self.finished else None
        assert row.equivalence is not None
        if row.name == AGAIN:  # it adds nothing to a recipe
            if row.equivalence.verdict == "different":
                self._taint_what_contains(row)
            return
        if row.equivalence.verdict == "different":
            row.kept, row.reason = False, row.equivalence.detail
        elif rung is not None and rung.name == COMPILE and (trouble := self._nothing_compiled(row)) is not None:
            row.kept, row.reason = False, trouble
        elif current is None or not current.measurements:
            row.kept = True
        else:
            replaced = None if rung is None else self._in_the_place_of(rung)
            if rung is not None and rung.stand_in and replaced is not None:
                row.kept, row.reason = False, f"stands in for {replaced} where that does not apply"
            else:
                self._decide_by_speed(row, current, rung, replaces=replaced is not None)

    def _nothing_compiled(self, row: Row) -> str | None:
        """Return the compiler's trouble if nothing was compiled. The step is then the eager one, and rungs for compiled
        code should not be added to it."""
        compiled = row.measurements[0].proof.compiled
        return short(compiled.trouble or "") if compiled is not None and not compiled.graphs else None

    def _decide_by_speed(self, row: Row, current: Row, rung: Rung | None, replaces: bool) -> None:
        """Keep the rung if its speed justifies it, and record what decided if that needs saying. A replacement must
        win, or the rung it would replace stays. So must a rung that gives up speed for memory if timings scatter, or
        one lucky row would keep it. Other additions must keep up."""
        scatter = scatter_between(row.measurements, current.measurements)
        must_win = replaces or (rung is not None and not rung.is_usual and scatter > 0)
        if self.settings.keep == "all" and not replaces:
            row.kept = True
            return
        margin = scatter if must_win else None
        winner = self._outrun_by(row, current, margin)
        if winner is not None and self._is_close(row, winner):
            if not self._look_again(row, winner):
                return
            winner = self._outrun_by(row, current, margin)
        row.kept, rival = winner is None, winner or current
        ratio, so_far = rival.seconds / row.seconds, "" if rival is current else ", the fastest so far"
        said = f"{ratio:.2f}x the speed of {rival.name}{so_far}{self._when_decided(row)}"
        if not row.kept:
            doubt = "" if exceeds(ratio, scatter) else f", within the noise of ±{scatter:.0%}"
            company = "; other programs were busy meanwhile" if is_crowded(row.measurements[0]) else ""
            row.reason = f"{said}{doubt}{company}"
        elif ratio < 1.0 - self._noise_between(row, rival):
            row.reason = f"{said}, kept: its quickest steps are at {rival.quick_seconds / row.quick_seconds:.2f}x"

    def _look_again(self, row: Row, winner: Row) -> bool:
        """Run both once more, one after the other, and take the quicker run of each: a process may have been unlucky,
        or other programs were busy, and a rung that is left out never comes back. Return False if one of them was wrong
        this time, which decides too."""
        self.finished.append(row)  # it is measured: an interruption must not lose it
        for one in (winner, row):
            if one.second_run is None:
                self._run_again(one)
        return row.kept is None

    def _run_again(self, row: Row) -> None:
        assert row.job is not None
        row.second_run = ", by the quicker of two runs"
        # Repeats count upwards from 0: this number is none of theirs, so that the two never share an answer.
        result = self.ask(replace(row.job, repeat=-1))
        if isinstance(result, Failure):
            row.second_run = f"; its second run failed: {result.reason}"
            return
        again = self._judge(row, result)
        if again.verdict == "different":
            self._is_wrong(row, again, "second run")
        elif statistics.median(result.step_seconds) < row.seconds:
            first = row.measurements[0]  # compiling took as long as it took the first time
            row.measurements[0], row.equivalence = replace(result, compile_seconds=first.compile_seconds), again

    def _is_wrong(self, row: Row, found: Equivalence, when: str) -> None:
        """Note that a row was wrong in a later run. So is what contains its recipe; but what the first row has in it
        all have, and each of them has a verdict of its own."""
        row.equivalence, row.kept, row.reason = found, False, f"{when}: {found.detail}"
        self._taint_what_contains(row)

    def _taint_what_contains(self, wrong: Row) -> None:
        if wrong.recipe.rungs == self.finished[0].recipe.rungs:
            return
        for row in self.finished:
            if row is not wrong and row.kept is not False and set(wrong.recipe.rungs) <= set(row.recipe.rungs):
                row.kept, row.tainted = False, True
                own = wrong.recipe.rungs == row.recipe.rungs
                row.reason = ("was" if own else f"contains {wrong.name}, which was") + " different when it ran again"

    def _when_decided(self, row: Row) -> str:
        """Say which runs decided, if not the only one."""
        if row.second_run is not None:
            return row.second_run
        return " in the first run, which decides" if self.settings.repeats > 1 else ""

    def _outrun_by(self, row: Row, current: Row, margin: float | None) -> Row | None:
        """Return the row that this one had to match and did not, or None. With a margin it must be faster than the
        current row by that share. Without one it must keep up with the current row and with the fastest so far: small
        losses, each within the noise, must not add up."""
        if margin is not None:
            return None if current.seconds / row.seconds >= 1.0 + margin else current
        fastest = min((one for one in self.finished if one.kept), key=lambda one: one.seconds, default=current)
        return next((rival for rival in (current, fastest) if not self._keeps_up(row, rival)), None)

    def _keeps_up(self, row: Row, rival: Row) -> bool:
        """True unless the row is slower by more than the noise. Disturbances only ever slow a step down, so a rung has
        cost nothing if its quick steps keep up."""
        faster = max(rival.seconds / row.seconds, rival.quick_seconds / row.quick_seconds)
        return faster >= 1.0 - self._noise_between(row, rival)

    def _is_close(self, row: Row, winner: Row) -> bool:
        """True if the decision should be taken again: an unlucky process, or other programs, may have made it."""
        least = CLEARLY_SLOWER * (1.0 - self._noise_between(row, winner))
        return winner.seconds / row.seconds > least or is_crowded(row.measurements[0])

    def _noise_between(self, row: Row, rival: Row) -> float:
        return tolerated_noise(row.measurements, rival.measurements, self.hardware.kind)

    def _reference_curve(self, recipe: Recipe) -> tuple[float, ...] | None:
        """Return the fp32 curve of the recipe's maths; None if it failed. Rows with unchanged maths share a job."""
        changing = tuple(name for name in recipe.rungs if find_rung(name).maths is Maths.CHANGES)
        result = self.ask(self._job(replace(recipe, rungs=changing), kind="reference"))
        if isinstance(result, Measurement):
            return result.loss_curve
        self.reference_trouble = result.reason
        return None

    def _yardstick(self, row: Row, measurement: Measurement, precision: str) -> tuple[float, ...] | None:
        """Return the curve of plain code at the row's precision if the row's own is in doubt; most are not."""
        if self.workload.why_unchecked or not is_in_doubt(measurement.loss_curve, row.reference_curve, precision):
            return None
        recipe = replace(row.recipe, rungs=yardstick_rungs(row.recipe.rungs))
        result = self.ask(self._job(recipe, kind="yardstick"))
        return result.loss_curve if isinstance(result, Measurement) else None

    def _job(self, recipe: Recipe, *, kind: str = "measure", bit_exact_rung: str | None = None, repeat: int = 0) -> Job:
        return Job(
            workload=self.workload,
            recipe=recipe,
            device=self.settings.device,
            ranks=self.hardware.ranks,
            layout=self.hardware.layout,
            tokens=TOKENS_FILE,
            kind=kind,
            check_steps=self.settings.check_steps,
            timed_steps=self.settings.timed_steps,
            bit_exact_rung=bit_exact_rung,
            repeat=repeat,
        )

    def _repeat(self, on_start: Callable[[str, str, int, int], None]) -> Iterator[Row]:
        """Measure all rows again, in the same order, as often as asked: drift of the machine affects all alike."""
        measured = [row for row in self.finished if row.measurements]
        for repeat in range(1, self.settings.repeats):
            for number, row in enumerate(measured, start=1):
                on_start(
                    row.name, f"{row.title}, repeat {repeat + 1} of {self.settings.repeats}", number, len(measured)
                )
                assert row.job is not None
                result = self.ask(replace(row.job, repeat=row.job.repeat + repeat))
                self._add_repeat(row, result, repeat + 1)
                yield row

    def _add_repeat(self, row: Row, result: Result, number: int) -> None:
        """Add a repeat to its row. A failed repeat is added to the row's reason."""
        if isinstance(result, Failure):
            row.reason = "; ".join(filter(None, (row.reason, f"run {number} failed: {result.reason}")))
            return
        row.measurements.append(result)
        again = self._judge(row, result)
        if again.verdict == "different":
            self._is_wrong(row, again, f"run {number}")

    def _rebatch(self, on_start: Callable[[str, str, int, int], None]) -> Iterator[Row]:
        """Find the best micro batch for rows that are right, and for rows that only failed for lack of memory."""
        rows = [row for row in self.finished if row.name != AGAIN and _runs_somewhere(row)]
        for number, row in enumerate(rows, start=1):

            def on_size(size: int, row: Row = row, number: int = number) -> None:
                on_start(row.name, f"micro batch {size}", number, len(rows))

            row.rebatched = self._own_batch(row, on_size)
            yield row

    def _own_batch(self, row: Row, on_size: Callable[[int], None]) -> BatchChoice:
        fixed, settings = row.recipe.micro_batch, self.settings
        answer = row.failure or together(row.measurements)
        jobs = SizedJobs(
            ask=self.ask,
            job=self._job(row.recipe),
            fault=lambda measurement: self._gradient_fault(row, measurement),
            known={fixed: answer},
            on_size=on_size,
        )
        where = range_of(
            self.workload.shape,
            plan_of(row.recipe.rungs),
            device=self.hardware.kind,
            micro_batch=fixed,
            seconds_per_sequence=row.quick_seconds / fixed if row.measurements else None,
            # Models that are not built in are predicted roughly: for them, measured sizes show what fits.
            memory_bytes=settings.memory_bytes if self.workload.source == BUILT_IN else None,
            headroom=settings.headroom,
            layout=self.hardware.arranged,
        )
        return best_batch(
            jobs,
            start=where.start,
            limit=where.limit,
            noise=self._noise_of(row),
            sequence=self.workload.shape.sequence,
            ranks=self.hardware.arranged.data,
            memory_bytes=settings.memory_bytes,
            headroom=settings.headroom,
            global_sequences=settings.global_batch,
            known=(fixed,),
        )

    def _noise_of(self, row: Row) -> float:
        """Return the noise of a comparison between two sizes, each run once."""
        device, first = self.hardware.kind, row.measurements[:1]
        return tolerated_noise(first, first, device) if first else UNSEEN_RUN_TO_RUN[device]

    def _gradient_fault(self, row: Row, measurement: Measurement) -> str | None:
        """Return what is wrong with the first step at another size; the loss curve was checked at the fixed one."""
        found = judge(
            maths=row.maths.value,
            precision=plan_of(row.recipe.rungs).precision,
            measurement=measurement,
            reference=None,
            base=None,
            plain=None,
            ln_vocab=self.workload.shape.ln_vocab,
            unchecked=self.workload.why_unchecked,
        )
        return found.detail if found.verdict == "different" else None

    def _done(self, row: Row) -> Row:
        if not (self.finished and self.finished[-1] is row):
            self.finished.append(row)
        return row


def together(measurements: Sequence[Measurement]) -> Measurement:
    """Return the first one with the steps of all."""
    steps = tuple(seconds for one in measurements for seconds in one.step_seconds)
    return replace(measurements[0], step_seconds=steps)


def _runs_somewhere(row: Row) -> bool:
    """True if the row is worth running at another micro batch: training that is wrong has no speed worth knowing."""
    if row.failure is not None:
        return row.failure.kind in MEMORY_KINDS
    return row.equivalence is not None and row.equivalence.verdict != "different" and not row.tainted


def least_learning(recipe: Recipe) -> float:
    """Return how much a recipe with changed maths must learn: the smallest share among those of its rungs."""
    shares = (find_rung(name).least_learning for name in recipe.rungs)
    return min((share for share in shares if share is not None), default=LEAST_LEARNING)
