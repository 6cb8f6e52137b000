"""The command line: finds the command, and turns mistakes into problem / why / fix and an exit code.

Nothing at the top of this file or of `redline/commands` imports torch, numpy or a page template: `--help` must answer
at once.
"""

from __future__ import annotations

import argparse
import errno
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
"""Environment variable that torchrun, or a launcher like it, sets for every rank."""
COMMANDS = {  # in the order of --help: NAME -> the file in redline/commands that defines add_NAME
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


FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without `arguments`, use the process's own and assume that the process
    exits afterwards."""
    own = arguments is None
    if own:
        sys.unraisablehook = repeat_interrupt
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks, not a traceback
    # Ranks record which signal asked them to stop.
    numbers = (signal.SIGTERM, signal.SIGINT) if RANK in os.environ else (signal.SIGTERM,)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        if not words:
            build_parser().print_help(sys.stderr)
            return EXIT_MISTAKE
        options = build_parser(words[:1]).parse_args(words, argparse.Namespace(words=words))
        if RANK in os.environ and words[0] != "train":
            from redline.commands.ranks import check_alone

            check_alone(words[0])
        code = int(options.run(options))
        sys.stdout.flush()  # here, where a BrokenPipeError is still handled
        return code
    except UserError as error:
        if debug:
            traceback.print_exc()
        if RANK in os.environ:
            from redline.commands.ranks import wait_for_rank_0

            if wait_for_rank_0():
                return EXIT_MISTAKE
        print(error.text(), end="", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, FailedRunError) else EXIT_MISTAKE
    except KeyboardInterrupt:
        if own:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # already exiting: ignore a second Ctrl-C
        if not follows_rank_0():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich then exits with 1, its output sent to /dev/null
            return EXIT_DONE
        raise
    except BrokenPipeError:  # `| head` has exited; nothing more can be written, not even at interpreter shutdown
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_DONE
    except OSError as error:
        if error.errno not in FULL or error.filename is not None or debug:  # standard output has no name
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        fix = "free some space, or send the output elsewhere; what is finished is kept"
        print(
            UserError("the output could not be written", os.strerror(error.errno), fix).text(), end="", file=sys.stderr
        )
        return EXIT_MISTAKE
    finally:
        # Interpreter shutdown takes a while with torch, and an exception during it would print an uncaught traceback.
        if own:
            before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def interrupt(number: int, _: object) -> NoReturn:
    """Treat a signal like Ctrl-C, so that a terminated run ends like an interrupted one: finished rows stay, workers
    are stopped."""
    mark_interrupted(signal.Signals(number).name)
    raise KeyboardInterrupt


def repeat_interrupt(lost: Any) -> None:
    """Repeat a Ctrl-C that arrived where Python cannot propagate exceptions (a callback, parts of torch's import): it
    would print a traceback and stop nothing. SIGINT is sent again a moment later, when it can be caught; a real signal
    also ends a wait."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors as problem, why, fix and exit code 2."""

    command = ""
    """The command that was given: argparse reports its unknown arguments through the top-level parser."""

    def error(self, message: str) -> NoReturn:
        words = f"{self.prog} {self.command}".strip()
        raise UserError(message, "the command line could not be understood", f"see `{words} --help`")


def build_parser(first_words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser with only the command that the first word names, so that no other command's file is imported;
    otherwise with all commands."""
    parser = Parser(prog="redline", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"redline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    asked = [word for word in first_words if word in COMMANDS]
    parser.command = " ".join(asked)
    for name in asked or COMMANDS:
        getattr(importlib.import_module(f"redline.commands.{COMMANDS[name]}"), f"add_{name}")(commands)
    return parser
