"""The records of one rank over all its attempts, added up in the order of its file.

Memory is bounded. Records are numbered: a number that is missing is known, and so is the step from
which on something is missing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from console.sources import documents
from trainers.contract import jsonl

MAX_ATTEMPTS = 1000
KEPT_RECORDS = 256
KEPT_PEAKS = 64
KEPT_HOLES = 16
FIRST_LOSSES = 5
OF_THE_PAST = ("checkpoint", "checkpoint_failed", "checkpoint_skipped")
"""Records whose step is not the one that the rank is at."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The last pulse of a rank in one attempt, read after its process had ended."""

    attempt: int
    rank: int
    records: int
    """The number of its last record: 0 when it wrote none."""
    nonfinite_steps: int
    """-1 where it did not count them."""
    step: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Records that are missing, by number, and the first step that they may be of."""

    first: int
    last: int
    step: int


@dataclass(slots=True)
class Part:
    """The records of one rank in one attempt."""

    last: int = 0
    """The number of the newest record."""
    trouble: str = ""
    """Why its records cannot be counted."""
    holes: list[Hole] = field(default_factory=list)
    start: int | None = None
    """Its first step: behind the checkpoint that it resumed from, else that of its first record."""
    at: int = 0
    step: int = 0
    """Steps of the newest record, and of the newest progress record."""
    exit: tuple[int, int] | None = None
    """Step and exit code of its exit record."""
    counted: int | None = None
    """Steps with a non-finite loss, as its newest record counts them."""
    counts_at_last: bool = False
    """Its newest record has that count."""
    losses: int = 0
    bad_losses: int = 0
    first_bad: int | None = None
    broken: bool = False
    """Some of its steps have no record with a loss."""
    _bare: bool = False
    _mono: float = -math.inf

    def as_dict(self) -> dict[str, Any]:
        """Returns what differs from a part without records."""
        return {key: value for key, value in asdict(self).items() if value != _EMPTY[key]}

    @classmethod
    def load(cls, held: Record) -> Part:
        """Returns the part that `as_dict` gave."""
        mono, ended = jsonl.number(held, "_mono"), jsonl.integers(held, "exit")
        holes = [documents.read(Hole, each) for each in jsonl.entries(held, "holes")]
        return documents.read(
            cls, held, holes=holes,
            exit=(ended[0], ended[1]) if len(ended) == 2 else None,
            _mono=-math.inf if mono is None else mono,
        )  # fmt: skip

    def has(self, number: int, mono: float | None) -> bool:
        """Says whether a record was seen before: a file that was replaced is read again."""
        return 1 <= number <= self.last and mono is not None and mono <= self._mono

    def take(self, record: Record, number: int, mono: float | None) -> None:
        """Takes the number of a record, and what holds for all kinds."""
        step, msg = record["step"], record["msg"]
        if number < 1:
            self.trouble = self.trouble or "its records have no numbers (an older program)"
        elif number <= self.last:
            self.trouble = self.trouble or f"record {number} comes twice, and they differ"
        else:
            if number > self.last + 1:
                self._add_hole(Hole(self.last + 1, number - 1, min(self.missing_from, step)))
            self.last = number
        if self.exit is not None:
            self.trouble = self.trouble or "there are records after its exit record"
        if mono is not None and mono > self._mono:
            self._mono = mono
        if msg not in OF_THE_PAST:
            self.at = step
        if msg in ("progress", "exit"):
            self._take_count(jsonl.integer(record, "nonfinite_loss_steps"))
        if msg == "exit":
            self.exit = (step, jsonl.integer(record, "exit_code") or 0)

    @property
    def missing_from(self) -> int:
        """The first step that a record behind the newest one may be of."""
        return max(self.at, self.step + 1, self.start or 1)

    def _add_hole(self, hole: Hole) -> None:
        if len(self.holes) == KEPT_HOLES:
            before = self.holes.pop()
            hole = Hole(before.first, hole.last, min(before.step, hole.step))
        self.holes.append(hole)

    def _take_count(self, count: int | None) -> None:
        self.counts_at_last = count is not None
        if count is None:
            return
        if count < (self.counted or 0):
            self.trouble = self.trouble or "its count of non-finite steps goes back"
        self.counted = count

    def take_progress(self, step: int, loss: float | None) -> None:
        """Takes the step and the loss of a progress record."""
        expected = self.step + 1 if self.step else self.start
        self.broken = self.broken or self._bare or step != expected
        self.step, self._bare = step, loss is None
        if loss is not None:
            self.losses += 1
            if not math.isfinite(loss):
                self.bad_losses += 1
                self.first_bad = step if self.first_bad is None else self.first_bad

    def has_stepped(self, end: End | None) -> bool:
        """Says whether it may have done a step."""
        begun = self.exit[0] if self.exit is not None else end.step if end is not None else 1
        return self.step > 0 or begun > 0

    def every_loss_is_recorded(self, end: End | None) -> bool:
        """Says whether each step has a record with its loss; nobody can have that of the last."""
        if self.exit is not None:
            step, code = self.exit
            return not self.broken and step <= self.step + (code != 0)
        whole = end is not None and end.records == self.last and end.step <= self.step + 1
        return whole and not self.broken


_EMPTY = asdict(Part())


class Peak:
    """The largest value up to each step; what a roll-back cannot tell is the larger one."""

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
        """Forgets what was recorded from a step on."""
        self.found = [each for each in self.found if each[0] < step]


class Figures(NamedTuple):
    """The figures of one progress record that a gate looks at."""

    step: int
    loss: float | None
    toks_per_s: float | None
    bytes_right: float | None


class Window:
    """The newest records of rank 0, and its first losses, of the steps that survived."""

    def __init__(self) -> None:
        self.first: list[tuple[int, float]] = []
        self.newest: deque[Figures] = deque(maxlen=KEPT_RECORDS)
        self.losses = 0
        self.dropped = False
        """Older records than the newest ones were there."""

    def add(self, found: Figures) -> None:
        self.dropped = self.dropped or len(self.newest) == KEPT_RECORDS
        self.newest.append(found)
        if found.loss is not None:
            self.losses += 1
            if len(self.first) < FIRST_LOSSES:
                self.first.append((found.step, found.loss))

    def cut(self, step: int) -> None:
        """Forgets what was recorded from a step on; a count is then a lower bound."""
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

    def load(self, held: Record) -> None:
        """Takes what `as_dict` gave."""
        self.first = [(int(step or 0), loss or 0.0) for step, loss in _rows(held, "first")]
        self.newest.extend(Figures(int(row[0] or 0), *row[1:]) for row in _rows(held, "newest"))
        self.losses = jsonl.integer(held, "losses") or 0
        self.dropped = held.get("dropped") is True

    def last(self, name: str, count: int) -> list[float] | None:
        """Returns the newest values of a figure; None where some were dropped and too few left."""
        values = (getattr(each, name) for each in self.newest)
        found = [value for value in values if value is not None][-count:]
        return None if self.dropped and len(found) < count else found


def _rows(held: Record, key: str) -> list[list[float | None]]:
    """Returns rows of numbers. Raises TypeError for anything else."""
    return [
        [None if value is None else jsonl.number({"": value}, "") for value in row]
        for row in held[key]
    ]


class Fold:
    """The records of one rank, in the order of its file."""

    def __init__(self, rank: int):
        self.rank = rank
        self.parts: dict[int, Part] = {}
        self.newest = 0
        self.step = 0
        """The newest step that is done and survived."""
        self.progress = 0
        self.memory_mib = Peak()
        self.window = Window()
        self.norm_min: float | None = None
        self.norms = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns what a snapshot keeps of it."""
        return {
            "parts": {str(number): part.as_dict() for number, part in self.parts.items()},
            "newest": self.newest, "step": self.step, "progress": self.progress,
            "memory_mib": list(self.memory_mib.found), "norm_min": self.norm_min,
            "norms": self.norms, "window": self.window.as_dict(),
        }  # fmt: skip

    @classmethod
    def load(cls, rank: int, held: Record) -> Fold:
        """Returns the fold that `as_dict` gave. Raises ValueError for anything else."""
        fold = cls(rank)
        try:
            fold.parts = {
                int(number): Part.load(part) for number, part in held["parts"].items()
            }  # fmt: skip
            fold.memory_mib = Peak(_rows(held, "memory_mib"))
            fold.window.load(held["window"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError("it is no fold of records") from error
        for key in ("newest", "step", "progress", "norms"):
            setattr(fold, key, jsonl.integer(held, key) or 0)
        fold.norm_min = jsonl.number(held, "norm_min")
        whole = fold.newest in fold.parts or not fold.newest
        if not whole or jsonl.encode(fold.as_dict()) != jsonl.encode(held):
            raise ValueError("it is no fold of records")
        return fold

    def take(self, record: Record) -> bool:
        """Takes a record; says whether it is one that was not seen before."""
        attempt = record["attempt"]
        part = self.parts.get(attempt)
        if part is None:
            if len(self.parts) >= MAX_ATTEMPTS:
                self.parts[self.newest].trouble = f"more than {MAX_ATTEMPTS} attempts"
                return True
            part = self.parts[attempt] = Part()
        number, mono = jsonl.integer(record, "n") or 0, jsonl.number(record, "mono")
        if part.has(number, mono):
            return False
        if attempt < self.newest:
            part.trouble = part.trouble or f"a record comes after those of attempt {self.newest}"
            return True
        self.newest = attempt
        part.take(record, number, mono)
        if record["msg"] == "resume":
            self._begin(part, record["step"] + 1)
            self.step = min(self.step, record["step"])
        elif record["msg"] == "progress":
            self._take_progress(part, record)
        return True

    def _begin(self, part: Part, step: int) -> None:
        """Takes the first step of an attempt: what was done from there on is done again."""
        if part.start is not None and part.start != step:
            part.trouble = part.trouble or f"it goes on at step {part.start} and at step {step}"
        part.start = step
        self.memory_mib.cut(step)
        self.window.cut(step)

    def _take_progress(self, part: Part, record: Record) -> None:
        step, loss = record["step"], jsonl.number(record, "loss")
        if part.start is None:
            self._begin(part, max(1, step + 1 - max(1, len(jsonl.numbers(record, "steps_dt_s")))))
        elif not part.step and step < part.start:
            said = f"it resumed at step {part.start}, and its first record is of step {step}"
            part.trouble = part.trouble or said
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
