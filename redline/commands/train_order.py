"""The order that `redline train` carries out: a new run's from its options, a resumed one's from its run directory.

order = make_order(options, console)        # for a new run, also writes run.json and prepares its text
order, hardware = check_order(options, console, ranks)      # refuses what can be refused before anything is made
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import as_published, command_line
from redline.commands.ranks import change_of_ranks
from redline.commands.train_recipe import (
    check_allowed,
    check_init,
    check_needs,
    check_parallel,
    other_optimizer,
    shared_recipe,
    without_refused,
)
from redline.commands.training_data import TEXT_OPTIONS, check_data, data_of_run, training_data
from redline.core.errors import UserError
from redline.core.host import timestamp
from redline.core.units import counted
from redline.core.workload import check_positive

if TYPE_CHECKING:
    from rich.console import Console

    from redline.core.hardware import Hardware
    from redline.core.layout import Layout
    from redline.core.recipe import Recipe
    from redline.core.training import Budget
    from redline.core.workload import Workload
    from redline.engine.session import TrainOrder

DEFAULT_MINUTES = 5.0


def began_with(run: Path) -> int:
    """Return the number of ranks in its run.json, which `resumed_order` has already read and checked."""
    from redline.core.job import RunDirectory

    return int(RunDirectory(run).read_run()["hardware"].get("ranks", 1))


def make_order(options: argparse.Namespace, console: Any, ranks: int = 1) -> TrainOrder:
    from redline.search.ranks import uncut_copies

    if not options.resume:
        return new_order(options, console, ranks)
    order = resumed_order(options, ranks)
    assert order.layout is not None, "a resumed order has one"
    changed = change_of_ranks(began_with(options.resume), order.layout, order)
    notes = (end_of_schedule(order), changed, uncut_copies(order.layout))
    for note in filter(None, notes):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return order


def check_order(options: argparse.Namespace, console: Any, ranks: int) -> tuple[TrainOrder, Hardware]:
    """Find every mistake that can be found without making anything. Return the order and the machine."""
    from redline.search.launch import probe_machine
    from redline.search.ranks import check_ranks

    if options.resume:
        order = resumed_order(options, ranks)
        return order, check_ranks(probe_machine(order.device)[0], ranks, order.layout)
    order, hardware, _ = chosen_order(options, console, ranks)
    check_data(options, order.workload)
    return order, hardware


def new_order(options: argparse.Namespace, console: Any, ranks: int = 1) -> TrainOrder:
    from redline.core.job import RUN_FILE, begin_run_directory
    from redline.core.values import to_json

    order, hardware, versions = chosen_order(options, console, ranks)
    workload, settings, out = order.workload, order.settings, Path(order.out)
    check_data(options, workload)
    with begin_run_directory(out) as directory:
        data = training_data(options, workload, settings, out, console) if workload.reads_text else ""
        order = replace(order, data=str(data))
        record = {
            "kind": "train",
            "order": to_json(order),
            "hardware": to_json(hardware),
            "versions": versions,
            "command": command_line(),
            "date": timestamp(),
        }
        directory.write(RUN_FILE, json.dumps(record, indent=2))
    return order


def chosen_order(
    options: argparse.Namespace, console: Console, ranks: int
) -> tuple[TrainOrder, Hardware, dict[str, str | None]]:
    """Return the order that the options describe on this machine, without its data yet; nothing is written."""
    from redline.commands.ranks import batch_beside, layout_of
    from redline.core.job import default_directory
    from redline.core.recipe import load_recipe
    from redline.search.ranks import check_ranks

    recipe = load_recipe(options.recipe) if options.recipe else None
    check_arguments(options, ranks, recipe)
    budget = budget_of(options, console)
    hardware, versions = probe_and_import(options.device)
    from redline.engine.session import TrainOrder, rate_of

    workload = announced_workload(options, hardware.kind, console)
    beside = batch_beside(options, workload, recipe)
    recipe = recipe_of(options, recipe, workload, hardware, console)
    check_needs(options, ranks, recipe, workload)
    layout = layout_of(options, ranks, workload, beside)
    hardware = check_ranks(hardware, ranks, layout, beside)
    recipe = shared_recipe(recipe, options.parallel, layout)
    check_allowed(recipe, workload, hardware.kind)
    if ranks > 1:
        check_and_tell_layout(options, recipe, workload, hardware, layout, console)
    settings = settings_of(options, workload, recipe, budget, layout)
    rate_of(settings)  # refuses a warm-up that does not fit before anything is made
    out = options.out or default_directory("train", workload)
    order = TrainOrder(
        workload=workload,
        recipe=recipe,
        settings=settings,
        device=hardware.kind,
        data="",
        out=str(out),
        init=None if options.init is None else str(options.init),
        layout=layout,
    )
    return order, hardware, versions


def check_arguments(options: argparse.Namespace, ranks: int, recipe: Recipe | None) -> None:
    """Find the mistakes that show without probing the machine, which takes seconds because of torch."""
    from redline.commands.ranks import batch_beside, layout_of
    from redline.core.recipe import Recipe
    from redline.rungs.ladder import check_alternatives, with_optimizer
    from redline.search.inspect import find_workload

    named = recipe.rungs if recipe else ()
    rungs = named if options.optimizer is None else with_optimizer(named, options.optimizer)
    if options.workload:
        workload = find_workload(options.workload, sequence=options.sequence)
        check_needs(options, ranks, Recipe(rungs=rungs, micro_batch=1), workload)
        layout_of(options, ranks, workload, batch_beside(options, workload, recipe))
    check_alternatives(named, str(options.recipe))


def budget_of(options: argparse.Namespace, console: Console) -> Budget:
    from redline.core.training import Budget

    given = {"steps": options.steps, "tokens": options.tokens, "minutes": options.minutes}
    if all(value is None for value in given.values()):
        console.print(f"--minutes {DEFAULT_MINUTES:g}: no budget was given")
        given["minutes"] = DEFAULT_MINUTES
    return Budget(**given)


def probe_and_import(device: str | None) -> tuple[Hardware, dict[str, str | None]]:
    """Probe the machine in another process while importing torch here: the import takes seconds in each."""
    from redline.search.launch import probe_machine

    with ThreadPoolExecutor(max_workers=1) as beside_us:
        asked = beside_us.submit(probe_machine, device)
        import redline.engine.session  # noqa: F401

        return asked.result()


def announced_workload(options: argparse.Namespace, device: str, console: Console) -> Workload:
    """Return the workload to train on this device, and print its notes."""
    from redline.search.inspect import find_workload
    from redline.workloads import default_workload
    from redline.workloads.resolve import RANDOM_WEIGHTS
    from redline.workloads.shapes import weights_beside

    name = options.workload or default_workload(device)
    workload = find_workload(name, sequence=options.sequence, trained_on=device)
    is_transformers = workload.source.kind == "huggingface"
    if is_transformers:
        weights = f"weights from {options.init}" if options.init else f"{RANDOM_WEIGHTS} (--init FOLDER reads others)"
        workload = replace(workload, notes=(*workload.notes, weights))
    for note in workload.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if is_transformers and options.init is None and (folder := weights_beside(name)):
        text = (
            f"the weights in {folder} are not read, this run begins with random ones: --init {folder} begins with them"
        )
        console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    return workload


def recipe_of(
    options: argparse.Namespace, given: Recipe | None, workload: Workload, hardware: Hardware, console: Console
) -> Recipe:
    """Return the given recipe, or the usual one for this machine, with the changes that the options make."""
    from redline.core.recipe import Recipe
    from redline.rungs import usual_rungs

    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    usual = given or Recipe(rungs=usual_rungs(workload, hardware), micro_batch=workload.micro_batch)
    recipe = as_published(without_refused(usual, workload, hardware, say), workload, say)
    if options.micro_batch is not None:
        recipe = replace(recipe, micro_batch=options.micro_batch)
    if options.optimizer is not None:
        recipe = replace(recipe, rungs=other_optimizer(options.optimizer, recipe.rungs, workload, hardware))
    return recipe


def check_and_tell_layout(
    options: argparse.Namespace,
    recipe: Recipe,
    workload: Workload,
    hardware: Hardware,
    layout: Layout,
    console: Console,
) -> None:
    from redline.search.ranks import check_layout, notes_of_rungs, uncut_copies

    check_parallel(recipe, workload, hardware, layout)
    check_layout(layout, recipe)
    check_init(recipe, options.init, layout)
    for note in notes_of_rungs(recipe.rungs, layout):
        console.print(note, style="dim", soft_wrap=True)
    if (uncut := uncut_copies(layout)) is not None:
        console.print(uncut, markup=False, highlight=False, soft_wrap=True)


def settings_of(options: argparse.Namespace, workload: Any, recipe: Any, budget: Any, layout: Layout) -> Any:
    from redline.commands.ranks import check_shares
    from redline.core.training import TrainSettings
    from redline.engine.build import optimizer_settings
    from redline.rungs import plan_of

    own = optimizer_settings(workload, plan_of(recipe.rungs))  # a workload states AdamW's rate
    global_batch = global_sequences(options, workload.shape.sequence, recipe.micro_batch, layout.data)
    check_shares(recipe.micro_batch, global_batch, layout)
    per_update = global_batch * workload.shape.sequence
    ends = [budget.steps, None if budget.tokens is None else -(-budget.tokens // per_update)]
    schedule_steps = min((steps for steps in ends if steps is not None), default=None)
    endless = schedule_steps is None or schedule_steps == 1  # one update has no room to warm up and decay
    schedule = options.schedule or ("constant" if endless else "cosine")
    if schedule != "constant" and schedule_steps is None:
        raise UserError(
            f"a {schedule} schedule has no end here",
            "--minutes does not say how many updates there will be",
            "give --steps or --tokens too, or --schedule constant",
        )
    warmup = workload.warmup_steps if options.warmup_steps is None else options.warmup_steps
    if schedule_steps is not None and schedule != "constant":
        warmup = min(warmup, max(1, schedule_steps - 1)) if options.warmup_steps is None else warmup
    return TrainSettings(
        micro_batch=recipe.micro_batch,
        global_batch=global_batch,
        budget=budget,
        schedule=schedule,
        schedule_steps=schedule_steps if schedule != "constant" else None,
        warmup_steps=warmup,
        learning_rate=own["learning_rate"] if options.learning_rate is None else options.learning_rate,
        deterministic=bool(options.deterministic),
        **often(options),
    )


def often(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given settings of how often things happen and how many checkpoints are kept."""
    chosen = {
        "eval_every": options.eval_every,
        "checkpoint_every": options.checkpoint_every,
        "sample_every": options.sample_every,
        "cycle_steps": options.cycle,
        "keep_last": options.keep_last,
        "keep_best": options.keep_best,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def global_sequences(options: argparse.Namespace, sequence: int, micro_batch: int, data: int) -> int:
    """Return the sequences per update: as given, from --batch-tokens, or one micro batch for each of `data` ranks."""
    tokens = options.batch_tokens
    if tokens is None:
        return micro_batch * data if options.global_batch is None else int(options.global_batch)
    if options.global_batch is not None:
        raise UserError("--global-batch and --batch-tokens", "both say how large an update is", "give one of them")
    check_positive("--batch-tokens", tokens)
    each = micro_batch * sequence * data
    if tokens % each:
        nearest = " or ".join(str(each * count) for count in (tokens // each, tokens // each + 1) if count)
        shared = "" if data == 1 else f", on each of {data} ranks"
        raise UserError(
            f"--batch-tokens {tokens} is not a multiple of {each:,}",
            f"an update adds up whole micro batches, here of {counted(micro_batch, 'sequence')} of {sequence:,} "
            f"tokens{shared}",
            f"set it to {nearest}, or choose another --micro-batch",
        )
    return int(tokens // sequence)


FIXED = (
    "workload",
    "sequence",
    "optimizer",
    "data",
    "global_batch",
    "batch_tokens",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "init",
    "deterministic",
    *TEXT_OPTIONS,
    "out",
)
"""Options that a resumed run cannot change."""


def resumed_order(options: argparse.Namespace, ranks: int = 1) -> TrainOrder:
    """Return the order in run.json with the changes that are allowed: the budget, to train longer, and what changes no
    update, which is how often things happen, the device, the layout of the ranks, the micro batch and the recipe (the
    checkpoint refuses another model or optimizer)."""
    from redline.commands.ranks import check_resumed_shares, layout_of
    from redline.core.hardware import Hardware
    from redline.core.recipe import load_recipe
    from redline.core.training import Budget
    from redline.core.values import from_json
    from redline.predict.parallel import Beside
    from redline.rungs import own_rungs, with_own
    from redline.search.ranks import check_layout

    order, record = recorded_order(options)
    longer = {"steps": options.steps, "tokens": options.tokens, "minutes": options.minutes}
    if any(value is not None for value in longer.values()):
        order = replace(order, settings=replace(order.settings, budget=Budget(**longer)))
    recipe = load_recipe(options.recipe) if options.recipe else order.recipe
    if set(own_rungs(order.workload)) <= set(order.recipe.rungs):  # otherwise it has trained another model so far
        recipe = replace(recipe, rungs=with_own(recipe.rungs, order.workload))
    if options.micro_batch is not None:
        recipe = replace(recipe, micro_batch=options.micro_batch)
    check_needs(options, ranks, recipe, order.workload)
    kept = Beside(micro_batch=recipe.micro_batch, batch=order.settings.global_batch, option=None)
    layout = layout_of(options, ranks, order.workload, kept)
    recipe = shared_recipe(recipe, options.parallel, layout)
    check_layout(layout, recipe)
    check_resumed_shares(str(options.resume), recipe.micro_batch, order.settings.global_batch, layout)
    check_allowed(recipe, order.workload, order.device)
    if ranks > 1:
        check_parallel(recipe, order.workload, replace(from_json(Hardware, record["hardware"]), ranks=ranks), layout)
    settings = replace(order.settings, micro_batch=recipe.micro_batch, **often(options))
    return replace(
        order,
        recipe=recipe,
        settings=settings,
        device=options.device or order.device,
        out=str(options.resume),
        layout=layout,
        parallel=options.parallel,
    )


def recorded_order(options: argparse.Namespace) -> tuple[TrainOrder, dict[str, Any]]:
    """Return the order that the run was started with, and its run.json. Options that would change it are refused."""
    from redline.core.job import RUN_FILE, check_kind, open_run_directory
    from redline.core.values import from_json
    from redline.engine.session import TrainOrder

    given = [
        "workload" if name == "workload" else f"--{name.replace('_', '-')}"
        for name in FIXED
        if getattr(options, name) is not None
    ]
    if given:
        raise UserError(
            f"{', '.join(given)} cannot change in a resumed run",
            "the run directory holds what the run was started with",
            "leave it out, or start a new run",
        )
    record = open_run_directory(options.resume).read_run()
    check_kind(options.resume, record, "train")
    try:
        if record.get("kind") != "train":
            raise UserError(
                f"{options.resume} is no training run",
                f"its {RUN_FILE} does not say that it is one",
                "give the directory that `redline train` named at its end",
            )
        order = from_json(TrainOrder, record["order"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{options.resume} is not a training run this version can read",
            f"{RUN_FILE}: {error}",
            "use the version that made it, or start a new run",
        ) from error
    return replace(order, data=data_of_run(order.data, options.resume)), record


def end_of_schedule(order: TrainOrder) -> str | None:
    """Return a note if the budget goes beyond the schedule. The schedule keeps its first end: stretching it would
    change updates that were already made."""
    settings = order.settings
    end, budget = settings.schedule_steps, settings.budget
    per_update = settings.global_batch * order.workload.shape.sequence
    tokens = None if budget.tokens is None else -(-budget.tokens // per_update)
    wanted = min((steps for steps in (budget.steps, tokens) if steps is not None), default=None)
    if end is None or (wanted is not None and wanted <= end):
        return None
    return f"note: the {settings.schedule} schedule ends at step {end:,}: later updates keep its lowest rate"
