"""What several ranks change for a ladder, a tune and a profile: what is refused, where they begin, what is predicted.

    layout = layout_for(4, {"tensor": 2, "replicas": None})      # or a UserError with the nearest that works
    hardware = check_ranks(hardware, 4)                          # the machine with four ranks on it
    rate_of_ranks(shape, plan, 16, hardware)                     # tokens/s of all, communication included

A measurement of ranks is one job of that many processes (`engine/worker.py`). Training has its own command line for
them (`commands/ranks.py`), and the same limits: what cannot be is refused here for all of them.
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
HERE = "LOCAL_WORLD_SIZE"  # torchrun's: ranks on this machine
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
    """Of so many ranks; a degree that is None is one. A cut that this model or these ranks do not allow is refused
    here, the model's first: what is proposed for the ranks is possible for it. `by_hand`: torchrun started them.
    `beside`: the batch that they share, which is not checked here; a cut that is proposed goes with it."""
    given = {"tensor": 1, "pipeline": 1, "replicas": 1}
    given |= {name: size for name, size in degrees.items() if size is not None}
    for name, size in given.items():
        check_positive(f"--{name}", size)
    check_cuts(given, ranks, workload, by_hand=by_hand, beside=beside)
    # Those of torchrun may be what is left of more: they go on, with a note.
    check = check_copies if by_hand else check_cut_copies
    check(ranks // (given["tensor"] * given["pipeline"]), given["replicas"])
    return Layout(ranks=ranks, **given)


def uncut_copies(layout: Layout) -> str | None:
    """What to say of ranks that are all that is left of more; None where copies are cut."""
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
    """--tensor and --pipeline, and that there are ranks for them. None: the model is not known yet."""
    said = " ".join(f"--{name} {size}" for name, size in given.items() if size > 1)
    if not said:
        return
    if workload is not None:
        check_known_cuts(given, workload)
    data = given["replicas"] * (2 if given["replicas"] > 1 else 1)  # copies that are cut
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
    """A model of which nobody knows where to cut it: told before it is told how well it divides."""
    for name, rung in (("tensor", TENSOR_PARALLEL), ("pipeline", PIPELINE_PARALLEL)):
        reason = where_to_cut(rung, workload) if given[name] > 1 else None
        if reason is not None:
            said = f"--{name} {given[name]}"
            fix = f"say --parallel fsdp instead of {said}, or leave it out"
            raise UserError(f"{said} does not apply here", reason, fix)


def check_layout(layout: Layout, recipe: Recipe) -> None:
    """Refuses copies of a model where every rank has one."""
    if layout.replicas > 1 and recipe.rungs[-1] == DDP:
        raise UserError(
            f"--replicas {layout.replicas} with ddp",
            "every rank holds the whole model: there is nothing to cut",
            "say --parallel fsdp, or leave --replicas out",
        )


def check_measured(
    rungs: tuple[str, ...], layout: Layout, workload: Workload, hardware: Hardware, global_batch: int | None = None
) -> None:
    """The same of a measurement that begins with these rungs, as `ranked_rungs` has made them."""
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "replicas": layout.replicas}
    check_tensor_needs(rungs, layout.tensor, workload)
    check_cuts(degrees, layout.ranks, workload, beside=Beside(batch=global_batch, stages=False))
    if layout.ranks > 1:
        check_layout(layout, Recipe(rungs=rungs, micro_batch=1))


def check_tensor_needs(rungs: Collection[str], tensor: int | None, workload: Workload) -> None:
    """That these rungs go with --tensor at all: asked before its degree, or a proposed one would be refused in turn.
    Of the machine the rung asks only that there are ranks."""
    if tensor is None or tensor < 2:
        return
    check_known_cuts({"tensor": tensor, "pipeline": 1}, workload)
    reason = why_not_among(TENSOR_PARALLEL, rungs, workload, some_machine(tensor))
    if reason is not None:
        fix = "leave --tensor out, or take another recipe"
        raise UserError(f"{TENSOR_PARALLEL} does not apply here", reason, fix)


def some_machine(ranks: int) -> Hardware:
    """With so many ranks, for rungs that ask nothing else of it, before the one at hand is known."""
    return Hardware(kind="cpu", name="a machine", ranks=ranks)


# --- where they run ---------------------------------------------------------------------------------------------------


def ranks_of_a_node(ranks: int) -> int:
    """torchrun says how many it has started here; --gpus starts all of them here."""
    return int(os.environ.get(HERE, ranks))


def is_torchruns() -> bool:
    return HERE in os.environ


def how_many(ranks: int) -> str:
    """The option that says so, of whoever starts them."""
    return f"--nproc-per-node {ranks}" if is_torchruns() else f"--gpus {ranks}"


def check_ranks(hardware: Hardware, ranks: int, layout: Layout | None = None, beside: Beside = ALONE) -> Hardware:
    """The machine with that many ranks on it. More than one per device is refused; what is proposed holds their layout
    (None: they differ in their data alone) and goes with the batch `beside` it, if any number does."""
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
    """The fix: as many ranks of a machine as there may be and as its layout can take, or that it can take none."""
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
    """Ranks that make sense there: four on a core, and always as many as try tensor, pipeline and data at once."""
    return max(LEAST_ON_CPU, RANKS_PER_CORE * cores)


# --- what their steps may hold ----------------------------------------------------------------------------------------


def usual_way(layout: Layout) -> str:
    """How ranks with data of their own share a step where nobody says it: copies that are cut are FSDP's."""
    return DDP if layout.replicas == 1 else FSDP


