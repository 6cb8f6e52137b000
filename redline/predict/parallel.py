"""Batch arithmetic over many GPUs: GBS = MBS x DP x GAS, with DP = GPUs / (TP x PP).

    layout = layout_for_batch(gpus=64, tp=4, pp=2, micro_batch=2, global_batch=512, shape=shape)
    layout.dp, layout.accumulation -> 8, 32
    check_layout(shape, layout, gpus=64, gpus_per_node=8)     # refuses what cannot run, and proposes what can

TP cuts every layer among GPUs, PP the stack of layers, DP the batch; GAS (gradient accumulation) runs the rest of the
batch one micro batch after another. Ranks count TP fastest, then DP, then PP: tensor-parallel GPUs are neighbours in a
node. This module says only what is possible, not what is fast (predict/layouts.py does). Errors name options, which are
the same for `train` and `estimate`; whatever they propose passes the check that failed and is compatible with the other
options given (`Beside`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from redline.core.errors import UserError
from redline.core.units import counted
from redline.core.workload import Shape, check_positive

USUAL_NODE = 8  # GPUs on a DGX or HGX board
CUTS = ("--tensor", "--pipeline")
MOST_STEPS = 64  # another number of GPUs is searched for within this many replicas more or fewer
# GPUs per node: a fixed number, or a function of the number of GPUs; None: not checked.
Node = int | Callable[[int], int] | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How GPUs share a step. The constructor checks that the GPUs can be divided that way."""

    gpus: int
    tp: int = 1
    """Tensor parallel: GPUs that hold one layer together."""
    pp: int = 1
    """Pipeline parallel: groups of GPUs that hold consecutive layers."""
    micro_batch: int = 1
    """Sequences that a replica computes at once (MBS)."""
    accumulation: int = 1
    """Micro batches per step and replica (GAS)."""
    replicas: int = 1
    """With ZeRO 3: copies of the model, each cut among its own data-parallel GPUs (hybrid sharding)."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "micro_batch", "accumulation", "replicas"):
            check_positive(name, getattr(self, name))
        if self.gpus % (self.tp * self.pp):
            raise _no_whole_replicas(self.gpus, self.tp, self.pp, shape=None)
        check_copies(self.dp, self.replicas)

    @property
    def dp(self) -> int:
        """Data parallel: copies of the model, each with its own part of the batch."""
        return self.gpus // (self.tp * self.pp)

    @property
    def shards(self) -> int:
        """GPUs among which ZeRO shards one copy of the model."""
        return self.dp // self.replicas

    @property
    def global_batch(self) -> int:
        """Sequences per step (GBS)."""
        return self.micro_batch * self.dp * self.accumulation

    def explain(self) -> str:
        return (
            f"{counted(self.gpus, 'GPU')} / (TP {self.tp} x PP {self.pp}) = DP {self.dp}; "
            f"MBS {self.micro_batch} x DP {self.dp} x GAS {self.accumulation} = "
            f"a global batch of {self.global_batch} sequences."
        )


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Options given beside a layout. Another cut, or another number of GPUs, is proposed only if it is compatible with
    them, or together with the change that makes it so."""

    micro_batch: int = 1
    batch: int | None = None
    """The batch of an update, in the unit of `option`."""
    option: str | None = "--global-batch"
    """The option that sets `batch`; None if it cannot change, as in a resumed run."""
    unit: int = 1
    """How much of `batch` one sequence is: its tokens, if `batch` counts tokens."""
    replicas: int = 1
    stages: bool = True
    """True if --pipeline can be given: a measurement has no stages."""

    def __post_init__(self) -> None:
        check_positive("--micro-batch", self.micro_batch)
        if self.batch is not None:
            check_positive(self.option or "global batch", self.batch)

    def change(self, dp: int) -> str | None:
        """Return what must change with `dp` data-parallel ranks: '' if nothing must, None if nothing helps."""
        copies = copies_of(dp)
        words = [] if self.replicas in copies else [f"--replicas {nearest(copies, self.replicas)[0]}"]
        batch, each = self.batch, dp * self.unit
        if batch is not None and batch % (each * self.micro_batch):
            if batch % each == 0:
                words.append(f"--micro-batch {nearest(divisors(batch // each), self.micro_batch)[0]}")
            elif self.option is None:
                return None
            else:
                words.append(self._batch_near(batch, each))
        return " and ".join(words)

    def _batch_near(self, batch: int, each: int) -> str:
        """Return the nearest batch for this micro batch, unless only another one comes close to the wanted batch."""
        kept, near = (nearest(multiples_near(batch, of), batch)[0] for of in (each * self.micro_batch, each))
        if kept == near or max(kept, batch) <= 2 * min(kept, batch):
            return f"{self.option} {kept}"
        return f"{self.option} {near} and --micro-batch {nearest(divisors(near // each), self.micro_batch)[0]}"


