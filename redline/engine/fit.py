"""Makes a reference fit wherever the optimised recipe does: the batch is cut into halves, quarters, ... as needed.

    curve = in_pieces_that_fit(lambda chunk: train(chunk), chunk=16, device=device)

Memory must not decide whether a fast recipe at a large micro batch can be checked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from redline.engine.memory import is_out_of_memory

Answer = TypeVar("Answer")


def in_pieces_that_fit(attempt: Callable[[int | None], Answer], *, chunk: int | None, device: torch.device) -> Answer:
    """Return `attempt(chunk)` for the first of chunk, chunk / 2, ..., 1 sequences that fits. If a single sequence does
    not fit, its out-of-memory error is raised, as is any other error at once. None: the batch must not be cut."""
    if chunk is None:
        return attempt(None)
    while (found := _try(attempt, chunk)) is None:
        chunk = -(-chunk // 2)
        free_memory(device)
    return found[0]


def _try(attempt: Callable[[int | None], Answer], chunk: int) -> tuple[Answer] | None:
    """Return None if it does not fit. A separate function, so that a failed attempt's tensors die with its frames."""
    try:
        return (attempt(chunk),)
    except (RuntimeError, MemoryError) as error:
        if chunk == 1 or not is_out_of_memory(error):
            raise
        return None


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
