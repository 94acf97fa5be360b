"""The buffer of log lines (`LogBook`), and the rows of its newest lines."""

from __future__ import annotations

from collections import deque
from itertools import islice

from console.model import LogLine
from console.tui.feed import ScreenData
from console.tui.rows import Row, chop, fill, labelled, rule

SOURCE_WIDTH = 5
BACKLOG = 20_000
SHORT = {"torchrun": "torch", "supervisor": "sup"}
_MARKS = (
    ("crit", ("CRIT", "Traceback", "Error:", "ERROR", "FATAL")),
    ("warn", ("WARN", "Warning")),
)


def line_style(text: str) -> str:
    """Returns the style for the log level near the start of a line, or ""."""
    head = text[:160]
    return next((style for style, words in _MARKS if any(w in head for w in words)), "")


def log_rows(line: LogLine, width: int, limit: int = 20) -> list[Row]:
    """Returns one log line, wrapped to the right of its source."""
    source = SHORT.get(line.source, line.source)
    texts = chop(line.text, max(8, width - SOURCE_WIDTH - 1), limit)
    return labelled((f"{fill(source, SOURCE_WIDTH)} ", "dim"), texts, line_style(line.text))


class LogBook:
    """The newest lines of the log, at most `BACKLOG`, with their numbers.

    `total` counts all lines of this log, even those that were dropped. `epoch` increases when
    another log begins.
    """

    def __init__(self) -> None:
        self.lines: deque[tuple[int, LogLine]] = deque(maxlen=BACKLOG)
        self.total = 0
        self.epoch = 0

    def take(self, snapshot: ScreenData) -> None:
        if snapshot.log_begins:
            self.lines.clear()
            self.total = 0
            self.epoch += 1
        self.lines.extend(enumerate(snapshot.log, self.total))
        self.total += len(snapshot.log)


def newest_rows(book: LogBook, width: int, height: int) -> list[Row]:
    """Returns a heading and the newest lines, each in one row."""
    rows = [rule("log", width, "4 shows all lines")]
    if not book.lines:
        rows.append((("no log lines yet", "dim"),))
    newest = islice(book.lines, max(0, len(book.lines) - height + 1), None)
    return rows + [row for _, line in newest for row in log_rows(line, width, 1)]
