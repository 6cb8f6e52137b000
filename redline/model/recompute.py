"""Activation checkpointing, eager and compiled: `recomputed(block)(x)` keeps x only, and the backward pass runs the
block again for the rest.

Compiled, the compiler decides what is kept, by a mark on every operation of the block, and two things go wrong there.
Before torch 2.13 it marks none inside an `autograd.Function`, and keeps what those have saved: GPT-2 at 64 sequences
took 25.0 GiB with its blocks "recomputed", and 26.1 without. A policy that wants everything computed again marks them
all, in every version; 2.13 gives itself the same one. And what a block returns is kept only if it was computed, not if
it is a view: of a view the compiler computes again what it looks at too, through all blocks from the first, and all of
them are there at once. So what a block of somebody else's returns is copied, which a compiler does on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MARKS_ALL = TorchVersion("2.13")
# Torch warns, once, of operations in place under a policy. Compiled they are none by the time anything is marked.
WARNING = "Detected that context_fn is passed to torch.utils.checkpoint under torch.compile"
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: WARNING not in record.getMessage())


def recomputed(run: Callable[..., Any], *, ours: bool = False) -> Callable[..., Any]:
    """`ours`: draws no random numbers, which would have to be the same ones again, and returns no view."""

    def again(*inputs: Any, **named: Any) -> Any:
        is_compiled = torch.compiler.is_dynamo_compiling()

        def block(*inputs: Any) -> Any:  # checkpoint would take some names for its own
            found = run(*inputs, **named)
            return tree_map_only(torch.Tensor, torch.clone, found) if is_compiled and not ours else found

        policy: dict[str, Any] = {"context_fn": recompute_all} if is_compiled else {}
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=not ours, **policy)

    return again


def recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def keep_policies_in_ddp() -> None:
    """Before 2.13 the compiler forgets a block's policy when it cuts a graph into DDP's buckets. Uncut, all gradients
    are there at once, and nothing hides their reduction."""
    if TorchVersion(torch.__version__) < MARKS_ALL:
        import torch._dynamo.config as dynamo  # which takes a second

        dynamo.optimize_ddp = False
