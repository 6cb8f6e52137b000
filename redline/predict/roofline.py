"""How fast a step could be and how fast it will be, from its operations and a device's two peaks.

    sheet = Peaks(matmul_tflops=989.4, bandwidth=4.8e12, source="NVIDIA H200 data sheet")
    step = predict_step(shape, plan, micro_batch=16, sheet=sheet)
    step.floor_seconds, step.light.seconds, step.expected.seconds

An operation takes the longer of two times: its FLOPs at the matmul rate and its bytes at the memory bandwidth. One list
of operations (`predict/operations.py`) gives three answers:

    floor     the executed FLOPs at the data sheet's matmul rate: nothing that runs these FLOPs can be faster
    light     each operation of this recipe at the data sheet's peaks, one after the other: its speed of light
    expected  each at the peaks that can be reached (`reachable`), with the losses of real kernels (TYPICAL)

A step of several micro batches is one pass for each and one update.

Not modelled: a host too slow to keep the queue full (small models), waiting for data or for the loss, several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from redline.core.devices import NARROW_RATES, TYPICAL_BANDWIDTH, TYPICAL_MATMUL, Device
from redline.core.hardware import MeasuredPeaks
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.flops import executed_flops_per_token
from redline.predict.gemms import linear_gemms
from redline.predict.operations import GROUPS, Operation, is_narrow, operations


@dataclass(frozen=True, kw_only=True)
class Peaks:
    matmul_tflops: float
    """Dense, at the plan's usual precision."""
    bandwidth: float
    """Bandwidth of the device's memory in bytes per second."""
    source: str
    """A data sheet, or who measured when."""
    fp8_tflops: float | None = None
    """Rate of matmuls with 8-bit operands, if the plan has any."""
    narrow_rates: Mapping[int, float] = field(default_factory=lambda: NARROW_RATES)
    """Share of the matmul rate that is left when rows start only at multiples of so many bytes, by those bytes."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What kernels reach of the peaks. The defaults are the roofline itself."""

    gemm: float = 1.0
    """Share of the matmul peak in the model's own matmuls."""
    narrow_loads: bool = False
    """Matmuls whose rows do not start at multiples of 16 bytes run at the peaks' narrow rates."""
    attention: dict[str, float] = field(default_factory=dict)
    """Share of the matmul peak in a fused attention kernel, forward and backward together; 1 if not named."""
    bandwidth: float = 1.0
    """Share of the bandwidth in everything that memory bounds."""
    gap_seconds: float = 0.0
    """Seconds between the end of a kernel and the start of the next."""


