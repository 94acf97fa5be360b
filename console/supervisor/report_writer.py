"""Writes the report of a launch that has ended, while the supervisor still answers requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from console.supervisor.rundir_io import Directory

LIMIT_S = 20.0
"""The supervisor waits no longer for the report, because a disk may hang or records may be long."""


class ReportWriter:
    """Builds the report in a thread of its own; the thread of the run directory writes the files.

    `event` is called with a sentence if the report is missing or incomplete.
    """

    def __init__(self, launch: Path, directory: Directory, event: Callable[..., object]):
        self._launch, self._directory, self._event = launch, directory, event
        self._until, self._written, self._why = math.inf, False, ""
        self.busy = False

    def start(self) -> None:
        """Starts to build the report when all that is queued for the run directory is written."""
        self.busy = True
        self._directory.reported_job(self._start_thread, self._started, self._launch)

    def poll(self) -> None:
        """Gives up waiting for a report that takes too long."""
        if time.monotonic() >= self._until:
            self._end(f"it is not complete after {LIMIT_S:g} s", None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._build, name="report", daemon=True).start()

    def _started(self, why: str) -> None:
        self._until = time.monotonic() + LIMIT_S
        if why:
            self._end(why, None)

    def _build(self) -> None:
        """Runs in the thread of the report."""
        why = ""
        try:
            from console.plans import report

            for files in report.versions(self._launch, self._launch / report.NAME):
                save = partial(report.save, files)
                self._directory.reported_job(save, self._saved, self._launch)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self._directory.job(lambda: why, self._end, self._launch)

    def _saved(self, why: str) -> None:
        self._written, self._why = self._written or not why, why

    def _end(self, why: str | None, error: Exception | None) -> None:
        """Reports once why the report is missing or incomplete."""
        why = why or self._why or str(error or "")
        if self.busy and why:
            what = "lacks the comparison of the sweeps" if self._written else "is not written"
            then = f"run nsa-console report {self._launch}"
            self._event("note", f"the report {what}: {why}; {then}", "warn")
        self.busy, self._until = False, math.inf
