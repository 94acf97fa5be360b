"""`snapshot.json`: the state of a run's records so far, so that nobody has to read them again.

It holds sums, and the places of the newest records. It counts only for the files that it was made
of: each is known by its name, its part and the hash of its first line, and the newest records have
to stand where it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.sources import documents, reading
from console.sources.fold import Fold
from console.sources.pace import UNTIMED
from console.sources.reading import Cursor, Line, Place, Reading, rank_of
from console.sources.reducer import HEAD_LINES, MAX_ATTEMPT, Events, Head, Reducer
from console.sources.series import RAW_RECORDS, SPANS_S, Series
from trainers.contract import VERSION, heartbeat, jsonl, rundir

MAX_BYTES, MAX_BYTES_OF_RANK = 64 << 10, 4 << 10
"""It is no longer than that, and than so much for each of more than 16 ranks."""
HISTORY_BYTES = 4 << 20
"""Bytes that are read of each resolution's history; a longer file is renamed to `.1`."""
POINTS_BYTES = 64 << 20
"""No more is read of the newest records for their points; without them the spans have to do."""


def max_bytes(ranks: int) -> int:
    return max(MAX_BYTES, ranks * MAX_BYTES_OF_RANK)


def history(run: Path, level: int) -> Path:
    """Returns the file of the spans of one resolution."""
    return run / f"history_{SPANS_S[level]}s.jsonl"


# --- written -----------------------------------------------------------------------------------


def document(reducer: Reducer, run: str, ts: float) -> dict[str, Any]:
    """Returns the snapshot of a state."""
    events = reducer.events
    return {
        "v": VERSION, "run": run, "ts": ts,
        "files": {
            name: {"head": each.head, "place": list(each.place), "skipped": each.skipped}
            for name, each in reducer.cursors.items()
        },
        "folds": {str(rank): fold.as_dict() for rank, fold in reducer.summary.folds.items()},
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
            "acknowledged": sorted(events.acknowledged), "told_ts": events.told_ts,
        },
        "charted": {name: list(places[0]) for name, places in reducer.charted.items()},
        "series": reducer.series.as_dict(),
    }  # fmt: skip


def _ref(line: Line | None) -> list[int] | None:
    """Returns where a line is: its part, its first byte and its length."""
    return None if line is None else [*line.place, line.length]


# --- read --------------------------------------------------------------------------------------


def load(
    run: Path, held: Mapping[str, Any] | None, reducer: Reducer, most_bytes: int | None = None
) -> bool:
    """Fills a new reducer from a snapshot; says whether it did: it has to fit the files.

    It does not where more than `most_bytes` were written since.
    """
    if held is None or held.get("v") != VERSION:
        return False
    try:
        _Loader(run, held, most_bytes).fill(reducer)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return False
    return True


