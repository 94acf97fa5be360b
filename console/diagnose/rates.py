"""Compares the throughput in the newest records of a run with the earlier throughput."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOWS = (8, 32, 128)
"""Numbers of newest records whose median rate is compared with the median of earlier rates."""
KEPT_RATES, LEAST_BEFORE, RATED_EVERY_S = 512, 16, 10.0
SURE_Z = 6.0
"""A rate counts as lower only if it fell by more than this many standard errors."""
LEAST_SPREAD = 0.02


class Rates:
    """The throughput in the records of rank 0, compared with the earlier throughput.

    While the ratio is below `limit`, the rates are compared with those before the drop, so that a
    lasting drop does not become the usual throughput.
    """

    def __init__(self, limit: float):
        self.ratio: float | None = None
        """An upper bound of new ÷ old throughput, or None if it is not known."""
        self._limit = limit
        self._logs: deque[float] = deque(maxlen=KEPT_RATES)
        self._usual: list[float] = []
        """The rates before the present drop, or [] if there is none."""
        self._rated_at, self._unrated = -math.inf, False

    def add(self, toks_per_s: float | None) -> None:
        if toks_per_s is not None and 0 <= toks_per_s < math.inf:
            self._logs.append(math.log(max(toks_per_s, 1e-9)))
            self._unrated = True

    def update(self, mono: float) -> None:
        """Sets `ratio`, at most every `RATED_EVERY_S`."""
        if not self._unrated or mono - self._rated_at < RATED_EVERY_S:
            return
        self._rated_at, self._unrated = mono, False
        self.ratio, before = rate_ratio(list(self._logs), self._usual)
        if self.ratio is not None and self.ratio < self._limit:
            self._usual = self._usual or before
        elif self._usual:
            self._logs, self._usual = deque(self._usual, KEPT_RATES), []


def rate_ratio(
    logs: Sequence[float], usual: Sequence[float] = ()
) -> tuple[float | None, list[float]]:  # fmt: skip
    """Returns two values: an upper bound of new rate ÷ old rate, and the old rates.

    Rates are given as logarithms, in order. The median of each window of newest rates is
    compared with the median of the rates before it, or of `usual`. The bound of a window is
    `SURE_Z` standard errors above the measured ratio; the lowest bound is returned. The standard
    error follows from the spread of the rates, so a run with uneven steps needs more rates. Returns
    None and [] until there are enough rates.
    """
    bounds: list[tuple[float, list[float]]] = []
    for count in WINDOWS:
        before, recent = list(usual or logs[:-count]), logs[-count:]
        if len(before) < max(LEAST_BEFORE, count):
            break
        middle = median(before)
        spread = 1.4826 * median([abs(log - middle) for log in before])
        error = 1.2533 * max(spread, LEAST_SPREAD) * math.sqrt(1 / count + 1 / len(before))
        bound = math.exp(min(50.0, median(recent) - middle + SURE_Z * error))
        bounds.append((bound, before))
    return min(bounds, default=(None, []), key=lambda each: each[0])
