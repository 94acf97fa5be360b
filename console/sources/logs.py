"""Merges the logs of one attempt in the order in which lines are read; cleans each line.

Lines of ranks carry no time, so no other order between sources is known.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from console.model import ALL_SOURCES, LogLine
from console.sources.record_files import rotated_log
from console.sources.sanitize import clean
from console.sources.tail import READ_CHUNK_BYTES, Tail
from console.status_text import clock, size
from trainers.contract import jsonl, rundir

BACKLOG_BYTES, LATE_BYTES = 256 << 10, 1 << 20
"""The most bytes of a log that one poll reads, and that a reader with `skips` leaves unread."""
MAX_LINE_BYTES = 64 << 10
ORDERED_S = 5.0
"""If more time passes between two polls, the order between sources is shown as not known."""
SAME_S = 1.0
"""Longest time between events that are about the same change."""
_RANK_LOG = re.compile(r"rank(\d+)\.log")


class Log:
    """Follows one log. Reading starts `BACKLOG_BYTES` before the end of the log.

    If the log is shorter, reading starts in the rotated file, if there is one. Lines that were not
    read before a later rotation are skipped. With `skips`, a reader that is more than `LATE_BYTES`
    behind continues `BACKLOG_BYTES` before the end. A line then says how much was skipped.
    """

    def __init__(self, run: Path, path: Path, source: str, skips: bool = False):
        self._run, self.path, self.source, self._skips = run, path, source, skips
        self._offset = -1
        self._inode = 0
        self._carry = b""

    def poll(self, over: bool = False) -> list[bytes]:
        """Returns new complete lines; with `over` also an incomplete last line.

        One call reads at most `BACKLOG_BYTES`. The first line after the start of reading or after a
        skip may be cut. A line longer than `MAX_LINE_BYTES` may be returned in parts.
        """
        try:
            with jsonl.opened(self.path, self._run) as fd:
                status = os.fstat(fd)
                self._begin(status)
                skipped = self._skip(status.st_size)
                data = os.pread(fd, BACKLOG_BYTES, self._offset)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._carry = (self._carry + data).split(b"\n")
        lines[:0] = skipped
        rest = over and self._carry and self._offset >= status.st_size
        if len(self._carry) > MAX_LINE_BYTES or rest:
            lines.append(self._carry)
            self._carry = b""
        return lines

    def _begin(self, status: os.stat_result) -> None:
        if self._offset < 0:
            self._offset = max(0, status.st_size - BACKLOG_BYTES)
            before = BACKLOG_BYTES - status.st_size
            if before > 0:
                kept = rotated_log(self.path)
                self._carry = jsonl.read_bytes(kept, before, below=self._run)
        elif status.st_ino != self._inode or status.st_size < self._offset:
            self._offset, self._carry = 0, b""
        self._inode = status.st_ino

    def _skip(self, size_bytes: int) -> list[bytes]:
        """With `skips`, skips older bytes if too many are unread; returns a line on the skip."""
        if not self._skips or size_bytes - self._offset <= LATE_BYTES:
            return []
        skipped_bytes = size_bytes - BACKLOG_BYTES - self._offset + len(self._carry)
        self._offset, self._carry = size_bytes - BACKLOG_BYTES, b""
        return [f"[console: {size(skipped_bytes)} of this log skipped]".encode()]


class LogSource:
    """The logs of one attempt, as `r0`, `r1`, …, `torchrun`, and the events of the run as `sup`.

    With `skips`, a log that grows faster than it is read is not read completely, as in `Log`.
    """

    def __init__(self, run: Path, attempt: int = 1, skips: bool = False):
        self.run, self.attempt, self._skips = run, attempt, skips
        self._files: dict[str, Log] = {}
        self._events = Tail(run / rundir.EVENTS, recent_bytes=READ_CHUNK_BYTES - 1)
        self._last_event: dict[str, object] = {}
        self._polled_ts = 0.0

    def poll(self, over: bool = False) -> list[LogLine]:
        """Returns the new lines of all logs without blank lines; `over` as in `Log.poll`.

        The lines are grouped by source. After a long time without a poll, the order between sources
        is not known; if several sources have lines, a last line of `ALL_SOURCES` says this.
        """
        self._discover()
        fresh = []
        for record in self._events.poll():
            if line := _event_line(record, self._last_event):
                fresh.append(line)
            self._last_event = record
        for file in self._files.values():
            for raw in file.poll(over):
                text = clean(raw[:MAX_LINE_BYTES].decode("utf-8", "replace"))
                if text.strip():
                    fresh.append(LogLine(file.source, text))
        before, self._polled_ts = self._polled_ts, time.time()
        if self._polled_ts - before > ORDERED_S and len({line.source for line in fresh}) > 1:
            text = f"above, before {clock(self._polled_ts)}: order between sources not known"
            fresh.append(LogLine(ALL_SOURCES, text))
        return fresh

    def _discover(self) -> None:
        directory = rundir.logs(self.run, self.attempt)
        for name in rundir.names(directory, self.run) or []:
            match = _RANK_LOG.fullmatch(name)
            source = clean(f"r{int(match[1])}" if match else name.removesuffix(".log"), 16)
            if name not in self._files and name.endswith(".log"):
                self._files[name] = Log(self.run, directory / name, source, self._skips)


def _event_line(record: dict[str, object], last: dict[str, object]) -> LogLine | None:
    """Returns an event as a line; None without a text or a valid time, or if it repeats `last`.

    Only events within `SAME_S` are compared: a verdict, its alert and the new state are three
    events with one sentence.
    """
    text = jsonl.text(record, "text")
    ts = jsonl.number(record, "ts")
    if not text or ts is None or not 0 <= ts < 1 << 40:
        return None
    said = jsonl.text(last, "text")
    if said and abs(ts - (jsonl.number(last, "ts") or 0.0)) < SAME_S:
        if said == text or said.endswith(f": {text}"):
            return None
        text = text.removesuffix(f": {said}")
    level = jsonl.text(record, "level").upper()
    mark = f"{clean(level, 8)} " if level in ("WARN", "CRIT") else ""
    return LogLine("sup", f"{clock(ts)} {mark}{clean(text)}")
