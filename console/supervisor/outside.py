"""A run directory watched from outside: with a supervisor or without, of either system.

What a rank does comes from its pulse, from the supervisor's last sample while that is young, or
else from the age of its records.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console import plain
from console.diagnose.cadence import Cadence
from console.diagnose.readings import Readings
from console.diagnose.stall import Seen
from console.model import Rank, RunState
from console.plans.confirm import confirmed
from console.sources import ancestor, presence, process
from console.sources.run import RunSource
from console.supervisor.follow import Disk, Story
from console.supervisor.watching import readings
from trainers.contract import jsonl, plan, rundir
from trainers.contract.errors import UsageError
from trainers.contract.plan import Watch

ENDING = frozenset(("halting", "stopping", "restarting"))
"""In these, ranks may stand still: they are being ended."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What one look at a directory found."""

    run: Path
    attempt: int
    watch: Watch
    readings: Readings


class _Records:
    """The heartbeats of one attempt: their story, and the rhythm of each rank."""

    def __init__(self, watch: Watch):
        self.story, self._startup_s = Story(), watch.startup_s
        self.cadences: dict[int, Cadence] = {}
        self.newest_ts = 0.0

    def take(self, record: dict[str, Any]) -> None:
        self.story.take(record)
        held = self.cadences.setdefault(record["rank"], Cadence(self._startup_s))
        held.take(record, time.monotonic(), time.time())
        self.newest_ts = jsonl.number(record, "ts") or 0.0

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
        self._source = RunSource(path, taken=self._take)
        self._of: tuple[Path, int] | None = None

    def _follow(self, run: Path, attempt: int) -> None:
        """Begins anew with another run or attempt."""
        if self._of != (run, attempt):
            self._of, self._old = (run, attempt), ancestor.is_one(run)
            self._watch = ancestor.WATCH if self._old else _watch_of(run)
            self._records, self._disk = _Records(self._watch), Disk(run)

    def _take(self, run: Path, record: dict[str, Any]) -> None:
        self._follow(run, record["attempt"])
        self._records.take(record)

    def poll(self) -> Moment | None:
        """Returns what is there now, None before the launch has a run."""
        state, run = confirmed(self._source), self._source.run_path
        if plain.is_over(state):
            self.over = f"{state.id} is {state.state}" + (f": {state.why}" if state.why else "")
            self.exit_code = plain.exit_code(state, self._source.whole)
        if run is None:
            return None
        self._follow(run, state.attempt)
        if self._old and ancestor.has_ended(run, self._records.newest_ts):
            self.over = "the run has ended: metrics.json is its last word"
        return Moment(run, state.attempt, self._watch, self._readings(state))

    def _readings(self, state: RunState) -> Readings:
        pulsed = tuple(seen for rank in state.ranks if (seen := self._pulsed(rank, state)))
        idle = state.state in ENDING or self.over
        here = not self._old and state.host in ("", rundir.host_name())
        rss_mib = {r.rank: r.rss_mib for r in state.ranks if r.rss_mib is not None}
        return readings(
            self._records.story, () if idle else pulsed or self._records.seen(), rss_mib,
            state.gpus, _disk(self._disk), here, not pulsed,
        )  # fmt: skip

    def _pulsed(self, rank: Rank, state: RunState) -> Seen | None:
        """Returns a rank by its pulse; None where the last that is known of it is old."""
        held = rank.pulse
        if held is None or not (held.live or held.age_s < presence.SILENT_S):
            return None
        here = held.live and rank.host in ("", rundir.host_name())
        letter = process.state(rank.pid) if here else rank.state or "?"
        return Seen(
            rank.rank, rank.pid, letter, held.step, held.phase, held.since_s, held.collectives,
            self._records.story.p99_s(rank.rank, held.phase),
        )  # fmt: skip


def _watch_of(run: Path) -> Watch:
    """Returns the limits that a run was born with, the usual ones where it says none."""
    born = rundir.read_json(run / rundir.RUN) or {}
    try:
        return plan.section(Watch, jsonl.mapping(born, "watch"), rundir.RUN)
    except UsageError:
        return Watch()
