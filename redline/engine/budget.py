"""A compiled step that keeps a share of its activations: what torch's compiler needs to know to choose well.

    keep_share(0.5)      # before anything is compiled; a process has one budget

Given a budget, the compiler solves a knapsack problem of bytes and FLOPs to pick what to keep. Three things go wrong.
It treats operators that it does not know as free and recomputes all of them whatever the budget: here it learns what
redline's operators cost. It may recompute operators that draw random numbers, and they then draw different ones:
dropout would drop other elements in the backward pass, and the gradients would be silently wrong. And it counts bytes
that would never be kept: a loss that computes its gradient on the spot (`model/loss.py`) turns its logits into two
small tensors, which are all that the backward pass reads. The knapsack counts the logits, 6.6 of its 8.9 GB for GPT-2
at 64 sequences, and the step then keeps an eighth instead of half. Here a tensor costs no more bytes than what would be
kept in its place.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.inductor_prims  # registers its seed operators, which draw too
import torch.compiler.config as compiler
from torch._functorch import partitioners
from torch.fx import Graph, Node
from torch.utils.flop_counter import register_flop_formula

from redline.engine import flop_counter
from redline.engine.flop_counter import ours

ATTENTION_RATE = "dropout_p"  # argument of operators that draw only if it is not zero


def keep_share(budget: float) -> None:
    functorch.activation_memory_budget = budget
    # A cached graph may come from torch's own choice, or from another version of what steers ours.
    own = f"redline {version_of_the_choice()}"
    if own not in compiler.cache_key_tag:
        compiler.cache_key_tag = f"{compiler.cache_key_tag} {own}".strip()  # the user's own tag stays
    register_costs()


def version_of_the_choice() -> str:
    files = (Path(__file__), Path(flop_counter.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def register_costs() -> None:
    """Replace functions of torch's partitioner: of its public hooks, one sees no FLOPs and the other no bytes."""
    for operator, formula in ours().items():
        register_flop_formula(operator)(formula)
    operators_of_torch = partitioners.get_default_op_list
    choice_of_torch = partitioners._optimize_runtime_with_given_memory

    def operators_with_ours() -> Any:
        found = operators_of_torch()
        found.compute_intensive_ops.update(ours())
        found.random_ops.update(drawing_operators())
        return found

    def choice_of_what_is_kept(
        graph: Graph, memory: list[float], flops: list[float], budget: float, info: Any, nodes: list[Node]
    ) -> Any:
        shares = [share_kept(node, nodes, info.tangents_closure) for node in nodes]
        sizes = [share * size for share, size in zip(shares, memory, strict=True)]
        spared, kept, again = choice_of_torch(graph, sizes, flops, budget, info, nodes)
        drawn = [number for number in again if draws(nodes[number])]
        return spared, [*kept, *drawn], [number for number in again if number not in drawn]

    partitioners.get_default_op_list = operators_with_ours
    partitioners._optimize_runtime_with_given_memory = choice_of_what_is_kept  # type: ignore[assignment]


# --- operators that draw random numbers -------------------------------------------------------------------------------


def drawing_operators() -> Iterator[Any]:
    """Yield the operators tagged as drawing, of every library including the user's. Repeated for each graph (90 ms),
    because users may register operators at any time. One without the tag counts as drawing nothing, as in torch."""
    for name in torch._C._dispatch_get_all_op_names():
        library, _, name = name.partition("::")
        packet = getattr(getattr(torch.ops, library), name.partition(".")[0], None)
        if packet is not None and any(is_drawing(getattr(packet, one)) for one in packet.overloads()):
            yield packet


def is_drawing(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def draws(node: Node) -> bool:
    if not is_drawing(node.target):
        return False
    named = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if ATTENTION_RATE not in named:
        return True
    at = named.index(ATTENTION_RATE)
    rate = node.args[at] if at < len(node.args) else node.kwargs.get(ATTENTION_RATE, 0.0)
    return bool(rate != 0)


# --- what is kept in its place ----------------------------------------------------------------------------------------


def share_kept(node: Node, offered: Sequence[Node], after: Collection[Node]) -> float:
    """Return the share of its bytes that keeping it really costs: the backward pass may read something smaller,
    computed from it. `after`: the nodes that depend on incoming gradients."""
    size = partitioners._size_of(node)
    instead = sum(map(partitioners._size_of, read_instead(node, {*offered}, after)))
    return min(1.0, instead / size) if size else 1.0


def read_instead(node: Node, offered: Collection[Node], after: Collection[Node]) -> set[Node]:
    """Return the nodes that would be kept instead: on each path from `node` to the backward pass, the last node before
    that pass, or the first other node that is offered."""
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