class _Loader:
    """Reads one snapshot; what does not fit raises ValueError, or what its type leads to."""

    def __init__(self, run: Path, held: Mapping[str, Any], most_bytes: int | None):
        self._run, self._held, self._most_bytes = run, held, most_bytes
        self._cursors: dict[str, Cursor] = {}

    def fill(self, reducer: Reducer) -> None:
        self._cursors = cursors = self._read_cursors()
        folds = {
            int(rank): Fold.load(int(rank), fold) for rank, fold in self._held["folds"].items()
        }
        heads = {
            int(rank): {int(number): self._head(int(rank), int(number), each, folds)
                        for number, each in held.items()}
            for rank, held in self._held["heads"].items()
        }  # fmt: skip
        for rank, fold in folds.items():
            cursor = cursors.get(rundir.heartbeat(self._run, rank).name)
            headless = fold.newest not in heads.get(rank, {}) and 0 < fold.newest <= MAX_ATTEMPT
            if headless or cursor is None or not cursor.place.at:
                raise ValueError(f"nothing was read of rank {rank}")
        samples = {
            name: self._line(name, ref) for name, ref in self._held["samples"].items()
        }  # fmt: skip
        events = self._events(jsonl.mapping(self._held, "events"))
        charted = {
            name: deque([_place(place)], maxlen=RAW_RECORDS)
            for name, place in self._held["charted"].items()
        }
        series = Series(reducer.series.keeps)
        series.load(jsonl.mapping(self._held, "series"))
        # Nothing raises from here on: a reducer is filled as a whole, or not at all.
        reducer.cursors.update(cursors)  # whose `Reading` may have them already
        reducer.all_heads, reducer.events = heads, events
        reducer.summary.folds, reducer.series, reducer.charted = folds, series, charted
        reducer.newest_samples = {name: line for name, line in samples.items() if line}

    def _read_cursors(self) -> dict[str, Cursor]:
        found = {
            name: Cursor(
                jsonl.text(each, "head"), _place(each["place"]), _natural(each["skipped"])
            )
            for name, each in self._held["files"].items()
        }  # fmt: skip
        for name, cursor in found.items():
            known = name == rundir.EVENTS or rank_of(name) is not None
            known = known or (name.startswith(reading.SAMPLES) and "/" not in name)
            if not known or not cursor.fits(self._run / name):
                raise ValueError(f"{name} is not the file that was read")
        since = sum(jsonl.size_bytes(self._run / name) - each.place.at
                    for name, each in found.items() if rank_of(name) is not None)  # fmt: skip
        if self._most_bytes is not None and since > self._most_bytes:
            raise ValueError("it is of long ago")
        return found

    def _line(self, name: str, ref: Any) -> Line | None:
        """Returns the record that stands at a place, None where none is meant or left."""
        if ref is None:
            return None
        if name not in self._cursors:
            raise ValueError(f"{name} was not read")
        part, at, length = ref
        place = Place(_natural(part), _natural(at))
        record = reading.read_line(self._run / name, place, _natural(length))
        return Line(place, length, record) if record else None

    def _head(
        self, rank: int, attempt: int, held: Mapping[str, Any], folds: Mapping[int, Fold]
    ) -> Head:  # fmt: skip
        name, of = rundir.heartbeat(self._run, rank).name, {"rank": rank, "attempt": attempt}
        lines = {key: self._line(name, held.get(key)) for key in HEAD_LINES}
        for line in lines.values():
            record = heartbeat.accept(line.record) if line is not None else of
            if record is None or (record["rank"], record["attempt"]) != (rank, attempt):
                raise ValueError(f"{name} has another record")
        last, progress = lines["last"], lines["progress"]
        part = folds[rank].parts.get(attempt)
        whole = part if part is not None and not part.trouble else None
        if last is None or (whole and jsonl.integer(last.record, "n") != whole.last):
            raise ValueError(f"{name} has another newest record")
        if whole and whole.step != (progress.record["step"] if progress is not None else 0):
            raise ValueError(f"{name} has another newest step")
        return documents.read(Head, held, pace=UNTIMED, **lines)

    def _events(self, held: Mapping[str, Any]) -> Events:
        state = self._line(rundir.EVENTS, held["state"])
        alerts = {name: self._line(rundir.EVENTS, ref) for name, ref in held["alerts"].items()}
        for name, line in alerts.items():
            record = line.record if line is not None else {}
            told = jsonl.text(record, "kind"), documents.line(record, "alert", "")
            if told != ("alert", name):
                raise ValueError("an alert is another event")
        if state is not None and jsonl.text(state.record, "kind") != "state":
            raise ValueError("a state is another event")
        told_ts = jsonl.mapping(held, "told_ts")
        return Events(
            state,
            {name: line for name, line in alerts.items() if line},
            {str(name) for name in held["acknowledged"]},
            {name: jsonl.number(told_ts, name) or 0.0 for name in told_ts},
            jsonl.integer(held, "attempts"), jsonl.integer(held, "stalls"),
        )  # fmt: skip


def _natural(value: Any) -> int:
    found = jsonl.integer({"": value}, "")
    if found is None or found < 0:
        raise ValueError(f"{value!r} is no place")
    return found


def _place(value: Any) -> Place:
    part, at = value
    return Place(_natural(part), _natural(at))


def draw(run: Path, reducer: Reducer) -> None:
    """Adds what was recorded before the snapshot to the series: spans, and the newest points.

    Call it before anything else is taken.
    """
    for level in range(len(SPANS_S)):
        data = reading.read_end(history(run, level), HISTORY_BYTES, run)
        reducer.series.add_history(level, data.split(b"\n"))
    begin = {
        name: Cursor(reducer.cursors[name].head, places[0])
        for name, places in reducer.charted.items() if name in reducer.cursors
    }  # fmt: skip
    reducer.charted.clear()
    for batch in Reading(run, cursors=begin, only=begin.keys()).poll(POINTS_BYTES):
        reducer.take_points(batch)
        begin[batch.name] = batch.cursor
    for name, reached in begin.items():
        if reached.place < reducer.cursors[name].place:
            reducer.drop_points(name)
