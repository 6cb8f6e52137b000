"""The ladder as a staircase: a step for each rung, what it added on top, its noise, and the limits above it all.

    steps_chart(document, width_px=960)

Height is tokens per second and MFU at once: one scale, two axes. The thin line on the treads is the recipe as it grew;
a rung that was not kept is paler and leaves the line level. Above are the speed of light of each recipe (dotted) and
the device's own peaks. Narrow windows show the same figures as bars (`charts.ladder_chart`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redline.core.units import human_percent, human_rate, human_ratio, rate_unit
from redline.report import Document, Row, is_dropped, one_line, rung_name, shown_mfu, status_of, verdict_of
from redline.report.charts import (
    base_rate,
    fastest_of,
    is_measured,
    ladder_chart,
    own_range,
    own_rate,
    rate_range,
    row_data,
    tooltip,
)
from redline.report.svg import (
    AXIS_PX,
    Box,
    Scale,
    Size,
    hot_area,
    left_axis,
    name_lines,
    short_number,
    svg_line,
    svg_picture,
    svg_rect,
    svg_text,
)
from redline.report.table import unit_of

PLOT_PX, TOP_PX, FOOT_PX = 370.0, 26.0, 56.0
LEAST_COLUMN_PX = 50.0  # below this names have no room
MFU_AXIS_PX = 52.0
NAME_CHAR_PX = 6.5  # at 11.5 px
STUB_PX = 30.0
LABEL_PX = 13.0  # a line of figures
MOST_ABOVE = 4.0  # times the fastest: a higher limit would leave no room for the steps, and is given in words


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where the chart places everything."""

    size: Size
    y: Scale
    left: float
    right: float
    columns: int

    @property
    def column_px(self) -> float:
        return (self.right - self.left) / self.columns

    def start(self, index: int) -> float:
        return self.left + index * self.column_px

    def middle(self, index: int) -> float:
        return self.start(index) + self.column_px / 2


def steps_chart(document: Document, width_px: int) -> str:
    """Draw the staircase, or bars if nothing was measured or the rungs are too many for this width."""
    rows, limits = document.get("rows") or [], limits_of(document)
    if not has_steps(document, width_px):
        return ladder_chart(rows, width_px)
    right = _right_px(rows, width_px)
    above = [rate for rate in (*lights_of(rows), *(rate for _, rate in limits)) if has_place(rate, rows)]
    high = max([fastest_of(rows), *above])
    frame = Frame(
        size=Size(width_px, PLOT_PX + FOOT_PX),
        y=Scale(low=0.0, high=1.03 * high, start_px=PLOT_PX, end_px=TOP_PX),
        left=AXIS_PX,
        right=right,
        columns=len(rows),
    )
    parts = [*_axes(rows, frame), *_limit_lines(limits, frame), *_light_line(rows, frame)]
    for index, row in enumerate(rows):
        parts += _column(row, index, frame)
    parts.append(_stair(rows, frame))
    marks = [
        hot_area(
            Box(frame.start(index), TOP_PX, frame.column_px, frame.size.height - TOP_PX),
            tooltip(row),
            frame.size,
            f' data-kind="rung"{row_data(row)}',
        )
        for index, row in enumerate(rows)
    ]
    return svg_picture(width_px, frame.size.height, "Tokens per second of every rung, as steps", parts, marks)


def has_steps(document: Document, width_px: int) -> bool:
    """True if something was measured and there is room for every name."""
    rows = document.get("rows") or []
    return bool(fastest_of(rows)) and (_right_px(rows, width_px) - AXIS_PX) / len(rows) >= LEAST_COLUMN_PX


def _right_px(rows: Sequence[Row], width_px: int) -> float:
    return width_px - (MFU_AXIS_PX if peak_rate(rows) else 14.0)


# --- limits -----------------------------------------------------------------------------------------------------------


def limits_of(document: Document) -> list[tuple[str, float]]:
    """Return (label, tokens per second) of the device's peaks, lowest first."""
    known = [limit for limit in document.get("limits") or [] if limit.get("tokens_per_second")]
    unit = rate_unit(unit_of(document), short=False)
    labels = [
        (
            f"{one_line(limit.get('name') or 'peak')}: {limit.get('tflops') or 0:g} TFLOP/s, "
            f"{human_rate(limit['tokens_per_second'])} {unit}",
            float(limit["tokens_per_second"]),
        )
        for limit in known
    ]
    return sorted(labels, key=lambda limit: limit[1])


def light_of(row: Row) -> float | None:
    return (row.get("roofline") or {}).get("light")


def lights_of(rows: Sequence[Row]) -> list[float]:
    return [light for row in rows if (light := light_of(row)) is not None]


