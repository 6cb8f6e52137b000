"""Profiles the very step that trains: where its time goes, what its memory holds, and which lines are responsible.

    profile = profile_step(step, batches, module=model, device=device, optimizer=optimizer)

`step` is any callable that takes a batch and trains `module` on it. Passes that would disturb one another run one after
the other: warm up, time without a profiler, profile, watch for findings, watch the memory. `profile_job` does this for
a recipe in a worker process; for compiled code it also profiles the modules of the same step without compile.
"""

from __future__ import annotations

import contextlib
import gzip
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from redline.core.measurement import spread_of
from redline.core.profile import COMMUNICATION, DATA_WAIT, IDLE, Finding, MemoryProfile, Profile, Uncompiled
from redline.core.user_code import first_line
from redline.engine.build import build
from redline.engine.clock import Clock
from redline.engine.distributed import Ranks, alone
from redline.engine.findings import CompilerLog, Watch, compiler_log, merge, starvation, watch_syncs
from redline.engine.fit import free_memory, in_pieces_that_fit
from redline.engine.measure import Bench, sharing_of, slowest
from redline.engine.memory import is_out_of_memory
from redline.engine.memory_snapshot import module_hooks, watch_memory
from redline.engine.probe import probe
from redline.engine.profiling_summary import kernels_of, launches_of, modules_of, parts_of, work_factor
from redline.engine.profiling_timeline import MODULE, read_timeline
from redline.engine.proof import attention_kernel, events_of, exported, profiler_of, run_marked, shares_of
from redline.rungs import plan_of
from redline.rungs.ladder import Compile, without_rung

TRACE_FILE = "trace.json.gz"
PROFILED_STEPS = 3
WARMUP_STEPS_BETWEEN = (3, 50)
WARMUP_SECONDS = {"cuda": 2.0, "cpu": 0.3}  # the first seconds of a GPU are up to 20 % slow
TIMED_STEPS_BETWEEN = (5, 50)
TIMED_SECONDS = 2.0
SYNC_STEPS = 2

Report = Callable[..., None]


def profile_job(bench: Bench, folder: Path) -> Profile:
    """Profile the recipe of a job. The trace is written to `folder`."""
    found = profile_recipe(bench, folder)
    told_apart = any(row.module is not None for row in found.modules)
    if not found.compiled or told_apart or bench.ranks.joined:  # a rank that fails alone would leave the others waiting
        return found
    bench.report("modules without compile")
    try:
        return replace(found, uncompiled=modules_without_compile(bench))
    except Exception as error:  # whatever it is: the profile is complete, and its notes say what is missing
        words = f"{type(error).__name__}: {first_line(error)}"
        reason = "not even one sequence fits" if is_out_of_memory(error) else words
        return replace(found, notes=(*found.notes, f"modules were not told apart without compile: {reason}"))


def profile_recipe(bench: Bench, folder: Path) -> Profile:
    job, plan = bench.job, plan_of(bench.job.recipe.rungs)
    bench.report("building")
    name_kernels()
    with compiler_log() as log:
        training = build(
            job.workload,
            plan,
            micro_batch=job.recipe.micro_batch,
            tokens=bench.tokens,
            device=bench.device,
            ranks=bench.ranks,
        )
        try:
            bench.report("compiling" if plan.compile else "warming up")
            return profile_step(
                training.step,
                training.batches,
                module=training.model,
                optimizer=training.step.optimizer,
                device=bench.device,
                steps=job.timed_steps or PROFILED_STEPS,
                compiled=plan.compile,
                trace=folder / TRACE_FILE if bench.ranks.leads else None,
                log=log,
                report=bench.report,
                ranks=bench.ranks,
            )
        finally:
            training.close()


def modules_without_compile(bench: Bench) -> Uncompiled:
    """Profile the modules without compile. This is the last pass: no time or memory is measured after it."""
    torch.compiler.reset()  # compiled code and its recorded CUDA graphs keep the model alive
    free_memory(bench.device)
    return in_pieces_that_fit(
        lambda size: look_at_modules(bench, size or 1), chunk=bench.job.recipe.micro_batch, device=bench.device
    )


