"""Checks the arguments of a call from Python by name before anything else happens, and words mistakes as Python does.

    @checked(device=PLACE)                      # an argument that means something else here than in ARGUMENTS
    def prepare(model, recipe, *, device=None): ...

    joined(["bf16", "flash"])  ->  "bf16,flash"  # as on a command line

A command line passes numbers where an option wants numbers; a caller may pass anything. Which values are allowed is
left to the commands' own checks, whose words (`--micro-batch is 0`) become those of a call (`micro_batch is 0`).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from redline.core.errors import UserError

Given = ParamSpec("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Kind:
    what: str
    fits: Callable[[Any], bool]
    example: str


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value))


def _is_of_torch(value: object) -> bool:
    return any(kind.__module__.split(".")[0] == "torch" for kind in type(value).__mro__)


COUNT = Kind("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool), "8")
NUMBER = Kind("a number", _is_number, "0.5")
DECAY = Kind("a number, 0 or more", lambda value: _is_number(value) and 0 <= value < math.inf, "0.1")
NORM = Kind("a number above 0, or None for none", lambda value: _is_number(value) and 0 < value < math.inf, "1.0")
TEXT = Kind("text", lambda value: isinstance(value, str), "'...'")
PATH = Kind("a path", lambda value: isinstance(value, (str, Path)), "'runs/mine'")
FLAG = Kind("True or False", lambda value: isinstance(value, bool), "True")
FLAG_OR_TEXT = Kind("True, False or text", lambda value: isinstance(value, (bool, str)), "True")
NAMES = Kind("names, in a list or with commas between them", _is_names, "['bf16', 'flash'] or 'bf16,flash'")
FUNCTION = Kind("a function", callable, "lambda model, batch: ...")
SEVERAL = Kind("something to loop over", lambda value: isinstance(value, Iterable), "a DataLoader")
PLACE = Kind("text, or a torch.device", lambda value: isinstance(value, str) or _is_of_torch(value), "'cuda'")
OF_TORCH = Kind("an object of torch's", _is_of_torch, "the one that your loop has")
ANYTHING = Kind("anything", lambda value: True, "")

# An argument means the same in every function, unless the function overrides it. One that is missing here is checked by
# the code that uses it: a workload, a batch, the recipe of `prepare`.
ARGUMENTS: dict[str, Kind] = {
    **dict.fromkeys(("rungs", "also", "without", "ignore"), NAMES),
    **dict.fromkeys(("micro_batch", "sequence", "gpus", "repeats", "steps", "check_steps", "global_batch"), COUNT),
    **dict.fromkeys(("compile_ahead", "nodes", "dp", "tp", "zero", "tokens_per_step"), COUNT),
    **dict.fromkeys(("tensor", "pipeline", "replicas"), COUNT),
    **dict.fromkeys(("headroom", "timeout", "minutes", "seconds"), NUMBER),
    "flops_per_step": NUMBER,
    "weight_decay": DECAY,
    "clip_norm": NORM,
    **dict.fromkeys(("device", "keep", "allow", "gpu", "optimizer", "interconnect", "dtype", "name"), TEXT),
    **dict.fromkeys(("memory_limit", "parallel"), TEXT),
    **dict.fromkeys(("start", "recipe", "out", "after", "fix", "data"), PATH),
    **dict.fromkeys(("aa", "rebatch", "fresh", "overwrite", "measure"), FLAG),
    "inference": FLAG_OR_TEXT,
    "loss": FUNCTION,
    "batches": SEVERAL,
}
# Options whose argument has another name.
SPELLINGS = {"from": ("start", "recipe")}


def checked(**own: Kind) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Decorate a public function: check its arguments, and word its mistakes and notes for Python. `own` has the
    arguments that are of another kind there."""

    def around(function: Callable[Given, Found]) -> Callable[Given, Found]:
        signature = inspect.signature(function)
        kinds = {name: own.get(name, ARGUMENTS.get(name, ANYTHING)) for name in signature.parameters}

        @functools.wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                check(name, value, kinds[name])
            try:
                found = function(*args, **kwargs)
            except UserError as error:
                words = [in_python(text, kinds) for text in (error.problem, error.why, error.fix)]
                error.__init__(*words)  # type: ignore[misc]  # the same error, with its cause and its traceback
                raise
            if isinstance(found, dict) and found.get("notes"):
                found["notes"] = [in_python(note, kinds) for note in found["notes"]]
            return found

        return called

    return around


def check(name: str, value: object, kind: Kind) -> None:
    if value is not None and not kind.fits(value):
        raise UserError(f"{name} is {value!r:.60}", f"it is {kind.what}", f"write it as {name}={kind.example}")


def joined(names: str | Iterable[str] | None) -> str | None:
    """Join names with commas; an empty list becomes 'none'."""
    return names if names is None or isinstance(names, str) else ",".join(names) or "none"


def in_python(text: str, arguments: Iterable[str]) -> str:
    """Replace options by the names of the call's arguments, except inside backticks, where commands are to be typed."""
    known = set(arguments)

    def argument(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return next((each for each in SPELLINGS.get(name, (name,)) if each in known), match[0])

    parts = text.split("`")
    return "`".join(
        part if quoted % 2 else re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", argument, part)
        for quoted, part in enumerate(parts)
    )
