"""Stores the time series of one run, for example for the charts and the ETA.

The newest records of a file are stored as points. Older times are stored as spans of 10 s, 1 min,
10 min and 2 h, each with its smallest and largest value. A span begins at a multiple of its width,
so its limits do not depend on the reader.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median, median_low

RAW_RECORDS = 600
SPANS_S, KEPT_SPANS = (10, 60, 600, 7200), (1080, 1440, 4032, 4032)
"""The widths of the spans, and how many are used: 3 hours, a day, 4 weeks, 11 months."""
MAX_SERIES, MAX_ENDED = 16_384, 10_000
STEP_WINDOW, PACE_WINDOW, PAUSE = 200, 64, 5
AHEAD_S = 60.0
LATEST_S = 1 << 40
"""`Series.add` ignores records from this time (unix s) on: such a time cannot be right."""
Point = tuple[float, float]
"""A time (unix s) and a value."""
Points = tuple[Point, ...]
"""Points of one quantity, oldest first."""
Values = tuple[float, Mapping[str, float]]
"""The time (unix s) and the values of one record."""
Band = tuple[float, float]
"""The smallest and the largest value."""
Bin = Band | None
"""The band of one column of a chart, or None for a column without a point."""


@dataclass(frozen=True, slots=True)
class Span:
    """The bands of one file's quantities in one span of time, which begins at `ts`."""

    of: str
    """The name of the file."""
    level: int
    ts: float
    bands: dict[str, Band]

    @property
    def is_valid(self) -> bool:
        """True if the span has a valid time and level, and bands of two finite numbers in order."""
        bands = self.bands.values()
        in_order = all(-math.inf < low <= high < math.inf for low, high in bands)
        return in_order and 0 <= self.ts < LATEST_S and 0 <= self.level < len(SPANS_S)


@dataclass(slots=True)
class Thinner:
    """Reduces the points of one file to spans, independently of other files."""

    records: int = 0
    first_ts: float = 0.0
    """The earliest time of a record."""
    now: list[Span | None] = field(default_factory=lambda: [None] * len(SPANS_S))
    """The open span of each level, or None."""

    def add(self, file: str, at: float, values: Mapping[str, float]) -> Iterator[Span]:
        """Adds the values of one record; yields the spans that this record closes."""
        self.first_ts = min(self.first_ts, at) if self.records else at
        self.records += 1
        for level, width_s in enumerate(SPANS_S):
            begin = at // width_s * width_s
            span = self.now[level]
            if span is None or span.ts != begin:
                if span is not None:
                    yield span
                span = self.now[level] = Span(file, level, begin, {})
            for name, value in values.items():
                low, high = span.bands.get(name, (value, value))
                span.bands[name] = min(low, value), max(high, value)

    @property
    def is_valid(self) -> bool:
        """True if each level has an open span that is valid, or none."""
        return len(self.now) == len(SPANS_S) and all(
            span is None or span.is_valid for span in self.now
        )

    def has_ended(self, span: Span) -> bool:
        """Returns whether a span is older than the open span of its level."""
        now = self.now[span.level]
        return now is not None and span.ts < now.ts


class _Spans:
    """The newest spans of one quantity at one resolution; `points` uses at most `most` of them."""

    def __init__(self, most: int):
        self._most = most
        self._ats, self._lows, self._highs = (array("d") for _ in range(3))
        self._points: list[tuple[float, float]] | None = None

    def extend(self, spans: Sequence[Span], name: str) -> None:
        """Adds spans in the order in which they ended; each must contain the quantity `name`."""
        bands = [span.bands[name] for span in spans]
        for values, more in (
            (self._ats, [span.ts for span in spans]), (self._lows, [low for low, _ in bands]),
            (self._highs, [high for _, high in bands]),
        ):  # fmt: skip
            values.extend(more)
            if len(values) >= 2 * self._most:
                del values[: -self._most]
        self._points = None

    def points(self) -> list[tuple[float, float]]:
        """Returns the smallest and the largest value of each of the newest spans, in time order."""
        if self._points is None:
            first, self._points = max(0, len(self._ats) - self._most), []
            rows = zip(self._ats[first:], self._lows[first:], self._highs[first:], strict=True)
            for at, low, high in sorted(rows):
                self._points += [(at, low)] if low == high else [(at, low), (at, high)]
        return self._points


