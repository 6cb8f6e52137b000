"""Where a step runs: what the probe saw of this machine, and the data-sheet peaks of devices we are sure of.

    lookup("NVIDIA H200").peak_tflops["bf16"] -> 989.4;  lookup("NVIDIA GeForce RTX 4090 Laptop GPU") -> None

A name matches exactly or not at all. A laptop variant, a MIG slice or a new card has no row and so no peak: printing
a neighbour's number would be worse than printing none. Peaks are dense (no sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine, as `engine.probe` saw it through torch."""

    kind: str
    """'cuda' or 'cpu'."""
    name: str
    """As the driver or /proc/cpuinfo reports it."""
    count: int = 1
    memory_bytes: int | None = None
    capability: tuple[int, ...] = ()
    """CUDA compute capability, such as (9, 0)."""
    multiprocessors: int | None = None
    driver: str | None = None
    cpu_name: str = ""
    cpu_cores: int = 1
    features: tuple[str, ...] = ()
    """What rungs ask for: 'bf16', 'fp16', 'tf32', 'flash', 'cudnn-attention', 'compile'."""
    missing: dict[str, str] = field(default_factory=dict)
    """Feature -> the reason this machine lacks it."""

    @property
    def peak_tflops(self) -> dict[str, float] | None:
        known = lookup(self.name) if self.kind == "cuda" else None
        return None if known is None else known.peak_tflops


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of the table: dense peaks in TFLOP/s as the data sheet gives them."""

    names: tuple[str, ...]
    peak_tflops: dict[str, float]
    source: str


# One row per processor. 16-bit peaks are with fp32 accumulation. The `hardware` issue grows this table.
DEVICES = (
    Device(
        names=("NVIDIA H200",),
        peak_tflops={"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
        source="NVIDIA H200 data sheet, SXM column, halved where it is stated with sparsity",
    ),
    Device(
        names=("NVIDIA H100 80GB HBM3",),
        peak_tflops={"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
        source="NVIDIA H100 data sheet, SXM column, halved where it is stated with sparsity",
    ),
    Device(
        names=("NVIDIA H100 PCIe",),
        peak_tflops={"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0},
        source="NVIDIA H100 Tensor Core GPU architecture white paper, PCIe column",
    ),
    Device(
        names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        peak_tflops={"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
        source="NVIDIA A100 data sheet",
    ),
    Device(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        peak_tflops={"fp32": 15.7, "fp16": 125.0},
        source="NVIDIA V100 data sheet, SXM2 column",
    ),
    Device(
        names=("Tesla T4",),
        peak_tflops={"fp32": 8.1, "fp16": 65.0},
        source="NVIDIA T4 data sheet",
    ),
)


def lookup(name: str) -> Device | None:
    """The row of a device by the exact string its driver reports."""
    return next((device for device in DEVICES if name in device.names), None)
