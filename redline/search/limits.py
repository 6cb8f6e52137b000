"""What a row could reach and what it should hold, predicted beside what was measured: the limits that a page draws.

    roofline_json(shape, plan_of(rungs), 16, hardware) -> {"light": 818082.3, "expected": 536457.0, "floor": 1225212.1}
    with_limits(document)       adds these fields to a document from before they existed, without measuring anything

Everything here is arithmetic on a workload, a recipe and the table of devices. For a device that is not in the table,
or a model that is not a decoder of ours, the result is None or empty.
"""

from __future__ import annotations

from typing import Any

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.values import from_json
from redline.core.workload import Shape
from redline.predict.efficiency import efficiency
from redline.predict.fitting import case_of
from redline.predict.roofline import predict_step, reachable, sheet_peaks
from redline.rungs import plan_of
from redline.search.ranks import rate_of_ranks

SIXTEEN_BIT = Plan(autocast="bf16"), Plan(autocast="fp16")


def limits_json(shape: object, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the device's matmul peaks as tokens per second, in the convention of MFU: the data sheet's, and the best
    one measured on such a device."""
    device = hardware.device
    plan = next((plan for plan in SIXTEEN_BIT if device is not None and plan.precision in device.peak_tflops), None)
    if device is None or plan is None or not isinstance(shape, (Shape, Traced)):
        return []
    mfu = efficiency(shape, plan, hardware, 1.0).mfu  # at one token per second
    sheet, reached = sheet_peaks(plan, device), reachable(plan, device)
    return [
        {
            "name": name,
            "tflops": peaks.matmul_tflops,
            "dtype": plan.precision,
            "tokens_per_second": hardware.ranks * peaks.matmul_tflops / sheet.matmul_tflops / mfu,
            "source": device.source if name == "data-sheet peak" else device.best_source,
        }
        for name, peaks in (("data-sheet peak", sheet), ("best measured matmul", reached))
        if peaks is not None and sheet is not None and mfu
    ]


def roofline_json(shape: object, plan: Plan, micro_batch: int, hardware: Hardware) -> dict[str, float | None] | None:
    """Return tokens per second of this recipe: at its speed of light, as expected, and for its FLOPs alone. With
    several ranks the expected rate includes their communication. The other two do not: for them, a tensor group shares
    everything evenly, even what each of its ranks computes in full."""
    device = hardware.device
    sheet = None if device is None else sheet_peaks(plan, device)
    if device is None or sheet is None or not isinstance(shape, Shape):
        return None
    found = predict_step(shape, plan, micro_batch=micro_batch, sheet=sheet, reached=reachable(plan, device))
    ranks = hardware.ranks
    expected = found.expected.tokens_per_second if ranks == 1 else rate_of_ranks(shape, plan, micro_batch, hardware)
    return {
        "light": ranks * found.light.tokens_per_second,
        "expected": expected,
        "floor": ranks * found.light.tokens / found.floor_seconds,
    }


def anatomy_json(shape: object, plan: Plan, micro_batch: int, hardware: Hardware) -> dict[str, Any] | None:
    """Return the predicted peak by part; the parts add up to `predicted_peak_bytes`. None on a CPU, which reports its
    resident set with other parts."""
    if hardware.kind != "cuda" or not isinstance(shape, (Shape, Traced)):
        return None
    memory = case_of(shape, plan, hardware.arranged).memory(micro_batch)
    return {
        "moment": memory.moment,
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activation_bytes,
        "logits": memory.logits,
        "temporary": memory.temporary + memory.autocast_cache,
    }


def with_limits(document: dict[str, Any]) -> dict[str, Any]:
    """Add these fields to a ladder's document from before they existed, such as a record. Its own fields stay."""
    shape = from_json(Shape, document["workload"]["shape"])
    fields = {name: value for name, value in document["hardware"].items() if name != "peak_tflops"}
    hardware = from_json(Hardware, fields)
    rows = []
    for row in document["rows"]:
        ran = row["status"] != "skipped"
        plan, size = plan_of(row["recipe"] or ()), row["micro_batch"]
        found = {
            "roofline": roofline_json(shape, plan, size, hardware) if ran else None,
            "memory": anatomy_json(shape, plan, size, hardware) if ran else None,
        }
        rows.append({**found, **row})
    return {"limits": limits_json(shape, hardware), **document, "rows": rows}
