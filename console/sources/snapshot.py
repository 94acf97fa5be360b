"""Makes and reads snapshots: the state of a reducer after the records so far.

A snapshot has totals and the places of the newest records. It is valid only for the files from
which it was made. A file is identified by its name, part and the hash of its first line. The newest
records must still be at their places.

A dataclass is stored as a mapping from field names to values; default values are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from console.sources import record_files
from console.sources.rank_totals import RankTotals
from console.sources.record_files import Cursor, Line, rank_of
from console.sources.reducer import MAX_ATTEMPT, Events, LatestRecords, Reducer
from console.sources.sanitize import clean
from console.sources.series import PACE_WINDOW, SPANS_S, STEP_WINDOW, Span, Thinner
from console.sources.summary import GpuTotals
from trainers.contract import heartbeat, jsonl, rundir

VERSION = 3
"""The format of snapshot.json; a reader ignores another version and reads the files instead."""
MAX_BYTES, MAX_BYTES_OF_RANK, MAX_BYTES_OF_ATTEMPT = 64 << 10, 4 << 10, 512
"""The largest size of a snapshot, the largest size per rank for more than 16 ranks, and an
additional size for each attempt of a rank."""
HISTORY_BYTES = 4 << 20
"""The most bytes read of a history file and its `.1`; a file of this size is renamed to `.1`."""
WARM_UP_BYTES = 256 << 10
"""Bytes before the snapshot from which a reader learns how long steps usually take."""
INVALID = AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError
"""The errors that a snapshot with invalid content may cause."""


def max_bytes(ranks: Mapping[int, RankTotals]) -> int:
    """Returns the largest size of a snapshot; no reader reads a longer document."""
    more = MAX_BYTES_OF_ATTEMPT * sum(len(each.attempts) for each in ranks.values())
    return min(max(MAX_BYTES, len(ranks) * MAX_BYTES_OF_RANK) + more, rundir.MAX_DOCUMENT_BYTES)


def history(run: Path, level: int) -> Path:
    """Returns the path of the history file for one resolution."""
    return run / f"history_{SPANS_S[level]}s.jsonl"


# --- writing -----------------------------------------------------------------------------------


def document(reducer: Reducer, run: str, ts: float) -> dict[str, Any]:
    """Returns the snapshot of a reducer."""
    summary, series = reducer.summary, reducer.series
    return {"v": VERSION, "run": run, "ts": ts} | plain({
        "files": reducer.cursors, "folds": summary.ranks, "gpus": summary.gpus,
        "loaded": summary.loaded, "overrides": summary.overrides, "heads": reducer.all_heads,
        "samples": reducer.newest_samples, "events": reducer.events, "spans": series.thinners,
        "durations_s": series.durations_s, "ends": series.ends,
    })  # fmt: skip


def plain(value: Any) -> Any:
    """Returns a value in the form in which JSON stores it; a line becomes its place and length."""
    if isinstance(value, Line):
        return [*value.place, value.length]
    if is_dataclass(value):
        found = ((each, getattr(value, each.name)) for each in fields(value) if each.compare)
        return {each.name: plain(x) for each, x in found if x != _default(each)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque | set):
        return [plain(each) for each in value]
    return value


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


# --- reading -----------------------------------------------------------------------------------


def load(
    run: Path, saved: Mapping[str, Any] | None, reducer: Reducer, most_bytes: int | None = None
) -> bool:
    """Fills a new reducer from a snapshot; returns whether the snapshot is valid for the files.

    A snapshot is not valid if more than `most_bytes` of heartbeat records were written after it.
    """
    if saved is None or saved.get("v") != VERSION:
        return False
    try:
        _fill(run, saved, reducer, most_bytes)
    except INVALID:
        return False
    if reducer.timed:
        _warm_up(run, reducer)
    return True


def _fill(run: Path, saved: Mapping[str, Any], reducer: Reducer, most_bytes: int | None) -> None:
    """Fills a reducer. Raises one of `INVALID` for invalid content."""
    cursors = _read(dict[str, Cursor], saved["files"])
    _check_files(run, cursors, most_bytes)
    ranks = _read(dict[int, RankTotals], saved["folds"])
    heads = {
        int(rank): _read(dict[int, LatestRecords], each, rundir.heartbeat(run, int(rank)))
        for rank, each in saved["heads"].items()
    }
    for rank, found in heads.items():
        _check_heads(rank, found, ranks[rank])
    for rank, totals in ranks.items():
        cursor = cursors.get(rundir.heartbeat(run, rank).name)
        headless = totals.newest not in heads.get(rank, {}) and 0 < totals.newest <= MAX_ATTEMPT
        if headless or totals.newest not in totals.attempts or not (cursor and cursor.place.at):
            raise ValueError(f"rank {rank} has no records")
    if not {*saved["samples"]} <= cursors.keys():
        raise ValueError("a sample is of another file")
    samples = {name: _read(Line, ref, run / name) for name, ref in saved["samples"].items()}
    events = _read(Events, saved["events"], run / rundir.EVENTS)
    thinners = _read(dict[str, Thinner], saved["spans"])
    for thinner in thinners.values():
        if not thinner.is_valid:
            raise ValueError("a span is not valid")
    durations_s = _read(list[float], saved["durations_s"])[-STEP_WINDOW:]
    ends = _read(list[tuple[float, int]], saved["ends"])[-PACE_WINDOW:]
    gpus = _read(GpuTotals, saved["gpus"])
    loaded = _read(dict[int, int], saved["loaded"])
    overrides = _read(dict[str, str], saved["overrides"])
    # Nothing raises from here on, so the reducer is filled completely or not at all.
    reducer.cursors.update(cursors)  # in place, because `RecordFiles` may share them
    reducer.all_heads, reducer.events, reducer.newest_samples = heads, events, samples
    summary, series = reducer.summary, reducer.series
    summary.ranks, summary.gpus = ranks, gpus
    summary.loaded, summary.overrides = loaded, overrides
    series.load(thinners)
    series.durations_s.extend(durations_s)
    series.ends.extend(ends)


def _check_files(run: Path, cursors: Mapping[str, Cursor], most_bytes: int | None) -> None:
    """Raises ValueError if a file was replaced, or if too many bytes follow the snapshot."""
    since = 0
    for name, cursor in cursors.items():
        rank, path = rank_of(name), run / name
        known = name == rundir.EVENTS or rank is not None
        known = known or (name.startswith(record_files.SAMPLES) and "/" not in name)
        if not known or min(cursor.place) < 0 or not cursor.fits(path):
            raise ValueError(f"{name} is another file")
        since += jsonl.size_bytes(path) - cursor.place.at if rank is not None else 0
    if most_bytes is not None and since > most_bytes:
        raise ValueError("the snapshot is too old")


def _check_heads(rank: int, heads: Mapping[int, LatestRecords], totals: RankTotals) -> None:
    """Raises ValueError if the newest records of a rank do not belong to its totals."""
    for attempt, head in heads.items():
        for line in (head.last, head.progress, head.figures, head.error, head.ended):
            record = heartbeat.accept(line.record) if line is not None else {}
            if record is None or (line and (record["rank"], record["attempt"]) != (rank, attempt)):
                raise ValueError(f"rank {rank} has another record")
        part = totals.attempts.get(attempt)
        if part is not None and not part.trouble:
            step = head.progress.record["step"] if head.progress is not None else 0
            if (part.last, part.step) != (jsonl.integer(head.last.record, "n"), step):
                raise ValueError(f"rank {rank} has another newest record")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the class of a type and its arguments; for a named tuple, the types of the fields."""
    fields_of = tuple(_hints(kind).values()) if hasattr(kind, "_fields") else ()
    return get_origin(kind) or kind, fields_of or get_args(kind)


