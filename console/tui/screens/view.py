"""The base of all views, which show snapshots and handle keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget

from console.tui import background
from console.tui.draft import Draft
from console.tui.feed import ScreenData
from console.tui.operator import Operator
from console.tui.rows import text_of
from console.tui.terminal import Terminal
from console.tui.widgets.lines import Lines, Panel
from console.tui.widgets.logtail import LogBook
from console.tui.widgets.overlay import Overlay


def shown_text(panels: Iterable[Lines]) -> str:
    """Returns the text that these panels show."""
    return "\n".join(text_of(row).rstrip() for panel in panels for row in panel.shown)


class Main(Screen[None], inherit_bindings=False):
    """The only screen. A change of focus repaints two widgets, not the whole screen.

    The screen has only the keys of the table of keys; tab stays within an overlay.
    """

    focused = Reactive[Widget | None](None, repaint=False)


class Body(Widget):
    """Contains the views, so that a change of view repaints nothing outside this widget."""

    DEFAULT_CSS = "Body { height: 1fr; width: 1fr; }"


class Console(background.Screen, Protocol):
    """The part of the app that a view may use."""

    snapshot: ScreenData | None
    book: LogBook
    draft: Draft
    terminal: Terminal
    operator: Operator

    def open_overlay(self, overlay: Overlay) -> None: ...


class View(Widget):
    """One of the four views between the alert line and the action bar.

    The method `do_<id>` executes the key `<id>`; the app looks for the method here first.
    """

    DEFAULT_CSS = "View { height: 1fr; width: 1fr; }"
    snapshot: ScreenData | None = None

    def __init__(self, console: Console, id: str):
        super().__init__(id=id)
        self.console = console

    def take(self, snapshot: ScreenData) -> None:
        """Shows a snapshot in all panels."""
        self.snapshot = snapshot
        self.fit_panels()
        for panel in self.query(Panel):
            panel.take(snapshot)

    def fit_panels(self) -> None:
        """Sets the sizes of the panels for the snapshot."""

    def on_resize(self) -> None:
        if self.snapshot is not None:
            self.take(self.snapshot)

    def focus_default(self) -> None:
        """Sets the focus when the view is opened."""

    def copied(self) -> str:
        """Returns the text that the key `y` copies."""
        return shown_text(self.query(Lines))
