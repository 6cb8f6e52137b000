"""What every command shares: exit codes and the options that mean the same everywhere."""

from __future__ import annotations

import argparse
import shlex
import sys

EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_INTERRUPTED = 0, 1, 2, 130


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on standard output, everything else on standard error",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")


def command_line() -> str:
    """As the user typed it, to be run again."""
    return shlex.join(["redline", *sys.argv[1:]])
