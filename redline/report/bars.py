"""Horizontal bars: stacked parts (memory by what holds it, time by group of operations), gains, and before/after pairs.

    stacked_chart((Bar(name="bf16", parts=(("weights", 4e8), ("logits", 2e9)), tip="bf16", marker=2.3e9),), ...)
    gain_chart((Gain(name="flash", share=0.31, noise=0.02, tip="flash +31 %"),), title="Knobs", width_px=960)
    pair_chart((Pair(name="head", before=0.21, after=0.71, tip="head"),), title="GEMMs", width_px=960)

A marker is a figure to compare the parts with, such as the measured total of predicted parts. Colours follow the order
of `names`, which callers keep the same in every chart of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from redline.report.svg import (
    CHAR_PX,
    LEGEND_ROW_PX,
    SERIES,
    WIDE_FROM_PX,
    Box,
    Scale,
    Size,
    bottom_axis,
    escaped,
    hot_area,
    name_lines,
    row_name,
    svg_line,
    svg_picture,
    svg_rect,
    svg_text,
)

ROW_PX, BAR_PX = 30, 16
NAME_CHARS_WIDE, NAME_CHARS = 30, 16
AXIS_ROOM_PX = 40


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    parts: tuple[tuple[str, float], ...]
    tip: str
    label: str = ""
    """Text to the right of the bar."""
    marker: float | None = None

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)

    @property
    def end(self) -> float:
        return max(self.total, self.marker or 0.0)


@dataclass(frozen=True, kw_only=True)
class Gain:
    name: str
    share: float
    """0.05 means 5 % more."""
    noise: float | None
    tip: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    name: str
    before: float
    after: float | None
    """None if nothing changes."""
    tip: str


def stacked_chart(
    bars: Sequence[Bar],
    *,
    names: Sequence[str],
    title: str,
    axis: str,
    width_px: int,
    show: Callable[[float], str],
    unit: float = 1.0,
    hollow: Sequence[str] = (),
    marker: str = "",
) -> str:
    """Draw one bar per row. The axis counts in `unit`, such as GiB, so that its ticks are round. Parts in `hollow`, in
    which no work is done, have no colour of their own; all but the first of them are darker."""
    chars = name_room(width_px)
    left = _name_px([bar.name for bar in bars], chars)
    right = CHAR_PX * max((len(bar.label) for bar in bars), default=0) + 16
    high = (max((bar.end for bar in bars), default=0.0) or 1.0) / unit
    looks = {name: f"part f{index % SERIES}" for index, name in enumerate(names)}
    empty = [name for name in names if name in hollow]
    looks |= {name: "part hollow second" if index else "part hollow" for index, name in enumerate(empty)}
    x = Scale(low=0.0, high=high, start_px=left, end_px=max(left + 40.0, width_px - right))
    used = [name for name in names if any(value for bar in bars for part, value in bar.parts if part == name)]
    legend, legend_px = key_rows([(looks[name], name) for name in used], width_px, marker)
    bottom = legend_px + ROW_PX * len(bars)
    size = Size(width_px, bottom + AXIS_ROOM_PX)
    axis_parts = _shifted(bottom_axis(x, ROW_PX * len(bars), axis, tick_text=show), legend_px)
    parts = [*legend, *axis_parts]
    marks = []
    for index, bar in enumerate(bars):
        top = legend_px + ROW_PX * index
        parts += row_name(left - 10, top + ROW_PX / 2, bar.name, chars)
        parts += _stack(bar, top, x, unit, looks)
        data = f' data-kind="bar" data-name="{escaped(bar.name)}" data-total="{bar.total}"'
        data += "" if bar.marker is None else f' data-marker="{bar.marker}"'
        marks.append(hot_area(Box(0, top, width_px, ROW_PX), bar.tip, size, data))
    return svg_picture(width_px, size.height, title, parts, marks)


def _stack(bar: Bar, top: float, x: Scale, unit: float, looks: dict[str, str]) -> Iterator[str]:
    middle, reached = top + ROW_PX / 2, 0.0
    for name, value in bar.parts:
        if value > 0:
            start, end = x(reached / unit), x((reached + value) / unit)
            yield svg_rect(looks[name], start, middle - BAR_PX / 2, end - start - 0.6, BAR_PX)
            reached += value
    if bar.marker is not None:
        place = x(bar.marker / unit)
        yield svg_line("measured", place, middle - BAR_PX / 2 - 3, place, middle + BAR_PX / 2 + 3)
    yield svg_text(x(bar.end / unit) + 9, middle, bar.label, "value")


def key_rows(used: Sequence[tuple[str, str]], width_px: int, marker: str = "") -> tuple[list[str], float]:
    """Return coloured squares with their names, wrapped to the width, and the height they take."""
    parts, x, y = [], 0.0, 8.0
    entries = [*used, ("measured", marker)] if marker else [*used]
    for look, name in entries:
        width = 20 + CHAR_PX * len(name) + 12
        if x and x + width > width_px:
            x, y = 0.0, y + LEGEND_ROW_PX
        parts.append(
            svg_line(look, x + 5, y - 7, x + 5, y + 7) if look == "measured" else svg_rect(look, x, y - 5, 11, 11)
        )
        parts.append(svg_text(x + 18, y, name, "legend"))
        x += width
    return parts, y + 18 if entries else 0.0


def gain_chart(gains: Sequence[Gain], *, title: str, width_px: int) -> str:
    """Draw gains as bars, faster to the right. The whisker is the noise; a gain inside it is pale."""
    chars = name_room(width_px)
    left = _name_px([gain.name for gain in gains], chars)
    ends = [gain.share + sign * (gain.noise or 0.0) for gain in gains for sign in (-1, 1)]
    low, high = min([0.0, *ends]), max([0.01, *ends])
    right = CHAR_PX * 10
    x = Scale(low=low, high=high, start_px=left, end_px=max(left + 40.0, width_px - right))
    bottom = ROW_PX * len(gains)
    size = Size(width_px, bottom + AXIS_ROOM_PX)
    parts = list(bottom_axis(x, bottom, "more tokens per second", tick_text=_percent))
    parts.append(svg_line("start", x(0.0), 0, x(0.0), bottom))
    marks = []
    for index, gain in enumerate(gains):
        parts += row_name(left - 10, ROW_PX * (index + 0.5), gain.name, chars)
        parts += _gain_row(gain, ROW_PX * index, x)
        data = f' data-kind="gain" data-name="{escaped(gain.name)}" data-gain="{gain.share}"'
        marks.append(hot_area(Box(0, ROW_PX * index, width_px, ROW_PX), gain.tip, size, data))
    return svg_picture(width_px, size.height, title, parts, marks)


def _gain_row(gain: Gain, top: float, x: Scale) -> Iterator[str]:
    middle, noise = top + ROW_PX / 2, gain.noise or 0.0
    start, end = sorted((x(0.0), x(gain.share)))
    kind = "bar" if abs(gain.share) <= noise else "gain" if gain.share > 0 else "loss"
    yield svg_rect(kind, start, middle - BAR_PX / 2, end - start, BAR_PX)
    if noise:
        a, b = x(gain.share - noise), x(gain.share + noise)
        yield f'<path class="whisker" d="M{a:.1f} {middle - 4}v8M{a:.1f} {middle}H{b:.1f}M{b:.1f} {middle - 4}v8"/>'
    yield svg_text(max(end, x(gain.share + noise)) + 9, middle, f"{100 * gain.share:+.1f} %", "value")


def pair_chart(pairs: Sequence[Pair], *, title: str, width_px: int) -> str:
    """Draw shares of a peak before and after a change, or a single bar where nothing changes."""
    chars = name_room(width_px)
    left = _name_px([pair.name for pair in pairs], chars)
    x = Scale(low=0.0, high=1.0, start_px=left, end_px=max(left + 40.0, width_px - CHAR_PX * 8))
    bottom = ROW_PX * len(pairs)
    size = Size(width_px, bottom + AXIS_ROOM_PX)
    parts = list(bottom_axis(x, bottom, "share of the matmul peak", tick_text=_percent))
    marks = []
    for index, pair in enumerate(pairs):
        top = ROW_PX * index
        parts += row_name(left - 10, top + ROW_PX / 2, pair.name, chars)
        parts += _pair_row(pair, top + (ROW_PX - BAR_PX) / 2, x)
        data = (
            f' data-kind="pair" data-name="{escaped(pair.name)}" data-before="{pair.before}" data-after="{pair.after}"'
        )
        marks.append(hot_area(Box(0, top, width_px, ROW_PX), pair.tip, size, data))
    return svg_picture(width_px, size.height, title, parts, marks)


def _pair_row(pair: Pair, top: float, x: Scale) -> Iterator[str]:
    drawn = [("bar", pair.before), ("gain", pair.after)] if pair.after is not None else [("bar", pair.before)]
    height = BAR_PX / len(drawn)
    for index, (kind, share) in enumerate(drawn):
        yield svg_rect(kind, x.start_px, top + index * height, x(share) - x.start_px, height)
    shown = max(share for _, share in drawn)
    yield svg_text(x(shown) + 9, top + BAR_PX / 2, f"{100 * drawn[-1][1]:.0f} %", "value")


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _shifted(parts: Iterator[str], down: float) -> Iterator[str]:
    yield f'<g transform="translate(0 {down:.0f})">'
    yield from parts
    yield "</g>"


def name_room(width_px: int) -> int:
    return NAME_CHARS_WIDE if width_px >= WIDE_FROM_PX else NAME_CHARS


def _name_px(names: Sequence[str], chars: int) -> float:
    return CHAR_PX * max((len(line) for name in names for line in name_lines(name, chars)), default=0) + 14
