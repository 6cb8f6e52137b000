"""A tune from the user's options to its document: check everything, probe the machine, open a run directory, search.

    run = prepare_tune(workload="tiny", minutes=2, out=Path("runs/mine"))
    document = run.tune(timeout_seconds=600, view=view)

Mistakes are found before anything is written. From then on results.jsonl holds every answer with the time it took, so a
run can be interrupted at any moment, resumed (`resume_tune`) and shown again anywhere (`read_tune`).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import (
    BEST_FILE,
    RESULTS_FILE,
    RUN_FILE,
    Job,
    Result,
    RunDirectory,
    check_kind,
    default_directory,
    open_run_directory,
)
from redline.core.units import counted, human_bytes
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.rungs import find_rung
from redline.rungs.ladder import in_order
from redline.search.answers import TrialAnswers, context_of, open_cache, surroundings_of
from redline.search.batch_size import HEADROOM
from redline.search.climb import TOKENS_FILE
from redline.search.ladder import (
    SURROUNDINGS,
    LadderRun,
    check_not_own,
    memory_to_share,
    only_climb_in,
    open_directory,
    open_ladder,
    stop_at_a_mistake,
)
from redline.search.launch import remove_caches
from redline.search.ranks import check_measured, ranked_rungs
from redline.search.space import ALLOW, ROUGHLY, Space, open_space
from redline.search.trials import Answer, Budget, OutOfTimeError, Trial, TuneSettings
from redline.search.tune import Tuner
from redline.search.tune_document import row_json, tune_document
from redline.search.words import Words, check_choice, check_nothing_given, check_same_machine, check_same_ranks

DOCUMENT_FILE = "tune.json"
MOST_MINUTES = 7 * 24 * 60
KIND = "tune"
AFTER_FOLDER = "after"  # in a run directory: what the ladder of --after measured


class View(Protocol):
    """What a tune reports to whoever is watching; `report.live.LiveLadder` draws it."""

    def row_started(self, rung: str, title: str, number: int, total: int) -> None: ...
    def phase(self, name: str, done: int | None, total: int | None, seconds: float | None) -> None: ...
    def row_finished(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TuneRun:
    directory: RunDirectory
    workload: Workload
    hardware: Hardware
    settings: TuneSettings
    budget: Budget
    fresh: bool = False
    """Use no answers remembered from other runs."""
    notes: tuple[str, ...] = ()
    """Choices made for the user, with their reasons."""

    @property
    def space(self) -> Space:
        chosen = self.settings
        return open_space(
            self.workload,
            self.hardware,
            allow=chosen.allow,
            rungs=chosen.rungs,
            without=chosen.without,
            memory_limit=chosen.memory_limit,
            micro_batch=chosen.micro_batch,
            global_batch=chosen.global_batch,
        )

    def tune(self, *, timeout_seconds: float, view: View) -> dict[str, Any]:
        """Search until the time is over or nothing is left to gain. After an interrupt the document is returned all the
        same."""
        with only_climb_in(self.directory):
            return self._tune(timeout_seconds, view)

    def _tune(self, timeout_seconds: float, view: View) -> dict[str, Any]:
        run = self.directory.read_run()
        cache = None if self.fresh else self._cache(run, view)
        answers = TrialAnswers(
            self.directory,
            cache=cache,
            device=self.settings.device,
            timeout_seconds=timeout_seconds,
            on_phase=view.phase,
            check=lambda result: stop_at_a_mistake(result, self.directory),
        )
        same = run.get(SURROUNDINGS) == surroundings_of(self.directory.path / TOKENS_FILE)
        if same and not self.fresh:  # resumed with other code, a run has other times than its ladder
            answers.given = answers_of(RunDirectory(self.directory.path / AFTER_FOLDER))
        watcher = Watcher(view, self._keep_best)
        tuner = Tuner(self.space, self.settings, answers, self.budget, watcher)
        watcher.tuner = tuner
        try:
            tuner.run()
        except KeyboardInterrupt:
            tuner.stopped = "interrupted"
        finally:
            remove_caches(self.directory)
        self._keep_best(tuner)
        document = tune_document(tuner, run)
        with self.directory.explaining():
            self.directory.write(DOCUMENT_FILE, json.dumps(document) + "\n")
        return document

    def _cache(self, run: dict[str, Any], view: View) -> RunDirectory | None:
        tokens = self.directory.path / TOKENS_FILE
        cache, note = open_cache(context_of(self.hardware, run["versions"], tokens))
        if note is not None:
            view.message(note)
        return cache

    def replay(self) -> dict[str, Any]:
        """Return the document of what was measured, without starting anything: the same search, from memory alone."""
        still = Budget(60 * self.settings.minutes, clock=lambda: 0.0)
        answers = OnlyRemembered(
            self.directory, cache=None, device=self.settings.device, timeout_seconds=0.0, on_phase=lambda *_, **__: None
        )
        answers.given = answers_of(RunDirectory(self.directory.path / AFTER_FOLDER))
        watcher = Watcher(None, lambda _: None)
        tuner = Tuner(self.space, self.settings, answers, still, watcher)
        watcher.tuner = tuner
        tuner.run()
        tuner.stopped = "interrupted"  # otherwise its own document would exist
        return tune_document(tuner, self.directory.read_run())

    def _keep_best(self, tuner: Tuner) -> None:
        best = tuner.best
        if best is not None:
            with self.directory.explaining():
                self.directory.write(BEST_FILE, json.dumps(to_json(best.recipe), indent=2) + "\n")


class OnlyRemembered(TrialAnswers):
    """Answers for a report: whatever was answered then is the answer, and nothing else is answered now."""

    def recall(self, job: Job, timeout_seconds: float) -> Answer | None:
        known = self.here.get(job.key)
        return None if known is None else self._remembered(job, *known)

    def ask(self, job: Job, timeout_seconds: float) -> Answer:
        raise OutOfTimeError

    def trouble(self) -> str | None:
        return None


class Watcher:
    """Reports trials to a ladder's view, and keeps the best recipe on disk as it changes."""

    tuner: Tuner

    def __init__(self, view: View | None, keep_best: Callable[[Tuner], None]) -> None:
        self.view, self.keep_best = view, keep_best

    def trial_started(self, label: str, number: int) -> None:
        if self.view is not None:
            self.view.row_started(f"{number:02d}", label, number, 0)

    def trial_finished(self, trial: Trial) -> None:
        self.keep_best(self.tuner)
        if self.view is not None:
            self.view.row_finished(self._row(trial))

    def _row(self, trial: Trial) -> dict[str, Any]:
        return named_row(row_json(self.tuner, trial), leads=trial is self.tuner.best)


