"""`redline profile`: where a step's time and memory go, which lines cost them, and what to do first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import (
    WORKLOAD_HELP,
    add_common,
    add_subject,
    as_published,
    check_sizes,
    command_line,
    try_page,
    warn_of,
)
from redline.core.errors import EXIT_DONE, EXIT_FAILED, UserError, explained
from redline.core.host import timestamp

if TYPE_CHECKING:
    from redline.core.hardware import Hardware
    from redline.core.job import Job, RunDirectory
    from redline.core.measurement import Failure
    from redline.core.plan import Plan
    from redline.core.profile import Finding, Kernel, Profile, Uncompiled
    from redline.core.recipe import Recipe
    from redline.core.workload import Workload
    from redline.predict.advice import Candidate
    from redline.predict.roofline import Peaks
    from redline.rungs import Rung

PROFILE_FILE = "profile.json"
NO_MODULES = "compiled code has no modules left; its lines are known"


def add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="show where a training step's time and memory go, and what to do first",
        description="Profile the step of a recipe: time by group, phase, module and kernel; memory at its peak; lines "
        "that make the device wait; and the largest things to gain.",
        epilog="Exit codes: 0 done; 1 the worker failed (out of memory, crash, time-out); 2 a mistake in the command; "
        "130 interrupted.",
    )
    profile.add_argument(
        "workload",
        nargs="?",
        metavar="WORKLOAD",
        help=WORKLOAD_HELP,
    )
    profile.add_argument("--recipe", metavar="FILE", type=Path, help="a recipe file, such as best.json of a run")
    profile.add_argument(
        "--rungs", metavar="A,B,...", help="the optimisations (default: all that apply here; 'none': the baseline)"
    )
    profile.add_argument("--micro-batch", metavar="N", type=int, help="sequences per step (default: the recipe's)")
    add_subject(profile, "profile a step that N ranks share, one GPU each")
    profile.add_argument("--steps", metavar="N", type=int, help="steps under the profiler (default: 3)")
    profile.add_argument(
        "--out", metavar="DIR", type=Path, help="run directory (default: runs/profile-WORKLOAD-DATE-TIME)"
    )
    profile.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0, help="longest time for the worker (default: 600)"
    )
    add_common(profile)
    profile.set_defaults(run=run_profile)


def run_profile(options: argparse.Namespace) -> int:
    return show_profile(profile(options), options)


def show_profile(found: dict[str, Any], options: argparse.Namespace, directory: Path | None = None) -> int:
    """Show a profile and write its page. `directory` is where the run is now, if that is not where it was made."""
    from rich.console import Console

    from redline.report.profile import print_profile
    from redline.report.profile_page import render_profile_page

    page, trouble = try_page(found, directory or Path(found["directory"]), render_profile_page)
    if options.json:
        print(json.dumps(found))
    elif found["status"] == "ok":
        print_profile(found, Console())
        if page is not None:
            print(f"page   {page}")
    if trouble is not None:
        warn_of(trouble)
    if found["status"] == "ok":
        return EXIT_DONE
    print(f"nothing was profiled: {found['reason']}", file=sys.stderr)
    print(f"the worker's log is {found['log']}", file=sys.stderr)
    return EXIT_FAILED


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Profile, and return the document that --json prints; if the worker failed, the document says so."""
    from rich.console import Console

    from redline.core.measurement import Failure
    from redline.report.hardware import MeasureBar
    from redline.search.ladder import stop_at_a_mistake
    from redline.search.launch import launch_profile, remove_caches

    run = prepare(options)
    trouble = f"the profile in {run.directory.path} could not be written", "free some space, or choose another --out"
    try:
        with MeasureBar(Console(stderr=True)) as bar, explained(*trouble):
            answer = launch_profile(run.directory, run.job, options.timeout, bar.phase)
    finally:
        remove_caches(run.directory)
    stop_at_a_mistake(answer, run.directory)
    found = failed_document(run, answer) if isinstance(answer, Failure) else document(run, answer)
    with explained(*trouble):
        run.directory.write(PROFILE_FILE, json.dumps(found, indent=2) + "\n")
    return found


