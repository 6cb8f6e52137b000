"""What several ranks change for a ladder, a tune and a profile: what is refused, where they begin, what is predicted.

    layout = layout_for(4, {"tensor": 2, "replicas": None})      # or a UserError with the nearest that works
    hardware = check_ranks(hardware, 4)                          # the machine with four ranks on it
    rate_of_ranks(shape, plan, 16, hardware)                     # tokens/s of all, communication included

A measurement with several ranks is one job of that many processes (`engine/worker.py`). Training has its own command
line for ranks (`commands/ranks.py`) and the same limits: what is impossible is refused here for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.interconnects import choose_links
from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.traced import Traced
from redline.core.units import counted
from redline.core.workload import Shape, Workload, check_positive
from redline.predict.communication import Fabric
from redline.predict.fitting import Case, case_of
from redline.predict.layouts import expected_peaks, predict_parallel
from redline.predict.parallel import ALONE, UNCUT, Beside, check_copies, check_cut_copies, layout_for_batch
from redline.predict.parallel import Layout as Cut
from redline.rungs import Rung, find_rung, group_of, plan_of, usual_rungs, why_not
from redline.rungs.ladder import cuts_of, for_layout, why_not_among, with_parallel
from redline.rungs.parallel import (
    DDP,
    FSDP,
    PIPELINE_GPIPE,
    PIPELINE_PARALLEL,
    RANK_RUNGS,
    TENSOR_PARALLEL,
    where_to_cut,
)

NO_STAGES = "a measured step is one micro batch, and stages need several that follow one another"
HERE = "LOCAL_WORLD_SIZE"  # set by torchrun: ranks on this machine
LEAST_ON_CPU, RANKS_PER_CORE = 8, 4  # 8: TP 2 x PP 2 x DP 2, which even a small machine should be able to try
OF_LAYOUTS = {TENSOR_PARALLEL: "--tensor", PIPELINE_PARALLEL: "--pipeline", PIPELINE_GPIPE: "--pipeline"}


# --- how they are arranged --------------------------------------------------------------------------------------------


def layout_for(
    ranks: int,
    degrees: Mapping[str, int | None],
    workload: Workload | None = None,
    *,
    by_hand: bool = False,
    beside: Beside = ALONE,
) -> Layout:
    """Return the layout of these ranks; a degree of None is one. Cuts that the model or the ranks do not allow are
    refused, first those of the model, so that what is proposed for the ranks works for the model. `by_hand`: torchrun
    started the ranks. `beside`: the batch they share. It is not checked here, but proposed cuts are compatible with
    it."""
    given = {"tensor": 1, "pipeline": 1, "replicas": 1}
    given |= {name: size for name, size in degrees.items() if size is not None}
    for name, size in given.items():
        check_positive(f"--{name}", size)
    check_cuts(given, ranks, workload, by_hand=by_hand, beside=beside)
    # torchrun's ranks may be what is left of a larger job: they continue, with a note.
    check = check_copies if by_hand else check_cut_copies
    check(ranks // (given["tensor"] * given["pipeline"]), given["replicas"])
    return Layout(ranks=ranks, **given)


def uncut_copies(layout: Layout) -> str | None:
    """Return a note for ranks left over from a larger job if their copies of the model are not cut, else None."""
    if layout.replicas == 1 or layout.shards > 1:
        return None
    return f"--replicas {layout.replicas} of {counted(layout.data, 'rank')} with data of their own: {UNCUT}"


def check_cuts(
    given: Mapping[str, int],
    ranks: int,
    workload: Workload | None,
    *,
    by_hand: bool = False,
    beside: Beside = ALONE,
) -> None:
    """Check --tensor and --pipeline, and that there are ranks for them. `workload`: None if it is not known yet."""
    said = " ".join(f"--{name} {size}" for name, size in given.items() if size > 1)
    if not said:
        return
    if workload is not None:
        check_known_cuts(given, workload)
    data = given["replicas"] * (2 if given["replicas"] > 1 else 1)  # each copy is cut among two or more
    whole = given["tensor"] * given["pipeline"] * data
    layout_for_batch(
        gpus=whole if ranks == 1 else ranks,
        tp=given["tensor"],
        pp=given["pipeline"],
        micro_batch=1,
        shape=workload.shape if workload is not None and isinstance(workload.shape, Shape) else None,
        gpus_per_node=None if ranks == 1 else ranks_of_a_node,
        beside=(beside := replace(beside, replicas=given["replicas"])),
    )
    if ranks == 1:
        change = beside.change(data)
        too = f"{whole} with {change}" if change else f"{whole}"
        torchrun = f"start torchrun with --nproc-per-node {too}, or leave {said} out: a checkpoint goes on without"
        raise UserError(
            f"{said} with one process",
            f"it takes {whole} ranks that share a step, or a multiple of that",
            torchrun if by_hand else f"say --gpus {too} too, or leave {said} out",
        )


def check_known_cuts(given: Mapping[str, int], workload: Workload) -> None:
    """Refuse to cut a model whose cuts are unknown, before checking whether its sizes divide."""
    for name, rung in (("tensor", TENSOR_PARALLEL), ("pipeline", PIPELINE_PARALLEL)):
        reason = where_to_cut(rung, workload) if given[name] > 1 else None
        if reason is not None:
            said = f"--{name} {given[name]}"
            fix = f"say --parallel fsdp instead of {said}, or leave it out"
            raise UserError(f"{said} does not apply here", reason, fix)


def check_layout(layout: Layout, recipe: Recipe) -> None:
    """Refuse --replicas with ddp, where every rank holds a copy of the model."""
    if layout.replicas > 1 and recipe.rungs[-1] == DDP:
        raise UserError(
            f"--replicas {layout.replicas} with ddp",
            "every rank holds the whole model: there is nothing to cut",
            "say --parallel fsdp, or leave --replicas out",
        )


def check_measured(
    rungs: tuple[str, ...], layout: Layout, workload: Workload, hardware: Hardware, global_batch: int | None = None
) -> None:
    """Check the layout of a measurement that begins with these rungs, which come from `ranked_rungs`."""
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "replicas": layout.replicas}
    check_tensor_needs(rungs, layout.tensor, workload)
    check_cuts(degrees, layout.ranks, workload, beside=Beside(batch=global_batch, stages=False))
    if layout.ranks > 1:
        check_layout(layout, Recipe(rungs=rungs, micro_batch=1))


def check_tensor_needs(rungs: Collection[str], tensor: int | None, workload: Workload) -> None:
    """Check that these rungs go with --tensor at all. This comes before checks of its degree; otherwise a proposed
    degree would be refused in turn. The rung requires nothing of the machine but ranks."""
    if tensor is None or tensor < 2:
        return
    check_known_cuts({"tensor": tensor, "pipeline": 1}, workload)
    reason = why_not_among(TENSOR_PARALLEL, rungs, workload, some_machine(tensor))
    if reason is not None:
        fix = "leave --tensor out, or take another recipe"
        raise UserError(f"{TENSOR_PARALLEL} does not apply here", reason, fix)


def some_machine(ranks: int) -> Hardware:
    """Return a machine with this many ranks, for rungs that require nothing else, before the real one is known."""
    return Hardware(kind="cpu", name="a machine", ranks=ranks)


# --- where they run ---------------------------------------------------------------------------------------------------


def ranks_of_a_node(ranks: int) -> int:
    """Return how many of these ranks run here: torchrun says how many it started, and --gpus starts all here."""
    return int(os.environ.get(HERE, ranks))


def is_torchruns() -> bool:
    return HERE in os.environ


def how_many(ranks: int) -> str:
    """Return the option for this many ranks, torchrun's or ours."""
    return f"--nproc-per-node {ranks}" if is_torchruns() else f"--gpus {ranks}"


