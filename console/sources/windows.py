"""Sums over the records of one rank: the largest value, a window of figures, and rows of numbers.

Each sum drops the steps that a later attempt repeats, and has a form that a snapshot stores.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainers.contract import jsonl

KEPT_RECORDS, KEPT_PEAKS = 256, 64
FIRST_LOSSES = 5
Record = Mapping[str, Any]


class Peak:
    """The largest value so far; after a roll-back it may be too large, never too small."""

    def __init__(self, found: Iterable[list[float | None]] = ()):
        self.found = [(int(step or 0), value or 0.0) for step, value in found]

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
        """Drops the values of `step` and of later steps."""
        self.found = [each for each in self.found if each[0] < step]

    def growth(self, half: int) -> float | None:
        """Returns by how much the largest value grew after the step `half`.

        Returns None without an earlier value, or if so many values were stored that some are lost.
        """
        early = [value for step, value in self.found if step <= half]
        if not early or len(self.found) > KEPT_PEAKS // 2:
            return None
        return self.found[-1][1] - early[-1]


class Figures(NamedTuple):
    """The figures that the gates use, from one progress record."""

    step: int
    loss: float | None
    toks_per_s: float | None
    bytes_right: float | None


class Window:
    """The newest records and the first losses of rank 0, for steps that no attempt repeated."""

    def __init__(self) -> None:
        self.first: list[tuple[int, float]] = []
        self.newest: deque[Figures] = deque(maxlen=KEPT_RECORDS)
        self.losses = 0
        self.dropped = False
        """Records older than the newest ones were dropped."""

    def add(self, found: Figures) -> None:
        self.dropped = self.dropped or len(self.newest) == KEPT_RECORDS
        self.newest.append(found)
        if found.loss is not None:
            self.losses += 1
            if len(self.first) < FIRST_LOSSES:
                self.first.append((found.step, found.loss))

    def cut(self, step: int) -> None:
        """Drops the records of `step` and of later steps; counts are then lower bounds."""
        gone = [each for each in self.newest if each.step >= step]
        kept = [each for each in self.newest if each.step < step]
        self.newest = deque(kept, maxlen=KEPT_RECORDS)
        self.first = [each for each in self.first if each[0] < step]
        self.losses -= sum(each.loss is not None for each in gone)
        if not kept:
            self.losses = len(self.first)

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": list(self.first), "newest": list(self.newest), "losses": self.losses,
            "dropped": self.dropped,
        }  # fmt: skip

    def load(self, saved: Record) -> None:
        """Sets the window to the state that `as_dict` returned."""
        self.first = [(int(step or 0), loss or 0.0) for step, loss in _rows(saved, "first")]
        self.newest.extend(Figures(int(row[0] or 0), *row[1:]) for row in _rows(saved, "newest"))
        self.losses = jsonl.integer(saved, "losses") or 0
        self.dropped = saved.get("dropped") is True

    def last(self, name: str, count: int) -> list[float] | None:
        """Returns the newest `count` values of a figure, or None if some of them were dropped."""
        values = (getattr(each, name) for each in self.newest)
        found = [value for value in values if value is not None][-count:]
        return None if self.dropped and len(found) < count else found


class Rows:
    """The newest rows of `width` numbers; the first number of a row is its step."""

    def __init__(self, most: int, width: int):
        self._width = width
        self.rows: deque[tuple[float | None, ...]] = deque(maxlen=most)
        self.dropped = False
        """Rows older than the newest ones were dropped."""

    def add(self, *row: float | None) -> None:
        self.dropped = self.dropped or len(self.rows) == self.rows.maxlen
        self.rows.append((row[0], *(x if x is None else float(x) for x in row[1:])))

    def cut(self, step: int) -> None:
        """Drops the rows of `step` and of later steps."""
        kept = [row for row in self.rows if row[0] is not None and row[0] < step]
        self.rows = deque(kept, maxlen=self.rows.maxlen)

    def as_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "dropped": self.dropped}

    def load(self, saved: Record) -> None:
        """Sets the rows to the state that `as_dict` returned. Raises TypeError for other rows."""
        for step, *values in _rows(saved, "rows"):
            if len(values) + 1 != self._width:
                raise TypeError("a row has another number of figures")
            self.rows.append((int(step or 0), *values))
        self.dropped = saved.get("dropped") is True


def _rows(saved: Record, key: str) -> list[list[float | None]]:
    """Returns rows of numbers. Raises TypeError for any other value."""
    return [
        [None if value is None else jsonl.number({"": value}, "") for value in row]
        for row in saved[key]
    ]


def saved_sum(value: Any) -> Any:
    """Returns one sum in the form that a snapshot stores."""
    if isinstance(value, Peak):
        return list(value.found)
    return value.as_dict() if isinstance(value, Window | Rows) else value


def loaded_sum(saved: Record, name: str, empty: Any) -> Any:
    """Returns the sum with this name in a snapshot; the sum has the type of `empty`."""
    if isinstance(empty, Peak):
        return Peak(_rows(saved, name))
    if isinstance(empty, Window | Rows):
        empty.load(saved[name])
        return empty
    return jsonl.integer(saved, name) or 0 if isinstance(empty, int) else jsonl.number(saved, name)
