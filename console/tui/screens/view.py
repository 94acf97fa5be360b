"""What all views share: they take snapshots and do the keys that the table gives them."""

from __future__ import annotations

from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget

from console.tui.feed import Snapshot
from console.tui.widgets.lines import Panel


class Main(Screen[None]):
    """The one screen. A change of focus repaints who has it and who had it, not all of it."""

    focused = Reactive[Widget | None](None, repaint=False)


class Body(Widget):
    """Holds the views: when they change, nothing outside is painted again."""

    DEFAULT_CSS = "Body { height: 1fr; width: 1fr; }"


class View(Widget):
    """One of the four pictures between the alert line and the action bar.

    A key's work is a method `do_<id>`; the app looks here first.
    """

    DEFAULT_CSS = "View { height: 1fr; width: 1fr; }"
    snapshot: Snapshot | None = None

    def take(self, snapshot: Snapshot) -> None:
        """Shows a snapshot in all panels."""
        self.snapshot = snapshot
        self.fit_panels()
        for panel in self.query(Panel):
            panel.take(snapshot)

    def fit_panels(self) -> None:
        """Gives the panels the sizes that the snapshot asks for."""

    def on_resize(self) -> None:
        if self.snapshot is not None:
            self.take(self.snapshot)

    def arrive(self) -> None:
        """Called when the view is shown: puts the focus where the keys are used."""

    def copied(self) -> str:
        """Returns what `y` copies."""
        return ""

    def set_height(self, widget: Widget, height: int) -> None:
        """Sets a height only when it differs: a layout costs a repaint."""
        if widget.styles.height is None or widget.styles.height.value != height:
            widget.styles.height = height