def _read(kind: Any, value: Any, file: Path | None = None, empty: Any = None) -> Any:
    """Returns an object of the type `kind` from the form in which `plain` returned it.

    Raises one of `INVALID` for any other value. `file` is the file that contains the lines. A deque
    gets the maximum length of `empty`.
    """
    if kind is float and type(value) is float:
        return value  # most values of a snapshot
    if kind is float or kind is int:
        found = (jsonl.number if kind is float else jsonl.integer)({"": value}, "")
        if found is None:
            raise TypeError(f"{value!r} is not a number")
        return found
    if kind is Line:
        return _line(value, file)
    origin, args = _origin_and_args(kind)
    if type(None) in args:
        return None if value is None else _read(args[0], value, file, empty)
    if is_dataclass(origin):
        return _object(kind, value, file, empty)
    if issubclass(origin, tuple):
        kinds = (args[0],) * len(value) if ... in args else args
        read = (_read(each, x, file) for each, x in zip(kinds, value, strict=True))
        return kind(*read) if origin is not tuple else tuple(read)
    if origin is dict:
        return {args[0](key): _read(args[1], each, file) for key, each in value.items()}
    if args and isinstance(value, list):
        read = (_read(args[0], each, file) for each in value)
        return deque(read, empty.maxlen) if origin is deque else origin(read)
    if type(value) is not kind:
        raise TypeError(f"{value!r} has another type")
    return clean(value) if kind is str else value