def copies_of(dp: int) -> tuple[int, ...]:
    """Return the numbers of model copies into which `dp` data-parallel ranks can be divided, each cut among at least
    two ranks; one rank is one copy."""
    return tuple(size for size in divisors(dp) if size < dp or dp == 1)


def check_copies(dp: int, replicas: int) -> None:
    """Raise UserError unless `dp` data-parallel ranks can form `replicas` copies of the model."""
    if dp % replicas:
        sizes = _either(nearest_two(copies_of(dp), replicas))
        raise UserError(
            f"{counted(dp, 'rank')} with data of {'its' if dp == 1 else 'their'} own cannot be {replicas} replicas",
            "each copy of the model is cut among as many ranks as the others",
            f"use --replicas {sizes}",
        )


def check_cut_copies(dp: int, replicas: int) -> None:
    """Like `check_copies`, but each copy must also be cut."""
    check_copies(dp, replicas)
    if replicas == dp > 1:
        fewer = [size for size in nearest_two(copies_of(dp), replicas) if size > 1]
        raise UserError(
            f"--replicas {replicas} leaves one rank to each copy of the model",
            f"{UNCUT}, at the price of fsdp",
            f"leave --replicas out{f', or use --replicas {_either(fewer)}' if fewer else ''}",
        )


UNCUT = "nothing is cut then: every rank holds all of it, as with ddp"
ALONE = Beside()  # no other options


