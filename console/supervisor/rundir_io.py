"""The one thread that touches the run directory; a file system that hangs stops only it."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError
from trainers.contract.recorder import Item, Recorder

T = TypeVar("T")
RETRY_S, RETRY_EVERY_S = 60.0, 0.5
LOOK_EVERY_S = 0.2


def event_record(
    attempt: int, kind: str, text: str, level: str = "info", by: str = "supervisor", **more: Any
) -> dict[str, Any]:
    """Returns one record of `events.jsonl`."""
    return {
        "v": VERSION, "ts": time.time(), "mono": time.monotonic(), "attempt": attempt,
        "kind": kind, "level": level, "text": text, "by": by,
    } | more  # fmt: skip


class Directory(Recorder):
    """Writes events, documents and samples in the order they were asked for.

    `on_done` is called on this thread when a job has its result, for `deliver`, and when a look is
    due: `changed` is then set. `lost` says why the directory at the path is not this launch's any
    more, "" while it is: then nothing there is read, obeyed, opened or replaced.
    """

    check_every_s = 0.0
    """Events are few, and an answer that nobody can read is a question without one."""

    def __init__(
        self, on_done: Callable[[], None] = lambda: None, lost: Callable[[], str] = lambda: ""
    ):  # fmt: skip
        self._on_done, self._lost = on_done, lost
        self.lost = ""
        """The last result of `lost`."""
        self._results: deque[tuple[Callable[..., object], object, Exception | None]] = deque()
        self._documents: dict[Path, Mapping[str, Any]] = {}
        self.unwritten: dict[Path, Mapping[str, Any]] = {}
        """Documents that the disk did not take; only this thread touches it."""
        self.replaced: deque[Path] = deque()
        """Files that somebody removed or replaced, for whoever says it."""
        self.mistakes: deque[Exception] = deque()
        """Exceptions of jobs that nobody thought of, for whoever says it."""
        self._home: rundir.Home | None = None
        self.replaced_run = ""
        """Why the directory at the path of the present run is not its own, "" while it is."""
        self._lock = threading.Lock()
        self.changed = False
        self.glance: Callable[[], bool] = lambda: False
        """Called every `LOOK_EVERY_S` on this thread; returns whether a look is due."""
        self._glance_at = 0.0
        super().__init__()

    def is_ours(self) -> bool:
        """Says whether the directory is still this launch's; on this thread."""
        self.lost = self._lost()
        return not self.lost

    def _check(self, path: Path) -> None:
        """Raises OSError (ESTALE) where the launch's directory, or the run's, is not ours."""
        if not self.is_ours():
            raise OSError(errno.ESTALE, self.lost, str(path))
        self.check_run(path)

    def check_run(self, path: Path) -> None:
        """Raises OSError (ESTALE) where a path of the present run is in another directory.

        On this thread.
        """
        if self._home is None or not path.is_relative_to(self._home.path):
            return
        self.replaced_run = ""
        if self._home.is_replaced():
            self.replaced_run = (
                f"{self._home.path} was replaced by another directory: requests and .HALT there "
                "are ignored, and nothing is written there; put the run's own directory back"
            )
            raise OSError(errno.ESTALE, self.replaced_run, str(path))

    def append(self, path: Path, line: bytes) -> None:
        """Appends a line at once; on this thread. Raises OSError where it is not written whole."""
        self._write(path, line)
        if path in self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def set_aside(self, path: Path, to: Path) -> None:
        """Renames a file that records go to; the next record begins a new one. On this thread.

        Raises OSError.
        """
        path.rename(to)
        fd, _ = self._descriptors.pop(path, (-1, 0.0))
        if fd >= 0:
            os.close(fd)

    def make_run(self, run: Path, record: Mapping[str, Any]) -> Path | None:
        """Makes the directory of the present run; on this thread. Raises OSError.

        Returns where a `.HALT` from before was set aside, None where there was none.
        """
        rundir.make_directory(run)
        self.hold(run)
        for folder in (run / rundir.REQUESTS, run / rundir.VERDICTS):
            rundir.make_directory(folder)
        aside = rundir.set_aside_stale_halt(run)
        rundir.write_json(run / rundir.RUN, record)
        return aside

    def check_token(self, run: Path, token: str) -> None:
        """Raises RefusedError when a run directory belongs to another run; on this thread.

        Raises OSError while nobody can tell: a directory that is away now may come back.
        """
        record = rundir.read_json(run / rundir.RUN)
        if record is None:
            why = "it is not there or cannot be read"
            raise OSError(errno.EIO, why, str(run / rundir.RUN))
        if jsonl.text(jsonl.mapping(record, "environment"), environ.TOKEN) != token:
            raise RefusedError(f"{run} belongs to another run; no further attempt begins")

    def hold(self, run: Path) -> None:
        """Takes a directory as that of the present run; on this thread. Raises OSError."""
        held, self._home = self._home, rundir.Home(run)
        if held is not None:
            held.close()

    def _next(self) -> Item | Callable[[], None] | None:
        wait_s = self._glance_at - time.monotonic()
        if wait_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=wait_s)
        self._glance_at = time.monotonic() + LOOK_EVERY_S
        return self._glance_around

    def _glance_around(self) -> None:
        if self.glance():
            self.changed = True
            self._on_done()

    def job(
        self, work: Callable[[], T], then: Callable[[T | None, Exception | None], object],
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Queues work that reads or writes; `deliver` hands its result to `then`, or its error.

        The error is OSError (ESTALE) where the directory is not ours any more, or not the `folder`
        of the present run.
        """

        def done() -> None:
            value, error = None, None
            try:
                self._check(folder or Path())
                value = work()
            except Exception as failure:
                error = failure
            self._results.append((then, value, error))
            self._on_done()

        self.call(done)

    def told(self, work: Callable[[], object], then: Callable[[str], object], folder: Path) -> None:
        """Queues work as `job` does; `then` gets why it failed, "" where it did not."""

        def say(_: object, error: Exception | None) -> None:
            then(str(getattr(error, "strerror", None) or error or ""))

        self.job(work, say, folder)

    def deliver(self) -> None:
        """Hands over the results of jobs, on the thread of who calls.

        An exception that tells neither of the disk nor of the directory also goes into `mistakes`.
        """
        while self._results:
            then, value, error = self._results.popleft()
            if error is not None and not isinstance(error, OSError | ContractError):
                self.mistakes.append(error)
            then(value, error)

    def ask(self, run: Path, name: str, by: str, then: Callable[[str], object]) -> None:
        """Leaves a file for the ranks to find, `.HALT` or one of `rundir.REQUEST_FILES`.

        `deliver` tells `then` why it could not be written, "" when it was.
        """

        def told(reason: str) -> None:
            then(f"cannot write {name}: {reason}; the ranks go on" if reason else "")

        self.told(lambda: rundir.write_request(run, name, by), told, run)

    def event(
        self, folder: Path, attempt: int, kind: str, text: str, level: str = "info",
        by: str = "supervisor", **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Appends one event beside the folder's mailbox; never dropped. Returns it."""
        record = event_record(attempt, kind, text, level, by, **more)
        self.put(folder / rundir.EVENTS, jsonl.encode(record), keep=True)
        return record

    def _replaced(self, path: Path) -> None:
        self.replaced.append(path)

    def document(self, path: Path, record: Mapping[str, Any]) -> None:
        """Replaces a JSON document as a whole; of several that wait only the newest is written."""
        with self._lock:
            waits = path in self._documents
            self._documents[path] = dict(record)
        if not waits:
            self.call(lambda: self._write_document(path))

    def _write_document(self, path: Path) -> None:
        with self._lock:
            record = self._documents.pop(path)
        self.unwritten[path] = record
        self._write_unwritten(path)

    def _write_unwritten(self, path: Path) -> None:
        self._check(path)
        rundir.write_json(path, self.unwritten[path])
        del self.unwritten[path]

    def _open(self, path: Path) -> int:
        self._check(path)
        return super()._open(path)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Also tries for `RETRY_S` to write what a full disk did not take: it is the last word."""
        self.call(self._retry)
        return super().close(timeout_s)

    def _retry(self) -> None:
        """Raises OSError when documents are lost for good."""
        until = time.monotonic() + RETRY_S
        while self.unwritten and self.is_ours():
            try:
                self._write_unwritten(next(iter(self.unwritten)))
            except OSError:
                if time.monotonic() >= until:
                    raise
                time.sleep(RETRY_EVERY_S)
