"""Compile side by side what will be measured one by one.

    took = compile_side_by_side(run, jobs, at_once=4, timeout_seconds=600, on_progress=print)     # {"graph-…": 41.2, …}

Compiling keeps one core busy and the device hardly at all, so a ladder of compiled rows spends most of its time waiting
for a single core. Workers of kind 'compile' fill the caches of the coming rows, several at a time, before anything is
timed, so they disturb no measurement. A worker that fails, perhaps because its neighbours held the memory, makes no
row: the recipe is compiled again when it is measured, which also shows what is wrong with it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import IO

from redline.core.host import core_count
from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.rungs import plan_of
from redline.search.answers import graph_key
from redline.search.launch import answer_of, clean_folder, kill_group, start_worker

POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Compiling:
    graph: str
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    stop_at: float

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self.stop_at

    def end(self) -> None:
        """Kill the worker, finished or not, and whatever it started."""
        kill_group(self.process)
        self.log.close()


def graphs_of(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return one compile job for each distinct graph, by the name of its cache."""
    found: dict[str, Job] = {}
    for job in jobs:
        if plan_of(job.recipe.rungs).compile:
            found.setdefault(graph_key(job), replace(job, kind="compile", bit_exact_rung=None, repeat=0))
    return found


def compile_side_by_side(
    run: RunDirectory,
    jobs: Iterable[Job],
    *,
    at_once: int,
    timeout_seconds: float,
    on_progress: Callable[[int, int], None],
) -> dict[str, float]:
    """Return the seconds that each compilation took beside the others, by the name of its cache. Progress goes to
    `on_progress(done, total)`."""
    waiting, running, took = list(graphs_of(jobs).items()), list[Compiling](), dict[str, float]()
    total = len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(start(run, *waiting.pop(0), at_once=at_once, timeout_seconds=timeout_seconds))
            on_progress(total - len(waiting) - len(running), total)
            time.sleep(POLL_SECONDS)
            for one in [one for one in running if one.is_over]:
                running.remove(one)
                one.end()
                result = answer_of(Measurement, run.job_folder(one.job), one.process.returncode, "compiling")
                if isinstance(result, Measurement) and result.compile_seconds is not None:
                    took[one.graph] = result.compile_seconds
    finally:  # also on Ctrl-C
        for one in running:
            one.end()
    return took


def start(run: RunDirectory, graph: str, job: Job, *, at_once: int, timeout_seconds: float) -> Compiling:
    threads = max(1, core_count() // at_once)
    log = open(clean_folder(run, job) / "log.txt", "wb")  # noqa: SIM115  # the worker's, until `end`
    process = start_worker(
        run, job, log, graph, stdout=subprocess.DEVNULL, more={"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    )
    return Compiling(graph=graph, job=job, process=process, log=log, stop_at=time.monotonic() + timeout_seconds)
