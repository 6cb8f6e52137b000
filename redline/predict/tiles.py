"""How long a matrix multiplication takes on a device, from its sizes alone: alignment, tiles and waves.

    estimate(gemm, device, "bf16") -> Estimate(tile=(128, 256), tiles=384, waves=3, wave_efficiency=0.97, ...)

A GPU cuts C[m, n] into tiles, one per multiprocessor at a time. Tiles that stick out over the edge waste work (tile
quantization), and the last round of tiles leaves multiprocessors idle (wave quantization):

    tiles = ceil(m/Tm) ceil(n/Tn) batch     tile efficiency = m n batch / (tiles Tm Tn)
    waves = ceil(tiles/SMs)                 wave efficiency = tiles / (waves SMs)

This is a prediction: the library may choose other tiles than the best of TILES. `redline lint --measure` compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from redline.core.devices import Device
from redline.predict.gemms import Gemm

# The output tiles that cuBLAS and CUTLASS are built with, the efficient ones first (NVIDIA, Matrix Multiplication
# Background User's Guide).
TILES = ((128, 256), (256, 128), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
# A tile loads Tm + Tn numbers for Tm Tn multiply-adds. The fewer multiply-adds per number, the longer the tensor cores
# wait; this many per number are lost to that. An assumption: it puts 64x64 tiles at 0.79 of 128x256 ones.
LATENCY_WORK = 16
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
NARROW_ROWS_KNOWN_FOR = ("bf16", "fp16")
# cuBLAS splits the long sum of a weight gradient among idle multiprocessors when its own tiles would not fill them.
SPLIT_BELOW_WAVES, SPLIT_FROM_K = 2, 2048
# Sizes along which a matrix of the GEMM is stored contiguously. Tokens are never among them, so b*s needs no alignment.
CONTIGUOUS = {"forward": ("n", "k"), "dgrad": ("n", "k"), "wgrad": ("m", "n")}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    tile: tuple[int, int]
    tiles: int
    waves: float
    """A whole number, unless `whole_waves` is False or the sum is split, so that multiprocessors share the work."""
    tile_efficiency: float
    wave_efficiency: float
    seconds: float
    """Seconds per call."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a device for one GEMM, as far as the GEMM's sizes decide it."""

    flops: float
    bandwidth: float
    multiprocessors: int
    element_bytes: int


def estimate(gemm: Gemm, device: Device, dtype: str, *, whole_waves: bool = True) -> Estimate:
    """Estimate a GEMM with the best of TILES. Without `whole_waves` a last round costs only the multiprocessors it
    uses: what is left is the loss to tiles alone."""
    return _estimate(gemm, speed_of(gemm, device, dtype), whole_waves)


@lru_cache(maxsize=4096)  # lint tries many widths, and most GEMMs of a step are the same in all of them
def _estimate(gemm: Gemm, speed: Speed, whole_waves: bool) -> Estimate:
    return min((with_tile(gemm, tile, speed, whole_waves) for tile in TILES), key=lambda one: one.seconds)


def speed_of(gemm: Gemm, device: Device, dtype: str) -> Speed:
    """Return what can be reached of the data sheet, less what the rows' alignment costs."""
    return Speed(
        flops=device.reachable_tflops(dtype) * 1e12 * _alignment_rate(gemm, device, dtype),
        bandwidth=device.reachable_bandwidth,
        multiprocessors=device.multiprocessors,
        element_bytes=ELEMENT_BYTES[dtype],
    )


def with_tile(gemm: Gemm, tile: tuple[int, int], speed: Speed, whole_waves: bool = True) -> Estimate:
    rows, columns = tile
    tiles = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns) * gemm.batch
    waves = tiles / speed.multiprocessors
    if whole_waves and not _splits_its_sum(gemm, waves):
        waves = math.ceil(waves)
    # A tile of every wave costs 2 Tm Tn k on its multiprocessor, however much of it is used.
    compute = waves * 2 * rows * columns * gemm.k * speed.multiprocessors / (speed.flops * _tile_rate(tile))
    moved = (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) * gemm.batch * speed.element_bytes
    return Estimate(
        tile=tile,
        tiles=tiles,
        waves=waves,
        tile_efficiency=gemm.m * gemm.n * gemm.batch / (tiles * rows * columns),
        wave_efficiency=tiles / (waves * speed.multiprocessors),
        seconds=max(compute, moved / speed.bandwidth),
    )


def row_alignment(gemm: Gemm, dtype: str) -> int:
    """Return the largest power of two that divides the row length of every matrix of the GEMM, in bytes."""
    return min(power_of_two(getattr(gemm, name) * ELEMENT_BYTES[dtype]) for name in CONTIGUOUS[gemm.direction])


def power_of_two(number: int) -> int:
    """Return the largest power of two that divides `number`: 24 -> 8."""
    return number & -number


def _tile_rate(tile: tuple[int, int]) -> float:
    """Return a tile's rate relative to the best tile's."""
    return _busy(tile) / _busy(TILES[0])


def _busy(tile: tuple[int, int]) -> float:
    work = tile[0] * tile[1] / (tile[0] + tile[1])
    return work / (work + LATENCY_WORK)


def _alignment_rate(gemm: Gemm, device: Device, dtype: str) -> float:
    """Return the share of the rate that alignment leaves. No figure is published for rows aligned to 16 to 64 bytes: 1
    for those, and wherever no figure is known."""
    return device.narrow_rates.get(row_alignment(gemm, dtype), 1.0) if cost_is_known(device, dtype) else 1.0


def cost_is_known(device: Device, dtype: str) -> bool:
    """True if a figure says what rows aligned to less than 16 bytes cost."""
    return device.vendor == "NVIDIA" and dtype in NARROW_ROWS_KNOWN_FOR


def _splits_its_sum(gemm: Gemm, waves: float) -> bool:
    few = waves < SPLIT_BELOW_WAVES and gemm.batch == 1
    return gemm.direction == "wgrad" and few and gemm.k >= SPLIT_FROM_K
