"""Fixes for the errors that a user's file raises most often, found by the message of torch or Python.

    known_fix(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
        -> "3 features come in and the layer takes 4: make them equal"
    known_fix(KeyError("x"))  -> None: the user's own line says more than a guess would

Fixes that depend on the file are elsewhere (`user_code.import_fix`).
"""

from __future__ import annotations

import re

DEVICE_ASSERT = "device-side assert"
# Pattern of the message -> fix, which may use the pattern's groups.
FIXES: tuple[tuple[str, str], ...] = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        r"\1 features come in and the layer takes \2: make them equal",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "let the targets be 0 to the number of classes less one, or give the head more outputs",
    ),
    (
        r"expected scalar type Long|scalar types: Long, Int; but got",
        "let make_batch return ids and classes as int64: .long()",
    ),
    (
        r"all tensors to be on the same device|is not on the expected device",
        "make tensors where the input is: device=x.device, or register_buffer",
    ),
    (r"modified by an inplace operation", "make a new tensor where that one is changed: x = x + 1, not x += 1"),
    (DEVICE_ASSERT, "look for an index out of range: CUDA_LAUNCH_BLOCKING=1, or --device cpu, names the line"),
    (r"EOF when reading a line", "take the input() out: there is no terminal to answer it"),
    (r"maximum recursion depth", "end the endless recursion there"),
)


def known_fix(error: BaseException) -> str | None:
    """Return the fix for an error; None if nothing is known beyond its message and line."""
    if isinstance(error, SystemExit):
        return "remove the exit: what ends its own process cannot be measured"
    if type(error).__name__ == "BdbQuit":  # a debugger without a terminal
        return "take the breakpoint() out: there is no terminal to answer it"
    for pattern, fix in FIXES:
        if found := re.search(pattern, str(error)):
            return found.expand(fix)
    return None