def has_place(rate: float, rows: Sequence[Row]) -> bool:
    """True if a line at this rate leaves room for the steps."""
    return rate <= MOST_ABOVE * fastest_of(rows)


def draws_lights(document: Document, width_px: int) -> bool:
    rows = document.get("rows") or []
    return has_steps(document, width_px) and any(has_place(light, rows) for light in lights_of(rows))


def shows_limits(document: Document, width_px: int) -> bool:
    """True if the chart of this width shows all known limits, as lines or in words of its own."""
    return has_steps(document, width_px) and (
        draws_lights(document, width_px) or not lights_of(document.get("rows") or [])
    )


def limits_text(document: Document) -> str:
    """Return the peaks and the speed of light of the fastest row in words, for charts without room for lines."""
    texts = [label for label, _ in limits_of(document)]
    lit = [row for row in document.get("rows") or [] if is_measured(row) and light_of(row) and not is_dropped(row)]
    if lit:
        fastest = max(lit, key=lambda row: float(row["tokens_per_second"]))
        light = f"{human_rate(light_of(fastest))} {rate_unit(unit_of(document), short=False)}"
        texts.append(f"speed of light of the recipe up to {rung_name(fastest)}: {light}")
    return f"Limits: {'; '.join(texts)}." if texts else ""


def peak_rate(rows: Sequence[Row]) -> float | None:
    """Return tokens per second at an MFU of 1, which gives both axes one scale; None if rows disagree."""
    rates = {round(row["tokens_per_second"] / mfu) for row in rows if is_measured(row) and (mfu := shown_mfu(row))}
    low, high = (min(rates), max(rates)) if rates else (0, 0)
    return float(high) if rates and high - low <= 1e-6 * high + 1 else None


def _limit_lines(limits: Sequence[tuple[str, float]], frame: Frame) -> Iterator[str]:
    beyond = 0
    for label, rate in limits:
        y = frame.y(rate)
        if rate <= frame.y.high:
            yield svg_line("limit", frame.left, y, frame.right, y)
            yield svg_text(frame.left + 8, y - 9, label, "limit small")
        else:
            yield svg_text(frame.left + 8, TOP_PX + 10 + 15 * beyond, f"above the chart: {label}", "limit small")
            beyond += 1


def _light_line(rows: Sequence[Row], frame: Frame) -> Iterator[str]:
    """Draw a dotted line over neighbours whose speed of light is known and inside the chart."""
    path, before = "", None
    for index, row in enumerate(rows):
        light = light_of(row)
        if light is not None and light > frame.y.high:
            light = None
        if light is not None:
            y, x = frame.y(light), frame.start(index)
            path += (f"M{x:.1f} {y:.1f}" if before is None else f"V{y:.1f}") + f"H{x + frame.column_px:.1f}"
        before = light
    if path:
        yield f'<path class="light" d="{path}"/>'


# --- axes and steps ---------------------------------------------------------------------------------------------------


def _axes(rows: Sequence[Row], frame: Frame) -> Iterator[str]:
    yield from left_axis(frame.y, frame.right + 14, "", spacing_px=52, tick_text=short_number)
    yield svg_text(0, 8, rate_unit(rows[0].get("unit") if rows else None, short=False), "muted small")
    peak = peak_rate(rows)
    if peak is None:
        return
    shares = Scale(low=0.0, high=frame.y.high / peak, start_px=frame.y.start_px, end_px=frame.y.end_px)
    for tick in shares.ticks(52):
        yield svg_text(frame.right + 8, shares(tick), human_percent(tick, 0), "muted tick")
    yield svg_text(frame.size.width, 8, "MFU", "muted small", anchor="end")


def _column(row: Row, index: int, frame: Frame) -> Iterator[str]:
    yield f'<g class="rung{" dropped" if is_dropped(row) else ""}">'
    yield from _measured(row, index, frame) if is_measured(row) else _absent(row, index, frame)
    yield from _foot(row, index, frame)
    yield "</g>"


def _measured(row: Row, index: int, frame: Frame) -> Iterator[str]:
    rate, own = row["tokens_per_second"], own_rate(row)
    x, width = frame.start(index) + 3, frame.column_px - 6
    share = 0.56 if own else 1.0
    top, base = frame.y(rate), frame.y(min(base_rate(row), rate))
    yield svg_rect("bar", x, base, width * share, PLOT_PX - base)
    if base > top:
        yield svg_rect("gain", x, top, width * share, base - top)
    if own:
        yield svg_rect("own", x + width * (share + 0.04), frame.y(own), width * (0.96 - share), PLOT_PX - frame.y(own))
        yield from _whisker(x + width * (1 + share + 0.04) / 2, own_range(row), frame)
    yield from _whisker(x + width * share / 2, rate_range(row), frame)
    yield from _labels(row, x, width, share, frame)


