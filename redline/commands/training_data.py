"""The data that `redline train` learns from: a prepared folder, a text that is prepared first, or one that is streamed.

check_data(options, workload)                                   # before anything is written
folder = training_data(options, workload, settings, out, console)   # for engine/session.py to open
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import command_line
from redline.commands.data import READING_OPTIONS, add_reading, reading_of
from redline.core.errors import UserError

if TYPE_CHECKING:
    from redline.core.training import TrainSettings
    from redline.core.workload import Workload

TEXT_OPTIONS = ("stream", *READING_OPTIONS)
SAMPLE_NAME, SAMPLE_VAL_FRACTION = "the prose that ships with Python", 0.05  # of a few hundred documents


def add_data_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data",
        metavar="PATH",
        help="a folder made by `redline data prepare`, or any SOURCE that takes: text, a folder of it, .jsonl, "
        ".parquet, hf:NAME (default: the prose that ships with Python)",
    )
    group = train.add_argument_group("text that is not prepared")
    group.add_argument(
        "--stream",
        action="store_true",
        default=None,
        help="tokenise it while training, instead of preparing it first (docs/data.md compares)",
    )
    add_reading(group)


def check_data(options: argparse.Namespace, workload: Workload) -> None:
    """Find the mistakes that show at once. Every byte is read later, with a progress bar."""
    from redline.data.shards import open_dataset
    from redline.data.sources import find_sources

    if not workload.reads_text:
        check_made(options, workload)
        return
    reading_of(options)  # raises on mistakes in its options
    if options.data is None:
        return
    if not is_prepared(options.data):
        find_sources([options.data])
        return
    given = [f"--{name.replace('_', '-')}" for name in TEXT_OPTIONS if getattr(options, name) is not None]
    if given:
        raise UserError(
            f"{', '.join(given)} has no use here" if len(given) == 1 else f"{', '.join(given)} have no use here",
            f"{options.data} was prepared already: it holds tokens",
            "leave it out, or name the text itself with --data",
        )
    folder, shape = Path(options.data).expanduser(), workload.decoder
    open_dataset(folder, vocab=shape.vocab, tokenizer_name=workload.tokenizer, verify=False)


def check_made(options: argparse.Namespace, workload: Workload) -> None:
    """Refuse text options for a Python file, which makes its own batches."""
    names = ("data", "sample_every", "init", *TEXT_OPTIONS)
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name, None) is not None]
    if given:
        raise UserError(
            f"{given[0]} with {workload.words or workload.name}",
            "its make_batch makes the batches: there is no text, no tokenizer and no published weights",
            f"leave {given[0]} out",
        )


def training_data(
    options: argparse.Namespace, workload: Workload, settings: TrainSettings, out: Path, console: Any
) -> Path:
    """Return the folder to train from: a prepared one as it is, or the one made from a text in the run directory."""
    if options.data is not None and is_prepared(options.data):
        return Path(options.data).expanduser().resolve()
    make = streamed if options.stream else prepared
    folder, notes = make(options, workload, settings, out, console)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    return folder.resolve()


def is_prepared(words: str) -> bool:
    """True also for a folder whose preparation has only begun: opening it reports that it is not finished."""
    from redline.data.shards import INDEX_FILE, PREPARE_FILE

    return any((Path(words).expanduser() / name).is_file() for name in (INDEX_FILE, PREPARE_FILE))


def prepared(
    options: argparse.Namespace, workload: Workload, settings: TrainSettings, out: Path, console: Any
) -> tuple[Path, list[str]]:
    from redline.core.values import to_json
    from redline.data.prepare import Preparation, prepare
    from redline.report.data import PrepareView

    say(console, f"preparing {options.data or SAMPLE_NAME} in {out / 'data'} (--stream trains without)")
    order = Preparation(**what_to_read(options, workload, out), out=out / "data", command=command_line())
    with PrepareView(console) as view:
        index = prepare(order, lambda progress: view.show(to_json(progress)))
    return order.out, index["notes"]


def streamed(
    options: argparse.Namespace, workload: Workload, settings: TrainSettings, out: Path, console: Any
) -> tuple[Path, list[str]]:
    from redline.core.values import to_json
    from redline.data.survey import Survey, survey
    from redline.report.data import PrepareView

    say(console, f"reading {options.data or SAMPLE_NAME} through once, to find what is broken and what is held out")
    order = Survey(
        **what_to_read(options, workload, out),
        out=out / "text",
        val_tokens=settings.eval_batches * settings.eval_batch * workload.shape.sequence + 1,
        command=command_line(),
    )
    with PrepareView(console, what="reading") as view:
        index = survey(order, lambda progress: view.show({**to_json(progress), "tokens": None}))
    return order.out, index["notes"]


def what_to_read(options: argparse.Namespace, workload: Workload, out: Path) -> dict[str, Any]:
    words, share = options.data, options.val_fraction
    if words is None:
        words, share = write_sample(out), SAMPLE_VAL_FRACTION if share is None else share
    order = {"sources": (words,), "tokenizer": workload.tokenizer, "reading": reading_of(options)}
    return order if share is None else {**order, "val_fraction": share}


def write_sample(out: Path) -> str:
    from redline.data.text import sample_documents

    path = out / "sample.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sample_documents()), encoding="utf-8")
    return str(path)


def say(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False, style="dim", soft_wrap=True)


def data_of_run(data: str, run: Path) -> str:
    """Return where a resumed run has its data: if the run directory was moved, data inside it moved along."""
    inside = run / Path(data).name
    return str(inside.resolve()) if not Path(data).exists() and inside.is_dir() else data
