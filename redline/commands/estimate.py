"""`redline estimate`: parameters, FLOPs, memory and speed of a training step, worked out and not run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import EXIT_DONE, add_common, check_sizes, command_line
from redline.core.errors import UserError
from redline.core.units import counted

if TYPE_CHECKING:
    from redline.core.devices import Device
    from redline.core.hardware import Hardware
    from redline.core.workload import Shape, Workload
    from redline.predict.communication import Fabric
    from redline.predict.estimate import Subject, Target
    from redline.predict.fitting import Case
    from redline.predict.layouts import Recommendation
    from redline.predict.parallel import Layout
    from redline.predict.roofline import Peaks
    from redline.predict.traced_estimate import TracedSubject
    from redline.search.trained import Trainable
    from redline.workloads import Resolved

DEFAULT_WORKLOAD = "gpt2"
TIED = "tied-weights"
COUNTS = ("micro_batch", "sequence", "global_batch", "gpus", "nodes", "dp", "tensor", "pipeline", "replicas")
LAYOUT = ("dp", "tensor", "pipeline", "zero")  # options that name a layout: without any of them one is recommended
LEFT_OUT = "only what redline train runs is recommended: no ZeRO 1 and 2, and no ZeRO in a pipeline"
AS_THE_PLAN = "plan"  # --inference without a word


def add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="predict memory, FLOPs and speed without running anything",
        description="Parameters, FLOPs, memory by category, the largest micro batch and the roofline of a training "
        "step: arithmetic, no device needed.",
        epilog="Exit codes: 0 done; 2 a mistake in the command. What is not known is null, or a dash.",
    )
    estimate.add_argument(
        "workload",
        nargs="?",
        default=DEFAULT_WORKLOAD,
        metavar="WORKLOAD",
        help="a preset, a Hugging Face config.json, a model folder, a shape file, or FILE.py:FACTORY (default: gpt2)",
    )
    estimate.add_argument("--gpu", metavar="NAME", help="the device, such as A100-80 (default: this machine's, if any)")
    estimate.add_argument("--micro-batch", metavar="N", type=int, help="sequences, or samples, per GPU and pass")
    estimate.add_argument(
        "--sequence", metavar="N", type=int, help="tokens of context (default: the model's, 4096 at most)"
    )
    estimate.add_argument(
        "--rungs",
        metavar="A,B,...",
        help="the optimisations (default: all that apply on the device; 'none': the baseline)",
    )
    estimate.add_argument("--from", dest="recipe", metavar="RECIPE", help="rungs and micro batch of a recipe file")
    estimate.add_argument(
        "--optimizer", metavar="NAME", help="another optimizer, such as lion or adamw-8bit: short for its rung"
    )
    estimate.add_argument(
        "--gpus", metavar="N", type=int, help="GPUs in all (default: 1); a layout is recommended unless one is named"
    )
    estimate.add_argument("--nodes", metavar="N", type=int, help="machines that hold them (default: 8 GPUs in each)")
    estimate.add_argument(
        "--interconnect",
        metavar="NAME[,NAME]",
        help="what joins the GPUs of a node, and the nodes, such as nvlink,ib-400 (default: an SXM card's own NVLink; "
        "no network is assumed)",
    )
    add_layout(estimate)
    estimate.add_argument("--global-batch", metavar="N", type=int, help="sequences per step of all GPUs")
    estimate.add_argument(
        "--inference",
        nargs="?",
        const=AS_THE_PLAN,
        metavar="PRECISION",
        help="generate instead of train; weights in fp32, mixed, half or int8 (default: as the rungs say)",
    )
    estimate.add_argument(
        "--operations", action="store_true", help="show the most expensive operations too (--json has all of them)"
    )
    add_common(estimate)
    estimate.set_defaults(run=run_estimate)


def add_layout(estimate: argparse.ArgumentParser) -> None:
    """As `redline train` has them, and what it has not: ZeRO stages of their own. The short names are older."""
    estimate.add_argument("--parallel", metavar="WAY", help="how GPUs share a step: ddp, fsdp or fsdp-keep")
    estimate.add_argument("--tensor", metavar="N", type=int, help="GPUs that hold each layer together: TP (default: 1)")
    estimate.add_argument(
        "--pipeline", metavar="N", type=int, help="stages that hold the layers in turn: PP (default: 1)"
    )
    estimate.add_argument(
        "--dp", metavar="N", type=int, help="copies with data of their own (default: what is left of the GPUs)"
    )
    estimate.add_argument(
        "--zero", metavar="STAGE", type=int, help="instead of --parallel: ZeRO 0 (ddp) to 3 (fsdp) (default: 0)"
    )
    for short, name in (("--tp", "tensor"), ("--pp", "pipeline")):
        estimate.add_argument(short, dest=name, type=int, help=argparse.SUPPRESS)
    estimate.add_argument("--replicas", type=int, help=argparse.SUPPRESS)


def run_estimate(options: argparse.Namespace) -> int:
    found = estimate(options)
    if options.json:
        print(json.dumps(found))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.estimate import print_estimate

    print_estimate(found, Console(), operations=options.operations)
    return EXIT_DONE


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """The document that --json prints."""
    from redline.predict.estimate import document
    from redline.workloads.python_file import is_python_file

    check_options(options)
    options = with_zero(options)
    machine = choose_machine(options)
    if is_python_file(options.workload):
        from redline.predict.traced_estimate import traced_document

        return {"command": command_line(), **traced_document(choose_traced(options, machine), machine)}
    return {"command": command_line(), **document(choose_subject(options, machine), machine)}


def check_options(options: argparse.Namespace) -> None:
    from redline.predict.parallel import USUAL_NODE

    check_sizes(options, COUNTS)
    if options.nodes not in (None, 1) and options.gpus is None and options.dp is None:
        raise UserError(
            f"--nodes {options.nodes} without --gpus",
            "nodes hold GPUs, and how many there are in all was not said",
            f"say --gpus {options.nodes * USUAL_NODE} too, or as many as there are",
        )
    if options.replicas not in (None, 1):
        raise UserError(
            f"--replicas {options.replicas} is not predicted",
            "copies that are cut in themselves send other traffic than fsdp among all GPUs, and nobody has modelled it",
            "leave it out; what a GPU holds is what --parallel fsdp predicts with the --gpus of one copy",
        )
    if options.recipe is not None and options.rungs is not None:
        raise UserError("--from and --rungs were given together", "a recipe has its own rungs", "drop one of them")
    if options.inference is not None:
        for name in ("optimizer", "global_batch", "parallel", "zero", "interconnect"):
            if getattr(options, name) not in (None, 0):
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} with --inference", "only training has it", f"drop {option}")


def with_zero(options: argparse.Namespace) -> argparse.Namespace:
    """--parallel in the words that predictions have."""
    from redline.core.errors import unknown_name
    from redline.predict.fitting import ZERO
    from redline.rungs.parallel import WAYS

    if options.parallel is None:
        return options
    if options.zero is not None:
        raise UserError("--parallel and --zero were given together", "each says how GPUs share a step", "drop one")
    if options.parallel not in WAYS:
        raise unknown_name("way to share a step", options.parallel, WAYS)
    return argparse.Namespace(**{**vars(options), "zero": ZERO[options.parallel]})


# the device


def choose_machine(options: argparse.Namespace) -> Target:
    """The device that was named, or this machine's GPU. A CPU is none: memory and FLOPs do not depend on it."""
    from redline.core.devices import find_device
    from redline.machine import find_measured, this_machine
    from redline.predict.estimate import Target

    if options.gpu is not None:
        device = find_device(options.gpu)
        measured, notes = find_measured(device.names)
        return Target(
            device=device,
            memory_bytes=device.memory_bytes,
            hardware=hardware_of(device),
            measured=measured,
            notes=notes,
        )
    machine = this_machine()
    measured, notes = find_measured(machine.known.names, machine.driver) if machine.known else (None, ())
    return Target(
        device=machine.known,
        memory_bytes=machine.memory_bytes if machine.kind == "cuda" else None,
        hardware=hardware_of(machine.known),
        measured=measured,
        reason=None if machine.known else f"{machine.name}: {machine.reason} (--gpu NAME predicts for any)",
        notes=notes,
    )