# --- from words to a job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProfileRun:
    directory: RunDirectory
    job: Job
    hardware: Hardware
    record: dict[str, Any]
    """The contents of run.json."""


def prepare(options: argparse.Namespace) -> ProfileRun:
    """Check the options, as far as possible before the machine is probed and always before anything is written; then
    open the run."""
    from redline.core.job import Job, check_run_directory
    from redline.predict.parallel import Beside
    from redline.search.climb import TOKENS_FILE
    from redline.search.inspect import find_workload
    from redline.search.launch import probe_machine
    from redline.search.ranks import check_ranks, check_shareable, check_tensor_needs, layout_for
    from redline.search.words import with_layout

    given = check_options(options)
    named = None if options.workload is None else find_workload(options.workload, sequence=options.sequence)
    if named is not None:
        rungs = given.rungs if given is not None else named_rungs(options.rungs or "none")
        check_tensor_needs(rungs, options.tensor, named)
    degrees = {"tensor": options.tensor, "replicas": options.replicas}
    layout = layout_for(options.gpus or 1, degrees, named, beside=Beside(stages=False))
    if options.out is not None:
        check_run_directory(options.out)
    hardware, versions = probe_machine(options.device)
    hardware = with_layout(check_ranks(hardware, layout.ranks, layout), layout)
    workload = choose_workload(options, hardware)
    check_shareable(workload, hardware)
    recipe = choose_recipe(options, given, workload, hardware)
    workload = replace(workload, micro_batch=recipe.micro_batch)
    job = Job(
        workload=workload,
        recipe=recipe,
        device=hardware.kind,
        ranks=hardware.ranks,
        layout=hardware.layout,
        tokens=TOKENS_FILE,
        kind="profile",
        timed_steps=options.steps,
    )
    return open_run(options, job, hardware, versions)


def check_options(options: argparse.Namespace) -> Recipe | None:
    """Check the options by themselves, and return the recipe if a file was given."""
    from redline.core.recipe import load_recipe
    from redline.core.workload import check_positive
    from redline.data.text import check_corpus
    from redline.rungs.ladder import check_alternatives
    from redline.search.inspect import find_workload
    from redline.search.ladder import check_timeout
    from redline.search.words import check_choice

    check_timeout(options.timeout)
    check_choice("device", options.device, ("cuda", "cpu"))
    check_sizes(options, ("micro_batch", "gpus"))
    if options.steps is not None:
        check_positive("--steps", options.steps)
    if options.recipe is not None and options.rungs is not None:
        raise UserError("--recipe and --rungs were given together", "a recipe has its own rungs", "drop one of them")
    if options.workload is not None:
        find_workload(options.workload, sequence=options.sequence)
    if options.data is not None:
        check_corpus(options.data)
    recipe = load_recipe(options.recipe) if options.recipe is not None else None
    if recipe is not None:
        check_alternatives(recipe.rungs, str(options.recipe))
    if options.rungs is not None:
        named_rungs(options.rungs)
    return recipe


def named_rungs(words: str) -> tuple[str, ...]:
    """Return the named rungs in the order of the ladder; two that replace each other are refused."""
    from redline.rungs.ladder import check_alternatives
    from redline.search.ladder import choose_rungs

    rungs = choose_rungs(words)
    check_alternatives(rungs)
    return rungs


def choose_workload(options: argparse.Namespace, hardware: Hardware) -> Workload:
    from redline.search.inspect import find_workload
    from redline.search.words import named_or_default

    name, notes = named_or_default(options.workload, hardware)
    workload = find_workload(name, options.data, options.sequence)
    for note in (*notes, *workload.notes):
        print(note, file=sys.stderr)
    return workload


