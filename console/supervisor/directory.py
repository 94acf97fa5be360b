"""The one thread that touches the run directory; a file system that hangs stops only it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainers.contract import VERSION, jsonl, rundir
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


class Job(Generic[T]):
    """Work for the directory's thread whose result somebody waits for, without blocking.

    Whatever it raises is raised where the result is taken; the thread goes on.
    """

    def __init__(self, work: Callable[[], T], on_done: Callable[[], None]):
        self._work, self._on_done = work, on_done
        self.done = False
        self.error: Exception | None = None
        self._value: T | None = None

    def __call__(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.done = True
            self._on_done()

    @property
    def value(self) -> T:
        """Returns the result. Raises the error that the work raised."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Directory(Recorder):
    """Writes events, documents and samples in the order they were asked for.

    `on_done` is called on this thread when a job has its result, and when a look is due: `changed`
    is then set.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None):
        self._on_done = on_done
        self._documents: dict[Path, Mapping[str, Any]] = {}
        self.unwritten: dict[Path, Mapping[str, Any]] = {}
        """Documents that the disk did not take; only this thread touches it."""
        self._lock = threading.Lock()
        self.changed = False
        self._glance: Callable[[], bool] = lambda: False
        self._glance_at = 0.0
        super().__init__()

    def watch(self, glance: Callable[[], bool]) -> None:
        """Calls `glance` every `LOOK_EVERY_S` on this thread; it returns whether a look is due."""
        self._glance = glance

    def looked(self) -> None:
        """Says, on this thread, that somebody has looked just now."""
        self._glance_at = time.monotonic() + LOOK_EVERY_S

    def _next(self) -> Item | Callable[[], None] | None:
        wait_s = self._glance_at - time.monotonic()
        if wait_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=wait_s)
        self.looked()
        return self._glance_around

    def _glance_around(self) -> None:
        if self._glance():
            self.changed = True
            self._on_done()

    def job(self, work: Callable[[], T]) -> Job[T]:
        """Queues work that reads or writes; ask `done` later."""
        job = Job(work, self._on_done)
        self.call(job)
        return job

    def event(
        self, folder: Path, attempt: int, kind: str, text: str, level: str = "info",
        by: str = "supervisor", **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Appends one event beside the folder's mailbox; never dropped. Returns it."""
        record = event_record(attempt, kind, text, level, by, **more)
        self.put(folder / rundir.EVENTS, jsonl.encode(record), keep=True)
        return record

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
        rundir.write_json(path, record)
        del self.unwritten[path]

    def close(self, timeout_s: float = 60.0) -> bool:
        """Also tries for `RETRY_S` to write what a full disk did not take: it is the last word."""
        self.call(self._retry)
        return super().close(timeout_s)

    def _retry(self) -> None:
        """Raises OSError when documents are lost for good."""
        until = time.monotonic() + RETRY_S
        while self.unwritten:
            path, record = next(iter(self.unwritten.items()))
            try:
                rundir.write_json(path, record)
                del self.unwritten[path]
            except OSError:
                if time.monotonic() >= until:
                    raise
                time.sleep(RETRY_EVERY_S)
