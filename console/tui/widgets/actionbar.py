"""The buttons of the most needed actions: by key, by Tab and Enter, by click, on every view."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widget import Widget

from console.tui.keys import BUTTONS
from console.tui.widgets.overlay import FlatButton


class ActionBar(Widget):
    """The row of buttons."""

    DEFAULT_CSS = "ActionBar { layout: horizontal; height: 1; }"

    def compose(self) -> ComposeResult:
        for key_id, label in BUTTONS:
            yield FlatButton(label, f"button-{key_id}", key_id)
