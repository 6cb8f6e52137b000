"""What all commands share: common options and limits on sizes, pages, and a standard output that holds only results."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from redline.core.errors import UserError
    from redline.core.recipe import Recipe
    from redline.core.workload import Workload

# Far above what anyone trains with: a larger value is a typing mistake.
MOST = {"micro_batch": 2**20, "sequence": 2**24, "global_batch": 2**30, "gpus": 2**20, "nodes": 2**20, "dp": 2**20}
MOST |= {"tp": 1024, "tensor": 1024, "pipeline": 4096, "replicas": 2**20}


WORKLOAD_HELP = (
    "tiny, gpt2, gpt2-medium, gpt2-large or gpt2-xl; a Hugging Face config.json, model folder or a name in its local "
    "cache; a shape file; FILE.py:FACTORY (default: gpt2 on a CUDA device, tiny elsewhere)"
)


def add_sequence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sequence",
        metavar="N",
        type=int,
        help="tokens per sequence (default: the preset's; of a config its context, 1024 at most)",
    )


class NoStages(argparse.Action):
    """Refuses --pipeline in a command that measures, and names the commands that have it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from redline.core.errors import UserError
        from redline.search.ranks import NO_STAGES

        raise UserError(
            f"`{parser.prog}` has no option --pipeline",
            f"{NO_STAGES}: they are trained, and not measured",
            "leave it out: `redline train` has --pipeline N, and `redline estimate` predicts it",
        )


def add_subject(parser: argparse.ArgumentParser, gpus: str) -> None:
    """Add the options for what is measured and where, the same for ladder, tune and profile. `gpus` is the help text of
    --gpus: what N of them do."""
    add_sequence(parser)
    parser.add_argument(
        "--data", metavar="FILE", help="a UTF-8 text file to train on (default: the prose that ships with Python)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees one")
    parser.add_argument("--gpus", metavar="N", type=int, help=f"{gpus} (docs/distributed.md)")
    add_degrees(parser)


def add_degrees(parser: argparse.ArgumentParser) -> None:
    """Add the options for how the ranks of --gpus share a step. `redline train` also has --pipeline, which is refused
    here with a reason."""
    parser.add_argument("--pipeline", nargs="?", action=NoStages, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--tensor", metavar="N", type=int, help="ranks that hold each layer together (default: 1)")
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        help="with fsdp: copies of the model, each cut among its ranks (default: 1)",
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on standard output, everything else on standard error",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")


def check_sizes(options: argparse.Namespace, names: Iterable[str]) -> None:
    """Refuse counts below 1 or above `MOST`; an option that was not given passes."""
    from redline.core.errors import UserError
    from redline.core.workload import check_positive

    for name in names:
        value, option = getattr(options, name), "--" + name.replace("_", "-")
        if value is None:
            continue
        check_positive(option, value)
        if value > MOST[name]:
            raise UserError(
                f"{option} is {value:,}",
                f"more than any real run needs (the most is {MOST[name]:,})",
                f"check {option}",
            )


def try_page(
    document: dict[str, Any], directory: Path, render: Callable[[dict[str, Any]], str]
) -> tuple[Path | None, UserError | None]:
    """Write the page of a run into its directory. Return its path or the error, as results are shown either way."""
    from redline.core.errors import UserError
    from redline.core.job import REPORT_FILE, RunDirectory

    try:
        return RunDirectory(directory).write(REPORT_FILE, render({**document, "directory": str(directory)})), None
    except OSError as error:
        return None, UserError(
            f"cannot write {directory / REPORT_FILE}",
            error.strerror or str(error),
            "copy the run directory to a place you may write to and use `redline report` there",
        )


def leave_page(document: dict[str, Any], directory: Path, render: Callable[[dict[str, Any]], str]) -> None:
    """Write the page for a call from Python, which returns its document either way; a page that fails is a warning."""
    _, trouble = try_page(document, directory, render)
    if trouble is not None:
        warn_of(trouble)


def check_html(path: Path, example: str) -> None:
    """Refuse an --html path that is a folder, or in a folder that does not exist, before anything is measured."""
    from redline.core.errors import UserError

    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise UserError(f"cannot write {path}", why, f"name a FILE in a folder that is there, such as {example}")


def write_html(path: Path, page: str) -> None:
    from redline.core.errors import explained
    from redline.core.job import write_atomically

    with explained(f"cannot write {path}", "choose a FILE you may write to"):
        write_atomically(path, page)
    print(f"page {path}", file=sys.stderr)


def warn_of(trouble: UserError) -> None:
    print(f"warning: {trouble.problem}: {trouble.why}; {trouble.fix}", file=sys.stderr)


def options_of(add_command: Callable[[Any], None], name: str, given: dict[str, Any]) -> argparse.Namespace:
    """Return a command's options for a call from Python: its defaults, with the values in `given` that are not None."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    options = parser.parse_args([name])
    vars(options).update({key: value for key, value in given.items() if value is not None})
    return options


def as_published(recipe: Recipe, workload: Workload, on_note: Callable[[str], object]) -> Recipe:
    """Return the recipe with the rungs that make the model what its config describes, and `tell` which were missing."""
    from redline.rungs import with_own

    rungs = with_own(recipe.rungs, workload)
    if added := [name for name in rungs if name not in recipe.rungs]:
        on_note(f"{', '.join(added)} added to the recipe: without it, {workload.name} would be a different model")
    return replace(recipe, rungs=rungs)


@contextmanager
def only_our_words_on_stdout() -> Iterator[None]:
    """Send to standard error whatever the user's code, a library or a loader's process prints, so that with --json
    standard output holds one document and nothing else."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed, or never open
        with redirect_stdout(sys.stderr):
            yield
        return
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def command_line() -> str:
    """Return the command as the user typed it, quoted so that it can be run again."""
    from redline.core.rank_processes import typed_arguments

    return shlex.join(["redline", *typed_arguments()])
