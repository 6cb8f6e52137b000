"""A ladder from the user's options to its document: check everything, probe the machine, open a run directory, climb.

    run = prepare_ladder(workload="tiny", out=Path("runs/mine"), command="redline ladder tiny")
    document = run.climb(timeout_seconds=600, view=view)

Mistakes are found before anything is written. From then on results.jsonl holds every answer, so a run can be
interrupted at any moment, resumed (`resume_ladder`) and drawn again anywhere (`read_ladder`).
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.host import timestamp
from redline.core.job import (
    BEST_FILE,
    REBATCHED_FILE,
    RUN_FILE,
    Job,
    Result,
    RunDirectory,
    begin_run_directory,
    check_kind,
    default_directory,
    open_run_directory,
)
from redline.core.measurement import Failure
from redline.core.recipe import Recipe, load_recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.rungs import LADDER, find_rung, own_rungs, plan_of, with_own
from redline.rungs.ladder import check_alternatives, in_order, why_not_among
from redline.search.ahead import compile_side_by_side, graphs_of
from redline.search.answers import graph_key, surroundings_of
from redline.search.batch_size import check_headroom, host_memory_bytes, size_of_ladder
from redline.search.climb import TOKENS_FILE, Climb, LadderSettings, Row
from redline.search.document import best_rebatched, best_row, ladder_document, row_json
from redline.search.launch import launch, remove_caches
from redline.search.ranks import check_measured, is_way, not_measured, ranked_rungs
from redline.search.words import (
    Words,
    check_choice,
    check_nothing_given,
    check_same_machine,
    check_same_ranks,
    check_sensible,
)

KIND, SURROUNDINGS = "ladder", "surroundings"  # in run.json: the kind of run, and a key for what else affects its times
LOCK_TRIES, LOCK_SECONDS = 3, 0.05  # a watching command may hold the lock for an instant


class View(Protocol):
    """What a climb reports to whoever is watching; `report.live.LiveLadder` draws it."""

    def row_started(self, rung: str, title: str, number: int, total: int) -> None: ...
    def phase(self, name: str, done: int | None, total: int | None, seconds: float | None) -> None: ...
    def row_finished(self, row: dict[str, Any]) -> None: ...


class UnansweredError(Exception):
    """A climb that may not start workers met a job that no earlier run has answered."""


@dataclass(frozen=True, kw_only=True)
class LadderRun:
    directory: RunDirectory
    workload: Workload
    hardware: Hardware
    settings: LadderSettings
    notes: tuple[str, ...] = ()
    """Choices made for the user, with their reasons."""

    def climb(self, *, timeout_seconds: float, view: View) -> dict[str, Any]:
        """Measure what is not measured yet. After an interrupt the document is returned all the same."""
        with only_climb_in(self.directory):
            return self._climb(timeout_seconds, view)

    def _climb(self, timeout_seconds: float, view: View) -> dict[str, Any]:
        answered = {key: result for key, result in self.directory.results().items() if not worth_another_try(result)}

        compiled: dict[str, float] = {}  # seconds, by graph

        def ask(job: Job) -> Result:
            if job.key not in answered:
                # A measurement has its own cache, unless its code was compiled ahead for all rows that share it.
                graph = None if self.settings.compile_ahead is None else graph_key(job)
                started = time.monotonic()
                with self.directory.explaining():  # a worker's folder takes disk space too
                    result = launch(self.directory, job, timeout_seconds, view.phase, compile_cache=graph)
                seconds = time.monotonic() - started
                stop_at_a_mistake(result, self.directory)
                answered[job.key], spared = with_first_compile(result, graph, compiled)
                self.directory.append(job, answered[job.key], seconds + spared)
            return answered[job.key]

        climb = Climb(self.workload, self.hardware, self.settings, ask)
        try:
            compiled |= self._compile_ahead(climb, answered, timeout_seconds, view)
            for row in climb.rows(view.row_started):
                view.row_finished(row_json(row, climb.finished[0], climb))
                self._keep_best(climb.finished)
            finished = True
        except KeyboardInterrupt:
            finished = False
        finally:
            remove_caches(self.directory)
        return ladder_document(climb, self.directory.read_run(), finished)

    def _compile_ahead(
        self, climb: Climb, answered: Mapping[str, Result], timeout_seconds: float, view: View
    ) -> dict[str, float]:
        at_once = self.settings.compile_ahead
        jobs = [job for job in climb.foreseen() if job.key not in answered]
        if at_once is None or not graphs_of(jobs):
            return {}

        def on_progress(done: int, total: int) -> None:
            view.phase(f"compiling ahead, {min(at_once, total)} at a time", done=done, total=total, seconds=None)

        with self.directory.explaining():
            return compile_side_by_side(
                self.directory, jobs, at_once=at_once, timeout_seconds=timeout_seconds, on_progress=on_progress
            )

    def replay(self) -> dict[str, Any]:
        """Return the document of what has been measured so far, without starting anything."""
        answered = self.directory.results()

        def ask(job: Job) -> Result:
            if job.key not in answered:
                raise UnansweredError(job.key)
            return answered[job.key]

        climb = Climb(self.workload, self.hardware, self.settings, ask)
        try:
            for _ in climb.rows():
                pass
            finished = True
        except UnansweredError:
            finished = False
        return ladder_document(climb, self.directory.read_run(), finished)

    def _keep_best(self, rows: Sequence[Row]) -> None:
        """Write the recipes to train with; none of an earlier state stays if nothing is right any more."""
        recipes = {}
        if (best := best_row(rows)) is not None:
            recipes[BEST_FILE] = best.recipe
        if (own := best_rebatched(rows)) is not None and own.rebatched is not None and own.rebatched.micro_batch:
            recipes[REBATCHED_FILE] = replace(own.recipe, micro_batch=own.rebatched.micro_batch)
        for name in (BEST_FILE, REBATCHED_FILE):
            with self.directory.explaining():
                if name in recipes:
                    self.directory.write(name, json.dumps(to_json(recipes[name]), indent=2) + "\n")
                else:
                    (self.directory.path / name).unlink(missing_ok=True)


def stop_at_a_mistake(result: object, directory: RunDirectory) -> None:
    """Raise a mistake in the model itself, which is no row: all others would report the same. If nothing was measured,
    the run directory is removed."""
    if isinstance(result, Failure) and result.mistake is not None:
        if not directory.results():
            shutil.rmtree(directory.path, ignore_errors=True)
        raise UserError(*result.mistake)


def with_first_compile(result: Result, graph: str | None, compiled: dict[str, float]) -> tuple[Result, float]:
    """Return the result with the compile time of the first job with the same graph, and the seconds that finding the
    code compiled has saved."""
    if graph is None or isinstance(result, Failure) or result.compile_seconds is None:
        return result, 0.0
    first = compiled.setdefault(graph, result.compile_seconds)
    return replace(result, compile_seconds=first), max(0.0, first - result.compile_seconds)


def worth_another_try(result: Result) -> bool:
    """True for time-outs and kills, which come from outside the recipe: resumed, it may have more time or more luck."""
    return isinstance(result, Failure) and result.kind in ("timeout", "killed")


@contextmanager
def only_climb_in(directory: RunDirectory) -> Iterator[None]:
    """Lock the directory: two climbs there would start workers in the same folders. The lock ends with the process."""
    with open(directory.path / RUN_FILE) as file:
        for tries_left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not tries_left:
                    raise UserError(
                        f"{directory.path} is in use", "another process measures there", "wait for it, or stop it first"
                    ) from error
                time.sleep(LOCK_SECONDS)
        yield


def is_measuring(path: Path) -> bool:
    """True if a process is climbing or searching there now. The test holds the lock for an instant, which is why
    `only_climb_in` tries more than once."""
    with open(path / RUN_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks: there is no way to know
            return False
    return False


def prepare_ladder(
    *,
    rungs: str | None = None,
    also: str | None = None,
    without: str | None = None,
    start: Path | None = None,
    keep: str | None = None,
    repeats: int | None = None,
    aa: bool = False,
    rebatch: bool = False,
    headroom: float | None = None,
    compile_ahead: int | None = None,
    command: str,
    **common: Any,
) -> LadderRun:
    """Check everything the user said, before the machine is probed and before anything is written."""
    words = Words(**common)
    recipe = None if start is None else checked_start(start, words.micro_batch)
    words.check(recipe.rungs if recipe else (), repeats=repeats, compile_ahead=compile_ahead)
    layout = words.layout
    check_compile_ahead(compile_ahead, layout.ranks)
    check_rebatch(rebatch, headroom, words.global_batch)
    check_choice("keep", keep, ("faster", "all"))
    said: dict[str, Any] = {"keep": keep, "repeats": repeats, "again": aa, "rebatch": rebatch}
    said |= {"headroom": headroom, "compile_ahead": compile_ahead}
    begun_with = ranked_rungs(recipe.rungs if recipe else (), layout)
    said["rungs"] = choose_rungs(rungs, also=also, without=without, started_with=begun_with)
    said = {name: value for name, value in said.items() if value is not None}
    return begin_ladder(words, recipe, _names(without), said, command)


def begin_ladder(
    words: Words, start: Recipe | None, without: Collection[str], said: dict[str, Any], command: str
) -> LadderRun:
    """Probe the machine, which completes the user's settings, and open the run directory."""
    found = words.meet_machine()
    hardware = found.hardware
    first = ranked_rungs(start.rungs if start else (), words.layout)
    named = words.micro_batch or (start.micro_batch if start else None)
    size, why = (named, ()) if named else size_of_ladder(found.workload, plan_of(first), hardware)
    resolved = replace(found.workload, micro_batch=size)
    check_not_own(without, resolved)
    beginning = Recipe(rungs=with_own(first, resolved), micro_batch=size)
    check_measured(first, words.layout, resolved, hardware, words.global_batch)
    check_recipe_applies(beginning, resolved, hardware)
    said["rungs"] = tuple(name for name in said["rungs"] if name not in beginning.rungs)
    settings = LadderSettings(
        start=beginning,
        device=hardware.kind,
        check_steps=words.check_steps or LadderSettings.check_steps,
        timed_steps=words.steps,
        global_batch=words.global_batch,
        memory_bytes=memory_to_share(hardware) if said["rebatch"] else None,
        **said,
    )
    path = words.out or default_directory("ladder", resolved)
    directory = open_directory(path, resolved, hardware, found.versions, settings, command)
    notes = (*found.notes, *why, *notes_of_ways(start.rungs if start else (), first))
    return LadderRun(directory=directory, workload=resolved, hardware=hardware, settings=settings, notes=notes)


