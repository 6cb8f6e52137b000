"""What to say where C++ ends the process, which no `except` of Python sees.

    with last_words(lambda: FailedRunError(problem, why, fix)):
        trainer.run()

torch gives memory back that a stream may still read through an event. Once a GPU is lost (a device-side assert, an
illegal address) every event fails, here inside a destructor: C++ calls abort(), maybe before Python has been told of
the failure at all, or while it closes what it has open because of it.
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
"""C keeps only the address of a callback."""


@contextmanager
def last_words(words: Callable[[], UserError]) -> Iterator[None]:
    """A block that raises leaves the words to whoever catches it; an abort() behind it then says nothing more."""
    raised = False

    def leave(_: int) -> None:
        # abort() is called by the thread that failed, from ordinary code: Python runs here as in any other callback.
        try:
            if not raised:
                sys.stderr.write(words().told())
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
