"""The thread that writes, so that the training thread never does.

A record that cannot be written at once waits in a bounded queue; when the queue is full, or the
disk is, records are dropped and counted. A frozen filesystem stops this thread and nothing else.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.contract import heartbeat, rundir

MAX_WAITING = 10_000
STDOUT = Path("<stdout>")
REPLACED = (
    "was removed or replaced by somebody while the run goes on: records go on in the file that is "
    "there now, and it may lack those from before"
)
MOVED = "the directory was moved, replaced or removed by somebody while the run goes on"
Item = tuple[Path, Any]


class Recorder:
    """Appends whole records to files from one daemon thread.

    `put` costs the caller a queue insertion. Heartbeats travel as dicts and are encoded here. While
    `ours` says that another directory is at the path, files that are open are written to wherever
    they are now, and nothing is opened or replaced: the other one may belong to another run.
    """

    check_every_s = 1.0
    """Time between two checks that a file is still the one at its path."""

    def __init__(self, ours: Callable[[], bool] = lambda: True) -> None:
        self._ours = ours
        self._queue: queue.SimpleQueue[Item | Callable[[], None] | None] = queue.SimpleQueue()
        self._descriptors: dict[Path, tuple[int, float]] = {STDOUT: (1, math.inf)}
        """Of each file, and when to look whether it is still there."""
        self._torn: set[Path] = set()
        self._failed: set[Path] = set()
        self.dropped = 0
        self.trouble = ""
        """Why the last record was dropped."""
        self.failing = ""
        """Why the newest write failed, "" when it did not."""
        self._closed = False
        self._busy_since = 0.0
        self._thread = threading.Thread(target=self._run, name="nsa-recorder", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of records and calls that have not been written yet."""
        return self._queue.qsize()

    def blocked_s(self) -> float:
        """For how long the write that is under way has been waiting for the disk; 0 for none."""
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def put(self, path: Path, record: dict[str, Any] | bytes, keep: bool = False) -> bool:
        """Queues one record for `path`; False when it was dropped because too many wait.

        One to `keep` is queued however many wait.
        """
        if self._closed or (self._queue.qsize() >= MAX_WAITING and not keep):
            self.dropped += 1
            return False
        self._queue.put((path, record))
        return True

    def call(self, work: Callable[[], None]) -> None:
        """Queues a function that writes something else (an atomic document, say)."""
        self._queue.put(work)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Waits until everything queued is written; False when the disk did not take it in time."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._busy_since = time.monotonic()
            try:
                if callable(item):
                    self._do(item)
                else:
                    self._write(*item)
                    self.failing = ""
            except OSError as error:
                self.dropped += 1
                self.trouble = f"{error.strerror}: {error.filename or 'write failed'}"
                self.failing = self.trouble
                self._say_once(error)
            except Exception as error:  # a call that fails must not end the records of all others
                self.dropped += 1
                before, self.trouble = self.trouble, f"{type(error).__name__}: {error}"
                if self.trouble != before:
                    self._say(f"a record is dropped and counted: {self.trouble}")
            self._busy_since = 0.0
        for path, (fd, _) in self._descriptors.items():
            if path != STDOUT:
                os.close(fd)

    def _do(self, work: Callable[[], None]) -> None:
        if not self._ours():
            raise OSError(errno.ESTALE, MOVED)
        work()

    def _next(self) -> Item | Callable[[], None] | None:
        """Waits for what is to be done next; None is the end."""
        return self._queue.get()

    def _write(self, path: Path, record: dict[str, Any] | bytes) -> None:
        data = heartbeat.encode(record) if isinstance(record, dict) else record
        fd = self._file(path)
        if path in self._torn:
            data = b"\n" + data
        written = os.write(fd, data)
        if written < len(data):
            self._torn.add(path)
            self.dropped += 1
            self.trouble = f"{path.name} was written in part: the disk is full"
        else:
            self._torn.discard(path)

    def _file(self, path: Path) -> int:
        """Returns a descriptor of what is at `path`: somebody may have removed or replaced it."""
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
        """Puts what is at `path` behind the descriptor; the last line there may lack its end.

        A file that was moved away is written to while nothing can be put into its place.
        """
        try:
            new = self._open(path)
        except OSError:
            if os.fstat(fd).st_nlink:
                return
            raise
        os.dup2(new, fd, inheritable=False)
        os.close(new)
        (self._torn.add if os.fstat(fd).st_size else self._torn.discard)(path)
        self._replaced(path)

    def _open(self, path: Path) -> int:
        if not self._ours():
            raise OSError(errno.ESTALE, MOVED, str(path))
        return rundir.open_append(path)

    def _replaced(self, path: Path) -> None:
        """Says that what was written to `path` before may not be in it."""
        self._say(f"{path.name} {REPLACED}")

    def _say_once(self, error: OSError) -> None:
        where = Path(str(error.filename)) if error.filename else Path("run directory")
        if where not in self._failed:
            self._failed.add(where)
            self._say(f"records are dropped and counted, training goes on: {error}")

    def _say(self, message: str) -> None:
        try:
            os.write(2, f"{message}\n".encode("utf-8", "replace"))
        except OSError:
            self.dropped += 1


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False
