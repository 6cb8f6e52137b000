"""Shares of the device's peak: MFU from the model's FLOPs, HFU from the executed ones.

    efficiency(shape, plan, hardware, 478_476) -> Efficiency(mfu=0.413, hfu=0.390, convention="full attention ...")

Both are relative to the dense 16-bit peak of the data sheet, whatever precision a row uses: the question is how much of
the card a run leaves unused, and an fp32 row leaves the tensor cores unused. A device without a known peak has no MFU;
neither has a step that mixes fp8 with 16-bit layers, unless the caller names one of the two peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.core.errors import unknown_name
from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.workload import Shape
from redline.predict.flops import CONVENTION, executed_flops_per_token, flops_per_token
from redline.predict.traced import CONVENTION as COUNTED
from redline.predict.traced import flops_per_item


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    mfu: float | None
    hfu: float | None
    convention: str
    """What was counted, and against which peak, or why there is no number."""


def efficiency(
    shape: Shape | Traced, plan: Plan, hardware: Hardware, tokens_per_second: float, peak: str | None = None
) -> Efficiency:
    """Return MFU and HFU of one device at `tokens_per_second`. `peak`: a dtype whose peak replaces the 16-bit one."""
    peaks = hardware.peak_tflops
    if peaks is None:
        what = "a CPU" if hardware.kind == "cpu" else hardware.name
        return _none(f"{what} is not in the table of device peaks")
    if peak is None and plan.precision == "fp8":
        return _none(
            f"fp8 layers beside 16-bit ones have no single peak; name one of {', '.join(peaks)}, or compare the time "
            "with the roofline's"
        )
    dtype = _sixteen_bit(peaks) if peak is None else peak
    if dtype not in peaks:
        raise unknown_name(f"peak of {hardware.name}", dtype, peaks)
    rate = peaks[dtype] * 1e12
    if isinstance(shape, Traced):
        if shape.why_no_flops is not None:
            return _none(f"FLOPs are incomplete, {shape.why_no_flops}")
        mfu, hfu, counted = flops_per_item(shape) * tokens_per_second / rate, None, COUNTED
    else:
        mfu, counted = flops_per_token(shape) * tokens_per_second / rate, CONVENTION
        hfu = executed_flops_per_token(shape, plan) * tokens_per_second / rate
        if plan.activation_budget < 1:  # what the compiler recomputes is unknown
            hfu = None
    if (most := max(mfu, hfu or 0.0)) > 1:  # more than the device can do: a wrong peak or clock, or work skipped
        return _none(f"{most:.0%} of the peak cannot be right; check device and timing")
    return Efficiency(mfu=mfu, hfu=hfu, convention=f"{counted}; {dtype} dense peak {peaks[dtype]:g} TFLOP/s")


MOST_ABOVE = 1.5  # times its prediction; with recomputed blocks the peak is within some per cent of it


def trusted_hfu(
    share: Efficiency | None, plan: Plan, peak_bytes: int | None, predicted_bytes: int | None
) -> float | None:
    """Return the HFU, or None if blocks should have been recomputed but the memory peak shows that they were kept: then
    less was executed. Compilers may do that (model/recompute.py)."""
    if share is None or (plan.checkpointing == "full" and is_kept(peak_bytes, predicted_bytes)):
        return None
    return share.hfu


def is_kept(peak_bytes: int | None, predicted_bytes: int | None) -> bool:
    """True if the peak shows that blocks were kept. `predicted_bytes`: the predicted peak with blocks recomputed."""
    return bool(peak_bytes and predicted_bytes and peak_bytes > MOST_ABOVE * predicted_bytes)


def share_of_peak(flops_per_second: float, hardware: Hardware) -> tuple[float | None, str]:
    """Return FLOP/s that the caller counted as a share of the same peak, and which peak that is or why there is no
    share."""
    peaks = hardware.peak_tflops
    if peaks is None:
        return None, f"{'a CPU' if hardware.kind == 'cpu' else hardware.name} is not in the table of device peaks"
    dtype = _sixteen_bit(peaks)
    share = flops_per_second / (peaks[dtype] * 1e12)
    if share > 1:
        return None, f"{share:.0%} of the peak cannot be right; check device and timing"
    return share, f"{dtype} dense peak {peaks[dtype]:g} TFLOP/s"


def _none(reason: str) -> Efficiency:
    return Efficiency(mfu=None, hfu=None, convention=f"no MFU: {reason}")


def _sixteen_bit(peaks: Mapping[str, float]) -> str:
    return "bf16" if "bf16" in peaks else "fp16"
