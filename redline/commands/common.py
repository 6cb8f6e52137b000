"""What every command shares: exit codes, the options that mean the same everywhere, and the limits of sizes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any

EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_INTERRUPTED = 0, 1, 2, 130
# Beyond what anyone trains with, by far: a slip of the keyboard.
MOST = {"micro_batch": 2**20, "sequence": 2**24, "gpus": 2**20, "tp": 1024, "pp": 4096, "global_batch": 2**30}


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on standard output, everything else on standard error",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")


def check_sizes(options: argparse.Namespace, names: Iterable[str]) -> None:
    """Options of these names count things: from 1, and not beyond MOST."""
    from redline.core.errors import UserError
    from redline.core.workload import check_positive

    for name in names:
        value, option = getattr(options, name), "--" + name.replace("_", "-")
        if value is None:
            continue
        check_positive(option, value)
        if value > MOST[name]:
            raise UserError(
                f"{option} is {value:,}", f"nobody trains with it (the most is {MOST[name]:,})", f"check {option}"
            )


def options_of(add_command: Callable[[Any], None], name: str, given: dict[str, Any]) -> argparse.Namespace:
    """A command's options for a call from Python: its own defaults, and what was given."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    options = parser.parse_args([name])
    vars(options).update({key: value for key, value in given.items() if value is not None})
    return options


def command_line() -> str:
    """As the user typed it, to be run again."""
    return shlex.join(["redline", *sys.argv[1:]])
