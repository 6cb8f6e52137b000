"""Times one recipe: check, warm up, restore, time. Returns a Measurement; the worker handles failures.

The loss curve that proves equivalence is also the warm-up, so the check costs no extra steps. With several ranks, every
rank runs all of this. Whatever decides the number of steps is agreed on (`slowest`), since every step is collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from redline.core.job import Job
from redline.core.layout import Layout
from redline.core.measurement import Measurement, Proof, Sharing
from redline.core.plan import Plan
from redline.core.values import to_json
from redline.engine import memory
from redline.engine.build import Training, build
from redline.engine.clock import Clock
from redline.engine.distributed import Ranks, alone
from redline.engine.equivalence import Expected, check_gradients, pair_is_bitwise, reference_gradients, share_expected
from redline.engine.findings import compiler_log
from redline.engine.fit import free_memory, in_pieces_that_fit
from redline.engine.kept import kept_reference
from redline.engine.neighbours import Neighbours
from redline.engine.proof import Shares, prove
from redline.rungs import plain_at_precision, plan_of, reference_plan

STEADY = 0.02  # steps are steady when the medians of two neighbouring blocks differ by less
BLOCK_STEPS = 5
WARMUP_SECONDS = {"cuda": 2.0, "cpu": 0.5}  # the first seconds of a GPU run up to 20 % slow
WARMUP_LIMIT_SECONDS = 15.0
TIMED_SECONDS = {"cuda": 4.0, "cpu": 2.5}
TIMED_STEPS_BETWEEN = (10, 100)
TRIAL_SHARE = 0.5  # of that time in trials, which only rank batch sizes

Report = Callable[..., None]
"""report(phase, done=None, total=None, seconds=None)"""


@dataclass(frozen=True)
class Bench:
    """What every phase of a measurement needs."""

    job: Job
    tokens: Path
    device: torch.device
    report: Report
    ranks: Ranks = field(default_factory=alone)
    references: Path | None = None
    """Folder in which rows cache the plain model's first step for one another; None: no cache."""


def measure(bench: Bench) -> Measurement:
    job, device, ranks = bench.job, bench.device, bench.ranks
    plan = plan_of(job.recipe.rungs)

    bench.report("reference")
    expected = share_expected(expected_of(bench, plan) if ranks.leads else None, ranks, device)
    free_memory(device)

    bench.report("building")
    training = build(job.workload, plan, **_batch_of(bench), ranks=ranks)
    batch = next(training.batches)

    bench.report("compiling" if plan.compile else "building")
    started = time.perf_counter()
    with compiler_log() if plan.compile else nullcontext() as log:
        training.step.compute_gradients(batch).item()  # the first call compiles
    first_seconds = time.perf_counter() - started
    compiled = None if log is None else log.compiled()
    training.restore()
    gradients = check_gradients(training, batch, expected, ranks)
    del expected
    training.restore()

    curve, warm_seconds = train_curve(bench, training, first=batch)
    skipped = training.step.skipped_updates()
    warm_seconds = warm_until_steady(bench, training, warm_seconds)

    training.restore()
    neighbours = Neighbours(torch.get_num_threads()) if device.type == "cpu" and not ranks.joined else None
    step_seconds = time_steps(bench, training, statistics.median(warm_seconds[-BLOCK_STEPS:]))
    cores_missing = None if neighbours is None else neighbours.cores_missing()
    evaluate(training)
    peak, outside, retries = fullest(bench, recorded=plan.cuda_graphs)

    bench.report("proving")
    proof, shares = Proof(), None
    if job.kind != "trial":
        proof, shares = prove(training, plan, device, statistics.median(step_seconds), compiled)
    sharing = sharing_of(ranks, shares)
    training.close()
    del training
    free_memory(device)
    return Measurement(
        loss_curve=tuple(curve),
        step_seconds=tuple(step_seconds),
        cores_missing=cores_missing,
        compile_seconds=max(first_seconds - statistics.median(step_seconds), 0.0) if plan.compile else None,
        warmup_steps=len(warm_seconds),
        peak_bytes=peak,
        outside_bytes=outside,
        alloc_retries=retries,
        gradients=gradients,
        pair_bitwise=pair_is_bitwise(job, bench.tokens, device) if job.bit_exact_rung and ranks.leads else None,
        skipped_updates=skipped,
        proof=proof,
        sharing=sharing,
    )


def expected_of(bench: Bench, plan: Plan) -> Expected:
    """Return the reference for the row's gradients. Of its plan only the precision matters, so rows can share it."""
    reference, where = reference_plan(bench.job.recipe.rungs), _whole_batch_of(bench)
    question = {
        "workload": to_json(bench.job.workload),
        "reference": to_json(reference),
        "precision": (plan.precision, plan.matmul_precision, plan.autocast, plan.loss_scaling),
        "micro_batch": where["micro_batch"],
        "device": bench.device.type,
    }
    make = partial(reference_gradients, bench.job.workload, reference, plan, **where)
    return kept_reference(bench.references, question, make)


def fullest(bench: Bench, *, recorded: bool) -> tuple[int | None, int | None, int | None]:
    """Return the peak and the bytes outside the allocator of the rank that uses most memory, and the most allocator
    retries of any rank."""
    device = bench.device
    own = (memory.peak_bytes(device, recorded), memory.outside_bytes(device), memory.alloc_retries(device))
    found = bench.ranks.gather(own)
    peak, outside, _ = max(found, key=lambda one: (one[0] or 0) + (one[1] or 0))
    return peak, outside, max((retries for *_, retries in found if retries is not None), default=None)


