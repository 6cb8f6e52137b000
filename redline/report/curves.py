"""Curves of a training run over the tokens it has seen, as SVG text: one panel each, all with the same token axis.

    curve_chart(Panel(title="loss", curves=(("train", points),), show="{:.3f}".format), end=1e9, width_px=440)

Panels are drawn at the width they will have. Pointing anywhere shows the values there; the end of a curve takes the
focus and shows its figures. Values must be finite; `marks` can show where one is missing because an update was skipped.
A profile's memory over the step is such a curve too, over milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from redline.report.svg import (
    AXIS_PX,
    WIDE_FROM_PX,
    Box,
    Scale,
    Size,
    bottom_axis,
    escaped,
    hot_area,
    left_axis,
    legend_rows,
    short_number,
    svg_line,
    svg_picture,
    svg_text,
)

MOST_DOTS = 40  # a curve with no more points than this shows each: a line through a single one is invisible
MARK_PX = 8
RIGHT_PX = 14.0
SLICES_WIDE, SLICES = 24, 14  # of the plot's width, each of which shows its values when pointed at
END_PX = 16.0

Points = Sequence[tuple[float, float]]
"""(tokens, value) pairs in the order of tokens."""


def tokens_text(place: float) -> str:
    return f"{place:,.0f} tokens"


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    curves: tuple[tuple[str, Points], ...]
    """(name, points) of each curve."""
    show: Callable[[float], str]
    """Formats a value."""
    tick: Callable[[float], str] | None = None
    """Formats the round numbers of the axis, if `show` has more digits than they need."""
    from_zero: bool = False
    high: float | None = None
    """Values above it run along the edge, so that a spike does not flatten the rest."""
    level: tuple[str, float] | None = None
    """Name and value of a dashed line, such as ln V."""
    marks: Sequence[float] = ()
    """Token counts at which an update was skipped."""
    axis: str = "tokens"
    place: Callable[[float], str] = tokens_text
    """Formats a position on the axis."""

    @property
    def is_empty(self) -> bool:
        return not any(points for _, points in self.curves)


def curve_chart(panel: Panel, *, end: float, width_px: int, height_px: int = 150) -> str:
    """Draw a panel. `end` is where the axis ends, the same for all panels of a run; `height_px` is the plot's alone."""
    if panel.is_empty:
        return svg_picture(width_px, 40, panel.title, [svg_text(0, 20, "nothing was recorded", "muted")])
    x = Scale(low=0.0, high=end or 1.0, start_px=AXIS_PX, end_px=width_px - RIGHT_PX)
    y = _value_scale(panel, height_px)
    parts = [*bottom_axis(x, height_px, panel.axis), *left_axis(y, width_px, "", tick_text=panel.tick or panel.show)]
    parts += [*_level(panel, x, y), *_curves(panel, x, y), *_marks(panel, x, height_px)]
    rows, rows_px = _legend(panel, height_px + 44, width_px)
    size = Size(width_px, height_px + 44 + rows_px)
    marks = [*_slices(panel, x, y, size), *_ends(panel, x, y, size)]
    return svg_picture(width_px, size.height, panel.title, [*parts, *rows], marks)


def _slices(panel: Panel, x: Scale, y: Scale, size: Size) -> Iterator[str]:
    """Yield vertical slices that show the values nearest to their middle; keyboard users have the table instead."""
    count = SLICES_WIDE if size.width >= WIDE_FROM_PX else SLICES
    width = (x.end_px - x.start_px) / count
    for index in range(count):
        middle = x.low + (index + 0.5) * (x.high - x.low) / count
        near = [
            (name, min(points, key=lambda point: abs(point[0] - middle))) for name, points in panel.curves if points
        ]
        place = min((point[0] for _, point in near), key=lambda at: abs(at - middle))
        lines = [panel.place(place), *(f"{name}: {panel.show(point[1])}" for name, point in near)]
        box = Box(x.start_px + index * width, y.end_px, width, y.start_px - y.end_px)
        yield hot_area(box, "\n".join(lines), size, ' data-kind="slice"', focus=False)


def _ends(panel: Panel, x: Scale, y: Scale, size: Size) -> Iterator[str]:
    for name, points in panel.curves:
        if points:
            place, value = points[-1]
            box = Box(x(place) - END_PX / 2, y(value) - END_PX / 2, END_PX, END_PX)
            data = f' data-kind="end" data-curve-name="{escaped(name)}"'
            yield hot_area(box, _figures(name, points, panel), size, data)


def _value_scale(panel: Panel, height_px: int) -> Scale:
    values = [value for _, points in panel.curves for _, value in points]
    values += [panel.level[1]] if panel.level else []
    low, high = 0.0 if panel.from_zero else min(values), max(values)
    if panel.high is not None:
        low, high = min(low, panel.high), min(high, panel.high)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low=low if panel.from_zero else low - margin, high=high + margin, start_px=height_px, end_px=10.0)


def _level(panel: Panel, x: Scale, y: Scale) -> Iterator[str]:
    if panel.level is not None:
        name, value = panel.level
        yield svg_line("start", x.start_px, y(value), x.end_px, y(value), f"{name}: {panel.show(value)}")


def _curves(panel: Panel, x: Scale, y: Scale) -> Iterator[str]:
    for index, (name, points) in enumerate(panel.curves):
        if not points:
            continue
        path = "M" + "L".join(f"{x(place):.1f} {y(value):.1f}" for place, value in points)
        yield f'<path class="curve s{index}" data-curve="{escaped(name)}" d="{path}"/>'
        if len(points) <= MOST_DOTS:
            for place, value in points:
                yield f'<circle class="curve s{index}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="2.5"/>'


def _figures(name: str, points: Points, panel: Panel) -> str:
    values = [value for _, value in points]
    ends = f"{panel.show(values[0])} → {panel.show(values[-1])} at {panel.place(points[-1][0])}"
    return f"{name}\n{ends}\nlowest {panel.show(min(values))}, highest {panel.show(max(values))}"


def _marks(panel: Panel, x: Scale, height_px: int) -> Iterator[str]:
    for place in panel.marks:
        title = f"an update was skipped at {short_number(place)} {panel.axis}: its gradients were not finite"
        yield svg_line("mark", x(place), height_px - MARK_PX, x(place), height_px, title)


def _legend(panel: Panel, top: float, width_px: int) -> tuple[list[str], float]:
    """Return the legend and its height; nothing for a single entry, which the heading names."""
    entries = [(f'class="curve s{index}"', name) for index, (name, points) in enumerate(panel.curves) if points]
    entries += [('class="start"', panel.level[0])] if panel.level else []
    entries += [('class="mark"', "skipped update")] if panel.marks else []
    return legend_rows(entries, top, width_px) if len(entries) > 1 else ([], 0.0)