def choose_recipe(options: argparse.Namespace, given: Recipe | None, workload: Workload, hardware: Hardware) -> Recipe:
    from redline.core.recipe import Recipe
    from redline.rungs.ladder import cuts_of
    from redline.search.ladder import notes_of_ways
    from redline.search.ranks import check_measured, ranked_rungs, usual_beside

    layout = hardware.arranged
    if given is not None:
        recipe = given
    elif options.rungs is not None:
        recipe = Recipe(rungs=named_rungs(options.rungs), micro_batch=workload.micro_batch)
    else:
        usual = usual_beside(cuts_of((), layout), workload, hardware)
        recipe = Recipe(rungs=usual, micro_batch=workload.micro_batch)
        print(f"rungs {', '.join(recipe.rungs) or 'none'}: all that apply here", file=sys.stderr)
    recipe = as_published(recipe, workload, lambda note: print(note, file=sys.stderr))
    if options.micro_batch is not None:
        recipe = replace(recipe, micro_batch=options.micro_batch)
    rungs = ranked_rungs(recipe.rungs, layout)
    for note in notes_of_ways(recipe.rungs, rungs):
        print(note, file=sys.stderr)
    recipe = replace(recipe, rungs=rungs)
    check_measured(rungs, layout, workload, hardware)
    check_applies(recipe, workload, hardware)
    return recipe


