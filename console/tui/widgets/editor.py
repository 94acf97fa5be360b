"""A field for one value; what is wrong with it is said while it can still be changed."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.widgets import Input

from console.tui.rows import rule, wrap
from console.tui.widgets.lines import Lines
from console.tui.widgets.overlay import Overlay


class Editor(Overlay):
    """Calls `then` with the text; `check` returns what is wrong with it, "" for nothing."""

    def __init__(
        self, title: str, value: str, hint: str, check: Callable[[str], str],
        then: Callable[[str], object],
    ):  # fmt: skip
        super().__init__(id="editor")
        self._title, self._value, self._hint = title, value, hint
        self._check, self._then = check, then

    def compose(self) -> ComposeResult:
        head = Lines(id="head")
        head.show([rule(f"── {self._title}", self.app.size.width, "enter takes it, esc leaves it")])
        yield head
        yield Lines(id="trouble")
        yield Input(self._value, compact=True, select_on_focus=False)

    def on_mount(self) -> None:
        self._say(self._hint, "dim")
        self.query_one(Input).focus()

    def _say(self, text: str, style: str) -> None:
        lines = wrap(text, self.app.size.width - 2, 1) or [""]
        self.query_one("#trouble", Lines).show([((lines[0], style),)])

    def on_input_changed(self, event: Input.Changed) -> None:
        trouble = self._check(event.value)
        self._say(trouble or self._hint, "warn" if trouble else "dim")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        trouble = self._check(event.value)
        if trouble:
            self._say(trouble, "crit")
            return
        self.close()
        self._then(event.value.strip())
