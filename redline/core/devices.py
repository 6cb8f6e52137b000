"""What the data sheets say: dense peaks, memory and bandwidth of the accelerators we are sure of.

    lookup("NVIDIA H200").peak_tflops["bf16"] -> 989.4;  lookup("NVIDIA GeForce RTX 4090 Laptop GPU") -> None
    find_device("a100-80").bandwidth -> 2.039e12;  why_unknown("NVIDIA H200 MIG 1g.18gb") -> "a MIG slice has ..."

A driver's name matches exactly or not at all. A laptop variant, a MIG slice or a new card has no row and so no peak:
a neighbour's number would be worse than none. docs/hardware.md has the conventions and says how to add a row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from redline.core.errors import UserError, unknown_name
from redline.core.units import MIB

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
# Shares of a data sheet's peaks that the largest matmul and the largest copy are assumed to reach if unmeasured: one
# H200 does 790 of 989.4 TFLOP/s and 4.3 of 4.8 TB/s (docs/sources.md 2).
TYPICAL_MATMUL, TYPICAL_BANDWIDTH = 0.80, 0.90
VECTOR_BYTES = 16  # one load of a thread: rows of matrices that do not start at multiples of it are slow on every card
# Share of a 16-bit matmul's rate that is left when rows start at odd multiples of this many bytes and the library falls
# back on narrow loads. Hopper: `redline lint --measure` on an H200, torch 2.11 with CUDA 13.0 (records/: vocabulary
# 50257, d_ff 10922 and heads of 100 against their neighbours). Others, as published: 50257 against 50304 was 30 % of an
# A100's step; d_ff 10922 against 10944 gave 272.7 and 398.4 TFLOP/s on an H100, older library (docs/sources.md 1, 4).
NARROW_RATES = {2: 0.37, 4: 0.68, 8: 0.68}
NARROW_RATES_ON = {"Hopper": {2: 0.15, 4: 0.29, 8: 0.34}}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One row: what the driver calls one device (on an MI250X that is half of the card)."""

    label: str
    """Short and unique: what tables print and --gpu takes."""
    names: tuple[str, ...]
    """Exactly as drivers report it, including the older spelling without the vendor."""
    aliases: tuple[str, ...] = ()
    """What people type for exactly this device."""
    vendor: str = "NVIDIA"
    architecture: str
    peak_tflops: dict[str, float]
    """Dense: figures quoted with sparsity are halved. A missing dtype is one that the device lacks, or one that no data
    sheet settles (then `notes` says so). fp32 is plain arithmetic on NVIDIA and the matrix cores' on AMD; int8 counts
    integer operations."""
    accumulate: str | None = None
    """Set if the 16-bit rate depends on the accumulator's dtype; the table has the rate with fp32."""
    memory_bytes: int
    """What the driver reports (nvidia-smi, ECC as the card ships): a little below the marketed GB, which are GiB."""
    bandwidth: float
    """Bytes per second."""
    multiprocessors: int
    """SMs on NVIDIA, compute units on AMD. A device that reports fewer is a slice of this one."""
    alignment_bytes: int = 128
    """Row alignment of matrices for full matrix-core speed."""
    best_tflops: dict[str, float] = field(default_factory=dict)
    """The highest matmul rate that anyone has measured, by dtype; `best_source` says who."""
    best_source: str = ""
    source: str
    notes: str = ""

    def reachable_tflops(self, dtype: str) -> float:
        """Return the rate of a large matmul in practice: the best measured, or a typical share of the data sheet's."""
        return self.best_tflops.get(dtype, TYPICAL_MATMUL * self.peak_tflops[dtype])

    @property
    def narrow_rates(self) -> dict[int, float]:
        """Shares of the matmul rate for rows that start at multiples of 2, 4 or 8 bytes."""
        if self.vendor != "NVIDIA":
            return dict.fromkeys(NARROW_RATES, 1.0)  # no figure is known
        return NARROW_RATES_ON.get(self.architecture, NARROW_RATES)

    @property
    def reachable_bandwidth(self) -> float:
        return TYPICAL_BANDWIDTH * self.bandwidth