MOST_LETTERS = 34  # length of a change in the live table, which has other columns


def named_row(row: dict[str, Any], *, leads: bool) -> dict[str, Any]:
    """Return a trial's row as a ladder's table shows it: with a name, and 'kept' for the leader."""
    change = row["change"]
    short = change if len(change) <= MOST_LETTERS else change[: MOST_LETTERS - 1] + "…"
    return {**row, "rung": f"{row['number']:02d} {short}", "kept": leads}


def prepare_tune(
    *,
    minutes: float,
    allow: str | None = None,
    rungs: str | None = None,
    without: str | None = None,
    memory_limit: int | None = None,
    fresh: bool = False,
    after: Path | None = None,
    command: str = "redline.tune()",
    **common: Any,
) -> TuneRun:
    """Check everything the user said, before the machine is probed and before anything is written."""
    budget = Budget(60 * minutes)  # the user's time starts here
    check_minutes(minutes)
    words = Words(**common)
    words.check(memory_limit=memory_limit)
    check_allowed(allow, words.layout.ranks)
    check_batches(words.micro_batch, words.global_batch, words.layout.data)
    said: dict[str, Any] = {"minutes": minutes, "allow": allow, "memory_limit": memory_limit}
    said |= {"rungs": names_of(rungs), "without": names_of(without)}
    if fresh and after is not None:
        raise UserError("--fresh with --after", "one of them forgets what the other remembers", "drop one of them")
    ladder = None if after is None else open_ladder(after)
    said = {name: value for name, value in said.items() if value is not None}
    return replace(begin_tune(words, ladder, budget, said, command), fresh=fresh)


