"""Several GPUs in `redline estimate`: the layout that is named or recommended, and the command that trains with it.

    fabric, notes = choose_fabric(options, target)           # None for one GPU, and for inference
    layout = choose_layout(options, micro_batch, shape)      # as named; `recommended` if none was
    how_to_train(trained, case, fabric) -> {"command": "redline train gpt2 --gpus 8 ...", "reason": None}

Sizes that do not divide are refused with ones that do (predict/parallel.py). For one GPU, only `choose_layout` and
`arguments_to_measure` apply.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from redline.commands.estimate_rungs import asked_workload
from redline.core.errors import UserError
from redline.core.units import counted

if TYPE_CHECKING:
    from redline.core.workload import Shape
    from redline.predict.communication import Fabric
    from redline.predict.estimate import Target
    from redline.predict.fitting import Case
    from redline.predict.layouts import Recommendation, Search
    from redline.predict.parallel import Beside, Layout
    from redline.predict.roofline import Peaks
    from redline.predict.shortage import Instead
    from redline.search.trained import Trainable
    from redline.workloads import Resolved

LAYOUT = (
    "dp",
    "tensor",
    "pipeline",
    "zero",
    "replicas",
)  # options that name a layout; if none is given, one is recommended
LEFT_OUT = (
    "only what redline train runs as it is predicted is recommended: not ZeRO 1 and 2, which it has not, nor ZeRO in a "
    "pipeline, where it holds more"
)


def check_cut(options: argparse.Namespace, shape: Shape) -> None:
    """With --dp, check the other cuts against the model before `all_gpus` checks their product, so that what is
    proposed then is possible for the model."""
    from redline.predict.parallel import gpus_in_a_node, layout_for_batch

    if options.dp is None:
        return
    cut = {"tp": options.tensor or 1, "pp": options.pipeline or 1}
    gpus = options.gpus or math.prod((options.dp, *cut.values()))
    node = partial(gpus_in_a_node, nodes=options.nodes)
    node(gpus)  # raises if the nodes do not divide the GPUs
    try:
        layout_for_batch(gpus=gpus, **cut, micro_batch=1, shape=shape, gpus_per_node=node, beside=beside(options))
    except UserError as error:
        on = "" if options.gpus else f" with --gpus {gpus}"
        raise UserError(error.problem, error.why, f"{error.fix}{on}; leave --dp out") from error


def beside(options: argparse.Namespace) -> Beside:
    """Return the batch and the replicas that the options ask for."""
    from redline.predict.parallel import Beside

    return Beside(micro_batch=options.micro_batch or 1, batch=options.global_batch, replicas=options.replicas or 1)


def all_gpus(options: argparse.Namespace) -> int:
    """Return --gpus, or as many as the layout takes. A --dp that does not match --gpus is refused."""
    from redline.predict.parallel import check_product

    tp, pp = options.tensor or 1, options.pipeline or 1
    if options.dp is None:
        return options.gpus or 1
    gpus: int = options.dp * tp * pp if options.gpus is None else options.gpus
    check_product(gpus, dp=options.dp, tp=tp, pp=pp, beside=beside(options))
    return gpus


def choose_fabric(options: argparse.Namespace, machine: Target) -> tuple[Fabric | None, tuple[str, ...]]:
    """Return what joins several GPUs that train, and a note on assumed nodes; None for one GPU and for inference."""
    from redline.core.interconnects import choose_links
    from redline.predict.communication import Fabric
    from redline.predict.parallel import gpus_in_a_node

    gpus = all_gpus(options)
    links = choose_links(options.interconnect, machine.device)
    in_a_node = gpus_in_a_node(gpus, options.nodes)
    if gpus == 1 or options.inference is not None:
        return None, ()
    assumed = options.nodes is None and in_a_node < gpus
    notes = (f"{gpus // in_a_node} nodes of {counted(in_a_node, 'GPU')} are assumed (--nodes)",) if assumed else ()
    return Fabric(gpus_per_node=in_a_node, links=links), notes


def recommended(
    options: argparse.Namespace,
    case: Case,
    fabric: Fabric,
    memory_bytes: int,
    peaks: tuple[Peaks | None, str | None],
    trained: Trainable,
) -> tuple[Recommendation, tuple[str, ...]]:
    """Return the recommended layout and notes. All layouts are compared at one global batch, given or usual."""
    from redline.predict.layouts import recommend, usual_global_batch

    given = options.global_batch
    usual = usual_global_batch(case.shape, trained.gpus, options.micro_batch or 1)
    search = search_of(options, case, fabric, memory_bytes, peaks, trained, usual if given is None else given)
    size = f"a global batch of {usual:,} sequences, {usual * case.shape.sequence:,} tokens,"
    notes = () if given is not None else (f"{size} is assumed (--global-batch)",)
    return recommend(search), notes if search.plan_of is None else (*notes, LEFT_OUT)


def search_of(
    options: argparse.Namespace,
    case: Case,
    fabric: Fabric,
    memory_bytes: int,
    peaks: tuple[Peaks | None, str | None],
    trained: Trainable,
    global_batch: int,
) -> Search:
    """Return a search of the layouts that `redline train` can run, with its plans; of all layouts if it refuses these
    rungs even with ddp."""
    from redline.predict.layouts import Search

    return Search(
        case=case,
        fabric=fabric,
        gpus=trained.gpus,
        memory_bytes=memory_bytes,
        global_batch=global_batch,
        micro_batch=options.micro_batch,
        peaks=peaks[0],
        reason=peaks[1],
        plan_of=None if trained.reasons(1, 1, 0) else trained.advisable_plan,
    )


def choose_instead(
    options: argparse.Namespace, case: Case, fabric: Fabric, target: Target, trained: Trainable
) -> Instead | None:
    """Return what fits these GPUs if this layout does not, with the command that trains with it. None if nothing fits,
    if this layout does, or if the memory is unknown."""
    from redline.predict.estimate import many_peaks
    from redline.predict.shortage import what_fits
    from redline.rungs import plan_of

    assert case.layout is not None
    if target.memory_bytes is None or case.memory(case.layout.micro_batch).total <= target.memory_bytes:
        return None
    free = replace(trained, way=None)  # --parallel was part of what does not fit
    plain = replace(case, plan=plan_of(trained.rungs))
    search = search_of(
        *(options, plain, fabric, target.memory_bytes, many_peaks(plain, target)), free, case.layout.global_batch
    )
    found = what_fits(search)
    if found is None:
        return None
    best = replace(case, layout=found.step.layout, zero=found.step.zero, plan=found.step.plan)
    return replace(found, command=how_to_train(free, best, fabric)["command"])


def choose_layout(options: argparse.Namespace, micro_batch: int, shape: Shape) -> Layout:
    from redline.predict.memory import check_replicas
    from redline.predict.parallel import check_cut_copies, gpus_in_a_node, layout_for_batch

    gpus = all_gpus(options)
    layout = layout_for_batch(
        gpus=gpus,
        tp=options.tensor or 1,
        pp=options.pipeline or 1,
        micro_batch=micro_batch,
        global_batch=options.global_batch,
        shape=shape,
        gpus_per_node=partial(gpus_in_a_node, nodes=options.nodes),
        replicas=options.replicas or 1,
    )
    check_cut_copies(layout.dp, layout.replicas)
    if layout.replicas > 1 and options.zero != 3:
        raise UserError(
            f"--replicas {layout.replicas} with {options.parallel or f'--zero {options.zero}'}",
            "only fsdp cuts a copy of the model among its GPUs: there is nothing else to cut",
            "say --parallel fsdp, or leave --replicas out",
        )
    if options.parallel is not None and options.zero and layout.dp == 1:
        raise UserError(
            f"--parallel {options.parallel} with one copy of the model",
            "data-parallel GPUs share what a copy holds, and here is nobody to share with",
            "use more GPUs, or leave --parallel out",
        )
    check_replicas(options.zero or 0, layout)
    return layout


# what train would run


def choose_trainable(
    options: argparse.Namespace, resolved: Resolved, shape: Shape, rungs: tuple[str, ...], machine: Target
) -> Trainable:
    """Return what `redline train` would run on several GPUs, given these options."""
    from redline.core.workload import BUILT_IN, Source, other_than_gpt2
    from redline.search.trained import Trainable

    config = resolved.origin.config
    own = resolved.origin.kind == "shape" and other_than_gpt2(shape)
    return Trainable(
        words=None if own else arguments_to_train(options.workload, resolved, shape),
        rungs=rungs,
        workload=replace(
            asked_workload(shape, config),
            source=BUILT_IN if config is None else Source(kind="huggingface", config=config),
        ),
        hardware=machine.hardware,
        gpus=all_gpus(options),
        own_recipe=options.recipe if options.optimizer is None else None,
        usual=options.rungs is None and options.recipe is None and options.optimizer is None,
        way=options.parallel,
    )


def undone_notes(trained: Trainable, case: Case) -> tuple[str, ...]:
    """Return notes on rungs, assumed or named, that change nothing in this layout."""
    from redline.search.ranks import undone_in

    assert case.layout is not None
    if case.layout.gpus == 1 or trained.reasons(case.layout.tp, case.layout.pp, case.zero):
        return ()
    undone = undone_in(trained.names(case.layout.tp, case.layout.pp, case.zero))
    return tuple(f"{name} changes nothing in this layout: {way} undoes it" for name, way in undone.items())


def how_to_train(trained: Trainable, case: Case, fabric: Fabric) -> dict[str, str | None]:
    assert case.layout is not None
    layout = case.layout
    reasons = trained.reasons(layout.tp, layout.pp, case.zero)
    if trained.words is None:
        reasons += (
            "a shape file is trained with the built-in GPT-2, which this is not: point at a Hugging Face config",
        )
    line = None if reasons else trained.line(layout, case.zero, fabric.gpus_per_node)
    return {"command": line, "reason": "; ".join(reasons) or None}


def arguments_to_measure(
    words: str, resolved: Resolved, shape: Shape, case: Case, fabric: Fabric | None, trained: Trainable
) -> str | None:
    """Return what to type after `redline ladder` to measure exactly these sizes. None if it cannot, as for a shape
    file, a model that is cut (TP or PP), or ranks on several machines."""
    from redline.workloads import PRESETS
    from redline.workloads.resolve import usual_training

    assert case.layout is not None
    layout, taken = case.layout, arguments_to_train(words, resolved, shape)
    if resolved.origin.kind == "shape" or taken is None or layout.dp < layout.gpus:
        return None
    preset = PRESETS.get(words)
    size = preset.micro_batch if preset else usual_training(shape)[1]
    taken = taken if layout.micro_batch == size else f"{taken} --micro-batch {layout.micro_batch}"
    if fabric is None:
        return taken
    if fabric.gpus_per_node < layout.gpus or trained.reasons(1, 1, case.zero):
        return None
    taken = f"{taken} --gpus {layout.gpus}" + (f" --replicas {layout.replicas}" if layout.replicas > 1 else "")
    return f"{taken} --rungs {','.join(trained.names(1, 1, case.zero))}" if case.zero else taken


def arguments_to_train(words: str, resolved: Resolved, shape: Shape) -> str | None:
    """Return the workload, with --sequence if a command would choose another; None beyond the model's positions."""
    from redline.workloads import PRESETS
    from redline.workloads.resolve import USUAL_SEQUENCE

    if shape.sequence > resolved.shape.positions_count:
        return None
    usual = resolved.shape.sequence if words in PRESETS else min(resolved.shape.sequence, USUAL_SEQUENCE)
    return words if shape.sequence == usual else f"{words} --sequence {shape.sequence}"
