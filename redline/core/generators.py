"""The random generators shared by all code of a process: Python's, NumPy's, and torch's CPU generator.

    with seeded(1337):
        model = factory()    # random.gauss, np.random.randn and torch.randn draw the same numbers in every process

NumPy's and torch's are seeded only if those packages are imported already; a device's generators are left alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUMPY_SEEDS = 2**32  # seeds that its global generator accepts


def seed_generators(seed: int) -> None:
    random.seed(seed)
    if (of_numpy := _of_numpy()) is not None:
        of_numpy.seed(seed % NUMPY_SEEDS)
    if (of_torch := _of_torch()) is not None:
        of_torch.manual_seed(seed)  # torch.manual_seed would seed the device's too


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators for the block and restore their states afterwards, so that later draws are unaffected."""
    of_python, of_numpy, of_torch = random.getstate(), _of_numpy(), _of_torch()
    numpy_state = None if of_numpy is None else of_numpy.get_state(legacy=False)
    torch_state = None if of_torch is None else of_torch.get_state()
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            of_numpy.set_state(numpy_state)
        if of_torch is not None:
            of_torch.set_state(torch_state)


def _of_numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _of_torch() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)