def begin_tune(words: Words, ladder: LadderRun | None, budget: Budget, said: dict[str, Any], command: str) -> TuneRun:
    """Probe the machine, which completes the user's settings, and open the run directory."""
    found = words.meet_machine()
    resolved, check_steps, steps = found.workload, words.check_steps, words.steps
    check_not_own(said.get("without", ()), resolved)
    check_measured(ranked_rungs((), words.layout), words.layout, resolved, found.hardware, words.global_batch)
    if ladder is not None:
        resolved = replace(resolved, micro_batch=ladder.workload.micro_batch)
        check_steps, steps = check_steps or ladder.settings.check_steps, steps or ladder.settings.timed_steps
    settings = TuneSettings(
        device=found.hardware.kind,
        micro_batch=words.micro_batch,
        global_batch=words.global_batch,
        check_steps=check_steps or TuneSettings.check_steps,
        timed_steps=steps,
        **{"memory_limit": usable_bytes(found.hardware), **said},
    )
    run = TuneRun(
        directory=RunDirectory(words.out or default_directory("tune", resolved)),
        workload=resolved,
        hardware=found.hardware,
        settings=settings,
        budget=budget,
    )
    check_fits(run.space)
    directory = open_directory(
        run.directory.path,
        resolved,
        found.hardware,
        found.versions,
        settings,
        command,
        kind=KIND,
        check=lambda now: None if ladder is None else check_same(ladder.directory, now),
    )
    if ladder is not None:
        keep_answers(ladder.directory, directory)
    return replace(run, directory=directory, notes=(*found.notes, *space_notes(run.space)))


def check_allowed(allow: str | None, ranks: int) -> None:
    check_choice("class of maths to allow", allow, tuple(ALLOW))
    if ranks > 1 and allow == "bit-exact":
        raise UserError(
            f"--allow bit-exact with --gpus {ranks}",
            "ranks add gradients up in another order than one process does, so that none is equal to it bit for bit",
            "leave --allow out: rounding is the strictest that ranks can keep",
        )


def check_same(ladder: RunDirectory, now: dict[str, Any]) -> None:
    """Refuse a ladder whose answers this search cannot use: they must answer the very same questions on the very same
    machine. What is compared is what the answer cache has in its name. `now`: the contents of this search's
    run.json."""
    then = ladder.read_run()
    if not then.get(SURROUNDINGS):
        why = f"its {RUN_FILE} does not say with which code, text and environment all its rows were measured"
    else:
        before, here = facts_of(then), facts_of(now)
        changed = [name for name in dict.fromkeys([*here, *before]) if here.get(name) != before.get(name)]
        why = f"its {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not the same" if changed else ""
    if why:
        raise UserError(
            f"{ladder.path} is another ladder than this search could begin with",
            why,
            "leave --after out, or climb a ladder of this workload here first",
        )


def facts_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return what a measured time depends on, from a run.json, by names that users know."""
    around = run[SURROUNDINGS]
    named = {"device": run["hardware"], "workload": run["workload"], "code": around["code"], "text": around["tokens"]}
    return {**named, **run["versions"], **around["environment"]}


def keep_answers(ladder: RunDirectory, directory: RunDirectory) -> None:
    """Copy the ladder's answers, so that a resumed search knows what this one did, wherever the ladder is by then."""
    with directory.explaining():
        (directory.path / AFTER_FOLDER).mkdir()
        if (ladder.path / RESULTS_FILE).exists():  # a ladder that was interrupted at once has none
            shutil.copyfile(ladder.path / RESULTS_FILE, directory.path / AFTER_FOLDER / RESULTS_FILE)


def answers_of(directory: RunDirectory) -> dict[str, tuple[Result, float]]:
    """Return a ladder's answers by the keys under which a search asks: a search has its recipes in ladder order, which
    the recipe that a ladder began with need not be."""
    answers, found = directory.answers(), {}
    for job in directory.jobs():
        rungs = in_order(job.recipe.rungs)
        found[replace(job, recipe=replace(job.recipe, rungs=rungs)).key] = answers[job.key]
    return found


def usable_bytes(hardware: Hardware) -> int | None:
    """Return the device's memory, less the headroom; None if unknown."""
    memory = memory_to_share(hardware)
    return None if memory is None else math.floor((1 - HEADROOM) * memory)


def check_minutes(minutes: float) -> None:
    if not 0 < minutes <= MOST_MINUTES:  # NaN fails both
        raise UserError(
            f"--minutes is {minutes:g}",
            "it is the time the search may take",
            f"choose a number above 0, such as 8, up to {MOST_MINUTES:,} (a week)",
        )