def hardware_of(device: Device | None) -> Hardware:
    """A machine with this device, for `Rung.needs`: the rules of engine/probe.py, from the data sheet. An unknown
    device is taken for one that can do everything."""
    from redline.core.hardware import Hardware

    features = {"tf32", "bf16", "fp16", "compile", "triton", "flash", "cudnn-attention", "fp8"}
    missing: dict[str, str] = {}
    if device is not None:
        lacks = {dtype for dtype in ("tf32", "bf16", "fp16", "fp8") if dtype not in device.peak_tflops}
        if "bf16" in lacks:
            lacks |= {"flash", "cudnn-attention"}  # both came with the generation that brought bf16
        if device.vendor != "NVIDIA":
            lacks |= {"cudnn-attention", "fp8"}
        missing = {feature: f"{device.label} has no {feature}" for feature in lacks}
    return Hardware(
        kind="cuda",
        name="a GPU" if device is None else device.names[0],
        cpu_cores=8,
        features=tuple(sorted(features - missing.keys())),
        missing=missing,
    )


# the subject


def choose_traced(options: argparse.Namespace, machine: Target) -> TracedSubject:
    """A user's file: the model is run once, on the host, to see what it is."""
    from redline.search.inspect import find_workload

    check_one_gpu(options)
    workload = find_workload(options.workload, sequence=options.sequence)
    return replace(traced_subject(options, machine, workload, f"Python file {options.workload}"), words=workload.words)


