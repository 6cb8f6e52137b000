"""The document of `redline estimate` for a user's own model: counted FLOPs, traced memory, and bounds on its speed.

    traced_document(subject, target) -> {"parameters": 86567656, "memory": {...}, "roofline": {"expected": None, ...}}

The keys are those of `predict/estimate.py`. The speed of such a model is not predicted, since what it does between its
products was not described; only an upper bound is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redline.core.traced import Traced
from redline.core.units import batch_text
from redline.core.values import to_json
from redline.predict.estimate import Target, batch_json, memory_detail, memory_json
from redline.predict.fitting import TracedCase
from redline.predict.parallel import Layout
from redline.predict.roofline import sheet_peaks
from redline.predict.traced import CONVENTION, WITHOUT_ATTENTION, Bound, flops_per_item, step_of

NOT_PREDICTED = "the speed of a model of your own cannot be predicted: measure it with"


@dataclass(frozen=True, kw_only=True)
class TracedSubject:
    """What is estimated, with a note for every choice that the user did not make."""

    name: str
    origin: str
    case: TracedCase
    rungs: tuple[str, ...]
    micro_batch: int
    notes: tuple[str, ...]
    words: str | None = None
    """What to type to name it again; None for a module of a user's own program."""


def traced_document(subject: TracedSubject, target: Target) -> dict[str, Any]:
    case, micro_batch, traced = subject.case, subject.micro_batch, subject.case.shape
    memory = case.memory(micro_batch)
    fits = None if target.memory_bytes is None else memory.total <= target.memory_bytes
    return {
        "name": subject.name,
        "origin": subject.origin,
        "words": subject.words,
        "shape": to_json(traced),
        "settings": settings_json(subject),
        "hardware": target.document(),
        "parameters": traced.parameters,
        "parameter_groups": None,
        "flops_per_token": flops_json(traced),
        # Autograd was seen to keep logits and casts, but not what they are: they count as activations.
        "memory": {**memory_json(memory), "logits": None},
        "memory_detail": {**memory_detail(memory), "autocast_cache": None},
        "max_micro_batch": None if target.memory_bytes is None else case.largest(target.memory_bytes),
        "fits": fits,
        "what_to_change": [],
        "roofline": roofline_json(subject, target),
        "tokens_per_second": None,
        "tokens_per_second_reason": "it does not fit" if fits is False else f"{NOT_PREDICTED} {measured_by(subject)}",
        "batch": {**batch_json(Layout(gpus=1, micro_batch=micro_batch)), "sentence": sentence(subject)},
        "notes": [*target.notes, *subject.notes, *notes_of(traced)],
    }


def measured_by(subject: TracedSubject) -> str:
    return "redline.Meter" if subject.words is None else f"redline ladder {subject.words}"


def sentence(subject: TracedSubject) -> str:
    traced = subject.case.shape
    items = {"unit": traced.unit, "items_per_sample": traced.items_per_sample}
    return f"{batch_text(subject.micro_batch, items)} in a step, on one GPU."


def settings_json(subject: TracedSubject) -> dict[str, Any]:
    plan = subject.case.plan
    return {
        "micro_batch": subject.micro_batch,
        "sequence": subject.case.shape.sequence,
        "rungs": list(subject.rungs),
        "plan": to_json(plan),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "zero": 0,
        "inference": False,
    }


def flops_json(traced: Traced) -> dict[str, Any]:
    """Return FLOPs per item: a token, or a sample."""
    unknown = ("hardware", "hardware_convention", "causal", "causal_convention", "six_n", "decode")
    counted = CONVENTION if traced.sdpa or traced.attention else WITHOUT_ATTENTION
    return {
        "model": None if traced.why_no_flops else flops_per_item(traced),
        "unit": traced.unit,
        "passes": "forward and backward",
        "convention": f"unknown, {traced.why_no_flops}" if traced.why_no_flops else counted,
        **dict.fromkeys(unknown),
    }


def roofline_json(subject: TracedSubject, target: Target) -> dict[str, Any] | None:
    """Return bounds on the speed; None if no device is known, if it lacks the plan's precision, or if FLOPs are
    missing."""
    traced, plan, device = subject.case.shape, subject.case.plan, target.device
    sheet = None if device is None else sheet_peaks(plan, device)
    if sheet is None or traced.why_no_flops is not None:
        return None
    bound = step_of(
        traced,
        plan,
        micro_batch=subject.micro_batch,
        matmul_tflops=sheet.matmul_tflops,
        bandwidth=sheet.bandwidth,
    )
    items = subject.micro_batch * traced.items_per_sample
    rate = items / bound.floor_seconds if bound.floor_seconds else None  # a model without products has no such floor
    return {
        "tokens": items,
        "unit": traced.unit,
        "floor": {"seconds": bound.floor_seconds, "tokens_per_second": rate},
        "light": {"seconds": bound.seconds, "tokens_per_second": items / bound.seconds, "groups": groups(bound)},
        "expected": None,
    }


def groups(bound: Bound) -> dict[str, float]:
    return {"tensor contraction": bound.products_seconds, "optimizer": bound.update_seconds}


def notes_of(traced: Traced) -> list[str]:
    found = [
        "memory is what autograd was seen to keep, in eager mode, and all of it at once: compiled code keeps less, and "
        "temporary tensors inside a step are not in it"
    ]
    if traced.why_no_flops is not None:
        found.append(f"FLOPs are unknown and nothing is derived from them: {traced.why_no_flops}")
    if traced.left_out_text is not None:
        found.append(traced.left_out_text)
    return found