# Today's fused kernels are far from the matmul peak: their softmax is not a matmul, and causal tiles are cut in half.
# One H200, head width 64, s = 1024: cuDNN 265 and FA2 345 ns per token for 66.1 MFLOP (docs/sources.md 2), against 790
# TFLOP/s. Wider heads and longer sequences reach more.
KERNELS = {"cudnn": 0.316, "flash": 0.243}
IDEAL = Assumptions()
TYPICAL = Assumptions(
    gemm=0.93,  # 24.3 TFLOP of GPT-2's matmuls in 33 ms, of 790 TFLOP/s (docs/sources.md 2, the step at B=32)
    narrow_loads=True,
    attention=KERNELS,
    bandwidth=0.79,  # 45 GB of the same step's other kernels in 13.3 ms, of 4.3 TB/s
    gap_seconds=1e-6,  # kernels of 2.9 us start every 3.8 us (NVIDIA, "Getting Started with CUDA Graphs")
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An operation and the time it takes."""

    operation: Operation
    seconds: float
    bound: str
    """compute or memory."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A step as a sequence of operations, without overlap."""

    rows: tuple[Timed, ...]
    tokens: int
    peaks: Peaks
    assumptions: Assumptions

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def by_group(self) -> dict[str, float]:
        """Seconds of each group of operations."""
        return {group: sum(row.seconds for row in self.rows if row.operation.group == group) for group in GROUPS}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    floor_seconds: float
    light: Roofline
    expected: Roofline


def roofline(
    shape: Shape,
    plan: Plan,
    *,
    micro_batch: int,
    accumulation: int = 1,
    peaks: Peaks,
    assumptions: Assumptions = IDEAL,
    fusion: str | None = None,
) -> Roofline:
    listed = operations(shape, plan, micro_batch=micro_batch, accumulation=accumulation, fusion=fusion)
    return Roofline(
        rows=tuple(_timed(operation, plan, peaks, assumptions) for operation in listed),
        tokens=accumulation * micro_batch * shape.sequence,
        peaks=peaks,
        assumptions=assumptions,
    )


def predict_step(
    shape: Shape, plan: Plan, *, micro_batch: int, accumulation: int = 1, sheet: Peaks, reached: Peaks | None = None
) -> Prediction:
    """Predict a step. Both peaks must be those of the plan's precision, as `peaks_for` and `reachable` return them.
    `reached` None means a typical share of the data sheet's."""
    real = typical(sheet) if reached is None else at_most(reached, sheet)
    step = partial(roofline, shape, plan, micro_batch=micro_batch, accumulation=accumulation)
    return Prediction(
        floor_seconds=compute_floor(shape, plan, micro_batch=micro_batch, accumulation=accumulation, peaks=sheet),
        light=step(peaks=sheet),
        expected=step(peaks=real, assumptions=TYPICAL),
    )


def compute_floor(shape: Shape, plan: Plan, *, micro_batch: int, accumulation: int = 1, peaks: Peaks) -> float:
    """Return the seconds of a step that executes only its matmul FLOPs, at the peak."""
    tokens = accumulation * micro_batch * shape.sequence
    of_sequence = sum(gemm.flops for gemm in linear_gemms(shape, plan, micro_batch=1) if is_narrow(gemm, plan))
    narrow = of_sequence / shape.sequence
    wide = executed_flops_per_token(shape, plan) - narrow
    return tokens * (wide / peaks.matmul_tflops + (narrow / peaks.fp8_tflops if peaks.fp8_tflops else 0.0)) / 1e12


# peaks


def peaks_for(plan: Plan, peak_tflops: Mapping[str, float], bandwidth: float, source: str) -> Peaks | None:
    """Return a device's peaks at the plan's precision; None if the device lacks it."""
    if plan.precision not in peak_tflops or plan.usual_precision not in peak_tflops:
        return None
    return Peaks(
        matmul_tflops=peak_tflops[plan.usual_precision],
        bandwidth=bandwidth,
        source=source,
        fp8_tflops=peak_tflops["fp8"] if plan.precision == "fp8" else None,
    )


def sheet_peaks(plan: Plan, device: Device) -> Peaks | None:
    return _on(device, peaks_for(plan, device.peak_tflops, device.bandwidth, f"{device.label} data sheet"))


def reachable(plan: Plan, device: Device, measured: MeasuredPeaks | None = None) -> Peaks | None:
    """Return the peaks measured here, else the best rate that anyone measured on such a device; None if neither is
    known."""
    if measured is not None and plan.precision in measured.matmul_tflops:
        source = f"redline hardware --measure, {measured.date[:10]}"
        return _on(device, peaks_for(plan, measured.matmul_tflops, measured.bandwidth, source))
    if plan.usual_precision not in device.best_tflops or plan.precision not in device.peak_tflops:
        return None
    rate = device.reachable_tflops(plan.usual_precision)
    narrow = device.reachable_tflops("fp8") if plan.precision == "fp8" else None
    source = (
        f"{rate:g} TFLOP/s, the best that was measured ({device.best_source}), and {TYPICAL_BANDWIDTH:.0%} of the data "
        "sheet's bandwidth"
    )
    if narrow is not None:
        source += f"; {narrow:g} TFLOP/s in fp8"
    peaks = Peaks(matmul_tflops=rate, bandwidth=device.reachable_bandwidth, source=source, fp8_tflops=narrow)
    return _on(device, peaks)


def _on(device: Device, peaks: Peaks | None) -> Peaks | None:
    return None if peaks is None else replace(peaks, narrow_rates=device.narrow_rates)


def typical(sheet: Peaks) -> Peaks:
    """Return what large matmuls and copies will reach of a data sheet's peaks, if nobody has measured."""
    return replace(
        sheet,
        matmul_tflops=TYPICAL_MATMUL * sheet.matmul_tflops,
        fp8_tflops=None if sheet.fp8_tflops is None else TYPICAL_MATMUL * sheet.fp8_tflops,
        bandwidth=TYPICAL_BANDWIDTH * sheet.bandwidth,
        source=f"{sheet.source}, {TYPICAL_MATMUL:.0%} of its matmul rate and {TYPICAL_BANDWIDTH:.0%} of its bandwidth",
    )


def at_most(reached: Peaks, sheet: Peaks) -> Peaks:
    """Limit measured peaks to the data sheet's: a higher clock must not make a prediction faster than its speed of
    light."""
    return replace(
        reached,
        matmul_tflops=min(reached.matmul_tflops, sheet.matmul_tflops),
        fp8_tflops=None if sheet.fp8_tflops is None else min(reached.fp8_tflops or math.inf, sheet.fp8_tflops),
        bandwidth=min(reached.bandwidth, sheet.bandwidth),
    )


def _timed(operation: Operation, plan: Plan, peaks: Peaks, assumed: Assumptions) -> Timed:
    share = {
        "gemm": assumed.gemm,
        "fp8": assumed.gemm,  # nobody has measured another share
        "unaligned": assumed.gemm * (peaks.narrow_rates[4] if assumed.narrow_loads else 1.0),
        "odd": assumed.gemm * (peaks.narrow_rates[2] if assumed.narrow_loads else 1.0),
        "attention": assumed.attention.get(plan.attention, 1.0),
        "memory": 1.0,
    }[operation.kind]
    rate = peaks.matmul_tflops
    if operation.kind == "fp8":
        assert peaks.fp8_tflops is not None, "the peaks are of another plan"
        rate = peaks.fp8_tflops
    compute = operation.flops / (rate * 1e12 * share)
    memory = operation.bytes / (peaks.bandwidth * assumed.bandwidth)
    return Timed(
        operation=operation,
        seconds=max(compute, memory) + operation.kernels * assumed.gap_seconds,
        bound="compute" if compute > memory else "memory",
    )
