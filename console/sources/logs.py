"""Logs of a run, merged in the order in which they arrive, made harmless, bounded."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from console.model import LogLine
from console.sources.sanitize import clean
from trainers.contract import jsonl, rundir

BACKLOG_BYTES = 256 << 10
MAX_LINE_BYTES = 64 << 10
_RANK_LOG = re.compile(r"rank(\d+)\.log")


class Log:
    """Follows one text file from its last `BACKLOG_BYTES` on, through rotations; where it is
    shorter, from the last ones before its rotation."""

    def __init__(self, run: Path, path: Path, source: str):
        self._run, self.path, self.source = run, path, source
        self._kept = rundir.kept_log(path)
        self._part: object = None
        """Of the newest part that was cut off."""
        self._offset = -1
        self._inode = 0
        self._carry = b""

    def poll(self, over: bool = False) -> list[bytes]:
        """Returns the lines that are new since the last call; `over`: also one without its end."""
        fd = jsonl.open_regular(self.path, self._run)
        if fd is None:
            return []
        try:
            status = os.fstat(fd)
            if self._offset < 0:
                self._offset = max(0, status.st_size - BACKLOG_BYTES)
                self._part = rundir.stamp(self._kept)
                before = BACKLOG_BYTES - status.st_size
                if before > 0:
                    self._carry = jsonl.read_bytes(self._kept, before, below=self._run)
            elif status.st_ino != self._inode:
                self._offset, self._carry = 0, b""
            elif self._is_cut(status.st_size):
                self._carry = self._rest()
                self._offset = 0
            self._inode = status.st_ino
            data = os.pread(fd, BACKLOG_BYTES, self._offset)
        except OSError:
            return []
        finally:
            os.close(fd)
        self._offset += len(data)
        *lines, self._carry = (self._carry + data).split(b"\n")
        rest = over and self._carry and self._offset >= status.st_size
        if len(self._carry) > MAX_LINE_BYTES or rest:
            lines.append(self._carry)
            self._carry = b""
        return lines

    def _is_cut(self, size: int) -> bool:
        """Says whether the file begins anew, also when it has grown past the offset again.

        The cut follows after the part that was copied has its name: until then, the file is as
        long as that part.
        """
        part = rundir.stamp(self._kept)
        new = part != self._part and size < jsonl.size_bytes(self._kept, self._run)
        if new:
            self._part = part
        return new or size < self._offset

    def _rest(self) -> bytes:
        """Returns what was not shown before the cut, its end at least.

        There is no such rest of a file that was only made shorter.
        """
        size = jsonl.size_bytes(self._kept, self._run)
        if size < self._offset:
            return b""
        if size - self._offset > BACKLOG_BYTES:
            return jsonl.read_bytes(self._kept, BACKLOG_BYTES, below=self._run)
        return self._carry + jsonl.read_bytes(self._kept, BACKLOG_BYTES, self._offset, self._run)


class LogSource:
    """The logs of one attempt: `r0`, `r1`, …, `torchrun`, and the supervisor's events as `sup`."""

    def __init__(self, run: Path, attempt: int = 1):
        self.run, self.attempt = run, attempt
        self._files: dict[str, Log] = {}
        self._events = jsonl.Tail(run / rundir.EVENTS, lambda record: record)

    def poll(self, over: bool = False) -> list[LogLine]:
        """Returns the lines that are new since the last call; `over` as in `Log.poll`."""
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
