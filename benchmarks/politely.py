"""How a benchmark starts and ends: a time limit keeps its rows, and a mistake is reported as redline does.

def main(words=None):
    return politely(run, read_options(words))
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from redline.core.errors import UserError


def politely(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it as Ctrl-C does: rows are kept
    try:
        return run(options)
    except UserError as error:
        for label, text in error.lines():
            print(f"{label + ':':9}{text}", file=sys.stderr)
        return 2
