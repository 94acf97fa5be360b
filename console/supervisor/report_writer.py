"""Writes the report of a launch that has ended, while the supervisor still answers requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from console.plans import report
from console.sources.process import command
from console.supervisor.rundir_io import Directory

LIMIT_S = 20.0
"""The longest wait for the report: a disk may hang, or there may be many records."""


class ReportWriter:
    """Builds and writes the report in a separate thread.

    `event` is called with a sentence if the report is missing or incomplete.
    """

    def __init__(self, launch: Path, directory: Directory, event: Callable[..., object]):
        self._launch, self._directory, self._event = launch, directory, event
        self._threads = ThreadPoolExecutor(1, "report")
        self._job: Future[None] | None = None
        self._until, self._is_written = math.inf, False

    @property
    def busy(self) -> bool:
        return self._job is not None

    def start(self) -> None:
        """Starts to build the report. Raises RuntimeError if no thread can be started."""
        queue_is_written = threading.Event()
        self._directory.call(queue_is_written.set)
        self._job = self._threads.submit(self._build, queue_is_written)
        self._until = time.monotonic() + LIMIT_S

    def poll(self) -> None:
        """Writes an event if the report is missing or incomplete; gives up after `LIMIT_S`."""
        is_late = time.monotonic() >= self._until
        if self._job is None or not (self._job.done() or is_late):
            return
        why = f"it is not complete after {LIMIT_S:g} s"
        if self._job.done():
            error = self._job.exception()
            why = "" if error is None else getattr(error, "strerror", None) or repr(error)
        self._job = None
        if why:
            what = "lacks the comparison of the sweeps" if self._is_written else "is not written"
            then = f"run {command('report', self._launch)}"
            self._event("note", f"the report {what}: {why}; {then}", "warn")

    def _build(self, queue_is_written: threading.Event) -> None:
        """Runs in the thread of the report; first waits up to `LIMIT_S` for earlier writes."""
        queue_is_written.wait(LIMIT_S)
        for files in report.versions(self._launch, self._launch / report.NAME):
            if self._directory.is_ours():
                report.save(files)
                self._is_written = True
