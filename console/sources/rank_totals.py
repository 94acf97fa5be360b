"""The totals of one rank over all its attempts, added up in the order of the rank's file.

Memory is bounded. Records are numbered, so missing records are known by number; so is the first
step that they may belong to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from console.sources import json_documents
from trainers.contract import jsonl

MAX_ATTEMPTS = 1000
KEPT_RECORDS = 256
KEPT_PEAKS = 64
KEPT_MISSING = 16
FIRST_LOSSES = 5
OF_EARLIER_STEPS = ("checkpoint", "checkpoint_failed", "checkpoint_skipped")
"""Kinds of records whose step may be earlier than the current step of the rank."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LastPulse:
    """The last pulse of a rank in one attempt, read after its process ended."""

    attempt: int
    rank: int
    records: int
    """The number of its last record, 0 without records."""
    nonfinite_steps: int
    """-1 where the program does not count them."""
    step: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Missing records, by number, and the first step that they may belong to."""

    first: int
    last: int
    step: int


@dataclass(slots=True)
class AttemptTotals:
    """The totals of one rank in one attempt; the names of the fields are the keys in a snapshot."""

    last: int = 0
    """The number of the newest record."""
    trouble: str = ""
    """Why its records cannot be counted."""
    holes: list[Missing] = field(default_factory=list)
    start: int | None = None
    """Its first step: one after the checkpoint that it resumed from, else of its first record."""
    at: int = 0
    """The step of the newest record."""
    step: int = 0
    """The step of the newest progress record."""
    exit: tuple[int, int] | None = None
    """Step and exit code of its exit record."""
    counted: int | None = None
    """The number of steps with a non-finite loss in its newest record."""
    counts_at_last: bool = False
    """Its newest record has that count."""
    losses: int = 0
    bad_losses: int = 0
    first_bad: int | None = None
    broken: bool = False
    """Some of its steps have no record with a loss."""
    _bare: bool = False
    """Its newest progress record has no loss."""
    _mono: float = -math.inf

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from those of an empty attempt."""
        return {key: value for key, value in asdict(self).items() if value != _EMPTY[key]}

    @classmethod
    def load(cls, saved: Record) -> AttemptTotals:
        """Returns the totals from the result of `as_dict`."""
        mono, ended = jsonl.number(saved, "_mono"), jsonl.integers(saved, "exit")
        holes = [json_documents.read(Missing, each) for each in jsonl.entries(saved, "holes")]
        return json_documents.read(
            cls, saved, holes=holes,
            exit=(ended[0], ended[1]) if len(ended) == 2 else None,
            _mono=-math.inf if mono is None else mono,
        )  # fmt: skip

    def has(self, number: int, mono: float | None) -> bool:
        """Returns whether a record was added before, because a replaced file is read again."""
        return 1 <= number <= self.last and mono is not None and mono <= self._mono

    def add(self, record: Record, number: int, mono: float | None) -> None:
        """Adds the number of a record, and the fields that all kinds of records have."""
        step, msg = record["step"], record["msg"]
        if number < 1:
            self.trouble = self.trouble or "its records have no numbers (an older program)"
        elif number <= self.last:
            self.trouble = self.trouble or f"record {number} exists twice, with different content"
        else:
            if number > self.last + 1:
                self._add_missing(Missing(self.last + 1, number - 1, min(self.missing_from, step)))
            self.last = number
        if self.exit is not None:
            self.trouble = self.trouble or "a record follows its exit record"
        if mono is not None and mono > self._mono:
            self._mono = mono
        if msg not in OF_EARLIER_STEPS:
            self.at = step
        if msg in ("progress", "exit"):
            self._take_count(jsonl.integer(record, "nonfinite_loss_steps"))
        if msg == "exit":
            self.exit = (step, jsonl.integer(record, "exit_code") or 0)

    @property
    def missing_from(self) -> int:
        """The earliest possible step of a missing record that follows the newest one."""
        return max(self.at, self.step + 1, self.start or 1)

    def _add_missing(self, gap: Missing) -> None:
        if len(self.holes) == KEPT_MISSING:
            before = self.holes.pop()
            gap = Missing(before.first, gap.last, min(before.step, gap.step))
        self.holes.append(gap)

    def _take_count(self, count: int | None) -> None:
        self.counts_at_last = count is not None
        if count is None:
            return
        if count < (self.counted or 0):
            self.trouble = self.trouble or "its count of non-finite steps decreases"
        self.counted = count

    def take_progress(self, step: int, loss: float | None) -> None:
        """Adds the step and the loss of a progress record."""
        expected = self.step + 1 if self.step else self.start
        self.broken = self.broken or self._bare or step != expected
        self.step, self._bare = step, loss is None
        if loss is not None:
            self.losses += 1
            if not math.isfinite(loss):
                self.bad_losses += 1
                self.first_bad = step if self.first_bad is None else self.first_bad

    def has_stepped(self, end: LastPulse | None) -> bool:
        """Returns whether the rank may have done a step."""
        begun = self.exit[0] if self.exit is not None else end.step if end is not None else 1
        return self.step > 0 or begun > 0

    def every_loss_is_recorded(self, end: LastPulse | None) -> bool:
        """Returns whether each step has a record with its loss, except the unfinished step."""
        if self.exit is not None:
            step, code = self.exit
            return not self.broken and step <= self.step + (code != 0)
        whole = end is not None and end.records == self.last and end.step <= self.step + 1
        return whole and not self.broken


