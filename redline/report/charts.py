"""The ladder as bars, and its loss curves, as SVG text: no library, light or dark by the reader's own setting.

    ladder_chart(document["rows"], width_px=320);  loss_chart(document["rows"], document["reference"], width_px=340)

A chart is drawn at the width it will have, not scaled to it, so that text keeps its size on a phone. Every mark shows
its figures when it is pointed at (`svg.hot_area`). Wide windows show the ladder as `steps.steps_chart` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from redline.core.units import (
    UNKNOWN,
    human_bytes,
    human_percent,
    human_rate,
    human_ratio,
    human_seconds,
    rate_unit,
    spelled_rate_unit,
)
from redline.report import Row, is_dropped, one_line, reason_of, rung_name, shown_mfu, status_of, verdict_of
from redline.report.svg import (
    AXIS_PX,
    CHAR_PX,
    WIDE_FROM_PX,
    Box,
    Scale,
    Size,
    bottom_axis,
    clipped,
    escaped,
    hot_area,
    hot_path,
    left_axis,
    legend_rows,
    row_name,
    svg_line,
    svg_picture,
    svg_rect,
    svg_text,
)

WIDTH_PX = 760
ROW_PX, BAR_PX = 30, 16
OWN_PX = 5  # the part of a bar's height that shows the rung at its own micro batch
PAIR_PX = 13  # between the figures of these two
NAME_CHARS = 15
PLOT_PX = 300  # height of the loss plot
GAP_PLOT_PX, GAP_SPACE_PX = 110, 40  # the plot of differences, and the space above it
GAP_TITLE = "minus its own fp32 reference"
LOOKS = 5  # colours that stay distinct as thin lines on either background
MOST_SLICES = 40  # of a plot, each of which shows its losses when pointed at
DASHES = ("none", "7 4", "2 3", "9 3 2 3", "5 2 1 2 1 2")  # when colours run out: a plain ladder has 20 rows

Curve = Sequence[float | None]


# --- rates of a row ---------------------------------------------------------------------------------------------------


def is_measured(row: Row) -> bool:
    return status_of(row) == "ok" and row.get("tokens_per_second") is not None


def own_rate(row: Row) -> float | None:
    """Return tokens per second at the micro batch that is fastest for the row; None if none was searched for."""
    return (row.get("rebatched") or {}).get("tokens_per_second")


def fastest_of(rows: Sequence[Row]) -> float:
    """Return the highest rate that a bar or its whisker reaches."""
    ends = [max(rate_range(row)[1], own_range(row)[1], row["tokens_per_second"]) for row in rows if is_measured(row)]
    return max(ends, default=0.0)


def rate_range(row: Row) -> tuple[float, float]:
    """Return tokens per second of a slow step (p90) and of a fast one (p10)."""
    rate, seconds = float(row["tokens_per_second"]), row.get("step_seconds") or {}
    median, p10, p90 = (seconds.get(name) for name in ("median", "p10", "p90"))
    return (rate * median / p90, rate * median / p10) if median and p10 and p90 else (rate, rate)


def own_range(row: Row) -> tuple[float, float]:
    """The same at the row's own micro batch; zeros if it has none, and the rate twice if its noise is unknown."""
    own = row.get("rebatched") or {}
    return (0.0, 0.0) if own.get("tokens_per_second") is None else rate_range(own)


def base_rate(row: Row) -> float:
    """Return the rate of the recipe without this rung; the row's own if the gain is unknown or inside the noise."""
    ratio, rate = row.get("speedup_step"), float(row["tokens_per_second"])
    return rate if not ratio or row.get("within_noise") else rate / ratio


def row_data(row: Row) -> str:
    """Return attributes with the document's exact figures, for programs that read the page."""
    rate, own = row.get("tokens_per_second"), own_rate(row)
    figures = "" if rate is None else f' data-tokens-per-second="{rate}"'
    figures += "" if own is None else f' data-own-tokens-per-second="{own}"'
    return f' data-rung="{escaped(rung_name(row))}" data-status="{escaped(status_of(row))}"{figures}'


# --- bars -------------------------------------------------------------------------------------------------------------


