"""Makes and reads snapshots of a reducer, for example of its totals, events and open spans.

A snapshot is valid only for the files from which it was made. A file is identified by its name,
part and the hash of its first line. `RecordFiles` reads the newest heartbeat records before the
snapshot again.

A dataclass is stored as a mapping from field names to values; default values are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from console.sources import record_files
from console.sources.rank_totals import RankTotals
from console.sources.record_files import Cursor, rank_of
from console.sources.reducer import Events, Reducer
from console.sources.sanitize import clean
from console.sources.series import PACE_WINDOW, SPANS_S, STEP_WINDOW, Span, Thinner
from console.sources.summary import GpuTotals
from trainers.contract import heartbeat, jsonl, rundir

VERSION = 8
"""The format of snapshot.json; a reader ignores another version and reads the files instead."""
HISTORY_BYTES = 4 << 20
"""The most bytes read of a history file and its `.1`; a file of this size is renamed to `.1`."""
CHECKED_BYTES = 4 << 10
"""Bytes before a heartbeat's cursor whose records are compared with the totals."""
FLOATS = float, float | None
INVALID = AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError
"""The errors that a snapshot with invalid content may cause."""


def history(run: Path, level: int) -> Path:
    """Returns the path of the history file for one resolution."""
    return run / f"history_{SPANS_S[level]}s.jsonl"


# --- writing -----------------------------------------------------------------------------------


def document(reducer: Reducer, run: str, ts: float) -> dict[str, Any]:
    """Returns the snapshot of a reducer."""
    summary, series = reducer.summary, reducer.series
    return {"v": VERSION, "run": run, "ts": ts} | plain({
        "files": reducer.cursors, "folds": summary.ranks, "gpus": summary.gpus,
        "loaded": summary.loaded, "overrides": summary.overrides,
        "samples": reducer.newest_samples, "events": reducer.events, "spans": series.thinners,
        "durations_s": series.durations_s, "ends": series.ends,
    })  # fmt: skip


def plain(value: Any) -> Any:
    """Returns a value in the form in which JSON stores it."""
    if is_dataclass(value):
        found = ((each, getattr(value, each.name)) for each in fields(value))
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
    return True


def _fill(run: Path, saved: Mapping[str, Any], reducer: Reducer, most_bytes: int | None) -> None:
    """Fills a reducer. Raises one of `INVALID` for invalid content."""
    cursors = _read(dict[str, Cursor], saved["files"])
    _check_files(run, cursors, most_bytes)
    ranks = _read(dict[int, RankTotals], saved["folds"])
    for rank, totals in ranks.items():
        cursor = cursors.get(rundir.heartbeat(run, rank).name)
        if totals.newest not in totals.attempts or not (cursor and cursor.at):
            raise ValueError(f"rank {rank} has no records")
        _check_newest(rundir.heartbeat(run, rank), cursor, totals)
    samples = _read(dict[str, dict[str, Any]], saved["samples"])
    events = _read(Events, saved["events"])
    thinners = _read(dict[str, Thinner], saved["spans"])
    if not all(thinner.is_valid for thinner in thinners.values()):
        raise ValueError("a span is not valid")
    durations_s = _read(list[float], saved["durations_s"])[-STEP_WINDOW:]
    ends = _read(list[tuple[float, int]], saved["ends"])[-PACE_WINDOW:]
    gpus = _read(GpuTotals, saved["gpus"])
    loaded = _read(dict[int, int], saved["loaded"])
    overrides = _read(dict[str, str], saved["overrides"])
    # Nothing raises from here on, so the reducer is filled completely or not at all.
    reducer.cursors.update(cursors)  # in place, because `RecordFiles` may share them
    reducer.events, reducer.newest_samples = events, samples
    summary, series = reducer.summary, reducer.series
    summary.ranks, summary.gpus = ranks, gpus
    summary.loaded, summary.overrides = loaded, overrides
    series.load(thinners)
    series.durations_s.extend(durations_s)
    series.ends.extend(ends)


