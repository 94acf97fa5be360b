"""Logs: all ranks merged or one, following or held, with find."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult

from console.model import LogLine
from console.tui.feed import Snapshot
from console.tui.rows import Row, rule
from console.tui.screens.view import View
from console.tui.widgets.lines import Lines
from console.tui.widgets.logtail import LogBook, log_rows
from console.tui.widgets.scroll import Scrolls

if TYPE_CHECKING:
    from console.tui.main import ConsoleApp

ALL = "all"
SLACK = 2_000


def highlighted(row: Row, needle: str) -> Row:
    """Returns a row in which the found text stands out."""
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


def marked(row: Row) -> Row:
    """Returns the line that a search stands on: its source is reversed."""
    return ((row[0][0], "cursor"), *row[1:])


class LogPane(Lines, can_focus=True):
    DEFAULT_CSS = "LogPane { height: 1fr; }"

    def redraw(self) -> None:
        if isinstance(self.parent, LogView):
            self.parent.redraw()

    def on_mouse_scroll_down(self) -> None:
        if isinstance(self.parent, LogView):
            self.parent.scroll_by(3)

    def on_mouse_scroll_up(self) -> None:
        if isinstance(self.parent, LogView):
            self.parent.scroll_by(-3)


class LogView(Scrolls, View):
    """`bottom` is the number of the line under the last one shown, None while it follows.

    Lines are numbered by their arrival, so what is held stays in place when new ones come.
    """

    DEFAULT_CSS = "LogView { layout: vertical; }"

    def __init__(self, book: LogBook):
        super().__init__(id="logs")
        self.book = book
        self.source = ALL
        self.needle = ""
        self.bottom: int | None = None
        self.at: int | None = None
        self.seen = 1
        self._sources: dict[str, None] = {}
        self._lines: list[tuple[int, LogLine]] = []
        self._seen: tuple[int, int, str] = (0, 0, "")

    def compose(self) -> ComposeResult:
        yield LogPane("pane")

    def arrive(self) -> None:
        self.query_one(LogPane).focus()

    def take(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.redraw()

    @property
    def page(self) -> int:
        return max(1, self.seen - 1)

    def _refresh_lines(self) -> None:
        """Keeps the numbered lines of the chosen source; looks only at what is new."""
        epoch, total, source = self._seen
        if (epoch, source) != (self.book.epoch, self.source):
            total, self._lines = 0, []
            if epoch != self.book.epoch:
                self.bottom = self.at = None
                self._sources.clear()
        oldest = self.book.total - len(self.book.lines)
        for number, line in self.book.since(max(total, oldest)):
            self._sources.setdefault(line.source)
            if self.source in (ALL, line.source):
                self._lines.append((number, line))
        if self._lines and self._lines[0][0] < oldest - SLACK:
            self._forget(oldest)
        self._seen = (self.book.epoch, self.book.total, self.source)

    def _forget(self, oldest: int) -> None:
        """Drops the lines that the book has dropped; what is held on the screen stays in place."""
        gone = sum(number < oldest for number, _ in self._lines)
        del self._lines[:gone]
        if self.bottom is not None:
            self.bottom = max(0, self.bottom - gone)
        if self.at is not None:
            self.at = max(0, self.at - gone)

    def redraw(self) -> None:
        pane = self.query_one(LogPane)
        width, height = pane.size
        if not width or not height:
            return
        self._refresh_lines()
        end = len(self._lines) if self.bottom is None else min(self.bottom, len(self._lines))
        start, body = self._body(end, width, height - 1)
        self.seen = max(1, end - start)
        rows = [rule(self._title(), width, self._note(start, end), focused=pane.has_focus)]
        pane.show([*rows, *(body or [(("no line yet", "dim"),)])])

    def _body(self, end: int, width: int, height: int) -> tuple[int, list[Row]]:
        """Returns the first whole line that is shown and the rows up to `end`, from below."""
        body: list[Row] = []
        start = end
        while start > 0 and len(body) < height:
            start -= 1
            rows = log_rows(self._lines[start][1], width)
            if self.needle:
                rows = [highlighted(row, self.needle) for row in rows]
                if start == self.at:
                    rows[0] = marked(rows[0])
            body[:0] = rows
        return start, body[max(0, len(body) - height) :]

    def _title(self) -> str:
        names = [ALL, *self._sources]
        shown = "  ".join(f"[{name}]" if name == self.source else name for name in names)
        return f"log  {shown}"

    def _note(self, start: int, end: int) -> str:
        found = f"find {self.needle!r}  " if self.needle else ""
        if self.bottom is None:
            return f"{found}follows"
        return f"{found}{start + 1}–{end} of {len(self._lines)}  G follows"

    def scroll_by(self, by: int) -> None:
        end = len(self._lines) if self.bottom is None else self.bottom
        end = max(min(self.seen, len(self._lines)), end + by)
        self.bottom = None if end >= len(self._lines) else end
        self.redraw()

    def do_right(self) -> None:
        self._choose(1)

    def do_left(self) -> None:
        self._choose(-1)

    def _choose(self, by: int) -> None:
        names = [ALL, *self._sources]
        self.source = names[(names.index(self.source) + by) % len(names)]
        self.bottom = self.at = None
        self.redraw()

    def do_find(self) -> None:
        from console.tui.widgets.editor import Editor

        app: ConsoleApp = self.app  # type: ignore[assignment]
        hint = "a text; n and N go to the next and the one before; empty clears"
        app.open_overlay(Editor("find in the log", self.needle, hint, lambda _: "", self.find))

    def find(self, needle: str) -> None:
        """Goes to the newest line with a text."""
        self.needle = needle
        self.at = None
        if needle:
            self._step(-1)
        self.redraw()

    def do_find_next(self) -> None:
        self._step(1)

    def do_find_previous(self) -> None:
        self._step(-1)

    def _step(self, by: int) -> None:
        app: ConsoleApp = self.app  # type: ignore[assignment]
        if not self.needle:
            self.do_find()
            return
        low = self.needle.lower()
        index = len(self._lines) if self.at is None else self.at
        index += by
        while 0 <= index < len(self._lines):
            if low in self._lines[index][1].text.lower():
                self.at = index
                end = max(min(self.seen, len(self._lines)), index + 1 + self.seen // 2)
                self.bottom = None if end >= len(self._lines) else end
                self.redraw()
                return
            index += by
        app.say(f"no {'later' if by > 0 else 'earlier'} line with {self.needle!r}", "error")

    def copied(self) -> str:
        pane = self.query_one(LogPane)
        end = len(self._lines) if self.bottom is None else self.bottom
        shown = self._lines[max(0, end - pane.size.height + 1) : end]
        return "\n".join(f"{line.source} {line.text}" for _, line in shown)


def make(app: ConsoleApp) -> LogView:
    return LogView(app.book)
