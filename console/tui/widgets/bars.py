"""The last two lines of the screen: the buttons, and the keys of the view."""

from __future__ import annotations

from functools import cache

from textual.app import ComposeResult

from console.tui.confirmations import CannotAsk
from console.tui.feed import ScreenData
from console.tui.keys import BUTTONS, KEYS, TABLE, VIEWS, for_view
from console.tui.rows import Part, Row, fit
from console.tui.widgets.lines import Box, Wrapped
from console.tui.widgets.overlay import FlatButton

WIDTH, HEIGHT = 80, 24


@cache
def footer_row(view: str, width: int, small: bool = False) -> Row:
    """Returns the keys that fit; the lowest weights are left out. `small` puts a warning first."""
    parts: list[Part] = [(10, [((f"too small, use {WIDTH}×{HEIGHT}", "warn"),)])] if small else []
    for key in for_view(view):
        style = "now" if key is TABLE[VIEWS.index(view)] else ""
        if key.label:
            parts.append((key.weight, [((key.shown, "key"), (f" {key.label}", style))]))
    return fit(parts, width, gap=2)


class Footer(Wrapped):
    view = "dashboard"

    def __init__(self) -> None:
        super().__init__("footer", self._rows)

    def _rows(self, width: int) -> list[Row]:
        small = width < WIDTH or self.app.size.height < HEIGHT
        return [footer_row(self.view, width, small)]

    def draw(self, view: str) -> None:
        self.view = view
        self.fit()


class ActionBar(Box):
    """The buttons of the most used keys. Tab and Enter, a click, or the key presses a button."""

    DEFAULT_CSS = "ActionBar { layout: horizontal; height: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._buttons = {
            key_id: FlatButton(label, f"button-{key_id}", key_id) for key_id, label in BUTTONS
        }

    def compose(self) -> ComposeResult:
        yield from self._buttons.values()

    def take(self, snapshot: ScreenData) -> None:
        """Disables each button whose `question` raises CannotAsk; otherwise enables it."""
        for key_id, button in self._buttons.items():
            if question := KEYS[key_id].question:
                try:
                    question(snapshot.state)
                    button.disabled = False
                except CannotAsk:
                    button.disabled = True