def check_one_gpu(options: argparse.Namespace) -> None:
    from redline.predict.traced import one_gpu_only

    for name, plain in (
        ("gpus", 1),
        ("nodes", 1),
        ("dp", 1),
        ("tensor", 1),
        ("pipeline", 1),
        ("parallel", "ddp"),
        ("zero", 0),
    ):
        if getattr(options, name) not in (None, plain):
            raise one_gpu_only("--" + name)
    for name in ("interconnect", "inference", "global_batch"):
        if getattr(options, name) is not None:
            raise one_gpu_only("--" + name.replace("_", "-"))


def traced_subject(options: argparse.Namespace, machine: Target, workload: Workload, origin: str) -> TracedSubject:
    from redline.core.traced import Traced
    from redline.predict.fitting import TracedCase
    from redline.predict.traced_estimate import TracedSubject
    from redline.rungs import plan_of

    words, micro_batch = words_of(options)
    micro_batch = micro_batch or workload.micro_batch
    rungs, assumed = choose_rungs(words, workload, machine, options.optimizer)
    assert isinstance(workload.shape, Traced)
    return TracedSubject(
        name=workload.name,
        origin=origin,
        case=TracedCase(shape=workload.shape, plan=plan_of(rungs)),
        rungs=rungs,
        micro_batch=micro_batch,
        notes=(*assumed, *workload.notes),
    )


def words_of(options: argparse.Namespace) -> tuple[str | None, int | None]:
    """Rungs and micro batch as given, by options or by a recipe."""
    from redline.core.recipe import load_recipe

    if options.recipe is None:
        return options.rungs, options.micro_batch
    recipe = load_recipe(Path(options.recipe))
    return ",".join(recipe.rungs) or "none", options.micro_batch or recipe.micro_batch


