"""`redline train` pretrains with a recipe: its options, and what it shows. `train_order.py` turns the options into an
order; `trained.py` has the commands that use a trained model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import WORKLOAD_HELP, add_common, add_sequence, only_our_words_on_stdout
from redline.commands.train_order import make_order
from redline.commands.training_data import add_data_options
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, FailedRunError, UserError

if TYPE_CHECKING:
    from redline.commands.watchers import Session
    from redline.engine.distributed import Ranks
    from redline.engine.session import TrainOrder

DEFAULT_OUT = "runs/train-WORKLOAD-DATE-TIME"


def add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="pretrain a GPT with a recipe, from text to checkpoint",
        description="Pretrain a GPT with the step the ladder measured, from text to checkpoint.",
        epilog="Ctrl-C saves a checkpoint and exits; a second one exits at once. Exit codes: 0 the budget is used "
        "up; 1 training failed; 2 a mistake in the command; 130 interrupted (continue with --resume).",
    )
    train.add_argument("workload", nargs="?", metavar="WORKLOAD", help=WORKLOAD_HELP)
    train.add_argument("--recipe", metavar="FILE", type=Path, help="best.json of a ladder (default: what applies here)")
    train.add_argument(
        "--optimizer",
        metavar="NAME",
        help="use this optimizer instead of the recipe's, such as muon (short for its rung)",
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
    train.add_argument(
        "--batch-tokens", metavar="N", type=int, help="the global batch in tokens, instead of --global-batch"
    )
    train.add_argument("--learning-rate", metavar="R", type=float, help="peak learning rate (default: the optimizer's)")
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
    train.add_argument(
        "--cycle", metavar="N", type=int, help="updates between two reads of the device's results (default: 10)"
    )
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
        help="seconds after which a rank that stands still ends the run (default: 600)",
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
    from redline.core.host import thread_environment
    from redline.engine.trackers import check_tracker

    os.environ.update(thread_environment())  # torch is imported after this, here and in every rank
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
    """True if the run directory has data made from the user's text, which may have taken hours. The sample text's data
    is quickly made again."""
    return options.data is not None and Path(order.data).is_relative_to(Path(order.out).resolve())


def train_session(order: TrainOrder, emit: Any, ranks: Ranks | None = None) -> dict[str, Any]:
    from redline.engine.session import train

    return train(order, emit, ranks)


# --- from words to an order -------------------------------------------------------------------------------------------


def session_of(order: TrainOrder, options: argparse.Namespace, ranks: int = 1) -> Session:
    """Return the machine and versions of this session. A resumed run may be on another machine than run.json's, and its
    MFU is a share of this one's peak."""
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
    """Write the page of a run whose end was already reported and, with --json, print the summary that the run did not
    reach, from what its directory holds."""
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
"""Fields that a run's summary takes from its history."""


def pipeline_of(order: TrainOrder) -> dict[str, Any] | None:
    """Return what filling and draining the pipeline costs; None without a pipeline."""
    from redline.core.layout import bubble

    if order.layout is None or order.layout.pipeline == 1:
        return None
    stages, micro_batches = order.layout.pipeline, order.micro_batches
    return {"stages": stages, "micro_batches": micro_batches, "bubble": bubble(stages, micro_batches)}
