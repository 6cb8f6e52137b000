"""`redline estimate`: parameters, FLOPs, memory and speed of a training step, worked out and not run."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import EXIT_DONE, add_common, command_line
from redline.core.errors import UserError

if TYPE_CHECKING:
    from redline.core.devices import Device
    from redline.core.hardware import Hardware, MeasuredPeaks
    from redline.core.plan import Plan
    from redline.core.workload import Shape
    from redline.predict.fitting import Case
    from redline.predict.memory import Memory
    from redline.predict.parallel import Layout
    from redline.predict.roofline import Peaks, Prediction, Roofline
    from redline.workloads import Resolved

DEFAULT_WORKLOAD = "gpt2"
MOST = {"micro_batch": 2**20, "sequence": 2**24, "gpus": 2**20, "tp": 1024, "pp": 4096, "global_batch": 2**30}
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
        help="a preset, a Hugging Face config.json, a model folder, or a shape file (default: gpt2)",
    )
    estimate.add_argument("--gpu", metavar="NAME", help="the device, such as A100-80 (default: this machine's, if any)")
    estimate.add_argument("--micro-batch", metavar="N", type=int, help="sequences per GPU and pass")
    estimate.add_argument(
        "--sequence", metavar="N", type=int, help="tokens of context (default: the model's, 4096 at most)"
    )
    estimate.add_argument(
        "--rungs",
        metavar="A,B,...",
        help="the optimisations (default: all that apply on the device; 'none': the baseline)",
    )
    estimate.add_argument("--from", dest="recipe", metavar="RECIPE", help="rungs and micro batch of a recipe file")
    estimate.add_argument("--optimizer", metavar="NAME", help="another optimizer, such as lion or adamw-8bit")
    estimate.add_argument("--gpus", metavar="N", type=int, default=1, help="GPUs in all (default: 1)")
    estimate.add_argument("--tp", metavar="N", type=int, default=1, help="tensor-parallel GPUs (default: 1)")
    estimate.add_argument("--pp", metavar="N", type=int, default=1, help="pipeline stages (default: 1)")
    estimate.add_argument(
        "--zero", metavar="STAGE", type=int, default=0, help="ZeRO stage 0 to 3; 3 is FSDP (default: 0)"
    )
    estimate.add_argument("--global-batch", metavar="N", type=int, help="sequences per step of all GPUs")
    estimate.add_argument(
        "--inference",
        nargs="?",
        const=AS_THE_PLAN,
        metavar="PRECISION",
        help="generate instead of train; weights in fp32, mixed, half or int8 (default: as the rungs say)",
    )
    add_common(estimate)
    estimate.set_defaults(run=run_estimate)


def run_estimate(options: argparse.Namespace) -> int:
    found = estimate(options)
    if options.json:
        print(json.dumps(found))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.estimate import print_estimate

    print_estimate(found, Console())
    return EXIT_DONE


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """The document that --json prints."""
    from redline.core.values import to_json
    from redline.predict.flops import parameters

    check_options(options)
    machine = choose_machine(options)
    subject = choose_subject(options, machine)
    case, micro_batch = subject.case, subject.micro_batch
    memory = case.memory(micro_batch)
    fits = None if machine.memory_bytes is None else memory.total <= machine.memory_bytes
    prediction, reason = predict_speed(subject, machine)
    speed = prediction.expected.tokens_per_second if prediction else None
    if fits is False:
        speed, reason = None, "it does not fit"
    elif speed is not None and subject.layout.gpus > 1:
        speed, reason = None, "the traffic between GPUs is not modelled: the roofline is that of one GPU alone"
    count = parameters(case.shape, case.plan.tied)
    return {
        "name": subject.name,
        "origin": subject.origin,
        "command": command_line(),
        "shape": to_json(case.shape),
        "settings": settings_json(subject),
        "hardware": machine.document(),
        "parameters": count.total,
        "parameter_groups": to_json(count),
        "flops_per_token": flops_json(case),
        "memory": memory_json(memory),
        "memory_detail": memory_detail(memory),
        "max_micro_batch": None if machine.memory_bytes is None else case.largest(machine.memory_bytes),
        "fits": fits,
        "what_to_change": changes_json(subject, machine),
        "roofline": None if prediction is None else roofline_json(prediction),
        "tokens_per_second": speed,
        "tokens_per_second_reason": reason,
        "batch": batch_json(subject.layout),
        "notes": [*machine.notes, *subject.notes],
    }


def check_options(options: argparse.Namespace) -> None:
    from redline.core.workload import check_positive

    for name, most in MOST.items():
        value, option = getattr(options, name), "--" + name.replace("_", "-")
        if value is None:
            continue
        check_positive(option, value)
        if value > most:
            raise UserError(f"{option} is {value:,}", f"nobody has that many (the most is {most:,})", f"check {option}")
    if options.recipe is not None and options.rungs is not None:
        raise UserError("--from and --rungs were given together", "a recipe has its own rungs", "drop one of them")
    if options.inference is not None:
        for name in ("optimizer", "global_batch", "zero"):
            if getattr(options, name):
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} with --inference", "only training has it", f"drop {option}")


# the device


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the step would run, as far as anyone knows."""

    device: Device | None
    memory_bytes: int | None
    hardware: Hardware
    """For the rungs, which say whether they apply."""
    measured: MeasuredPeaks | None = None
    reason: str | None = None
    """Why there is no device."""
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        device = self.device
        return {
            "name": None if device is None else device.label,
            "memory_bytes": self.memory_bytes,
            "peak_tflops": None if device is None else device.peak_tflops,
            "bandwidth": None if device is None else device.bandwidth,
            "source": None if device is None else device.source,
            "reason": self.reason,
        }