def _whisker(middle: float, ends: tuple[float, float], frame: Frame) -> Iterator[str]:
    slow, fast = ends
    if fast > slow:
        low, high = frame.y(slow), frame.y(fast)
        path = f"M{middle - 4:.1f} {low:.1f}h8M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 4:.1f} {high:.1f}h8"
        yield f'<path class="whisker" d="{path}"/>'


def _labels(row: Row, x: float, width: float, share: float, frame: Frame) -> Iterator[str]:
    """Write a figure over each block, clear of the dotted line and of the other figure."""
    wrong, own, light = verdict_of(row) == "different", own_rate(row), light_of(row)
    line = frame.y(light) if light is not None and light <= frame.y.high else None
    place = _clear_of(line, frame.y(rate_range(row)[1]) - 10)
    text = _rate_label(row["tokens_per_second"]) + (" !" if wrong else "")
    size = " small" if own else ""
    yield svg_text(x + width * share / 2, place, text, f"value {'wrong' if wrong else 'strong'}{size}", anchor="middle")
    if own:
        beside = _clear_of(line, frame.y(own_range(row)[1]) - 10)
        beside = _clear_of(line, place - LABEL_PX) if abs(beside - place) < LABEL_PX else beside
        middle = x + width * (1 + share + 0.04) / 2
        yield svg_text(middle, beside, _rate_label(own), "value own-figure strong small", anchor="middle")


def _clear_of(line: float | None, place: float) -> float:
    """Return `place`, moved above a line that would strike through the text."""
    return line - LABEL_PX / 2 - 3 if line is not None and abs(line - place) < LABEL_PX / 2 + 1 else place


def _rate_label(rate: float) -> str:
    """Round to three digits: the table has them all."""
    return short_number(float(f"{rate:.3g}"))


def _absent(row: Row, index: int, frame: Frame) -> Iterator[str]:
    """Draw a hatched stub with the status; the reason is in the tooltip and in the table."""
    failed = status_of(row) == "failed"
    x, width, top = frame.start(index) + 6, frame.column_px - 12, PLOT_PX - STUB_PX
    yield svg_rect("absent failed" if failed else "absent", x, top, width, STUB_PX)
    slashes = "".join(f"M{x + at:.1f} {PLOT_PX}l12 -{STUB_PX:.0f}" for at in range(0, int(width) - 11, 9))
    yield f'<path class="hatch" d="{slashes}"/>'
    word = "no figure" if status_of(row) == "ok" else status_of(row)
    yield svg_text(frame.middle(index), top - 10, word, f"small {'broken' if failed else 'muted'}", anchor="middle")


def _foot(row: Row, index: int, frame: Frame) -> Iterator[str]:
    """Write the name in at most two lines, and the total speed-up so far."""
    room = max(3, int((frame.column_px - 2) / NAME_CHAR_PX))
    lines = name_lines(rung_name(row), room)
    for number, line in enumerate(lines):
        yield svg_text(frame.middle(index), PLOT_PX + 13 + 13 * number, line, "small", anchor="middle")
    total = row.get("speedup_total")
    if total is not None and is_measured(row):
        ratio = human_ratio(total).replace("x", "×")
        yield svg_text(frame.middle(index), PLOT_PX + 44, ratio, "small muted", anchor="middle")


def _stair(rows: Sequence[Row], frame: Frame) -> str:
    """Draw the recipe as it grew: a rung that was not kept changes nothing."""
    path, level = "", None
    for index, row in enumerate(rows):
        if is_measured(row) and row.get("kept") is not False:
            level = float(row["tokens_per_second"])
        if level is not None:
            y = frame.y(level)
            path += (f"V{y:.1f}" if path else f"M{frame.start(index):.1f} {y:.1f}") + f"H{frame.start(index + 1):.1f}"
    return f'<path class="stair" d="{path}"/>'


def steps_key(document: Document, width_px: int) -> list[tuple[str, str]]:
    """Return (kind, meaning) of what the chart of this width shows, for the legend above it."""
    rows: list[dict[str, Any]] = document.get("rows") or []
    steps = has_steps(document, width_px)
    known = [
        ("gain", "added by this rung", True),
        ("bar", "there before", True),
        ("own", "at its own micro batch", any(own_rate(row) for row in rows)),
        ("dropped", "measured, not kept", any(map(is_dropped, rows))),
        ("absent", "did not run", any(status_of(row) != "ok" for row in rows)),
        ("whisker", "p10 to p90 of its steps", any(is_measured(row) for row in rows)),
        ("stair", "the recipe as it grew", steps),
        ("light", "speed of light of the recipe", draws_lights(document, width_px)),
        ("limit", "peaks of the device", steps and any(has_place(rate, rows) for _, rate in limits_of(document))),
    ]
    return [(kind, meaning) for kind, meaning, there in known if there]
