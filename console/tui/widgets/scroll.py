"""The keys that go through a list or a text, once for all that have them."""

from __future__ import annotations

from typing import Any

from console.tui.widgets.picker import Picker

END = 1 << 40
"""More rows than there can be."""


class Scrolls:
    """Gives a widget the keys of the table that scroll. As it is, they move its one `Picker`."""

    def scroll_by(self, by: int) -> None:
        """Moves by so many rows, as far as there are any."""
        self.picker.move(by)

    @property
    def page(self) -> int:
        """Rows that are seen at once."""
        return self.picker.room

    @property
    def picker(self) -> Picker:
        widget: Any = self
        return widget.query_one(Picker)

    def do_down(self) -> None:
        self.scroll_by(1)

    def do_up(self) -> None:
        self.scroll_by(-1)

    def do_page_down(self) -> None:
        self.scroll_by(self.page)

    def do_page_up(self) -> None:
        self.scroll_by(-self.page)

    def do_top(self) -> None:
        self.scroll_by(-END)

    def do_bottom(self) -> None:
        self.scroll_by(END)
