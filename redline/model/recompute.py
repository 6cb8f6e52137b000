"""Activation checkpointing, eager and compiled: `recomputed(block)(x)` keeps x only, and the backward pass runs the
block again for the rest.

Compiled, the compiler decides what is kept, by a mark on every operation of the block. Before torch 2.13 it marks none
inside an `autograd.Function`, and keeps what those have saved: GPT-2 at 64 sequences took 25.0 GiB with its blocks
"recomputed", and 26.1 without. A policy that wants everything computed again marks them all, in every version; 2.13
gives itself the same one. What a block returns has to be computed by it, not a view: the compiler does not keep views,
and what they look at it would compute again too, through all blocks from the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Torch warns, once, of operations in place under a policy. Compiled they are none by the time anything is marked.
WARNING = "Detected that context_fn is passed to torch.utils.checkpoint under torch.compile"
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: WARNING not in record.getMessage())


def recomputed(run: Callable[..., Any], *, draws: bool = True) -> Callable[..., Any]:
    """`draws`: random numbers, which have to be the same ones again."""

    def again(*inputs: Any, **named: Any) -> Any:
        policy: dict[str, Any] = {"context_fn": recompute_all} if torch.compiler.is_dynamo_compiling() else {}
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=draws, **policy, **named)

    return again


def recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