_EMPTY = asdict(AttemptTotals())


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


class Figures(NamedTuple):
    """The figures of one progress record that the gates use."""

    step: int
    loss: float | None
    toks_per_s: float | None
    bytes_right: float | None


class Window:
    """The newest records of rank 0 and its first losses, for steps that no attempt repeated."""

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


def _rows(saved: Record, key: str) -> list[list[float | None]]:
    """Returns rows of numbers. Raises TypeError for any other value."""
    return [
        [None if value is None else jsonl.number({"": value}, "") for value in row]
        for row in saved[key]
    ]


def _saved(value: Any) -> Any:
    """Returns one sum in the form that a snapshot stores."""
    if isinstance(value, Peak):
        return list(value.found)
    return value.as_dict() if isinstance(value, Window) else value


def _loaded(saved: Record, name: str, empty: Any) -> Any:
    """Returns the sum of that name in a snapshot, with the type of the `empty` sum."""
    if isinstance(empty, Peak):
        return Peak(_rows(saved, name))
    if isinstance(empty, Window):
        empty.load(saved[name])
        return empty
    return jsonl.integer(saved, name) or 0 if isinstance(empty, int) else jsonl.number(saved, name)


class RankTotals:
    """The totals of one rank. Its records are added in the order of the rank's file.

    A new sum must be an int, a float or None, or a `Peak`, which is cut when an attempt resumes.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.attempts: dict[int, AttemptTotals] = {}
        self.newest = 0
        """The newest attempt with a record."""
        self.step = 0
        """The newest completed step that no attempt has to repeat."""
        self.progress = 0
        """Number of progress records."""
        self.memory_mib = Peak()
        self.norm_min: float | None = None
        self.norms = 0
        self.window = Window()

    def as_dict(self) -> dict[str, Any]:
        """Returns the totals in the form that a snapshot stores: each field by its name."""
        parts = {str(number): part.as_dict() for number, part in self.attempts.items()}
        return {"parts": parts} | {name: _saved(value) for name, value in self._sums()}

    def _sums(self) -> list[tuple[str, Any]]:
        """Returns the names and values of the fields that are single sums."""
        return [each for each in vars(self).items() if each[0] not in ("rank", "attempts")]

    @classmethod
    def load(cls, rank: int, saved: Record) -> RankTotals:
        """Returns the totals from the result of `as_dict`. Raises ValueError for other values."""
        found = cls(rank)
        try:
            found.attempts = {
                int(number): AttemptTotals.load(part) for number, part in saved["parts"].items()
            }  # fmt: skip
            for name, empty in found._sums():
                setattr(found, name, _loaded(saved, name, empty))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError("these are no totals of a rank") from error
        whole = found.newest in found.attempts or not found.newest
        if not whole or jsonl.encode(found.as_dict()) != jsonl.encode(saved):
            raise ValueError("these are no totals of a rank")
        return found

    def add(self, record: Record) -> bool:
        """Adds a record; returns whether it is new."""
        attempt = record["attempt"]
        part = self.attempts.get(attempt)
        if part is None:
            if len(self.attempts) >= MAX_ATTEMPTS:
                self.attempts[self.newest].trouble = f"more than {MAX_ATTEMPTS} attempts"
                return True
            part = self.attempts[attempt] = AttemptTotals()
        number, mono = jsonl.integer(record, "n") or 0, jsonl.number(record, "mono")
        if part.has(number, mono):
            return False
        if attempt < self.newest:
            part.trouble = part.trouble or f"a record follows those of attempt {self.newest}"
            return True
        self.newest = attempt
        part.add(record, number, mono)
        if record["msg"] == "resume":
            self._begin(part, record["step"] + 1)
            self.step = min(self.step, record["step"])
        elif record["msg"] == "progress":
            self._take_progress(part, record)
        return True

    def _begin(self, part: AttemptTotals, step: int) -> None:
        """Starts an attempt at a step; later steps of former attempts no longer count."""
        if part.start is not None and part.start != step:
            part.trouble = part.trouble or f"it resumes at step {part.start} and at step {step}"
        part.start = step
        for _, value in self._sums():
            if isinstance(value, Peak | Window):
                value.cut(step)

    def _take_progress(self, part: AttemptTotals, record: Record) -> None:
        step, loss = record["step"], jsonl.number(record, "loss")
        if part.start is None:
            self._begin(part, max(1, step + 1 - max(1, len(jsonl.numbers(record, "steps_dt_s")))))
        elif not part.step and step < part.start:
            why = f"it resumed at step {part.start}, and its first record is of step {step}"
            part.trouble = part.trouble or why
        part.take_progress(step, loss)
        self.step = step
        self.progress += 1
        memory = jsonl.number(record, "gpu_mem_reserved")
        if memory is not None:
            self.memory_mib.add(step, memory)
        if self.rank:
            return
        norm, speed = jsonl.number(record, "grad_norm"), jsonl.number(record, "toks_per_s")
        if norm is not None:
            self.norms += 1
            if self.norm_min is None or math.isnan(norm) or norm < self.norm_min:
                self.norm_min = norm
        self.window.add(Figures(
            step, loss if loss is not None and math.isfinite(loss) else None,
            speed if speed is None or math.isfinite(speed) else 0.0,
            jsonl.number(record, "bytes_right"),
        ))  # fmt: skip