def sharing_of(ranks: Ranks, own: Shares | None) -> Sharing | None:
    """Combine the ranks' shares; None for a single process, or if nothing was profiled."""
    found = ranks.gather(own)
    if not ranks.joined or own is None:
        return None
    most = max(found, key=lambda one: one.communication_seconds)
    return Sharing(
        communication_seconds=most.communication_seconds,
        exposed_seconds=most.exposed_seconds,
        compute_seconds=tuple(one.compute_seconds for one in found),
        by_group=by_group(most, ranks.layout),
    )


def by_group(shares: Shares, layout: Layout) -> dict[str, float] | None:
    """Return the communication by group. Ranks that share only data, or only layers, communicate about nothing else;
    otherwise the trace may tell the groups apart."""
    if layout.data == 1 or layout.tensor == 1:
        return {"data" if layout.tensor == 1 else "tensor": shares.communication_seconds}
    return None if shares.by_group is None else dict.fromkeys(("tensor", "data"), 0.0) | shares.by_group


def measure_reference(bench: Bench) -> Measurement:
    """Return the loss curve of plain code, on chunks of the batch that fit in memory: in fp32, or at the recipe's
    precision for a yardstick."""
    rungs = bench.job.recipe.rungs
    plan = reference_plan(rungs)
    if bench.job.kind == "yardstick":
        plan = plain_at_precision(plan, plan_of(rungs))
    whole = bench.job.recipe.micro_batch if bench.job.workload.splits else None
    curve = in_pieces_that_fit(partial(reference_curve, bench, plan), chunk=whole, device=bench.device)
    return Measurement(loss_curve=tuple(curve))


def reference_curve(bench: Bench, plan: Plan, chunk: int | None) -> list[float]:
    bench.report("reference", done=0, total=bench.job.check_steps)
    training = build(bench.job.workload, plan, **_whole_batch_of(bench), chunk=chunk)
    curve, _ = train_curve(bench, training, first=next(training.batches), phase="reference")
    return curve


def train_curve(
    bench: Bench, training: Training, first: torch.Tensor, phase: str = "warming up"
) -> tuple[list[float], list[float]]:
    """Run the first K steps; return their losses, which stay on the device until the end, and their times."""
    clock, losses = Clock(bench.device), []
    clock.mark()
    for done in range(bench.job.check_steps):
        losses.append(training.step(first if done == 0 else next(training.batches)))
        clock.mark()
        bench.report(phase, done=done + 1, total=bench.job.check_steps)
    return bench.ranks.mean(torch.stack(losses).float()).tolist(), slowest(bench.ranks, clock.seconds())


def warm_until_steady(bench: Bench, training: Training, seconds: list[float]) -> list[float]:
    """Run steps until two neighbouring blocks agree, or until the time limit: noise must not make it endless."""
    started = time.perf_counter()
    while not is_steady(seconds, WARMUP_SECONDS[bench.device.type]):
        if any(bench.ranks.gather(time.perf_counter() - started > WARMUP_LIMIT_SECONDS)):
            break
        seconds = seconds + step_times(bench, training, BLOCK_STEPS)
        bench.report("warming up", done=len(seconds), total=None)
    return seconds


def is_steady(seconds: list[float], least_seconds: float) -> bool:
    if len(seconds) < 2 * BLOCK_STEPS or sum(seconds) < least_seconds:
        return False
    before = statistics.median(seconds[-2 * BLOCK_STEPS : -BLOCK_STEPS])
    last = statistics.median(seconds[-BLOCK_STEPS:])
    return abs(last - before) <= STEADY * before


def evaluate(training: Training) -> None:
    """Run the forward pass of a validation batch as the trainer does: it has to fit in memory as well."""
    with training.step.shared.whole():
        training.step.loss(next(training.batches)).detach()


def time_steps(bench: Bench, training: Training, expected_step_seconds: float) -> list[float]:
    """Time the steps. The worker reports nothing until the last one is done."""
    fewest, most = TIMED_STEPS_BETWEEN
    share = TRIAL_SHARE if bench.job.kind == "trial" else 1.0
    wanted = round(share * TIMED_SECONDS[bench.device.type] / expected_step_seconds)
    count = bench.job.timed_steps or min(max(wanted, fewest), most)
    bench.report("timing", total=count, seconds=count * expected_step_seconds)
    memory.reset_peak(bench.device)
    return step_times(bench, training, count)


def step_times(bench: Bench, training: Training, count: int) -> list[float]:
    """Return the times of `count` steps on the slowest rank, each measured between two marks of the clock."""
    clock = Clock(bench.device)
    clock.mark()
    for _ in range(count):
        training.step(next(training.batches))
        clock.mark()
    return slowest(bench.ranks, clock.seconds())


def slowest(ranks: Ranks, seconds: list[float]) -> list[float]:
    """Return, on every rank, the step times of the rank with the longest median."""
    return list(max(ranks.gather(seconds), key=statistics.median))


def _batch_of(bench: Bench) -> dict[str, Any]:
    return {"micro_batch": bench.job.recipe.micro_batch, "tokens": bench.tokens, "device": bench.device}


def _whole_batch_of(bench: Bench) -> dict[str, Any]:
    """Return the same with the global batch, for one process that takes the place of all ranks."""
    return {**_batch_of(bench), "micro_batch": bench.job.global_batch}
