"""A chart that fills column by column; the maths is in `chartmath`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from console.sources.series import Points
from console.tui import chartmath
from console.tui import format as fmt
from console.tui.chartmath import Mode
from console.tui.feed import Snapshot
from console.tui.rows import Row, fill, rule
from console.tui.widgets.lines import Panel

LABEL = 6
LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Chart:
    """What one chart shows: a title and the series whose band it draws."""

    title: str
    names: tuple[str, ...]
    unit: str
    from_zero: bool = False
    scale: float = 1.0
    """The values are divided by this to be in `unit`."""


def chart_rows(
    chart: Chart, series: Mapping[str, Points], window: tuple[float, int], width: int, height: int,
    mode: Mode,
) -> list[Row]:  # fmt: skip
    """Returns title, body with an axis from its lowest to its highest value, and the time axis."""
    held = [points for name in chart.names if (points := series.get(name))]
    if not held or width < LABEL + 2:
        return [rule(chart.title, width, "no data yet")]
    start, span = window
    body_height, room = height - 2, width - LABEL - 1
    count = chartmath.columns_of(mode, room)
    columns = chartmath.merge([chartmath.bins(points, start, span, count) for points in held])
    if chart.scale != 1.0:
        columns = [b and (b[0] / chart.scale, b[1] / chart.scale) for b in columns]
    low, high = chartmath.bounds(columns, chart.from_zero)
    if chart.unit == "share":
        high = max(high, LEAST_SHARE)
    rows = [rule(chart.title, width, _note(chart, [points[-1] for points in held]))]
    lines = chartmath.draw(columns, low, high, body_height, mode)
    labels = _labels(low, high, chart.unit, body_height)
    for label, line in zip(labels, lines, strict=True):
        rows.append(((fill(label, LABEL, right=True), "dim"), (" ", ""), (line, "data")))
    rows.append(((" " * (LABEL + 1), ""), (time_axis(start, span, room), "dim")))
    return rows


def _note(chart: Chart, newest: Sequence[tuple[float, float]]) -> str:
    """Returns the newest value; of several series the lowest and the highest."""
    values = [value / chart.scale for _, value in newest]
    low, high = (scale_label(each(values), chart.unit) for each in (min, max))
    if len(chart.names) == 1:
        return f"now {high}"
    return f"now {high} each" if low == high else f"now {low} to {high}"


def scale_label(value: float, unit: str) -> str:
    """Returns a value for an axis, short."""
    if unit == "share":
        return f"{value * 100:.0f}%"
    if unit == "GiB":
        return fmt.short_gib(value * 1024) if value else "0"
    if unit == "s":
        return fmt.duration(value).replace(" ", "") if value else "0"
    if unit == "nats/token":
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
    """Returns clock times at both ends and how long the window is."""
    form = "%H:%M:%S" if span <= 300 else "%H:%M"
    left = time.strftime(form, time.localtime(start))
    right = time.strftime(form, time.localtime(start + span))
    middle = f"{span // 60} min" if span < 7200 else f"{span // 3600} h"
    room = width - len(left) - len(right)
    return left + middle.center(room) + right if room > len(middle) else left


class ChartPanel(Panel):
    """Draws nothing anew unless a point came or the window jumped."""

    def __init__(self, id: str, mode: Mode):
        super().__init__(id=id)
        self.mode: Mode = mode
        self.chart: Chart | None = None
        self.span_s = 0
        self._mark: object = None
        self._drawn: Sequence[Row] = ()

    def rows(self, snapshot: Snapshot, width: int, height: int) -> Sequence[Row]:
        state, chart = snapshot.state, self.chart
        if state is None or chart is None or height < 3:
            return []
        points = [held for name in chart.names if (held := snapshot.charts.get(name))]
        first = min((p[0][0] for p in points), default=snapshot.now)
        last = max((p[-1][0] for p in points), default=snapshot.now)
        window = chartmath.window(first, last, self.span_s)
        mark = (chart, window, width, height, [(len(p), p[-1]) for p in points])
        if mark == self._mark:
            return self._drawn
        self._mark = mark
        self._drawn = chart_rows(chart, snapshot.charts, window, width, height, self.mode)
        return self._drawn
