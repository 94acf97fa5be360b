"""The Dashboard: ranks and figures, charts, the newest log lines; one chart can be zoomed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partialmethod

from textual.app import ComposeResult

from console.tui import chartmath, charts
from console.tui.background import run_in_background
from console.tui.chartmath import Mode
from console.tui.charts import Chart
from console.tui.feed import ScreenData
from console.tui.operator import Console
from console.tui.rows import Row
from console.tui.views.view import View
from console.tui.widgets.chart import ChartPanel
from console.tui.widgets.figures import figure_rows
from console.tui.widgets.lines import Box, Panel, of_run
from console.tui.widgets.loglines import newest_rows
from console.tui.widgets.ranks import rank_rows

TALL = 30
LEAST_WIDTH, LEAST_HEIGHT = 80, 16
"""The smallest view that shows charts, and figures beside the ranks."""
LEAST_FIGURES, MOST_FIGURES = 3, 8
"""Least and most lines of the figures, if they are below the ranks."""
LEAST_CHART, LOW_CHART, HIGH_CHART = 4, 5, 9
"""Least heights of a chart in lines. `LOW_CHART` applies in a low terminal with a log, and
`HIGH_CHART` if there are more than two rows of charts."""
LEAST_LOG = 3
BESIDE_WIDTH, BESIDE_HEIGHT = 70, 5
"""If the room below the ranks has this size, a tall view shows the log there. Otherwise the log is
at the end of the view."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of the Dashboard: heights of top and log, width of the figures, number of charts.

    The top has the ranks and the figures. The charts fill the height between top and log, in rows
    of `per_row` charts. `beside` is the height of a log in the top, below the ranks; `log` is then
    0. `below` is the height of figures below the ranks. If it is 0, the figures are to the right of
    the ranks, or there are no figures.
    """

    top: int
    figures_width: int
    charts: int
    per_row: int
    log: int
    beside: int = 0
    below: int = 0


SETTINGS_S = 0.5
"""Time from the mount of the Dashboard until the settings file is read."""
ZOOMED = Shape(0, 0, 1, 1, 0)
GAP = 2
"""Width in cells between two panels."""


def shape(width: int, height: int, ranks: int, available: int) -> Shape:
    """Returns the layout of the Dashboard for `available` charts in `width` × `height` cells.

    A terminal that is too small for charts shows the ranks, the figures below them, and the log
    below the figures, as far as there is room.
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        room = height - max(2, ranks + 1)
        if room < LEAST_FIGURES:
            return Shape(height, 0, 0, 0, 0)
        below = min(MOST_FIGURES, room if room < LEAST_FIGURES + LEAST_LOG else room * 3 // 5)
        log = room - below
        log = log if log >= LEAST_LOG else 0
        return Shape(height - log, width, 0, 0, log, below=below)
    tall = height >= TALL
    top = max(2, min(max(13 if tall else 7, ranks + 1), height - 2 * LEAST_CHART))
    left = height - top
    figures = 28 if width < 100 else 40 if width < 160 else 52
    per_row = 2 if width < 116 else 3 if width < 160 else 4
    rows = min(max(left * 3 // 4 // HIGH_CHART, 2), -(-available // per_row))
    count = min(available, rows * per_row)
    log = left - rows * LOW_CHART
    beside = top - max(2, ranks + 1)
    if tall and beside >= BESIDE_HEIGHT and width - figures - GAP >= BESIDE_WIDTH:
        return Shape(top, figures, count, min(per_row, count), 0, beside)
    if tall:
        log = min(max(5, left // 4), left - rows * LEAST_CHART)
    elif rows == 1:
        log = left - max(LOW_CHART, left * 3 // 5)
    return Shape(top, figures, count, min(per_row, count), log if log >= LEAST_LOG else 0)


class Dashboard(View):
    """The Dashboard. `choice` has the titles of the operator's charts; () means the defaults."""

    DEFAULT_CSS = f"""
    Dashboard {{ layout: vertical; }}
    Dashboard #top {{ layout: horizontal; height: auto; }}
    Dashboard #top.stacked {{ layout: vertical; }}
    Dashboard #top.stacked #figures {{ margin-left: 0; }}
    Dashboard #left {{ layout: vertical; width: 1fr; height: 1fr; }}
    Dashboard #ranks {{ height: 1fr; }}
    Dashboard #figures {{ margin-left: {GAP}; width: 28; height: 1fr; }}
    Dashboard #charts {{ layout: grid; height: 1fr; grid-gutter: 0 {GAP}; }}
    Dashboard ChartPanel {{ width: 1fr; height: 1fr; }}
    """

    def __init__(self, console: Console, id: str):
        super().__init__(console, id)
        self._mode: Mode = console.terminal.chart_mode
        self.span_s = 0
        self.choice: Sequence[str] = ()
        self.selected: int | None = None
        self.zoomed = False
        self._charts: list[Chart] = []
        self._shape: Shape | None = None
        self.panels = [
            ChartPanel(f"chart{index}", self._mode) for index in range(len(charts.CATALOG))
        ]

    def compose(self) -> ComposeResult:
        with Box(id="top"):
            with Box(id="left"):
                yield Panel("ranks", of_run(rank_rows))
                yield Panel("beside", self._log_rows)
            yield Panel("figures", of_run(figure_rows))
        with Box(id="charts"):
            yield from self.panels
        yield Panel("log", self._log_rows)

    def _log_rows(self, _: ScreenData, width: int, height: int) -> list[Row]:
        return newest_rows(self.console.book, width, height)

    def fit_panels(self) -> None:
        snapshot, (width, height) = self.snapshot, self.size
        state = snapshot.state if snapshot else None
        if snapshot is None or state is None or not self.size.area:
            return
        self._charts = charts.of_run(state, snapshot.recorded, self.choice)
        ranks = len(state.ranks) or len(state.gpus)
        now = ZOOMED if self.zoomed else shape(width, height, ranks, len(self._charts))
        if now != self._shape:
            self._shape = now
            self._apply(now)
        if self.selected is not None:
            drawn = len(self._charts) if self.zoomed else now.charts
            self.selected = min(self.selected, max(1, drawn) - 1)
        first = self.selected or 0 if self.zoomed else 0
        shown = self._charts[first : first + now.charts]
        for index, (panel, chart) in enumerate(zip(self.panels, shown, strict=False)):
            panel.chart, panel.span_s = chart, self.span_s
            panel.zoomed, panel.selected = self.zoomed, index == self.selected
        wanted = tuple(name for chart in shown for name in chart.series(self.zoomed))
        if self.console.feed.wanted != wanted:
            self.console.feed.wanted = wanted
            self.call_after_refresh(self.console.feed.nudge)

    def _apply(self, now: Shape) -> None:
        top, figures = self.query_one("#top"), self.query_one("#figures")
        top.display, top.styles.height = now.top > 0, now.top or 1
        figures.display = now.figures_width > 0
        figures.styles.width = now.figures_width or 1
        top.set_class(now.below > 0, "stacked")
        figures.styles.height = now.below or "1fr"
        grid = self.query_one("#charts")
        grid.display = now.charts > 0
        grid.styles.grid_size_columns = now.per_row or 1
        for index, panel in enumerate(self.panels):
            panel.display = index < now.charts
            is_last = index == now.charts - 1
            panel.styles.column_span = 1 + -now.charts % (now.per_row or 1) if is_last else 1
        for name, height in (("#log", now.log), ("#beside", now.beside)):
            log = self.query_one(name)
            log.display, log.styles.height = height > 0, height or 1

    def on_mount(self) -> None:
        self.set_timer(SETTINGS_S, self._load_choice)

    def _load_choice(self) -> None:
        from console import settings_file  # imported after the first picture

        run_in_background(self.console, "settings", settings_file.charts, self.choose)

    def save_choice(self, titles: Sequence[str]) -> None:
        """Shows the charts that the operator chose, and saves the choice in the settings file."""
        from console import settings_file

        self.choose(titles)
        run_in_background(self.console, "settings", lambda: settings_file.save_charts(titles),
               lambda path: self.console.say(f"charts saved in {path}"))  # fmt: skip

    def choose(self, titles: Sequence[str]) -> None:
        """Shows these charts in this order, or the default charts if `titles` is empty."""
        if tuple(titles) != tuple(self.choice):
            self.choice, self.selected = titles, None
            self.draw_again()

    def _change_span(self, by: int) -> None:
        spans = chartmath.SPANS_S
        index = spans.index(self.span_s or self.panels[0].window[1])
        if 0 <= index + by < len(spans):
            self.span_s = spans[index + by]
            self.draw_again()

    do_span_less, do_span_more = partialmethod(_change_span, -1), partialmethod(_change_span, 1)

    def _step(self, by: int) -> None:
        """Moves the crosshair of the zoomed chart; if no chart is zoomed, selects a chart."""
        if self.zoomed:
            self.panels[0].move_crosshair(by)
        elif self._shape is not None and self._shape.charts:
            count = self._shape.charts
            self.selected = 0 if self.selected is None else (self.selected + by) % count
            self.draw_again()

    do_left, do_right = partialmethod(_step, -1), partialmethod(_step, 1)

    def do_zoom(self) -> None:
        """Zooms the selected chart, or else the first chart; closes a zoomed chart."""
        if not self._charts:
            self.console.say("there is no chart yet", "error")
            return
        self.zoomed = not self.zoomed
        self.panels[0].at = None
        self.draw_again()

    def do_back(self) -> None:
        """Closes the zoomed chart; if no chart is zoomed, calls `do_back` of the app."""
        if self.zoomed:
            self.do_zoom()
        else:
            self.console.do_back()

    def do_charts(self) -> None:
        """Opens the list from which charts are chosen."""
        from console.tui.widgets.chooser import ChartList

        shown = self.choice or [chart.title for chart in self._charts]
        self.console.open_overlay(ChartList(shown, self.save_choice))
