"""The device table against a second source (clocks times units), against known traps, and the ways to name a device."""

from __future__ import annotations

import pytest

from redline.core import devices
from redline.core.devices import DEVICES, DTYPES, find_device, looks_like_driver_name, lookup, why_unknown
from redline.core.errors import UserError
from redline.core.hardware import Hardware, MeasuredRate, known_device

every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.label)

# An independent account of the 16-bit peak: boost clock in GHz (of the tensor rate, as the white papers print it) and
# FLOPs per clock and multiprocessor with fp32 accumulation: Volta and Turing 1024, GA100 2048, GA102 and AD10x 1024 or
# halved 512, GH100 4096, CDNA 2 1024, CDNA 3 2048. A neighbour's rate, a sparse one or a forgotten half shows.
CLOCKS = {
    "V100-16-SXM": (1.530, 1024),
    "V100-32-SXM": (1.530, 1024),
    "V100-16-PCIe": (1.380, 1024),
    "V100-32-PCIe": (1.380, 1024),
    "V100S": (1.597, 1024),
    "T4": (1.590, 1024),
    "A100-40-SXM": (1.410, 2048),
    "A100-80-SXM": (1.410, 2048),
    "A100-40-PCIe": (1.410, 2048),
    "A100-80-PCIe": (1.410, 2048),
    "A30": (1.440, 2048),
    "A10": (1.695, 1024),
    "A10G": (1.710, 512),
    "A40": (1.740, 1024),
    "RTX-A6000": (1.800, 1024),
    "RTX-3090": (1.695, 512),
    "RTX-4090": (2.520, 512),
    "RTX-6000-Ada": (2.505, 1024),
    "L4": (2.040, 1024),
    "L40": (2.490, 512),
    "L40S": (2.520, 1024),
    "RTX-5090": (2.407, 512),
    "H100-SXM": (1.830, 4096),
    "H100-PCIe": (1.620, 4096),
    "H200": (1.830, 4096),
    "GH200-96": (1.830, 4096),
    "GH200-144": (1.830, 4096),
    "MI250X": (1.700, 1024),
    "MI300X": (2.100, 2048),
    "MI325X": (2.100, 2048),
}
# No document prints the clock of their tensor rate: only the ratios below watch them (docs/hardware.md names them).
WITHOUT_CLOCK = {"H100-NVL", "H200-NVL", "B200", "GB200", "B300"}
HALVED = {"RTX-3090", "RTX-4090", "RTX-5090"}


def sixteen_bit(device):
    return device.peak_tflops.get("bf16", device.peak_tflops["fp16"])


