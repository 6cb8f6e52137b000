"""The search for the fastest recipe that is still right, within a number of minutes.

    tuner = Tuner(space, settings, answers, Budget(8 * 60), view)
    tuner.run()
    tuner.best, tuner.trials, tuner.stopped

The search begins where the usual rungs and the predictions point; if these do not train right together, it first finds
the rung that breaks them, by halves. It turns one knob at a time, keeps what is faster, finds the micro batch, and
repeats until nothing improves. Each trial starts as a look: if its steps cannot keep up with the fastest so far it is
given up unproved, which is what happens to most. The others get the whole measurement with its check, and the leaders
are timed again in turns. The effort per candidate thus rises by levels as their number falls, as in successive
halving. `answers` answers jobs, from a worker or from memory. Decisions rest only on the answers and on the times they
report, so a run that is repeated asks the same questions. Why no library does this: docs/tune.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from redline.core.job import Job, Result
from redline.core.measurement import Failure, Measurement, spread_of
from redline.core.recipe import Recipe
from redline.core.units import human_bytes
from redline.predict.noise import UNSEEN_RUN_TO_RUN
from redline.predict.verdict import is_in_doubt, judge
from redline.rungs import Maths, find_rung, group_of, plan_of, yardstick_rungs
from redline.search.batch_size import MEMORY_KINDS, STEPPING_SECONDS, STEPS_PER_TRIAL, best_batch
from redline.search.climb import TOKENS_FILE
from redline.search.noise import tolerated_noise
from redline.search.space import VERDICTS, Space, compiled_part
from redline.search.trials import (
    Answer,
    Answers,
    Budget,
    DeviceLostError,
    OutOfTimeError,
    Trial,
    TuneSettings,
    View,
)

HOPELESS = 0.90  # share of the present speed: a change predicted to reach less is not tried
CLEAR_LOSS = 0.90  # share of its base's speed: a change that reached less is not tried again on another base
GIVE_UP = {"cuda": 0.03, "cpu": 0.15}  # give up what is slower than the fastest by more than a short look's error
NARROW = 2.0  # times the spread between runs: a win by less is measured again
LEADERS, MOST_REPEATS = 4, 3
LARGE_PART = 1 / 3  # share of the time that is left
# Assumed seconds of a trial before one of its kind was seen. Compiling: 22 to 28 s for GPT-2's twelve layers on an H200
# (records), 26 to 36 s on two cores. The rest: starting torch, checks and steps.
TRIAL_SECONDS = {"cuda": 20.0, "cpu": 15.0}
COMPILE_SECONDS, COMPILED_LAYERS = {"cuda": 28.0, "cpu": 36.0}, 12
REPLAY_MARGIN_SECONDS = 10.0  # a start-up that is quicker by less than this must not make room for another trial
FAILURES_IN_A_ROW = 2  # then check that the device is still there


class Stage(Enum):
    """What is tried first, and what only when nothing else is left."""

    CODE = "changes the code that runs"
    REST = "changes what no kernel notices, or saves memory that nothing needs"
    DEAR = "compiles for minutes"


class Tuner:
    def __init__(self, space: Space, settings: TuneSettings, answers: Answers, budget: Budget, view: View) -> None:
        self.space, self.settings, self.answers, self.budget, self.view = space, settings, answers, budget, view
        self.kind = space.hardware.kind
        self.trials: dict[Recipe, Trial] = {}
        """Everything that was run, in order."""
        self.not_tried: dict[Recipe, str] = {}
        """What was considered but not run, and why."""
        self.references: dict[Recipe, Measurement | Failure] = {}
        """fp32 references, by a recipe of the micro batch and the rungs that change the maths."""
        self.yardsticks: dict[Recipe, Measurement | Failure] = {}
        """Plain code at a precision, by a recipe of the micro batch and its `yardstick_rungs`."""
        self.reference_seconds: dict[int, float] = {}
        """Seconds that a reference took, by micro batch."""
        self.culprits: dict[str, Trial] = {}
        """Rungs that broke the start, each with the trial that it broke."""
        self.resized: set[tuple[str, ...]] = set()
        self.asked = 0
        """Number of answers, including remembered ones."""
        self.failures_in_a_row = 0
        self.short_of_time = False
        """True if something was left undone because it would have taken too long."""
        self.proving = False
        self.stopped: str | None = None
        """'converged', 'minutes' or 'device-lost' at the end."""
        self.trouble: str | None = None

    def run(self) -> None:
        try:
            current = self._start()
            self._look_at_baseline(current)
            current = self._compile_after_all(self._mend(current))
            while True:
                asked = self.asked
                current = self._search(current)
                for trial in self._leaders():  # at its own best size, one may leave the others behind
                    self._resize(trial)
                self._race()
                first = self._first_of(self._ranking()) or current
                if first is current or self.asked == asked:  # two equal trials may alternate forever
                    break
                current = first
            self.stopped = "minutes" if self.short_of_time else "converged"
        except OutOfTimeError:
            self.stopped = "minutes"
        except DeviceLostError as error:
            self.stopped, self.trouble = "device-lost", str(error)
        if self.stopped == "minutes":
            with suppress(OutOfTimeError, DeviceLostError):
                self._race()
        if self.stopped != "device-lost":
            with suppress(OutOfTimeError, DeviceLostError):
                self._price_of_compiling()

    # what is there

    @property
    def baseline(self) -> Trial | None:
        return self.trials.get(self.space.baseline())

    @property
    def best(self) -> Trial | None:
        """The first of the trials that were proved (`_first_of`)."""
        return self._first_of(list(filter(self.is_proved, self.trials.values())))

    def _first_of(self, trials: list[Trial]) -> Trial | None:
        """Return the fastest trial. Among those that noise cannot tell from it, take the one that compiles least; then
        the one with the fewest unusual rungs (`Rung.is_usual`), as each of them costs something besides; then the
        fastest."""
        fastest = max(trials, key=self.rate, default=None)
        if fastest is None:
            return None
        equal = [trial for trial in trials if self.keeps_up(trial, fastest)]
        return min(equal, key=lambda trial: (*price_of(trial.recipe), -self.rate(trial)))

    def rate(self, trial: Trial) -> float:
        """Return tokens per second of all ranks, counting those of a tensor group once; 0 if the trial did not run."""
        tokens = self.space.hardware.arranged.data * trial.recipe.micro_batch * self.space.workload.shape.sequence
        return tokens / trial.step_seconds if trial.ran else 0.0

    def keeps_up(self, trial: Trial, other: Trial) -> bool:
        """True if `trial` is not slower than `other` beyond the noise."""
        noise = tolerated_noise(trial.steady, other.steady, self.kind)
        return self.rate(trial) >= (1 - noise) * self.rate(other)

    def is_sound(self, trial: Trial) -> bool:
        """True if the trial was checked without finding a fault so far, and its memory is within the limit. Until its
        own curve was compared with fp32's, a fault of some of its rungs at this size or a smaller one is its own."""
        if not trial.checked or trial.over_limit is not None:
            return False
        if trial.verdict == "not-checked":
            return not self._has_fault_within(trial.recipe)
        return trial.verdict != "different"

    def is_proved(self, trial: Trial) -> bool:
        return self.is_sound(trial) and trial.verdict in VERDICTS[self.settings.allow]

    def _has_fault_within(self, recipe: Recipe) -> bool:
        return any(
            trial.verdict == "different"
            and trial.recipe.micro_batch <= recipe.micro_batch
            and set(trial.recipe.rungs) <= set(recipe.rungs)
            for trial in self.trials.values()
        )

    def _is_broken(self, trial: Trial) -> bool:
        """True if the trial's rungs do not train right together; lack of memory is no such fault."""
        if trial.failure is not None:
            return trial.failure.kind not in MEMORY_KINDS
        return trial.verdict == "different"

    # beginning

    def _start(self) -> Trial:
        """Try the first recipe that can win. If compiling it would take a large part of the time, leave compile out, so
        that there is something to show before anything is risked."""
        recipe, label = self.space.start(), "the usual rungs, as predicted best"
        risky = self._expected(recipe) > LARGE_PART * self.budget.left and self._recall(self._job(recipe)) is None
        if risky and plan_of(recipe.rungs).compile:
            knob = next(knob for knob in self.space.knobs if knob.name == "compile")
            recipe, label = self.space.change(recipe, knob, None) or recipe, "the usual rungs, without compile"
        return self._try_to_the_end(recipe, label, None)

    def _try_to_the_end(self, recipe: Recipe, label: str, onto: Trial | None) -> Trial:
        """Find out whether a recipe trains right, however slow it is, at a smaller size if it does not fit after all.
        It is proved at once: a run that is cut short then has something to show."""
        trial = self._try(recipe, label, onto, replace(self._job(recipe), give_up_seconds=None))
        lacks_memory = trial.over_limit is not None or (trial.failure is not None and trial.failure.kind == "oom")
        smaller = self.space.smaller(recipe) if lacks_memory and self.space.micro_batch is None else None
        if smaller is not None:
            return self._try_to_the_end(smaller, f"micro batch {smaller.micro_batch}", trial)
        with suppress(OutOfTimeError):
            self._prove(trial)
        return trial

    def _look_at_baseline(self, start: Trial) -> None:
        """Time the baseline, which speed-ups are measured against; its time is enough, since nobody will choose it. It
        comes after the start, which matters more to a run that has no time for both. If the start is slower, it was
        disturbed and is timed again; or else the baseline is the recipe to beat, and is measured like any other. After
        a start that cannot win it is, too: it may be all that there is to show."""
        recipe = self.space.baseline()
        if self.space.refuses(recipe) is not None:
            return
        right = self.is_sound(start)
        plain = self._try(recipe, "the plain way", None, self._job(recipe, kind="look" if right else "measure"))
        if plain.ran and right and not self.keeps_up(start, plain):
            self._repeat(start, 1)
            self._check_baseline()

    def _mend(self, start: Trial) -> Trial:
        """Leave the rungs that break a start out of it, before anything is built on it. Each of them costs as many
        trials as the rungs can be halved, and one of what is left."""
        trial, right = start, 0
        while self._is_broken(trial) and (rungs := self.space.chosen(trial.recipe)):
            right = self._count_right(trial, rungs, right)
            culprit = rungs[right]
            self.culprits[culprit] = trial
            rest = self.space.only(trial.recipe, [name for name in rungs if name != culprit])
            trial = self._try_to_the_end(rest, f"without {culprit}", trial)
        return trial

    def _count_right(self, trial: Trial, rungs: Sequence[str], right: int) -> int:
        """Return how many of a broken trial's rungs, in the ladder's order, train right together; the next one breaks
        them. `right`: how many are known to be right."""
        broken = len(rungs)
        while broken - right > 1:
            middle = (right + broken) // 2
            recipe = self.space.only(trial.recipe, rungs[:middle])
            part = self._try_to_the_end(recipe, f"the rungs up to {rungs[middle - 1]}", trial)
            right, broken = (right, middle) if self._is_broken(part) else (middle, broken)
        return broken - 1

    def _compile_after_all(self, current: Trial) -> Trial:
        """Try compiling if the start did without it, now that there is something to show."""
        recipe = replace(self.space.start(), micro_batch=current.recipe.micro_batch)
        if current.compiled or recipe == current.recipe:
            return current
        challenger = self._challenge(current, recipe)
        return challenger if challenger is not None and self._wins(challenger, current) else current

    # turning knobs

    def _search(self, current: Trial) -> Trial:
        """Turn knobs until nothing improves: what changes the code, the micro batch, and what no kernel notices take
        turns; what compiles for minutes comes once nothing cheaper is left."""
        if current.ran and self.space.predicted_rate(current.recipe) is None:
            current = self._resize(current)  # its size was not predicted
        while True:
            found = self._turn_knobs(current, Stage.CODE)
            found = self._resize(found) if found.ran else found
            found = self._turn_knobs(found, Stage.REST)
            if found is current:
                found = self._turn_knobs(found, Stage.DEAR)
            if found is current:
                return current
            current = found

    def _turn_knobs(self, current: Trial, stage: Stage) -> Trial:
        tried: set[Recipe] = set()
        while (recipe := self._next_change(current, tried, stage)) is not None:
            tried.add(recipe)
            challenger = self._challenge(current, recipe)
            if challenger is not None and self._wins(challenger, current):
                current = challenger
        return current

    def _wins(self, challenger: Trial, current: Trial) -> bool:
        """True if the challenger wins. A narrow win must survive a second measurement: of many challengers the luckiest
        looks faster than it is, and later ones would be compared with its luck."""
        if not self._is_better(challenger, current):
            return False
        if not current.ran or self.rate(challenger) > (1 + NARROW * UNSEEN_RUN_TO_RUN[self.kind]) * self.rate(current):
            return True
        try:
            self._repeat(challenger, 1)
        except OutOfTimeError:
            self.short_of_time = True
        return self._is_better(challenger, current)

    def _next_change(self, current: Trial, tried: set[Recipe], stage: Stage) -> Recipe | None:
        """Return the most promising neighbour of this stage that was not tried in this round, or None."""
        promises = {recipe: self._promise(current.recipe, recipe) for recipe in self._neighbours(current.recipe)}
        moves = [recipe for recipe, (its_stage, *_) in promises.items() if its_stage is stage and recipe not in tried]
        return min(moves, key=lambda recipe: promises[recipe][1:], default=None)

    def _neighbours(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield recipes with one knob turned. Where memory is short, a change that saves some is tried with the size it
        makes room for: at the same size it only costs time."""
        short = self._memory_binds(recipe)
        for changed in self.space.neighbours(recipe):
            if self.space.shares_more(recipe, changed) and not short:
                continue  # it would save memory that nothing needs, and send more
            larger = self.space.larger(changed) if short and self._saves_memory(recipe, changed) else None
            yield larger or changed

    def _promise(self, current: Recipe, changed: Recipe) -> tuple[Stage, bool, float]:
        """Return the stage of a change and its order within the stage: additions and swaps before removals, and among
        them the highest prediction first."""
        came = set(changed.rungs) - set(current.rungs)
        idle = self._saves_memory(current, changed) and changed.micro_batch == current.micro_batch
        if compile_factor(changed) > max(1.0, compile_factor(current)):
            stage = Stage.DEAR
        elif compiled_part(changed) == compiled_part(current) or (idle and not all(map(is_usual, came))):
            stage = Stage.REST
        else:
            stage = Stage.CODE
        return stage, not came, -self._predicted_ratio(current, changed)

    def _predicted_ratio(self, current: Recipe, changed: Recipe) -> float:
        """Return the predicted speed after the change over the speed before it; 1 without a prediction."""
        here, there = self.space.predicted_rate(current), self.space.predicted_rate(changed)
        return 1.0 if here is None or there is None else there / here

    def _saves_memory(self, current: Recipe, changed: Recipe) -> bool:
        return self.space.predicted_bytes(changed) < 0.99 * self.space.predicted_bytes(current)

    def _memory_binds(self, recipe: Recipe) -> bool:
        largest = self.space.largest(recipe)
        return self.space.micro_batch is None and largest is not None and largest < 2 * recipe.micro_batch

    def _challenge(self, current: Trial, recipe: Recipe) -> Trial | None:
        """Return the trial of a neighbour, or None if it is not tried. `not_tried` then has the reason, unless the same
        change has lost on another base."""
        ratio = self._predicted_ratio(current.recipe, recipe)
        if recipe in self.trials:
            return self.trials[recipe]
        if (reason := self.space.refuses(recipe) or self._culprit_in(recipe)) is not None:
            self.not_tried[recipe] = reason
            return None
        if ratio < HOPELESS:
            self.not_tried[recipe] = f"predicted to be {1 - ratio:.0%} slower"
            return None
        if self._has_lost(current.recipe, recipe):
            return None  # its trial on another base shows how it lost
        if not self._may_try(recipe):
            self.not_tried[recipe] = f"would take about {self._expected(recipe):.0f} s, and less was left"
            self.short_of_time = True
            return None
        self.not_tried.pop(recipe, None)
        return self._try(recipe, difference(current.recipe, recipe), current)

    def _culprit_in(self, recipe: Recipe) -> str | None:
        found = next((name for name in recipe.rungs if name in self.culprits), None)
        return None if found is None else f"{found} broke #{self.culprits[found].number}"

    def _has_lost(self, before: Recipe, after: Recipe) -> bool:
        """True if the same change lost clearly on another base, or broke it."""
        change = change_between(before, after)
        return any(
            trial.onto is not None
            and change_between(trial.onto.recipe, trial.recipe) == change
            and self._lost_clearly(trial, trial.onto)
            for trial in self.trials.values()
        )

    def _lost_clearly(self, trial: Trial, base: Trial) -> bool:
        if self._is_broken(trial):
            return not self._is_broken(base)
        return trial.ran and base.ran and self.rate(trial) < CLEAR_LOSS * self.rate(base)

    def _is_better(self, trial: Trial, current: Trial) -> bool:
        """True if the trial is sound and faster. One that compiles for longer must win beyond the noise."""
        if not self.is_sound(trial):
            return False
        if not self.is_sound(current):
            return True
        dearer = compile_factor(trial.recipe) > compile_factor(current.recipe)
        needed = 1 + UNSEEN_RUN_TO_RUN[self.kind] if dearer else 1.0
        return self.rate(trial) > needed * self.rate(current)

    # the micro batch

    def _resize(self, current: Trial) -> Trial:
        """Return the trial at the micro batch that is fastest for its rungs. Sizes are searched once per set of rungs,
        and not at all if the user set one."""
        rungs = current.recipe.rungs
        if self.space.micro_batch is not None or rungs in self.resized:
            return current
        self.resized.add(rungs)

        def ask(size: int) -> Result:
            recipe = Recipe(rungs=rungs, micro_batch=size)
            trial = self._try(recipe, f"micro batch {size}", current)
            if trial.verdict == "different":
                return Failure(kind="different", reason="not the same training at this size")
            return trial.failure or trial.measurements[0]

        choice = best_batch(
            ask,
            start=current.recipe.micro_batch,
            limit=self._most_sequences(current),
            noise=UNSEEN_RUN_TO_RUN[self.kind] / 2,  # what this leaves on the table adds to what the knobs leave
            sequence=self.space.workload.shape.sequence,
            ranks=self.space.hardware.arranged.data,
            memory_bytes=self.space.memory_limit,
            headroom=0.0,
            global_sequences=self.space.global_batch,
            known=[trial.recipe.micro_batch for trial in self.trials.values() if trial.recipe.rungs == rungs],
        )
        if choice.micro_batch is None:
            return current
        sized = self.trials[replace(current.recipe, micro_batch=choice.micro_batch)]
        return sized if self._is_better(sized, current) else current

    def _most_sequences(self, current: Trial) -> int | None:
        """Return the largest size to run: what is predicted to fit, and what a trial has time to step through. A rough
        prediction is no limit, since measured sizes show what fits."""
        by_memory = None if self.space.predicts_roughly else self.space.largest(current.recipe)
        per_sequence = current.step_seconds / current.recipe.micro_batch
        by_time = max(1, round(STEPPING_SECONDS[self.kind] / STEPS_PER_TRIAL / per_sequence))
        return by_time if by_memory is None else max(1, min(by_memory, by_time))

    # the end

    def _race(self) -> None:
        """Time the leaders in turns, until one is ahead of the others beyond the noise."""
        self.proving = True
        try:
            self._check_baseline()
            self._prove_fastest()
            for repeat in range(1, MOST_REPEATS + 1):
                leaders = self._leaders()
                if len(leaders) < 2:
                    break
                for trial in leaders:
                    self._repeat(trial, repeat)
            self._check_baseline()
            self._prove_fastest()
        finally:
            self.proving = False

    def _check_baseline(self) -> None:
        """Measure the baseline like any other recipe if nothing is faster: it is the answer then. Noise is no excuse
        here: a winner slower than what it is compared with has won nothing."""
        plain, ranking = self.baseline, self._ranking()
        if plain is None or not plain.ran or plain.checked:
            return
        if ranking and self.rate(ranking[0]) >= self.rate(plain):
            return
        job = replace(self._job(plain.recipe), give_up_seconds=None)
        answer = self._answer(job, 2 * plain.seconds[0], plain.label, plain.number)
        plain.seconds.append(answer.seconds)
        if isinstance(answer.result, Measurement):
            plain.measurements.insert(0, answer.result)
            self._judge(plain)
        self.view.trial_finished(plain)

    def _prove_fastest(self) -> None:
        """Prove trials, fastest first, until one passes."""
        next(filter(self._prove, self._ranking()), None)

    def _ranking(self) -> list[Trial]:
        return sorted(filter(self.is_sound, self.trials.values()), key=self.rate, reverse=True)

    def _leaders(self) -> list[Trial]:
        ranking = self._ranking()
        return [trial for trial in ranking if self.keeps_up(trial, ranking[0])][:LEADERS]

    def _repeat(self, trial: Trial, repeat: int) -> None:
        if len(trial.measurements) > repeat:
            return
        job = replace(trial.job, kind="look", repeat=repeat, give_up_seconds=None)
        answer = self._answer(job, self._again(trial), f"{trial.label}, again", trial.number)
        trial.seconds.append(answer.seconds)
        if isinstance(answer.result, Measurement):
            trial.measurements.append(answer.result)
            trial.over_limit = trial.over_limit or self._over_limit(answer.result)
        self.view.trial_finished(trial)
        self._check_device(answer.result)

    def _price_of_compiling(self) -> None:
        """Time the winner's eager twin, so that compiling can be weighed against the length of a run."""
        best = self.best
        eager = None if best is None else self.eager_twin(best)
        if best is not None and eager is not None and self.space.refuses(eager) is None:
            self._try(eager, difference(best.recipe, eager), best, self._job(eager, kind="look"))

    def eager_twin(self, trial: Trial) -> Recipe | None:
        """Return the same recipe without compile and what needs it; None if it does not compile."""
        knob = next((knob for knob in self.space.knobs if knob.name == "compile"), None)
        return self.space.change(trial.recipe, knob, None) if trial.compiled and knob is not None else None

    # asking

    def _try(self, recipe: Recipe, label: str, onto: Trial | None, job: Job | None = None) -> Trial:
        """Run a recipe, unless it has been run."""
        if recipe in self.trials:
            return self.trials[recipe]
        number, job = len(self.trials) + 1, job or self._job(recipe)
        trial = Trial(number=number, recipe=recipe, label=label, onto=onto, job=job)
        answer = self._answer(trial.job, self._expected(recipe), trial.label, trial.number, first=not self.trials)
        self.trials[recipe] = trial
        trial.seconds, trial.remembered = [answer.seconds], answer.remembered
        if isinstance(answer.result, Failure):
            trial.failure = answer.result
        else:
            trial.measurements.append(answer.result)
            trial.over_limit = self._over_limit(answer.result)
            self._judge(trial)
        self.view.trial_finished(trial)
        self._check_device(answer.result)
        return trial

    def _job(self, recipe: Recipe, kind: str = "measure") -> Job:
        return Job(
            workload=self.space.workload,
            recipe=recipe,
            device=self.settings.device,
            ranks=self.space.hardware.ranks,
            layout=self.space.hardware.layout,
            tokens=TOKENS_FILE,
            kind=kind,
            check_steps=self.settings.check_steps,
            timed_steps=self.settings.timed_steps,
            give_up_seconds=self._give_up(recipe) if kind == "measure" else None,
        )

    def _give_up(self, recipe: Recipe) -> float | None:
        """Return the step time beyond which the recipe has lost; None before there is anything to lose against."""
        ranking = self._ranking()
        if not ranking:
            return None
        per_sequence = ranking[0].step_seconds / ranking[0].recipe.micro_batch
        return (1 + GIVE_UP[self.kind]) * per_sequence * recipe.micro_batch

    def _answer(self, job: Job, expected_seconds: float, label: str, number: int, first: bool = False) -> Answer:
        """Answer a job, from memory if possible. A worker is started only if there is time for it, and gets no more
        than that; the view is notified just before. The first trial and the first proof may start whenever any time is
        left: without them there is no result."""
        self.asked += 1
        known = self._recall(job)
        if known is not None:
            self.view.trial_started(label, number)
            self.budget.remembered += known.seconds if known.counts else 0.0
            self.answers.adopt(job, known)
            return known
        allowed = self.budget.left - self._reserve()
        if allowed <= 0 or not (first or self._affordable(expected_seconds)):
            raise OutOfTimeError
        self.view.trial_started(label, number)
        return self.answers.ask(job, allowed)

    def _recall(self, job: Job) -> Answer | None:
        known = self.answers.recall(job, self.budget.left - self._reserve())
        return None if known is None or _is_stale(known.result, job) else known

    def _may_try(self, recipe: Recipe) -> bool:
        """True if the answer is known or there is time for it."""
        return self._recall(self._job(recipe)) is not None or self._affordable(self._expected(recipe))

    def _affordable(self, seconds: float) -> bool:
        margin = REPLAY_MARGIN_SECONDS if self.budget.remembered else 0.0
        return seconds + self._reserve() + margin <= self.budget.left

    def _reserve(self) -> float:
        """Return the seconds needed at the end: for the leader's proof, and for a second look at two leaders."""
        ranking = [] if self.proving else self._ranking()
        if not ranking:
            return 0.0
        proof = 0.0 if self.is_proved(ranking[0]) else self._expected_reference(ranking[0].recipe)
        return proof + sum(self._again(trial) for trial in ranking[:2] if len(ranking) > 1)

    def _expected(self, recipe: Recipe) -> float:
        """Return the expected seconds of a recipe's trial: the longest of its kind so far, or an estimate."""
        factor = compile_factor(recipe)
        ran = [trial for trial in self.trials.values() if trial.ran]
        alike = [trial.seconds[0] for trial in ran if compile_factor(trial.recipe) == factor]
        if alike:
            return max(alike)
        eager = [trial.seconds[0] for trial in ran if not trial.compiled]
        layers = max(1.0, self.space.workload.shape.layers / COMPILED_LAYERS)
        return max(eager, default=TRIAL_SECONDS[self.kind]) + factor * layers * COMPILE_SECONDS[self.kind]

    def _again(self, trial: Trial) -> float:
        """Return the expected seconds of a repeat, which finds its code compiled and checks nothing."""
        if len(trial.seconds) > 1:
            return max(trial.seconds[1:])
        return max(trial.seconds[0] - (trial.compile_seconds or 0.0), 0.0)

    def _expected_reference(self, recipe: Recipe) -> float:
        """Return the expected seconds of a reference: what one of this size or larger took, or else what the look at
        the baseline took plus its steps at this size."""
        size = recipe.micro_batch
        known = [seconds for other, seconds in self.reference_seconds.items() if other >= size]
        if known:
            return min(known)
        plain = self.baseline
        if plain is None or not plain.ran:
            eager = [trial.seconds[0] for trial in self.trials.values() if trial.ran and not trial.compiled]
            return max(eager, default=2 * TRIAL_SECONDS[self.kind])
        per_sequence = plain.step_seconds / plain.recipe.micro_batch
        return plain.seconds[0] + self.settings.check_steps * size * per_sequence

    def _check_device(self, result: Result) -> None:
        """End the run if the device is gone. A single crash is only that recipe's row."""
        broken = isinstance(result, Failure) and result.kind in ("error", "killed", "timeout")
        self.failures_in_a_row = self.failures_in_a_row + 1 if broken else 0
        if self.failures_in_a_row >= FAILURES_IN_A_ROW:
            reason = self.answers.trouble()
            if reason is not None:
                raise DeviceLostError(reason)
            self.failures_in_a_row = 0

    def _over_limit(self, measurement: Measurement) -> str | None:
        """Return why a recipe's use of memory rules it out; None if it does not. Retries come and go with
        fragmentation, so they are no reason if the user chose the size."""
        if measurement.alloc_retries and self.space.micro_batch is None:
            return f"the allocator ran out of memory and gave its cache back (retries: {measurement.alloc_retries})"
        limit = self.space.memory_limit
        if limit is None or measurement.peak_bytes is None:
            return None
        taken = measurement.peak_bytes + (measurement.outside_bytes or 0)
        return None if taken <= limit else f"took {human_bytes(taken)} of the {human_bytes(limit)} it may"

    # proof

    def _prove(self, trial: Trial) -> bool:
        """Compare a checked trial with the fp32 curve of its maths; True if it may win."""
        if not self.is_sound(trial):
            return False
        if not self.is_proved(trial):
            before, self.proving = self.proving, True
            try:
                self._ask_references(trial)
            finally:
                self.proving = before
            self._judge(trial)
            self.view.trial_finished(trial)
        return self.is_proved(trial)

    def _ask_references(self, trial: Trial) -> None:
        for recipe in self._references_of(trial):
            if recipe in self.references:
                continue
            job = replace(self._job(recipe, kind="reference"), give_up_seconds=None)
            nothing_proved = not any(map(self.is_proved, self.trials.values()))
            expected, label = self._expected_reference(recipe), "the fp32 reference"
            answer = self._answer(job, expected, label, trial.number, first=nothing_proved)
            self.reference_seconds[recipe.micro_batch] = answer.seconds
            self.references[recipe] = answer.result
            self._check_device(answer.result)

    def _references_of(self, trial: Trial) -> Iterator[Recipe]:
        """Yield the recipe with the trial's own maths and, if that is not the published model's, the unchanged one."""
        changing = tuple(name for name in trial.recipe.rungs if find_rung(name).maths is Maths.CHANGES)
        yield replace(trial.recipe, rungs=changing)
        if changing != self.space.published:
            yield replace(trial.recipe, rungs=self.space.published)

    def _judge(self, trial: Trial) -> None:
        """Judge a trial as a ladder judges a row. Before the reference has run, only the first step counts."""
        if not trial.checked:
            return
        curves = [self.references.get(recipe) for recipe in self._references_of(trial)]
        own, plain = (one.loss_curve if isinstance(one, Measurement) else None for one in (curves[0], curves[-1]))
        trial.reference_curve = own
        trial.equivalence = judge(
            maths=self.maths_of(trial.recipe).value,
            precision=plan_of(trial.recipe.rungs).precision,
            measurement=trial.measurements[0],
            reference=own,
            base=None,
            plain=plain,
            yardstick=self._yardstick(trial),
            ln_vocab=self.space.workload.shape.ln_vocab,
            unchecked=self.space.workload.why_unchecked,
        )
        failed = next((one for one in curves if isinstance(one, Failure)), None)
        if trial.equivalence.verdict != "not-checked":
            return
        if failed is not None:
            trial.equivalence = replace(trial.equivalence, detail=f"{trial.equivalence.detail}: {failed.reason}")
        elif None in curves:  # not needed so far, and never for what does not win
            trial.equivalence = replace(trial.equivalence, detail="its fp32 reference was not run")

    def _yardstick(self, trial: Trial) -> tuple[float, ...] | None:
        """Return the curve of plain code at the trial's precision, as a ladder does, if the trial's curve is in doubt.
        It remains in doubt if there is no time left."""
        precision, curve = plan_of(trial.recipe.rungs).precision, trial.measurements[0].loss_curve
        if self.space.workload.why_unchecked or not is_in_doubt(curve, trial.reference_curve, precision):
            return None
        recipe = replace(trial.recipe, rungs=yardstick_rungs(trial.recipe.rungs))
        if recipe not in self.yardsticks:
            job = replace(self._job(recipe, kind="yardstick"), give_up_seconds=None)
            expected, label = self._expected_reference(recipe), "plain code at its precision"
            with suppress(OutOfTimeError):
                self.yardsticks[recipe] = self._answer(job, expected, label, trial.number).result
                self._check_device(self.yardsticks[recipe])
        found = self.yardsticks.get(recipe)
        return found.loss_curve if isinstance(found, Measurement) else None

    def maths_of(self, recipe: Recipe) -> Maths:
        """Return the strongest change beyond the published model, which is the reference itself."""
        promises = [find_rung(name).maths for name in recipe.rungs if name not in self.space.published]
        return max(promises, key=list(Maths).index, default=Maths.BIT_EXACT)


def _is_stale(result: Result, job: Job) -> bool:
    """True for a look that lost against a faster trial than the fastest now: it says too little."""
    if job.kind != "measure" or isinstance(result, Failure) or result.gradients is not None:
        return False
    return job.give_up_seconds is None or spread_of(result.step_seconds).p10 <= job.give_up_seconds


def compile_factor(recipe: Recipe) -> float:
    """Return a recipe's compile time in units of a plain torch.compile; 0 if it does not compile."""
    if not plan_of(recipe.rungs).compile:
        return 0.0
    return max(find_rung(name).compile_factor for name in recipe.rungs)


def price_of(recipe: Recipe) -> tuple[float, int]:
    """Return what a recipe costs besides its step time: its compile factor and the number of its unusual rungs."""
    return compile_factor(recipe), sum(not is_usual(name) for name in recipe.rungs)


def is_usual(rung: str) -> bool:
    return find_rung(rung).is_usual


def change_between(before: Recipe, after: Recipe) -> tuple[set[str], set[str]]:
    """Return the rungs that went, and those that came."""
    return set(before.rungs) - set(after.rungs), set(after.rungs) - set(before.rungs)


def difference(before: Recipe, after: Recipe) -> str:
    """Describe a change: 'cudnn-attention instead of flash', 'without padded-vocab, micro batch 32'."""
    went = [name for name in before.rungs if name not in after.rungs]
    came = [name for name in after.rungs if name not in before.rungs]
    words = []
    for name in came:
        replaced = [other for other in went if group_of(find_rung(other)) == group_of(find_rung(name))]
        words.append(f"{name} instead of {replaced[0]}" if replaced else f"with {name}")
        went = [other for other in went if other not in replaced]
    if went:
        words.append(f"without {', '.join(went)}")
    if before.micro_batch != after.micro_batch:
        words.append(f"micro batch {after.micro_batch}")
    return ", ".join(words) or "the same"
