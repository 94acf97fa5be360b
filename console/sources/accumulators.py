"""Accumulates values over the records of one rank.

`cut` drops the values of one step and of later steps, for example when an attempt repeats them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from trainers.contract import jsonl

KEPT_PEAKS = 64


class Step(NamedTuple):
    """One step of rank 0."""

    step: int
    took_s: float
    tokens: float | None
    """None if the record has no `toks_per_s`."""


class Figures(NamedTuple):
    """The step and two figures of one progress record of rank 0."""

    step: int
    loss: float | None
    bytes_right: float | None


class Live(NamedTuple):
    """The gates' figures after a record; `at` is the step of a gate that the record has reached."""

    step: int
    at: int
    figures: tuple[float | None, ...]


class Maxima(NamedTuple):
    """Successive maxima that were merged: the first and the last, each with its step."""

    step: int
    least: float
    last_step: float
    """Infinite if `cut` may have dropped the step of the last maximum."""
    most: float


@dataclass(slots=True)
class Peak:
    """The largest value (nan counts as inf). After `cut`, the value may be too large."""

    found: list[Maxima] = field(default_factory=list)
    """If there are too many, the two neighbours with the most similar values are merged."""

    @property
    def value(self) -> float | None:
        return self.found[-1].most if self.found else None

    def add(self, step: int, value: float) -> None:
        value = math.inf if math.isnan(value) else value
        if not self.found or value > self.found[-1].most:
            self.found.append(Maxima(step, value, step, value))
        elif step < self.found[-1].step:
            self.found[-1] = self.found[-1]._replace(step=step)
        if len(self.found) > KEPT_PEAKS:
            spans = [second.most - first.least for first, second in pairwise(self.found)]
            at = spans.index(min(spans))
            first, second = self.found[at : at + 2]
            last_step = max(first.last_step, second.last_step)
            self.found[at : at + 2] = [Maxima(*first[:2], last_step, second.most)]

    def cut(self, step: int) -> None:
        """Drops the maxima whose stored step is `step` or a later step."""
        self.found = [
            each if each.last_step < step else each._replace(last_step=math.inf)
            for each in self.found if each.step < step
        ]  # fmt: skip

    def growth(self, half: int) -> float | None:
        """Returns by how much the largest value grew after the step `half`, or slightly more.

        The result is exact unless maxima before and after `half` were merged, or maxima that `cut`
        dropped. Returns None if no value up to `half` is known.
        """
        early = [each for each in self.found if each.step <= half]
        if not early:
            return None
        newest = early[-1]
        return self.found[-1].most - (newest.most if newest.last_step <= half else newest.least)


@dataclass(slots=True)
class Overflows:
    """The numbers of overflows, and of those that lowered the loss scale, in the newest record."""

    count: int = 0
    lowered: int = 0

    def add(self, record: Mapping[str, Any]) -> bool:
        """Returns whether overflows followed the record before, and all lowered the loss scale."""
        before = self.count, self.lowered
        self.count = jsonl.integer(record, "overflow_steps") or 0
        self.lowered = jsonl.integer(record, "scale_lowered_steps") or 0
        return 0 < self.count - before[0] == self.lowered - before[1]


def cut(rows: deque[Any], step: int) -> None:
    """Drops the rows of `step` and of later steps; the first value of a row is its step."""
    kept = [row for row in rows if row[0] < step]
    rows.clear()
    rows.extend(kept)


def worst(
    found: float | None, value: float | None, choose: Callable[[float, float], float]
) -> float | None:
    """Returns nan if a value is nan, or else what `choose` returns; None counts as no value."""
    if value is None or found is None:
        return found if value is None else value
    return found if math.isnan(found) else value if math.isnan(value) else choose(found, value)