def choose_subject(options: argparse.Namespace, machine: Target) -> Subject:
    from redline.core.workload import other_than_gpt2
    from redline.predict.estimate import Subject, many_peaks
    from redline.predict.fitting import Case
    from redline.rungs import plan_of
    from redline.search.trained import WHOLE_IN_STAGES
    from redline.workloads import resolve_shape

    resolved = resolve_shape(options.workload)
    words, micro_batch = words_of(options)
    options = argparse.Namespace(**{**vars(options), "micro_batch": micro_batch})
    shape, micro_batch, notes, sized = choose_sizes(options, resolved)
    rungs, assumed = choose_rungs(words, _workload(shape, resolved.origin.config), machine, options.optimizer)
    if resolved.origin.kind != "preset":
        rungs, tying = tied_as_published(rungs, shape)
        assumed += tying
    if resolved.origin.kind == "huggingface" and not other_than_gpt2(shape):
        assumed += ("memory is that of redline's own GPT-2: transformers' code keeps other tensors",)
    case = Case(
        shape=shape,
        plan=plan_of(rungs),
        zero=options.zero or 0,
        inference=False if options.inference is None else options.inference == AS_THE_PLAN or options.inference,
    )
    check_cut(options, shape)
    fabric, joined = choose_fabric(options, machine)
    trained = choose_trainable(options, resolved, shape, rungs, machine)
    advice, named = None, any(getattr(options, name) is not None for name in LAYOUT)
    if fabric is not None and machine.memory_bytes is not None and not named:
        advice, why = recommended(options, case, fabric, machine.memory_bytes, many_peaks(case, machine), trained)
        case = replace(case, layout=advice.best.layout, zero=advice.best.zero, plan=advice.best.plan)
        micro_batch, notes = advice.best.layout.micro_batch, (*notes, *why)
    else:
        notes += sized
        layout = choose_layout(options, micro_batch, shape)
        plan = None if fabric is None else trained.plan(layout.tp, layout.pp, case.zero)
        case = replace(case, layout=layout, plan=plan or case.plan)
        notes += (WHOLE_IN_STAGES,) if fabric is not None and layout.pp > 1 and case.zero == 3 else ()
        if layout.pp > 1 and options.global_batch is None:
            notes += ("one micro batch is in the pipeline at a time; --global-batch says how many wait in its stages",)
    assert case.layout is not None
    # What is recommended to be sharded does not fit one GPU, where a ladder has its baseline and its reference.
    alone_too_large = advice is not None and case.zero > 0
    return Subject(
        name=resolved.name,
        origin=resolved.origin.text,
        case=case,
        rungs=rungs,
        micro_batch=micro_batch,
        layout=case.layout,
        notes=(*notes, *joined, *assumed, *undone_notes(trained, case), *resolved.origin.notes),
        fabric=fabric,
        advice=advice,
        words=None if alone_too_large else words_to_measure(options.workload, resolved, shape, case, fabric, trained),
        train=None if fabric is None else how_to_train(trained, case, fabric),
    )


def choose_trainable(
    options: argparse.Namespace, resolved: Resolved, shape: Shape, rungs: tuple[str, ...], machine: Target
) -> Trainable:
    """What `redline train` would make of these words on several GPUs."""
    from redline.core.workload import BUILT_IN, Source, other_than_gpt2
    from redline.search.trained import Trainable

    config = resolved.origin.config
    own = resolved.origin.kind == "shape" and other_than_gpt2(shape)
    return Trainable(
        words=None if own else words_to_train(options.workload, resolved, shape),
        rungs=rungs,
        workload=replace(
            _workload(shape, config),
            source=BUILT_IN if config is None else Source(kind="huggingface", config=config),
        ),
        hardware=machine.hardware,
        gpus=all_gpus(options),
        own_recipe=options.recipe if options.optimizer is None else None,
        usual=options.rungs is None and options.recipe is None and options.optimizer is None,
        way=options.parallel,
    )


def undone_notes(trained: Trainable, case: Case) -> tuple[str, ...]:
    """Rungs that were assumed or named, and that the layout does without."""
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


def choose_sizes(
    options: argparse.Namespace, resolved: Resolved
) -> tuple[Shape, int, tuple[str, ...], tuple[str, ...]]:
    """The tokens read at once; how many positions the model has learned does not change with them. Two kinds of notes:
    those of the micro batch do not count where a recommended layout has its own."""
    from redline.commands.lint import USUAL_SEQUENCE, choose_micro_batch

    shape = resolved.shape
    sequence = options.sequence or min(shape.sequence, USUAL_SEQUENCE)
    notes: tuple[str, ...] = ()
    if options.sequence is None and sequence < shape.sequence:
        notes = (f"sequences of {sequence} tokens are assumed, the context is {shape.sequence} (--sequence)",)
    if sequence > shape.positions_count and shape.positions != "learned":  # learned ones are refused by Shape
        notes = (f"sequences of {sequence} tokens are longer than the context of {shape.positions_count}",)
    micro_batch, assumed = choose_micro_batch(options, resolved, sequence)
    positions = shape.positions_count if shape.positions == "learned" else shape.max_positions
    return replace(shape, sequence=sequence, max_positions=positions), micro_batch, notes, assumed