def check_applies(recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
    from redline.rungs.ladder import why_not_among
    from redline.search.ranks import not_measured

    for name in recipe.rungs:
        reason = not_measured(name, hardware.arranged) or why_not_among(name, recipe.rungs, workload, hardware)
        if reason is not None:
            raise UserError(f"{name} does not apply here", reason, f"profile without {name}")


def open_run(options: argparse.Namespace, job: Job, hardware: Hardware, versions: dict[str, str | None]) -> ProfileRun:

    from redline.core.job import RUN_FILE, begin_run_directory, default_directory
    from redline.core.values import to_json
    from redline.data.tokens import encode_corpus, write_tokens

    tokens = encode_corpus(job.workload) if job.workload.reads_text else None
    path = options.out or default_directory("profile", job.workload)
    record = {
        "kind": "profile",
        "command": getattr(options, "command", None) or command_line(),
        "date": timestamp(),
        "versions": versions,
        "workload": to_json(job.workload),
        "hardware": to_json(hardware),
        "recipe": to_json(job.recipe),
    }
    with begin_run_directory(path) as directory:
        if tokens is not None:
            write_tokens(path / job.tokens, tokens, job.workload.decoder.vocab)
        directory.write(RUN_FILE, json.dumps(record, indent=2) + "\n")
    return ProfileRun(directory=directory, job=job, hardware=hardware, record=record)


# --- from a profile to its document -----------------------------------------------------------------------------------


def failed_document(run: ProfileRun, failure: Failure) -> dict[str, Any]:
    log = run.directory.job_folder(run.job) / "log.txt"
    return {
        "status": "failed",
        "failure": failure.kind,
        "reason": failure.reason,
        **run.record,
        "directory": str(run.directory.path),
        "log": str(log),
    }


def document(run: ProfileRun, found: Profile) -> dict[str, Any]:
    from redline.core.places import with_short_places
    from redline.core.values import to_json
    from redline.machine import find_measured
    from redline.predict.advice import advise, rates_of
    from redline.rungs import plan_of

    workload, recipe, hardware = run.job.workload, run.job.recipe, run.hardware
    plan, found = plan_of(recipe.rungs), with_short_places(found)
    device = hardware.device
    measured, notes = find_measured((hardware.name,) if device is None else device.names, hardware.driver)
    rates = rates_of(found, plan, device, measured)
    advice = advise(
        found,
        shape=workload.shape,
        plan=plan,
        micro_batch=recipe.micro_batch,
        candidates=candidates_of(recipe, workload, hardware),
        rates=rates,
    )
    return {
        "status": "ok",
        **run.record,
        **figures(found, plan, device, measured, refused_rungs(found, recipe, workload, hardware)),
        "tokens_per_second": run.job.global_batch * workload.shape.sequence / found.step_seconds.median,
        "roofline": roofline_json(run, plan, device, measured),
        "rates": None if rates is None else to_json(rates),
        "advice": to_json(advice),
        "memory": None if found.memory is None else memory_json(run, plan, found),
        "notes": [*found.notes, *notes],
        "trace": None if found.trace is None else str(run.directory.path / found.trace),
        "directory": str(run.directory.path),
    }


def figures(
    found: Profile, plan: Plan, device: Any, measured: Any, refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what was measured, for any kind of step. `plan` distinguishes TF32 from fp32; `refused` has the rungs that
    do not apply, with the reasons."""
    from redline.core.values import to_json
    from redline.search.document import sharing_json

    step = found.step_seconds.median
    seconds, phases = found.by_group(), found.by_phase()
    return {
        "device": found.device,
        "compiled": found.compiled,
        "step_seconds": to_json(found.step_seconds),
        "profiled_steps": found.steps,
        "profiled_step_seconds": found.profiled_seconds,
        "profiler_overhead": found.profiled_seconds / step - 1,
        "groups": [{"group": name, "seconds": value, "share": value / step} for name, value in seconds.items()],
        "phases": [{"phase": name, "seconds": value, "share": value / step} for name, value in phases.items()],
        "parts": to_json(found.parts),
        "modules": to_json(found.modules),
        "modules_without_compile": None if found.uncompiled is None else uncompiled_json(found.uncompiled),
        "kernels": [kernel_json(kernel, kernel_peaks(plan, kernel, device, measured)) for kernel in found.kernels],
        "launches": found.launches,
        "busy_share": found.busy_share,
        "host_seconds": found.host_seconds,
        "cpu_seconds": found.cpu_seconds,
        "sync_idle_seconds": found.sync_idle_seconds,
        "attention": found.attention,
        "findings": [{**to_json(each), "fix": fix_of(each, plan, refused or {})} for each in found.findings],
        "memory_reason": found.memory_reason,
        "sharing": sharing_json(found.sharing),
    }


def uncompiled_json(found: Uncompiled) -> dict[str, Any]:
    """Return the modules with their shares of the work of forward and backward, which add up to one."""
    from redline.core.values import to_json

    rows: list[dict[str, Any]] = [
        {**to_json(row), "share": (row.forward + row.backward) / found.work_seconds} for row in found.modules
    ]
    return {**to_json(found), "modules": rows}


def fix_of(finding: Finding, plan: Plan, refused: Mapping[str, str]) -> str:
    from redline.core.profile import FINDINGS

    if finding.rung is None:
        return FINDINGS[finding.kind]
    if finding.rung == "no-sync" and plan.read_loss_every != 1:
        return f"none needed: the recipe has {finding.rung}, and one step in {plan.read_loss_every} waits"
    if finding.rung in refused:
        return f"the rung {finding.rung} does not apply here: {refused[finding.rung]}"
    return f"take the rung {finding.rung}"


def refused_rungs(found: Profile, recipe: Recipe, workload: Workload, hardware: Hardware) -> dict[str, str]:
    """Return the rungs that findings name but that cannot go onto the recipe here, with the reasons."""
    from redline.rungs import find_rung, plan_of, why_not
    from redline.search.ranks import refused_beside

    reasons = {}
    for name in {each.rung for each in found.findings if each.rung is not None}:
        rung, rest = find_rung(name), beside(find_rung(name), recipe)
        reason = why_not(rung, workload, hardware, plan_of(rest))
        reasons[name] = reason or refused_beside(rung, rest, workload, hardware)
    return {name: reason for name, reason in reasons.items() if reason is not None}


def beside(rung: Rung, recipe: Recipe) -> tuple[str, ...]:
    """Return the recipe's rungs without those that this one replaces."""
    from redline.rungs import find_rung, group_of

    return tuple(name for name in recipe.rungs if group_of(find_rung(name)) != group_of(rung))


def candidates_of(recipe: Recipe, workload: Workload, hardware: Hardware) -> tuple[Candidate, ...]:
    """Return the rungs that could go onto the recipe here, or replace one of its own, without changing the maths. Those
    that are taken by name are left out: they give up speed for memory."""
    from redline.predict.advice import Candidate
    from redline.rungs import LADDER, Maths, plan_of, why_not
    from redline.search.ranks import refused_beside

    found = []
    for rung in LADDER[1:]:
        if rung.name in recipe.rungs or rung.maths is Maths.CHANGES or rung.when_named:
            continue
        rest = beside(rung, recipe)
        reason = why_not(rung, workload, hardware, plan_of(rest)) or refused_beside(rung, rest, workload, hardware)
        if reason is None:
            found.append(Candidate(rung=rung.name, title=rung.title, plan=plan_of((*rest, rung.name))))
    return tuple(found)


def kernel_peaks(plan: Plan, kernel: Kernel, device: Any, measured: Any) -> Peaks | None:
    """Return the peaks at the kernel's precision: the data sheet's, or without one those measured here."""
    from redline.predict.roofline import Peaks

    dtype = "tf32" if kernel.dtype == "fp32" and plan.matmul_precision == "high" else kernel.dtype
    source = device if device is not None else measured
    if source is None:
        return None
    tflops = source.peak_tflops if device is not None else source.matmul_tflops
    if dtype is not None and dtype not in tflops:
        return None
    rate = tflops[dtype] if dtype is not None else max(tflops.values())  # no matmul: the rate does not count
    return Peaks(matmul_tflops=rate, bandwidth=source.bandwidth, source="data sheet" if device else "measured")


def kernel_json(kernel: Kernel, peaks: Peaks | None) -> dict[str, Any]:
    """Return the kernel with its rates and its share of the roofline: the least time its work could take, divided by
    the time it took."""
    from redline.core.values import to_json

    compute = None if not kernel.flops or peaks is None else kernel.flops / (1e12 * peaks.matmul_tflops)
    memory = None if kernel.bytes is None or peaks is None else kernel.bytes / peaks.bandwidth
    least = max((time for time in (compute, memory) if time is not None), default=None)
    return {
        **to_json(kernel),
        "tflops": None if not kernel.flops else kernel.flops / kernel.seconds / 1e12,
        "bytes_per_second": None if kernel.bytes is None else kernel.bytes / kernel.seconds,
        "roofline_share": None if least is None else least / kernel.seconds,
        "bound": None if least is None else "compute" if least == compute else "memory",
    }


def roofline_json(run: ProfileRun, plan: Plan, device: Any, measured: Any) -> dict[str, Any] | None:
    """Return how long this step could take at best, without communication; in a tensor group, each rank's part of it.
    None for a device without a data sheet, and for a user's file, whose operations are not described."""
    from redline.predict.layouts import piece_of
    from redline.predict.parallel import Layout
    from redline.predict.roofline import predict_step, reachable, sheet_peaks

    sheet = None if device is None else sheet_peaks(plan, device)
    if device is None or sheet is None or not run.job.workload.reads_text:
        return None
    shape, ranks = run.job.workload.decoder, run.job.arranged
    if ranks.tensor > 1:
        shape, plan = piece_of(shape, plan, Layout(gpus=ranks.ranks, tp=ranks.tensor))
    predicted = predict_step(
        shape,
        plan,
        micro_batch=run.job.recipe.micro_batch,
        sheet=sheet,
        reached=reachable(plan, device, measured),
    )
    return {
        "floor_seconds": predicted.floor_seconds,
        "light_seconds": predicted.light.seconds,
        "expected_seconds": predicted.expected.seconds,
        "source": predicted.expected.peaks.source,
    }


def memory_json(run: ProfileRun, plan: Plan, found: Profile) -> dict[str, Any]:
    """Return the measured anatomy beside the predicted one. On a CPU the prediction leaves out cuBLAS workspaces."""
    from redline.core.values import to_json
    from redline.predict.fitting import case_of
    from redline.predict.memory import WORKSPACES

    assert found.memory is not None
    predicted = case_of(run.job.workload.shape, plan, run.job.arranged).memory(run.job.recipe.micro_batch)
    if found.device == "cpu":
        predicted = replace(predicted, temporary=predicted.temporary - WORKSPACES)
    return {**anatomy_json(found), "predicted": {**to_json(predicted), "allocated": predicted.allocated}}


def anatomy_json(found: Profile) -> dict[str, Any]:
    """Return the measured memory anatomy, for any kind of step."""
    from redline.core.values import to_json

    assert found.memory is not None
    return {
        **to_json(found.memory),
        "modules_reason": NO_MODULES if found.compiled else None,
        "fragmentation_bytes": found.memory.fragmentation_bytes,
    }
