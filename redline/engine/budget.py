"""A compiled step that keeps a share of its activations: what torch's compiler must be told to choose well.

    keep_share(0.5)      # before anything is compiled; a process has one budget

Given a budget, the compiler picks what to keep by a knapsack: bytes against FLOPs. Two things go wrong there. Operators
that it does not know it takes for free, and computes all of them again whatever the budget is: so it is told what ours
cost. And it fills the knapsack with what nobody keeps. A loss that computes its gradient on the spot (`model/loss.py`)
makes two small tensors of its logits, and the backward pass reads those. The knapsack takes the logits for worth
keeping, 6.6 of its 8.9 GB for GPT-2 at 64 sequences, and the step then keeps an eighth instead of half.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch._functorch.config as functorch
from torch._functorch import partitioners
from torch.fx import Graph, Node
from torch.utils.flop_counter import register_flop_formula

from redline.engine.flop_counter import ours


def keep_share(budget: float) -> None:
    functorch.activation_memory_budget = budget
    tell_the_compiler()


@functools.cache
def tell_the_compiler() -> None:
    """Torch has no other place for either than its own functions."""
    for operator, formula in ours().items():
        register_flop_formula(operator)(formula)
    operators_of_torch = partitioners.get_default_op_list
    choice_of_torch = partitioners._optimize_runtime_with_given_memory

    def operators_with_ours() -> Any:
        found = operators_of_torch()
        found.compute_intensive_ops.update(ours())
        return found

    def choice_of_what_is_kept(
        graph: Graph, memory: list[float], flops: list[float], budget: float, info: Any, nodes: list[Node]
    ) -> Any:
        worth = worth_keeping(nodes, flops, info.tangents_closure)
        return choice_of_torch(graph, memory, worth, budget, info, nodes)

    partitioners.get_default_op_list = operators_with_ours
    partitioners._optimize_runtime_with_given_memory = choice_of_what_is_kept  # type: ignore[assignment]


def worth_keeping(nodes: Sequence[Node], flops: Sequence[float], after: Collection[Node]) -> list[float]:
    """The FLOPs that keeping each of `nodes` spares. None, where less than it is kept without it. `after`: what depends
    on the gradients that come in."""
    offered = {*nodes}
    return [0.0 if is_stood_for(node, offered, after) else spared for node, spared in zip(nodes, flops, strict=True)]


def is_stood_for(node: Node, offered: Collection[Node], after: Collection[Node]) -> bool:
    """Whether what the backward pass reads of it is smaller: the last ones before it, or others that are offered."""
    instead = read_instead(node, offered, after)
    return node not in instead and sum(map(partitioners._size_of, instead)) < partitioners._size_of(node)


def read_instead(node: Node, offered: Collection[Node], after: Collection[Node]) -> set[Node]:
    found, seen, waiting = set[Node](), {node}, [node]
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if user in after:
                found.add(one)
            elif user in offered:
                found.add(user)
            elif user not in seen and user.op != "output":
                seen.add(user)
                waiting.append(user)
    return found
