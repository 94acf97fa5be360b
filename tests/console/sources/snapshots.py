"""Writes snapshots as a supervisor does, and compares a snapshot with all records."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console.model import RunState
from console.plans import gates
from console.sources import snapshot
from console.sources.record_files import WARM_UP_BYTES, RecordFiles
from console.sources.reducer import Reducer
from console.sources.run import RunSource
from console.sources.run_records import RunRecords
from console.sources.series import SPANS_S, Series
from console.supervisor.snapshot_writer import Snapshots
from tests.console.plans.histories import EVERY_BOUND
from tests.console.sources import directory
from trainers.contract import rundir

AGES = ("age_s", "data_age_s", "since_s", "eta_s", "directory_blocked_s")
DRAWN = ("loss", "step_s", "gate_entropy_mean", "rss_mib:0", "rss_mib:1", "gpu_util_pct:0")


def without_ages(held):
    """Returns a state without the values that depend on the time of the read."""
    if isinstance(held, dict):
        return {k: without_ages(v) for k, v in held.items() if k not in AGES}
    if isinstance(held, list | tuple):
        return [without_ages(each) for each in held]
    return "nan" if isinstance(held, float) and math.isnan(held) else held


def told(state: RunState):
    return without_ages(asdict(state))


def same_state(run: Path) -> None:
    """Asserts that the snapshot, if any, gives the state, charts and gates of all records."""
    directory.change(run / rundir.SUPERVISOR, updated_ts=time.time())
    whole, recent, drawn = (RunSource(run, reads=each) for each in ("all", "recent", "charts"))
    expected = told(whole.poll())
    found = told(recent.poll())
    has_snapshot = RunRecords(run, "recent").has_snapshot  # else, only the ends are read
    assert found == expected or not has_snapshot
    drawn.poll()
    assert told(drawn.poll()) == expected
    for name in DRAWN:
        assert bands(drawn.series, name) == bands(whole.series, name), name
    heads = [source.reducer.heads(source.reducer.attempt(None)) for source in (whole, drawn)]
    assert heads[0] == heads[1]
    sums = [source.summary for source in (whole, recent, drawn)]
    results = [gates.evaluate(each, EVERY_BOUND) for each in sums if each is not None]
    assert len(results) == 3
    assert results[0] == results[2]
    assert results[0] == results[1] or not has_snapshot


def bands(series: Series, name: str) -> list[object]:
    """Returns the points of a series at each resolution, and then the `Thinner` of its file."""
    held = [series._spans.get((name, level)) for level in range(len(SPANS_S))]
    thinner = series.thinners.get(series._files.get(name, ""))
    return [*(spans and spans.points() for spans in held), thinner]


class Disk:
    """Replaces the thread that writes a supervisor's files, and the owner of the snapshot.

    A job is executed at once, or, if the disk `hangs`, with the first job after that. No line is
    written while the disk `is_full`.
    """

    def __init__(self) -> None:
        self.directory = self.link = self
        self.kept: list[dict[str, Any]] = []
        self.alerts: set[str] = set()
        self.hangs = self.is_full = False
        self.waiting: list[Callable[[], object]] = []

    def job(self, work: Callable[[], object], then: Callable[..., object], folder: Path) -> None:
        def done() -> None:
            try:
                then(work(), None)
            except OSError as error:
                then(None, error)

        self.waiting.append(done)
        while self.waiting and not self.hangs:
            self.waiting.pop(0)()

    def append(self, path: Path, line: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        with path.open("ab") as stream:
            stream.write(line)

    def set_aside(self, path: Path, to: Path) -> None:
        path.rename(to)

    def document(self, path: Path, record: dict[str, Any]) -> None:
        rundir.write_json(path, record)

    def store(self, path: Path, record: dict[str, Any]) -> None:
        self.kept.append(record)

    def raise_(self, name: str, *_: str) -> None:
        self.alerts.add(name)

    def clear(self, name: str, *_: str) -> None:
        self.alerts.discard(name)


class Observer:
    """Reads the new records of a run and writes its snapshot, as a working process does.

    It starts at `held`, or else at the existing snapshot, if there is one.
    """

    def __init__(self, run: Path, held: dict[str, Any] | None = None):
        self.run, self.reducer = run, Reducer(Series(keeps=False), timed=True)
        held = held or rundir.read_json(run / rundir.SNAPSHOT)
        self.has_snapshot = snapshot.load(run, held, self.reducer)
        self._reading = RecordFiles(run, cursors=self.reducer.cursors, again_bytes=WARM_UP_BYTES)
        self.disk: Any = Disk()
        self._snapshots = Snapshots(self.disk, run, "toy/0-first", self.reducer, self.disk)

    def read(self, limit_bytes: int = 1 << 30) -> None:
        for batch in self._reading.poll(limit_bytes):
            self.reducer.add(batch)
        self._snapshots.poll()

    def save(self) -> None:
        """Reads all new records, and writes a snapshot."""
        self.read()
        self.write()

    def write(self) -> None:
        self._snapshots.write()
