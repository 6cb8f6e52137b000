"""Activation checkpointing, eager and compiled: `recomputed(block)(x)` keeps only x, and the backward pass runs the
block again for the rest.

In compiled code the compiler decides what is kept, by a mark on every operation of the block, and two things go wrong.
Before torch 2.13 it marks nothing inside an `autograd.Function` and keeps what such functions saved: GPT-2 at 64
sequences took 25.0 GiB with its blocks "recomputed", and 26.1 GiB without. A policy that prefers to recompute
everything marks all operations, in every version; 2.13 sets the same policy itself. And what a block returns is kept
only if it was computed, not if it is a view: for a view the compiler also recomputes its base, through all blocks from
the first, and all of them are in memory at once. So the outputs of blocks that are not ours are copied, which a
compiler fuses into other work.
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
# torch warns once about in-place operations under a policy. In compiled code none are left when the marks are set.
WARNING = "Detected that context_fn is passed to torch.utils.checkpoint under torch.compile"
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: WARNING not in record.getMessage())


def recomputed(run: Callable[..., Any], *, ours: bool = False) -> Callable[..., Any]:
    """Wrap `run` so that its activations are recomputed. `ours`: it draws no random numbers, which would have to be
    repeated, and returns no view."""

    def again(*inputs: Any, **named: Any) -> Any:
        is_compiled = torch.compiler.is_dynamo_compiling()

        def block(*inputs: Any) -> Any:  # checkpoint() would take some of these names for its own arguments
            found = run(*inputs, **named)
            return tree_map_only(torch.Tensor, torch.clone, found) if is_compiled and not ours else found

        policy: dict[str, Any] = {"context_fn": recompute_all} if is_compiled else {}
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=not ours, **policy)

    return again


def recompute_all() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def keep_policies_in_ddp() -> None:
    """Keep DDP from cutting compiled graphs. Before 2.13 the compiler forgets a block's policy when it cuts a graph
    into DDP's buckets. Without cuts all gradients arrive at once, and nothing hides their reduction."""
    if TorchVersion(torch.__version__) < MARKS_ALL:
        import torch._dynamo.config as dynamo  # takes a second to import

        dynamo.optimize_ddp = False