def choose_machine(options: argparse.Namespace) -> Target:
    """The device that was named, or this machine's GPU. A CPU is none: memory and FLOPs do not depend on it."""
    from redline.core.devices import find_device
    from redline.machine import find_measured, this_machine

    if options.gpu is not None:
        device = find_device(options.gpu)
        measured, notes = find_measured(device.names[0])
        return Target(
            device=device,
            memory_bytes=device.memory_bytes,
            hardware=hardware_of(device),
            measured=measured,
            notes=notes,
        )
    machine = this_machine()
    measured, notes = find_measured(machine.name, machine.driver) if machine.known else (None, ())
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

    features = {"tf32", "bf16", "fp16", "compile", "triton", "flash", "cudnn-attention"}
    missing: dict[str, str] = {}
    if device is not None:
        lacks = {dtype for dtype in ("tf32", "bf16", "fp16") if dtype not in device.peak_tflops}
        if "bf16" in lacks:
            lacks |= {"flash", "cudnn-attention"}  # both came with the generation that brought bf16
        if device.vendor != "NVIDIA":
            lacks |= {"tf32", "cudnn-attention"}
        missing = {feature: f"{device.label} has no {feature}" for feature in lacks}
    return Hardware(
        kind="cuda",
        name="a GPU" if device is None else device.names[0],
        cpu_cores=8,
        features=tuple(sorted(features - missing.keys())),
        missing=missing,
    )


