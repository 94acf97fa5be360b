"""Adds up a run over all its ranks and attempts; the gates are evaluated from these totals.

The heartbeat file of each rank is added up separately, so the order of these files does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any

from console.sources.gate_files import GateFiles
from console.sources.json_documents import MAX_GPUS
from console.sources.rank_totals import MAX_ATTEMPTS, AttemptTotals, LastPulse, RankTotals, Record
from console.sources.record_files import MAX_RANKS
from console.sources.sanitize import clean
from console.status_text import clock
from trainers.contract import jsonl
from trainers.contract.pulse import Pulse

MAX_LOADED, MAX_OVERRIDES = 1024, 64
NO_STEP = "rank 0 recorded no step before it exited, so this run has no figures"
NO_END = "the number of records after record"
EVERY_S, NEAR_S = 1.0, 2.0
STEPPING = ("fetch", "forward", "backward", "optimizer", "log", "step")


@dataclass(slots=True)
class GpuTotals:
    """The totals for the mean utilisation of each GPU while the ranks are in a training step.

    The time between two samples counts if every rank of both samples was in a step. Time beyond
    `EVERY_S` is treated as idle, so that missing samples can only lower the use. The time from one
    attempt to the next counts as idle, and so does the time between a sample in a step and a sample
    of other work, if it is at most `NEAR_S`. If it is longer, the step counts as not covered.
    """

    seconds: float = 0.0
    busy_s: dict[int, float] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)
    covered: dict[int, int] = field(default_factory=dict)
    """The number of steps that began in the counted time of an attempt, without those that may have
    ended outside this time. The key is the attempt."""
    trouble: str = ""
    """Why the use of the GPUs is not known, or "" if it is known."""
    newest: tuple[int, float, int] | None = None
    """Attempt, monotonic time and step of the newest sample whose ranks were all in a step."""
    mono: float = -math.inf
    """The monotonic time of the newest sample. It is small again after a boot."""
    attempt: int = 0
    """The attempt of the newest sample."""

    def add(self, sample: Record) -> None:
        """Adds a sample. A sample without an attempt, or not newer than the others, is ignored."""
        mono, attempt = jsonl.number(sample, "mono"), jsonl.integer(sample, "attempt")
        if mono is None or attempt is None or mono == math.inf:
            return
        if (attempt, mono) <= (self.attempt, self.mono):
            return
        before, self.attempt, self.mono = self.mono, attempt, mono
        last, since_s = self.newest or (0, math.nan, 0), mono - before
        since_s = since_s if since_s > 0 else math.inf  # a boot is between the two samples
        was_stepping = last[1] == before
        pulses = [jsonl.mapping(each, "pulse") for each in jsonl.entries(sample, "ranks")]
        if not pulses or any(jsonl.text(each, "phase") not in STEPPING for each in pulses):
            if was_stepping and since_s <= NEAR_S:
                self.seconds += since_s
            elif was_stepping:
                self._cover(last[0], -1)
            return
        step = min(jsonl.integer(each, "step") or 0 for each in pulses)
        self.newest = attempt, mono, step
        if since_s == math.inf or (not was_stepping and since_s > NEAR_S):
            return
        is_same = was_stepping and attempt == last[0]
        self._take(sample, since_s, is_same)
        begun = step - last[2] if is_same else int((attempt, step) > (last[0], last[2]))
        self._cover(attempt, begun)

    def _cover(self, attempt: int, steps: int) -> None:
        if len(self.covered) < MAX_ATTEMPTS:
            self.covered[attempt] = self.covered.get(attempt, 0) + steps

    def _take(self, sample: Record, since_s: float, is_same: bool) -> None:
        counted_s = min(since_s, EVERY_S) if is_same else 0.0
        self.seconds += since_s
        gpus = jsonl.entries(sample, "gpus")[:MAX_GPUS]
        for number, gpu in {jsonl.integer(each, "index"): each for each in gpus}.items():
            use, index = jsonl.number(gpu, "util_pct"), number or 0
            if number is None or use is None or not 0 <= use <= 100 or gpu.get("state") != "ok":
                self.trouble = self.trouble or f"a sample has no utilisation of GPU {number}"
                use = 0.0
            self.busy_s[index] = self.busy_s.get(index, 0.0) + use / 100 * counted_s
            self.seen_s[index] = self.seen_s.get(index, 0.0) + counted_s


class Summary:
    """The totals of all ranks of a run; `attempts` and `stalls` are None while unknown."""

    def __init__(
        self, world: int = MAX_RANKS, attempts: int | None = None, stalls: int | None = None
    ):
        self.world, self.attempts, self.stalls = world, attempts, stalls
        self.stalls_seen = stalls or 0
        """Number of counted stalls, even if the count of an earlier supervisor is lost."""
        self.stalled_ts = 0.0
        """The time of an open stall that a former supervisor has counted, or 0."""
        self.ranks: dict[int, RankTotals] = {}
        self.gpus = GpuTotals()
        self.files: GateFiles | None = None
        """The result of `gate_files.read`, or None if there is none."""
        self.is_live = False
        """True if the newest attempt still writes records, so its next records are not missing."""
        self.loaded: dict[int, int] = {}
        """Attempt in which another process loaded a checkpoint; the key is the saved step."""
        self.overrides: dict[str, str] = {}
        """Reason, operator and time of requested overrides. The key is the gate's name."""
        self.former: Summary | None = None
        """The totals of the run from which this run resumed, if no step was left to do; else None.

        The gates use these totals in place of those of this run.
        """
        self.loaded_step = 0
        """The step of the checkpoint that all ranks of a continuing run have loaded, or 0."""
        self.loss_unit = ""
        """The unit of the loss, or "" for a foreign program."""
        self.name = ""
        """A note in `Gate.window` that these totals belong to an earlier run, or ""."""
        self.ends: dict[tuple[int, int], LastPulse] = {}
        """The last pulse of each rank that has ended. The key has the attempt and the rank."""

    def add(self, record: Record) -> bool:
        """Adds a heartbeat record; returns whether it is new."""
        rank = record["rank"]
        if rank not in self.ranks:
            self.ranks[rank] = RankTotals(rank)
        return self.ranks[rank].add(record)

    def add_event(self, event: Record) -> None:
        """Adds the event of a load or of an override; other events are ignored."""
        kind, step = jsonl.text(event, "kind"), jsonl.integer(event, "step")
        if kind == "checkpoint" and event.get("what") == "load" and step is not None:
            attempt = jsonl.integer(event, "attempt") or 0
            self.take_load(attempt, step, event.get("result") == "pass")
        elif kind == "override" and len(self.overrides) < MAX_OVERRIDES:
            stamp = clock(jsonl.number(event, "ts") or 0.0, "%Y-%m-%d %H:%M UTC", utc=True)
            reason, by = (clean(jsonl.text(event, key), 200) for key in ("reason", "by"))
            self.overrides[jsonl.text(event, "gate")[:80]] = f"{reason} ({by}, {stamp})"

    def take_load(self, attempt: int, step: int, passed: bool) -> None:
        """Adds the result of a load; a load that did not pass removes the step from `loaded`.

        At most `MAX_LOADED` loads are stored, the newest ones.
        """
        self.loaded.pop(step, None)
        if passed:
            self.loaded[step] = attempt
            if len(self.loaded) > MAX_LOADED:
                del self.loaded[next(iter(self.loaded))]

    def count_stall(self, since_ts: float) -> None:
        """Counts a stall that began at `since_ts`, if this time is after `stalled_ts`."""
        self.stalls_seen += since_ts > self.stalled_ts
        self.stalls = None if self.stalls is None else self.stalls_seen

    def set_counts(self, attempts: int | None, stalls: int | None) -> None:
        """Replaces the counts with those of the supervisor's events."""
        self.attempts, self.stalls, self.stalls_seen = attempts, stalls, stalls or 0

    def take_end(self, attempt: int, rank: int, found: Pulse | None) -> None:
        """Adds the last pulse of a process that has ended; `found` is None if it wrote no pulse."""
        counts = (found.records, found.nonfinite_steps, found.step) if found else (0, 0, 0)
        self.ends[attempt, rank] = LastPulse(attempt, rank, *counts)

    def as_dict(self) -> dict[str, Any]:
        """Returns the part of the totals that supervisor.json stores; the records have the rest."""
        return {"stalls": self.stalls, "ends": [asdict(end) for end in self.ends.values()]}

    def take_document(self, supervisor: Record) -> None:
        """Adds the last pulses in supervisor.json to the totals."""
        for entry in jsonl.entries(supervisor, "ends"):
            values = {each.name: jsonl.integer(entry, each.name) for each in fields(LastPulse)}
            if None not in values.values():
                end = LastPulse(**values)  # type: ignore[arg-type]
                self.ends[end.attempt, end.rank] = end

    # --- for the gates -------------------------------------------------------------------------

    @property
    def begin(self) -> int:
        """The step of the checkpoint of an earlier run from which this run resumed, or 0.

        If the ranks differ, this is the lowest of their steps.
        """
        ranks = self.different(range(self.world))
        return min((self.of_rank(rank).begin for rank in ranks), default=0)

    def of_rank(self, rank: int) -> RankTotals:
        return self.ranks.get(rank) or RankTotals(rank)

    def different(self, ranks: range) -> list[int]:
        """Returns each of `ranks` with a record or a last pulse, and the first without either.

        All ranks that have neither have equal totals, so a result for one of them holds for all.
        """
        known = self.ranks.keys() | {rank for _, rank in self.ends}
        other = islice((rank for rank in ranks if rank not in known), 1)
        return sorted({*other, *(rank for rank in known if rank in ranks)})

    def of_attempt(self, rank: int, attempt: int) -> AttemptTotals | None:
        totals = self.ranks.get(rank)
        return totals.attempts.get(attempt) if totals else None

    @property
    def all_attempts(self) -> range:
        """The attempts up to the newest with a record or an event, at most `MAX_ATTEMPTS`."""
        newest = max((each.newest for each in self.ranks.values()), default=0)
        return range(1, min(max(self.attempts or 0, newest), MAX_ATTEMPTS) + 1)

    def gap(self, ranks: range, surviving: bool, tails: bool) -> str:
        """Returns why the records do not cover the run, or "" if they do.

        With `surviving` only the surviving steps are checked. With `tails`, the last records of a
        rank without an exit record may be missing, because its pulse replaces them.
        """
        if not self.of_rank(0).progress:
            newest = self.of_attempt(0, self.of_rank(0).newest)
            has_exited = newest is not None and newest.start and newest.exit
            return NO_STEP if has_exited else "no progress record of rank 0"
        if self.attempts is None:
            return "the number of attempts is not available"
        if self.attempts > MAX_ATTEMPTS:
            return f"there are more than {MAX_ATTEMPTS} attempts"
        if surviving and (differing := self._starts_differ(ranks)):
            return differing
        for rank in self.different(ranks):
            if why := self._gap_of(rank, surviving, tails):
                return why
        return ""

    def _gap_of(self, rank: int, surviving: bool, tails: bool) -> str:
        assert self.attempts is not None
        newest, until = self.of_rank(rank).newest, math.inf
        if newest > self.attempts:
            return (f"rank {rank} has a record of attempt {newest}, but the supervisor counts "
                    f"{self.attempts}")  # fmt: skip
        for attempt in range(self.attempts, 0, -1):
            if until <= 1:
                break
            part = self.of_attempt(rank, attempt)
            is_open = self.is_live and attempt == self.attempts
            why = self._gap_in(part, self.ends.get((attempt, rank)), until, tails or is_open)
            why = "" if is_open and why.startswith(NO_END) else why
            if why:
                return f"rank {rank}, attempt {attempt}: {why}"
            if surviving and part is not None and part.start is not None:
                until = min(until, part.start)
        return ""

    @staticmethod
    def _gap_in(
        part: AttemptTotals | None, end: LastPulse | None, until: float, tails: bool
    ) -> str:
        """Returns a reason why records of steps below `until` may be missing, or ""."""
        if part is None:
            if end is None:
                return "no record"
            return _missing(1, end.records) if end.records else ""
        if part.trouble:
            return part.trouble
        for gap in part.holes:
            if gap.step < until:
                return _missing(gap.first, gap.last, gap.count)
        if part.missing_from >= until:
            return ""
        if part.exit is not None:
            if end is not None and end.records != part.last:
                return f"its exit record has number {part.last}, its pulse counted {end.records}"
            return ""
        if end is None:
            return f"{NO_END} {part.last} is not available"
        if end.records < part.last:
            return f"its newest record has number {part.last}, its pulse counted {end.records}"
        if end.records > part.last and not tails:
            return _missing(part.last + 1, end.records)
        return ""

    def _starts_differ(self, ranks: range) -> str:
        """Returns a sentence on a later attempt that ranks began at different steps, or ""."""
        for attempt in self.all_attempts[1:]:
            starts = {
                part.start: rank for rank in sorted(self.ranks) if rank in ranks
                and (part := self.of_attempt(rank, attempt)) is not None and part.start is not None
            }  # fmt: skip
            if len(starts) > 1:
                shown = ", ".join(f"rank {rank} at {step}" for step, rank in sorted(starts.items()))
                return f"the ranks started attempt {attempt} at different steps: {shown}"
        return ""

    @property
    def resumed_at_end(self) -> int:
        """The step of the checkpoint that all ranks loaded, or 0.

        The value is above 0 only if the run is known to have one attempt and no stall, no rank
        recorded a step, and each rank exited with code 0.
        """
        parts = [self.of_attempt(rank, 1) for rank in range(self.world)]
        starts = {part.start if part and part.exit and part.exit[1] == 0 else 0 for part in parts}
        if (self.attempts, self.stalls) != (1, 0) or any(t.progress for t in self.ranks.values()):
            return 0
        return (starts.pop() or 1) - 1 if len(starts) == 1 else 0

    def all_parts(self) -> Iterator[tuple[int, int, AttemptTotals, LastPulse | None]]:
        """Yields attempt, rank, totals and last pulse for each rank with records in an attempt."""
        for attempt in self.all_attempts:
            for rank, totals in sorted(self.ranks.items()):
                part = totals.attempts.get(attempt)
                if part is not None:
                    yield attempt, rank, part, self.ends.get((attempt, rank))


def _missing(first: int, last: int, count: int | None = None) -> str:
    if first == last:
        return f"record {first} is missing"
    some = "" if count in (None, last - first + 1) else f"{count} of the "
    return f"{some}records {first} to {last} are missing"