def ladder_chart(rows: Sequence[Row], width_px: int = WIDTH_PX) -> str:
    """A bar of tokens per second for each rung; the dark end is what the rung added to the recipe it was put onto."""
    left = _name_px(rows)
    right = _value_px(rows, wide=width_px >= WIDE_FROM_PX)
    fastest = fastest_of(rows)
    scale = Scale(low=0.0, high=fastest or 1.0, start_px=left, end_px=max(left + 40.0, width_px - right))
    height = ROW_PX * max(1, len(rows)) + 40
    parts = list(bottom_axis(scale, height - 34, spelled_rate_unit(rows[0].get("unit")))) if fastest else []
    marks = []
    for index, row in enumerate(rows):
        parts += _ladder_row(row, ROW_PX * index, scale, width_px)
        box = Box(0, ROW_PX * index, width_px, ROW_PX)
        marks.append(hot_area(box, tooltip(row), Size(width_px, height), f' data-kind="rung"{row_data(row)}'))
    parts += [] if rows else [svg_text(left, 20, "no rung has been measured yet", "muted")]
    return svg_picture(width_px, height, "Tokens per second of every rung", parts, marks)


def _ladder_row(row: Row, top: float, scale: Scale, width_px: int) -> Iterator[str]:
    middle = top + ROW_PX / 2
    yield f'<g class="rung{" dropped" if is_dropped(row) else ""}" data-rung="{escaped(rung_name(row))}">'
    yield from row_name(scale.start_px - 10, middle, rung_name(row), NAME_CHARS)
    yield from (
        _measured_bar(row, middle, scale, width_px) if is_measured(row) else _empty_bar(row, middle, scale, width_px)
    )
    yield "</g>"


def _measured_bar(row: Row, middle: float, scale: Scale, width_px: int) -> Iterator[str]:
    rate, own, fast = row["tokens_per_second"], own_rate(row), rate_range(row)[1]
    top, end = middle - BAR_PX / 2, scale(rate)
    height = BAR_PX - OWN_PX - 1 if own else BAR_PX
    yield svg_rect("bar", scale.start_px, top, end - scale.start_px, height)
    base = scale(base_rate(row))
    if base < end:
        yield svg_rect("gain", base, top, end - base, height)
    if own:
        yield svg_rect("own", scale.start_px, top + height + 1, scale(own) - scale.start_px, OWN_PX)
    yield from _whisker(rate_range(row), top + height / 2, 4, scale)
    label, look = _value_label(row, wide=width_px >= WIDE_FROM_PX)
    if not own:
        yield svg_text(max(end, scale(fast)) + 8, middle, label, look)
        return
    yield from _whisker(own_range(row), top + height + 1 + OWN_PX / 2, 2, scale)
    yield svg_text(max(end, scale(fast)) + 8, middle - PAIR_PX / 2, label, f"{look} small")
    end = max(scale(own), scale(own_range(row)[1]))
    yield svg_text(end + 8, middle + PAIR_PX / 2, human_rate(own), "value own-figure small")


def _whisker(ends: tuple[float, float], y: float, half_px: int, scale: Scale) -> Iterator[str]:
    slow, fast = ends
    if fast > slow:
        a, b = scale(slow), scale(fast)
        path = f"M{a:.2f} {y - half_px}v{2 * half_px}M{a:.2f} {y}H{b:.2f}M{b:.2f} {y - half_px}v{2 * half_px}"
        yield f'<path class="whisker" d="{path}"/>'


def _value_label(row: Row, wide: bool) -> tuple[str, str]:
    total = row.get("speedup_total")
    label = human_rate(row["tokens_per_second"]) + (f" · {human_ratio(total)}" if wide and total is not None else "")
    wrong = verdict_of(row) == "different"
    return (label + " !" if wrong else label, "value wrong" if wrong else "value")


