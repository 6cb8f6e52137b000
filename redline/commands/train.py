"""`redline train` pretrains with a recipe. What came out of it, `commands/trained.py` takes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import (
    WORKLOAD_HELP,
    add_common,
    add_sequence,
    as_published,
    command_line,
    only_our_words_on_stdout,
)
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
from redline.commands.training_data import (
    TEXT_OPTIONS,
    add_data_options,
    check_data,
    data_of_run,
    nothing_left_behind,
    training_data,
)
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, FailedRunError, UserError
from redline.core.units import counted
from redline.core.workload import check_positive

if TYPE_CHECKING:
    from redline.commands.watchers import Session
    from redline.core.hardware import Hardware
    from redline.core.layout import Layout
    from redline.engine.distributed import Ranks
    from redline.engine.session import TrainOrder

DEFAULT_MINUTES = 5.0
DEFAULT_OUT = "runs/train-WORKLOAD-DATE-TIME"


def add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="pretrain a GPT with a recipe, from text to checkpoint",
        description="Pretrain a GPT with the step the ladder measured, from text to checkpoint.",
        epilog="Ctrl-C saves a checkpoint and leaves; a second one leaves at once. Exit codes: 0 the budget is used "
        "up; 1 training failed; 2 a mistake in the command; 130 interrupted (continue with --resume).",
    )
    train.add_argument("workload", nargs="?", metavar="WORKLOAD", help=WORKLOAD_HELP)
    train.add_argument("--recipe", metavar="FILE", type=Path, help="best.json of a ladder (default: what applies here)")
    train.add_argument(
        "--optimizer", metavar="NAME", help="another than the recipe's, such as muon: short for its rung in the recipe"
    )
    add_data_options(train)
    add_sequence(train)
    train.add_argument(
        "--init", metavar="FOLDER", type=Path, help="begin with the weights of a Hugging Face folder (safetensors)"
    )
    train.add_argument("--steps", metavar="N", type=int, help="stop after N updates")
    train.add_argument("--tokens", metavar="N", type=int, help="stop after N tokens")
    train.add_argument("--minutes", metavar="M", type=float, help="stop after M minutes of training (default: 5)")
    train.add_argument("--micro-batch", metavar="N", type=int, help="sequences per pass (default: the recipe's)")
    train.add_argument(
        "--global-batch", metavar="N", type=int, help="sequences per update (default: a micro batch of each rank)"
    )
    train.add_argument("--batch-tokens", metavar="N", type=int, help="the same in tokens, instead of --global-batch")
    train.add_argument("--learning-rate", metavar="R", type=float, help="its peak (default: the optimizer's)")
    train.add_argument("--warmup-steps", metavar="N", type=int, help="updates until the peak (default: the workload's)")
    train.add_argument(
        "--schedule",
        choices=("cosine", "wsd", "constant"),
        help="after the warm-up (default: cosine where --steps or --tokens say when it ends, else constant)",
    )
    train.add_argument("--eval-every", metavar="N", type=int, help="updates between evaluations (default: 100)")
    train.add_argument("--checkpoint-every", metavar="N", type=int, help="updates between checkpoints (default: 500)")
    train.add_argument("--keep-last", metavar="N", type=int, help="newest checkpoints to keep (default: 2)")
    train.add_argument("--keep-best", metavar="N", type=int, help="best ones to keep, by validation loss (default: 1)")
    train.add_argument("--sample-every", metavar="N", type=int, help="updates between samples of text (default: none)")
    train.add_argument("--cycle", metavar="N", type=int, help="updates between two looks at the device (default: 10)")
    train.add_argument(
        "--tracker", metavar="NAME", help="curves for a tracker too: tensorboard (pip install tensorboard)"
    )
    train.add_argument("--gpus", metavar="N", type=int, help="train on N GPUs of this machine (docs/distributed.md)")
    train.add_argument(
        "--parallel",
        metavar="WAY",
        help="how ranks share a step: ddp, fsdp, fsdp-keep or fsdp-whole, short for its rung in the recipe",
    )
    train.add_argument("--tensor", metavar="N", type=int, help="ranks that hold each layer together (default: 1)")
    train.add_argument("--pipeline", metavar="N", type=int, help="stages that hold the layers in turn (default: 1)")
    train.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        help="with fsdp: copies of the model, each cut among its ranks (default: 1)",
    )
    train.add_argument(
        "--rank-timeout",
        metavar="S",
        type=float,
        help="seconds after which a rank that stands still ends all (default: 600)",
    )
    train.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees one")
    train.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="slower algorithms that repeat bit for bit: a resumed run on a GPU then equals one that never stopped",
    )
    train.add_argument("--out", metavar="DIR", type=Path, help=f"run directory (default: {DEFAULT_OUT})")
    train.add_argument("--resume", metavar="DIR", type=Path, help="go on from the newest whole checkpoint of a run")
    add_common(train)
    train.set_defaults(run=run_train)


def run_train(options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.commands.ranks import check_rank_timeout, ranks_here, run_rank, start_ranks
    from redline.engine.trackers import check_tracker

    check_rank_timeout(options.rank_timeout)
    if options.tracker is not None:
        check_tracker(options.tracker)
    if options.gpus is not None and options.gpus != 1:
        return start_ranks(options)
    if ranks_here() is not None:
        return run_rank(options)
    console = Console(stderr=True)
    return train_and_show(make_order(options, console), options, console)


def train_and_show(order: TrainOrder, options: argparse.Namespace, console: Any, ranks: Ranks | None = None) -> int:
    from redline.commands.watchers import Watchers

    session = session_of(order, options, 1 if ranks is None else ranks.count)
    watching = Watchers(order, session, console, tracker=options.tracker)
    try:
        with only_our_words_on_stdout(), watching as watchers:
            summary = train_session(order, watchers.emit, ranks)
            watchers.end(summary)
    except UserError as error:
        if not (options.resume or watching.trained or holds_text(order, options)):
            shutil.rmtree(order.out, ignore_errors=True)  # a mistake leaves nothing that looks like a run
        elif options.json and isinstance(error, FailedRunError):
            show_lost_run(order, options)
        raise
    show_summary({**summary, **watchers.speed, "page": watchers.page}, order, options)
    return {"interrupted": EXIT_INTERRUPTED, "diverged": EXIT_FAILED, "failed": EXIT_FAILED}.get(
        summary["ended"], EXIT_DONE
    )


def holds_text(order: TrainOrder, options: argparse.Namespace) -> bool:
    """The run directory has what was made of the user's text, which may have taken hours. The sample's is made soon."""
    return options.data is not None and Path(order.data).is_relative_to(Path(order.out).resolve())


def train_session(order: TrainOrder, emit: Any, ranks: Ranks | None = None) -> dict[str, Any]:
    from redline.engine.session import train

    return train(order, emit, ranks)


# --- from words to an order -------------------------------------------------------------------------------------------


def began_with(run: Path) -> int:
    """Ranks, by its run.json, which `resumed_order` has read whole."""
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
    """Every mistake that can be found without making anything; what the words come to, and the machine."""
    from redline.search.launch import probe_machine
    from redline.search.ranks import check_ranks

    if options.resume:
        order = resumed_order(options, ranks)
        return order, check_ranks(probe_machine(order.device)[0], ranks, order.layout)
    order, hardware, _ = chosen_order(options, console, ranks)
    check_data(options, order.workload)
    return order, hardware


def new_order(options: argparse.Namespace, console: Any, ranks: int = 1) -> TrainOrder:
    from redline.core.job import create_run_directory
    from redline.core.values import to_json

    order, hardware, versions = chosen_order(options, console, ranks)
    workload, settings, out = order.workload, order.settings, Path(order.out)
    check_data(options, workload)
    directory = create_run_directory(out)
    with nothing_left_behind(out):
        data = training_data(options, workload, settings, out, console) if workload.reads_text else ""
    order = replace(order, data=str(data))
    record = {
        "kind": "train",
        "order": to_json(order),
        "hardware": to_json(hardware),
        "versions": versions,
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    directory.write("run.json", json.dumps(record, indent=2))
    return order


def chosen_order(
    options: argparse.Namespace, console: Any, ranks: int
) -> tuple[TrainOrder, Hardware, dict[str, str | None]]:
    """What the words come to on this machine, without its data yet; nothing is written."""
    from redline.commands.ranks import batch_beside, layout_of
    from redline.core.recipe import Recipe, load_recipe
    from redline.core.training import Budget
    from redline.rungs import usual_rungs
    from redline.rungs.ladder import check_alternatives, with_optimizer
    from redline.search.inspect import find_workload
    from redline.search.launch import probe_machine
    from redline.search.ranks import check_layout, check_ranks, notes_of_rungs, uncut_copies
    from redline.workloads import default_workload
    from redline.workloads.resolve import RANDOM_WEIGHTS
    from redline.workloads.shapes import weights_beside

    recipe = load_recipe(options.recipe) if options.recipe else None
    if options.workload:  # a mistake is told before torch is asked
        workload = find_workload(options.workload, sequence=options.sequence)
        rungs = recipe.rungs if recipe else ()
        rungs = rungs if options.optimizer is None else with_optimizer(rungs, options.optimizer)
        check_needs(options, ranks, Recipe(rungs=rungs, micro_batch=1), workload)
        layout_of(options, ranks, workload, batch_beside(options, workload, recipe))
    given = {"steps": options.steps, "tokens": options.tokens, "minutes": options.minutes}
    if all(value is None for value in given.values()):
        console.print(f"--minutes {DEFAULT_MINUTES:g}: no budget was given")
        given["minutes"] = DEFAULT_MINUTES
    budget = Budget(**given)
    check_alternatives(recipe.rungs if recipe else ())
    if options.optimizer is not None:
        with_optimizer((), options.optimizer)  # likewise
    with ThreadPoolExecutor(max_workers=1) as beside_us:  # torch takes seconds to import, in its process and in ours
        asked = beside_us.submit(probe_machine, options.device)
        from redline.engine.session import TrainOrder, rate_of
    hardware, versions = asked.result()
    name = options.workload or default_workload(hardware.kind)
    workload = find_workload(name, sequence=options.sequence, trained_on=hardware.kind)
    if workload.source.kind == "huggingface":
        weights = f"weights from {options.init}" if options.init else f"{RANDOM_WEIGHTS} (--init FOLDER reads others)"
        workload = replace(workload, notes=(*workload.notes, weights))
    beside = batch_beside(options, workload, recipe)
    for note in workload.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if workload.source.kind == "huggingface" and options.init is None and (folder := weights_beside(name)):
        text = (
            f"the weights in {folder} are not read, this run begins with random ones: --init {folder} begins with them"
        )
        console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    if recipe is None:
        recipe = Recipe(rungs=usual_rungs(workload, hardware), micro_batch=workload.micro_batch)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    recipe = as_published(without_refused(recipe, workload, hardware.kind, say), workload, say)
    if options.micro_batch is not None:
        recipe = replace(recipe, micro_batch=options.micro_batch)
    if options.optimizer is not None:
        recipe = replace(recipe, rungs=other_optimizer(options.optimizer, recipe.rungs, workload, hardware))
    check_needs(options, ranks, recipe, workload)
    layout = layout_of(options, ranks, workload, beside)
    hardware = check_ranks(hardware, ranks, layout, beside)
    recipe = shared_recipe(recipe, options.parallel, layout)
    check_allowed(recipe, workload, hardware.kind)
    if ranks > 1:
        check_parallel(recipe, workload, hardware, layout)
        check_layout(layout, recipe)
        check_init(recipe, options.init, layout)
        for note in notes_of_rungs(recipe.rungs, layout):
            console.print(note, style="dim", soft_wrap=True)
        if (uncut := uncut_copies(layout)) is not None:
            console.print(uncut, markup=False, highlight=False, soft_wrap=True)
    settings = settings_of(options, workload, recipe, budget, layout)
    rate_of(settings)  # a warm-up that does not fit is told before anything is made
    out = options.out or Path("runs") / f"train-{workload.name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
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
    endless = schedule_steps is None or schedule_steps == 1  # one update has no room for a way up and a way down
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
    """How often things happen, where it was said."""
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
    """Of an update: as given, from --batch-tokens, or one micro batch of each of `data` ranks."""
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
    """What run.json says. The budget may be given again, to train longer, and what changes no update: how often things
    happen, the device, the recipe (another model or optimizer is refused by the checkpoint) and the micro batch."""
    from redline.commands.ranks import check_resumed_shares, layout_of
    from redline.core.hardware import Hardware
    from redline.core.job import RUN_FILE, check_kind, open_run_directory
    from redline.core.recipe import load_recipe
    from redline.core.training import Budget
    from redline.core.values import from_json
    from redline.engine.session import TrainOrder
    from redline.predict.parallel import Beside
    from redline.rungs import own_rungs, with_own
    from redline.search.ranks import check_layout

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
    order = replace(order, data=data_of_run(order.data, options.resume))
    longer = {"steps": options.steps, "tokens": options.tokens, "minutes": options.minutes}
    if any(value is not None for value in longer.values()):
        order = replace(order, settings=replace(order.settings, budget=Budget(**longer)))
    recipe = load_recipe(options.recipe) if options.recipe else order.recipe
    if set(own_rungs(order.workload)) <= set(order.recipe.rungs):  # or what it trained so far is another model
        recipe = replace(recipe, rungs=with_own(recipe.rungs, order.workload))
    if options.micro_batch is not None:
        recipe = replace(recipe, micro_batch=options.micro_batch)
    check_needs(options, ranks, recipe, order.workload)
    kept = Beside(micro_batch=recipe.micro_batch, batch=order.settings.global_batch, option=None)
    layout = layout_of(options, ranks, order.workload, kept)
    check_resumed_shares(str(options.resume), recipe.micro_batch, order.settings.global_batch, layout)
    recipe = shared_recipe(recipe, options.parallel, layout)
    check_allowed(recipe, order.workload, order.device)
    if ranks > 1:
        check_parallel(recipe, order.workload, replace(from_json(Hardware, record["hardware"]), ranks=ranks), layout)
        check_layout(layout, recipe)
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


def end_of_schedule(order: TrainOrder) -> str | None:
    """What to say where the budget goes beyond the schedule, which keeps the end it was started with: to stretch it
    would change the updates that were made."""
    settings = order.settings
    end, budget = settings.schedule_steps, settings.budget
    per_update = settings.global_batch * order.workload.shape.sequence
    tokens = None if budget.tokens is None else -(-budget.tokens // per_update)
    wanted = min((steps for steps in (budget.steps, tokens) if steps is not None), default=None)
    if end is None or (wanted is not None and wanted <= end):
        return None
    return f"note: the {settings.schedule} schedule ends at step {end:,}: later updates keep its lowest rate"


def session_of(order: TrainOrder, options: argparse.Namespace, ranks: int = 1) -> Session:
    """A run that is resumed may be on another machine than run.json's: its MFU is a share of this one's peak."""
    from redline.commands.watchers import Session
    from redline.core.hardware import Hardware
    from redline.core.job import RunDirectory
    from redline.core.values import from_json
    from redline.search.launch import probe_machine

    if options.resume:
        hardware, versions = probe_machine(order.device)
        return Session(hardware=replace(hardware, ranks=ranks), versions=versions)
    record = RunDirectory(Path(order.out)).read_run()
    return Session(hardware=from_json(Hardware, record["hardware"]), versions=record["versions"])


def show_summary(summary: dict[str, Any], order: TrainOrder, options: argparse.Namespace) -> None:
    from redline.report.training import summary_lines

    document = summary_document(summary, order)
    if summary["reason"] is not None:
        print(f"training stopped: {summary['reason']}", file=sys.stderr)
    if options.json:
        print(json.dumps(document))
        return
    for line in summary_lines(document):
        print(line)


def summary_document(summary: dict[str, Any], order: TrainOrder) -> dict[str, Any]:
    from redline.core.values import to_json
    from redline.report.training import without_nan

    return {
        **without_nan(summary),
        "workload": order.workload.name,
        "unit": order.workload.unit,
        "rungs": list(order.recipe.rungs),
        "pipeline": pipeline_of(order),
        "layout": None if order.layout is None else to_json(order.layout),
        "parallel": order.parallel,
        "out": order.out,
    }


def show_lost_run(order: TrainOrder, options: argparse.Namespace) -> None:
    """Of a run whose end was told on the screen already: its page, and with --json the summary that it did not come to,
    of what its directory holds."""
    from redline.report.history import read_training
    from redline.report.training_page import write_training_page

    out = Path(order.out)
    found = read_training(out)
    page = write_training_page(out, found)
    if options.json:
        summary = {name: found[name] for name in TOLD} | {"page": None if page is None else str(page)}
        print(json.dumps(summary_document(summary, order)))


TOLD = (
    *("ended", "updates", "tokens", "documents", "seconds", "tokens_per_second", "mfu", "skipped", "loss", "epoch"),
    *("validation_loss", "best_validation_loss", "checkpoint", "peak_bytes", "reason"),
)
"""What a run's summary has of its history."""


def pipeline_of(order: TrainOrder) -> dict[str, Any] | None:
    """What filling and draining it costs; None where there is none."""
    from redline.core.layout import bubble

    if order.layout is None or order.layout.pipeline == 1:
        return None
    stages, micro_batches = order.layout.pipeline, order.micro_batches
    return {"stages": stages, "micro_batches": micro_batches, "bubble": bubble(stages, micro_batches)}
