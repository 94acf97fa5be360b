"""A chart that fills column by column; `chartmath` computes it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from console.sources.series import Band, Bin, Points
from console.status_text import clock
from console.tui import chartmath
from console.tui import format as fmt
from console.tui.chartmath import Curves, Mode
from console.tui.charts import LOWEST_LAYER, Chart
from console.tui.feed import ScreenData
from console.tui.rows import Row, columns, fill, rule
from console.tui.widgets.lines import Panel
from console.tui.widgets.picker import MARK

LABEL = 6
AXIS_HEIGHT = 7
"""Least number of rows of a chart with a time axis."""
WIDE = 50
LEAST_HIGH = {"share": 0.1, "%": 100.0}
"""The smallest value at the upper end of the value axis, by unit."""
PART, PART_BAR, PART_WORDS = 39, 12, 16
"""Widths in cells: one entry in the list below a zoomed chart, and its bar and values."""
HINT = "← → read values   [ ] time span   z or esc all charts"
Window = tuple[float, int]
"""Start (unix s) and length (s) of the time that a chart shows."""


def chart_rows(
    chart: Chart, series: Mapping[str, Points], window: Window, width: int, height: int,
    mode: Mode, at: float | None = None, selected: bool = False, former: Curves | None = None,
    now: float = 0.0,
) -> list[Row]:  # fmt: skip
    """Returns the title, the body with its value axis and, if there is room, the time axis.

    Without data or room, returns only the title. `at` is the time of the crosshair, or None if
    there is no crosshair. `MARK` is before the title of the `selected` chart. `former` has the
    curves of the former drawing. At `now`, a value may be old although no series has a newer one.
    """
    title = MARK * selected + chart.title
    held = [points for name in chart.names if (points := series.get(name))]
    start, span = window
    if not held or width < LABEL + 2:
        return [rule(title, width, "no data yet", selected, detail=chart.unit_word)]
    room, has_axis = width - LABEL - 1, height >= AXIS_HEIGHT
    body_height = height - 1 - has_axis
    count = room * 2 if mode == "braille" else room
    drawn = (former or Curves()).of(chart.names, held, chart.each != "layer", *window, count)
    curves = tuple(_scaled(curve, chart.scale) for curve in drawn)
    low, high = chartmath.bounds(chartmath.merge(curves), chart.from_zero)
    high = max(high, LEAST_HIGH.get(chart.unit, high))
    detail = " ".join(filter(None, (chart.unit_word, _window_words(span, width))))
    note = _note(chart, series, now, width, width - len(f"{title} {detail} ─ "))
    if len(f"{title} {detail} ─ {note}") > width:
        detail = chart.unit_word
    rows = [rule(title, width, note, selected, detail=detail)]
    cell = None if at is None else min(room - 1, max(0, int((at - start) * room / span)))
    labels = _labels(low, high, chart.unit, body_height)
    lines = chartmath.draw(curves, low, high, body_height, mode)
    for label, line in zip(labels, lines, strict=True):
        rows.append(((fill(label, LABEL, right=True), "dim"), (" ", ""), *_crossed(line, cell)))
    if has_axis:
        rows.append(((" " * (LABEL + 1), ""), (time_axis(start, span, room), "dim")))
    return rows


def _scaled(curve: tuple[Bin, ...], scale: float) -> tuple[Bin, ...]:
    if scale == 1.0:
        return curve
    return tuple(column and (column[0] / scale, column[1] / scale) for column in curve)


def _crossed(line: str, cell: int | None) -> Row:
    """Returns a line of the body, with the crosshair if there is one."""
    if cell is None:
        return ((line, "data"),)
    cross = line[cell] if line[cell : cell + 1].strip() else "│"
    return (line[:cell], "data"), (cross, "now"), (line[cell + 1 :], "data")


def _window_words(span: int, width: int) -> str:
    """Returns the time span of a chart in brackets, which are also the keys that change it."""
    size, unit = (span // 60, "min") if span < 7200 else (span // 3600, "h")
    return f"[{size} {unit}]" if width >= WIDE else f"[{size}{unit[0]}]"


def _note(
    chart: Chart, series: Mapping[str, Points], at: float, width: int, most: int
) -> str:  # fmt: skip
    """Returns the newest value, or for several series the range of the newest values.

    For layers, returns the mean and the lowest mean of a layer; the number of this layer is left
    out if the text would have more than `most` characters. For a chart of ranks or GPUs that
    `is_over`, returns "–" as the value. If the newest value is old, its age comes first.
    """
    old, wide = _old(chart, series, at), width >= WIDE
    now = old or ("last " if chart.is_over else "now ") * wide
    values = [value for _, value in _bands(chart, chart.names, series)[1].values()]
    low, high = (scale_label(each(values), chart.unit) for each in (min, max))
    if chart.is_over and chart.measures:
        return f"{old}–"
    if len(values) == 1:
        return now + high
    if chart.each == "layer" and (layers := series.get(LOWEST_LAYER)):
        layer = f"{layers[-1][1]:.0f}"
        if wide:
            return f"{now}mean {high}, lowest {low} in layer {layer}"
        if old:
            return now + high
        short, full = f"{high} low {low}", f"{high} low {low} L{layer}"
        return full if len(full) <= most else short
    return now + (f"{high} each" if low == high else f"{low} to {high}")


def _old(chart: Chart, series: Mapping[str, Points], now: float) -> str:
    """Returns the age of the newest value if it is above `old_s`, or "".

    After the end of the run, the age is that at the newest value of all charts.
    """
    newest = max((points[-1][0] for points in series.values() if points), default=0.0)
    newest = newest if chart.is_over else max(newest, now)
    own = max((series[name][-1][0] for name in chart.names if series.get(name)), default=newest)
    return f"{fmt.age(newest - own)} old: " if newest - own > chart.old_s else ""


def scale_label(value: float, unit: str) -> str:
    """Returns a value in a short form, for an axis or a title."""
    if unit == "share":
        return f"{value * 100:.0f}%"
    if unit == "%":
        return fmt.whole(value, "%")
    if unit == "GiB":
        return fmt.short_gib(value * 1024) if value else "0"
    if unit == "s":
        return fmt.duration(value).replace(" ", "") if value else "0"
    if unit in ("nats", "nats/token"):
        return f"{value:.2f}"
    return fmt.short(value)


def _labels(low: float, high: float, unit: str, height: int) -> list[str]:
    labels = [""] * height
    labels[-1] = scale_label(low, unit)
    if height > 1:
        labels[0] = scale_label(high, unit)
    if height >= 5 and height % 2:
        labels[height // 2] = scale_label((low + high) / 2, unit)
    return labels


def time_axis(start: float, span: int, width: int) -> str:
    """Returns the clock times at both ends of the time axis; a short axis has only the first."""
    form = "%H:%M:%S" if span <= 300 else "%H:%M"
    left, right = (clock(t, form) for t in (start, start + span))
    return left + right.rjust(width - len(left)) if width > len(left + right) else left


# --- the zoomed chart --------------------------------------------------------------------------


def zoomed_rows(
    chart: Chart, series: Mapping[str, Points], window: Window, width: int, height: int,
    mode: Mode, at: float | None, now: float, former: Curves | None = None,
) -> list[Row]:  # fmt: skip
    """Returns one chart for the whole view, with values below the chart.

    At the crosshair, the values of the whole chart and of each GPU, rank or layer are shown.
    Without a crosshair, only the newest value of each GPU, rank or layer is shown.
    """
    parts = part_rows(chart, series, at, width, height // 3)
    height -= 1 + len(parts)
    rows = chart_rows(chart, series, window, width, height, mode, at, former=former, now=now)
    return [*rows, _reading(chart, series, at, now), *parts]


def _reading(chart: Chart, series: Mapping[str, Points], at: float | None, now: float) -> Row:
    """Returns time, age and values at the crosshair, or the keys if there is no such value."""
    ts, bands = _bands(chart, chart.names, series, at)
    if at is None or not bands:
        return ((HINT, "dim"),)
    each = [*bands.values()]
    words = _range_words(min(low for low, _ in each), max(high for _, high in each), chart.unit)
    if chart.each == "layer" and len(each) > 1:
        mean, lowest = (_range_words(*band, chart.unit) for band in (each[0], each[-1]))
        words = f"mean {mean}, lowest layer {lowest}"
    return (clock(ts), "now"), (f"  {fmt.age(now - ts)} ago   ", "dim"), (words, "strong")


def value_words(value: float, unit: str) -> str:
    """Returns a value with its unit and enough digits for the crosshair."""
    text = fmt.figure(value, unit)
    return text if unit in ("s", "share", "%", "GiB", "") else f"{text} {unit}"


def _range_words(low: float, high: float, unit: str) -> str:
    words = value_words(high, unit)
    return words if value_words(low, unit) == words else f"{fmt.figure(low, unit)} to {words}"


def _bands(
    chart: Chart, names: Sequence[str], series: Mapping[str, Points], at: float | None = None
) -> tuple[float, dict[str, Band]]:  # fmt: skip
    """Returns a time and the values of the series then: the newest, or the nearest to `at`.

    A series that ended more than `old_s` before this time is left out, as after the loss of a GPU,
    and one that began as much later.
    """
    found = {name: points for name in names if (points := series.get(name))}
    held = {name: nearest(points, at) for name, points in found.items()}
    times = [ts for ts, _ in held.values()]
    newest = max(times, default=0.0)
    ts = newest if at is None else min(times, key=lambda ts: abs(ts - at), default=newest)
    return ts, {
        name: (low / chart.scale, high / chart.scale)
        for name, (_, (low, high)) in held.items()
        if found[name][0][0] - chart.old_s <= ts <= found[name][-1][0] + chart.old_s
    }  # fmt: skip


def nearest(points: Points, at: float | None) -> tuple[float, Band]:
    """Returns the time of a point, and the smallest and largest value at this time.

    An older time has two points (`Series.points`). The point is the nearest to the time `at`, or
    the newest if `at` is None.
    """
    index = len(points) if at is None else bisect_left(points, (at,))
    around = points[max(0, index - 1) : index + 1]
    ts = around[0][0] if at is None else min((ts for ts, _ in around), key=lambda ts: abs(ts - at))
    same = points[bisect_left(points, (ts,)) : bisect_right(points, (ts, math.inf))]
    values = [value for _, value in same]
    return ts, (min(values), max(values))


def part_rows(
    chart: Chart, series: Mapping[str, Points], at: float | None, width: int, height: int
) -> list[Row]:
    """Returns the values of the GPUs, ranks or layers that fit; the lowest layer is marked.

    A GPU, rank or layer that has only values of other times has "–".
    """
    bands, names = _bands(chart, chart.parts, series, at)[1], [*filter(series.get, chart.parts)]
    if not bands or height < 2:
        return []
    _, most = chartmath.bounds([(0.0, max(high for _, high in bands.values()))], True)
    most = max(most, LEAST_HIGH.get(chart.unit, most))
    lowest = min(bands, key=lambda name: bands[name]) if chart.each == "layer" else ""
    cells: list[Row] = []
    for name in names:
        style, band = "warn" if name == lowest else "", bands.get(name)
        bar = "".join(fmt.bar(band[1] / most, PART_BAR)) if band else ""
        words = _short_range(*band, chart.unit) if band else fmt.DASH
        words += " ◂" if name == lowest else ""
        cells.append(columns([
            (f"{chart.each} {name.partition(':')[2]}", 9, style or "dim"),
            (bar, PART_BAR, style or "data"), (words, PART_WORDS, style),
        ]))  # fmt: skip
    per_row = max(1, width // PART)
    rows = [tuple(span for cell in cells[i : i + per_row] for span in cell)
            for i in range(0, len(cells), per_row)]  # fmt: skip
    if len(rows) <= height:
        return rows
    shown = (height - 1) * per_row
    return [*rows[: height - 1], ((f"and {len(cells) - shown} more", "dim"),)]


def _short_range(low: float, high: float, unit: str) -> str:
    short = [scale_label(value, unit) for value in (low, high)]
    return value_words(high, unit) if short[0] == short[1] else " to ".join(short)


class ChartPanel(Panel):
    """A chart that is drawn again only if its points, age, window, size or options change.

    The window depends on the points of all shown charts, so that charts side by side have one time
    axis. A zoomed chart shows an age, so it is also drawn again in each new second.
    """

    def __init__(self, id: str, mode: Mode):
        super().__init__(id=id)
        self.mode: Mode = mode
        self.chart: Chart | None = None
        self.span_s = 0
        self.selected = self.zoomed = False
        self.at: float | None = None
        """The time of the crosshair, or None if there is no crosshair."""
        self.window: Window = (0.0, chartmath.AUTO_MAX_S)
        self._mark: object = None
        self._drawn: Sequence[Row] = ()
        self._curves = Curves()

    def rows(self, snapshot: ScreenData, width: int, height: int) -> Sequence[Row]:
        state, chart, series = snapshot.state, self.chart, snapshot.charts
        if state is None or chart is None or height < 3:
            return []
        if any(name not in series for name in chart.names):  # polled for another view or chart
            is_same = self._mark is not None and self._mark[0] == chart  # type: ignore[index]
            return self._drawn if is_same else [rule(chart.title, width, detail=chart.unit_word)]
        points = [held for name in chart.names if (held := series.get(name))]
        shown = [held for held in series.values() if held]
        first = min((held[0][0] for held in shown), default=snapshot.now)
        last = max((held[-1][0] for held in shown), default=snapshot.now)
        self.window = window = chartmath.window(first, last, self.span_s)
        ages = int(snapshot.now) if self.zoomed else 0
        marks = [(len(p), p[-1]) for p in points]
        old = _old(chart, series, snapshot.now)
        mark = (chart, window, width, height, self.selected, self.zoomed, self.at, ages, marks, old)
        if mark == self._mark:
            return self._drawn
        self._mark = mark
        given = chart, series, window, width, height, self.mode
        self._drawn = (
            zoomed_rows(*given, self.at, snapshot.now, self._curves) if self.zoomed
            else chart_rows(
                *given, selected=self.selected, former=self._curves, now=snapshot.now
            )
        )  # fmt: skip
        return self._drawn

    def move_crosshair(self, by: int) -> None:
        """Moves the crosshair by cells; the first move shows the crosshair at the newest point."""
        charts = self.snapshot.charts if self.snapshot else {}
        held = [p for name in (self.chart.names if self.chart else ()) if (p := charts.get(name))]
        if held:
            start, span = self.window
            oldest, newest = max(start, min(p[0][0] for p in held)), max(p[-1][0] for p in held)
            cell_s = span / max(1, self.size.width - LABEL - 1)
            at = newest if self.at is None else self.at + by * cell_s
            self.at = min(newest, max(oldest, at))
            self.redraw()
