"""The list in which an operator chooses the displayed charts and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult

from console.tui.charts import CATALOG
from console.tui.rows import Row, columns
from console.tui.widgets.overlay import Overlay
from console.tui.widgets.picker import Picker, Scrolls

HINT = "space shows or hides, enter saves (none: default charts), esc cancels"


class ChartList(Scrolls, Overlay):
    """A list of charts; calls `then` with the chosen titles in order, () for the defaults."""

    def __init__(self, shown: Sequence[str], then: Callable[[Sequence[str]], object]):
        super().__init__(id="chartlist")
        self._shown, self._then = list(shown), then
        self._list = Picker("charts", "charts")
        self._list.always = True

    def compose(self) -> ComposeResult:
        self._list.items, self._list.note = self._rows(), HINT
        self._list.prepare(self.app.size.width, len(CATALOG) + 1)
        yield self._list

    def on_mount(self) -> None:
        self._list.focus()

    def _rows(self) -> tuple[Row, ...]:
        places = {title: str(place) for place, title in enumerate(self._shown, 1)}
        return tuple(
            columns([(places.get(chart.title, "–"), -2, "strong"), (chart.title, 14, ""),
                     (chart.unit_word, 12, "dim")])
            for chart in CATALOG
        )  # fmt: skip

    def do_toggle(self) -> None:
        """Shows the chart under the cursor after the other charts, or hides it."""
        title = CATALOG[self._list.cursor].title
        if title in self._shown:
            self._shown.remove(title)
        else:
            self._shown.append(title)
        self._list.fill(self._rows(), HINT)

    def do_open(self) -> None:
        self.close()
        self._then(tuple(self._shown))
