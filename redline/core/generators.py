"""The random generators that all code of a process shares: Python's, NumPy's, and torch's of the host.

    with seeded(1337):
        model = factory()    # random.gauss, np.random.randn and torch.randn give what they give in any other process

Of NumPy and torch only where somebody has imported them; a device's own generators are left to whoever uses it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUMPY_SEEDS = 2**32  # those that its global generator takes


def seed_generators(seed: int) -> None:
    random.seed(seed)
    if (of_numpy := _of_numpy()) is not None:
        of_numpy.seed(seed % NUMPY_SEEDS)
    if (of_torch := _of_torch()) is not None:
        of_torch.manual_seed(seed)  # torch.manual_seed would reach the device's too


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Afterwards they stand where they stood: whoever draws next must not notice."""
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
