"""The generators of Python and NumPy that every module of a process shares, from which a user's code may draw.

    with seeded(1337):
        model = factory()    # np.random.randn and random.gauss give what they gave in any other process

torch's own is seeded beside it by whoever has torch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUMPY_SEEDS = 2**32  # those that its global generator takes


def numpy_random() -> Any:
    """None where nobody has imported NumPy, which torch does."""
    return getattr(sys.modules.get("numpy"), "random", None)


def seed_hosts(seed: int) -> None:
    random.seed(seed)
    if (of_numpy := numpy_random()) is not None:
        of_numpy.seed(seed % NUMPY_SEEDS)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Afterwards they stand where they stood: whoever draws next must not notice."""
    of_python, of_numpy = random.getstate(), numpy_random()
    state = None if of_numpy is None else of_numpy.get_state(legacy=False)
    seed_hosts(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            of_numpy.set_state(state)
