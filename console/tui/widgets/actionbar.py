"""The buttons of the most used actions, on every view. A key, Tab and Enter, or a click works."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widget import Widget

from console.tui.confirmations import CannotAsk
from console.tui.feed import ScreenData
from console.tui.keys import BUTTONS, KEYS
from console.tui.widgets.overlay import FlatButton


class ActionBar(Widget):
    """The row of buttons of the most used actions."""

    DEFAULT_CSS = "ActionBar { layout: horizontal; height: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._buttons = {
            key_id: FlatButton(label, f"button-{key_id}", key_id) for key_id, label in BUTTONS
        }

    def compose(self) -> ComposeResult:
        yield from self._buttons.values()

    def take(self, snapshot: ScreenData) -> None:
        """Disables the buttons whose actions have no target."""
        for key_id, button in self._buttons.items():
            if question := KEYS[key_id].question:
                try:
                    question(snapshot.state)
                    button.disabled = False
                except CannotAsk:
                    button.disabled = True
