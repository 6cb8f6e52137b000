"""A short look at a recipe before the full measurement: most of what a tuner tries loses, and a loser needs no proof.

measure_unless_slower(bench)   # a look; the full measurement follows if the steps keep up with `give_up_seconds`
look(bench)                    # the time alone, to repeat what was already checked
compile_only(bench)            # fills the cache for a later measurement (search/ahead.py)

A look builds, compiles, warms up and times. Its Measurement has no loss curve and no gradient check, so it cannot be
mistaken for one that was checked.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from redline.core.measurement import Measurement, spread_of
from redline.engine.build import Training, build
from redline.engine.fit import free_memory
from redline.engine.measure import BLOCK_STEPS, WARMUP_SECONDS, Bench, fullest, measure, step_times, time_steps
from redline.rungs import plan_of

BRIEF_SECONDS = 0.7  # for warming up, and again for timing
BRIEF_STEPS_BETWEEN = (8, 50)


def measure_unless_slower(bench: Bench) -> Measurement:
    """Take a look, then measure, unless the 10th percentile of the look's step times exceeds `give_up_seconds`. Quick
    steps decide, since disturbances only ever make a process look slower than it is."""
    first = look(bench, brief=True)
    limit = bench.job.give_up_seconds
    if limit is not None and spread_of(first.step_seconds).p10 > limit:
        return first
    torch.compiler.reset()  # CUDA graphs keep their memory, and the reference needs room
    free_memory(bench.device)
    whole = measure(bench)
    # The second build finds its code in the cache that the first one filled, and reports the first one's compile time.
    return replace(whole, compile_seconds=first.compile_seconds)


def look(bench: Bench, *, brief: bool = False) -> Measurement:
    job, device, plan = bench.job, bench.device, plan_of(bench.job.recipe.rungs)
    bench.report("building")
    size = job.recipe.micro_batch
    training = build(job.workload, plan, micro_batch=size, tokens=bench.tokens, device=device, ranks=bench.ranks)
    batch = next(training.batches)

    bench.report("compiling" if plan.compile else "building")
    started = time.perf_counter()
    training.step.compute_gradients(batch).item()  # the first call compiles
    first_seconds = time.perf_counter() - started
    training.restore()

    bench.report("warming up")
    expected = warm_up(bench, training, BRIEF_SECONDS if brief else WARMUP_SECONDS[device.type])
    step_seconds = time_steps(briefly(bench, expected) if brief else bench, training, expected)
    peak, outside, retries = fullest(bench, recorded=plan.cuda_graphs)
    training.close()
    return Measurement(
        loss_curve=(),
        step_seconds=tuple(step_seconds),
        compile_seconds=max(first_seconds - statistics.median(step_seconds), 0.0) if plan.compile else None,
        peak_bytes=peak,
        outside_bytes=outside,
        alloc_retries=retries,
    )


def compile_only(bench: Bench) -> Measurement:
    """Compile by running forward and backward on one batch, and once more to time them without compilation."""
    job, device = bench.job, bench.device
    bench.report("building")
    size = job.recipe.micro_batch
    training = build(job.workload, plan_of(job.recipe.rungs), micro_batch=size, tokens=bench.tokens, device=device)
    batch, seconds = next(training.batches), []
    bench.report("compiling")
    for _ in range(2):
        started = time.perf_counter()
        training.step.compute_gradients(batch).item()
        training.step.optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    training.close()
    return Measurement(loss_curve=(), compile_seconds=max(seconds[0] - seconds[1], 0.0))


def warm_up(bench: Bench, training: Training, seconds: float) -> float:
    """Run steps for `seconds`, two blocks at least. Return the median step time of the last block."""
    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < 2 * BLOCK_STEPS:
        taken += step_times(bench, training, BLOCK_STEPS)
    return statistics.median(taken[-BLOCK_STEPS:])


def briefly(bench: Bench, expected_step_seconds: float) -> Bench:
    """Return the bench with as many timed steps as a brief look has time for."""
    fewest, most = BRIEF_STEPS_BETWEEN
    count = min(max(round(BRIEF_SECONDS / expected_step_seconds), fewest), most)
    return replace(bench, job=replace(bench.job, timed_steps=min(bench.job.timed_steps or most, count)))
