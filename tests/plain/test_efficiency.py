"""MFU and HFU: against which peak, and where there is no number but a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.hardware import DEVICES, Hardware
from redline.core.plan import Plan
from redline.predict.efficiency import efficiency
from redline.rungs import plan_of
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"].shape
quick = settings(deadline=None, max_examples=50)  # another run on the same cores must not fail a test
FLASH = plan_of(["bf16", "flash"])


def gpu(name):
    return Hardware(kind="cuda", name=name)


def test_gpt2_on_an_h200_by_hand(h200):
    """FACTS section 2: 50 % of 989 TFLOP/s is 578k tokens a second at 855.2 MFLOP; ours counts 854.4."""
    share = efficiency(GPT2, Plan(), h200, 478_476)
    assert share.mfu == pytest.approx(854_438_400 * 478_476 / 989.4e12)
    assert share.mfu == pytest.approx(0.4132, abs=1e-4)
    assert share.hfu == share.mfu  # naive attention, no padding: what is executed is what is asked


def test_hfu_counts_what_the_plan_executes(h200):
    share = efficiency(GPT2, FLASH, h200, 478_476)
    assert share.mfu == pytest.approx(0.4132, abs=1e-4)
    assert share.hfu == pytest.approx(share.mfu * 807_252_480 / 854_438_400)
    padded = efficiency(GPT2, plan_of(["padded-vocab"]), h200, 478_476)
    assert padded.mfu == share.mfu
    assert padded.hfu > padded.mfu


def test_the_convention_names_count_and_peak(h200):
    convention = efficiency(GPT2, FLASH, h200, 1e5).convention
    assert convention == "full attention square, unpadded; bf16 dense peak 989.4 TFLOP/s"


@pytest.mark.parametrize(("name", "peak"), [("Tesla V100-SXM2-32GB", 125), ("Tesla T4", 65)])
def test_a_device_without_bf16_is_held_against_its_fp16_peak(name, peak):
    share = efficiency(GPT2, Plan(), gpu(name), 10_000)
    assert share.mfu == pytest.approx(854_438_400 * 10_000 / (peak * 1e12))
    assert f"fp16 dense peak {peak} TFLOP/s" in share.convention


@pytest.mark.parametrize("rungs", [(), ("tf32",), ("bf16",), ("fp16",)])
def test_the_peak_does_not_depend_on_the_precision_of_the_row(h200, rungs):
    assert efficiency(GPT2, plan_of(rungs), h200, 1e5) == efficiency(GPT2, Plan(), h200, 1e5)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 MIG 1g.18gb", "NVIDIA B9000"])
def test_an_unknown_device_has_no_mfu_and_says_so(name):
    share = efficiency(GPT2, Plan(), gpu(name), 1e5)
    assert (share.mfu, share.hfu) == (None, None)
    assert share.convention == f"no MFU: {name} is not in the table of device peaks"


def test_a_cpu_has_no_mfu_and_says_so(cpu):
    for hardware in (cpu, replace(cpu, name="NVIDIA H200")):  # the kind counts, not the name
        share = efficiency(GPT2, Plan(), hardware, 1e5)
        assert (share.mfu, share.hfu) == (None, None)
        assert "a CPU is not in the table" in share.convention


def test_more_than_the_peak_is_refused_with_the_reason(h200):
    share = efficiency(GPT2, Plan(), h200, 6_519_000)
    assert (share.mfu, share.hfu) == (None, None)
    assert "563% of the peak cannot be right" in share.convention


def test_an_hfu_over_the_peak_is_refused_too(h200):
    """The padding executes a little more than the model asks for: 99.99 % MFU would be 100.01 % HFU."""
    rate = 0.9999 * 989.4e12 / 854_438_400
    assert efficiency(GPT2, Plan(), h200, rate).mfu == pytest.approx(0.9999)
    share = efficiency(GPT2, plan_of(["padded-vocab"]), h200, rate)
    assert (share.mfu, share.hfu) == (None, None)


@quick
@given(st.sampled_from(DEVICES), st.floats(min_value=1e-3, max_value=1e9), st.sampled_from([Plan(), FLASH]))
def test_a_share_is_a_share_or_nothing(device, rate, plan):
    share = efficiency(GPT2, plan, gpu(device.names[0]), rate)
    if share.mfu is None:
        assert share.hfu is None
        assert share.convention.startswith("no MFU: ")
    else:
        assert 0 < share.mfu <= 1
        assert 0 < share.hfu <= 1
        assert "dense peak" in share.convention


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_every_row_of_the_table_gives_a_share(device):
    assert all(efficiency(GPT2, FLASH, gpu(name), 100).mfu > 0 for name in device.names)
