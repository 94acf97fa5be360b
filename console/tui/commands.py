"""Do anything by its name: the table of keys as a list that narrows while one types."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from console.tui.keys import KEYS, Key, for_view
from console.tui.rows import Row, fill
from console.tui.widgets.overlay import Overlay
from console.tui.widgets.picker import Picker

SKIPPED = frozenset(
    ("down", "up", "page_down", "page_up", "top", "bottom", "left", "right", "panel", "panel_back",
     "palette", "back", "open")
)  # fmt: skip


def matches(view: str, typed: str) -> list[Key]:
    """Returns the keys of a view whose words hold all that was typed, in the table's order."""
    words = typed.lower().split()
    found = []
    for key in for_view(view):
        text = f"{key.id} {key.label} {key.help}".lower()
        if key.id not in SKIPPED and all(word in text for word in words):
            found.append(key)
    return found


def command_row(key: Key) -> Row:
    return ((fill(key.shown, 8), "key"), (" ", ""), (key.help, ""))


class Commands(Overlay):
    """Types, chooses, does."""

    BINDINGS = [  # noqa: RUF012 - the framework's own type
        Binding("down,ctrl+n,tab", "move(1)", show=False),
        Binding("up,ctrl+p,shift+tab", "move(-1)", show=False),
    ]

    def __init__(self, view: str):
        super().__init__(id="commands")
        self.view = view
        self.found = matches(view, "")

    def compose(self) -> ComposeResult:
        picker = Picker("list", "do", cursor=True)
        picker.items = tuple(command_row(key) for key in self.found)
        picker.always = True
        size = self.app.size
        picker.prepare(size.width, min(len(self.found) + 1, max(4, size.height - 8)))
        yield picker
        yield Input(placeholder="what to do; ↑ ↓ enter, esc closes", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.found = matches(self.view, event.value)
        picker = self.query_one(Picker)
        picker.cursor = 0
        nothing: Row = (("nothing found", "dim"),)
        picker.fill([command_row(key) for key in self.found] or [nothing])

    def action_move(self, by: int) -> None:
        self.query_one(Picker).move(by)

    async def on_input_submitted(self) -> None:
        cursor = self.query_one(Picker).cursor
        self.close()
        if self.found:
            await self.app.run_action(f"after('{KEYS[self.found[cursor].id].id}')")
