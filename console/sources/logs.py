"""Merges the logs of one attempt in the order in which lines are read; cleans each line.

Lines of ranks carry no time, so no other order between sources is known.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from console.model import ALL_SOURCES, LogLine
from console.sources.process import command
from console.sources.record_files import rotated_log
from console.sources.sanitize import MAX_CHARS, clean
from console.sources.tail import READ_CHUNK_BYTES, Tail
from console.status_text import clock, size
from trainers.contract import jsonl, rundir

BACKLOG_BYTES, LATE_BYTES = 256 << 10, 1 << 20
"""The most bytes of a log that one poll reads, and that a reader with `skips` leaves unread."""
MAX_LINE_BYTES = 64 << 10
LAST_BYTES = 256
"""A file was rotated or replaced if at most this many bytes before the offset have changed."""
TRUNCATED = b"[console: this log was truncated; lines may be missing]"
ORDERED_S = 5.0
"""If no poll reads all logs to their ends for a longer time, their order is not known."""
SAME_S = 1.0
"""Longest time between events that are about the same change."""
_RANK_LOG = re.compile(r"rank(\d+)\.log")
_ATTEMPT = re.compile(r"attempt([0-9]{1,9})")


def attempts(run: Path) -> list[int]:
    """Returns the numbers of the attempts of a run that have a directory for their logs."""
    names = rundir.names(run / "logs", run) or []
    return sorted(int(match[1]) for match in map(_ATTEMPT.fullmatch, names) if match)


def before(run: Path, attempt: int) -> list[LogLine]:
    """Returns a line with the command that prints the earlier logs, if an earlier attempt has any.

    The command prints the logs of the newest earlier attempt.
    """
    earlier = [each for each in attempts(run) if each < attempt]
    text = f"attempt {attempt}; earlier logs: {command('logs', run)} --attempt"
    return [LogLine(ALL_SOURCES, f"{text} {each}") for each in earlier[-1:]]


class Log:
    """Follows one log. Reading starts at the start of the rotated file, if there is one.

    After a later rotation, reading continues in the rotated file. If this file does not have the
    next lines, they are skipped, and the line `TRUNCATED` says so. With `skips`, reading starts
    `BACKLOG_BYTES` before the end; a reader that is later more than `LATE_BYTES` behind continues
    there. A line then says how much was skipped.
    """

    def __init__(self, run: Path, path: Path, source: str, skips: bool = False):
        self._run, self.path, self.source, self._skips = run, path, source, skips
        self._offset = self._rotated_bytes = 0
        """The next offset, at most 0 in the rotated file, and the size of the rotated file."""
        self._has_begun = False
        self._carry = self._last = b""
        """The incomplete line, and at most the `LAST_BYTES` before the offset, of the same file."""
        self.is_behind = False
        """True if the last poll stopped before the end of the log."""

    def poll(self, over: bool = False) -> list[bytes]:
        """Returns new complete lines; with `over` also an incomplete last line.

        One call reads at most `BACKLOG_BYTES`. The first line after a skip may be cut. A line
        longer than `MAX_LINE_BYTES` may be returned in parts.
        """
        try:
            with jsonl.opened(self.path, self._run) as fd:
                status = os.fstat(fd)
                skipped = self._seek(fd, status.st_size)
                data = self._read(fd)
        except OSError:
            self.is_behind = False
            return []
        *lines, self._carry = (self._carry + data).split(b"\n")
        lines[:0] = skipped
        self.is_behind = self._offset < status.st_size
        rest = over and self._carry and not self.is_behind
        if len(self._carry) > MAX_LINE_BYTES or rest:
            lines.append(self._carry)
            self._carry = b""
        return lines

    def _seek(self, fd: int, size_bytes: int) -> list[bytes]:
        """Finds the next offset; returns a line on the bytes that are skipped, if any."""
        late_bytes, skipped = LATE_BYTES, list[bytes]()
        if not self._has_begun:
            self._has_begun, late_bytes = True, BACKLOG_BYTES
            self._rotated_bytes = jsonl.size_bytes(rotated_log(self.path))
            self._offset = -self._rotated_bytes
        elif self._last and self._before(fd) != self._last:
            skipped = self._find_rotated()
        if not self._skips or size_bytes - self._offset <= late_bytes:
            return skipped
        start = size_bytes - BACKLOG_BYTES
        skipped_bytes = start - self._offset + len(self._carry)
        self._offset, self._carry, self._last = start, b"", b""
        return [_skipped(skipped_bytes).encode()]

    def _before(self, fd: int) -> bytes:
        """Returns the bytes before the offset, as many as `_last` has. Raises OSError."""
        count, kept = len(self._last), rotated_log(self.path)
        if self._offset > 0:
            return os.pread(fd, count, self._offset - count)
        at = self._rotated_bytes + self._offset
        return jsonl.read_bytes(kept, count, at - count, self._run)

    def _find_rotated(self) -> list[bytes]:
        """Continues in the rotated file if it has the bytes that were read last, else in the log.

        It lacks them after several rotations, or if only the end of a very long log was copied.
        """
        kept, at = rotated_log(self.path), self._offset - len(self._last)
        if at >= 0 and jsonl.read_bytes(kept, len(self._last), at, self._run) == self._last:
            self._rotated_bytes = jsonl.size_bytes(kept)
            self._offset -= self._rotated_bytes
            return []
        self._offset, self._carry, self._last = 0, b"", b""
        return [TRUNCATED]

    def _read(self, fd: int) -> bytes:
        """Reads on in the rotated file, then in the log. Raises OSError."""
        data = b""
        if self._offset < 0:
            kept, at = rotated_log(self.path), self._rotated_bytes + self._offset
            data = jsonl.read_bytes(kept, min(BACKLOG_BYTES, -self._offset), at, self._run)
            self._offset = self._offset + len(data) if data else 0
            self._last = (self._last + data)[-LAST_BYTES:]
        if self._offset >= 0:
            rest = os.pread(fd, BACKLOG_BYTES - len(data), self._offset)
            self._offset += len(rest)
            self._last = (self._last + rest)[-min(LAST_BYTES, self._offset) :]
            data += rest
        return data


def _skipped(skipped_bytes: int) -> str:
    return f"[console: {size(skipped_bytes)} of this log skipped]"


class LogSource:
    """The logs of one attempt, as `r0`, `r1`, …, `torchrun`, and the events of the run as `sup`.

    With `skips`, long logs and events are not read completely, as in `Log`, and long lines are cut.
    """

    def __init__(self, run: Path, attempt: int = 1, skips: bool = False):
        self.run, self.attempt, self._skips = run, attempt, skips
        self._files: dict[str, Log] = {}
        recent_bytes = READ_CHUNK_BYTES - 1 if skips else None
        self._events = Tail(run / rundir.EVENTS, recent_bytes=recent_bytes)
        self._last_event: dict[str, object] = {}
        self._current_ts = 0.0
        """The last time when all logs had been read to their ends."""
        self._unordered: set[str] = set()
        """The sources of lines since this time."""

    def next(self, run: Path, attempt: int) -> LogSource:
        """Returns the source of a later attempt or run; it has only new events of the same run."""
        later = LogSource(run, attempt, self._skips)
        if run == self.run:
            later._events, later._last_event = self._events, self._last_event
        return later

    def poll(self, over: bool = False) -> list[LogLine]:
        """Returns the new lines of all logs without blank lines; `over` as in `Log.poll`.

        The lines are grouped by source. If the logs had not been read to their ends for a long
        time, the order between sources is not known. If several sources have lines, a last line of
        `ALL_SOURCES` says this as soon as all logs have been read to their ends.
        """
        self._discover()
        fresh = []
        has_begun = self._events.generation > 0
        records = self._events.poll()
        if not has_begun and self._events.left_out_bytes:
            fresh.append(LogLine("sup", _skipped(self._events.left_out_bytes)))
        for record in records:
            if line := _event_line(record, self._last_event):
                fresh.append(line)
            self._last_event = record
        most = MAX_CHARS if self._skips else MAX_LINE_BYTES + BACKLOG_BYTES
        for file in self._files.values():
            for raw in file.poll(over):
                text = clean(raw.decode("utf-8", "replace"), most)
                if text.strip():
                    fresh.append(LogLine(file.source, text))
        self._unordered |= {line.source for line in fresh}
        if self.is_behind:
            return fresh
        before, self._current_ts = self._current_ts, time.time()
        if self._current_ts - before > ORDERED_S and len(self._unordered) > 1:
            text = f"above, before {clock(self._current_ts)}: order between sources not known"
            fresh.append(LogLine(ALL_SOURCES, text))
        self._unordered.clear()
        return fresh

    @property
    def is_behind(self) -> bool:
        """True if the last poll stopped before the end of a log; it may have returned no line."""
        return any(file.is_behind for file in self._files.values())

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
