"""Where a step runs: what the probe saw of this machine, and what was measured on it.

Hardware(kind="cuda", name="NVIDIA H200").peak_tflops["bf16"] -> 989.4, from the table in core/devices.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.core.devices import Device, lookup
from redline.core.layout import Layout

BOOST_MARGIN = 0.10


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine, as `engine.probe` saw it through torch."""

    kind: str
    """'cuda' or 'cpu'."""
    name: str
    """As the driver or /proc/cpuinfo reports it."""
    count: int = 1
    ranks: int = 1
    """Processes that train together, one device each."""
    layout: Layout | None = None
    """How the ranks share a step; None: they differ only in their data."""
    memory_bytes: int | None = None
    capability: tuple[int, ...] = ()
    """CUDA compute capability, such as (9, 0)."""
    multiprocessors: int | None = None
    driver: str | None = None
    cpu_name: str = ""
    cpu_cores: int = 1
    features: tuple[str, ...] = ()
    """What rungs may require: 'bf16', 'fp16', 'tf32', 'flash', 'cudnn-attention', 'compile', 'triton', 'fp8',
    'cublaslt', 'cudnn-frontend', 'flash4', 'quack'."""
    missing: dict[str, str] = field(default_factory=dict)
    """Feature -> why this machine lacks it."""

    @property
    def arranged(self) -> Layout:
        return self.layout or Layout(ranks=self.ranks)

    @property
    def device(self) -> Device | None:
        """Its row in the device table; None on a CPU and for cards that no row describes."""
        return known_device(self.name, self.multiprocessors) if self.kind == "cuda" else None

    @property
    def peak_tflops(self) -> dict[str, float] | None:
        return None if self.device is None else self.device.peak_tflops


def known_device(name: str, multiprocessors: int | None) -> Device | None:
    """Return the device's row if it is that card and all of it. A partition of an AMD card has the card's name but
    fewer compute units; a device with more of them is a card that the row does not describe."""
    known = lookup(name)
    whole = known is not None and multiprocessors in (None, known.multiprocessors)
    return known if whole else None


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """A matmul that was timed."""

    dtype: str
    where: str
    """'up forward', or 'square' for the sizes that belong to no model."""
    m: int
    n: int
    k: int
    median_seconds: float
    best_seconds: float

    @property
    def tflops(self) -> float:
        """Rate at the median time; a multiply-add counts as two."""
        return 2 * self.m * self.n * self.k / self.median_seconds / 1e12

    @property
    def best_tflops(self) -> float:
        return 2 * self.m * self.n * self.k / self.best_seconds / 1e12


@dataclass(frozen=True, kw_only=True)
class MeasuredPeaks:
    """The highest rates measured on this device, and how they were measured."""

    name: str
    """As the driver reports it."""
    driver: str | None
    kind: str
    """'cuda' or 'cpu'."""
    matmul_tflops: dict[str, float]
    """By dtype: the rate of the fastest matmul at its median time."""
    bandwidth: float
    """Bytes per second, read and written: the highest of `bandwidths`."""
    bandwidths: dict[str, float]
    """By access pattern: 'copy' (one read, one write), 'triad' (two reads, one write), 'read'."""
    rates: tuple[MeasuredRate, ...]
    """Every matmul that was timed."""
    workload: str
    micro_batch: int
    date: str
    versions: dict[str, str | None]
    command: str
    failed: tuple[str, ...] = ()
    """Matmuls that gave no rate, and why."""


def beyond_the_data_sheet(measured: MeasuredPeaks, device: Device) -> str | None:
    """Return why a measurement cannot be of this device, or None. Clocks above the one that the data sheet assumes
    explain a few percent; anything more means another device, a wrong row or wrong timing."""
    pairs = {dtype: (rate, 1e12 * device.peak_tflops[dtype]) for dtype, rate in _tflops_of(measured, device).items()}
    pairs["memory"] = (measured.bandwidth, device.bandwidth)
    for what, (rate, sheet) in pairs.items():
        if rate > (1 + BOOST_MARGIN) * sheet:
            return (
                f"{what} at {rate / sheet:.0%} of what the data sheet of {device.label} allows: no clock explains "
                f"more than {1 + BOOST_MARGIN:.0%}, so device, data sheet or timing is wrong"
            )
    return None


def _tflops_of(measured: MeasuredPeaks, device: Device) -> dict[str, float]:
    """Return FLOP/s by dtype, for the dtypes that the data sheet lists too."""
    return {dtype: 1e12 * rate for dtype, rate in measured.matmul_tflops.items() if dtype in device.peak_tflops}
