"""The base widget: it shows rows of text, and repaints only rows that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Self

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

from console.model import RunState
from console.tui.feed import ScreenData
from console.tui.rows import BLANK, Row, changed, clip, safe
from console.tui.styles import STYLES, drawn

PLAIN = Style.null()
"""The style of unstyled text. Without it, Textual's filter for NO_COLOR fails."""


class Plain(Widget):
    """A widget without scrolling, border or padding; a hidden widget keeps its last size."""

    virtual_size = Reactive(Size(0, 0), repaint=False)

    @property
    def size(self) -> Size:
        return self.outer_size if self.is_attached else Size(0, 0)

    def refresh(self, *regions: Region, repaint: bool = True, **named: bool) -> Self:
        """Requests a new picture; a hidden widget is painted when it is shown."""
        return super().refresh(*regions, repaint=repaint and self.is_on_screen, **named)


class Box(Plain):
    """A container whose own area is blank."""

    BLANK = True


class Lines(Plain):
    """A widget that shows rows of plain data, never markup."""

    DEFAULT_CSS = "Lines { height: 1; }"
    ALLOW_SELECT = False

    def __init__(self, id: str | None = None):
        super().__init__(id=id)
        self.shown: tuple[Row, ...] = ()
        """The rows, which may be wider than the widget; only their drawing is clipped."""
        self._strips: dict[int, Strip] = {}
        self._drawn_size: Size | None = None
        self.repaints = 0
        """Number of regions that `show` repainted."""

    def show(self, rows: Sequence[Row]) -> None:
        """Replaces the rows and repaints each row from its first to its last difference."""
        width, height = self.size
        old = self.shown
        self.shown = new = tuple(
            row if row == before else safe(row)
            for row, before in zip_longest(rows, old[: len(rows)], fillvalue=BLANK)
        )
        if old == new:
            return
        regions: list[Region] = []
        for y, (before, after) in enumerate(zip_longest(old, new, fillvalue=BLANK)):
            if before == after or y >= height:
                continue
            if span := changed(clip(before, width), clip(after, width), width):
                self._strips.pop(y, None)
                regions.append(Region(span[0], y, span[1] - span[0], 1))
        if regions:
            self.repaints += len(regions)
            self.refresh(*regions)

    def on_resize(self) -> None:
        """Draws the content again if the size differs from the size of the last drawing."""
        if self.size == self._drawn_size:
            return
        self._drawn_size = self.size
        self._strips.clear()
        self.redraw()

    def redraw(self) -> None:
        """Draws the rows again for the current size; by default does nothing."""

    def watch_has_focus(self, _has_focus: bool) -> None:
        """Draws the rows again; no style of CSS depends on the focus."""
        self.redraw()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Returns the strips of a region; colours, borders and padding of CSS do not apply."""
        width = self.size.width
        strips = [self._strip(y, width) for y in crop.line_range]
        for each in self.app.get_line_filters():
            strips = [strip.apply_filter(each, self.background_colors[1]) for strip in strips]
        return (
            strips if crop.width == width else [strip.crop(*crop.column_span) for strip in strips]
        )

    def _strip(self, y: int, width: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            row = self.shown[y] if y < len(self.shown) else BLANK
            spans = clip(row, width)
            segments = [Segment(drawn(text), STYLES[style] or PLAIN) for text, style in spans]
            strip = self._strips[y] = Strip(segments).adjust_cell_length(width, PLAIN)
        return strip


class Wrapped(Lines):
    """Lines with as many rows as `draw` returns for the width of the screen."""

    def __init__(self, id: str, draw: Callable[[int], Sequence[Row]]):
        super().__init__(id=id)
        self._draw = draw

    def fit(self) -> None:
        """Makes the rows again, for the present width of the screen."""
        self.shown = tuple(map(safe, self._draw(self.app.size.width)))
        self.styles.height = len(self.shown)
        self._strips.clear()
        self.refresh()

    on_mount = fit


WHOLE = 200
"""The height in rows with which panels are asked for their whole text."""
Draw = Callable[[ScreenData, int, int], Sequence[Row]]
"""Returns the rows for a snapshot, a width and a height."""


def of_run(draw: Callable[[RunState, int, int, float], Sequence[Row]]) -> Draw:
    """Returns a `Draw` that calls `draw` with run, width, height and time; [] without a run."""
    return lambda data, width, height: (
        draw(data.state, width, height, data.now) if data.state else []
    )


class Panel(Lines):
    """Lines that are made from a snapshot of the feed, for the present size."""

    snapshot: ScreenData | None = None

    def __init__(self, id: str, draw: Draw | None = None):
        super().__init__(id=id)
        self._draw = draw

    def rows(self, snapshot: ScreenData, width: int, height: int) -> Sequence[Row]:
        """Returns the panel's rows for a snapshot; by default, the rows that `draw` returns."""
        assert self._draw is not None
        return self._draw(snapshot, width, height)

    def take(self, snapshot: ScreenData) -> None:
        """Shows a snapshot; a panel that is hidden or has no size yet only stores the snapshot."""
        self.snapshot = snapshot
        if self.display:
            self.redraw()

    def redraw(self) -> None:
        if self.snapshot is not None and self.size.area:
            self.show(self.rows(self.snapshot, *self.size))