def check_batches(micro_batch: int | None, global_batch: int | None, ranks: int = 1) -> None:
    if micro_batch is not None and global_batch is not None and global_batch % (ranks * micro_batch):
        times = "" if ranks == 1 else f" on each of {ranks} ranks"
        raise UserError(
            f"a global batch of {global_batch} is not a multiple of the micro batch {micro_batch}{times}",
            "an update adds up whole micro batches",
            "leave --micro-batch out: the search then tries what divides the global batch",
        )


def check_fits(space: Space) -> None:
    """Refuse a search in which nothing is predicted to fit: limit or model is wrong, and no trial changes that."""
    start = space.start()
    reason = space.refuses(start)
    if reason is not None and all(space.refuses(recipe) for recipe in space.neighbours(start)):
        smaller = ", choose a smaller --micro-batch" if start.micro_batch > 1 else ""
        raise UserError(
            f"{space.workload.name} does not fit at micro batch {start.micro_batch}",
            reason,
            f"allow more with --memory-limit{smaller}, or see `redline estimate` for what to change",
        )


def space_notes(space: Space) -> list[str]:
    start = space.start()
    rungs = " + ".join(start.rungs) or "no rung"
    found = [f"{counted(len(space.knobs), 'knob')}; the start: {rungs} at micro batch {start.micro_batch}"]
    if len(space.ways) > 1:
        found.append(f"{', '.join(space.ways[1:])}: tried where memory is short, instead of {space.ways[0]}")
    if space.refused_above is not None:
        limit, rough = human_bytes(space.refused_above), ""
        if space.predicts_roughly:
            rough = f", {ROUGHLY} times what there is (the prediction is a rough one for a model that is not built in),"
        found.append(f"recipes predicted to take more than {limit}{rough} are not run")
    return found


def names_of(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(find_rung(name.strip()).name for name in text.split(","))


def resume_tune(path: Path, choices: dict[str, Any], minutes: float | None, fresh: bool = False) -> TuneRun:
    """Open an interrupted run, on the same machine with the same versions. Only the minutes may be given again, to
    search longer; those already used count."""
    check_nothing_given(KIND, path, choices)
    started = time.monotonic()
    run = open_tune(path, fresh=fresh)
    check_same_ranks(KIND, path, choices, run.hardware)
    fix = "start a new tune here"
    check_same_machine(run.directory, run.workload, run.hardware, run.settings.device, fix=fix)
    settings = run.settings
    if minutes is not None:
        check_minutes(minutes)
        settings = replace(settings, minutes=minutes)
        document = {**run.directory.read_run(), "settings": to_json(settings)}
        with run.directory.explaining():
            run.directory.write(RUN_FILE, json.dumps(document, indent=2) + "\n")
    budget = Budget(60 * settings.minutes)
    budget.started = started
    return replace(run, settings=settings, budget=budget, notes=notes_on_time(run.directory, settings.minutes))


def notes_on_time(directory: RunDirectory, minutes: float) -> tuple[str, ...]:
    """Say so if the run has used its minutes, and would only show again what it found. A ladder's answers cost none."""
    given = answers_of(RunDirectory(directory.path / AFTER_FOLDER))
    used = sum(seconds for key, (_, seconds) in directory.answers().items() if key not in given)
    if used < 60 * minutes:
        return ()
    return (f"its answers took {used / 60:.1f} minutes: with --minutes {minutes:g} nothing new is measured",)


def read_tune(path: Path) -> dict[str, Any]:
    """Return what the run wrote at its end; for a run that was killed, what its answers say."""
    run = open_tune(path)
    try:
        document: object = json.loads((path / DOCUMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        document = None
    return document if isinstance(document, dict) else run.replay()


def open_tune(path: Path, fresh: bool = False) -> TuneRun:
    directory = open_run_directory(path)
    try:
        run = directory.read_run()
        check_kind(path, run, KIND)
        if run.get("kind") != KIND:
            raise ValueError(f"it holds a {run.get('kind')}")
        settings = from_json(TuneSettings, run["settings"])
        return TuneRun(
            directory=directory,
            workload=from_json(Workload, run["workload"]),
            hardware=from_json(Hardware, run["hardware"]),
            settings=settings,
            budget=Budget(60 * settings.minutes),
            fresh=fresh,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is not a tune this version can read",
            f"{RUN_FILE}: {error}",
            "use the version that made it, or start a new tune",
        ) from error