def _empty_bar(row: Row, middle: float, scale: Scale, width_px: int) -> Iterator[str]:
    """A rung without a figure: a hatched stub and as much of the reason as there is room for."""
    status = status_of(row)
    top, stub = middle - BAR_PX / 2, 36
    kind = "absent failed" if status == "failed" else "absent"
    yield svg_rect(kind, scale.start_px, top, stub, BAR_PX)
    slashes = "".join(f"M{scale.start_px + x:.2f} {top + BAR_PX}l8 -{BAR_PX}" for x in range(0, stub - 7, 7))
    yield f'<path class="hatch" d="{slashes}"/>'
    text = "no figure" if status == "ok" else f"{status}: {reason_of(row)}"
    room = int((width_px - scale.start_px - stub - 8) / CHAR_PX)
    yield svg_text(scale.start_px + stub + 8, middle, clipped(text, room), "broken" if status == "failed" else "muted")


def tooltip(row: Row) -> str:
    """Return every figure of a row, one per line; the name comes first."""
    lines = [rung_name(row), one_line(row.get("title") or ""), one_line(row.get("reason") or "")]
    lines += _figure_lines(row) if status_of(row) == "ok" else [status_of(row)]
    return "\n".join(line for line in lines if line)


def _figure_lines(row: Row) -> list[str]:
    seconds = row.get("step_seconds") or {}
    median, p10, p90 = (human_seconds(seconds.get(name)) for name in ("median", "p10", "p90"))
    noise = " (inside the noise)" if row.get("within_noise") else ""
    memory = f"{human_bytes(row.get('peak_bytes'))}, predicted {human_bytes(row.get('predicted_peak_bytes'))}"
    return [
        f"{human_rate(row.get('tokens_per_second'))} {rate_unit(row.get('unit'), short=False)}, micro batch "
        f"{_known(row.get('micro_batch'))}",
        f"step {median} (p10 {p10}, p90 {p90}, n {_known(seconds.get('n'))})",
        f"{human_ratio(row.get('speedup_step'))} this step{noise}, {human_ratio(row.get('speedup_total'))} in total",
        f"MFU {human_percent(shown_mfu(row))}, HFU {human_percent(row.get('hfu'))}",
        *_light_lines(row),
        *_own_lines(row),
        f"peak memory {memory}",
        f"compiled in {human_seconds(row.get('compile_seconds'))}, verdict {verdict_of(row)}",
        "measured, not kept" if is_dropped(row) else "",
    ]


def _light_lines(row: Row) -> Iterator[str]:
    light, rate = (row.get("roofline") or {}).get("light"), row.get("tokens_per_second")
    if light and rate is not None:
        unit = rate_unit(row.get("unit"), short=False)
        yield f"{human_percent(rate / light, 0)} of its speed of light, {human_rate(light)} {unit}"


def _own_lines(row: Row) -> Iterator[str]:
    own = row.get("rebatched") or {}
    if own.get("tokens_per_second") is not None:
        gain = human_ratio(own.get("speedup_fixed"))
        rate = f"{human_rate(own_rate(row))} {rate_unit(row.get('unit'), short=False)}"
        yield f"at its own micro batch {_known(own.get('micro_batch'))}: {rate}, {gain}"


# --- loss curves ------------------------------------------------------------------------------------------------------


def loss_chart(rows: Sequence[Row], reference: dict[str, Any] | None, width_px: int = WIDTH_PX) -> str:
    """Draw every loss curve over the thick fp32 reference; the dashed line is ln V, the loss of a uniform guess.

    Curves that agree overlap, so a second plot below shows each minus the reference of its own maths.
    """
    reference = reference or {}
    curves = [row for row in rows if _finite(row.get("loss_curve"))]
    base, start = reference.get("loss_curve") or [], reference.get("ln_vocab")
    if not curves and not _finite(base):
        return svg_picture(width_px, 40, "Loss curves", [svg_text(0, 20, "no loss curve was recorded", "muted")])
    x, y = _loss_scales([row["loss_curve"] for row in curves], base, start, width_px)
    parts = [*left_axis(y, width_px, "loss"), *_reference_marks(reference, x, y)]
    parts += [_curve(row, row["loss_curve"], _look(index, row), x, y) for index, row in enumerate(curves)]
    marks = [*_step_slices(curves, reference, x, y, Size(width_px, PLOT_PX))]
    marks += [_hot_curve(row, row["loss_curve"], x, y, Size(width_px, PLOT_PX)) for row in curves]
    changing = changing_rungs(rows)
    gaps, bottom = _gap_plot(curves, [own_reference(row, reference, changing) for row in curves], x, width_px)
    axis = bottom_axis(x, bottom, "step", whole=True)
    legend, legend_px = legend_rows(_legend_entries(curves, reference), bottom + 48, width_px)
    label = "Loss curves against the reference"
    return svg_picture(width_px, bottom + 48 + legend_px, label, [*axis, *parts, *gaps, *legend], marks)


