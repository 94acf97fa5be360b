"""A field for one value; an error is shown while the operator types."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.widgets import Input

from console.tui.rows import rule, wrap
from console.tui.widgets.lines import Lines
from console.tui.widgets.overlay import Overlay
from trainers.contract.errors import UsageError


class Editor(Overlay):
    """A field; calls `then` with the text. `check` raises UsageError for an invalid text."""

    def __init__(
        self, title: str, value: str, hint: str, check: Callable[[str], object],
        then: Callable[[str], object],
    ):  # fmt: skip
        super().__init__(id="editor")
        self._title, self._value, self._hint = title, value, hint
        self._check, self._then = check, then

    def compose(self) -> ComposeResult:
        head = Lines(id="head")
        head.show([rule(f"── {self._title}", self.app.size.width, "enter saves, esc cancels")])
        yield head
        yield Lines(id="trouble")
        yield Input(self._value, compact=True, select_on_focus=False)

    def on_mount(self) -> None:
        self._say(self._hint, "dim")
        self.query_one(Input).focus()

    def _say(self, text: str, style: str) -> None:
        lines = wrap(text, self.app.size.width - 2, 1) or [""]
        self.query_one("#trouble", Lines).show([((lines[0], style),)])

    def _is_good(self, text: str, style: str) -> bool:
        try:
            self._check(text)
        except UsageError as error:
            self._say(str(error), style)
            return False
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._is_good(event.value, "warn"):
            self._say(self._hint, "dim")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._is_good(event.value, "crit"):
            self.close()
            self._then(event.value.strip())
