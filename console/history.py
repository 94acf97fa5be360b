"""Bounded series of one run: what the charts draw and what rates, percentiles and ETA come from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MAX_POINTS = 4096
MAX_SERIES = 16_384
STEP_WINDOW = 200
UNITS = {
    "loss": "nats/token", "toks_per_s": "tok/s", "grad_norm": "", "lr": "", "step_s": "s",
    "gate_entropy_mean": "nats", "gate_entropy_min": "nats", "bytes_right": "share",
    "gpu_mem_alloc": "MiB", "gpu_mem_reserved": "MiB", "rss_mib": "MiB", "cpu_pct": "%",
    "gpu_util": "%", "gpu_mem_mib": "MiB", "gpu_power": "W", "mfu": "share",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one quantity, oldest first: (unix s, value)."""

    name: str
    unit: str
    points: tuple[tuple[float, float], ...]


class _Thinned:
    """A bounded series that halves its resolution, oldest points first, when it is full."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        if len(self.points) >= MAX_POINTS:
            kept = list(self.points)
            half = len(kept) // 2
            self.points = deque(kept[:half:2] + kept[half:])
        self.points.append((at, value))


class History:
    """Owned by one reader thread; `series` hands out immutable copies."""

    def __init__(self) -> None:
        self._series: dict[str, _Thinned] = {}
        self._versions: dict[str, int] = {}
        self.steps: deque[float] = deque(maxlen=STEP_WINDOW)
        self.step_points: deque[tuple[float, int]] = deque(maxlen=64)

    def add(self, name: str, at: float, value: float | None) -> None:
        """Appends one point; what is not a finite number is left out."""
        if value is None or not math.isfinite(value) or not math.isfinite(at):
            return
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                return
            series = self._series[name] = _Thinned()
        series.add(at, value)
        self._versions[name] = self._versions.get(name, 0) + 1

    def add_steps(self, at: float, step: int, durations: list[float]) -> None:
        """Takes the durations of the steps that ended with `step`."""
        finite = [d for d in durations if math.isfinite(d) and d >= 0]
        self.steps.extend(finite)
        self.step_points.append((at, step))
        if finite:
            self.add("step_s", at, sum(finite) / len(finite))

    def version(self, name: str) -> int:
        """Counts the points that ever came; unchanged means that a chart need not be drawn."""
        return self._versions.get(name, 0)

    def names(self) -> tuple[str, ...]:
        return tuple(self._series)

    def series(self, name: str, since: float = 0.0) -> Series:
        """Returns the points of a series from `since` on; empty when nothing was measured."""
        unit = UNITS.get(name.partition(":")[0], "")
        held = self._series.get(name)
        points = tuple(held.points) if held else ()
        return Series(name, unit, tuple(p for p in points if p[0] >= since) if since else points)

    def step_percentiles_s(self) -> tuple[float, float, int] | None:
        """Returns p50 and p99 of the last steps' durations and how many steps that are."""
        steps = sorted(self.steps)
        if not steps:
            return None
        return _quantile(steps, 0.5), _quantile(steps, 0.99), len(steps)

    def eta_s(self, step: int, planned: int) -> float | None:
        """Returns seconds to the planned step at the measured pace, pauses included."""
        if len(self.step_points) < 2 or planned <= step:
            return 0.0 if planned and planned <= step else None
        (t0, s0), (t1, s1) = self.step_points[0], self.step_points[-1]
        if s1 <= s0 or t1 <= t0:
            return None
        return (planned - step) * (t1 - t0) / (s1 - s0)


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
