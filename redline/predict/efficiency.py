"""Shares of the device's peak: MFU from the model's FLOPs, HFU from the executed ones.

Both are against the dense 16-bit peak of the data sheet, whatever precision a row uses: the question is how much of
the card a run leaves unused, and a row in fp32 leaves the tensor cores. A device without a known peak has no MFU.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.flops import CONVENTION, executed_flops_per_token, flops_per_token


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    mfu: float | None
    hfu: float | None
    convention: str
    """What was counted against which peak, or why there is no number."""


def efficiency(shape: Shape, plan: Plan, hardware: Hardware, tokens_per_second: float) -> Efficiency:
    peaks = hardware.peak_tflops
    if peaks is None:
        what = "a CPU" if hardware.kind == "cpu" else hardware.name
        return Efficiency(mfu=None, hfu=None, convention=f"no MFU: {what} is not in the table of device peaks")
    dtype = "bf16" if "bf16" in peaks else "fp16"
    peak = peaks[dtype] * 1e12
    mfu = flops_per_token(shape) * tokens_per_second / peak
    hfu = executed_flops_per_token(shape, plan) * tokens_per_second / peak
    if max(mfu, hfu) > 1:  # more than the device can do: a wrong peak, a wrong clock, or work that was skipped
        return Efficiency(
            mfu=None,
            hfu=None,
            convention=f"no MFU: {max(mfu, hfu):.0%} of the peak cannot be right; check device and timing",
        )
    return Efficiency(mfu=mfu, hfu=hfu, convention=f"{CONVENTION}; {dtype} dense peak {peaks[dtype]:g} TFLOP/s")