def test_every_row_has_a_clock_or_is_named_as_without(repository):
    assert {device.label for device in DEVICES} - set(CLOCKS) == WITHOUT_CLOCK
    page = (repository / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert "H100-NVL, H200-NVL, B200, GB200 and B300" in page


@pytest.mark.parametrize("label", CLOCKS)
def test_the_16_bit_peak_is_units_times_clock(label):
    device = find_device(label)
    clock_ghz, flops_per_clock = CLOCKS[label]
    assert sixteen_bit(device) == pytest.approx(device.multiprocessors * flops_per_clock * clock_ghz / 1e3, rel=0.015)


@pytest.mark.parametrize("label", [label for label in CLOCKS if find_device(label).architecture != "Hopper"])
def test_the_fp32_peak_is_units_times_clock(label):
    """64 fp32 cores a multiprocessor up to the GA100, 128 from the GA102 on; AMD's matrix cores do 128 a clock. Hopper
    states fp32 at a higher clock than its tensor cores."""
    device = find_device(label)
    cores = 64 if label.startswith(("V100", "T4", "A100", "A30")) else 128
    assert device.peak_tflops["fp32"] == pytest.approx(
        device.multiprocessors * 2 * cores * CLOCKS[label][0] / 1e3, rel=0.015
    )


# As the data sheets have it: TF32, bf16 (fp16 before Ampere), fp8, TB/s.
PUBLISHED = {
    "Tesla V100-SXM2-32GB": (None, 125, None, 0.90),
    "Tesla T4": (None, 65, None, 0.32),
    "NVIDIA A10": (62.5, 125, None, 0.60),
    "NVIDIA A10G": (35, 70, None, 0.60),
    "NVIDIA A100-SXM4-40GB": (156, 312, None, 1.555),
    "NVIDIA A100-SXM4-80GB": (156, 312, None, 2.039),
    "NVIDIA A100 80GB PCIe": (156, 312, None, 1.935),
    "NVIDIA L4": (60, 121, 242.5, 0.30),
    "NVIDIA L40S": (183, 362, 733, 0.864),
    "NVIDIA L40": (90.5, 181, 362, 0.864),
    "NVIDIA RTX A6000": (77.4, 154.8, None, 0.768),
    "NVIDIA GeForce RTX 3090": (35.6, 71, None, 0.936),
    "NVIDIA GeForce RTX 4090": (82.6, 165.2, 330.3, 1.008),
    "NVIDIA GeForce RTX 5090": (104.8, 209.5, 419, 1.792),
    "NVIDIA H100 PCIe": (378, 756, 1513, 2.0),
    "NVIDIA H100 80GB HBM3": (494.7, 989.4, 1978.9, 3.35),
    "NVIDIA H100 NVL": (835 / 2, 1671 / 2, 3341 / 2, 3.9),
    "NVIDIA H200": (494.7, 989.4, 1978.9, 4.8),
    "NVIDIA GH200 480GB": (494.7, 989.4, 1978.9, 4.0),
    "NVIDIA B200": (1125, 2250, 4500, 8.0),
    "NVIDIA B300 SXM6 AC": (1125, 2250, 4500, 8.0),
    "AMD Instinct MI300X": (653.7, 1307, 2615, 5.3),
    "AMD Instinct MI325X": (653.7, 1307, 2615, 6.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name):
    device, (tf32, half, fp8, terabytes) = lookup(name), PUBLISHED[name]
    assert (device.peak_tflops.get("tf32"), sixteen_bit(device)) == (pytest.approx(tf32), pytest.approx(half, rel=1e-3))
    assert device.peak_tflops.get("fp8") == (None if fp8 is None else pytest.approx(fp8, rel=1e-3))
    assert device.bandwidth == pytest.approx(terabytes * 1e12)


def test_there_are_enough_devices_and_every_name_is_of_one():
    assert len(DEVICES) >= 25
    for words in ([device.label for device in DEVICES], [name for device in DEVICES for name in device.names]):
        assert len(words) == len(set(words))
    keys = [word.casefold() for device in DEVICES for word in {device.label, *device.aliases}]
    assert len(keys) == len(set(keys))


@every_device
def test_a_row_is_whole_and_of_the_right_size(device):
    assert set(device.peak_tflops) <= set(DTYPES)
    assert {"fp32", "fp16"} <= set(device.peak_tflops)
    assert device.names
    assert device.source
    assert device.vendor in ("NVIDIA", "AMD")
    assert 8e12 < device.peak_tflops["fp32"] * 1e12 < sixteen_bit(device) * 1e12 < 3e15
    assert 14e9 < device.memory_bytes < 300e9
    assert 0.2e12 < device.bandwidth < 10e12
    assert 32 <= device.multiprocessors <= 304


@every_device
def test_rates_double_as_the_types_halve(device):
    """A figure with sparsity among figures without, or one of another card, breaks the ratio."""
    peaks = device.peak_tflops
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.015)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.015)
    if "bf16" in peaks:
        assert peaks["fp16"] == peaks["bf16"]


@every_device
def test_types_come_with_the_architecture(device):
    peaks, old = device.peak_tflops, device.architecture in ("Volta", "Turing")
    assert ("bf16" in peaks) is not old
    assert ("fp8" in peaks) is (device.architecture in ("Ada", "Hopper", "Blackwell", "CDNA 3"))
    assert device.alignment_bytes == (16 if old else 128)


def test_geforce_states_its_fp32_accumulation():
    for device in DEVICES:
        assert (device.accumulate is not None) is (device.label in HALVED)
    assert "330.3" in find_device("RTX 4090").accumulate


def test_an_mi250x_is_the_half_that_the_driver_shows():
    device = lookup("AMD Instinct MI250X")
    assert device.peak_tflops["bf16"] * 2 == pytest.approx(383)
    assert device.bandwidth * 2 == pytest.approx(3276.8e9)
    assert (device.multiprocessors, device.memory_bytes) == (110, 64 * 1024**3)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80-SXM"),
        ("A100-SXM4-40GB", "A100-40-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla V100-SXM2-32GB", "V100-32-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
    ],
)
def test_driver_names(name, label):
    assert lookup(name).label == label


