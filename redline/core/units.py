"""Numbers as people read them. None is always shown as an em dash: unknown is not zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNKNOWN = "—"
GIB = 1024**3
MIB = 1024**2


def human_rate(tokens_per_second: float | None) -> str:
    """178432 -> '178,432'; rates below 100 keep one decimal."""
    if tokens_per_second is None:
        return UNKNOWN
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.1f}"


def rate_unit(unit: str | None, short: bool = True) -> str:
    """Return the unit of a rate: 'tok/s' or 'tokens/s', or such as 'samples/s' for a user's own model."""
    if unit in (None, "token"):
        return "tok/s" if short else "tokens/s"
    return f"{unit}s/s"


def spelled_rate_unit(unit: str | None) -> str:
    """'tokens per second'."""
    return f"{unit or 'token'}s per second"


def batch_text(micro_batch: int, shape: Mapping[str, Any]) -> str:
    """'16 x 1024 tokens', '16 samples', '16 x 197 patches'. `shape`: the fields of a `Shape` or a `Traced`."""
    unit, items = shape.get("unit", "token"), shape.get("items_per_sample", shape.get("sequence", 1))
    return f"{micro_batch} {unit}s" if items == 1 else f"{micro_batch} x {items} {unit}s"


def human_seconds(seconds: float | None) -> str:
    """Three significant digits and a suitable unit."""
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 1e-6)} us"


def human_bytes(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count:.0f} B"


def human_percent(share: float | None, digits: int = 1) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def human_ratio(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}x"


def counted(count: int, thing: str) -> str:
    """'1 recipe', '3 recipes'."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _three(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