def _check_files(run: Path, cursors: Mapping[str, Cursor], most_bytes: int | None) -> None:
    """Raises ValueError if a file does not fit its cursor, or too many heartbeat bytes follow."""
    since = 0
    for name, cursor in cursors.items():
        rank, path = rank_of(name), run / name
        known = name == rundir.EVENTS or rank is not None
        known = known or (name.startswith(record_files.SAMPLES) and "/" not in name)
        if not known or min(cursor.part, cursor.at) < 0 or not cursor.fits(path):
            raise ValueError(f"{name} is another file")
        since += jsonl.size_bytes(path) - cursor.at if rank is not None else 0
    if most_bytes is not None and since > most_bytes:
        raise ValueError("the snapshot is too old")


def _check_newest(path: Path, cursor: Cursor, totals: RankTotals) -> None:
    """Raises ValueError if the newest record before the cursor is not the newest of the totals.

    Totals with a `trouble` are accepted, and so are totals whose attempt has no record there.
    """
    part = totals.attempts[totals.newest]
    begin = max(0, cursor.at - CHECKED_BYTES)
    data = jsonl.read_bytes(path, cursor.at - begin, begin)
    lines = data.split(b"\n")[begin > 0 :]
    records = [heartbeat.accept(jsonl.decode(line) or {}) for line in lines]
    found = [
        (jsonl.integer(each, "n") or 0, each["msg"], each["step"])
        for each in records
        if each and (each["rank"], each["attempt"]) == (totals.rank, totals.newest)
    ]
    found.sort()  # a record may be in the file twice
    steps = [step for _, msg, step in found if msg == "progress"]
    numbers = [number for number, *_ in found]
    same = numbers[-1:] in ([], [part.last]) and steps[-1:] in ([], [part.step])
    if not same and not part.trouble:
        raise ValueError(f"rank {totals.rank} has another newest record")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the class of a type and its arguments; for a named tuple, the types of the fields."""
    fields_of = tuple(_hints(kind).values()) if hasattr(kind, "_fields") else ()
    return get_origin(kind) or kind, fields_of or get_args(kind)


def _read(kind: Any, value: Any, empty: Any = None) -> Any:
    """Returns an object of the type `kind` from the form in which `plain` returned it.

    May raise one of `INVALID` for a value in another form. A deque gets the maximum length of
    `empty`.
    """
    if value.__class__ is float and kind in FLOATS:
        return value  # most values of a snapshot
    if kind is float or kind is int:
        found = (jsonl.number if kind is float else jsonl.integer)({"": value}, "")
        if found is None:
            raise TypeError(f"{value!r} is not a number")
        return found
    if kind is str and isinstance(value, str):
        return clean(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is Any:
        return value
    origin, args = _origin_and_args(kind)
    if type(None) in args:
        return None if value is None else _read(args[0], value)
    if is_dataclass(origin):
        return _object(kind, value)
    if issubclass(origin, tuple):
        kinds = (args[0],) * len(value) if ... in args else args
        read = (_read(each, x) for each, x in zip(kinds, value, strict=True))
        return kind(*read) if origin is not tuple else tuple(read)
    if origin is dict:
        return {args[0](key): _read(args[1], each) for key, each in value.items()}
    if args and isinstance(value, list):
        read = (_read(args[0], each) for each in value)
        return deque(read, empty.maxlen) if origin is deque else origin(read)
    raise TypeError(f"{value!r} has another type")


def _object(kind: Any, saved: Mapping[str, Any]) -> Any:
    """Returns an object of the dataclass `kind`."""
    hints = _hints(kind)
    return kind(**{
        each.name: _read(hints[each.name], saved[each.name], _default(each))
        for each in fields(kind) if each.name in saved
    })  # fmt: skip


def load_series(run: Path, reducer: Reducer) -> None:
    """Adds the spans from before the snapshot to the series.

    Call this function before other records are added to the reducer.
    """
    for level in range(len(SPANS_S)):
        reducer.series.add_history(level, _spans(run, level, reducer.series.only))


def _spans(run: Path, level: int, only: Collection[str]) -> Iterator[Span]:
    """Yields the valid spans of a history file, the newest first; `only` selects the bands."""
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