def _step_slices(curves: Sequence[Row], reference: dict[str, Any], x: Scale, y: Scale, chart: Size) -> Iterator[str]:
    """Yield vertical slices of the plot that show every curve's loss at their step."""
    base, steps = reference.get("loss_curve") or [], int(x.high) + 1
    named = [(_reference_name(reference), base)] if _finite(base) else []
    named += [(rung_name(row), row["loss_curve"]) for row in curves]
    every = max(1, math.ceil(steps / MOST_SLICES))
    half = (x.end_px - x.start_px) / max(1, steps - 1) * every / 2
    for step in range(0, steps, every):
        losses = [f"{name} {_loss(curve[step])}" for name, curve in named if step < len(curve)]
        left, right = max(x.start_px, x(step) - half), min(x.end_px, x(step) + half)
        box = Box(left, y.end_px, right - left, y.start_px - y.end_px)
        yield hot_area(box, "\n".join([f"step {step}", *losses]), chart, ' data-kind="slice"', focus=False)


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def own_reference(row: Row, reference: dict[str, Any], changing: set[str]) -> Curve:
    """Return the fp32 curve of the row's own maths; empty if the document has none. Older documents hold only the
    unchanged model's curve, so rows that change the maths, or build on a rung that does, have no reference there."""
    if "reference_curve" in row:
        return row["reference_curve"] or []
    changed = changing & {rung_name(row), *(row.get("recipe") or [])}
    return [] if changed else reference.get("loss_curve") or []


def changing_rungs(rows: Sequence[Row]) -> set[str]:
    """Return the rungs that changed the maths in an older document. A first row that is a whole recipe does not say
    which of its rungs did; all of them count, since every later row contains them."""
    changing: set[str] = set()
    for place, row in enumerate(rows):
        if (row.get("equivalence") or {}).get("class") == "changes-maths":
            changing |= {rung_name(row), *((row.get("recipe") or []) if place == 0 else [])}
    return changing


def _gap_plot(curves: Sequence[Row], references: Sequence[Curve], x: Scale, width_px: int) -> tuple[list[str], int]:
    """Draw each curve minus its own reference, scaled to the curves whose verdict is *same* or *rounding*; also return
    where the plot ends."""
    gaps = [
        [_minus(a, b) for a, b in zip(row["loss_curve"], base, strict=False)]
        for row, base in zip(curves, references, strict=True)
    ]
    shown = [(index, row, gap) for index, (row, gap) in enumerate(zip(curves, gaps, strict=True)) if _finite(gap)]
    if not shown:
        return [], PLOT_PX
    agreeing = [gap for _, row, gap in shown if verdict_of(row) in ("same", "rounding")]
    reach = 1.1 * max(abs(value) for gap in agreeing or gaps for value in _finite(gap)) or 1e-3
    top, bottom = PLOT_PX + GAP_SPACE_PX, PLOT_PX + GAP_SPACE_PX + GAP_PLOT_PX
    y = Scale(low=-reach, high=reach, start_px=bottom, end_px=top)
    parts = [svg_text(x.start_px, top - 14, GAP_TITLE, "muted"), *left_axis(y, width_px, "", spacing_px=26)]
    parts.append(svg_line("reference", x.start_px, y(0.0), x.end_px, y(0.0)))
    parts += [_curve(row, gap, _look(index, row).replace("curve", "curve gap", 1), x, y) for index, row, gap in shown]
    return parts, bottom


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _finite(curve: Sequence[float | None] | None) -> list[float]:
    return [value for value in curve or [] if value is not None and math.isfinite(value)]


