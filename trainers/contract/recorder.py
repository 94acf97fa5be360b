"""Writes records and log lines in a thread, so that no step waits for these writes.

Records wait in a queue. A record is dropped and counted if its write fails, if the recorder is
closed, or if the queue is full; `keep` queues a record even then.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.contract import heartbeat, jsonl, rundir

MAX_WAITING, MOST_REPORTED = 10_000, 20
STDOUT = Path("<stdout>")
REPLACED = (
    "was removed or replaced during the run: new records go to the file that is there now, "
    "earlier records may be lost"
)
MOVED = "the directory was moved, replaced or removed during the run"
Item = tuple[Path, Any]


class Recorder:
    """Appends records to files from one daemon thread.

    `put` only inserts into a queue. Heartbeats are queued as dicts, and the thread encodes them. A
    line for stdout is cut to `PIPE_BUF` bytes, and dropped while stdout accepts no data. `is_ours`
    returns False while another directory or none is at the path of the run. The thread then opens
    no file and calls no function. It still writes to open files that were not deleted.
    """

    check_every_s = 1.0
    """Least seconds between two checks that an open file is still at its path.

    A check is made only before a write, and never of stdout.
    """

    def __init__(self, is_ours: Callable[[], bool] = lambda: True) -> None:
        self._is_ours = is_ours
        self._queue: queue.SimpleQueue[Item | Callable[[], None] | None] = queue.SimpleQueue()
        self._descriptors: dict[Path, tuple[int, float]] = {STDOUT: (1, math.inf)}
        """The descriptor of each file, and the time of its next check."""
        self._torn: set[Path] = set()
        """Files whose last line is incomplete; the next record begins with a newline."""
        self._reported: set[str] = set()
        self.dropped = 0
        self.trouble = ""
        """The newest failure of a write or a call, or "" if none has failed."""
        self.failing = ""
        """The newest OSError, or "" if there was none or a later write had no error."""
        self._closed = False
        self._busy_since = 0.0
        self._thread = threading.Thread(target=self._run, name="nsa-recorder", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of queued records and calls."""
        return self._queue.qsize()

    def blocked_s(self) -> float:
        """Returns for how many seconds the current write or call has run, or 0 if there is none."""
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def put(self, path: Path, record: dict[str, Any] | bytes, keep: bool = False) -> bool:
        """Queues one record for `path`; drops it and returns False if the queue is full or closed.

        With `keep`, a full queue does not drop the record.
        """
        if self._closed or (self._queue.qsize() >= MAX_WAITING and not keep):
            self.dropped += 1
            return False
        self._queue.put((path, record))
        return True

    def call(self, work: Callable[[], None], keep: bool = True) -> None:
        """Queues a function, for example one that writes a document.

        With `keep`, a full queue does not drop the function.
        """
        if keep or self._queue.qsize() < MAX_WAITING:
            self._queue.put(work)
        else:
            self.dropped += 1

    def close(self, timeout_s: float = 60.0) -> bool:
        """Drops later records; returns whether the thread has ended within `timeout_s`."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._busy_since = time.monotonic()
            try:
                if callable(item):
                    self._check_ours("the run directory")
                    item()
                else:
                    self._write(*item)
                    self.failing = ""
            except Exception as error:  # a failed call must not end the writer
                self.dropped += 1
                self.trouble = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    self.trouble = f"{error.strerror}: {error.filename or 'write failed'}"
                    self.failing = self.trouble
                if self.trouble not in self._reported and len(self._reported) < MOST_REPORTED:
                    self._reported.add(self.trouble)
                    self._report(f"records are dropped and counted: {self.trouble}")
            self._busy_since = 0.0
        for path, (fd, _) in self._descriptors.items():
            if path != STDOUT:
                os.close(fd)

    def _next(self) -> Item | Callable[[], None] | None:
        """Waits for the next record or call; None ends the thread."""
        return self._queue.get()

    def _write(self, path: Path, record: dict[str, Any] | bytes) -> None:
        data = heartbeat.encode(record) if isinstance(record, dict) else record
        fd = self._file(path)
        if path in self._torn:
            data = b"\n" + data
        if path == STDOUT:
            if not _is_writable(fd):
                raise RuntimeError("stdout is blocked")
            if len(data) > select.PIPE_BUF:  # a longer write could block
                data = data[: select.PIPE_BUF - 1] + b"\n"
        written = os.write(fd, data)
        if written < len(data):
            self._torn.add(path)
            self.dropped += 1
            self.trouble = f"{path.name} was written only partly; the disk may be full"
        else:
            self._torn.discard(path)

    def _file(self, path: Path) -> int:
        """Returns the descriptor for `path`.

        Checks at intervals whether the file was removed or replaced; if so, opens it again.
        """
        fd, check_at = self._descriptors.get(path, (None, 0.0))
        now = time.monotonic()
        if fd is None:
            fd = self._open(path)
        elif now < check_at:
            return fd
        elif not _is_at(path, fd):
            self._reopen(path, fd)
        self._descriptors[path] = fd, now + self.check_every_s
        return fd

    def _reopen(self, path: Path, fd: int) -> None:
        """Redirects the descriptor to the new file at `path`.

        If the new file cannot be opened, records still go to the old file. If the old file was
        deleted too, raises OSError.
        """
        try:
            new = self._open(path)
        except OSError:
            if os.fstat(fd).st_nlink:
                return
            raise
        os.dup2(new, fd, inheritable=False)
        os.close(new)
        self._replaced(path)

    def _open(self, path: Path) -> int:
        self._check_ours(str(path))
        is_torn = jsonl.read_bytes(path, 1) not in (b"", b"\n")
        fd = rundir.open_append(path)
        (self._torn.add if is_torn else self._torn.discard)(path)
        return fd

    def _check_ours(self, what: str) -> None:
        if not self._is_ours():
            raise OSError(errno.ESTALE, MOVED, what)

    def _replaced(self, path: Path) -> None:
        """Reports that earlier records may be missing in `path`."""
        self._report(f"{path.name} {REPLACED}")

    def _report(self, message: str) -> None:
        try:
            if _is_writable(2):
                os.write(2, f"{message}\n".encode("utf-8", "replace")[: select.PIPE_BUF])
        except OSError:
            self.dropped += 1


def _is_writable(fd: int) -> bool:
    """Returns whether a file accepts data at once; a pipe then has room for `PIPE_BUF` bytes.

    A terminal accepts no data after Ctrl-S, and a full pipe accepts none until its reader reads.
    """
    return bool(select.select([], [fd], [], 0)[1])


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False
