"""A list with a cursor, the keys that scroll it, and an overlay with a list.

Only the visible rows of a list are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

from textual import events
from textual.app import ComposeResult

from console.tui.rows import Row, fill, rule, safe, text_of
from console.tui.widgets.lines import Lines
from console.tui.widgets.overlay import Overlay

MARK = "› "
"""Marks the chosen row, even without colour or focus."""
GUTTER = len(MARK)
END = 1 << 40
"""A number that is larger than any number of rows."""


class Picker(Lines, can_focus=True):
    """A heading and the items that fit; `cursor` is the chosen index, -1 if none can be chosen."""

    def __init__(self, id: str, title: str = "", cursor: bool = True):
        super().__init__(id=id)
        self.heading, self.note = title, ""
        self.notes: Sequence[str] = ()
        """A note for each item, which is shown while the cursor is on the item."""
        self.items: tuple[Row, ...] = ()
        self.cursor = 0 if cursor else -1
        self.top = 0
        self.always = False
        """True if the chosen row is in reverse video even without the focus."""

    def fill(self, items: Sequence[Row], note: str = "", notes: Sequence[str] = ()) -> None:
        """Replaces the items; the cursor remains at its place if possible."""
        self.items, self.note, self.notes = tuple(items), note, notes
        self.move(0)

    @property
    def room(self) -> int:
        return max(1, self.size.height - bool(self.heading))

    def move(self, by: int) -> None:
        """Moves the cursor; a list without a cursor is scrolled."""
        last = max(0, len(self.items) - 1)
        if self.cursor >= 0:
            self.cursor = min(last, max(0, self.cursor + by))
            self.top = min(self.cursor, max(self.top, self.cursor - self.room + 1))
        else:
            self.top += by
        self.top = min(max(0, len(self.items) - self.room), max(0, self.top))
        self.redraw()

    def redraw(self) -> None:
        if self.size.area:
            self.show(self.drawn(self.size.width, self.size.height))

    def prepare(self, width: int, height: int) -> None:
        """Draws before the first layout, so that the first picture is complete."""
        self.styles.height = height
        self.shown = tuple(map(safe, self.drawn(width, height)))

    def drawn(self, width: int, height: int) -> list[Row]:
        """Returns the rows to draw for a size."""
        rows: list[Row] = []
        room = max(1, height - bool(self.heading))
        if self.heading:
            rows.append(rule(self.heading, width, self._note(room), focused=self.has_focus))
        for index, item in enumerate(self.items[self.top : self.top + room], self.top):
            if index == self.cursor and (self.has_focus or self.always):
                item = ((MARK + fill(text_of(item), width - GUTTER), "cursor"),)
            elif self.cursor >= 0:
                item = ((MARK if index == self.cursor else " " * GUTTER, ""), *item)
            rows.append(item)
        return rows

    def _note(self, room: int) -> str:
        hidden = len(self.items) - room
        more = f"{self.top + 1}–{min(len(self.items), self.top + room)} of {len(self.items)}"
        note = self.notes[self.cursor] if self.notes else self.note
        return "  ".join(part for part in (more if hidden > 0 else "", note) if part)

    def on_resize(self) -> None:
        super().on_resize()
        self.move(0)

    def on_click(self, event: events.Click) -> None:
        index = self.top + event.y - bool(self.heading)
        if self.cursor >= 0 and 0 <= index < len(self.items):
            self.move(index - self.cursor)


class Scrolls:
    """Adds the scrolling keys and the mouse wheel; by default they move the `Picker` inside."""

    def scroll_by(self, by: int) -> None:
        """Scrolls by rows, as far as possible; before the widget is mounted, does nothing."""
        widget: Any = self
        for picker in widget.query(Picker):
            picker.move(by)

    @property
    def page(self) -> int:
        """The number of rows of the list on the screen, 1 before the widget is mounted."""
        widget: Any = self
        return next((picker.room for picker in widget.query(Picker)), 1)

    @property
    def picker(self) -> Picker:
        widget: Any = self
        return widget.query_one(Picker)

    def on_mouse_scroll_down(self) -> None:
        self.scroll_by(3)

    def on_mouse_scroll_up(self) -> None:
        self.scroll_by(-3)

    def _scroll(self, by: int) -> None:
        self.scroll_by(by)

    def _scroll_pages(self, by: int) -> None:
        self.scroll_by(by * self.page)

    do_down, do_up = partialmethod(_scroll, 1), partialmethod(_scroll, -1)
    do_top, do_bottom = partialmethod(_scroll, -END), partialmethod(_scroll, END)
    do_page_down, do_page_up = partialmethod(_scroll_pages, 1), partialmethod(_scroll_pages, -1)


class Reader(Scrolls, Overlay):
    """An overlay with a list; if `cursor` is set, a row of the list can be chosen.

    `draw` returns the rows of the list for a width.
    """

    gives_way = True
    least, below = 0, 5
    """The least height of the list, and the rows of the screen that the list leaves free."""

    def __init__(
        self, title: str, draw: Callable[[int], Sequence[Row]], note: str = "esc closes",
        cursor: bool = False,
    ):  # fmt: skip
        super().__init__(id="reader")
        self.draw = draw
        self.list = Picker("reading", title, cursor)
        self.list.note, self.list.always = note, cursor

    def compose(self) -> ComposeResult:
        self.fit()
        yield self.list

    def fit(self) -> None:
        """Makes the rows again, for the present size of the screen."""
        width, height = self.app.size
        self.list.items = tuple(self.draw(width))
        wanted = max(self.least, len(self.list.items) + 1)
        self.list.prepare(width, min(wanted, max(4, height - self.below)))

    def on_mount(self) -> None:
        self.children[-1].focus()

    do_open = do_zoom = do_help = Overlay.close
    do_toggle = Scrolls.do_page_down
