"""Sums over the records of a run and all its attempts; gates are evaluated over them.

The file of each rank is added up by itself, so the state does not depend on how the files of
several ranks are interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from console.sources.fold import MAX_ATTEMPTS, End, Fold, Part, Record
from console.sources.reading import MAX_RANKS
from trainers.contract import jsonl
from trainers.contract.pulse import Pulse


class Summary:
    """All ranks of a run. `attempts` and `stalls` are None until somebody who counted them says.

    `world` ranks write records; those of others are left out.
    """

    def __init__(
        self, world: int = MAX_RANKS, attempts: int | None = None, stalls: int | None = None
    ):
        self.world, self.attempts, self.stalls = world, attempts, stalls
        self.stalls_seen = stalls or 0
        """At least so many: also where the count of a former supervisor is lost."""
        self.folds: dict[int, Fold] = {}
        self.ends: dict[tuple[int, int], End] = {}

    def take(self, record: Record) -> bool:
        """Takes in one heartbeat of any rank and attempt; says whether it is new, and counts."""
        rank = record["rank"]
        fold = self.folds.get(rank)
        if fold is None:
            if rank >= min(self.world, MAX_RANKS):
                return False
            fold = self.folds[rank] = Fold(rank)
        return fold.take(record)

    def limit(self, world: int) -> None:
        """Leaves out ranks that the run does not have: it is known when its records were read."""
        self.world = world
        self.folds = {rank: fold for rank, fold in self.folds.items() if rank < world}

    def count_stall(self) -> None:
        self.stalls_seen += 1
        self.stalls = None if self.stalls is None else self.stalls_seen

    def take_counts(self, attempts: int | None, stalls: int | None) -> None:
        """Takes what the supervisor's events add up to."""
        self.attempts, self.stalls, self.stalls_seen = attempts, stalls, stalls or 0

    def take_end(self, attempt: int, rank: int, found: Pulse | None) -> None:
        """Takes the last pulse of a process that has ended; None: it never had one."""
        told = (found.records, found.nonfinite_steps, found.step) if found else (0, 0, 0)
        self.ends[attempt, rank] = End(attempt, rank, *told)

    def as_dict(self) -> dict[str, Any]:
        """Returns what supervisor.json keeps: the records tell the rest."""
        open_ends = [asdict(end) for end in self.ends.values() if not self._has_exit(end)]
        return {"stalls": self.stalls, "ends": open_ends}

    def _has_exit(self, end: End) -> bool:
        part = self.part(end.rank, end.attempt)
        return part is not None and part.exit is not None and part.last == end.records

    def take_document(self, held: Record) -> None:
        """Takes the ends in supervisor.json."""
        for entry in jsonl.entries(held, "ends"):
            told = {each.name: jsonl.integer(entry, each.name) for each in fields(End)}
            if None not in told.values():
                end = End(**told)  # type: ignore[arg-type]
                self.ends[end.attempt, end.rank] = end

    # --- what gates ask for --------------------------------------------------------------------

    def fold(self, rank: int) -> Fold:
        return self.folds.get(rank) or Fold(rank)

    def part(self, rank: int, attempt: int) -> Part | None:
        fold = self.folds.get(rank)
        return fold.parts.get(attempt) if fold else None

    @property
    def all_attempts(self) -> range:
        newest = max((fold.newest for fold in self.folds.values()), default=0)
        return range(1, min(max(self.attempts or 0, newest), MAX_ATTEMPTS) + 1)

    def gap(self, ranks: range, surviving: bool, tails: bool) -> str:
        """Says why the records do not cover the whole span, "" when they do.

        With `surviving` only steps that no later attempt did again count. With `tails` the pulse
        stands in for the last records of a rank that was killed.
        """
        if not self.fold(0).progress:
            return "no progress record of rank 0"
        if self.attempts is None:
            return "the number of attempts is not known"
        if self.attempts > MAX_ATTEMPTS:
            return f"there are more than {MAX_ATTEMPTS} attempts"
        if surviving and (differing := self._starts_differ(ranks)):
            return differing
        for rank in ranks:
            if why := self._gap_of(rank, surviving, tails):
                return why
        return ""

    def _gap_of(self, rank: int, surviving: bool, tails: bool) -> str:
        assert self.attempts is not None
        newest, until = self.fold(rank).newest, math.inf
        if newest > self.attempts:
            return (f"rank {rank} has a record of attempt {newest}, and the supervisor counts "
                    f"{self.attempts}")  # fmt: skip
        for attempt in range(self.attempts, 0, -1):
            if until <= 1:
                break
            part = self.part(rank, attempt)
            why = self._gap_in(part, self.ends.get((attempt, rank)), until, tails)
            if why:
                return f"rank {rank}, attempt {attempt}: {why}"
            if surviving and part is not None and part.start is not None:
                until = min(until, part.start)
        return ""

    @staticmethod
    def _gap_in(part: Part | None, end: End | None, until: float, tails: bool) -> str:
        """Says what is missing of the steps below `until`."""
        if part is None:
            if end is None:
                return "there is no record"
            return f"records 1 to {end.records} are missing" if end.records else ""
        if part.trouble:
            return part.trouble
        for hole in part.holes:
            if hole.step < until:
                return _missing(hole.first, hole.last)
        if part.missing_from >= until:
            return ""
        if part.exit is not None:
            if end is not None and end.records != part.last:
                return f"its exit record has number {part.last}, its pulse counted {end.records}"
            return ""
        if end is None:
            return f"the number of records after {part.last} is not available"
        if end.records < part.last:
            return f"its newest record has number {part.last}, its pulse counted {end.records}"
        return _missing(part.last + 1, end.records) if end.records > part.last and not tails else ""

    def _starts_differ(self, ranks: range) -> str:
        """Says where ranks tell of different checkpoints that an attempt went on from."""
        for attempt in self.all_attempts[1:]:
            starts = {
                part.start: rank for rank in sorted(self.folds) if rank in ranks
                and (part := self.part(rank, attempt)) is not None and part.start is not None
            }  # fmt: skip
            if len(starts) > 1:
                told = ", ".join(f"rank {rank} at {step}" for step, rank in sorted(starts.items()))
                return f"the ranks began attempt {attempt} at different steps: {told}"
        return ""

    def parts(self) -> Iterator[tuple[int, int, Part, End | None]]:
        """Yields attempt, rank, part and end wherever a rank recorded something."""
        for attempt in self.all_attempts:
            for rank, fold in sorted(self.folds.items()):
                part = fold.parts.get(attempt)
                if part is not None:
                    yield attempt, rank, part, self.ends.get((attempt, rank))


def _missing(first: int, last: int) -> str:
    return (
        f"record {first} is missing" if first == last else f"records {first} to {last} are missing"
    )