# Rates that several rows share. fp8 is with fp32 accumulation throughout.
_V100_SXM = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0, "int8": 624.0}
_H100_SXM = {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9}

_MAMF = "MAMF, github.com/stas00/ml-engineering"  # its table of maximum achievable matmul FLOPS; docs/sources.md 5
_V100_SHEET = "NVIDIA V100 data sheet (https://www.nvidia.com/en-us/data-center/v100/)"
_A100_SHEET = "NVIDIA A100 data sheet (https://www.nvidia.com/en-us/data-center/a100/)"
_H100_SHEET = "NVIDIA H100 data sheet (https://www.nvidia.com/en-us/data-center/h100/), halved from sparse"
_H200_SHEET = "NVIDIA H200 data sheet (https://www.nvidia.com/en-us/data-center/h200/), halved from sparse"
_GH200_SHEET = "NVIDIA GH200 Grace Hopper Superchip data sheet, halved from sparse"
_BLACKWELL_SHEET = "NVIDIA Blackwell data sheet, figures of one GPU, halved from sparse"
_AMPERE_PAPER = "NVIDIA Ampere GA102 GPU Architecture white paper"
_ADA_PAPER = "NVIDIA Ada GPU Architecture white paper"
_HALVED_TENSOR = "This part halves its tensor cores with fp32 accumulation, as GeForce does. "
_CDNA_ALIGNMENT = (
    "AMD publishes no alignment rule: 128 bytes is the cache line. Strides that are large powers of two can be slow"
)


def _measured(rate: float) -> dict[str, float]:
    """Measured in bf16; fp16 runs on the same units at the same rate."""
    return {"bf16": rate, "fp16": rate}


def _halved(full_rate: float) -> str:
    return f"fp32; with fp16 accumulation the 16-bit rate is {full_rate:g}, which training in torch does not use"