STRANGERS = {
    "NVIDIA GeForce RTX 4090 Laptop GPU": "laptops",
    "NVIDIA GeForce RTX 4090 D": "no 'NVIDIA GeForce RTX 4090 D'",
    "Quadro RTX 6000 with Max-Q Design": "laptops",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "MIG slice",
    "NVIDIA H200 MIG 1g.18gb": "MIG slice",
    "GRID A100-10C": "virtual GPU",
    "NVIDIA A40-48Q": "virtual GPU",
    "AMD Instinct MI300X VF": "virtual function",
    "AMD Instinct MI250X / MI250": "two cards",
    "NVIDIA A100-SXM-64GB": "no 'NVIDIA A100-SXM-64GB'",
    "NVIDIA B9000": "no 'NVIDIA B9000'",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_has_no_row_and_the_reason_says_why(name):
    assert lookup(name) is None
    assert STRANGERS[name] in why_unknown(name)
    with pytest.raises(UserError) as error:
        find_device(name)
    assert error.value.why == why_unknown(name)
    assert Hardware(kind="cuda", name=name).peak_tflops is None


@every_device
def test_every_spelling_finds_its_device(device):
    for word in (device.label, *device.aliases, *device.names):
        spellings = (word, word.upper(), word.lower(), word.replace("-", " "), word.replace(" ", "_"))
        assert all(find_device(spelling) is device for spelling in spellings)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("A100", ["A100-40-SXM", "A100-80-SXM", "A100-40-PCIe", "A100-80-PCIe"]),
        ("nvidia h100", ["H100-PCIe", "H100-SXM", "H100-NVL"]),
        ("V100", ["V100-16-SXM", "V100-32-SXM", "V100-16-PCIe", "V100-32-PCIe"]),
        ("gh200", ["GH200-96", "GH200-144"]),
        ("RTX 6000", ["RTX-A6000", "RTX-6000-Ada"]),
        ("NVIDIA RTX 6000", ["RTX-A6000", "RTX-6000-Ada"]),
        ("H100-80", ["H100-PCIe", "H100-SXM"]),  # both have 80 GB
        ("h100 80gb", ["H100-PCIe", "H100-SXM"]),
    ],
)
def test_a_family_is_not_a_device(words, meant):
    with pytest.raises(UserError) as error:
        find_device(words)
    assert error.value.fix == f"use one of: {', '.join(meant)}"


@pytest.mark.parametrize("words", ["", " ", "H300", "A1000", "l40ss", "100"])
def test_a_wrong_name_lists_all(words):
    with pytest.raises(UserError) as error:
        find_device(words)
    assert all(device.label in error.value.fix for device in DEVICES)
    assert not looks_like_driver_name(words)


@pytest.mark.parametrize("name", ["AMD H200", "Intel A100-80", "Radeon RTX 4090", "NVIDIA MI300X"])
def test_another_vendors_card_is_none(name):
    with pytest.raises(UserError) as error:
        find_device(name)
    assert error.value.problem == f"unknown device {name!r}"


def test_shared_names_are_of_devices_that_exist():
    labels = {device.label for device in DEVICES}
    for words, meant in devices._SHARED_NAMES.items():
        assert set(meant) <= labels
        assert words not in {devices._key(device.label) for device in DEVICES}


# docs/sources.md 5: the highest matmul rates that were measured in bf16
MAMF = {
    "A100-40-SXM": 271.2,
    "A100-80-SXM": 271.2,
    "A100-80-PCIe": 252.9,
    "H100-SXM": 794.5,
    "H200": 795,
    "GH200-96": 828.6,
    "GH200-144": 828.6,
    "B200": 1745,
    "B300": 1769,
    "MI300X": 668.4,
    "MI325X": 784.9,
}


@every_device
def test_what_is_reached_is_measured_or_a_typical_share(device):
    dtype = "bf16" if "bf16" in device.peak_tflops else "fp16"
    assert device.best_tflops.get("bf16") == MAMF.get(device.label)
    assert bool(device.best_source) is bool(device.best_tflops)
    expected = MAMF.get(device.label, 0.80 * device.peak_tflops[dtype])
    assert device.reachable_tflops(dtype) == pytest.approx(expected)
    assert device.reachable_tflops(dtype) < device.peak_tflops[dtype]
    assert device.reachable_bandwidth == pytest.approx(0.90 * device.bandwidth)


def test_a_partition_with_the_cards_name_has_no_peak():
    """In CPX mode an MI325X shows eight devices of 38 compute units, all under the card's name."""
    assert known_device("AMD Instinct MI325X", 304).label == "MI325X"
    assert known_device("AMD Instinct MI325X", None).label == "MI325X"
    assert known_device("AMD Instinct MI325X", 38) is None
    assert known_device("AMD Instinct MI325X", 320) is None  # more than the card has: another card
    assert Hardware(kind="cuda", name="AMD Instinct MI325X", multiprocessors=38).peak_tflops is None
    assert Hardware(kind="cuda", name="AMD Instinct MI325X", multiprocessors=304).peak_tflops["bf16"] == 1307.4


def test_a_rate_counts_two_per_multiply_add():
    rate = MeasuredRate(dtype="bf16", where="square", m=1000, n=2000, k=500, median_seconds=1e-3, best_seconds=5e-4)
    assert (rate.tflops, rate.best_tflops) == (pytest.approx(2.0), pytest.approx(4.0))
