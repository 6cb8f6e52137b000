"""core/units.py: numbers as people read them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core import units

HUMAN = (units.human_rate, units.human_seconds, units.human_bytes, units.human_percent, units.human_ratio)


@pytest.mark.parametrize("show", HUMAN, ids=lambda show: show.__name__)
def test_unknown_is_a_dash_and_zero_is_not(show):
    assert show(None) == units.UNKNOWN
    assert show(0.0).startswith("0")


@pytest.mark.parametrize(
    ("rate", "text"), [(178_432.4, "178,432"), (544_000, "544,000"), (100, "100"), (99.94, "99.9"), (3.14159, "3.1")]
)
def test_rate(rate, text):
    assert units.human_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0, "1.00 s"), (0.0345, "34.5 ms"), (0.345, "345 ms"), (12e-6, "12.0 us"), (90, "90.0 s"), (600, "600 s")],
)
def test_seconds(seconds, text):
    assert units.human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 * 1024**2, "5.00 MiB"),
        (139 * units.GIB, "139 GiB"),
        (2000 * units.GIB, "2000 GiB"),
    ],
)
def test_bytes(count, text):
    assert units.human_bytes(count) == text


def test_percent_and_ratio():
    assert units.human_percent(0.4216) == "42.2 %"
    assert units.human_percent(0.4216, digits=0) == "42 %"
    assert units.human_ratio(7.346) == "7.35x"


@given(st.floats(min_value=1e-6, max_value=1e5))
def test_what_is_shown_is_within_half_a_percent_of_the_truth(seconds):
    number, unit = units.human_seconds(seconds).split()
    shown = float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    assert math.isclose(shown, seconds, rel_tol=0.0051)


@given(st.floats(min_value=1, max_value=1e15))
def test_bytes_never_show_more_digits_than_they_know(count):
    assert re.fullmatch(r"(\d\.\d\d|\d\d\.\d|\d{3,}) [KMG]iB|\d+ B|10\.00 .*|100\.0 .*", units.human_bytes(count))