# One row per device, by age. 16-bit and fp8 peaks are with fp32 accumulation, as torch computes.
DEVICES = (
    Device(
        label="V100-16-SXM",
        names=("Tesla V100-SXM2-16GB",),
        aliases=("V100-SXM-16", "V100-SXM2-16GB"),
        architecture="Volta",
        peak_tflops=_V100_SXM,
        memory_bytes=16384 * MIB,
        bandwidth=900e9,
        multiprocessors=80,
        alignment_bytes=16,
        source=_V100_SHEET,
    ),
    Device(
        label="V100-32-SXM",
        names=("Tesla V100-SXM2-32GB",),
        aliases=("V100-SXM-32", "V100-SXM2-32GB"),
        architecture="Volta",
        peak_tflops=_V100_SXM,
        memory_bytes=32768 * MIB,
        bandwidth=900e9,
        multiprocessors=80,
        alignment_bytes=16,
        source=_V100_SHEET,
    ),
    Device(
        label="V100-16-PCIe",
        names=("Tesla V100-PCIE-16GB",),
        aliases=("V100-PCIE-16", "V100-PCIE-16GB"),
        architecture="Volta",
        peak_tflops=_V100_PCIE,
        memory_bytes=16384 * MIB,
        bandwidth=900e9,
        multiprocessors=80,
        alignment_bytes=16,
        source=_V100_SHEET,
    ),
    Device(
        label="V100-32-PCIe",
        names=("Tesla V100-PCIE-32GB",),
        aliases=("V100-PCIE-32", "V100-PCIE-32GB"),
        architecture="Volta",
        peak_tflops=_V100_PCIE,
        memory_bytes=32768 * MIB,
        bandwidth=900e9,
        multiprocessors=80,
        alignment_bytes=16,
        source=_V100_SHEET,
    ),
    Device(
        label="V100S",
        names=("Tesla V100S-PCIE-32GB",),
        architecture="Volta",
        peak_tflops={"fp32": 16.4, "fp16": 130.0},
        memory_bytes=32768 * MIB,
        bandwidth=1134e9,
        multiprocessors=80,
        alignment_bytes=16,
        source=_V100_SHEET,
    ),
    Device(
        label="T4",
        names=("Tesla T4",),
        architecture="Turing",
        peak_tflops={"fp32": 8.1, "fp16": 65.0, "int8": 130.0},
        memory_bytes=15360 * MIB,
        bandwidth=320e9,
        multiprocessors=40,
        alignment_bytes=16,
        source="NVIDIA T4 data sheet (https://www.nvidia.com/en-us/data-center/tesla-t4/)",
    ),
    Device(
        label="A100-40-SXM",
        names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        aliases=("A100-40", "A100-40GB"),
        architecture="Ampere",
        peak_tflops=_A100,
        memory_bytes=40960 * MIB,
        bandwidth=1555e9,
        multiprocessors=108,
        best_tflops=_measured(271.2),
        best_source=_MAMF,
        source=_A100_SHEET,
    ),
    Device(
        label="A100-80-SXM",
        names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        aliases=("A100-80", "A100-80GB"),
        architecture="Ampere",
        peak_tflops=_A100,
        memory_bytes=81920 * MIB,
        bandwidth=2039e9,
        multiprocessors=108,
        best_tflops=_measured(271.2),
        best_source=_MAMF,
        source=_A100_SHEET,
    ),
    Device(
        label="A100-40-PCIe",
        names=("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        architecture="Ampere",
        peak_tflops=_A100,
        memory_bytes=40960 * MIB,
        bandwidth=1555e9,
        multiprocessors=108,
        source=_A100_SHEET,
    ),
    Device(
        label="A100-80-PCIe",
        names=("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        architecture="Ampere",
        peak_tflops=_A100,
        memory_bytes=81920 * MIB,
        bandwidth=1935e9,
        multiprocessors=108,
        best_tflops=_measured(252.9),
        best_source=_MAMF,
        source=_A100_SHEET,
    ),
    Device(
        label="A30",
        names=("NVIDIA A30",),
        architecture="Ampere",
        peak_tflops={"fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0, "int8": 330.0},
        memory_bytes=24576 * MIB,
        bandwidth=933e9,
        multiprocessors=56,
        source="NVIDIA A30 data sheet (https://www.nvidia.com/en-us/data-center/products/a30-gpu/)",
    ),
    Device(
        label="A10",
        names=("NVIDIA A10",),
        architecture="Ampere",
        peak_tflops={"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0, "int8": 250.0},
        memory_bytes=23028 * MIB,
        bandwidth=600e9,
        multiprocessors=72,
        source="NVIDIA A10 data sheet (https://www.nvidia.com/en-us/data-center/products/a10-gpu/)",
    ),
    Device(
        label="A10G",
        names=("NVIDIA A10G",),
        architecture="Ampere",
        peak_tflops={"fp32": 35.0, "tf32": 35.0, "bf16": 70.0, "fp16": 70.0},
        memory_bytes=23028 * MIB,
        bandwidth=600e9,
        multiprocessors=80,
        source="NVIDIA A10G data sheet for AWS, dense column",
        notes=_HALVED_TENSOR + "Not an A10 (125 at bf16). int8 is left out: NVIDIA's and AWS's figures differ",
    ),
    Device(
        label="A40",
        names=("NVIDIA A40", "A40"),
        architecture="Ampere",
        peak_tflops={"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7, "int8": 299.3},
        memory_bytes=46068 * MIB,
        bandwidth=696e9,
        multiprocessors=84,
        source="NVIDIA A40 data sheet (https://www.nvidia.com/en-us/data-center/a40/)",
    ),
    Device(
        label="RTX-A6000",
        names=("NVIDIA RTX A6000", "RTX A6000"),
        aliases=("A6000",),
        architecture="Ampere",
        peak_tflops={"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8, "int8": 309.7},
        memory_bytes=49140 * MIB,
        bandwidth=768e9,
        multiprocessors=84,
        source=_AMPERE_PAPER,
    ),
    Device(
        label="RTX-3090",
        names=("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        aliases=("3090",),
        architecture="Ampere",
        peak_tflops={"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0, "int8": 284.0},
        accumulate=_halved(142),
        memory_bytes=24576 * MIB,
        bandwidth=936e9,
        multiprocessors=82,
        source=_AMPERE_PAPER,
    ),
    Device(
        label="RTX-4090",
        names=("NVIDIA GeForce RTX 4090",),
        aliases=("4090",),
        architecture="Ada",
        peak_tflops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "int8": 660.6},
        accumulate=_halved(330.3),
        memory_bytes=24564 * MIB,
        bandwidth=1008e9,
        multiprocessors=128,
        source=_ADA_PAPER,
    ),
    Device(
        label="RTX-6000-Ada",
        names=("NVIDIA RTX 6000 Ada Generation",),
        aliases=("6000-Ada",),
        architecture="Ada",
        peak_tflops={"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5, "int8": 728.5},
        memory_bytes=49140 * MIB,
        bandwidth=960e9,
        multiprocessors=142,
        source=_ADA_PAPER,
        notes="The product page's 1457 TFLOP/s is fp8 with sparsity",
    ),
    Device(
        label="L4",
        names=("NVIDIA L4",),
        architecture="Ada",
        peak_tflops={"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5, "int8": 242.5},
        memory_bytes=23034 * MIB,
        bandwidth=300e9,
        multiprocessors=58,
        source="NVIDIA L4 data sheet (https://www.nvidia.com/en-us/data-center/l4/), halved from sparse",
    ),
    Device(
        label="L40",
        names=("NVIDIA L40",),
        architecture="Ada",
        peak_tflops={"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362.0, "int8": 362.0},
        memory_bytes=46068 * MIB,
        bandwidth=864e9,
        multiprocessors=142,
        source="NVIDIA L40 data sheet (https://www.nvidia.com/en-us/data-center/l40/), dense column",
        notes=_HALVED_TENSOR + "Not an L40S (twice the tensor rate)",
    ),
    Device(
        label="L40S",
        names=("NVIDIA L40S",),
        architecture="Ada",
        peak_tflops={"fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0, "int8": 733.0},
        memory_bytes=46068 * MIB,
        bandwidth=864e9,
        multiprocessors=142,
        source="NVIDIA L40S data sheet (https://www.nvidia.com/en-us/data-center/l40s/), dense column",
        notes="The data sheet's first 16-bit figure is 362.05; 733 is with sparsity",
    ),
    Device(
        label="H100-PCIe",
        names=("NVIDIA H100 PCIe",),
        architecture="Hopper",
        peak_tflops={"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0, "int8": 1513.0},
        memory_bytes=81559 * MIB,
        bandwidth=2000e9,
        multiprocessors=114,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper, PCIe column",
    ),
    Device(
        label="H100-SXM",
        names=("NVIDIA H100 80GB HBM3",),
        aliases=("H100-SXM5",),
        architecture="Hopper",
        peak_tflops=_H100_SXM,
        memory_bytes=81559 * MIB,
        bandwidth=3350e9,
        multiprocessors=132,
        best_tflops=_measured(794.5),
        best_source=_MAMF,
        source=_H100_SHEET,
    ),
    Device(
        label="H100-NVL",
        names=("NVIDIA H100 NVL",),
        aliases=("H100-94GB",),
        architecture="Hopper",
        peak_tflops=_H100_NVL,
        memory_bytes=95830 * MIB,
        bandwidth=3900e9,
        multiprocessors=132,
        source=_H100_SHEET,
        notes="Figures of one card; early tables sum the pair",
    ),
    Device(
        label="H200",
        names=("NVIDIA H200",),
        aliases=("H200-SXM", "H200-141GB"),
        architecture="Hopper",
        peak_tflops=_H100_SXM,
        memory_bytes=143771 * MIB,
        bandwidth=4800e9,
        multiprocessors=132,
        best_tflops=_measured(795.0),  # 788 on ours
        best_source=_MAMF,
        source=_H200_SHEET,
    ),
    Device(
        label="H200-NVL",
        names=("NVIDIA H200 NVL",),
        architecture="Hopper",
        peak_tflops=_H100_NVL,
        memory_bytes=143771 * MIB,
        bandwidth=4800e9,
        multiprocessors=132,
        source=_H200_SHEET,
    ),
    Device(
        label="GH200-96",
        names=("NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "GH200 120GB"),
        aliases=("GH200-96GB", "GH200-480GB"),
        architecture="Hopper",
        peak_tflops=_H100_SXM,
        memory_bytes=97871 * MIB,
        bandwidth=4000e9,
        multiprocessors=132,
        best_tflops=_measured(828.6),
        best_source=_MAMF,
        source=_GH200_SHEET,
        notes="The driver's name counts the CPU's memory: 480 or 120 GB of LPDDR5X beside 96 GB of HBM3",
    ),
    Device(
        label="GH200-144",
        names=("NVIDIA GH200 144G HBM3e",),
        aliases=("GH200-144GB",),
        architecture="Hopper",
        peak_tflops=_H100_SXM,
        memory_bytes=146831 * MIB,
        bandwidth=4900e9,
        multiprocessors=132,
        best_tflops=_measured(828.6),
        best_source=_MAMF,
        source=_GH200_SHEET,
    ),
    Device(
        label="B200",
        names=("NVIDIA B200",),
        aliases=("B200-SXM", "B200-180GB"),
        architecture="Blackwell",
        peak_tflops={"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "int8": 4500.0},
        memory_bytes=183359 * MIB,
        bandwidth=8000e9,
        multiprocessors=148,
        best_tflops=_measured(1745.0),
        best_source=_MAMF,
        source=_BLACKWELL_SHEET,
        notes="Bandwidth is the DGX B200 data sheet's (64 TB/s for eight); the Blackwell data sheet says 7.7 TB/s",
    ),
    Device(
        label="GB200",
        names=("NVIDIA GB200",),
        architecture="Blackwell",
        peak_tflops={"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "int8": 5000.0},
        memory_bytes=189471 * MIB,
        bandwidth=8000e9,
        multiprocessors=152,
        source=_BLACKWELL_SHEET,
        notes="Figures of one of the two GPUs of a superchip",
    ),
    Device(
        label="B300",
        names=("NVIDIA B300 SXM6 AC",),
        aliases=("B300-SXM", "B300-288GB"),
        architecture="Blackwell",
        peak_tflops={"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        memory_bytes=275040 * MIB,
        bandwidth=8000e9,
        multiprocessors=148,
        best_tflops=_measured(1769.0),
        best_source=_MAMF,
        source="NVIDIA HGX B300 specifications, an eighth of the board, halved from sparse",
        notes="int8 is far below fp8 on this part and its figures differ from page to page: left out",
    ),
    Device(
        label="RTX-5090",
        names=("NVIDIA GeForce RTX 5090",),
        aliases=("5090",),
        architecture="Blackwell",
        peak_tflops={"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0, "int8": 838.0},
        accumulate=_halved(419),
        memory_bytes=32607 * MIB,
        bandwidth=1792e9,
        multiprocessors=170,
        source="NVIDIA RTX Blackwell GPU Architecture white paper",
    ),
    Device(
        label="MI250X",
        names=("AMD Instinct MI250X",),
        aliases=("MI250X-GCD",),
        vendor="AMD",
        architecture="CDNA 2",
        peak_tflops={"fp32": 47.85, "bf16": 191.5, "fp16": 191.5, "int8": 191.5},
        memory_bytes=65536 * MIB,
        bandwidth=1638.4e9,
        multiprocessors=110,
        source="AMD Instinct MI250X data sheet, halved: the driver shows each of the two dies as a device",
        notes="One die (GCD) of two. " + _CDNA_ALIGNMENT,
    ),
    Device(
        label="MI300X",
        names=("AMD Instinct MI300X",),
        vendor="AMD",
        architecture="CDNA 3",
        peak_tflops=_MI300X,
        memory_bytes=196608 * MIB,
        bandwidth=5300e9,
        multiprocessors=304,
        best_tflops=_measured(668.4),
        best_source=_MAMF,
        source="AMD Instinct MI300X data sheet",
        notes=_CDNA_ALIGNMENT,
    ),
    Device(
        label="MI325X",
        names=("AMD Instinct MI325X",),
        vendor="AMD",
        architecture="CDNA 3",
        peak_tflops=_MI300X,
        memory_bytes=262144 * MIB,
        bandwidth=6000e9,
        multiprocessors=304,
        best_tflops=_measured(784.9),
        best_source=_MAMF,
        source="AMD Instinct MI325X data sheet",
        notes=_CDNA_ALIGNMENT,
    ),
)

# Driver names of devices that are not, or may not be, the whole card of that name: a pattern and the reason.
_NOT_THE_CARD = (
    (r"\bMIG\b", "a MIG slice has a part of the card's multiprocessors and memory: the card's figures would be wrong"),
    (
        r"\b(laptop|mobile|max-q|notebook)\b",
        "a part for laptops has fewer multiprocessors and less power than the card, whose figures would be wrong",
    ),
    (r"^grid\b|\bvgpu\b|-\d+[abcq]$", "a virtual GPU has a share of a card: the card's figures would be wrong"),
    (r"\bVF$", "a virtual function may be a partition of the card, whose figures would then be wrong"),
    (r"^AMD Instinct MI250X / MI250$", "the driver gives two cards this name, MI250X and MI250, and they differ"),
)
# Names that people use for several cards, and the labels of those cards.
_SHARED_NAMES = {
    "h100 80": ("H100-PCIe", "H100-SXM"),
    "h100 80gb": ("H100-PCIe", "H100-SXM"),
    "rtx 6000": ("RTX-A6000", "RTX-6000-Ada"),  # also a Turing Quadro, which has no row
}
_VENDOR_WORDS = {
    **dict.fromkeys(("nvidia", "geforce", "tesla", "quadro", "grid"), "NVIDIA"),
    **dict.fromkeys(("amd", "ati", "radeon", "instinct"), "AMD"),
    "intel": "Intel",
}


def lookup(driver_name: str) -> Device | None:
    """Return the row of a device by the exact string its driver reports, or None."""
    return next((device for device in DEVICES if driver_name in device.names), None)


def why_unknown(driver_name: str) -> str:
    """Explain to the user why `lookup` does not know a name."""
    for pattern, reason in _NOT_THE_CARD:
        if re.search(pattern, driver_name, re.IGNORECASE):
            return reason
    near = _candidates(driver_name)
    meant = f" (near: {', '.join(near)})" if near else ""
    return f"the device table has no {driver_name!r}{meant}, and a neighbour's figures would be wrong"


def find_device(words: str) -> Device:
    """Find a device by label, alias or driver name; case, spaces and hyphens do not matter. Nothing is guessed."""
    wanted = _key(words)
    for device in _made_by(words):
        if wanted in map(_key, (device.label, *device.aliases, *device.names)):
            return device
    near = _candidates(words)
    if near:
        raise UserError(
            f"{words!r} is not the name of one device", "devices of a family differ", f"use one of: {', '.join(near)}"
        )
    if looks_like_driver_name(words):
        known = ", ".join(device.label for device in DEVICES)
        raise UserError(f"unknown device {words!r}", why_unknown(words), f"known: {known}")
    raise unknown_name("device", words, [device.label for device in DEVICES])


def looks_like_driver_name(words: str) -> bool:
    """'NVIDIA B9000' is a card we do not know; 'B9000' is more likely a typo."""
    return _words(words)[0] in _VENDOR_WORDS


def _made_by(words: str) -> Iterator[Device]:
    """Return the devices of the vendor that the words start with, or all if they name none: there is no AMD H200."""
    stated = {_VENDOR_WORDS[word] for word in itertools.takewhile(_VENDOR_WORDS.__contains__, _words(words))}
    return (device for device in DEVICES if stated <= {device.vendor})


def _candidates(words: str) -> list[str]:
    """Return the labels of the family that was named: 'A100' or 'NVIDIA A100' -> every A100."""
    wanted, shared = _key(words), _SHARED_NAMES.get(_key(words), ())
    return [
        device.label
        for device in _made_by(words)
        if device.label in shared or (wanted and f"{_key(device.label)} ".startswith(f"{wanted} "))
    ]


def _key(words: str) -> str:
    """'NVIDIA GeForce RTX 4090' and 'rtx-4090' are the same device."""
    return " ".join(itertools.dropwhile(_VENDOR_WORDS.__contains__, _words(words)))


def _words(words: str) -> list[str]:
    return re.split(r"[\s_-]+", words.strip().casefold())
