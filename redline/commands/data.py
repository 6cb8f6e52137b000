"""`redline data`: turn text into token shards, describe a prepared folder, and check it for damage."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import add_common, command_line
from redline.core.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from redline.data.prepare import Preparation
    from redline.data.sources import Reading

TOKENIZERS = ("gpt2", "bytes")
READING_OPTIONS = ("field", "split", "split_documents", "errors", "val_fraction")
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r"}


def add_data(commands: Any) -> None:
    data = commands.add_parser(
        "data",
        help="turn text into token shards for training, and check them",
        description="Turn text into token shards for `redline train`, and look at what was made.",
        epilog="Exit codes: 0 done; 1 a check found damage; 2 a mistake in the command or in the text.",
    )
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=type(data))
    add_prepare(actions)
    for name, run, text in (
        ("check", run_check, "read every byte of a prepared folder and say what is damaged"),
        ("info", run_info, "what a prepared folder holds"),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("folder", metavar="DIR", type=Path, help="the --out of `redline data prepare`")
        add_common(action)
        action.set_defaults(run=run)


def add_prepare(actions: Any) -> None:
    prepare = actions.add_parser(
        "prepare",
        help="turn text into token shards",
        description="Make token shards of text, in parallel. Interrupted, the same command continues where it stopped; "
        "the bytes do not depend on interruptions or on --processes.",
        epilog="A text file is one document unless --split-documents says otherwise; a line of JSON, a row of parquet "
        "or of a data set is one. Folders are read with everything below them, in sorted order. "
        "See docs/data.md.",
    )
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a text file, a folder, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, a data set saved with save_to_disk, "
        "or hf:NAME[:CONFIG] for one on the Hugging Face hub",
    )
    prepare.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the shards go")
    prepare.add_argument("--tokenizer", choices=TOKENIZERS, default=TOKENIZERS[0], help="default: gpt2, offline")
    add_reading(prepare)
    prepare.add_argument("--processes", metavar="N", type=int, help="default: one for each core")
    prepare.add_argument("--overwrite", action="store_true", help="replace the tokens that the folder holds")
    add_common(prepare)
    prepare.set_defaults(run=run_prepare)


def add_reading(parser: Any) -> None:
    """Add `READING_OPTIONS`, for every command that reads text. Options that are not given are None: the classes that
    do the reading have the defaults."""
    parser.add_argument("--field", metavar="NAME", help="where a record has its text (default: text)")
    parser.add_argument("--split", metavar="NAME", help="of a Hugging Face data set (default: train)")
    parser.add_argument(
        "--split-documents",
        metavar="SEP",
        help=r"what stands between the documents of a text file, such as '\n\n\n' (default: a file is one document)",
    )
    parser.add_argument(
        "--errors",
        choices=("strict", "replace"),
        help="invalid UTF-8: stop and say where, or replace it with U+FFFD (default: strict)",
    )
    parser.add_argument(
        "--val-fraction",
        metavar="F",
        type=float,
        help="share of the documents kept for validation (default: 0.005)",
    )


def reading_of(options: argparse.Namespace) -> Reading:
    from redline.data.sources import Reading

    separator = options.split_documents
    for spelling, meant in ESCAPES.items():  # a shell passes '\n' on as two characters
        separator = separator and separator.replace(spelling, meant)
    given = {"field": options.field, "separator": separator, "errors": options.errors, "split": options.split}
    return Reading(**{name: value for name, value in given.items() if value is not None})


def run_prepare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.core.values import to_json
    from redline.data.prepare import prepare
    from redline.report.data import PrepareView, print_data

    order = order_of(options)
    try:
        with PrepareView(Console(stderr=True)) as view:
            index = prepare(order, lambda progress: view.show(to_json(progress)))
    except KeyboardInterrupt:
        if (order.out / "prepare.json").exists():
            print("finished parts are kept: the same command goes on from there", file=sys.stderr)
        raise
    document = {"folder": str(order.out), **index}
    if options.json:
        print(json.dumps(document))
    else:
        print_data(document, Console())
    return EXIT_DONE


def order_of(options: argparse.Namespace) -> Preparation:
    from redline.data.prepare import Preparation

    share = {} if options.val_fraction is None else {"val_fraction": options.val_fraction}
    return Preparation(
        sources=tuple(options.sources),
        out=options.out.expanduser(),
        tokenizer=options.tokenizer,
        reading=reading_of(options),
        **share,
        processes=options.processes,
        overwrite=options.overwrite,
        command=command_line(),
    )


def run_info(options: argparse.Namespace) -> int:
    from redline.data.shards import open_dataset

    data = open_dataset(options.folder, say=lambda message: print(message, file=sys.stderr))
    document = {"folder": str(data.folder), **data.index, "fingerprint": data.fingerprint}
    if options.json:
        print(json.dumps(document))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.data import print_data

    print_data(document, Console())
    return EXIT_DONE


def run_check(options: argparse.Namespace) -> int:
    from redline.core.errors import UserError
    from redline.data.shards import check_dataset, write_stamps

    whole, problems = check_dataset(options.folder)
    notes = []
    try:
        write_stamps(options.folder, whole)  # a copy that was found whole need not be read again at every start
    except UserError as error:
        notes.append(f"not stamped, so every start reads it in full again: {error.why}")
    document = {
        "folder": str(options.folder),
        "ok": not problems,
        "shards": len(whole),
        "tokens": sum(shard.header.tokens for shard in whole),
        "bytes": sum(shard.stamp[0] for shard in whole),
        "problems": [dict(problem.lines()) for problem in problems],
        "notes": notes,
    }
    if options.json:
        print(json.dumps(document))
    else:
        from rich.console import Console

        from redline.report.data import print_check

        print_check(document, Console())
    return EXIT_FAILED if problems else EXIT_DONE
