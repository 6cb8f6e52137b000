"""A layout of several GPUs that does not fit them: which ranks lack how much memory, and what fits instead.

    instead = what_fits(search)                                      # Instead(step=..., command=None), or None
    shortage_json(step, memory_bytes, instead, gpus_per_node=8) -> {"ranks": [0, 7], "needed_bytes": ..., ...}

A layout that does not fit has no rate: callers that show its step must say "if it fitted" when there is a shortage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from redline.predict.layouts import ParallelStep, Search, best_that_fits, row_json


@dataclass(frozen=True, kw_only=True)
class Instead:
    """Another layout of the same GPUs, with the same global batch."""

    step: ParallelStep
    command: str | None = None
    """What to type to train in that layout; None if no command does."""


def what_fits(search: Search) -> Instead | None:
    """Return a layout that fits with the micro batch that was named, or else with any; None if nothing fits."""
    for size in dict.fromkeys((search.micro_batch, None)):
        step = best_that_fits(replace(search, micro_batch=size))
        if step is not None:
            return Instead(step=step)
    return None


def ranks_that_hold_most(step: ParallelStep) -> tuple[int, int]:
    """Return the first and last of these ranks. Ranks count TP fastest, then DP, then PP: a stage is a run of
    neighbours."""
    layout = step.layout
    each = layout.gpus // layout.pp
    start = layout.gpus - each if step.memory.stage == "last" else 0
    return start, start + each - 1


def shortage_json(
    step: ParallelStep, memory_bytes: int | None, instead: Instead | None, gpus_per_node: int
) -> dict[str, Any] | None:
    """Return `parallel.shortage` of `estimate --json`; None if the layout fits, or if no device is known."""
    if memory_bytes is None or step.memory.total <= memory_bytes:
        return None
    return {
        "ranks": list(ranks_that_hold_most(step)),
        "stage": step.memory.stage,
        "needed_bytes": step.memory.total,
        "memory_bytes": memory_bytes,
        "instead": None if instead is None else {**row_json(instead.step, gpus_per_node), "command": instead.command},
    }