def _loss_scales(
    curves: Sequence[Sequence[float]], base: Sequence[float], start: float | None, width_px: int
) -> tuple[Scale, Scale]:
    """Return both scales. A curve that blows up must not flatten the others, so the loss axis ends at twice the span
    of the reference and ln V at most."""
    trusted = _finite(base) + _finite([start])
    values = [value for curve in curves for value in _finite(curve)] + trusted
    low, high = min(values), max(values)
    if trusted:
        high = min(high, max(trusted) + (max(trusted) - min(trusted) or 1.0))
    margin = 0.06 * (high - low) or 0.5
    steps = max(len(curve) for curve in [*curves, base])
    y = Scale(low=low - margin, high=high + margin, start_px=PLOT_PX, end_px=10.0)
    return Scale(low=0.0, high=max(1.0, steps - 1.0), start_px=AXIS_PX, end_px=width_px - 14.0), y


def _reference_marks(reference: dict[str, Any], x: Scale, y: Scale) -> Iterator[str]:
    base, start = reference.get("loss_curve") or [], reference.get("ln_vocab")
    if _finite(base):
        title = f"{_reference_name(reference)}\n{_ends(base)}"
        yield f'<path class="reference" d="{_path(base, x, y)}"><title>{escaped(title)}</title></path>'
    if start is not None:
        title = f"ln V = {start:.3f}: the loss of a model that knows nothing"
        yield svg_line("start", x.start_px, y(start), x.end_px, y(start), title)


def _reference_name(reference: dict[str, Any]) -> str:
    return f"{one_line(reference.get('precision') or 'fp32')} reference"


def _curve(row: Row, values: Sequence[float | None], look: str, x: Scale, y: Scale) -> str:
    return f'<path {look} data-rung="{escaped(rung_name(row))}" d="{_path(values, x, y)}"/>'


def _hot_curve(row: Row, values: Sequence[float | None], x: Scale, y: Scale, chart: Size) -> str:
    detail = one_line((row.get("equivalence") or {}).get("detail") or "")
    text = f"{rung_name(row)}: {verdict_of(row)}\n{_ends(values)}\n{detail}".strip()
    data = f' data-kind="curve" data-rung="{escaped(rung_name(row))}"'
    return hot_path(_path(values, x, y), text, chart, (x(len(values) / 3), y.end_px), data)


def _look(index: int, row: Row) -> str:
    """Return the attributes that distinguish a curve: colours first, then the same colours dashed."""
    kind = "different" if verdict_of(row) == "different" else f"s{index % LOOKS}"
    return f'class="curve {kind}" stroke-dasharray="{DASHES[index // LOOKS % len(DASHES)]}"'


def _path(curve: Sequence[float | None], x: Scale, y: Scale) -> str:
    """Return line segments with a gap at every step without a finite loss."""
    words, pen_down = [], False
    for step, value in enumerate(curve):
        known = value is not None and math.isfinite(value)
        if known and value is not None:
            words.append(f"{'L' if pen_down else 'M'}{x(step):.2f} {y(value):.2f}")
        pen_down = known
    return "".join(words)


def _ends(curve: Sequence[float | None]) -> str:
    return f"{_loss(curve[0])} → {_loss(curve[-1])} after {len(curve)} steps"


def _legend_entries(curves: Sequence[Row], reference: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (look, label) of everything drawn."""
    start = reference.get("ln_vocab")
    entries = (
        [('class="reference"', clipped(_reference_name(reference), NAME_CHARS))]
        if _finite(reference.get("loss_curve"))
        else []
    )
    entries += [('class="start"', f"ln V = {start:.2f}")] if start is not None else []
    return entries + [(_look(index, row), clipped(rung_name(row), NAME_CHARS)) for index, row in enumerate(curves)]


def _name_px(rows: Sequence[Row]) -> float:
    longest = max((len(clipped(rung_name(row), NAME_CHARS)) for row in rows), default=0)
    return CHAR_PX * longest + 14


def _value_px(rows: Sequence[Row], wide: bool) -> float:
    """Return the room that labels need to the right of the longest bar."""
    measured = [row for row in rows if is_measured(row)]
    labels = [_value_label(row, wide)[0] for row in measured] + [human_rate(own_rate(row)) for row in measured]
    return CHAR_PX * max(map(len, labels), default=4) + 10


def _known(value: object) -> str:
    return UNKNOWN if value is None else one_line(value)
