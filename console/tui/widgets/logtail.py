"""Log lines as rows: which rank, what level, plain text whatever stands in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from console.model import LogLine
from console.tui.feed import Snapshot
from console.tui.rows import Row, chop, cut, fill, rule
from console.tui.widgets.lines import Panel

SOURCE_WIDTH = 5
BACKLOG = 20_000
SHORT = {"torchrun": "torch", "supervisor": "sup"}
_MARKS = (
    ("crit", ("CRIT", "Traceback", "Error:", "ERROR", "FATAL")),
    ("warn", ("WARN", "Warning")),
)


def line_style(text: str) -> str:
    """Returns the style for a line that says itself how bad it is."""
    head = text[:160]
    return next((style for style, words in _MARKS if any(w in head for w in words)), "")


def log_row(line: LogLine, width: int) -> Row:
    """Returns one line: its source, then its text."""
    source = SHORT.get(line.source, line.source)
    text = cut(line.text, width - SOURCE_WIDTH - 1)
    return ((fill(source, SOURCE_WIDTH), "dim"), (" ", ""), (text, line_style(line.text)))


def log_rows(line: LogLine, width: int) -> list[Row]:
    """Returns one line in full, wrapped under its source."""
    source = SHORT.get(line.source, line.source)
    style = line_style(line.text)
    return [
        ((fill(source if index == 0 else "", SOURCE_WIDTH), "dim"), (" ", ""), (text, style))
        for index, text in enumerate(chop(line.text, max(8, width - SOURCE_WIDTH - 1)))
    ]


class LogBook:
    """The lines that came so far, owned by the screen.

    `total` counts all lines of this log, the dropped ones too; `epoch` counts the logs.
    """

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque(maxlen=BACKLOG)
        self.total = 0
        self.epoch = 0

    def take(self, snapshot: Snapshot) -> None:
        if snapshot.log_begins:
            self.lines.clear()
            self.total = 0
            self.epoch += 1
        self.lines.extend(snapshot.log)
        self.total += len(snapshot.log)

    def since(self, number: int) -> Iterator[tuple[int, LogLine]]:
        """Yields the lines from the one with that number on, with their numbers."""
        oldest = self.total - len(self.lines)
        start = max(0, number - oldest)
        yield from enumerate(islice(self.lines, start, None), oldest + start)

    def last(self, count: int) -> list[LogLine]:
        """Returns the newest lines, oldest first."""
        return [line for _, line in self.since(self.total - count)] if count > 0 else []


class LogTail(Panel):
    """The newest lines, at the foot of the Dashboard."""

    def __init__(self, book: LogBook, id: str):
        super().__init__(id=id)
        self.book = book

    def rows(self, snapshot: Snapshot, width: int, height: int) -> Sequence[Row]:
        rows = [rule("log", width, "4 all of it")]
        lines = self.book.last(height - 1)
        if not lines:
            rows.append((("no log line yet", "dim"),))
        return [*rows, *(log_row(line, width) for line in lines)]
