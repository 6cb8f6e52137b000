"""How far the kernels of a profile are from what the machine reaches: a bound on what faster kernels could gain.

    reach_of(kernels, matmul_tflops={"bf16": 795.0}, bandwidth=4.32e12, tf32=True)
    -> Reach(seconds=0.0157, least_seconds=0.0055, flops=4.3e12, ...)

The least time of a kernel is that of its arithmetic or of its bytes, whichever is longer, but never more than it took:
a kernel that beats the rates makes up for no other. Only kernels whose work is known count. FLOPs come from the kernel
table: for fused causal attention those of the pairs that the mask leaves, for written-out attention the full square.
A rate that a kernel of the profile beats is no limit: `fastest_seen` returns what the kernels themselves reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redline.core.profile import Kernel


@dataclass(frozen=True, kw_only=True)
class Reach:
    seconds: float
    """Seconds of the kernels whose work is known."""
    least_seconds: float
    """Seconds that their work takes at the machine's rates."""
    flops: float
    bytes: float
    tflops: tuple[float, ...]
    """The rates of the kernels that arithmetic bounds, fastest first; empty if bytes bound all."""
    by_bytes: bool
    """True if bytes bound at least one kernel."""

    @property
    def gain_seconds(self) -> float:
        return self.seconds - self.least_seconds


@dataclass(frozen=True, kw_only=True)
class Least:
    """The least time that one kernel's work takes."""

    kernel: Kernel
    compute_seconds: float
    memory_seconds: float
    tflops: float | None
    """The machine's rate for its matmuls; None if it has none."""

    @property
    def by_compute(self) -> bool:
        return self.compute_seconds > self.memory_seconds


def reach_of(
    kernels: Iterable[Kernel], *, matmul_tflops: Mapping[str, float], bandwidth: float, tf32: bool
) -> Reach | None:
    """Return the reach of the kernels; None if no kernel's work and rate are known. `tf32`: fp32 matmuls run in it."""
    known = [least for kernel in kernels if (least := least_of(kernel, matmul_tflops, bandwidth, tf32)) is not None]
    if not known:
        return None
    rates = {least.tflops for least in known if least.by_compute and least.tflops is not None}
    return Reach(
        seconds=sum(least.kernel.seconds for least in known),
        least_seconds=sum(
            min(least.kernel.seconds, max(least.compute_seconds, least.memory_seconds)) for least in known
        ),
        flops=sum(least.kernel.flops or 0.0 for least in known),
        bytes=sum(least.kernel.bytes or 0.0 for least in known),
        tflops=tuple(sorted(rates, reverse=True)),
        by_bytes=any(not least.by_compute for least in known),
    )


def fastest_seen(kernels: Iterable[Kernel], *, tf32: bool) -> tuple[dict[str, float], float]:
    """Return the TFLOP/s by precision and the bytes per second of the fastest kernels; empty and 0 if no work is
    known."""
    tflops: dict[str, float] = {}
    bandwidth = 0.0
    for kernel in (each for each in kernels if each.seconds > 0):
        dtype = precision_of(kernel, tf32)
        if kernel.flops and dtype is not None:
            tflops[dtype] = max(tflops.get(dtype, 0.0), kernel.flops / kernel.seconds / 1e12)
        bandwidth = max(bandwidth, (kernel.bytes or 0.0) / kernel.seconds)
    return tflops, bandwidth


def precision_of(kernel: Kernel, tf32: bool) -> str | None:
    return "tf32" if kernel.dtype == "fp32" and tf32 else kernel.dtype


def least_of(kernel: Kernel, matmul_tflops: Mapping[str, float], bandwidth: float, tf32: bool) -> Least | None:
    """Return the least time of a kernel; None if its bytes, or the rate of its matmuls, are unknown."""
    if kernel.bytes is None:
        return None
    dtype = precision_of(kernel, tf32)
    rate = None if not kernel.flops or dtype is None else matmul_tflops.get(dtype)
    if kernel.flops and rate is None:
        return None
    return Least(
        kernel=kernel,
        compute_seconds=(kernel.flops or 0.0) / (1e12 * (rate or 1.0)),
        memory_seconds=kernel.bytes / bandwidth,
        tflops=rate,
    )
