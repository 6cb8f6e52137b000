"""How far the kernels of a profile are from what the machine reaches: a bound on what faster ones could gain.

    reach_of(kernels, matmul_tflops={"bf16": 795.0}, bandwidth=4.32e12, tf32=True)
    -> Reach(seconds=0.0157, least_seconds=0.0055, flops=4.3e12, ...)

The least time of a kernel is that of its arithmetic or of its bytes, whichever is longer, and never more than it took:
a kernel that beats the rates makes up for no other. Only kernels whose work is known count. FLOPs are the kernel
table's: of a fused causal attention those of pairs that the mask leaves, of attention written out the full square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redline.core.profile import Kernel


@dataclass(frozen=True, kw_only=True)
class Reach:
    seconds: float
    """Of the kernels whose work is known."""
    least_seconds: float
    """That their work takes at the rates of the machine."""
    flops: float
    bytes: float
    tflops: tuple[float, ...]
    """The rates of those that arithmetic bounds, fastest first; empty where bytes bound all."""
    by_bytes: bool
    """Do bytes bound one of them?"""

    @property
    def gain_seconds(self) -> float:
        return self.seconds - self.least_seconds


@dataclass(frozen=True, kw_only=True)
class Least:
    """What one kernel's work takes at the least."""

    kernel: Kernel
    compute_seconds: float
    memory_seconds: float
    tflops: float | None
    """None for what is no product."""

    @property
    def by_compute(self) -> bool:
        return self.compute_seconds > self.memory_seconds


def reach_of(
    kernels: Iterable[Kernel], *, matmul_tflops: Mapping[str, float], bandwidth: float, tf32: bool
) -> Reach | None:
    """None where no kernel's work and rate are known. `tf32`: products of fp32 run as that."""
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


def least_of(kernel: Kernel, matmul_tflops: Mapping[str, float], bandwidth: float, tf32: bool) -> Least | None:
    """None where its bytes are unknown, or the rate of its products."""
    if kernel.bytes is None:
        return None
    dtype = "tf32" if kernel.dtype == "fp32" and tf32 else kernel.dtype
    rate = None if not kernel.flops or dtype is None else matmul_tflops.get(dtype)
    if kernel.flops and rate is None:
        return None
    return Least(
        kernel=kernel,
        compute_seconds=(kernel.flops or 0.0) / (1e12 * (rate or 1.0)),
        memory_seconds=kernel.bytes / bandwidth,
        tflops=rate,
    )
