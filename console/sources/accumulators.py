"""Accumulates values over the records of one rank: the largest value, and the newest rows.

`cut` drops the values of one step and of later steps, for example when an attempt repeats them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

KEPT_RECORDS, KEPT_PEAKS = 256, 64
FIRST_LOSSES = 5
Row = TypeVar("Row", bound=tuple[Any, ...])


@dataclass(slots=True)
class Peak:
    """The largest value (nan counts as inf). After `cut` it may be too large, but not too small."""

    found: list[tuple[int, float]] = field(default_factory=list)
    """Step and value of successive maxima; neighbours are merged if there are too many."""

    @property
    def value(self) -> float | None:
        return self.found[-1][1] if self.found else None

    def add(self, step: int, value: float) -> None:
        value = math.inf if math.isnan(value) else value
        if not self.found or value > self.found[-1][1]:
            self.found.append((step, value))
        elif step < self.found[-1][0]:
            self.found[-1] = (step, self.found[-1][1])
        if len(self.found) > KEPT_PEAKS:
            pairs = zip(self.found[::2], self.found[1::2], strict=False)
            odd = self.found[-1:] if len(self.found) % 2 else []
            self.found = [(first[0], second[1]) for first, second in pairs] + odd

    def cut(self, step: int) -> None:
        """Drops the maxima whose stored step is `step` or a later step."""
        self.found = [each for each in self.found if each[0] < step]

    def growth(self, half: int) -> float | None:
        """Returns by how much the largest value grew after the step `half`.

        Returns None if no value up to `half` is known, or if there are too many maxima.
        """
        early = [value for step, value in self.found if step <= half]
        if not early or len(self.found) > KEPT_PEAKS // 2:
            return None
        return self.found[-1][1] - early[-1]


@dataclass(slots=True)
class Rows(Generic[Row]):
    """The newest rows; the first value of a row is its step."""

    rows: deque[Row]
    dropped: bool = False
    """True if a row was dropped, because only the newest rows are stored."""

    def add(self, row: Row) -> None:
        self.dropped = self.dropped or len(self.rows) == self.rows.maxlen
        self.rows.append(row)

    def cut(self, step: int) -> list[Row]:
        """Drops the rows of `step` and of later steps; returns these rows."""
        gone = [row for row in self.rows if row[0] >= step]
        self.rows = deque((row for row in self.rows if row[0] < step), self.rows.maxlen)
        return gone


class Figures(NamedTuple):
    """The step and two figures of one progress record, for the gates."""

    step: int
    loss: float | None
    bytes_right: float | None


@dataclass(slots=True)
class Window:
    """The figures of rank 0's newest records, and its first losses, over the surviving steps."""

    first: list[tuple[int, float]] = field(default_factory=list)
    newest: Rows[Figures] = field(default_factory=lambda: Rows(deque(maxlen=KEPT_RECORDS)))
    losses: int = 0

    def add(self, found: Figures) -> None:
        self.newest.add(found)
        if found.loss is not None:
            self.losses += 1
            if len(self.first) < FIRST_LOSSES:
                self.first.append((found.step, found.loss))

    def cut(self, step: int) -> None:
        """Drops the records of `step` and of later steps; `losses` may then be too low."""
        gone = self.newest.cut(step)
        self.first = [each for each in self.first if each[0] < step]
        self.losses -= sum(each.loss is not None for each in gone)
        if not self.newest.rows:
            self.losses = len(self.first)

    @property
    def last_losses(self) -> list[float]:
        """At most `FIRST_LOSSES` newest losses; fewer if the others were not stored."""
        found = [each.loss for each in self.newest.rows if each.loss is not None]
        return found[-FIRST_LOSSES:]


def worst(
    found: float | None, value: float | None, choose: Callable[[float, float], float]
) -> float | None:
    """Returns nan if a value is nan, or else what `choose` returns; None counts as no value."""
    if value is None or found is None:
        return found if value is None else value
    return found if math.isnan(found) else value if math.isnan(value) else choose(found, value)
