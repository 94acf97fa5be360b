"""The help: the table of keys, for the view from which it was opened."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.keys import NAMES, for_view
from console.tui.rows import Row, fill, wrap
from console.tui.widgets.overlay import Overlay
from console.tui.widgets.picker import Picker, Scrolls

KEYS_WIDTH = 12
WORDS = (
    "Lower case looks, upper case acts; what acts asks first, and No is the default. "
    "Leaving never stops a run. Buttons: Tab, then Enter."
)


def help_rows(view: str, width: int) -> list[Row]:
    """Returns what every key of a view does."""
    rows: list[Row] = [((line, "dim"),) for line in wrap(WORDS, width)]
    for key in for_view(view):
        names = " ".join(NAMES.get(name, name) for name in key.keys)
        text = f"{key.help} (asks; {key.asks})" if key.asks else key.help
        for index, line in enumerate(wrap(text, width - KEYS_WIDTH - 1)):
            shown = fill(names if index == 0 else "", KEYS_WIDTH)
            rows.append(((shown, "key"), (" ", ""), (line, "")))
    return rows


class Reader(Scrolls, Overlay):
    """A text to scroll through: the help, or the whole stack of a rank."""

    def __init__(self, title: str, rows: list[Row], note: str = "esc closes"):
        super().__init__(id="reader")
        self._title, self._rows, self._note = title, rows, note

    def compose(self) -> ComposeResult:
        picker = Picker("reading", self._title, cursor=False)
        picker.items, picker.note = tuple(self._rows), self._note
        size = self.app.size
        picker.prepare(size.width, min(len(self._rows) + 1, max(4, size.height - 5)))
        yield picker

    def on_mount(self) -> None:
        self.picker.focus()

    def do_help(self) -> None:
        self.close()

    do_open = do_zoom = do_help
