"""The document of `redline estimate`: what a subject needs, costs and reaches on a target, and what is unknown.

    document(subject, target) -> {"parameters": 124439808, "memory": {...}, "roofline": {...}, ...}

Each figure comes from its own module (flops, memory, fitting, roofline, parallel); this one puts them side by side.
Unknown values are None, and a reason or a note says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redline.core.devices import Device
from redline.core.hardware import Hardware, MeasuredPeaks
from redline.core.plan import ADAMWS
from redline.core.values import to_json
from redline.predict.communication import Fabric
from redline.predict.fitting import Case, what_to_change
from redline.predict.flops import (
    CONVENTIONS,
    decode_flops,
    executed_flops,
    model_flops,
    parameters,
    prefill_flops,
    six_n,
)
from redline.predict.layouts import (
    DOES_NOT_FIT,
    ParallelStep,
    Recommendation,
    expected_peaks,
    parallel_json,
    predict_parallel,
    step_notes,
)
from redline.predict.memory import Memory
from redline.predict.parallel import Layout
from redline.predict.roofline import Peaks, Prediction, Roofline, predict_step, reachable, sheet_peaks
from redline.predict.shortage import Instead, shortage_json


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the step would run, as far as known."""

    device: Device | None
    memory_bytes: int | None
    hardware: Hardware
    """Read by the rungs to decide whether they apply."""
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
    fabric: Fabric | None = None
    """How several GPUs are connected; None for one GPU, or if nothing is trained."""
    advice: Recommendation | None = None
    """The recommended layouts, if the user named none."""
    words: str | None = None
    """What to type after `redline ladder` to measure it; None if no ladder can."""
    train: dict[str, str | None] | None = None
    """For several GPUs: `command`, what to type to train in this layout, or the `reason` why no command does."""
    instead: Instead | None = None
    """For several GPUs that lack memory: a layout that fits them."""


def document(subject: Subject, target: Target) -> dict[str, Any]:
    case, micro_batch = subject.case, subject.micro_batch
    memory = case.memory(micro_batch)
    fits = None if target.memory_bytes is None else memory.total <= target.memory_bytes
    prediction, reason = predict_speed(subject, target)
    parallel = predict_many(subject, target)
    speed, reason = expected_speed(prediction, parallel, reason, fits)
    count = parameters(case.shape)
    return {
        "name": subject.name,
        "origin": subject.origin,
        "words": subject.words,
        "shape": to_json(case.shape),
        "settings": settings_json(subject),
        "hardware": target.document(),
        "parameters": count.total,
        "parameter_groups": to_json(count),
        "flops_per_token": inference_flops(case) if case.inference else training_flops(case),
        "memory": memory_json(memory),
        "memory_detail": memory_detail(memory),
        "max_micro_batch": None if target.memory_bytes is None else case.largest(target.memory_bytes),
        "fits": fits,
        "what_to_change": changes_json(subject, target),
        "roofline": None if prediction is None else roofline_json(prediction),
        "tokens_per_second": speed,
        "tokens_per_second_reason": reason,
        "batch": batch_json(subject.layout),
        "parallel": None if parallel is None else many_json(parallel, subject, target),
        "notes": [*target.notes, *subject.notes, *case_notes(case), *(step_notes(parallel) if parallel else ())],
    }


def many_json(step: ParallelStep, subject: Subject, target: Target) -> dict[str, Any]:
    assert subject.fabric is not None
    node = subject.fabric.gpus_per_node
    shortage = shortage_json(step, target.memory_bytes, subject.instead, node)
    fits = None if target.memory_bytes is None else shortage is None
    return {
        **parallel_json(step, subject.fabric, subject.advice, fits),
        "shortage": shortage,
        "train": train_json(subject, fits),
    }


def train_json(subject: Subject, fits: bool | None) -> dict[str, str | None] | None:
    """A layout that does not fit has no command, and that reason is added to the others."""
    if fits is not False or subject.train is None:
        return subject.train
    return {"command": None, "reason": "; ".join(filter(None, (DOES_NOT_FIT, subject.train["reason"])))}


# notes


def case_notes(case: Case) -> Iterator[str]:
    shape, plan = case.shape, case.plan
    if plan.tied != shape.tied:
        run, published = ("one table", "two") if plan.tied else ("two tables", "one")
        held = parameters(shape, plan.tied).total
        yield (
            f"these rungs train {run} for embedding and head, {held:,} parameters; `parameters` is the model as "
            f"published, with {published} (the rung tied-weights)"
        )
    unmeasured = list(reasoned(case))
    if unmeasured:
        yield f"memory is reasoned, not measured, for {', '.join(unmeasured)}: docs/memory.md"


def reasoned(case: Case) -> Iterator[str]:
    """Yield how a case differs from those whose peaks were measured: GPT-2 on one GPU with AdamW (docs/memory.md)."""
    if case.inference:
        yield "inference"
        return
    if case.shape.positions != "learned" or case.shape.norm != "layernorm" or case.shape.gated:
        yield "other models than GPT-2"
    if case.layout is not None and case.layout.gpus > 1:
        yield "several GPUs"
    if case.plan.precision == "fp8":
        yield "8-bit products"
    if case.optimizer_name not in ADAMWS:
        yield f"the optimizer {case.optimizer_name}"


# the speed