class _Newest:
    """The points of one quantity in the newest records of its file."""

    def __init__(self) -> None:
        self._records = self._rows = 0
        """The number of records of the file, and of stored rows, when the points were taken."""
        self._points: deque[Point] = deque()

    def points(self, name: str, rows: Collection[Values], records: int) -> list[Point]:
        """Returns the points in `rows`, the newest of `records` records, in their order.

        Only new rows are read, unless the quantity is absent from some rows.
        """
        added = min(len(rows), records - self._records)
        new = _points_in(islice(rows, len(rows) - added, None), name)
        if len(self._points) == self._rows and len(new) == added:
            self._points += new
            for _ in range(len(self._points) - len(rows)):
                self._points.popleft()
        else:
            self._points = deque(_points_in(rows, name))
        self._records, self._rows = records, len(rows)
        return list(self._points)


def _points_in(rows: Iterable[Values], name: str) -> list[Point]:
    return [(at, values[name]) for at, values in rows if name in values]


class Series:
    """The series of one run. Only one thread at a time may use it; `points` returns tuples.

    Without `keeps` no points are stored, and ended spans wait in `ended` to be written. If `only`
    has names, other quantities are ignored.
    """

    def __init__(self, keeps: bool = True, only: Collection[str] = ()) -> None:
        self.keeps, self.only = keeps, only
        self._rows: dict[str, deque[Values]] = {}
        """The values of the newest records of each file."""
        self._newest: dict[str, _Newest] = {}
        """By quantity: its points in the newest records, if `points` has been called for it."""
        self._files: dict[str, str] = {}
        """The file of each quantity."""
        self._spans: dict[tuple[str, int], _Spans] = {}
        self.thinners: dict[str, Thinner] = {}
        """The open spans of each file."""
        self.ended: deque[Span] = deque(maxlen=MAX_ENDED)
        self._built: dict[str, tuple[int, Points]] = {}
        """By quantity: its points, after the number of records in its file when they were built."""
        self.durations_s: deque[float] = deque(maxlen=STEP_WINDOW)
        self._steps = 0
        """The number of durations that `add_steps` has added."""
        self.ends: deque[tuple[float, int]] = deque(maxlen=PACE_WINDOW)
        """The time and the step of the newest records with step durations."""

    def add(self, file: str, at: float, values: Mapping[str, float | None]) -> None:
        """Adds the values of one record of a file, except None and values that are not finite.

        A value is also left out if its quantity belongs to another file, if `only` excludes it, or
        if there are already `MAX_SERIES` other quantities. A record without a valid time is
        ignored. If a clock was set back, times may be out of order.
        """
        if not 0 <= at < LATEST_S:
            return
        known = {
            name: value for name, value in values.items()
            if value is not None and math.isfinite(value) and self._is_in(name, file)
        }  # fmt: skip
        if self.keeps:
            self._rows.setdefault(file, deque(maxlen=RAW_RECORDS)).append((at, known))
        thinner = self.thinners.setdefault(file, Thinner())
        for span in thinner.add(file, at, {name: float(f"{v:.6g}") for name, v in known.items()}):
            self._add_spans(file, span.level, [span])

    def _add_spans(self, file: str, level: int, spans: Sequence[Span]) -> None:
        if not self.keeps:
            self.ended += spans
            return
        for name in {name for span in spans for name in span.bands}:
            self._built.pop(name, None)
            if self._is_in(name, file):
                saved = self._spans.setdefault((name, level), _Spans(KEPT_SPANS[level]))
                saved.extend([span for span in spans if name in span.bands], name)

    def _is_in(self, name: str, file: str) -> bool:
        if self.only and name not in self.only:
            return False
        if name not in self._files and len(self._files) < MAX_SERIES:
            self._files[name] = file
        return self._files.get(name) == file

    @property
    def names(self) -> frozenset[str]:
        """The names of the quantities that have had a value."""
        return frozenset(self._files)

    def add_steps(self, at: float, step: int, durations: Sequence[float]) -> None:
        """Adds the valid durations of the last steps up to `step`, from a record of time `at`."""
        valid = _valid_durations(durations)
        self.durations_s.extend(valid)
        self._steps += len(valid)
        if durations:
            self.ends.append((at, step))

    def points(self, name: str) -> Points:
        """Returns the points of a series, coarser for older times, or () if there are none.

        Points more than `AHEAD_S` later than the last added point are dropped, because the clock
        was ahead.
        """
        of = self._files.get(name, "")
        rows, thinner = self._rows.get(of, ()), self.thinners.get(of)
        if thinner is None:
            return ()
        if self._built.get(name, (-1, ()))[0] != thinner.records:
            self._built[name] = thinner.records, self._build(name, rows, thinner)
        return self._built[name][1]

    def _build(self, name: str, rows: Collection[Values], thinner: Thinner) -> Points:
        newest = self._newest.setdefault(name, _Newest())
        found = newest.points(name, rows, thinner.records)
        until = found[-1][0] + AHEAD_S if found else math.inf
        found.sort()
        del found[bisect_right(found, (until, math.inf)) :]
        if len(rows) == thinner.records:
            return tuple(found)
        now = thinner.now[0]
        if now is not None and name in now.bands and not found:
            found = [(now.ts, value) for value in sorted({*now.bands[name]})]
        for level in range(len(SPANS_S)):
            if found and found[0][0] <= thinner.first_ts:
                break
            until = min(until, found[0][0]) if found else until
            spans = self._spans.get((name, level))
            older = spans.points() if spans is not None else []
            found[:0] = older[: bisect_left(older, (until, -math.inf))]
        return tuple(found)

    def newest_steps_s(self, warm_up: int) -> list[float]:
        """Returns the durations of the newest steps.

        Steps from a snapshot, and the first `warm_up` steps that were added, are left out.
        """
        left_out = max(0, warm_up - (self._steps - len(self.durations_s)))
        return list(self.durations_s)[left_out:]

    def step_percentiles_s(self) -> tuple[float, float, int] | None:
        """Returns p50 and p99 of the last step durations, and the number of steps, or None.

        At most one step in a hundred takes longer than p99.
        """
        steps = sorted(self.durations_s)
        if not steps:
            return None
        return median(steps), steps[math.ceil(0.99 * len(steps)) - 1], len(steps)

    def eta_s(self, step: int, planned: int) -> float | None:
        """Returns the seconds to the planned step: 0 if it is reached, None without a known speed.

        The speed is that of the newest records, with pauses between them. But the time between two
        records is cut to `PAUSE` times its usual length, so that one stall hardly changes the
        result. A long save thus counts only in part.
        """
        if planned <= step:
            return 0.0
        spans = [
            (t1 - t0, s1 - s0) for (t0, s0), (t1, s1) in pairwise(self.ends) if t1 > t0 and s1 > s0
        ]
        if not spans:
            return None
        usual_s = median_low(took_s / steps for took_s, steps in spans)
        paced_s = math.fsum(min(took_s, PAUSE * usual_s * steps) for took_s, steps in spans)
        return (planned - step) * paced_s / sum(steps for _, steps in spans)

    # --- the history before a snapshot ---------------------------------------------------------

    def load(self, thinners: dict[str, Thinner]) -> None:
        """Replaces the open spans."""
        self.thinners = thinners
        for of, thinner in thinners.items():
            for name in {name for span in filter(None, thinner.now) for name in span.bands}:
                self._is_in(name, of)

    def add_history(self, level: int, newest_first: Iterable[Span]) -> None:
        """Adds the spans of a level that had ended when the snapshot was written.

        Reading stops when as many spans of each file were found as a series uses.
        """
        found: dict[str, dict[float, Span]] = {of: {} for of in self.thinners}
        for span in newest_first:
            if span.level == level and span.of in found and self.thinners[span.of].has_ended(span):
                found[span.of][span.ts] = span
                if all(len(each) >= KEPT_SPANS[level] for each in found.values()):
                    break
        for of, saved in found.items():
            self._add_spans(of, level, [saved[ts] for ts in sorted(saved)])


def _valid_durations(durations: Sequence[float]) -> list[float]:
    return [d for d in durations if math.isfinite(d) and d >= 0]


def mean_step_s(durations: Sequence[float]) -> float | None:
    """Returns the mean of the valid step durations, or None if there is none."""
    valid = _valid_durations(durations)
    return sum(valid) / len(valid) if valid else None


def bins(
    points: Sequence[Point], start: float, span: float, count: int, first: int = 0
) -> tuple[Bin, ...]:  # fmt: skip
    """Returns the smallest and largest value of each column, from the column `first` on.

    The points must be in order of time.
    """
    edges = start + first * span / count, start + span
    begin, end = (bisect_left(points, (edge, -math.inf)) for edge in edges)
    ats, values = zip(*points[begin:end], strict=True) if begin < end else ((), ())
    found: list[Bin] = [None] * (count - first)
    begin, column = 0, first
    while begin < len(ats):
        column += 1
        after = start + column * span / count
        stop = bisect_left(ats, after, begin) if column < count else len(ats)
        if part := values[begin:stop]:
            found[column - 1 - first] = min(part), max(part)
        begin = stop
    return tuple(found)
