"""Writes `snapshot.json` of a run, and the history of its series: so nobody replays its records."""

from __future__ import annotations

import json
import time
from pathlib import Path

from console.sources import snapshot
from console.sources.reducer import Reducer
from console.supervisor.alerts import Alerts
from console.supervisor.services import Services
from trainers.contract import jsonl, rundir

EVERY_S = 30.0
TOO_LONG = "snapshot"


class Snapshots:
    """Owns when they are written. The state is that of `reducer`, which the records go into."""

    def __init__(
        self, services: Services, run: Path, name: str, reducer: Reducer, alerts: Alerts
    ):  # fmt: skip
        self._services, self._run, self._name, self._reducer = services, run, name, reducer
        self._alerts = alerts
        self._written = time.monotonic()

    def look(self) -> None:
        """Writes what is due; call it once a second."""
        self._add_history()
        if time.monotonic() - self._written >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Replaces the snapshot; one that would be too long is not written: the former one counts.

        The lines of the history come before it: it says up to which of them they are whole.
        """
        self._written = time.monotonic()
        self._add_history()
        found = snapshot.document(self._reducer, self._name, time.time())
        size, most = len(json.dumps(found)), snapshot.max_bytes(len(self._reducer.summary.folds))
        if size <= most:
            self._services.publish(self._run / rundir.SNAPSHOT, found)
        else:
            text = (
                f"{rundir.SNAPSHOT} would have {size:,} bytes, more than {most:,}: none is written"
            )
            self._alerts.raise_(TOO_LONG, f"{text}, and who looks reads what came since", "warn")

    def _add_history(self) -> None:
        ended = self._reducer.series.ended
        while ended:
            span = ended.popleft()
            path = snapshot.history(self._run, span.level)
            self._services.directory.put(path, jsonl.encode(span.as_dict()))