# the subject


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is estimated, with a note for every choice that the user did not make."""

    name: str
    origin: str
    case: Case
    rungs: tuple[str, ...]
    micro_batch: int
    layout: Layout
    notes: tuple[str, ...]


def choose_subject(options: argparse.Namespace, machine: Target) -> Subject:
    from redline.core.recipe import load_recipe
    from redline.predict.fitting import Case
    from redline.predict.parallel import check_layout
    from redline.rungs import plan_of
    from redline.workloads import resolve_shape

    resolved = resolve_shape(options.workload)
    recipe = None if options.recipe is None else load_recipe(Path(options.recipe))
    if recipe is not None and options.micro_batch is None:
        options = argparse.Namespace(**{**vars(options), "micro_batch": recipe.micro_batch})
    shape, micro_batch, notes = choose_sizes(options, resolved)
    rungs, assumed = choose_rungs(options.rungs if recipe is None else ",".join(recipe.rungs) or "none", shape, machine)
    layout = choose_layout(options, micro_batch)
    check_layout(layout, shape)
    if layout.pp > 1 and options.global_batch is None:
        notes += ("one micro batch is in the pipeline at a time; --global-batch says how many wait in its stages",)
    if options.optimizer is not None:
        notes += (
            f"the roofline's update is that of {plan_of(rungs).optimizer}: only memory knows {options.optimizer}",
        )
    case = Case(
        shape=shape,
        plan=plan_of(rungs),
        layout=layout,
        zero=options.zero,
        optimizer=options.optimizer,
        inference=False if options.inference is None else options.inference == AS_THE_PLAN or options.inference,
    )
    return Subject(
        name=resolved.name,
        origin=resolved.origin.text,
        case=case,
        rungs=rungs,
        micro_batch=micro_batch,
        layout=layout,
        notes=(*notes, *assumed, *resolved.origin.notes),
    )


def choose_sizes(options: argparse.Namespace, resolved: Resolved) -> tuple[Shape, int, tuple[str, ...]]:
    from redline.commands.lint import USUAL_SEQUENCE, choose_micro_batch

    sequence = options.sequence or min(resolved.shape.sequence, USUAL_SEQUENCE)
    notes: tuple[str, ...] = ()
    if options.sequence is None and sequence < resolved.shape.sequence:
        notes = (f"sequences of {sequence} tokens are assumed, the context is {resolved.shape.sequence} (--sequence)",)
    micro_batch, assumed = choose_micro_batch(options, resolved, sequence)
    return replace(resolved.shape, sequence=sequence), micro_batch, (*notes, *assumed)


def choose_rungs(words: str | None, shape: Shape, machine: Target) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rungs in the ladder's order, and notes. Named ones must apply; without a name it is all that do."""
    from redline.rungs import LADDER, find_rung

    if words is None:
        chosen = default_rungs(shape, machine.hardware)
        return chosen, (f"rungs assumed: {', '.join(chosen)} (--rungs)",)
    named = set() if words.strip() == "none" else {find_rung(word.strip()).name for word in words.split(",")}
    ordered = tuple(rung.name for rung in LADDER[1:] if rung.name in named)
    plan = _plain()
    for name in ordered:
        reason = find_rung(name).needs(_workload(shape), machine.hardware, plan)
        if reason is not None:
            raise UserError(f"{name} does not apply", reason, f"leave {name} out of the rungs, or choose another --gpu")
        plan = find_rung(name).apply(plan)
    return ordered, ()


def default_rungs(shape: Shape, hardware: Hardware) -> tuple[str, ...]:
    """The plain ladder as far as it applies. Of two that exclude each other the first stands; which one is faster
    only measuring tells. Weights are tied where they were published so."""
    from redline.rungs import LADDER

    chosen: list[str] = []
    plan = _plain()
    for rung in LADDER[1:]:
        replaced = rung.instead_of in chosen
        untied = rung.name == "tied-weights" and not shape.tied
        if rung.when_named or replaced or untied or rung.needs(_workload(shape), hardware, plan) is not None:
            continue
        chosen.append(rung.name)
        plan = rung.apply(plan)
    return tuple(chosen)


def _plain() -> Plan:
    from redline.core.plan import Plan

    return Plan()


def _workload(shape: Shape) -> Any:
    """What a rung asks of a workload is its shape; the rest of it is filled in."""
    from redline.core.workload import Workload

    return Workload(name="estimate", shape=shape, tokenizer="gpt2", micro_batch=1, learning_rate=1e-3)


def choose_layout(options: argparse.Namespace, micro_batch: int) -> Layout:
    from redline.predict.parallel import Layout, layout_for_batch

    sizes = {"gpus": options.gpus, "tp": options.tp, "pp": options.pp, "micro_batch": micro_batch}
    if options.global_batch is None:
        return Layout(**sizes)
    return layout_for_batch(**sizes, global_batch=options.global_batch)


# the speed