def words_to_measure(
    words: str, resolved: Resolved, shape: Shape, case: Case, fabric: Fabric | None, trained: Trainable
) -> str | None:
    """What `redline ladder` takes for these very sizes; None where it does not, or where a model is cut. Its ranks are
    on one machine."""
    from redline.workloads import PRESETS
    from redline.workloads.resolve import usual_training

    assert case.layout is not None
    layout, taken = case.layout, words_to_train(words, resolved, shape)
    if resolved.origin.kind == "shape" or taken is None or layout.dp < layout.gpus:
        return None
    preset = PRESETS.get(words)
    size = preset.micro_batch if preset else usual_training(shape)[1]
    taken = taken if layout.micro_batch == size else f"{taken} --micro-batch {layout.micro_batch}"
    if fabric is None:
        return taken
    if fabric.gpus_per_node < layout.gpus or trained.reasons(1, 1, case.zero):
        return None
    taken = f"{taken} --gpus {layout.gpus}"
    return f"{taken} --rungs {','.join(trained.names(1, 1, case.zero))}" if case.zero else taken


def words_to_train(words: str, resolved: Resolved, shape: Shape) -> str | None:
    """The workload with its sequence, where a command would take another; None beyond the model's positions."""
    from redline.workloads import PRESETS
    from redline.workloads.resolve import USUAL_SEQUENCE

    if shape.sequence > resolved.shape.positions_count:
        return None
    usual = resolved.shape.sequence if words in PRESETS else min(resolved.shape.sequence, USUAL_SEQUENCE)
    return words if shape.sequence == usual else f"{words} --sequence {shape.sequence}"


# the rungs


