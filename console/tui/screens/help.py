"""The help of a view, and `Reader`, an overlay in which rows can be scrolled."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.keys import NAMES, for_view
from console.tui.rows import Row, fill, labelled, wrap
from console.tui.widgets.overlay import Overlay
from console.tui.widgets.picker import Picker, Scrolls

KEYS_WIDTH = 12
WORDS = (
    "The keys D H C K R L A are actions: they ask first, and No is the default. "
    "Leaving never stops a run. Buttons: Tab, then Enter."
)


def help_rows(view: str, width: int) -> list[Row]:
    """Returns the keys of a view, and the name of the document that explains the words."""
    rows: list[Row] = [((line, "dim"),) for line in wrap(WORDS, width)]
    for key in for_view(view):
        names = " ".join(NAMES.get(name, name) for name in key.keys)
        text = f"{key.help} (asks; {key.asks})" if key.asks else key.help
        rows += labelled((f"{fill(names, KEYS_WIDTH)} ", "key"), wrap(text, width - KEYS_WIDTH - 1))
    return [*rows, (("words: docs/words.md", "dim"),)]


class Reader(Scrolls, Overlay):
    """An overlay with a text to scroll through: the help, or the whole stack of a rank."""

    below = 5
    """Rows of the screen below it."""

    def __init__(
        self, title: str, rows: list[Row], note: str = "esc closes", cursor: bool = False
    ):  # fmt: skip
        super().__init__(id="reader")
        self._list = Picker("reading", title, cursor)
        self._list.items, self._list.note, self._list.always = tuple(rows), note, cursor

    def compose(self) -> ComposeResult:
        size = self.app.size
        height = min(len(self._list.items) + 1, max(4, size.height - self.below))
        self._list.prepare(size.width, height)
        yield self._list

    def on_mount(self) -> None:
        self.children[-1].focus()

    do_open = do_zoom = do_help = Overlay.close
