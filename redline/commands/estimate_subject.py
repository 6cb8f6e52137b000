"""Chooses what `redline estimate` predicts, from options and files: the device, the model and its sizes, and the plan.

    target = choose_machine(options)                         # the named GPU, or this machine's
    subject = choose_subject(options, target)                # a model of known shape; choose_traced: a user's file

Whatever is not given is chosen here, with a note; predict/estimate.py computes the numbers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redline.commands.estimate_layout import (
    LAYOUT,
    arguments_to_measure,
    check_cut,
    choose_fabric,
    choose_instead,
    choose_layout,
    choose_trainable,
    how_to_train,
    recommended,
    undone_notes,
)
from redline.commands.estimate_rungs import asked_workload, choose_rungs, tied_as_published

if TYPE_CHECKING:
    from redline.core.devices import Device
    from redline.core.hardware import Hardware
    from redline.core.workload import Shape, Workload
    from redline.predict.estimate import Subject, Target
    from redline.predict.traced_estimate import TracedSubject
    from redline.workloads import Resolved

AS_THE_PLAN = "plan"  # --inference without a value


# the device


def choose_machine(options: argparse.Namespace) -> Target:
    """Return the named device, or this machine's GPU. A CPU is no device here: memory and FLOPs do not depend on it."""
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
    """Return a machine with this device, for `Rung.needs`: the rules of engine/probe.py, applied to the data sheet. An
    unknown device is assumed to support everything."""
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


# a user's own model


def choose_traced(options: argparse.Namespace, machine: Target) -> TracedSubject:
    """Return a subject for a user's file, whose model is run once on the host to trace it."""
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
        ("replicas", 1),
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

    words, micro_batch = rungs_and_batch(options)
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


def rungs_and_batch(options: argparse.Namespace) -> tuple[str | None, int | None]:
    """Return the rungs and the micro batch, from the options or a recipe. A recipe's rungs for ranks are left out:
    `with_zero` and the layout options cover them."""
    from redline.core.recipe import load_recipe
    from redline.rungs.parallel import RANK_RUNGS

    if options.recipe is None:
        return options.rungs, options.micro_batch
    recipe = load_recipe(Path(options.recipe))
    own = ",".join(name for name in recipe.rungs if name not in RANK_RUNGS)
    return own or "none", options.micro_batch or recipe.micro_batch


# a model of known shape


def choose_subject(options: argparse.Namespace, machine: Target) -> Subject:
    from redline.core.workload import other_than_gpt2
    from redline.predict.estimate import Subject, many_peaks
    from redline.predict.fitting import Case
    from redline.rungs import plan_of
    from redline.search.trained import WHOLE_IN_STAGES
    from redline.workloads import resolve_shape

    resolved = resolve_shape(options.workload)
    words, micro_batch = rungs_and_batch(options)
    options = argparse.Namespace(**{**vars(options), "micro_batch": micro_batch})
    shape, micro_batch, notes, sized = choose_sizes(options, resolved)
    rungs, assumed = choose_rungs(words, asked_workload(shape, resolved.origin.config), machine, options.optimizer)
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
    # A layout that is recommended with sharding does not fit one GPU, where a ladder runs its baseline and reference.
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
        words=None
        if alone_too_large
        else arguments_to_measure(options.workload, resolved, shape, case, fabric, trained),
        train=None if fabric is None else how_to_train(trained, case, fabric),
        instead=None if fabric is None else choose_instead(options, case, fabric, machine, trained),
    )


def choose_sizes(
    options: argparse.Namespace, resolved: Resolved
) -> tuple[Shape, int, tuple[str, ...], tuple[str, ...]]:
    """Return the shape, the micro batch and two groups of notes; the second, on the micro batch, does not count where a
    recommended layout has its own. The sequence length does not change how many positions the model has learned."""
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
