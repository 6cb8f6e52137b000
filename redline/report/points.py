"""Trials as points: speed against memory, and the Pareto front of the two.

    points_chart((Point(number=3, memory=8e9, rate=4.1e5, kind="sound", tip="#3"),), light=8e5, width_px=960)

Only sound trials are on the front: one that is wrong, or was given up before it was checked, cannot be chosen. Nor is a
trial whose peak memory is implausible: it has a dashed ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redline.core.units import GIB, MIB, human_rate
from redline.report.svg import (
    AXIS_PX,
    CHAR_PX,
    Box,
    Scale,
    Size,
    bottom_axis,
    hot_area,
    left_axis,
    short_number,
    svg_line,
    svg_picture,
    svg_text,
)

PLOT_PX, TOP_PX, RIGHT_PX = 330.0, 16.0, 26.0
RADIUS_PX = {"best": 7.0, "sound": 5.5, "lost": 4.5, "bad": 5.0}
MARGIN = 0.06


@dataclass(frozen=True, kw_only=True)
class Point:
    number: int
    memory: float
    rate: float
    kind: str
    """best, sound, lost (given up, or over the limit) or bad (different training)."""
    tip: str
    trusted: bool = True
    """False if its memory figure is implausible (`is_implausible_peak`)."""


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, least memory first: each point is faster than all sound, trusted ones that need no
    more."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.memory, -one.rate)):
        if point.trusted and point.kind in ("best", "sound") and (not front or point.rate > front[-1].rate):
            front.append(point)
    return front


def points_chart(points: Sequence[Point], *, width_px: int, light: float | None = None) -> str:
    """Draw every trial. `light` is the winner's speed of light, in tokens per second."""
    unit, name = (GIB, "GiB") if max(point.memory for point in points) >= GIB else (MIB, "MiB")
    x = _spread([point.memory / unit for point in points], AXIS_PX, width_px - RIGHT_PX)
    y = _spread([*(point.rate for point in points), *([light] if light else [])], PLOT_PX, TOP_PX)
    size = Size(width_px, PLOT_PX + 44)
    parts = [*bottom_axis(x, PLOT_PX, f"peak memory, {name}")]
    parts += [*left_axis(y, width_px - RIGHT_PX + 14, "", spacing_px=46, tick_text=short_number)]
    parts += [*_light(light, x, y), *_front(front_of(points), unit, x, y)]
    drawn = sorted(points, key=lambda point: (list(RADIUS_PX).index(point.kind), -point.rate), reverse=True)
    marks = []
    for point in drawn:
        cx, cy, radius = x(point.memory / unit), y(point.rate), RADIUS_PX[point.kind]
        parts.append(f'<circle class="point {point.kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius}"/>')
        if not point.trusted:
            parts.append(f'<circle class="doubtful" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius + 3.5}"/>')
    for point in sorted(points, key=lambda point: -point.rate):
        cx, cy = x(point.memory / unit), y(point.rate)
        data = f' data-kind="trial" data-number="{point.number}" data-tokens-per-second="{point.rate}"'
        data += "" if point.trusted else ' data-doubtful="memory"'
        marks.append(hot_area(Box(cx - 7, cy - 7, 14, 14), point.tip, size, data))
    return svg_picture(width_px, size.height, "Every trial: speed over peak memory", parts, marks)


def _spread(values: Sequence[float], start_px: float, end_px: float) -> Scale:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.1 * high or 1.0
    return Scale(low=max(0.0, low - margin), high=high + margin, start_px=start_px, end_px=end_px)


def _light(light: float | None, x: Scale, y: Scale) -> Iterator[str]:
    if light is None:
        return
    rate = f"{human_rate(light)} tokens/s"
    texts = (f"speed of light of the winner: {rate}", f"its speed of light: {rate}", f"light: {rate}")
    yield svg_line("limit", x.start_px, y(light), x.end_px, y(light))
    room = int((x.end_px - x.start_px - 12) / CHAR_PX)
    text = next((text for text in texts if len(text) <= room), rate)
    yield svg_text(x.start_px + 8, y(light) + 11, text, "limit small")


def _front(front: Sequence[Point], unit: float, x: Scale, y: Scale) -> Iterator[str]:
    """Draw steps: between two points, nothing faster fits into less memory than the next point needs."""
    if len(front) < 2:
        return
    first, *others = front
    path = f"M{x(first.memory / unit):.1f} {y(first.rate):.1f}"
    path += "".join(f"H{x(point.memory / unit):.1f}V{y(point.rate):.1f}" for point in others)
    yield f'<path class="front" d="{path}"/>'