def check_ranks(hardware: Hardware, ranks: int, layout: Layout | None = None, beside: Beside = ALONE) -> Hardware:
    """Return the machine with this many ranks on it. More than one per device is refused. The number proposed instead
    works with their layout (None: plain data parallelism) and with the batch `beside` it, if any number does."""
    here, layout = ranks_of_a_node(ranks), layout or Layout(ranks=ranks)
    if hardware.kind == "cuda" and here > hardware.count:
        only = f"this machine has {counted(hardware.count, 'GPU')}"
        fix = how_many_of(hardware.count, layout, beside)
        raise UserError(f"{here} ranks on this machine", f"each rank has a GPU of its own, and {only}", fix)
    most = most_on_cpu(hardware.cpu_cores)
    if hardware.kind == "cpu" and here > most:
        raise UserError(
            f"{here} ranks on this CPU",
            f"each is a process that holds torch and shares {counted(hardware.cpu_cores, 'core')} with the others: "
            f"beyond {most} nothing is left to learn from them",
            how_many_of(most, layout, beside) + (" or fewer" if layout.is_plain and beside.batch is None else ""),
        )
    return replace(hardware, ranks=ranks)


def how_many_of(most: int, layout: Layout, beside: Beside = ALONE) -> str:
    """Return the fix: the largest number of ranks the layout can use here, or else leaving its degrees out."""
    nodes = layout.ranks // ranks_of_a_node(layout.ranks)
    whole = layout.ranks // layout.shards

    def takes(here: int) -> bool:
        copies, left = divmod(nodes * here, whole)
        return left == 0 and here % layout.tensor == 0 and copies >= (2 if layout.replicas > 1 else 1)

    can = [here for here in range(most, 0, -1) if takes(here)]
    data = {here: nodes * here // (layout.tensor * layout.pipeline) for here in can}
    found = next((here for here in can if beside.change(data[here]) == ""), next(iter(can), None))
    if found is not None:
        return f"use {how_many(found)}" if found > 1 or is_torchruns() else "leave --gpus out"
    degrees = layout.options().removeprefix(f"--gpus {layout.ranks} ")
    if most > 1 or is_torchruns():
        return f"use {how_many(most)} and leave {degrees} out"
    return f"leave --gpus and {degrees} out"


def most_on_cpu(cores: int) -> int:
    """Return how many ranks make sense on a CPU: four per core, and always enough to try tensor, pipeline and data
    parallelism at once."""
    return max(LEAST_ON_CPU, RANKS_PER_CORE * cores)


# --- what their steps may hold ----------------------------------------------------------------------------------------


def usual_way(layout: Layout) -> str:
    """Return how data-parallel ranks share a step by default: by fsdp if copies of the model are cut, else by ddp."""
    return DDP if layout.replicas == 1 else FSDP


def ranked_rungs(rungs: Collection[str], layout: Layout) -> tuple[str, ...]:
    """Return what ranks in this layout begin with: these rungs, the layout's cuts, and the rungs' way to share a step
    or the usual one. Without data parallelism there is no such way."""
    if layout.ranks == 1:
        return tuple(rungs)
    cuts, ways = cuts_of(rungs, layout), [name for name in rungs if is_way(name)]
    others = [*(name for name in rungs if name not in (*cuts, *ways)), *cuts]
    return tuple(others) if layout.data == 1 else with_parallel(others, (*ways, usual_way(layout))[0])


def is_way(name: str) -> bool:
    return group_of(find_rung(name)) == DDP


def not_measured(name: str, layout: Layout) -> str | None:
    """Return why ladder, tune and profile cannot use a rung in this layout, whatever the machine; None for most."""
    if name in (PIPELINE_PARALLEL, PIPELINE_GPIPE):
        return f"{NO_STAGES}: train has --pipeline N, and estimate predicts it"
    if name == TENSOR_PARALLEL and layout.tensor == 1:
        return "no ranks share a layer here: --tensor N says how many do"
    if is_way(name) and layout.ranks > 1 and layout.data == 1:
        return f"the {layout.tensor} ranks of the tensor group are all there are: nobody has data of their own"
    if name == DDP and layout.replicas > 1:
        return f"every rank holds the whole model: there is nothing to cut into --replicas {layout.replicas}"
    return None


def refused_beside(rung: Rung, onto: Collection[str], workload: Workload, hardware: Hardware) -> str | None:
    """Return why a rung cannot be added to the rungs by which ranks share the step so far, or None: one of those may
    not go with it, or may undo it."""
    for way in (name for name in onto if name in RANK_RUNGS and name != rung.name):
        rest = [name for name in onto if name != way]
        reason = why_not(find_rung(way), workload, hardware, plan_of((*rest, rung.name)))
        if reason is not None:
            return reason
    undoer = who_undoes(rung.name, onto)
    return None if undoer is None else f"{undoer} undoes it: the step would be the same"


def who_undoes(name: str, others: Collection[str]) -> str | None:
    """Return the rung among `others` by which ranks share the step and beside which this rung changes nothing, although
    it would without it; None if there is no such rung."""
    if plan_of((*others, name)) != plan_of(others):
        return None
    ways = (one for one in others if one in RANK_RUNGS and one != name)
    rests = {way: [one for one in others if one != way] for way in ways}
    return next((way for way, rest in rests.items() if plan_of((*rest, name)) != plan_of(rest)), None)


def undone_in(names: Collection[str]) -> dict[str, str]:
    """Return the rungs of a recipe that its ways to share the step undo, each with the rung that undoes it."""
    found = {name: who_undoes(name, [one for one in names if one != name]) for name in names}
    return {name: way for name, way in found.items() if way is not None and name not in RANK_RUNGS}


def notes_of_rungs(names: Collection[str], layout: Layout) -> Iterator[str]:
    """Yield notes about rungs of a recipe that change nothing in this layout. A degree of one has no rung, and what its
    rung would undo stays (`for_layout`)."""
    counting = for_layout(names, layout)
    for name in (one for one in names if one in OF_LAYOUTS and one not in counting):
        yield f"{name} changes nothing here: it takes {OF_LAYOUTS[name]} 2 or more"
    for name, way in undone_in(counting).items():
        yield f"{name} changes nothing here: {way} undoes it"


def usual_beside(cuts: Collection[str], workload: Workload, hardware: Hardware) -> tuple[str, ...]:
    """Return the usual rungs without those that a layout's cuts refuse or undo."""
    usual = usual_rungs(workload, hardware)
    return tuple(name for name in usual if refused_beside(find_rung(name), cuts, workload, hardware) is None)


def check_shareable(workload: Workload, hardware: Hardware) -> None:
    """Refuse several ranks if the loss is not a mean over samples: averaging over ranks would change it."""
    if hardware.ranks > 1 and not workload.splits:
        raise UserError(
            f"--gpus {hardware.ranks} with {workload.name}",
            "its loss of a batch is not the mean over the parts of it, so that ranks would train another model",
            "leave --gpus out, or let the loss be a mean over the samples",
        )


def check_global_batch(global_batch: int | None, ranks: int) -> None:
    """Refuse a global batch that ranks cannot share evenly."""
    if global_batch is not None and global_batch % ranks:
        below = global_batch // ranks * ranks
        near = " or ".join(str(size) for size in (below, below + ranks) if size)
        raise UserError(
            f"a global batch of {global_batch} does not divide among {ranks} ranks",
            "every rank takes as many sequences of an update as the others",
            f"use --global-batch {near}",
        )


def rate_of_ranks(shape: Shape | Traced, plan: Plan, micro_batch: int, hardware: Hardware) -> float | None:
    """Return tokens per second as `redline estimate --gpus N` predicts; None if device, link or model is unknown."""
    device = hardware.device
    ranks = hardware.arranged
    case = case_of(shape, plan, ranks)
    if device is None or not isinstance(case, Case):
        return None
    layout = replace(case.layout or Cut(gpus=ranks.ranks), micro_batch=micro_batch)
    fabric = Fabric(gpus_per_node=hardware.ranks, links=choose_links(None, device))
    return predict_parallel(replace(case, layout=layout), fabric, expected_peaks(plan, device, None)).tokens_per_second
