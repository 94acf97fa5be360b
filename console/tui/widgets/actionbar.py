"""The buttons of the most needed actions: by key, by Tab and Enter, by click, on every view."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widget import Widget

from console.tui.keys import BUTTONS
from console.tui.rows import cut
from console.tui.widgets.lines import Lines
from console.tui.widgets.overlay import FlatButton


class ActionButton(FlatButton):
    """A button that does what the key of the same id does."""

    def __init__(self, key_id: str, label: str):
        super().__init__(label, id=f"button-{key_id}")
        self.key_id = key_id


class ActionBar(Widget):
    """The row of buttons, and where the data come from."""

    DEFAULT_CSS = """
    ActionBar { layout: horizontal; height: 1; }
    ActionBar Lines { width: 1fr; }
    """

    def compose(self) -> ComposeResult:
        for key_id, label in BUTTONS:
            yield ActionButton(key_id, label)
        yield Lines(id="where")

    def say(self, text: str) -> None:
        """Shows a short text at the right end, its tail when it is long."""
        where = self.query_one("#where", Lines)
        room = where.size.width - 1
        if room < 8:
            return
        text = text if len(text) <= room else "…" + text[1 - room :]
        text = cut(text, room)
        where.show([((" " * (room - len(text)), ""), (text, "dim"))])
