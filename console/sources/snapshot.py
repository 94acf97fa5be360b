"""Writes and reads `snapshot.json`: the state of a reducer, which replaces all earlier records.

A snapshot has totals and the places of the newest records. It is valid only for the files from
which it was made. A file is identified by its name, part and the hash of its first line. The newest
records must still be at their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.sources import json_documents, record_files
from console.sources.gpu_totals import GpuTotals
from console.sources.pace import UNTIMED
from console.sources.rank_totals import RankTotals
from console.sources.record_files import Cursor, Line, Place, rank_of
from console.sources.reducer import HEAD_LINES, MAX_ATTEMPT, Events, LatestRecords, Reducer
from console.sources.series import SPANS_S, Series
from trainers.contract import VERSION, heartbeat, jsonl, rundir

MAX_BYTES, MAX_BYTES_OF_RANK = 64 << 10, 4 << 10
"""The largest size of a snapshot; for more than 16 ranks, the largest size for each rank."""
HISTORY_BYTES = 4 << 20
"""Bytes that are read of each history file; a longer file is renamed to `.1`."""


def max_bytes(ranks: int) -> int:
    return max(MAX_BYTES, ranks * MAX_BYTES_OF_RANK)


def history(run: Path, level: int) -> Path:
    """Returns the path of the history file for one resolution."""
    return run / f"history_{SPANS_S[level]}s.jsonl"


# --- writing -----------------------------------------------------------------------------------


def document(reducer: Reducer, run: str, ts: float) -> dict[str, Any]:
    """Returns the snapshot of a reducer."""
    events = reducer.events
    return {
        "v": VERSION, "run": run, "ts": ts,
        "files": {
            name: {"head": each.head, "place": list(each.place), "skipped": each.skipped}
            for name, each in reducer.cursors.items()
        },
        "folds": {str(rank): each.as_dict() for rank, each in reducer.summary.ranks.items()},
        "gpus": reducer.summary.gpus.as_dict(),
        "loaded": sorted(reducer.summary.loaded.items()), "overrides": reducer.summary.overrides,
        "heads": {
            str(rank): {
                str(attempt): {
                    "step": head.step, "first_step": head.first_step, "saved": head.saved,
                    "halt": head.halt, "records": head.records,
                } | {name: _ref(getattr(head, name)) for name in HEAD_LINES}
                for attempt, head in heads.items()
            } for rank, heads in reducer.all_heads.items()
        },
        "samples": {name: _ref(line) for name, line in reducer.newest_samples.items()},
        "events": {
            "attempts": events.attempts, "stalls": events.stalls, "state": _ref(events.state),
            "alerts": {name: _ref(line) for name, line in events.alerts.items()},
            "acknowledged": sorted(events.acknowledged), "told_ts": events.alert_ts,
        },
        "series": reducer.series.as_dict(),
    }  # fmt: skip


def _ref(line: Line | None) -> list[int] | None:
    """Returns part, first byte and length of a line."""
    return None if line is None else [*line.place, line.length]


# --- reading -----------------------------------------------------------------------------------


def load(
    run: Path, saved: Mapping[str, Any] | None, reducer: Reducer, most_bytes: int | None = None
) -> bool:
    """Fills a new reducer from a snapshot; returns whether the snapshot is valid for the files.

    A snapshot is not valid if more than `most_bytes` of heartbeats were written after it.
    """
    if saved is None or saved.get("v") != VERSION:
        return False
    try:
        _Loader(run, saved, most_bytes).fill(reducer)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return False
    return True


class _Loader:
    """Reads one snapshot; invalid content raises one of the errors that `load` catches."""

    def __init__(self, run: Path, saved: Mapping[str, Any], most_bytes: int | None):
        self._run, self._saved, self._most_bytes = run, saved, most_bytes
        self._cursors: dict[str, Cursor] = {}

    def fill(self, reducer: Reducer) -> None:
        self._cursors = cursors = self._read_cursors()
        ranks = {
            int(rank): RankTotals.load(int(rank), totals)
            for rank, totals in self._saved["folds"].items()
        }
        heads = {
            int(rank): {int(number): self._head(int(rank), int(number), each, ranks)
                        for number, each in saved.items()}
            for rank, saved in self._saved["heads"].items()
        }  # fmt: skip
        for rank, totals in ranks.items():
            cursor = cursors.get(rundir.heartbeat(self._run, rank).name)
            headless = totals.newest not in heads.get(rank, {}) and 0 < totals.newest <= MAX_ATTEMPT
            if headless or cursor is None or not cursor.place.at:
                raise ValueError(f"rank {rank} has no records")
        samples = {
            name: self._line(name, ref) for name, ref in self._saved["samples"].items()
        }  # fmt: skip
        events = self._events(jsonl.mapping(self._saved, "events"))
        series = Series(reducer.series.keeps)
        series.load(jsonl.mapping(self._saved, "series"))
        gpus = GpuTotals.load(self._saved["gpus"])
        overrides = jsonl.mapping(self._saved, "overrides")
        overrides = {gate: jsonl.text(overrides, gate) for gate in overrides}
        loaded = {_natural(step): _natural(at) for step, at in self._saved.get("loaded", ())}
        # Nothing raises from here on, so the reducer is filled completely or not at all.
        reducer.cursors.update(cursors)  # in place, because `RecordFiles` may share them
        reducer.all_heads, reducer.events = heads, events
        reducer.summary.ranks, reducer.series = ranks, series
        reducer.summary.gpus, reducer.summary.loaded = gpus, loaded
        reducer.summary.overrides = overrides
        reducer.newest_samples = {name: line for name, line in samples.items() if line}

    def _read_cursors(self) -> dict[str, Cursor]:
        found = {
            name: Cursor(
                jsonl.text(each, "head"), _place(each["place"]), _natural(each["skipped"])
            )
            for name, each in self._saved["files"].items()
        }  # fmt: skip
        for name, cursor in found.items():
            known = name == rundir.EVENTS or rank_of(name) is not None
            known = known or (name.startswith(record_files.SAMPLES) and "/" not in name)
            if not known or not cursor.fits(self._run / name):
                raise ValueError(f"{name} is another file")
        since = sum(jsonl.size_bytes(self._run / name) - each.place.at
                    for name, each in found.items() if rank_of(name) is not None)  # fmt: skip
        if self._most_bytes is not None and since > self._most_bytes:
            raise ValueError("the snapshot is too old")
        return found

    def _line(self, name: str, ref: Any) -> Line | None:
        """Returns the record at a place, or None without a place or a record."""
        if ref is None:
            return None
        if name not in self._cursors:
            raise ValueError(f"{name} was not read")
        part, at, length = ref
        place = Place(_natural(part), _natural(at))
        record = record_files.read_line(self._run / name, place, _natural(length))
        return Line(place, length, record) if record else None

    def _head(
        self, rank: int, attempt: int, saved: Mapping[str, Any], ranks: Mapping[int, RankTotals]
    ) -> LatestRecords:  # fmt: skip
        name, of = rundir.heartbeat(self._run, rank).name, {"rank": rank, "attempt": attempt}
        lines = {key: self._line(name, saved.get(key)) for key in HEAD_LINES}
        for line in lines.values():
            record = heartbeat.accept(line.record) if line is not None else of
            if record is None or (record["rank"], record["attempt"]) != (rank, attempt):
                raise ValueError(f"{name} has another record")
        last, progress = lines["last"], lines["progress"]
        part = ranks[rank].attempts.get(attempt)
        whole = part if part is not None and not part.trouble else None
        if last is None or (whole and jsonl.integer(last.record, "n") != whole.last):
            raise ValueError(f"{name} has another newest record")
        if whole and whole.step != (progress.record["step"] if progress is not None else 0):
            raise ValueError(f"{name} has another newest step")
        return json_documents.read(LatestRecords, saved, pace=UNTIMED, **lines)

    def _events(self, saved: Mapping[str, Any]) -> Events:
        state = self._line(rundir.EVENTS, saved["state"])
        alerts = {name: self._line(rundir.EVENTS, ref) for name, ref in saved["alerts"].items()}
        for name, line in alerts.items():
            record = line.record if line is not None else {}
            found = jsonl.text(record, "kind"), json_documents.line(record, "alert", "")
            if found != ("alert", name):
                raise ValueError("an alert is another event")
        if state is not None and jsonl.text(state.record, "kind") != "state":
            raise ValueError("a state is another event")
        told_ts = jsonl.mapping(saved, "told_ts")
        return Events(
            state,
            {name: line for name, line in alerts.items() if line},
            {str(name) for name in saved["acknowledged"]},
            {name: jsonl.number(told_ts, name) or 0.0 for name in told_ts},
            jsonl.integer(saved, "attempts"), jsonl.integer(saved, "stalls"),
        )  # fmt: skip


def _natural(value: Any) -> int:
    found = jsonl.integer({"": value}, "")
    if found is None or found < 0:
        raise ValueError(f"{value!r} is not a place")
    return found


def _place(value: Any) -> Place:
    part, at = value
    return Place(_natural(part), _natural(at))


def load_series(run: Path, reducer: Reducer) -> None:
    """Adds the spans from before the snapshot to the series.

    Call it before other records are added to the reducer.
    """
    for level in range(len(SPANS_S)):
        data = record_files.read_end(history(run, level), HISTORY_BYTES, run)
        reducer.series.add_history(level, data.split(b"\n"))