def ranked_rungs(rungs: Collection[str], layout: Layout) -> tuple[str, ...]:
    """What ranks in this layout begin with: these rungs, its cuts, and their way to share a step or the usual one.
    Where nobody has data of their own there is none."""
    if layout.ranks == 1:
        return tuple(rungs)
    cuts, ways = cuts_of(rungs, layout), [name for name in rungs if is_way(name)]
    others = [*(name for name in rungs if name not in (*cuts, *ways)), *cuts]
    return tuple(others) if layout.data == 1 else with_parallel(others, (*ways, usual_way(layout))[0])


def is_way(name: str) -> bool:
    return group_of(find_rung(name)) == DDP


def not_measured(name: str, layout: Layout) -> str | None:
    """Why a rung is no choice of a ladder, a tune or a profile in this layout, whatever the machine is; None for
    most."""
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
    """Why a rung gets no place beside the ways in which ranks share the step so far, or None: one of them may not go
    with it, or may undo it."""
    for way in (name for name in onto if name in RANK_RUNGS and name != rung.name):
        rest = [name for name in onto if name != way]
        reason = why_not(find_rung(way), workload, hardware, plan_of((*rest, rung.name)))
        if reason is not None:
            return reason
    undoer = who_undoes(rung.name, onto)
    return None if undoer is None else f"{undoer} undoes it: the step would be the same"


def who_undoes(name: str, others: Collection[str]) -> str | None:
    """The way to share a step, among these, beside which the rung changes nothing, though it would without it."""
    if plan_of((*others, name)) != plan_of(others):
        return None
    ways = (one for one in others if one in RANK_RUNGS and one != name)
    rests = {way: [one for one in others if one != way] for way in ways}
    return next((way for way, rest in rests.items() if plan_of((*rest, name)) != plan_of(rest)), None)


def undone_in(names: Collection[str]) -> dict[str, str]:
    """Rungs of a recipe that change nothing beside the ways in which its ranks share a step: by name, who undoes it."""
    found = {name: who_undoes(name, [one for one in names if one != name]) for name in names}
    return {name: way for name, way in found.items() if way is not None and name not in RANK_RUNGS}


def notes_of_rungs(names: Collection[str], layout: Layout) -> Iterator[str]:
    """Of a recipe in this layout, what to say of rungs that change nothing: degrees of one have none, and what those
    would undo stays (`for_layout`)."""
    counting = for_layout(names, layout)
    for name in (one for one in names if one in OF_LAYOUTS and one not in counting):
        yield f"{name} changes nothing here: it takes {OF_LAYOUTS[name]} 2 or more"
    for name, way in undone_in(counting).items():
        yield f"{name} changes nothing here: {way} undoes it"


def usual_beside(cuts: Collection[str], workload: Workload, hardware: Hardware) -> tuple[str, ...]:
    """The usual rungs, without those that a layout's cuts refuse or undo."""
    usual = usual_rungs(workload, hardware)
    return tuple(name for name in usual if refused_beside(find_rung(name), cuts, workload, hardware) is None)


def check_shareable(workload: Workload, hardware: Hardware) -> None:
    """The loss of a model that is no mean over its samples is another one when ranks average theirs."""
    if hardware.ranks > 1 and not workload.splits:
        raise UserError(
            f"--gpus {hardware.ranks} with {workload.name}",
            "its loss of a batch is not the mean over the parts of it, so that ranks would train another model",
            "leave --gpus out, or let the loss be a mean over the samples",
        )


def check_global_batch(global_batch: int | None, ranks: int) -> None:
    """Every rank takes the same part of an update."""
    if global_batch is not None and global_batch % ranks:
        below = global_batch // ranks * ranks
        near = " or ".join(str(size) for size in (below, below + ranks) if size)
        raise UserError(
            f"a global batch of {global_batch} does not divide among {ranks} ranks",
            "every rank takes as many sequences of an update as the others",
            f"use --global-batch {near}",
        )


def rate_of_ranks(shape: Shape | Traced, plan: Plan, micro_batch: int, hardware: Hardware) -> float | None:
    """As `redline estimate --gpus N` predicts it; None where device, link or model are not known."""
    device = hardware.device
    ranks = hardware.arranged
    case = case_of(shape, plan, ranks)
    if device is None or not isinstance(case, Case):
        return None
    layout = replace(case.layout or Cut(gpus=ranks.ranks), micro_batch=micro_batch)
    fabric = Fabric(gpus_per_node=hardware.ranks, links=choose_links(None, device))
    return predict_parallel(replace(case, layout=layout), fabric, expected_peaks(plan, device, None)).tokens_per_second