def check_compile_ahead(processes: int | None, ranks: int) -> None:
    if processes is not None and ranks > 1:
        raise UserError(
            f"--compile-ahead with --gpus {ranks}",
            "the ranks of a row compile together, one process each",
            "leave --compile-ahead out",
        )


def checked_start(path: Path, micro_batch: int | None) -> Recipe:
    """Return the recipe that a ladder begins with. Its own micro batch is checked only if the user names no other."""
    recipe = load_recipe(path)
    check_alternatives(recipe.rungs, str(path))
    if micro_batch is None:
        check_sensible("the recipe's micro batch", recipe.micro_batch)
    return recipe


def notes_of_ways(asked: Sequence[str], rungs: Sequence[str]) -> Iterator[str]:
    """Yield a note for each way to share a step that the recipe names and `ranked_rungs` has left out."""
    for name in asked:
        if is_way(name) and name not in rungs:
            yield f"{name} is left out: nobody has data of their own in this layout"


def check_rebatch(rebatch: bool, headroom: float | None, global_batch: int | None) -> None:
    for name, value in (("--headroom", headroom), ("--global-batch", global_batch)):
        if value is not None and not rebatch:
            raise UserError(
                f"{name} without --rebatch",
                "the rows of a ladder have one fixed micro batch; only the second view looks for others",
                f"add --rebatch, or leave {name} out",
            )
    if headroom is not None:
        check_headroom(headroom)


