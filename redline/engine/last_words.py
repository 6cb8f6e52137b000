"""Reports an error when C++ code aborts the process, which no `except` of Python catches.

    with last_words(lambda: FailedRunError(problem, why, fix)):
        trainer.run()

torch uses CUDA events to free memory that another stream may still be reading. Once a GPU is lost (a device-side
assert, an illegal address), every event call fails, here inside a destructor, so C++ calls abort(). That may happen
before Python has seen the failure at all, or while Python is closing what it has open because of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redline.core.errors import EXIT_FAILED, UserError

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[object] = []
"""References to the callbacks: C keeps only their addresses."""


@contextmanager
def last_words(words: Callable[[], UserError]) -> Iterator[None]:
    """Print `words()` and exit if the block aborts. If the block raises, the caller reports that, and a later abort()
    exits without a message."""
    raised = False

    def leave(_: int) -> None:
        # abort() is called by the failing thread from ordinary code, so Python can run here as in any other callback.
        try:
            if not raised:
                sys.stderr.write(words().text())
                sys.stderr.flush()
        finally:
            os._exit(EXIT_FAILED)

    on_signal = ctypes.CDLL(None).signal
    on_signal.restype, on_signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    callback = _CALLBACK(leave)
    _installed.append(callback)
    before = on_signal(signal.SIGABRT, ctypes.cast(callback, ctypes.c_void_p))
    try:
        yield
    except BaseException:
        raised = True
        raise
    on_signal(signal.SIGABRT, before)
