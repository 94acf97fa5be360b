"""Bounded series of one run: what the charts draw and what rates, percentiles and ETA come from."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque

MAX_POINTS = 4096
MAX_SERIES = 16_384
STEP_WINDOW = 200
AHEAD_S = 60.0
LATEST_S = 1 << 40
"""Later than this no calendar knows a date."""
Points = tuple[tuple[float, float], ...]
"""Points of one quantity, oldest first: (unix s, value)."""


class History:
    """Owned by one reader thread; `series` hands out immutable copies."""

    def __init__(self) -> None:
        self._series: dict[str, list[tuple[float, float]]] = {}
        self._newest: dict[str, float] = {}
        """The time of the point that each series took last."""
        self._durations_s: deque[float] = deque(maxlen=STEP_WINDOW)
        self._ends: deque[tuple[float, int]] = deque(maxlen=64)

    def add(self, name: str, at: float, value: float | None) -> None:
        """Takes one point; what is not a finite number, or at no time, is left out.

        A clock that was set back brings points out of order; they stand in order all the same.
        A series that is full halves the resolution of its older half.
        """
        if value is None or not math.isfinite(value) or not 0 <= at < LATEST_S:
            return
        if name not in self._series and len(self._series) >= MAX_SERIES:
            return
        points = self._series.setdefault(name, [])
        if len(points) >= MAX_POINTS:
            del points[1 : MAX_POINTS // 2 : 2]
        self._newest[name] = at
        if points and at < points[-1][0]:
            insort(points, (at, value))
        else:
            points.append((at, value))

    def add_steps(self, at: float, step: int, durations: list[float]) -> None:
        """Takes the durations of the steps that ended with `step`."""
        finite = [d for d in durations if math.isfinite(d) and d >= 0]
        self._durations_s.extend(finite)
        if durations:
            self._ends.append((at, step))
        if finite:
            self.add("step_s", at, sum(finite) / len(finite))

    def series(self, name: str) -> Points:
        """Returns the points of a series; empty when nothing was measured.

        Without those more than `AHEAD_S` after the point that came last: their clock was ahead.
        """
        points = self._series.get(name, [])
        end = bisect_right(points, (self._newest.get(name, 0.0) + AHEAD_S, math.inf))
        return tuple(points[:end])

    def step_percentiles_s(self) -> tuple[float, float, int] | None:
        """Returns p50 and p99 of the last steps' durations and how many steps that are."""
        steps = sorted(self._durations_s)
        if not steps:
            return None
        p50, p99 = (steps[round(q * (len(steps) - 1))] for q in (0.5, 0.99))
        return p50, p99, len(steps)

    def eta_s(self, step: int, planned: int) -> float | None:
        """Returns seconds to the planned step at the measured pace, pauses included."""
        if planned <= step:
            return 0.0
        if len(self._ends) < 2:
            return None
        (t0, s0), (t1, s1) = self._ends[0], self._ends[-1]
        if s1 <= s0 or t1 <= t0:
            return None
        return (planned - step) * (t1 - t0) / (s1 - s0)
