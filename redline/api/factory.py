"""Turns what is given as a workload into words: a name stays as it is, a function becomes its file and name.

    typed_workload("gpt2") -> "gpt2";  typed_workload(build_model) -> "/home/me/model.py:build_model"

Ladder and tune build the model in processes of their own, one per measurement, which need to know where its code is. No
other process can find a live module, a lambda, or a function that exists only in a notebook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

from redline.core.errors import UserError
from redline.core.user_code import described

if TYPE_CHECKING:
    from torch import nn

TAKE_MODULES = ("redline.lint", "redline.estimate")
EXAMPLE = "write `def build(): return MyModel()` at the top level of a file, import it and pass build"


def typed_workload(workload: str | Callable[..., Any] | None, command: str) -> str | None:
    """Return the workload as typed on a command line. `command` is the function that was called, for its messages."""
    if workload is None or isinstance(workload, str):
        return workload
    if is_module(workload):
        raise UserError(
            f"{command} was given a module and not a function that builds one",
            "each measurement builds the model anew, in a process of its own",
            EXAMPLE,
        )
    if not isinstance(workload, FunctionType):
        live = command in TAKE_MODULES
        raise UserError(
            f"{command} was given {described(workload)}",
            f"it takes {'a module, ' if live else ''}a workload's name, a file, or a function of a file that builds a "
            "module",
            f"pass the model itself: {command}(model)" if live else EXAMPLE,
        )
    return _file_and_name(workload)


def _file_and_name(function: FunctionType) -> str:
    name, file = function.__name__, Path(function.__code__.co_filename)
    if name == "<lambda>":
        raise _unreachable("a lambda", "it has no name by which another process could find it")
    if function.__qualname__ != name:
        raise _unreachable(f"{name}, a function inside another", "another process cannot reach it by its name")
    if file.suffix != ".py" or not file.is_file():
        raise _unreachable(f"{name}, which is in no file", f"it was defined in {file}, which no other process can read")
    own = getattr(sys.modules.get(function.__module__), name, function)
    if own is not function:
        raise _unreachable(f"{name}, which its file calls something else", f"there {name} is {own!r:.60}")
    return f"{file.resolve()}:{name}"


def _unreachable(what: str, why: str) -> UserError:
    return UserError(f"the model is built by {what}", why, EXAMPLE)


def is_module(value: object) -> TypeGuard[nn.Module]:
    """True for a torch module. torch is not imported: whoever has a module has imported it already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