def predict_speed(subject: Subject, machine: Target) -> tuple[Prediction | None, str | None]:
    """One GPU's roofline, or why there is none."""
    from redline.predict.roofline import peaks_for, predict_step

    case, layout = subject.case, subject.layout
    if machine.device is None:
        return None, machine.reason
    if case.inference:
        return None, "the roofline is that of a training step"
    if layout.tp * layout.pp > 1:
        return None, "the roofline is that of one GPU with the whole model"
    device = machine.device
    sheet = peaks_for(case.plan, device.peak_tflops, device.bandwidth, f"{device.label} data sheet")
    if sheet is None:
        return None, f"{device.label} has no {case.plan.precision} in its data sheet"
    measured = measured_peaks(case.plan, machine.measured)
    return predict_step(case.shape, case.plan, micro_batch=subject.micro_batch, sheet=sheet, measured=measured), None


def measured_peaks(plan: Plan, measured: MeasuredPeaks | None) -> Peaks | None:
    from redline.predict.roofline import peaks_for

    if measured is None:
        return None
    source = f"redline hardware --measure, {measured.date[:10]}"
    return peaks_for(plan, measured.matmul_tflops, measured.bandwidth, source)


# the document


def settings_json(subject: Subject) -> dict[str, Any]:
    from redline.core.values import to_json

    case = subject.case
    return {
        "micro_batch": subject.micro_batch,
        "sequence": case.shape.sequence,
        "rungs": list(subject.rungs),
        "plan": to_json(case.plan),
        "precision": case.plan.precision,
        "optimizer": None if case.inference else case.optimizer or case.plan.optimizer,
        "zero": case.zero,
        "inference": case.inference,
    }


def flops_json(case: Case) -> dict[str, Any]:
    """Training counts forward and backward; inference the forward alone."""
    from redline.predict.flops import CONVENTIONS, executed_flops, model_flops, six_n

    part = "forward" if case.inference else "total"
    counted = {name: getattr(model_flops(case.shape, name), part) for name in ("full", "causal")}
    return {
        "model": counted["full"],
        "hardware": getattr(executed_flops(case.shape, case.plan), part),
        "passes": "forward" if case.inference else "forward and backward",
        "convention": CONVENTIONS["full"],
        "hardware_convention": CONVENTIONS["as-executed"],
        "causal": counted["causal"],
        "causal_convention": CONVENTIONS["causal"],
        "six_n": None if case.inference else six_n(case.shape),
    }


def memory_json(memory: Memory) -> dict[str, int]:
    """Seven parts that add up to the total; what is temporary is told apart in the detail."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activation_bytes,
        "logits": memory.logits,
        "temporary": memory.temporary + memory.autocast_cache + memory.fragmentation,
        "context": memory.context,
    }
    return {**parts, "total": memory.total}


def memory_detail(memory: Memory) -> dict[str, Any]:
    return {
        "moment": memory.moment,
        "allocated": memory.allocated,
        "activations": memory.activations,
        "working": memory.temporary,
        "autocast_cache": memory.autocast_cache,
        "fragmentation": memory.fragmentation,
    }


def changes_json(subject: Subject, machine: Target) -> list[dict[str, Any]]:
    from redline.predict.fitting import what_to_change

    if machine.memory_bytes is None:
        return []
    changes = what_to_change(
        subject.case,
        micro_batch=subject.micro_batch,
        memory_bytes=machine.memory_bytes,
        without=machine.hardware.missing,  # features are named after the rungs that need them
    )
    return [
        {
            "what": change.what,
            "cost": change.cost,
            "micro_batch": change.micro_batch,
            "total": change.memory.total,
            "fits": change.fits,
        }
        for change in changes
    ]


def roofline_json(prediction: Prediction) -> dict[str, Any]:
    from redline.core.values import to_json

    def side(roofline: Roofline) -> dict[str, Any]:
        return {
            "seconds": roofline.seconds,
            "tokens_per_second": roofline.tokens_per_second,
            "groups": roofline.by_group(),
            "peaks": to_json(roofline.peaks),
        }

    tokens = prediction.light.tokens
    floor = {"seconds": prediction.floor_seconds, "tokens_per_second": tokens / prediction.floor_seconds}
    return {"tokens": tokens, "floor": floor, "light": side(prediction.light), "expected": side(prediction.expected)}


def batch_json(layout: Layout) -> dict[str, Any]:
    return {
        "gpus": layout.gpus,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "accumulation": layout.accumulation,
        "global_batch": layout.global_batch,
        "sentence": layout.explain(),
    }
