"""The last line of the screen: the keys of the present view.

The keys come from the table of keys.
"""

from __future__ import annotations

from functools import cache

from console.tui.keys import TABLE, VIEWS, for_view
from console.tui.rows import Part, Row, fit
from console.tui.widgets.lines import Lines

WIDTH, HEIGHT = 80, 24


@cache
def footer_row(view: str, width: int, small: bool = False) -> Row:
    """Returns the keys that fit, the views first; the least needed keys are left out first."""
    parts: list[Part] = [(10, [((f"too small, use {WIDTH}×{HEIGHT}", "warn"),)])] if small else []
    for key in for_view(view):
        style = "now" if key is TABLE[VIEWS.index(view)] else ""
        if key.label:
            parts.append((key.weight, [((key.shown, "key"), (f" {key.label}", style))]))
    return fit(parts, width, gap=2)


class Footer(Lines):
    view = "dashboard"

    def draw(self, view: str) -> None:
        self.view = view
        if self.size.width:
            width, height = self.screen.size
            self.show([footer_row(view, width, width < WIDTH or height < HEIGHT)])

    def redraw(self) -> None:
        self.draw(self.view)
