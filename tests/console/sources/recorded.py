"""Adds records to a reducer as if they were read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from console.sources.record_files import Batch, Cursor, Line, Place
from console.sources.reducer import LatestRecords, Reducer
from console.sources.series import Series
from trainers.contract import rundir


class Recorded:
    """The records of one attempt so far; with `live`, all of them are new to the reader."""

    def __init__(self, live: bool = False):
        self.reducer, self._at = Reducer(Series(keeps=False), timed=True), 0
        if live:
            self.reducer.mark_old()

    def take(self, record: dict[str, Any]) -> None:
        beat = {"v": 1, "attempt": 1, "ts": 1.0} | record
        name, at = rundir.heartbeat(Path(), beat["rank"]).name, Place(0, self._at)
        self._at += 1
        line = Line(at, 1, beat)
        self.reducer.add(Batch(name, [line], Cursor("", Place(0, self._at))), present=1)

    @property
    def heads(self) -> dict[int, LatestRecords]:
        return self.reducer.heads(1)
