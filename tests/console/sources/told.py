"""Records that stand in no file, as a reducer takes them from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from console.sources.reading import Batch, Cursor, Line, Place
from console.sources.reducer import Head, Reducer
from console.sources.series import Series
from trainers.contract import rundir


class Told:
    """The records of one attempt so far; `live`: its reader was there from the start."""

    def __init__(self, live: bool = False):
        self.reducer, self._at = Reducer(Series(keeps=False), timed=True), 0
        if live:
            self.reducer.settle()

    def take(self, record: dict[str, Any]) -> None:
        beat = {"v": 1, "attempt": 1, "ts": 1.0} | record
        name, at = rundir.heartbeat(Path(), beat["rank"]).name, Place(0, self._at)
        self._at += 1
        line = Line(at, 1, beat)
        self.reducer.take(Batch(name, [line], Cursor("", Place(0, self._at))), present=1)

    @property
    def heads(self) -> dict[int, Head]:
        return self.reducer.heads(1)
