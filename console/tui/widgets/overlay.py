"""A drawer over the bottom of the view, for a message and one overlay; it is repainted alone."""

from __future__ import annotations

import time
from typing import Any

from textual.content import Content
from textual.widgets import Button

from console.tui.rows import Row, labelled, wrap
from console.tui.widgets.lines import Box, Plain, Wrapped

KEEP_S = {"ok": 6.0, "error": 12.0, "wait": 20.0}
MOST_LINES = 3
MOST_SHARE = 90
"""Largest height of the drawer, in percent of the screen."""


class Drawer(Box):
    """Contains the message and the open overlay.

    The drawer is always mounted, because mounting a widget in the screen repaints everything.
    """

    DEFAULT_CSS = f"""
    Drawer {{
        layer: over; dock: bottom; width: 100%; height: auto; max-height: {MOST_SHARE}%;
        margin: 0 0 2 0; layout: vertical; background: ansi_default;
    }}
    """


def answer_rows(text: str, level: str, width: int) -> list[Row]:
    """Returns at most three lines; a sign at the start shows success or failure without colour."""
    sign, style = {"ok": ("✓", "ok"), "error": ("✗", "crit")}.get(level, ("…", "info"))
    lines = wrap(text, max(10, width - 3), MOST_LINES)
    return labelled((f"{sign} ", style), lines, style if level != "ok" else "")


class Answer(Wrapped):
    """The message of the last action or key for some seconds; its height is 0 without a message."""

    DEFAULT_CSS = "Answer { height: 0; background: ansi_default; }"

    def __init__(self) -> None:
        super().__init__("answer", lambda width: answer_rows(self.text, self._level, width))
        self.text = self._level = ""
        self._until = 0.0

    def say(self, text: str, level: str) -> None:
        """Shows a text with its level: `ok`, `error`, or `wait` if something must end first."""
        self.text, self._level = text, level
        self._until = time.monotonic() + KEEP_S[level] + len(text) / 20  # time to read
        self.fit()

    def clear(self) -> None:
        self.text = ""
        self.fit()

    def clear_error(self) -> None:
        """Clears an error message, because it is about the former view."""
        if self._level == "error":
            self.clear()

    def tick(self) -> None:
        """Clears the message when its time has passed."""
        if self.text and time.monotonic() > self._until:
            self.clear()


class Overlay(Box):
    """A widget that receives the keys while it is open; at most one is open."""

    DEFAULT_CSS = """
    Overlay { width: 100%; height: auto; layout: vertical; background: ansi_default; }
    Overlay > .buttons { layout: horizontal; height: 1; }
    Overlay Input { height: 1; border: none; padding: 0; background: ansi_default; }
    """

    gives_way = False
    """True if a key without a use in this overlay closes the overlay, and then works in the view.

    While a text field has the focus, such a key does not close the overlay.
    """

    def close(self) -> None:
        """Hides the overlay at once; the app removes it later."""
        self.display = False
        app: Any = self.app
        app.call_later(app.remove_overlay, self)

    do_back = do_leave = close
    """While an overlay is open, only ctrl+c leaves the console."""

    def do_redraw(self) -> None:
        self.screen.refresh()

    def do_right(self) -> None:
        self.screen.focus_next(f"#{self.id} *")

    def do_left(self) -> None:
        self.screen.focus_previous(f"#{self.id} *")

    do_panel, do_panel_back = do_right, do_left


class FlatButton(Plain, Button, can_focus=True):
    """A button of one line in the terminal's own colours, without animation.

    `means` is what the button selects: the id of a key, a choice, or None for No.
    """

    DEFAULT_CSS = """
    FlatButton, FlatButton:ansi.-style-default.-textual-compact {
        width: auto; min-width: 0; height: 1; padding: 0; margin: 0; border: none;
        text-style: none; color: ansi_cyan; background: ansi_default;
        &:focus { text-style: bold reverse; background: ansi_default; border: none; }
        &:hover { text-style: underline; background: ansi_default; border: none; }
        &.-active { text-style: reverse; background: ansi_default; border: none; }
        &:disabled {
            text-style: dim; color: ansi_default; text-opacity: 1;
            border: none !important; background: ansi_default !important;
        }
    }
    """

    def __init__(self, label: str, id: str, means: Any = None):
        super().__init__(Content(f"[ {label} ]"), id=id, compact=True)
        self.means = means
        self.active_effect_duration = 0