def _object(kind: Any, saved: Mapping[str, Any], file: Path | None, empty: Any) -> Any:
    """Returns an object of the dataclass `kind`; `kind` may be generic, such as `Rows[Step]`."""
    values = {}
    for each, hint in _kinds_of_fields(kind):
        if each.name in saved:
            default = getattr(empty, each.name) if empty is not None else _default(each)
            values[each.name] = _read(hint, saved[each.name], file, default)
    return replace(empty, **values) if empty is not None else kind(**values)


@cache
def _kinds_of_fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Returns the stored fields of a dataclass with their types."""
    origin, args = _origin_and_args(kind)
    hints = {name: hint[args] if getattr(hint, "__parameters__", ()) else hint
             for name, hint in _hints(origin).items()}  # fmt: skip
    return [(each, hints[each.name]) for each in fields(origin) if each.compare]


def _line(ref: Any, file: Path | None) -> Line:
    """Returns the line at a place. Raises ValueError if there is no record."""
    part, at, length = _read(tuple[int, int, int], ref)
    place = record_files.Place(part, at)
    record = record_files.read_line(file, place, length) if file and min(place) >= 0 else {}
    if not record:
        raise ValueError("a record is not at its place")
    return Line(place, length, record)


def _warm_up(run: Path, reducer: Reducer) -> None:
    """Adds the last heartbeat records before the snapshot to the pace of their ranks."""
    for name, cursor in reducer.cursors.items():
        rank = rank_of(name)
        if rank is not None:
            begin = max(0, cursor.place.at - WARM_UP_BYTES)
            data = jsonl.read_bytes(run / name, cursor.place.at - begin, begin)
            for line in data.split(b"\n")[begin > 0 :]:
                record = heartbeat.accept(jsonl.decode(line) or {})
                if record is not None and record["rank"] == rank:
                    reducer.warm_up(record)


def load_series(run: Path, reducer: Reducer) -> None:
    """Adds the spans from before the snapshot to the series.

    Call this function before other records are added to the reducer.
    """
    for level in range(len(SPANS_S)):
        reducer.series.add_history(level, _spans(run, level, reducer.series.only))


def _spans(run: Path, level: int, only: Collection[str]) -> Iterator[Span]:
    """Yields the valid spans of a history file, the newest first, with the bands in `only`."""
    data = record_files.read_end(history(run, level), HISTORY_BYTES, run)
    stop = len(data)
    while stop > 0:
        start = data.rfind(b"\n", 0, stop) + 1
        saved = jsonl.decode(data[start:stop]) or {}
        stop = start - 1
        if only:
            bands = jsonl.mapping(saved, "bands")
            saved["bands"] = {name: bands[name] for name in only if name in bands}
        try:
            span = _read(Span, saved)
        except INVALID:
            continue
        if span.is_valid:
            yield span