def layout_for_batch(
    *,
    gpus: int,
    tp: int = 1,
    pp: int = 1,
    micro_batch: int,
    global_batch: int | None = None,
    shape: Shape | None = None,
    gpus_per_node: Node = None,
    beside: Beside | None = None,
    replicas: int = 1,
) -> Layout:
    """Return the layout whose accumulation gives exactly this global batch (None: one pass), or raise UserError with
    the nearest possible batches. With a shape, the cuts must suit that model too. `beside`: the options with which
    proposals must be compatible, if not the sizes given here."""
    if shape is not None:
        beside = beside or Beside(micro_batch=micro_batch, batch=global_batch, replicas=replicas)
        _check_cuts(shape, gpus, tp, pp, gpus_per_node, beside)
    elif beside is not None and gpus % (tp * pp):
        raise _no_whole_replicas(gpus, tp, pp, None, gpus_per_node, beside)
    once = Layout(gpus=gpus, tp=tp, pp=pp, micro_batch=micro_batch, replicas=replicas)
    if global_batch is None:
        return once
    check_positive("global_batch", global_batch)
    if global_batch % once.global_batch:
        raise UserError(
            f"a global batch of {global_batch} is not a number of passes of {once.global_batch}",
            f"one pass takes a micro batch of {micro_batch} on {'the one' if once.dp == 1 else f'each of {once.dp}'} "
            f"data-parallel rank{'' if once.dp == 1 else 's'}, and an update adds up whole passes",
            "set --global-batch to " + ", or ".join(_batches_near(global_batch, once)),
        )
    return replace(once, accumulation=global_batch // once.global_batch)


def check_layout(shape: Shape, layout: Layout, gpus: int | None = None, gpus_per_node: int | None = None) -> None:
    """Raise UserError if a layout cannot run, and propose the nearest that can.

    The model must divide (heads, key-value heads and the MLP by TP, layers by PP), the layout must use exactly `gpus`
    GPUs, and a tensor-parallel group must stay within its node. None skips a check."""
    _check_cuts(shape, layout.gpus, layout.tp, layout.pp, gpus_per_node)
    if gpus is not None and layout.gpus != gpus:
        check_positive("gpus", gpus)
        raise UserError(
            f"the layout takes {counted(layout.gpus, 'GPU')} and there {'is' if gpus == 1 else 'are'} {gpus}",
            f"DP {layout.dp} x TP {layout.tp} x PP {layout.pp} = {layout.gpus}, one rank per GPU",
            f"use {_cuts_near(shape, gpus, layout.tp, layout.pp, gpus_per_node)} on {counted(gpus, 'GPU')}; "
            "DP is what is left of them",
        )


def check_product(gpus: int, *, dp: int, tp: int, pp: int, beside: Beside = ALONE) -> None:
    """Raise UserError if DP is not GPUs / (TP x PP)."""
    check_positive("dp", dp)
    left = Layout(gpus=gpus, tp=tp, pp=pp).dp
    if dp != left:
        change = beside.change(left)
        raise UserError(
            f"DP {dp} x TP {tp} x PP {pp} takes {counted(dp * tp * pp, 'GPU')}, not {gpus}",
            "every GPU is one rank of one layout",
            f"use --dp {left}, or leave --dp out{f', with {change}' if change else ''}",
        )


def gpus_in_a_node(gpus: int, nodes: int | None = None) -> int:
    """Return the GPUs per node. `nodes` None: 8 GPUs per node, or the largest number up to 8 that divides them."""
    check_positive("gpus", gpus)
    if nodes is None:
        return max(size for size in divisors(gpus) if size <= USUAL_NODE)
    check_positive("nodes", nodes)
    if gpus % nodes:
        near = nearest_two(divisors(gpus), nodes)
        raise UserError(
            f"{counted(gpus, 'GPU')} cannot be shared evenly by {counted(nodes, 'node')}",
            "nodes are taken to be alike",
            f"use {_counted_either(near, 'node')}, or {_counted_either(multiples_near(gpus, nodes), 'GPU')}",
        )
    return gpus // nodes


def heads_divide(shape: Shape, tp: int) -> bool:
    """True if each GPU of a tensor-parallel group holds whole heads. Some trainers copy key-value heads if there are
    more GPUs than heads; here that counts as impossible, for memory and for speed."""
    return shape.heads % tp == 0 and shape.key_value_heads % tp == 0


def _check_cuts(shape: Shape, gpus: int, tp: int, pp: int, node: Node = None, beside: Beside = ALONE) -> None:
    for name, value in (("gpus", gpus), ("--tensor", tp), ("--pipeline", pp)):
        check_positive(name, value)
    kv = shape.key_value_heads
    for name, parts, what, size, why in (
        (
            "--tensor",
            tp,
            counted(shape.heads, "head"),
            shape.heads,
            "each GPU of a tensor-parallel group holds whole heads",
        ),
        ("--tensor", tp, counted(kv, "key-value head"), kv, "they are shared out whole, and not copied"),
        ("--tensor", tp, counted(shape.d_ff, "MLP column"), shape.d_ff, "the MLP's width is shared out evenly"),
        (
            "--pipeline",
            pp,
            counted(shape.layers, "layer"),
            shape.layers,
            "each pipeline stage holds as many as the others",
        ),
    ):
        if size % parts:
            raise UserError(
                f"{what} cannot be shared by {name} {parts}",
                why,
                f"use {_cuts_near(shape, gpus, tp, pp, node, beside)}",
            )
    if gpus % (tp * pp):
        raise _no_whole_replicas(gpus, tp, pp, shape, node, beside)
    if _in_a_node(gpus, node) % tp:
        raise UserError(
            f"--tensor {tp} does not stay inside a node of {counted(_in_a_node(gpus, node), 'GPU')}",
            "a tensor-parallel group waits for its activations in every layer, and only links inside a node are "
            "fast enough for that",
            f"use {_cuts_near(shape, gpus, tp, pp, node, beside)}",
        )


def _in_a_node(gpus: int, node: Node) -> int:
    if node is None:
        return gpus
    return node if isinstance(node, int) else node(gpus)


def _no_whole_replicas(
    gpus: int, tp: int, pp: int, shape: Shape | None, node: Node = None, beside: Beside = ALONE
) -> UserError:
    whole, near = tp * pp, _gpus_near(gpus, tp, pp, node, beside)
    others = f"{_counted_either(near, 'GPU')}, or " if near else ""
    return UserError(
        f"{counted(gpus, 'GPU')} cannot be cut into replicas of {tp} x {pp}",
        f"one replica takes {whole} GPUs, tensor x pipeline, and the number of data-parallel ranks must be whole",
        f"use {others}{_cuts_near(shape, gpus, tp, pp, node, beside)}",
    )


def _gpus_near(gpus: int, tp: int, pp: int, node: Node, beside: Beside) -> list[int]:
    """Return the nearest numbers of GPUs below and above that form whole replicas, in nodes that hold whole tensor
    groups, and that require no other change."""
    first, whole = gpus // (tp * pp), tp * pp
    below, above = range(first, max(0, first - MOST_STEPS), -1), range(first + 1, first + MOST_STEPS)

    def takes(dp: int) -> bool:
        return _node_takes(tp, dp * whole, node) and beside.change(dp) == ""

    found = (next((n * whole for n in way if takes(n)), None) for way in (below, above))
    return [count for count in found if count is not None]


def _node_takes(tp: int, gpus: int, node: Node) -> bool:
    try:
        return _in_a_node(gpus, node) % tp == 0
    except UserError:  # the given nodes cannot share that many GPUs
        return False


def _cuts_near(shape: Shape | None, gpus: int, tp: int, pp: int, node: Node = None, beside: Beside = ALONE) -> str:
    """Name the two nearest cuts of these GPUs, and of the model if one is given: '--tensor 4 or --tensor 2'. If none is
    compatible with the other options, each names what else to change: '--tensor 4 with --micro-batch 2'. If that may
    not change, as in a resumed run, name the nearest number of GPUs that requires no change: '2 GPUs with --tensor
    2'."""
    cuts = _ways_to_cut(shape, gpus, tp, pp, node, beside)
    if cuts:
        return _cuts_text(dict(list(cuts.items())[:2]), tp, pp)
    for count in (*range(gpus - 1, 0, -1), *range(gpus + 1, 2 * gpus + 1)):  # fewer first: those exist
        ways = _ways_to_cut(shape, count, tp, pp, node, beside) if _node_takes(1, count, node) else {}
        as_said = [cut for cut, change in ways.items() if change == ""]
        if as_said:
            return f"{counted(count, 'GPU')} with {_cuts_text({as_said[0]: ''}, tp, pp)}"
    return "another number of GPUs"


def _ways_to_cut(
    shape: Shape | None, gpus: int, tp: int, pp: int, node: Node, beside: Beside
) -> dict[tuple[int, int], str]:
    """Return cuts of these GPUs, the nearest first, and what else must change; only cuts that require no change, if
    there are any."""
    possible = sorted(
        possible_cuts(shape, gpus, None if node is None else _in_a_node(gpus, node)),
        key=lambda cut: (abs(math.log(cut[0] / tp)) + abs(math.log(cut[1] / pp)), cut[1] != pp, cut),
    )
    possible = [cut for cut in possible if beside.stages or cut[1] == 1]
    changes = {cut: change for cut in possible if (change := beside.change(gpus // math.prod(cut))) is not None}
    changes = {cut: change for cut, change in changes.items() if change == ""} or changes
    if (tp == 1) != (pp == 1):  # only one of the two options was given: propose the other only if nothing else helps
        other = 0 if tp == 1 else 1
        changes = {cut: change for cut, change in changes.items() if cut[other] == 1} or changes
    return changes


def _cuts_text(changes: dict[tuple[int, int], str], tp: int, pp: int) -> str:
    said = [(axis, name) for axis, name in enumerate(CUTS) if any(cut[axis] > 1 for cut in ((tp, pp), *changes))]
    words = [" ".join(f"{name} {cut[axis]}" for axis, name in said) for cut in changes]
    words = words if said else [f"neither {' nor '.join(CUTS)}"]
    too = (f" with {change}" if change else "" for change in changes.values())
    return " or ".join(map("".join, zip(words, too, strict=False)))


def possible_cuts(shape: Shape | None, gpus: int, gpus_per_node: int | None = None) -> list[tuple[int, int]]:
    """Return every (TP, PP) that divides the GPUs and, if given, the model, with TP inside a node if one is given."""
    tp_divides = gpus if shape is None else math.gcd(shape.heads, shape.key_value_heads, shape.d_ff, gpus)
    tp_divides = tp_divides if gpus_per_node is None else math.gcd(tp_divides, gpus_per_node)
    pp_divides = gpus if shape is None else math.gcd(shape.layers, gpus)
    return [(t, p) for t in divisors(tp_divides) for p in divisors(pp_divides) if gpus % (t * p) == 0]


def _batches_near(wanted: int, once: Layout) -> Iterator[str]:
    """Propose the nearest batches that keep the micro batch, then another micro batch for the same batch, or else
    nearer batches with another micro batch."""
    same = multiples_near(wanted, once.global_batch)
    yield _either(same)
    for batch in multiples_near(wanted, once.dp):
        nearer = all(abs(batch - wanted) < abs(other - wanted) for other in same)
        if batch == wanted:
            sizes = nearest_two(divisors(batch // once.dp), once.micro_batch)
            yield f"--micro-batch to {_either(sizes)}"
            return
        if nearer:
            size = nearest(divisors(batch // once.dp), once.micro_batch)[0]
            yield f"to {batch} with --micro-batch {size}"


def nearest(numbers: Sequence[int], wanted: int) -> list[int]:
    """Sort by ratio to `wanted`, the nearest first."""
    return sorted(numbers, key=lambda number: (abs(math.log(number / wanted)), number))


def nearest_two(numbers: Sequence[int], wanted: int) -> list[int]:
    """Return the two nearest numbers in ascending order."""
    return sorted(nearest(numbers, wanted)[:2])


def divisors(number: int) -> tuple[int, ...]:
    check_positive("number", number)
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def multiples_near(wanted: int, of: int) -> list[int]:
    """Return `wanted` if it is a multiple of `of`, else the multiples just below and above it, without zero."""
    below = wanted // of * of
    return [n for n in ((wanted,) if below == wanted else (below, below + of)) if n > 0]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def _counted_either(numbers: list[int], thing: str) -> str:
    """'1 node', '2 or 4 nodes'."""
    return f"{_either(numbers)} {thing}{'' if numbers == [1] else 's'}"
