"""The parts that charts are made of: a scale, axes, a legend, text and lines as SVG, and the one style of them all.

    x = Scale(low=0, high=1e6, start_px=AXIS_PX, end_px=746.0)
    svg_picture(760, 300, "Loss", [*bottom_axis(x, 260, "tokens")])

Everything that comes from outside goes through `escaped`. Colours are CSS variables with fallbacks: a page may set
them, a lone file works as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from redline.report import one_line

WIDE_FROM_PX = 600  # below this, labels are shorter
CHAR_PX = 7.0  # upper estimate of a character at 12 px in any sans-serif a reader may have
AXIS_PX = 62.0  # room for the labels of the left axis
LEGEND_ROW_PX = 20

# Okabe and Ito's colour-blind-safe hues; vermilion is kept for what is wrong.
SERIES = 5
STYLE = """
.redline-chart {
  --c-ink: var(--ink, #1d2129); --c-muted: var(--muted, #5d6673); --c-grid: var(--grid, #e3e6ea);
  --c-bar: var(--bar, #a9cbe4); --c-gain: var(--gain, #0072b2); --c-bad: var(--bad, #b84300);
  --s0: #0072b2; --s1: #c07f00; --s2: #008561; --s3: #b5568b; --s4: #2a93cc; color: var(--c-ink);
  font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums;
}
@media (prefers-color-scheme: dark) {
  .redline-chart {
    --c-ink: var(--ink, #e4e7eb); --c-muted: var(--muted, #98a2af); --c-grid: var(--grid, #2c333c);
    --c-bar: var(--bar, #28516e); --c-gain: var(--gain, #56b4e9); --c-bad: var(--bad, #ff8a4c);
    --s0: #4ea3dd; --s1: #e69f00; --s2: #2fc397; --s3: #e08fbd; --s4: #8fd0f5;
  }
}
.redline-chart text { fill: currentColor; }
.redline-chart .muted, .redline-chart .dropped text { fill: var(--c-muted); }
.redline-chart .broken { fill: var(--c-bad); }
.redline-chart .wrong { fill: var(--c-bad); font-weight: 600; }
.redline-chart .grid { stroke: var(--c-grid); }
.redline-chart .bar { fill: var(--c-bar); }
.redline-chart .gain { fill: var(--c-gain); }
.redline-chart .dropped .bar, .redline-chart .dropped .gain, .redline-chart .dropped .whisker { opacity: .45; }
.redline-chart .whisker { fill: none; stroke: var(--c-ink); stroke-width: 1.25; }
.redline-chart .absent { fill: none; stroke: var(--c-muted); stroke-dasharray: 3 3; }
.redline-chart .absent.failed { stroke: var(--c-bad); }
.redline-chart .hatch { stroke: var(--c-muted); opacity: .5; }
.redline-chart .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.redline-chart .different { stroke: var(--c-bad); stroke-width: 2.6; }
.redline-chart .reference { fill: none; stroke: var(--c-ink); stroke-width: 8; opacity: .16; stroke-linejoin: round; }
.redline-chart .mark { stroke: var(--c-bad); stroke-width: 1.5; }
.redline-chart .start { stroke: var(--c-muted); stroke-dasharray: 5 5; }
""" + "\n".join(f".redline-chart .s{index} {{ stroke: var(--s{index}); }}" for index in range(SERIES))


class Scale:
    """Values to pixels, linear; `ticks` are round numbers inside it."""

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


def bottom_axis(scale: Scale, y: float, label: str, whole: bool = False) -> Iterator[str]:
    for tick in scale.ticks(70):
        if whole and tick != int(tick):
            continue
        yield svg_line("grid", scale(tick), 6, scale(tick), y)
        yield svg_text(scale(tick), y + 12, short_number(tick), "muted tick", anchor="middle")
    yield svg_text((scale.start_px + scale.end_px) / 2, y + 28, label, "muted", anchor="middle")


def plain_tick(value: float) -> str:
    return f"{value:.6g}"


def left_axis(
    scale: Scale, width_px: int, label: str, spacing_px: float = 40, tick_text: Callable[[float], str] = plain_tick
) -> Iterator[str]:
    for tick in scale.ticks(spacing_px):
        yield svg_line("grid", AXIS_PX, scale(tick), width_px - 14, scale(tick))
        yield svg_text(AXIS_PX - 8, scale(tick), tick_text(tick), "muted tick", anchor="end")
    if label:
        yield svg_text(0, (scale.start_px + scale.end_px) / 2, label, "muted")


def short_number(value: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def legend_rows(entries: Sequence[tuple[str, str]], top: float, width_px: int) -> tuple[list[str], float]:
    """Columns as wide as the longest label, as many as fit; also the height they take."""
    column_px = 34 + CHAR_PX * max(len(label) for _, label in entries) + 12
    left = AXIS_PX if width_px >= WIDE_FROM_PX else 0.0
    columns = max(1, int((width_px - left) // column_px))
    parts = []
    for index, (look, label) in enumerate(entries):
        x, y = left + index % columns * column_px, top + index // columns * LEGEND_ROW_PX + 8
        parts.append(f'<path {look} d="M{x:.2f} {y}h26"/>')
        parts.append(svg_text(x + 34, y, label, "legend wrong" if "different" in look else "legend"))
    return parts, math.ceil(len(entries) / columns) * LEGEND_ROW_PX + 8


def svg_picture(width_px: int, height_px: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width_px} {height_px:.0f}" width="{width_px}" height="{height_px:.0f}"'
    name = f'class="redline-chart" role="img" aria-label="{escaped(label)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {name} {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"])


def svg_line(kind: str, x1: float, y1: float, x2: float, y2: float, title: str = "") -> str:
    inside = f"<title>{escaped(title)}</title>" if title else ""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}">{inside}</line>'


def svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" dominant-baseline="central"'
    return f'<text class="{kind}" {place}>{escaped(text)}</text>'


def clipped(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: max(1, chars - 1)].rstrip() + "…"


def escaped(text: object) -> str:
    """For element text and attributes; newlines stay, because tooltips have lines."""
    return "\n".join(escape(one_line(line)) for line in str(text).split("\n"))