def look_at_modules(bench: Bench, micro_batch: int) -> Uncompiled:
    job, device = bench.job, bench.device
    rungs, undone = without_rung(job.recipe.rungs, Compile.name, job.workload, probe(device.type))
    training = build(job.workload, plan_of(rungs), micro_batch=micro_batch, tokens=bench.tokens, device=device)
    try:
        loop = Loop(step=training.step, batches=training.batches, device=device, ranks=bench.ranks)
        seconds, _ = loop.time_steps(loop.warm_up())
        events = loop.profile_steps(job.timed_steps or PROFILED_STEPS, training.model, None)
    finally:
        training.close()
    timeline, step_seconds = read_timeline(events), spread_of(seconds).median
    factor = work_factor(timeline, step_seconds, device=device.type)
    return Uncompiled(
        micro_batch=micro_batch, step_seconds=step_seconds, undone=undone, modules=modules_of(timeline, factor)
    )


def name_kernels() -> None:
    """Make Inductor name its C++ kernels in the profile, and attach to Triton kernels the bytes that it counted for
    them. Call this before anything is compiled. Neither option changes the code that runs."""
    import torch._inductor.config as config

    config.cpp.enable_kernel_profile = True
    config.benchmark_kernel = True  # adds the count, and to each kernel's file code that is never called


