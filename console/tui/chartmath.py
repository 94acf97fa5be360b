"""Computes a chart as text: time window, columns, axis bounds, braille or block characters.

A scrolling chart would be sent to the terminal completely at every sample. This chart fills from
left to right, and moves only when it is full. So most samples change only a few columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from console.sources.series import Bin, Point, bins

Mode = Literal["braille", "block"]
SPANS_S = (60, 120, 300, 600, 1800, 7200, 43200)
AUTO_MAX_S = 600
LEAST_SPAN = 0.02
"""Least span of an axis, as a share of the largest absolute value: noise must not fill a chart."""
TINY, HUGE = 1e-200, 1e200
"""Smaller absolute values are drawn as zero, larger ones as `HUGE`: a record may have any float."""
_DOTS = (0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08)
"""Bits of the four dots in each column of a braille cell, the lowest dot first."""
_BRAILLE = " " + "".join(map(chr, range(0x2801, 0x2900)))
_BLOCKS = " ▁▂▃▄▅▆▇█"


def window(first: float, now: float, span_s: int = 0) -> tuple[float, int]:
    """Returns two values: the start and the length of the displayed time.

    If `span_s` is 0, the length is the shortest of `SPANS_S` that shows all points, but at most
    `AUTO_MAX_S`. A chart with this length begins at the first point until it is full. If the
    operator chose the length, the chart ends at most a quarter of the length after `now`.
    """
    elapsed = now - first
    auto = next((s for s in SPANS_S if elapsed <= s <= AUTO_MAX_S), AUTO_MAX_S)
    start = window_start(first, now, span_s or auto)
    return (start, span_s) if span_s else (max(first, start), auto)


def window_start(first: float, now: float, span: float) -> float:
    """Returns the start of the window: `first`, moved by quarters of `span` to show `now`."""
    return first + math.ceil((now - first - span) / (span / 4)) * (span / 4)


def merge(several: Sequence[Sequence[Bin]]) -> Sequence[Bin]:
    """Returns for each column the smallest and the largest value of several series."""
    if len(several) == 1:
        return several[0]
    merged: list[Bin] = []
    for column in zip(*several, strict=True):
        held = [b for b in column if b is not None]
        merged.append((min(held)[0], max([b[1] for b in held])) if held else None)
    return merged


class Curves:
    """Computes the curves of one chart.

    If the view is the same and every series only got new points, computes only the last columns.
    """

    def __init__(self) -> None:
        self._view: object = None
        self._held: list[tuple[int, Point, Point]] = []
        """Number of points, oldest and newest point of each series."""
        self._found: tuple[tuple[Bin, ...], ...] = ()

    def of(
        self, names: Sequence[str], held: Sequence[Sequence[Point]], is_band: bool, start: float,
        span: float, count: int,
    ) -> tuple[tuple[Bin, ...], ...]:  # fmt: skip
        """Returns one curve of `count` columns per series, or one band over all series.

        `names` are the names of the chart's series; each series in `held` has at least one point.
        """
        view, first = (names, start, span, count), 0
        is_same = view == self._view and len(held) == len(self._held)
        if is_same and all(map(_continues, held, self._held)):
            oldest = min(at for _, _, (at, _) in self._held)
            first = min(count, max(0, int((oldest - start) * count / span) - 1))
        last = tuple(bins(points, start, span, count, first) for points in held)
        last = (tuple(merge(last)),) if is_band else last
        before = self._found if first else [()] * len(last)
        self._found = tuple(old[:first] + new for old, new in zip(before, last, strict=True))
        self._view, self._held = view, [(len(each), each[0], each[-1]) for each in held]
        return self._found


def _continues(points: Sequence[Point], before: tuple[int, Point, Point]) -> bool:
    """Returns whether points were only added: the oldest and former newest point are in place."""
    count, oldest, newest = before
    return len(points) >= count and points[0] == oldest and points[count - 1] == newest


def bounds(held: Sequence[Bin], from_zero: bool) -> tuple[float, float]:
    """Returns bounds around all values up to `HUGE`, rounded so that the axis rarely changes."""
    known = [b for b in held if b is not None]
    if not known:
        return 0.0, 1.0
    low, high = min(b[0] for b in known), max(b[1] for b in known)
    if from_zero and low >= 0:
        low = 0.0
    low, high = max(-HUGE, min(low, HUGE)), max(-HUGE, min(high, HUGE))
    size = max(abs(low), abs(high))
    least = LEAST_SPAN * size if size > TINY else 1.0
    if high - low < least:
        middle = 0.5 if from_zero and low >= 0 else (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    step = _round_step((high - low) / 6)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9)), step)


def levels(
    held: Sequence[Bin], low: float, high: float, count: int
) -> list[tuple[int, int] | None]:
    """Returns the lowest and highest dot of each column; short gaps in the curve are filled.

    Dot 0 is at the bottom.
    """
    found: list[tuple[int, int] | None] = []
    before: tuple[int, int] | None = None
    most, span = count - 1, high - low
    scale = most / span if TINY < span < math.inf else 0.0
    for column in held:
        if column is None:
            found.append(None)
            continue
        least, largest = column
        bottom = top = round(min(most, max(0.0, (least - low) * scale)))
        if largest != least:
            top = round(min(most, max(0.0, (largest - low) * scale)))
        dots = bottom, top
        if before is not None:
            bottom, top = min(bottom, before[1] + 1), max(top, before[0] - 1)
        found.append((bottom, top))
        before = dots
    return bridge(found)


def bridge(held: list[tuple[int, int] | None]) -> list[tuple[int, int] | None]:
    """Fills short gaps between points by a straight line, so that rare samples form a curve.

    Gaps of more than four median distances of the points, or of more than 16 columns, stay.
    """
    filled = list(held)
    known = [(index, dots) for index, dots in enumerate(held) if dots is not None]
    apart = sorted(last - first for (first, _), (last, _) in pairwise(known))
    longest = min(16, 4 * apart[len(apart) // 2]) if apart else 0
    for (first, before), (last, after) in pairwise(known):
        if 1 < last - first <= longest:
            a, b = sum(before) / 2, sum(after) / 2
            for i in range(first + 1, last):
                at = round(a + (b - a) * (i - first) / (last - first))
                filled[i] = (at, at)
    return filled


@lru_cache(maxsize=16)
def draw(
    curves: tuple[tuple[Bin, ...], ...], low: float, high: float, height: int, mode: Mode
) -> list[str]:  # fmt: skip
    """Returns `height` lines of cells; block mode fills the area below the highest curve."""
    if mode == "block":
        held = levels(merge(curves), low, high, 8 * height)
        tops = [-1 if dots is None else dots[1] for dots in held]
        bases = range(8 * (height - 1), -1, -8)
        return ["".join(_BLOCKS[min(8, max(0, top + 1 - base))] for top in tops) for base in bases]
    cells = [[0] * ((len(curves[0]) + 1) // 2) for _ in range(height)]
    for curve in curves:
        for index, dots in enumerate(levels(curve, low, high, 4 * height)):
            for dot in range(dots[0], dots[1] + 1) if dots else ():
                cells[dot // 4][index // 2] |= _DOTS[index % 2][dot % 4]
    return ["".join([_BRAILLE[bits] for bits in line]) for line in cells[::-1]]
