"""The command line: finds the command, turns mistakes into problem / why / fix and an exit code.

Nothing at the top of this file or of `redline/commands` imports torch, numpy or a page template: `--help` must answer
at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from redline import __version__
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE, FailedRunError, UserError
from redline.core.rank_processes import follows_rank_0, mark_interrupted

DESCRIPTION = "Finds out how fast a machine can train a GPT, gets it there, and proves that nothing broke on the way."
RANK = "RANK"
"""Of the environment: torchrun has it, or whoever starts ranks in its way."""
COMMANDS = {  # in the order of --help: the file in redline/commands, and its function add_NAME
    "ladder": "ladder",
    "tune": "tune",
    "train": "train",
    "sample": "trained",
    "export": "trained",
    "data": "data",
    "profile": "profile",
    "lint": "lint",
    "estimate": "estimate",
    "hardware": "hardware",
    "report": "report",
    "watch": "watch",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments`: None are the process's own, and then the process is ours to its end."""
    own = arguments is None
    if own:
        sys.unraisablehook = repeat_interrupt
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks, not a traceback
    # Ranks tell by which of them they were asked to stop.
    numbers = (signal.SIGTERM, signal.SIGINT) if RANK in os.environ else (signal.SIGTERM,)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        options = build_parser(words[:1]).parse_args(words, argparse.Namespace(words=words))
        if RANK in os.environ and words[0] != "train":
            from redline.commands.ranks import check_alone

            check_alone(words[0])
        code = int(options.run(options))
        sys.stdout.flush()  # here, where a reader that has left can be answered for
        return code
    except UserError as error:
        if debug:
            traceback.print_exc()
        if RANK in os.environ:
            from redline.commands.ranks import wait_for_rank_0

            if wait_for_rank_0():
                return EXIT_MISTAKE
        print(error.told(), end="", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, FailedRunError) else EXIT_MISTAKE
    except KeyboardInterrupt:
        if own:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # we are leaving: a second one has nothing to add
        if not follows_rank_0():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich leaves with 1 then, its output turned to nothing
            return EXIT_DONE
        raise
    except BrokenPipeError:  # `| head` has seen enough; nothing more can be written, not even by the interpreter's end
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_DONE
    finally:
        # An exception in the interpreter's own end, which takes torch a while, would be a traceback that nobody caught.
        if own:
            before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def interrupt(number: int, _: object) -> NoReturn:
    """A terminated run ends like an interrupted one: finished rows stay, workers go."""
    mark_interrupted(signal.Signals(number).name)
    raise KeyboardInterrupt


def repeat_interrupt(lost: Any) -> None:
    """Where Python cannot pass an exception on (a callback, half of torch's import), Ctrl-C would be a traceback on the
    screen, and nothing would stop: it comes once more, a moment later, where it can be caught. As a signal of its own,
    which ends a wait too."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ours: problem, why, fix, exit code 2."""

    command = ""
    """The one whose words argparse leaves to the parser of all commands when it does not know them."""

    def error(self, message: str) -> NoReturn:
        words = f"{self.prog} {self.command}".strip()
        raise UserError(message, "the command line could not be understood", f"see `{words} --help`")


def build_parser(first_words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """With the command that the first word names alone, so that no other one's file is read; else with all."""
    parser = Parser(prog="redline", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"redline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    asked = [word for word in first_words if word in COMMANDS]
    parser.command = " ".join(asked)
    for name in asked or COMMANDS:
        getattr(importlib.import_module(f"redline.commands.{COMMANDS[name]}"), f"add_{name}")(commands)
    return parser