def profile_step(
    step: Callable[[Any], Any],
    batches: Iterator[Any],
    *,
    module: nn.Module,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = PROFILED_STEPS,
    compiled: bool = False,
    trace: Path | None = None,
    log: CompilerLog | None = None,
    report: Report = lambda *_, **__: None,
    ranks: Ranks | None = None,
) -> Profile:
    """Profile a step. `compiled`: parts of the step are compiled, so modules cannot be told apart. `log`: opened before
    compiling. `ranks`: the ranks that share the step; each of them must call this."""
    loop = Loop(step=step, batches=batches, device=device, ranks=ranks or alone())
    step_seconds = loop.warm_up()
    report("timing", seconds=TIMED_SECONDS)
    seconds, cpu_seconds = loop.time_steps(step_seconds)
    report("profiling")
    events = loop.profile_steps(steps, None if compiled else module, trace)
    timeline = read_timeline(events, parameter_bytes=parameter_bytes(module))
    report("finding causes")
    found, notes = loop.watch(module)
    report("memory")
    memory, reason = loop.watch_memory(module, optimizer, compiled)
    typical = spread_of(seconds)
    parts = parts_of(timeline, typical.median, device=device.type)
    factor = work_factor(timeline, typical.median, device=device.type)
    # On a CPU communication is waiting: the training thread runs no operator for it.
    waits = (IDLE, DATA_WAIT) if device.type == "cuda" else (IDLE, DATA_WAIT, COMMUNICATION)
    waiting = sum(part.seconds for part in parts if part.group in waits)
    said = () if log is None else log.findings()
    return Profile(
        device=device.type,
        steps=timeline.steps,
        step_seconds=typical,
        profiled_seconds=timeline.seconds / timeline.steps,
        parts=parts,
        modules=modules_of(timeline, factor),
        kernels=kernels_of(timeline, factor, device=device.type),
        launches=launches_of(timeline, device=device.type),
        busy_share=1 - waiting / typical.median,
        host_seconds=timeline.host_seconds / timeline.steps,
        cpu_seconds=cpu_seconds,
        sync_idle_seconds=timeline.sync_idle_seconds / timeline.steps,
        attention=attention_kernel(events),
        compiled=compiled,
        findings=(*starvation(parts, typical.median), *found, *said),
        memory=memory,
        memory_reason=reason,
        sharing=sharing_of(loop.ranks, shares_of(timeline, typical.median, device)),
        notes=notes,
        trace=None if trace is None else trace.name,
    )


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The training loop, run repeatedly under different instruments."""

    step: Callable[[Any], Any]
    batches: Iterator[Any]
    device: torch.device
    ranks: Ranks

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(next(self.batches))
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def warm_up(self) -> float:
        """Run warm-up steps and return the seconds per step of the slowest rank."""
        fewest, most = WARMUP_STEPS_BETWEEN
        self.run(1)  # compiles
        started = time.perf_counter()
        for done in range(1, most):
            self.run(1)
            seconds = max(self.ranks.gather(time.perf_counter() - started))
            if done >= fewest and seconds > WARMUP_SECONDS[self.device.type]:
                break
        return seconds / done

    def time_steps(self, step_seconds: float) -> tuple[list[float], float]:
        """Return the seconds of each step and the CPU seconds of the whole process per step. Ranks cannot agree between
        steps on when to stop, so their number of steps follows from `step_seconds`."""
        fewest, most = TIMED_STEPS_BETWEEN
        if self.ranks.joined:
            fewest = most = min(max(round(TIMED_SECONDS / step_seconds), fewest), most)
        clock, before = Clock(self.device), time.process_time()
        started = time.perf_counter()
        clock.mark()
        for done in range(1, most + 1):
            self.step(next(self.batches))
            clock.mark()
            if done >= fewest and time.perf_counter() - started > TIMED_SECONDS:
                break
        return slowest(self.ranks, clock.seconds()), (time.process_time() - before) / done

    def profile_steps(self, steps: int, module: nn.Module | None, trace: Path | None) -> list[dict[str, Any]]:
        with named_ranges(module), profiler_of(self.device) as profiler:
            self.run(1)  # the profiler's start-up stays outside the window
            run_marked(self.step, self.batches, steps, self.device)
        text = exported(profiler)
        if trace is not None:  # kept, compressed, for Perfetto
            trace.write_bytes(gzip.compress(text))
        return events_of(text)

    def watch(self, module: nn.Module) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
        """Return findings, and notes on what was not watched: compiled code runs uncompiled here, and may not fit."""
        found: list[Finding] = []
        notes: tuple[str, ...] = ()
        try:
            found += self.watch_lines()
        except (RuntimeError, MemoryError) as error:
            if self.ranks.joined or not is_out_of_memory(error):  # the other ranks wait in the step that failed
                raise
            notes = ("source lines were not watched: uncompiled, the step does not fit in memory",)
        if notes:  # outside `except`, where the failed step's tensors are gone
            module.zero_grad(set_to_none=True)
            free_memory(self.device)
        if self.device.type == "cuda":
            known = {finding.where for finding in found if finding.kind == "synchronisation"}
            drawn = [next(self.batches) for _ in range(SYNC_STEPS)]  # the loader's copies are not part of the step
            syncs = watch_syncs(lambda: [self.step(batch) for batch in drawn], SYNC_STEPS)
            found += [finding for finding in syncs if finding.where not in known]
        return merge(found, steps=1), notes

    def watch_lines(self) -> tuple[Finding, ...]:
        batch = next(self.batches)
        with Watch(self.device) as watch:
            self.step(batch)
        return watch.findings(steps=1)

    def watch_memory(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, compiled: bool
    ) -> tuple[MemoryProfile | None, str | None]:
        if compiled and self.device.type == "cpu":
            return None, "allocations of compiled code on a CPU cannot be observed; profile the recipe without compile"
        batch = next(self.batches)
        memory = watch_memory(
            self.step, batch, module=module, optimizer=optimizer, device=self.device, named_modules=not compiled
        )
        return memory, None


@contextlib.contextmanager
def named_ranges(module: nn.Module | None) -> Iterator[None]:
    """Record every module's forward pass as a range of the trace."""
    ranges: list[record_function] = []

    def enter(name: str) -> None:
        ranges.append(record_function(MODULE + name))
        ranges[-1].__enter__()

    with module_hooks(module, enter, lambda: ranges.pop().__exit__(None, None, None)):
        yield


def parameter_bytes(module: nn.Module) -> int | None:
    """Return the bytes per element of the parameters; None if they differ."""
    sizes = {parameter.element_size() for parameter in module.parameters()}
    return sizes.pop() if len(sizes) == 1 else None
