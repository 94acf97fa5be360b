"""Works on a launch directory in one thread, so that a hung disk does not block the main loop."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError
from trainers.contract.recorder import Item, Recorder

T = TypeVar("T")
RETRY_S, RETRY_EVERY_S = 60.0, 0.5
POLL_EVERY_S = 0.2


def event_record(
    attempt: int, kind: str, text: str, level: str = "info", by: str = "supervisor", **more: Any
) -> dict[str, Any]:
    """Returns one record of `events.jsonl`."""
    return {
        "v": VERSION, "ts": time.time(), "mono": time.monotonic(), "attempt": attempt,
        "kind": kind, "level": level, "text": text, "by": by,
    } | more  # fmt: skip


class Directory(Recorder):
    """Writes events and samples in the order of the calls; see `document` for the documents.

    The thread of this object calls `on_done` after each `job`, and when `check_for_changes` has
    found a change. `find_loss` returns "" while the path leads to this launch's directory, or else
    the reason. In a lost directory, no `job` is executed, and no record file or document is opened
    or replaced.
    """

    check_every_s = 0.0
    """0: each write checks that its file is still at its path, so that readers find each answer."""

    def __init__(
        self, on_done: Callable[[], None] = lambda: None, find_loss: Callable[[], str] = lambda: ""
    ):  # fmt: skip
        self._on_done, self._find_loss = on_done, find_loss
        self.lost = ""
        """The last result of `find_loss`."""
        self._results: deque[tuple[Callable[..., object], object, Exception | None]] = deque()
        self._documents: dict[Path, tuple[object, Mapping[str, Any]]] = {}
        """A mark and the newest version of each document that waits to be written."""
        self.unwritten: dict[Path, Mapping[str, Any]] = {}
        """Documents to write now, or again after a failure; used only on this object's thread."""
        self.reported = 0
        """The value of `dropped` at the last alert on failed writes."""
        self.replaced: deque[Path] = deque()
        """Files that another process removed or replaced, to be reported."""
        self.unexpected_errors: deque[Exception] = deque()
        """Unexpected exceptions of jobs, to be reported."""
        self._home: rundir.OpenDirectory | None = None
        """The directory of the current run."""
        self.replaced_run = ""
        """A sentence while the path of the current run leads to another directory, or ""."""
        self._lock = threading.Lock()
        self.changed = False
        """True if `check_for_changes` has found a change that no poll has used yet."""
        self.check_for_changes: Callable[[], bool] = lambda: False
        """Returns whether a watched file has changed; this object's thread calls the function."""
        self._check_at = 0.0
        super().__init__()

    # --- on this thread ------------------------------------------------------------------------

    def is_ours(self) -> bool:
        """Returns whether the path still leads to this launch's directory."""
        self.lost = self._find_loss()
        return not self.lost

    def _check(self, path: Path) -> None:
        """Raises OSError (ESTALE) if the launch directory is lost, or as `check_run` does."""
        if not self.is_ours():
            raise OSError(errno.ESTALE, self.lost, str(path))
        self.check_run(path)

    def check_run(self, path: Path) -> None:
        """Raises OSError (ESTALE) if `path` is in the current run and that run was replaced."""
        if self._home is None or not path.is_relative_to(self._home.path):
            return
        self.replaced_run = ""
        if not self._home.is_there() and os.path.lexists(self._home.path):
            self.replaced_run = (
                f"restore {self._home.path}: it was replaced by another directory, so requests and "
                ".HALT there are ignored, and nothing is written there"
            )
            raise OSError(errno.ESTALE, self.replaced_run, str(path))

    def append(self, path: Path, line: bytes) -> None:
        """Appends a line. Raises OSError if the line is not written completely."""
        self._write(path, line)
        if path in self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def set_aside(self, path: Path, to: Path) -> None:
        """Renames a file of records; the next record starts a new file. Raises OSError."""
        path.rename(to)
        self._close(path)

    def _close(self, path: Path) -> None:
        """Closes a file of records if it is open; the next record opens it again."""
        fd, _ = self._descriptors.pop(path, (-1, 0.0))
        if fd >= 0:
            os.close(fd)

    def make_run(self, run: Path, record: Mapping[str, Any]) -> Path | None:
        """Creates a run directory with run.json, and makes the run the current run.

        Renames a `.HALT` that existed before, and returns its new path. Without a `.HALT`, returns
        None. Raises OSError or RefusedError.
        """
        rundir.make_directory(run)
        self.set_run(run)
        for folder in (run / rundir.REQUESTS, run / rundir.VERDICTS):
            rundir.make_directory(folder)
        aside = run / f"{rundir.HALT}.stale-{time.time_ns() // 1_000_000}"
        try:
            (run / rundir.HALT).rename(aside)
        except FileNotFoundError:
            aside = None
        rundir.write_json(run / rundir.RUN, record)
        git = jsonl.mapping(record, "git")
        if sha := jsonl.text(git, "sha"):
            changes = f"with local changes {jsonl.text(git, 'diff')}\n" if git.get("dirty") else ""
            with contextlib.suppress(OSError):  # run.json also has the commit
                rundir.write_atomic(run / "git_sha.txt", f"{sha}\n{changes}")
        return aside

    def check_token(self, run: Path, token: str) -> None:
        """Raises RefusedError if a run directory belongs to another run.

        Raises OSError if run.json is missing or unreadable; this may be temporary.
        """
        record = rundir.read_json(run / rundir.RUN)
        if record is None:
            why = "it is missing or cannot be read"
            raise OSError(errno.EIO, why, str(run / rundir.RUN))
        if rundir.token(record) != token:
            raise RefusedError(f"{run} belongs to another run; no further attempt starts")

    def set_run(self, run: Path) -> None:
        """Makes `run` the current run, and closes the files of the former run. Raises OSError."""
        former, self._home = self._home, rundir.OpenDirectory(run)
        if former is not None:
            former.close()
            for path in [each for each in self._descriptors if each.is_relative_to(former.path)]:
                self._close(path)

    def _next(self) -> Item | Callable[[], None] | None:
        wait_s = self._check_at - time.monotonic()
        if wait_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=wait_s)
        self._check_at = time.monotonic() + POLL_EVERY_S
        return self._poll_changes

    def _poll_changes(self) -> None:
        if self.check_for_changes():
            self.changed = True
            self._on_done()

    def _replaced(self, path: Path) -> None:
        self.replaced.append(path)

    def _write_document(self, path: Path, mark: object) -> None:
        """Writes the version with this mark, unless a later call writes a newer version."""
        with self._lock:
            newest, record = self._documents.get(path, (None, {}))
            if newest is not mark:
                return
            del self._documents[path]
        self._write_version(path, record)

    def _write_version(self, path: Path, record: Mapping[str, Any]) -> None:
        """Writes a document, and the documents whose write failed before. Raises OSError."""
        self.unwritten[path] = record
        if errors := self._write_unwritten():
            raise errors[0]

    def _write_unwritten(self) -> list[OSError]:
        """Tries to write each unwritten document; returns the errors."""
        errors = []
        for path, record in list(self.unwritten.items()):
            try:
                self._check(path)
                rundir.write_json(path, record)
                del self.unwritten[path]
            except OSError as error:
                errors.append(error)
        return errors

    def _open(self, path: Path) -> int:
        self._check(path)
        return super()._open(path)

    def _write_rest(self) -> None:
        """Tries for `RETRY_S` to write the unwritten documents, unless the directory is lost.

        Raises OSError if documents remain unwritten after this time.
        """
        until = time.monotonic() + RETRY_S
        while self.is_ours() and (errors := self._write_unwritten()):
            if time.monotonic() >= until:
                raise errors[0]
            time.sleep(RETRY_EVERY_S)

    # --- on any thread -------------------------------------------------------------------------

    def job(
        self, work: Callable[[], T], then: Callable[[T | None, Exception | None], object],
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Queues work on files; `deliver` then calls `then` with the result or the error.

        The thread first calls `_check(folder)`. If that raises OSError, the thread skips the work.
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

    def reported_job(
        self, work: Callable[[], object], then: Callable[[str], object], folder: Path
    ) -> None:
        """Queues work like `job`; calls `then` with why the work failed, or "" after success."""

        def report(_: object, error: Exception | None) -> None:
            then(str(getattr(error, "strerror", None) or error or ""))

        self.job(work, report, folder)

    def deliver(self) -> None:
        """Calls `then` for each finished job, on the thread of the caller.

        An exception that is neither OSError nor ContractError is also added to `unexpected_errors`.
        """
        while self._results:
            then, value, error = self._results.popleft()
            if error is not None and not isinstance(error, OSError | ContractError):
                self.unexpected_errors.append(error)
            then(value, error)

    def doubt(self, late_s: float) -> str:
        """Returns why the newest records may not be in the run directory, or "" without a reason.

        A write that has not ended after `late_s` is a reason.
        """
        if self.failing:
            return f"cannot write records to the run directory ({self.failing})"
        return "no write to the run directory finishes" if self.blocked_s() > late_s else ""

    def write_request(self, run: Path, name: str, by: str, then: Callable[[str], object]) -> None:
        """Writes `.HALT` or one of `rundir.REQUEST_FILES` into the run directory, for the ranks.

        `deliver` calls `then` with why the write failed, or "" after success.
        """

        def report(reason: str) -> None:
            then(f"cannot write {name}: {reason}; the ranks continue" if reason else "")

        self.reported_job(lambda: rundir.write_request(run, name, by), report, run)

    def event(
        self, folder: Path, attempt: int, kind: str, text: str, level: str = "info",
        by: str = "supervisor", **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Queues one event of a run or launch, even if the queue is full; returns the event."""
        record = event_record(attempt, kind, text, level, by, **more)
        self.put(folder / rundir.EVENTS, jsonl.encode(record), keep=True)
        return record

    def document(self, path: Path, record: Mapping[str, Any], keeps_place: bool = False) -> None:
        """Replaces a JSON document; if several versions wait, only the newest is written.

        A document gets the queue position of its newest call. With `keeps_place`, this version is
        written even if a newer version waits.
        """
        version, mark = dict(record), object()
        if keeps_place:
            return self.call(lambda: self._write_version(path, version))
        with self._lock:
            self._documents[path] = mark, version
        # The call has only the mark, so that old versions need no memory while the disk hangs.
        return self.call(partial(self._write_document, path, mark))

    def close(self, timeout_s: float = 60.0) -> bool:
        """Tries to write the unwritten documents, as `_write_rest` does; closes like `Recorder`."""
        self.call(self._write_rest)
        return super().close(timeout_s)
