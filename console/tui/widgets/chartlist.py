"""The list in which an operator chooses the displayed charts and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from console.tui.charts import CATALOG
from console.tui.rows import Row, columns
from console.tui.widgets.reader import Reader

HINT = "space shows or hides, enter saves (none: default charts), esc cancels"


class ChartList(Reader):
    """A list of charts; calls `then` with the chosen titles in order; () means the defaults."""

    def __init__(self, shown: Sequence[str], then: Callable[[Sequence[str]], object]):
        self._shown, self._then = list(shown), then
        super().__init__("charts", self._rows(), HINT, cursor=True)

    def _rows(self) -> list[Row]:
        places = {title: str(place) for place, title in enumerate(self._shown, 1)}
        return [
            columns([(places.get(chart.title, "–"), -2, "strong"), (chart.title, 14, ""),
                     (chart.unit_word, 12, "dim")])
            for chart in CATALOG
        ]  # fmt: skip

    def do_toggle(self) -> None:
        """Shows the chart under the cursor after the other charts, or hides it."""
        title = CATALOG[self.list.cursor].title
        if title in self._shown:
            self._shown.remove(title)
        else:
            self._shown.append(title)
        self.list.fill(self._rows(), HINT)

    def do_open(self) -> None:
        self.close()
        self._then(tuple(self._shown))
