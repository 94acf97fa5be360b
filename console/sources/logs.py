"""Merges the logs of one attempt in the order in which lines are read, safe for a terminal."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from console.model import LogLine
from console.sources import record_parts
from console.sources.sanitize import clean
from console.sources.tail import Tail
from trainers.contract import jsonl, rundir

BACKLOG_BYTES = 256 << 10
MAX_LINE_BYTES = 64 << 10
_RANK_LOG = re.compile(r"rank(\d+)\.log")


class Log:
    """Follows one log. Reading starts `BACKLOG_BYTES` before its end.

    If the log is shorter, reading starts in the rotated file, if there is one. Lines that were not
    read before a later rotation are skipped.
    """

    def __init__(self, run: Path, path: Path, source: str):
        self._run, self.path, self.source = run, path, source
        self._offset = -1
        self._inode = 0
        self._carry = b""

    def poll(self, over: bool = False) -> list[bytes]:
        """Returns new complete lines; with `over` also an incomplete last line.

        One call reads at most `BACKLOG_BYTES`. The first line of all may be cut, and a line that
        is longer than `MAX_LINE_BYTES` may be returned in parts.
        """
        try:
            with jsonl.opened(self.path, self._run) as fd:
                status = os.fstat(fd)
                self._begin(status)
                data = os.pread(fd, BACKLOG_BYTES, self._offset)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._carry = (self._carry + data).split(b"\n")
        rest = over and self._carry and self._offset >= status.st_size
        if len(self._carry) > MAX_LINE_BYTES or rest:
            lines.append(self._carry)
            self._carry = b""
        return lines

    def _begin(self, status: os.stat_result) -> None:
        """Sets the offset when the file is new, was replaced or was truncated."""
        if self._offset < 0:
            self._offset = max(0, status.st_size - BACKLOG_BYTES)
            before = BACKLOG_BYTES - status.st_size
            if before > 0:
                kept = record_parts.rotated_log(self.path)
                self._carry = jsonl.read_bytes(kept, before, below=self._run)
        elif status.st_ino != self._inode or status.st_size < self._offset:
            self._offset, self._carry = 0, b""
        self._inode = status.st_ino


class LogSource:
    """The logs of one attempt, as `r0`, `r1`, …, `torchrun`, and the events of the run as `sup`."""

    def __init__(self, run: Path, attempt: int = 1):
        self.run, self.attempt = run, attempt
        self._files: dict[str, Log] = {}
        self._events = Tail(run / rundir.EVENTS, lambda record: record)

    def poll(self, over: bool = False) -> list[LogLine]:
        """Returns the new lines of all logs without blank lines; `over` as in `Log.poll`."""
        self._discover()
        fresh = [line for record in self._events.poll() if (line := _event_line(record))]
        for file in self._files.values():
            for raw in file.poll(over):
                text = clean(raw[:MAX_LINE_BYTES].decode("utf-8", "replace"))
                if text.strip():
                    fresh.append(LogLine(file.source, text))
        return fresh

    def _discover(self) -> None:
        directory = rundir.logs(self.run, self.attempt)
        fd = jsonl.open_inside(directory, self.run)
        if fd is None:
            return
        try:
            names = sorted(os.listdir(fd))
        except OSError:
            return
        finally:
            os.close(fd)
        for name in names:
            match = _RANK_LOG.fullmatch(name)
            source = f"r{int(match[1])}" if match else name.removesuffix(".log")
            if name not in self._files and name.endswith(".log"):
                self._files[name] = Log(self.run, directory / name, clean(source, 16))


def _event_line(record: dict[str, object]) -> LogLine | None:
    text = jsonl.text(record, "text")
    ts = jsonl.number(record, "ts")
    if not text or ts is None or not 0 <= ts < 1 << 40:
        return None
    level = jsonl.text(record, "level").upper()
    mark = f"{clean(level, 8)} " if level in ("WARN", "CRIT") else ""
    return LogLine("sup", f"{time.strftime('%H:%M:%S', time.localtime(ts))} {mark}{clean(text)}")
