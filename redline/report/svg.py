"""The parts that charts are made of: a scale, axes, a legend, marks that show their figures, and the shared style.

    x = Scale(low=0, high=1e6, start_px=AXIS_PX, end_px=746.0)
    svg_picture(760, 300, "Loss", [*bottom_axis(x, 260, "tokens")], [hot_area(box, "bf16\\n111,549 tokens/s", chart)])

A mark that can be pointed at is a `hot_area`: it accepts keyboard focus, offers its text to screen readers, and shows
it in a box on hover and focus. This takes CSS alone, no script. Everything that comes from outside goes through
`escaped`. Colours are variables for light and dark: STYLE sets those of series, base.html.j2 the others.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from redline.report import one_line

WIDE_FROM_PX = 600  # below this, labels are shorter
CHAR_PX = 7.0  # upper estimate of a character at 12 px in any sans-serif a reader may have
AXIS_PX = 62.0  # room for the labels of the left axis
LEGEND_ROW_PX = 20
NARROW_PLOT_PX = 300  # below this, ticks are closer together, or there would be only one
BOLD = 1.12  # width of a bold character relative to a plain one
NAME_LINE_PX = 13.0
TIP_CHARS, TIP_LINE_PX, TIP_PAD_PX = 46, 17, 10

# Okabe and Ito's colour-blind-safe hues; vermilion is kept for what is wrong. Neighbours differ in lightness too.
SERIES = 9
STYLE = """
.redline-chart {
  --s0: #0072b2; --s1: #c07f00; --s2: #008561; --s3: #b5568b; --s4: #2a93cc;
  --s5: #8a8f00; --s6: #6a51a3; --s7: #6d7682; --s8: #8c564b;
  color: var(--ink); overflow: visible; font: 12px var(--sans); font-variant-numeric: tabular-nums;
}
@media (prefers-color-scheme: dark) {
  .redline-chart {
    --s0: #4ea3dd; --s1: #e69f00; --s2: #2fc397; --s3: #e08fbd; --s4: #8fd0f5;
    --s5: #d8d25a; --s6: #b3a2e8; --s7: #98a2af; --s8: #c9a094;
  }
}
/* A box of figures may reach beyond its chart, which then lies above what follows; what is pointed at, highest. */
.redline-chart:focus-within { position: relative; z-index: 2; }
.redline-chart:hover { position: relative; z-index: 3; }
.redline-chart text { fill: currentColor; }
.redline-chart .muted, .redline-chart .dropped text { fill: var(--muted); }
.redline-chart .small { font-size: 11px; }
.redline-chart .strong { font-weight: 600; }
.redline-chart .broken { fill: var(--bad); }
.redline-chart .wrong { fill: var(--bad); font-weight: 600; }
.redline-chart .value { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.redline-chart .grid { stroke: var(--grid); }
.redline-chart .bar { fill: var(--bar); }
.redline-chart .gain { fill: var(--gain); }
.redline-chart .own { fill: var(--own); }
.redline-chart .dropped .bar, .redline-chart .dropped .gain, .redline-chart .dropped .own { opacity: .4; }
.redline-chart text.own-figure { fill: var(--own-ink); }
.redline-chart .dropped .whisker { opacity: .5; }
.redline-chart .whisker { fill: none; stroke: var(--ink); stroke-width: 1.25; }
.redline-chart .stair { fill: none; stroke: var(--ink); stroke-width: 1.5; stroke-linejoin: round; opacity: .75; }
.redline-chart .light { fill: none; stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 2 2.5; }
.redline-chart .limit { stroke: var(--limit); stroke-width: 1.5; }
.redline-chart text.limit { stroke: none; fill: var(--limit); }
.redline-chart .measured { fill: none; stroke: var(--ink); stroke-width: 2.5; }
.redline-chart .absent { fill: none; stroke: var(--muted); stroke-dasharray: 3 3; }
.redline-chart .absent.failed { stroke: var(--bad); }
.redline-chart .hatch { stroke: var(--muted); opacity: .5; }
.redline-chart .curve { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
.redline-chart .different { stroke: var(--bad); stroke-width: 2.6; }
.redline-chart .reference { fill: none; stroke: var(--ink); stroke-width: 8; opacity: .16; stroke-linejoin: round; }
.redline-chart .mark { stroke: var(--bad); stroke-width: 1.5; }
.redline-chart .start { stroke: var(--muted); stroke-dasharray: 5 5; }
.redline-chart .point { fill: var(--gain); fill-opacity: .55; stroke: var(--card); stroke-width: 1; }
.redline-chart .point.lost { fill: none; stroke: var(--muted); stroke-width: 1.25; }
.redline-chart .point.bad { fill: none; stroke: var(--bad); stroke-width: 2; }
.redline-chart .point.best { fill: var(--brand); fill-opacity: 1; }
.redline-chart .doubtful { fill: none; stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 3 2.5; }
.redline-chart .front { fill: none; stroke: var(--gain); stroke-width: 1.5; }
.redline-chart .hollow { fill: var(--wash); stroke: var(--muted); stroke-width: .75; }
.redline-chart .hollow.second { fill: var(--muted); fill-opacity: .4; stroke-dasharray: 2 1.5; }
.redline-chart .loss { fill: var(--bad); }
.redline-chart .hot { outline: none; }
.redline-chart .hot > .grip { fill: transparent; }
.redline-chart .hot > path.grip { fill: none; stroke: transparent; stroke-width: 12; }
.redline-chart .hot:hover > .grip, .redline-chart .hot:focus > .grip { fill: var(--ink); fill-opacity: .06; }
.redline-chart .hot:hover > path.grip, .redline-chart .hot:focus > path.grip {
  fill: none; stroke: var(--ink); stroke-opacity: .16;
}
.redline-chart .hot:focus-visible > .grip { stroke: var(--gain); stroke-width: 2; stroke-opacity: 1; }
.redline-chart .tip { display: none; pointer-events: none; filter: drop-shadow(0 3px 10px rgb(0 0 0 / .22)); }
.redline-chart .tip rect { fill: var(--card); stroke: var(--edge); }
.redline-chart .hot:hover > .tip, .redline-chart .hot:focus > .tip { display: inline; }
""" + "\n".join(
    f".redline-chart .s{index} {{ stroke: var(--s{index}); }} .redline-chart .f{index} {{ fill: var(--s{index}); }}"
    for index in range(SERIES)
)


class Scale:
    """Maps values to pixels linearly; `ticks` are round numbers inside the range."""

    def __init__(self, *, low: float, high: float, start_px: float, end_px: float) -> None:
        self.low, self.high, self.start_px, self.end_px = low, high, start_px, end_px

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)  # a curve that leaves the plot runs along its edge
        return self.start_px + (inside - self.low) / (self.high - self.low) * (self.end_px - self.start_px)

    def ticks(self, spacing_px: float) -> list[float]:
        wanted = (self.high - self.low) * spacing_px / abs(self.end_px - self.start_px)
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * index for index in range(first, last + 1)]


def plain_tick(value: float) -> str:
    return f"{value:.6g}"


def short_number(value: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def bottom_axis(
    scale: Scale, y: float, label: str, whole: bool = False, tick_text: Callable[[float], str] = short_number
) -> Iterator[str]:
    narrow = abs(scale.end_px - scale.start_px) < NARROW_PLOT_PX
    for tick in scale.ticks(46 if narrow else 70):
        if whole and tick != int(tick):
            continue
        yield svg_line("grid", scale(tick), 6, scale(tick), y)
        yield svg_text(scale(tick), y + 12, tick_text(tick), "muted tick", anchor="middle")
    yield svg_text((scale.start_px + scale.end_px) / 2, y + 28, label, "muted", anchor="middle")


def left_axis(
    scale: Scale,
    width_px: float,
    label: str,
    spacing_px: float = 40,
    tick_text: Callable[[float], str] = plain_tick,
) -> Iterator[str]:
    for tick in scale.ticks(spacing_px):
        yield svg_line("grid", AXIS_PX, scale(tick), width_px - 14, scale(tick))
        yield svg_text(AXIS_PX - 8, scale(tick), tick_text(tick), "muted tick", anchor="end")
    if label:
        yield svg_text(0, (scale.start_px + scale.end_px) / 2, label, "muted")


def legend_rows(entries: Sequence[tuple[str, str]], top: float, width_px: int) -> tuple[list[str], float]:
    """Return the legend in as many columns, each as wide as the longest label, as fit, and the height it takes."""
    column_px = 34 + CHAR_PX * max(len(label) for _, label in entries) + 12
    left = AXIS_PX if width_px >= WIDE_FROM_PX else 0.0
    columns = max(1, int((width_px - left) // column_px))
    parts = []
    for index, (look, label) in enumerate(entries):
        x, y = left + index % columns * column_px, top + index // columns * LEGEND_ROW_PX + 8
        parts.append(f'<path {look} d="M{x:.2f} {y}h26"/>')
        parts.append(svg_text(x + 34, y, label, "legend wrong" if "different" in look else "legend"))
    return parts, math.ceil(len(entries) / columns) * LEGEND_ROW_PX + 8


def svg_picture(width_px: float, height_px: float, label: str, parts: Sequence[str], marks: Sequence[str] = ()) -> str:
    """Return the whole chart. `marks` can be pointed at and lie over everything else; screen readers get the label and
    the marks, not `parts`."""
    size = f'viewBox="0 0 {width_px} {height_px:.0f}" width="{width_px}" height="{height_px:.0f}"'
    name = f'class="redline-chart" role="{"group" if marks else "img"}" aria-label="{escaped(label)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {name} {size}>'
    drawn = ['<g aria-hidden="true">', *parts, "</g>"] if marks else list(parts)
    return "\n".join([head, *drawn, *marks, "</svg>"])


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Size(NamedTuple):
    """The size of a whole chart."""

    width: float
    height: float


def hot_area(box: Box, text: str, chart: Size, data: str = "", focus: bool = True) -> str:
    """Return a rectangle that shows `text`, one figure per line, while it is pointed at or has the focus."""
    grip = f'<rect class="grip" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"/>'
    return hot_mark(grip, text, tip_box(text, box, chart), data, focus)


def hot_path(path: str, text: str, chart: Size, place: tuple[float, float], data: str = "") -> str:
    """The same along a path; the box appears beside `place`."""
    grip = f'<path class="grip" d="{path}"/>'
    return hot_mark(grip, text, tip_box(text, Box(*place, 0, 0), chart), data)


def hot_mark(grip: str, text: str, tip: str, data: str = "", focus: bool = True) -> str:
    label = escaped(text).replace("\n", "; ")
    reach = f'tabindex="0" role="img" aria-label="{label}"' if focus else 'aria-hidden="true"'
    return f'<g class="hot" {reach}{data}>{grip}{tip}</g>'


def tip_box(text: str, box: Box, chart: Size) -> str:
    """Place the box beside the mark if there is room, and always inside the chart's width, or a phone would scroll
    sideways."""
    chars = int(min(TIP_CHARS, (chart.width - 2 * TIP_PAD_PX) / CHAR_PX))
    lines = [piece for line in text.split("\n") for piece in textwrap.wrap(one_line(line), chars) or [""]]
    widths = [len(line) * (BOLD if index == 0 else 1.0) for index, line in enumerate(lines)]
    width = min(CHAR_PX * max(widths) + 2 * TIP_PAD_PX, chart.width)
    height = TIP_LINE_PX * len(lines) + 2 * TIP_PAD_PX - 4
    right, left = box.x + box.width + 8, box.x - width - 8
    x = right if right + width <= chart.width else left if left >= 0 else max(0.0, (chart.width - width) / 2)
    beside = x in (right, left)
    y = max(0.0, min(box.y, chart.height - height)) if beside else box.y + box.height + 6
    rows = (
        svg_text(x + TIP_PAD_PX, y + TIP_PAD_PX + 7 + TIP_LINE_PX * index, line, "strong" if index == 0 else "")
        for index, line in enumerate(lines)
    )
    frame = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"/>'
    return f'<g class="tip" aria-hidden="true">{frame}{"".join(rows)}</g>'


def svg_line(kind: str, x1: float, y1: float, x2: float, y2: float, title: str = "") -> str:
    inside = f"<title>{escaped(title)}</title>" if title else ""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}">{inside}</line>'


def svg_rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a rectangle of at least half a pixel, so that whatever exists is visible."""
    size = f'width="{max(width, 0.5):.2f}" height="{max(height, 0.5):.2f}"'
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" {size}/>'


def svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" dominant-baseline="central"'
    return f'<text class="{kind}" {place}>{escaped(text)}</text>'


def name_lines(name: str, room: int) -> list[str]:
    """'cudnn-attention' -> ['cudnn-', 'attention']: break a long name at a separator, or cut it if that fails."""
    if len(name) <= room:
        return [name]
    places = [place + 1 for place, character in enumerate(name) if character in "-_ /" and place + 1 <= room]
    if not places:
        return [clipped(name, room)]
    return [name[: places[-1]].strip(), clipped(name[places[-1] :].strip(), room)]


def row_name(x: float, middle: float, name: str, room: int) -> Iterator[str]:
    """Write the name to the left of a bar, ending at `x`, in at most two lines."""
    lines = name_lines(name, room)
    for index, line in enumerate(lines):
        y = middle + NAME_LINE_PX * (index - (len(lines) - 1) / 2)
        yield svg_text(x, y, line, "small" if len(lines) > 1 else "", anchor="end")


def clipped(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: max(1, chars - 1)].rstrip() + "…"


def escaped(text: object) -> str:
    """Escape for element text and attributes; newlines stay, because tooltips have lines."""
    return "\n".join(escape(one_line(line)) for line in str(text).split("\n"))
