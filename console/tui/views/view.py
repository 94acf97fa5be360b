"""The base class of the views, and the Textual screen that contains them."""

from __future__ import annotations

from textual.geometry import Size
from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget

from console.tui.feed import ScreenData
from console.tui.operator import Console
from console.tui.rows import text_of
from console.tui.widgets.lines import Box, Lines, Panel, Wrapped
from console.tui.widgets.picker import Reader


class Main(Screen[None], inherit_bindings=False):
    """The only Textual screen. A change of focus does not repaint the whole screen."""

    BLANK = True
    focused = Reactive[Widget | None](None, repaint=False)

    def on_resize(self) -> None:
        """Makes the rows of each `Wrapped` and `Reader` again, before the layout.

        Also draws the whole screen again. If the size is unchanged, the event means that the screen
        continues after a stop, or in another window, which does not have the picture.
        """
        for each in (*self.query(Wrapped), *self.query(Reader)):
            each.fit()
        self.refresh()


class Body(Box):
    """Contains the views, so that a change of view does not repaint the whole screen."""

    DEFAULT_CSS = "Body { height: 1fr; width: 1fr; }"


class View(Box):
    """One of the four views between the alert line and the action bar.

    The method `do_<id>` executes the key `<id>`. `action_key` of the app says when a key calls it.
    """

    DEFAULT_CSS = "View { height: 1fr; width: 1fr; }"
    snapshot: ScreenData | None = None
    _fitted: Size | None = None

    def __init__(self, console: Console, id: str):
        super().__init__(id=id)
        self.console = console

    def take(self, snapshot: ScreenData) -> None:
        """Passes a snapshot to the panels."""
        self.snapshot, self._fitted = snapshot, self.size
        self.fit_panels()
        for panel in self.walk_children(Panel):
            panel.take(snapshot)

    def fit_panels(self) -> None:
        """Sets the sizes of the panels for the snapshot; by default does nothing."""

    def on_resize(self) -> None:
        """Draws the view again if its size differs from the size of the last drawing."""
        if self.size != self._fitted:
            self.draw_again()

    def draw_again(self) -> None:
        """Draws the last shown snapshot again."""
        if self.snapshot is not None:
            self.take(self.snapshot)

    def focus_default(self) -> None:
        """Sets the focus, for example when the view is shown; by default does nothing."""

    def copied(self) -> str:
        """Returns the text that the key `y` copies."""
        shown = [panel for panel in self.query(Lines) if panel.is_on_screen]
        return "\n".join(text_of(row).rstrip() for panel in shown for row in panel.shown)
