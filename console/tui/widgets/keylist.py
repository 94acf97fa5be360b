"""The lists of keys: the help of a view, and the palette, which finds a key by typed words."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from console.action_table import KEYS
from console.tui.keys import NAMES, Key, for_view
from console.tui.rows import Row, fill, labelled, wrap
from console.tui.widgets.picker import Reader

KEYS_WIDTH = 12
WORDS = (
    f"The keys {' '.join(KEYS)} are actions: they ask first, and No is the default. "
    "Leaving never stops a run, except that of a drill. Buttons: Tab, then Enter."
)


def help_rows(view: str, width: int) -> list[Row]:
    """Returns the keys of a view; the last row names the page that explains the words."""
    rows: list[Row] = [((line, "dim"),) for line in wrap(WORDS, width)]
    for key in for_view(view):
        names = " ".join(NAMES.get(name, name) for name in key.keys)
        lines = wrap(key.full_help, width - KEYS_WIDTH - 1)
        rows += labelled((f"{fill(names, KEYS_WIDTH)} ", "key"), lines)
    return [*rows, (("words: docs/words.md", "dim"),)]


def matches(view: str, typed: str) -> list[Key]:
    """Returns the keys of a view whose texts contain all typed words."""
    words = typed.lower().split()
    return [
        key for key in for_view(view)
        if all(word in f"{key.id} {key.label} {key.help}".lower() for word in words)
    ]  # fmt: skip


def command_rows(found: list[Key]) -> list[Row]:
    rows: list[Row] = [((fill(key.shown, 8), "key"), (" ", ""), (key.help, "")) for key in found]
    return rows or [(("nothing found", "dim"),)]


class Commands(Reader):
    """A text field and the list of matching keys; enter presses the selected key."""

    BINDINGS = [Binding("ctrl+n", "app.key('down')", show=False)]  # noqa: RUF012 - the framework's
    below = 8

    def __init__(self, view: str):
        self.view, self.found = view, matches(view, "")
        super().__init__("keys", lambda _: command_rows(self.found), note="", cursor=True)

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Input(placeholder="type words; ↑ ↓ choose a key, enter presses it", compact=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.found = matches(self.view, event.value)
        self.list.cursor = 0
        self.list.fill(command_rows(self.found))

    async def on_input_submitted(self) -> None:
        self.close()
        if self.found:
            await self.app.run_action(f"after('{self.found[self.list.cursor].id}')")

    do_open = on_input_submitted
    do_panel, do_panel_back = Reader.do_down, Reader.do_up
    do_palette = do_panel_back
