"""The Dashboard: ranks and figures, charts, the newest log lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod

from textual.app import ComposeResult
from textual.containers import Grid, Horizontal

from console.model import RunState
from console.tui import chartmath
from console.tui.chartmath import Mode
from console.tui.screens.view import Console, View, shown_text
from console.tui.widgets.chart import Chart, ChartPanel
from console.tui.widgets.figures import figure_rows
from console.tui.widgets.lines import Panel
from console.tui.widgets.logtail import LogTail
from console.tui.widgets.ranks import rank_rows

CHARTS = (
    Chart("tok/s", ("toks_per_s",), "", from_zero=True),
    Chart("loss", ("loss",), "nats/token"),
    Chart("bytes right", ("bytes_right",), "share", from_zero=True),
    Chart("step time", ("step_s",), "s", from_zero=True),
    Chart("gate entropy", ("gate_entropy_mean",), "", from_zero=True),
    Chart("grad norm", ("grad_norm",), "", from_zero=True),
)
MOST_CHARTS = 6
BANDED = 16
"""At most so many ranks or GPUs are drawn into the band of the memory chart."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Heights of the three bands of the Dashboard, and how many charts stand in how many rows."""

    top: int
    figures_width: int
    charts: int
    per_row: int
    log: int


def shape(width: int, height: int, ranks: int) -> Shape:
    """Returns what the Dashboard shows in `width` × `height` cells.

    Too small for all: the charts go first, then the log; ranks stay.
    """
    wanted = max(9 if height < 30 else 13, ranks + 1)
    rest = 0 if height < 12 else 4 if height < 20 else 10
    top = max(2, min(wanted, height - rest))
    left = height - top
    figures = 0 if width < 60 else 28 if width < 100 else 40 if width < 160 else 52
    if left < 9:
        return Shape(top, figures, 0, 0, left)
    per_row = 1 if width < 60 else 2 if width < 160 else 3
    rows = 2 if left >= 20 else 1
    log = max(4, left // 4) if rows == 1 else max(5, left // 4)
    return Shape(top, figures, per_row * rows, per_row, log)


def chosen(state: RunState, available: set[str], count: int) -> list[Chart]:
    """Returns the charts to show: those with data first, what is scored before the others."""
    charts = list(CHARTS)
    if "bytes_right" in available:
        charts.insert(1, charts.pop(2))
    charts.insert(3, memory_chart(state))
    charts.sort(key=lambda chart: available.isdisjoint(chart.names))
    return charts[:count]


def memory_chart(state: RunState) -> Chart:
    gpus = [f"gpu_mem_mib:{gpu.index}" for gpu in state.gpus[:BANDED]]
    names = tuple(gpus or (f"rss_mib:{rank.rank}" for rank in state.ranks[:BANDED]))
    of = f" of {len(names)} {'GPUs' if gpus else 'ranks'}" if names else ""
    return Chart(f"memory{of}", names, "GiB", True, 1024.0)


def wanted_series(state: RunState) -> tuple[str, ...]:
    """Returns the names of all series that a chart may need."""
    names = [name for chart in CHARTS for name in chart.names]
    return (*names, *memory_chart(state).names)


class Dashboard(View):
    DEFAULT_CSS = """
    Dashboard { layout: vertical; }
    Dashboard Horizontal { height: auto; width: 1fr; }
    Dashboard #ranks { width: 1fr; height: 1fr; }
    Dashboard #figures { margin-left: 2; height: 1fr; }
    Dashboard Grid { height: 1fr; grid-gutter: 0 2; }
    Dashboard ChartPanel { width: 1fr; height: 1fr; }
    """

    def __init__(self, console: Console, id: str):
        super().__init__(console, id)
        self._book = console.book
        self._mode: Mode = console.terminal.chart_mode
        self.span_s = 0
        self._shape: Shape | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="top"):
            yield Panel("ranks", rank_rows)
            yield Panel("figures", figure_rows)
        with Grid(id="charts"):
            for index in range(MOST_CHARTS):
                yield ChartPanel(f"chart{index}", self._mode)
        yield LogTail(self._book, id="log")

    def fit_panels(self) -> None:
        state = self.snapshot.state if self.snapshot else None
        charts_of = self.snapshot.charts if self.snapshot else {}
        if state is None or not self.size.area:
            return
        ranks = len(state.ranks) or len(state.gpus)
        now = shape(self.size.width, self.size.height, ranks)
        if now != self._shape:
            self._shape = now
            self._apply(now)
        available = {name for name, points in charts_of.items() if points}
        charts = chosen(state, available, now.charts)
        for panel, chart in zip(self.query(ChartPanel), charts, strict=False):
            panel.chart, panel.span_s = chart, self.span_s

    def _apply(self, now: Shape) -> None:
        self.query_one("#top").styles.height = now.top
        figures = self.query_one("#figures")
        figures.display = now.figures_width > 0
        figures.styles.width = now.figures_width or 1
        charts = self.query_one("#charts")
        charts.display = now.charts > 0
        charts.styles.grid_size_columns = now.per_row or 1
        for index, panel in enumerate(self.query(ChartPanel)):
            panel.display = index < now.charts
        log = self.query_one("#log")
        log.display = now.log > 1
        log.styles.height = max(1, now.log)

    def _change_span(self, by: int) -> None:
        spans = chartmath.SPANS_S
        index = spans.index(self.span_s) if self.span_s else spans.index(chartmath.AUTO_MAX_S)
        self.span_s = spans[min(len(spans) - 1, max(0, index + by))]
        if self.snapshot is not None:
            self.take(self.snapshot)

    do_span_less, do_span_more = partialmethod(_change_span, -1), partialmethod(_change_span, 1)

    def copied(self) -> str:
        return shown_text(self.query("#ranks, #figures").results(Panel))
