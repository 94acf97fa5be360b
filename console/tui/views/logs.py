"""The Logs view: all logs merged or one log, with a search; the view can follow new lines."""

from __future__ import annotations

from bisect import bisect_left
from functools import partialmethod

from textual.app import ComposeResult

from console.model import ALL_SOURCES, LogLine
from console.tui.feed import ScreenData
from console.tui.operator import Console
from console.tui.rows import Row, cell_len, rule
from console.tui.views.view import View
from console.tui.widgets.lines import Panel
from console.tui.widgets.loglines import log_rows
from console.tui.widgets.picker import Scrolls


def highlighted(row: Row, needle: str) -> Row:
    """Returns a row with `needle` highlighted in the last span."""
    if not needle:
        return row
    *head, (text, style) = row
    low, want = text.lower(), needle.lower()
    spans: list[tuple[str, str]] = []
    start = 0
    while (at := low.find(want, start)) >= 0 and len(low) == len(text):
        spans += [(text[start:at], style), (text[at : at + len(want)], "found")]
        start = at + len(want)
    return (*head, *((t, s) for t, s in [*spans, (text[start:], style)] if t))


class LogPane(Panel, can_focus=True):
    DEFAULT_CSS = "LogPane { height: 1fr; }"


class LogView(Scrolls, View):
    """The view of log lines. `bottom` is the number of the line below the last displayed line.

    `bottom` is None while the view follows the log. `at` is the number of the found line, or None.
    Lines are numbered by arrival, so the displayed part stays in place when new lines come.
    """

    DEFAULT_CSS = "LogView { layout: vertical; }"

    def __init__(self, console: Console, id: str):
        super().__init__(console, id)
        self.book, self.pane = console.book, LogPane("pane", self._rows)
        self.source = ALL_SOURCES
        self.needle = ""
        self.bottom: int | None = None
        self.at: int | None = None
        self.seen = 1
        self._sources = [ALL_SOURCES]
        self._lines: list[tuple[int, LogLine]] = []
        self._seen: tuple[int, int, str] = (0, 0, "")

    def compose(self) -> ComposeResult:
        yield self.pane

    def focus_default(self) -> None:
        self.pane.focus()

    @property
    def page(self) -> int:
        return max(1, self.seen - 1)

    def _index(self, number: int | None) -> int:
        """Returns the index of the first line with at least this number; None means the end."""
        if number is None:
            return len(self._lines)
        return bisect_left(self._lines, number, key=lambda entry: entry[0])

    @property
    def end(self) -> int:
        """The number of lines above the view's lower edge; if possible, enough to fill the view."""
        return max(self._end_of_page(0), self._index(self.bottom))

    def _end_of_page(self, start: int, share: int = 1) -> int:
        """Returns the index after the last line that fits into the view if line `start` is first.

        The lines fill about the view's height divided by `share`.
        """
        width, height = self.pane.size.width, max(1, self.pane.size.height - 1)
        end, filled = start, 0
        while end < len(self._lines) and filled * share < height:
            filled += len(log_rows(self._lines[end][1], width, height))
            if filled > height:
                break
            end += 1
        return end

    def scroll_to_line(self, end: int) -> None:
        """Shows the lines before index `end`; at the end of the log, the view follows again."""
        end = max(self._end_of_page(0), end)
        self.bottom = None if end >= len(self._lines) else self._lines[end][0]
        self.pane.redraw()

    def _refresh_lines(self) -> None:
        """Selects the lines of the source again if the lines or the source have changed."""
        seen = (self.book.epoch, self.book.total, self.source)
        if seen == self._seen:
            return
        if self.book.epoch != self._seen[0]:
            self.bottom = self.at = None
        self._seen = seen
        held = self.book.lines
        self._sources = list(dict.fromkeys((ALL_SOURCES, *(line.source for _, line in held))))
        every = self.source == ALL_SOURCES
        self._lines = [entry for entry in held if every or entry[1].source == self.source]

    def _rows(self, snapshot: ScreenData, width: int, height: int) -> list[Row]:
        self._refresh_lines()
        end = self.end
        start, body = self._body(end, width, height - 1)
        self.seen = max(1, end - start)
        names = "  ".join(f"[{n}]" if n == self.source else n for n in self._sources)
        place = f"{start + 1}–{end} of {len(self._lines)}  G: to the end"
        note = "following new lines" if self.bottom is None else place
        note = f"find {self.needle!r}  {note}" if self.needle else note
        attempt = snapshot.state.attempt if snapshot.state else 1
        title = f"log of attempt {attempt}" if attempt > 1 else "log"
        if cell_len(f"{title}  {names} ─ {note}") > width:
            names = f"[{self.source}] of {len(self._sources) - 1} logs"
        head = rule(f"{title}  {names}", width, note, focused=self.pane.has_focus)
        return [head, *(body or [(("no log lines yet", "dim"),)])]

    def _body(self, end: int, width: int, height: int) -> tuple[int, list[Row]]:
        """Returns two values: the index of the first displayed line, and the rows before `end`."""
        body: list[Row] = []
        start = end
        while start > 0 and len(body) < height:
            start -= 1
            rows = log_rows(self._lines[start][1], width, height)  # the first row stays in view
            if self.needle:
                rows = [highlighted(row, self.needle) for row in rows]
                if self._lines[start][0] == self.at:
                    rows[0] = ((rows[0][0][0], "cursor"), *rows[0][1:])  # reverse video
            body[:0] = rows
        return start, body[max(0, len(body) - height) :]

    def scroll_by(self, by: int) -> None:
        self.scroll_to_line(self.end + by)

    def do_page_down(self) -> None:
        """Shows the lines from the last displayed line on."""
        self.scroll_to_line(max(self.end + 1, self._end_of_page(max(0, self.end - 1))))

    def _choose(self, by: int) -> None:
        names = self._sources
        index = names.index(self.source) if self.source in names else 0
        self.source = names[(index + by) % len(names)]
        self.bottom = self.at = None
        self.console.answer.clear_error()
        self.pane.redraw()

    do_right, do_left = partialmethod(_choose, 1), partialmethod(_choose, -1)

    def do_find(self) -> None:
        from console.tui.widgets.confirm import Editor

        hint = "finds the newest line; N: an earlier line; n: a later line; empty: no search"
        self.console.open_overlay(Editor("find in the log", self.needle, hint, str, self.find))

    def find(self, needle: str) -> None:
        """Moves to the newest line that contains a text; an empty text ends the search."""
        self.needle, self.at = needle, None
        if needle:
            self._step(-1)
        self.pane.redraw()

    def _step(self, by: int) -> None:
        if not self.needle:
            self.do_find()
            return
        low = self.needle.lower()
        index = self._index(self.at) + by
        while 0 <= index < len(self._lines):
            if low in self._lines[index][1].text.lower():
                self.at = self._lines[index][0]
                self.scroll_to_line(self._end_of_page(index, 2))
                return
            index += by
        where = "later" if by > 0 else "earlier"
        held = f"in the {len(self._lines):,} lines of this view"
        self.console.say(f"no {where} line with {self.needle!r} {held}", "error")

    do_find_next, do_find_previous = partialmethod(_step, 1), partialmethod(_step, -1)

    def copied(self) -> str:
        shown = self._lines[max(0, self.end - self.seen) : self.end]
        return "\n".join(f"{line.source} {line.text}" for _, line in shown)
