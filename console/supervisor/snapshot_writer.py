"""Writes snapshot.json and the history files of a run when they are due.

Readers start from these files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from console.sources import record_files, snapshot
from console.sources.reducer import Reducer
from console.supervisor.alerts import Alerts
from console.supervisor.context import Services
from trainers.contract import jsonl, rundir

EVERY_S = 30.0
NO_HISTORY = "history"


class Snapshots:
    """Writes the state of `reducer` when a snapshot is due.

    The owner process stores a snapshot once the earlier history is on disk. A new child continues
    from that snapshot and reads the later records again.
    """

    def __init__(
        self, services: Services, run: Path, name: str, reducer: Reducer, alerts: Alerts
    ):  # fmt: skip
        self._services, self._run, self._name, self._reducer = services, run, name, reducer
        self._alerts = alerts
        self._written = time.monotonic()
        self._is_waiting = False
        self.is_loaded = True
        """False while `load` is in progress."""

    def load(self, stored: Mapping[str, Any] | None) -> None:
        """Starts from the snapshot that a former child sent to the owner, or without a snapshot."""
        self.is_loaded = False
        self._run_job(lambda: snapshot.load(self._run, stored, self._reducer), None)

    def poll(self) -> None:
        """Starts the write that is due, unless an earlier one waits. Call it once a second."""
        if self._is_waiting:
            return
        if time.monotonic() - self._written >= EVERY_S:
            self.write()
        elif self._reducer.series.ended:
            self._run_job(self._add_history, None)

    def write(self) -> None:
        """Writes the history lines that are due, then replaces the snapshot."""
        self._written = time.monotonic()
        found = snapshot.document(self._reducer, self._name, time.time())
        self._run_job(self._add_history, found)
        self._services.directory.document(self._run / rundir.SNAPSHOT, found)

    def _run_job(self, work: Callable[[], object], found: Mapping[str, Any] | None) -> None:
        self._is_waiting = True
        self._services.directory.job(work, partial(self._finish, found), self._run)

    def _finish(self, found: Mapping[str, Any] | None, _: object, error: Exception | None) -> None:
        self._is_waiting, self.is_loaded = False, True
        if error is not None:
            self._alerts.raise_(NO_HISTORY, f"cannot write the history of the charts: {error}")
            return
        self._alerts.clear(NO_HISTORY, "the history of the charts is written again")
        if found is not None:
            self._services.link.store(self._run / rundir.SNAPSHOT, found)

    def _add_history(self) -> None:
        """Writes the spans that have ended; runs on the thread of the run directory.

        Raises OSError if a span cannot be written; the next call writes that span again.
        """
        directory, ended = self._services.directory, self._reducer.series.ended
        while ended:
            path = snapshot.history(self._run, ended[0].level)
            directory.append(path, jsonl.encode(snapshot.plain(ended[0])))
            ended.popleft()
            if jsonl.size_bytes(path) >= snapshot.HISTORY_BYTES:
                directory.set_aside(path, record_files.rotated_log(path))