def memory_to_share(hardware: Hardware) -> int | None:
    """Return the memory of one rank: all of a GPU's, as the prediction counts; on a CPU, the rank's part of what is
    free, since other processes use the host too."""
    if hardware.kind == "cuda":
        return hardware.memory_bytes
    free = host_memory_bytes()
    return None if free is None else free // hardware.ranks


def check_recipe_applies(recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
    """Refuse a recipe with a rung that does not apply. On a ladder it would be a row; in a recipe that was requested as
    a whole it is a mistake."""
    for name in recipe.rungs:
        reason = not_measured(name, hardware.arranged) or why_not_among(name, recipe.rungs, workload, hardware)
        if reason is not None:
            raise UserError(
                f"the recipe's {name} does not apply here",
                reason,
                f"take {name} out of the recipe, or climb without --from",
            )


def check_timeout(seconds: float) -> None:
    if not seconds > 0:  # NaN is not above 0 either
        raise UserError(
            f"timeout is {seconds:g}", "it is the seconds one measurement may take", "set --timeout to more than 0"
        )


def choose_rungs(
    rungs: str | None, *, also: str | None = None, without: str | None = None, started_with: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the rungs to climb, in the ladder's order, whatever order they were named in."""
    wanted = _names(rungs) if rungs is not None else {rung.name for rung in LADDER if not rung.when_named}
    for name in sorted(_names(also) & _names(without)):
        raise UserError(
            f"{name} in --also and in --without", "a rung is either climbed or left out", f"name {name} in one of them"
        )
    unwanted = _names(without) | {LADDER[0].name} | set(started_with)
    return in_order((wanted | _names(also)) - unwanted)


def _names(text: str | None) -> set[str]:
    if text is None or text.strip() == "none":
        return set()
    return {find_rung(name.strip()).name for name in text.split(",")}


def check_not_own(without: Collection[str], workload: Workload) -> None:
    """Refuse to leave out rungs that belong to the model itself."""
    for name in own_rungs(workload):
        if name in without:
            raise UserError(
                f"{workload.name} without {name}",
                "its config says that the head is the embedding: without it, it would be a different model",
                'copy the config and set "tie_word_embeddings" to false in it',
            )


def open_directory(
    path: Path,
    workload: Workload,
    hardware: Hardware,
    versions: dict[str, str | None],
    settings: object,
    command: str,
    kind: str = KIND,
    check: Callable[[dict[str, Any]], None] = lambda _: None,
) -> RunDirectory:
    """Create a run directory with its tokens and run.json: both of them, or nothing. `check` is called with what
    run.json will contain, and may raise."""
    from redline.data.tokens import encode_corpus, write_tokens  # numpy takes a while to import

    tokens = encode_corpus(workload) if workload.reads_text else None
    run: dict[str, Any] = {
        "kind": kind,
        "command": command,
        "date": timestamp(),
        "tokens": None if tokens is None else len(tokens),
        "versions": versions,
        "workload": to_json(workload),
        "hardware": to_json(hardware),
        "settings": to_json(settings),
    }
    with begin_run_directory(path) as directory:
        if tokens is not None:
            write_tokens(path / TOKENS_FILE, tokens, workload.decoder.vocab)
        run[SURROUNDINGS] = surroundings_of(path / TOKENS_FILE)
        check(run)
        directory.write(RUN_FILE, json.dumps(run, indent=2) + "\n")
    return directory


def resume_ladder(path: Path, choices: dict[str, Any]) -> LadderRun:
    """Open an interrupted run, on the same machine with the same versions: its other rows must stay comparable."""
    check_nothing_given("ladder", path, choices)
    run = open_ladder(path)
    check_same_ranks("ladder", path, choices, run.hardware)
    fix = "start a new ladder here; `redline report` still draws the old one"
    check_same_machine(run.directory, run.workload, run.hardware, run.settings.device, fix=fix)
    forget_other_surroundings(run.directory)
    return run


def forget_other_surroundings(directory: RunDirectory) -> None:
    """Clear the recorded surroundings if they have changed: one table may hold rows of two versions of the code or
    environment, but `tune --after` must not treat them as one."""
    run = directory.read_run()
    if run.get(SURROUNDINGS) not in (None, surroundings_of(directory.path / TOKENS_FILE)):
        with directory.explaining():
            directory.write(RUN_FILE, json.dumps({**run, SURROUNDINGS: None}, indent=2) + "\n")


def read_ladder(path: Path) -> dict[str, Any]:
    return open_ladder(path).replay()


def open_ladder(path: Path) -> LadderRun:
    directory = open_run_directory(path)
    try:
        run = directory.read_run()
        check_kind(path, run, "ladder")
        for part in ("versions", "command", "date"):
            if part not in run:
                raise KeyError(part)
        return LadderRun(
            directory=directory,
            workload=from_json(Workload, run["workload"]),
            hardware=from_json(Hardware, run["hardware"]),
            settings=from_json(LadderSettings, run["settings"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is not a ladder this version can read",
            f"{RUN_FILE}: {error}",
            "use the version that made it, or start a new ladder",
        ) from error