def choose_rungs(
    words: str | None, workload: Workload, machine: Target, optimizer: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rungs in the ladder's order, and notes. Named ones must apply; without a name it is all that do. An optimizer's
    rung takes the place of the one among them."""
    from redline.rungs import find_rung, usual_rungs
    from redline.rungs.ladder import LADDER, check_alternatives, with_optimizer

    if words is None:
        named: Iterable[str] = usual_rungs(workload, machine.hardware)
    else:
        named = [] if words.strip() == "none" else [find_rung(word.strip()).name for word in words.split(",")]
    chosen = tuple(rung.name for rung in LADDER[1:] if rung.name in named)
    check_alternatives(chosen)
    if optimizer is not None:
        chosen = with_optimizer(chosen, optimizer)
    check_rungs_apply(chosen, workload, machine)
    return chosen, () if words is not None else (f"rungs assumed: {', '.join(chosen)} (--rungs)",)


def check_rungs_apply(names: Iterable[str], workload: Workload, machine: Target) -> None:
    from redline.core.plan import Plan
    from redline.rungs import find_rung, why_not

    plan = Plan()
    for rung in map(find_rung, names):
        reason = why_not(rung, workload, machine.hardware, plan)
        if reason is not None:
            raise UserError(
                f"{rung.name} does not apply", reason, f"leave {rung.name} out of the rungs, or choose another --gpu"
            )
        plan = rung.apply(plan)


def tied_as_published(rungs: tuple[str, ...], shape: Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ladder unties GPT-2 to show what tying does. Another model is what its config says."""
    from redline.rungs import LADDER

    if (TIED in rungs) == shape.tied:
        return rungs, ()
    if not shape.tied:
        kept = tuple(name for name in rungs if name != TIED)
        return kept, (f"{TIED} is left out: this model has a head of its own",)
    ordered = tuple(rung.name for rung in LADDER if rung.name in (*rungs, TIED))
    return ordered, (f"{TIED} is taken: this model's head is its embedding",)


def _workload(shape: Shape, config: dict[str, Any] | None) -> Workload:
    """What a rung asks of a workload is its shape and what its code allows; the rest of it is filled in."""
    from redline.core.workload import Workload
    from redline.workloads.huggingface import obstacles

    cannot = {} if config is None else obstacles(config, shape)
    cannot.pop(TIED, None)  # `tied_as_published` sees to that, with a note
    return Workload(name="estimate", shape=shape, tokenizer="gpt2", micro_batch=1, learning_rate=1e-3, cannot=cannot)


# the layout


def check_cut(options: argparse.Namespace, shape: Shape) -> None:
    """Where --dp is given, which `all_gpus` asks: the model first, so that what is proposed then is possible for it."""
    from redline.predict.parallel import gpus_in_a_node, layout_for_batch

    if options.dp is None:
        return
    cut = {"tp": options.tensor or 1, "pp": options.pipeline or 1}
    gpus = options.gpus or math.prod((options.dp, *cut.values()))
    node = partial(gpus_in_a_node, nodes=options.nodes)
    node(gpus)  # refuses by itself
    try:
        layout_for_batch(gpus=gpus, **cut, micro_batch=1, shape=shape, gpus_per_node=node)
    except UserError as error:
        on = "" if options.gpus else f" with --gpus {gpus}"
        raise UserError(error.problem, error.why, f"{error.fix}{on}; leave --dp out") from error


def all_gpus(options: argparse.Namespace) -> int:
    """As many as were named, or as the layout takes; a DP that does not go with them is refused."""
    from redline.predict.parallel import check_product

    tp, pp = options.tensor or 1, options.pipeline or 1
    if options.dp is None:
        return options.gpus or 1
    gpus: int = options.dp * tp * pp if options.gpus is None else options.gpus
    check_product(gpus, dp=options.dp, tp=tp, pp=pp)
    return gpus


def choose_fabric(options: argparse.Namespace, machine: Target) -> tuple[Fabric | None, tuple[str, ...]]:
    """What joins several GPUs that train, and a note where the nodes are assumed. One GPU, and inference, have none."""
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
    """All layouts are compared at one global batch: the one that was named, or a usual one. They are those that train
    can run, as it runs them; where it runs none, with these rungs, they are all."""
    from redline.predict.layouts import Search, recommend, usual_global_batch

    gpus, given = all_gpus(options), options.global_batch
    usual = usual_global_batch(case.shape, gpus, options.micro_batch or 1)
    search = Search(
        case=case,
        fabric=fabric,
        gpus=gpus,
        memory_bytes=memory_bytes,
        global_batch=usual if given is None else given,
        micro_batch=options.micro_batch,
        peaks=peaks[0],
        reason=peaks[1],
        plan_of=None if trained.reasons(1, 1, 0) else trained.advisable_plan,
    )
    size = f"a global batch of {usual:,} sequences, {usual * case.shape.sequence:,} tokens,"
    notes = () if given is not None else (f"{size} is assumed (--global-batch)",)
    return recommend(search), notes if search.plan_of is None else (*notes, LEFT_OUT)


def choose_layout(options: argparse.Namespace, micro_batch: int, shape: Shape) -> Layout:
    from redline.predict.memory import check_replicas
    from redline.predict.parallel import gpus_in_a_node, layout_for_batch

    gpus = all_gpus(options)
    layout = layout_for_batch(
        gpus=gpus,
        tp=options.tensor or 1,
        pp=options.pipeline or 1,
        micro_batch=micro_batch,
        global_batch=options.global_batch,
        shape=shape,
        gpus_per_node=partial(gpus_in_a_node, nodes=options.nodes),
    )
    if options.parallel is not None and options.zero and layout.dp == 1:
        raise UserError(
            f"--parallel {options.parallel} with one copy of the model",
            "data-parallel GPUs share what a copy holds, and here is nobody to share with",
            "use more GPUs, or leave --parallel out",
        )
    check_replicas(options.zero or 0, layout)
    return layout
