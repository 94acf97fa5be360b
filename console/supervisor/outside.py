"""A run directory watched from outside: with a supervisor or without, of either system.

What a rank does comes from its pulse, from the supervisor's last sample while that is young, or
else from the age of its records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console import plain
from console.diagnose.cadence import Cadence
from console.diagnose.readings import Readings
from console.diagnose.stall import RECORDS_LATE_S, Seen, disagreement
from console.model import Rank, RunState
from console.plans.confirm import confirmed
from console.sources import ancestor, presence, process
from console.sources.run import RunSource
from console.supervisor.follow import Disk, NewestRow, Story
from console.supervisor.watching import readings
from trainers.contract import jsonl, plan, rundir
from trainers.contract.errors import UsageError
from trainers.contract.plan import Watch

WRITTEN = ("*.csv", "*.log", "logs/attempt*/rank*.log", "checkpoints/*", "checkpoint_*", "tb/*")
"""Files that a training of either system writes beside its records."""
KEPT_ATTEMPTS = 4
ENDING = frozenset(("halting", "stopping", "restarting"))
"""In these, ranks may stand still: they are being ended."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The result of one look at a directory."""

    run: Path
    attempt: int
    watch: Watch
    readings: Readings


def other_files_rest(run: Path) -> str:
    """Says why a run whose records stopped may go on all the same, "" when nothing else goes on.

    Asks the times of what a training writes beside its records: CSV files, logs, checkpoints. What
    was written a little after the newest record, and nothing since for longer, goes on no more.
    """
    records = _newest(run.glob("heartbeat_rank*.jsonl"))
    others = _newest(path for pattern in WRITTEN for path in run.glob(pattern))
    if others is None or records is None:
        return "nothing but its records shows whether the run goes on"
    late_s, since_s = others[0] - records[0], time.time() - others[0]
    if late_s > RECORDS_LATE_S and since_s < late_s:
        return f"{others[1].name} was written {late_s:.0f} s after the newest record"
    return ""


def _newest(paths: Iterable[Path]) -> tuple[float, Path] | None:
    """Returns the time and the path of the file that was written last, None without any."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((os.lstat(path).st_mtime, path))
    return max(found, default=None)


class _Records:
    """The heartbeats of one attempt: their story, and the rhythm of each rank."""

    def __init__(self, watch: Watch):
        self.story, self._startup_s = Story(), watch.startup_s
        self.cadences: dict[int, Cadence] = {}

    def take(self, record: dict[str, Any]) -> None:
        self.story.take(record)
        held = self.cadences.setdefault(record["rank"], Cadence(self._startup_s))
        held.take(record, time.monotonic(), time.time())

    def seen(self) -> tuple[Seen, ...]:
        """Returns the ranks that record steps as evidence; before any does, all of them."""
        now = time.monotonic()
        stepping = {r: c for r, c in self.cadences.items() if c.steps_seen} or self.cadences
        return tuple(cadence.seen(rank, now) for rank, cadence in stepping.items())


def _disk(disk: Disk) -> dict[str, float]:
    with contextlib.suppress(OSError):
        return disk.look()
    return {}


class Contract:
    """A run, or a launch's current one; `over` says how the run ended, "" while it has not."""

    over, exit_code = "", 0

    def __init__(self, path: Path):
        self._path, self._source = path, RunSource(path, taken=self._take, reads="end")
        self._of: tuple[Path, int] | None = None
        self._run: Path | None = None
        self._attempts: dict[int, _Records] = {}

    def _follow(self, run: Path, attempt: int) -> None:
        """Begins anew with another run or attempt."""
        if self._of != (run, attempt):
            self._of, self._settled = (run, attempt), False
            self._records = self._records_of(run, attempt)
            self._disk, self._csv = Disk(run), NewestRow(run)

    def _records_of(self, run: Path, attempt: int) -> _Records:
        """Returns the records of an attempt, also of the next one, of which nobody knows yet."""
        if self._run != run:
            self._run, self._old = run, ancestor.is_one(run)
            self._watch = ancestor.WATCH if self._old else _watch_of(run)
            self._attempts.clear()
        if attempt not in self._attempts:
            self._attempts[attempt] = _Records(self._watch)
            while len(self._attempts) > KEPT_ATTEMPTS:
                del self._attempts[min(self._attempts)]
        return self._attempts.get(attempt) or _Records(self._watch)

    def _take(self, run: Path, record: dict[str, Any]) -> None:
        self._records_of(run, record["attempt"]).take(record)

    def poll(self) -> Moment | None:
        """Returns what is there now, None before the launch has a run."""
        state, run = self._source.poll(), self._source.run_path
        if plain.is_over(state):
            state = confirmed(RunSource(self._path))
            self.over = f"{state.id} is {state.state}" + (f": {state.why}" if state.why else "")
            self.exit_code = plain.exit_code(state, self._source.whole)
        if run is None:
            return None
        self._follow(run, state.attempt)
        return Moment(run, state.attempt, self._watch, self._readings(run, state))

    def _readings(self, run: Path, state: RunState) -> Readings:
        pulsed = tuple(seen for rank in state.ranks if (seen := self._pulsed(rank, state)))
        if all(seen.doubt for seen in pulsed):
            pulsed = ()  # they tell nothing, so the rhythm of the records has to
        if pulsed:
            known = {seen.rank for seen in pulsed}
            pulsed += tuple(
                Seen(rank.rank, rank.pid, "?", 0, "", 0.0, doubt="lost") for rank in state.ranks
                if rank.rank not in known and not rank.exit
            )  # fmt: skip
        idle = state.state in ENDING or self.over
        here = not self._old and state.host in ("", rundir.host_name())
        rss_mib = {r.rank: r.rss_mib for r in state.ranks if r.rss_mib is not None}
        if not (self._settled or state.behind_bytes):
            self._settled = True
            self._records.story.settle()
        doubt = disagreement(pulsed, self._watch) if pulsed else other_files_rest(run)
        return readings(
            self._records.story, () if idle else pulsed or self._records.seen(), rss_mib,
            state.gpus, _disk(self._disk), here, not pulsed, self._csv.look(), doubt,
        )  # fmt: skip

    def _pulsed(self, rank: Rank, state: RunState) -> Seen | None:
        """Returns a rank by its pulse; None where the last that is known of it is old."""
        held = rank.pulse
        if held is None or held.since_s is None:
            return None
        if not (held.live or held.age_s < presence.SILENT_S):
            return None
        here = held.live and rank.host in ("", rundir.host_name())
        letter = process.state(rank.pid) if here else rank.state or "?"
        return self._records.story.seen(
            rank.rank, rank.pid, letter, attempt=state.attempt, step=held.step, phase=held.phase,
            still_s=held.since_s, collectives=held.collectives or 0, lagging=not held.live,
        )  # fmt: skip


def _watch_of(run: Path) -> Watch:
    """Returns the limits that a run was born with, the usual ones where it says none."""
    born = rundir.read_json(run / rundir.RUN) or {}
    try:
        return plan.section(Watch, jsonl.mapping(born, "watch"), rundir.RUN)
    except UsageError:
        return Watch()
