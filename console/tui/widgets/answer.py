"""Shows the message of the last action or key for some seconds.

Without a message its height is zero.
"""

from __future__ import annotations

import time

from console.tui.rows import Row, labelled, safe, wrap
from console.tui.widgets.lines import Lines

KEEP_S = {"ok": 6.0, "error": 12.0, "wait": 20.0}
MOST_LINES = 3


def answer_rows(text: str, level: str, width: int) -> list[Row]:
    """Returns at most three lines; a sign at the start shows success or failure without colour."""
    sign, style = {"ok": ("✓", "ok"), "error": ("✗", "crit")}.get(level, ("…", "info"))
    lines = wrap(text, max(10, width - 3), MOST_LINES)
    return labelled((f"{sign} ", style), lines, style if level != "ok" else "")


class Answer(Lines):
    DEFAULT_CSS = "Answer { height: 0; background: ansi_default; }"

    def __init__(self) -> None:
        super().__init__(id="answer")
        self.text = ""
        self._until = 0.0

    def say(self, text: str, level: str) -> None:
        """Shows a text with its level: `ok`, `error`, or `wait` while there is no result."""
        self.text = text
        self._until = time.monotonic() + KEEP_S[level]
        self.shown = tuple(map(safe, answer_rows(text, level, self.screen.size.width)))
        self.styles.height = len(self.shown)
        self._strips.clear()
        self.refresh()

    def clear(self) -> None:
        self.text = ""
        self.styles.height = 0

    def tick(self) -> None:
        """Clears the message when its time has passed."""
        if self.text and time.monotonic() > self._until:
            self.clear()