def predict_speed(subject: Subject, target: Target) -> tuple[Prediction | None, str | None]:
    """Return one GPU's roofline, or the reason why there is none."""
    case, layout, device = subject.case, subject.layout, target.device
    if device is None:
        return None, target.reason
    if case.inference:
        return None, "the roofline is that of a training step"
    if layout.tp * layout.pp > 1:
        return None, "the roofline is that of one GPU with the whole model"
    sheet = sheet_peaks(case.plan, device)
    if sheet is None:
        return None, f"{device.label} has no {case.plan.precision} in its data sheet"
    prediction = predict_step(
        case.shape,
        case.plan,
        micro_batch=subject.micro_batch,
        accumulation=layout.accumulation,
        sheet=sheet,
        reached=reachable(case.plan, device, target.measured),
    )
    return prediction, None


def predict_many(subject: Subject, target: Target) -> ParallelStep | None:
    """Return the step on several GPUs; None for one GPU, or if nothing is trained."""
    if subject.fabric is None:
        return None
    peaks, reason = many_peaks(subject.case, target)
    return predict_parallel(subject.case, subject.fabric, peaks, reason)


def many_peaks(case: Case, target: Target) -> tuple[Peaks | None, str | None]:
    """Return the peaks that one of several GPUs reaches, or the reason why they are unknown."""
    if target.device is None:
        return None, target.reason
    peaks = expected_peaks(case.plan, target.device, target.measured)
    return peaks, None if peaks else f"{target.device.label} has no {case.plan.precision} in its data sheet"


def expected_speed(
    prediction: Prediction | None, parallel: ParallelStep | None, reason: str | None, fits: bool | None
) -> tuple[float | None, str | None]:
    if fits is False:
        return None, DOES_NOT_FIT
    if parallel is not None:
        return parallel.tokens_per_second, parallel.reason
    if prediction is None:
        return None, reason
    return prediction.expected.tokens_per_second, None


def roofline_json(prediction: Prediction) -> dict[str, Any]:
    tokens = prediction.light.tokens
    floor = {"seconds": prediction.floor_seconds, "tokens_per_second": tokens / prediction.floor_seconds}
    return {
        "tokens": tokens,
        "floor": floor,
        "light": side_json(prediction.light),
        "expected": side_json(prediction.expected),
    }


def side_json(side: Roofline) -> dict[str, Any]:
    return {
        "seconds": side.seconds,
        "tokens_per_second": side.tokens_per_second,
        "groups": side.by_group(),
        "peaks": to_json(side.peaks),
        "operations": [
            {
                "name": row.operation.name,
                "group": row.operation.group,
                "direction": row.operation.direction,
                "flops": row.operation.flops,
                "bytes": row.operation.bytes,
                "bound": row.bound,
                "seconds": row.seconds,
            }
            for row in side.rows
        ],
    }


# the other parts


def settings_json(subject: Subject) -> dict[str, Any]:
    case = subject.case
    return {
        "micro_batch": subject.micro_batch,
        "sequence": case.shape.sequence,
        "rungs": list(subject.rungs),
        "plan": to_json(case.plan),
        "precision": case.plan.precision,
        "optimizer": None if case.inference else case.optimizer_name,
        "zero": case.zero,
        "inference": case.inference,
    }


def training_flops(case: Case) -> dict[str, Any]:
    return {
        "model": model_flops(case.shape, "full").total,
        "hardware": executed_flops(case.shape, case.plan).total,
        "passes": "forward and backward",
        "convention": CONVENTIONS["full"],
        "hardware_convention": CONVENTIONS["as-executed"],
        "causal": model_flops(case.shape, "causal").total,
        "causal_convention": CONVENTIONS["causal"],
        "six_n": six_n(case.shape),
        "decode": None,
    }


def inference_flops(case: Case) -> dict[str, Any]:
    """Per token, FLOPs of prompts that fill the sequence, as in the memory prediction: the head runs only for the last
    token of each. `decode` is for one more token."""
    shape, tokens = case.shape, case.shape.sequence
    executed = executed_flops(shape, case.plan)
    return {
        "model": prefill_flops(shape, tokens, convention="full") / tokens,
        "hardware": executed.linear.forward + executed.attention.forward + executed.head.forward / tokens,
        "passes": f"prefill of {tokens:,} tokens, the head for the last",
        "convention": CONVENTIONS["full"],
        "hardware_convention": CONVENTIONS["as-executed"],
        "causal": prefill_flops(shape, tokens, convention="causal") / tokens,
        "causal_convention": CONVENTIONS["causal"],
        "six_n": None,
        "decode": decode_flops(shape, tokens),
    }


def memory_json(memory: Memory) -> dict[str, int]:
    """Return seven parts that add up to the total; `memory_detail` breaks down the temporary part."""
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
        "stage": memory.stage,
        "allocated": memory.allocated,
        "activations": memory.activations,
        "working": memory.temporary,
        "autocast_cache": memory.autocast_cache,
        "fragmentation": memory.fragmentation,
    }


def changes_json(subject: Subject, target: Target) -> list[dict[str, Any]]:
    if target.memory_bytes is None:
        return []
    changes = what_to_change(
        subject.case,
        micro_batch=subject.micro_batch,
        memory_bytes=target.memory_bytes,
        without=target.hardware.missing,  # features are named after the rungs that need them
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
