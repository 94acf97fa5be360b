"""`Reader`, the overlay with a list: a text to scroll through, or a list to choose a row from."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.rows import Row
from console.tui.widgets.overlay import Overlay
from console.tui.widgets.picker import Picker, Scrolls


class Reader(Scrolls, Overlay):
    """An overlay with a list; if `cursor` is set, a row of the list can be chosen."""

    gives_way = True
    least, below = 0, 5
    """The least height of the list, and the rows of the screen below the overlay."""

    def __init__(
        self, title: str, rows: list[Row], note: str = "esc closes", cursor: bool = False
    ):  # fmt: skip
        super().__init__(id="reader")
        self.list = Picker("reading", title, cursor)
        self.list.items, self.list.note, self.list.always = tuple(rows), note, cursor

    def compose(self) -> ComposeResult:
        size = self.app.size
        wanted = max(self.least, len(self.list.items) + 1)
        self.list.prepare(size.width, min(wanted, max(4, size.height - self.below)))
        yield self.list

    def on_mount(self) -> None:
        self.children[-1].focus()

    do_open = do_zoom = do_help = Overlay.close
    do_toggle = Scrolls.do_page_down
