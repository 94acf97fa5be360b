"""Adds records to a reducer as if they were read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from console.sources.record_files import Batch, Cursor
from console.sources.reducer import LatestRecords, Reducer
from console.sources.series import Series
from trainers.contract import rundir


class Recorded:
    """The records of one attempt so far; with `live`, all of them are new to the reader."""

    def __init__(self, live: bool = False):
        self.reducer = Reducer(Series(keeps=False), timed=True)
        if live:
            self.reducer.mark_old()

    def take(self, record: dict[str, Any]) -> None:
        beat = {"v": 1, "attempt": 1, "ts": 1.0} | record
        name = rundir.heartbeat(Path(), beat["rank"]).name
        self.reducer.add(Batch(name, [beat], Cursor()), present=1)

    @property
    def heads(self) -> dict[int, LatestRecords]:
        return self.reducer.heads(1)
