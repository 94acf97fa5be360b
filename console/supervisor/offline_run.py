"""Polls a run's files into `Readings` without a supervisor, for `watchdog` and `diagnose`.

Legacy run directories can be read. The evidence about a rank comes from its pulse, or from a
recent sample of the supervisor. If no pulse can be used, the evidence comes from the records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from console import plan, status_text
from console.diagnose.rank_evidence import RankEvidence, by_records, why_unconfirmed, with_records
from console.diagnose.readings import Readings, setting_values
from console.model import Rank, RunState
from console.plan import Watch
from console.plans.gate_check import poll_confirmed
from console.sources import legacy, liveness, process
from console.sources.pace import RECORDS_LATE_S
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.sources.run import RunSource
from console.supervisor.monitor import readings
from console.supervisor.run_files import Disk, Environment, NewestRow
from trainers.contract import jsonl, rundir
from trainers.contract.errors import UsageError

WRITTEN = ("*.csv", "*.log", "logs/attempt*/rank*.log", "checkpoints/*", "checkpoint_*", "tb/*")
"""Files that a training writes besides its records, in new and in legacy run directories."""
ENDING = frozenset(("halting", "stopping", "restarting"))
"""In these states, ranks without progress are not stalled: they end or have ended."""


def stall_doubt(run: Path) -> str:
    """Returns why the other files of a run do not confirm a stall, or "" if they confirm it.

    If a CSV file, log or checkpoint was written T s after the newest record, and T is more than
    `RECORDS_LATE_S`, then this file contradicts a stall for T s. If there is no such file, or no
    record, nothing confirms the records.
    """
    records = _newest(run.glob("heartbeat_rank*.jsonl"))
    others = _newest(path for pattern in WRITTEN for path in run.glob(pattern))
    if others is None or records is None:
        return "only its records show whether the run makes progress"
    late_s, since_s = others[0] - records[0], time.time() - others[0]
    if late_s > RECORDS_LATE_S and since_s < late_s:
        return f"{others[1].name} was written {late_s:.0f} s after the newest record"
    return ""


def _newest(paths: Iterable[Path]) -> tuple[float, Path] | None:
    """Returns the time and the path of the newest file, or None if there is no file."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((os.lstat(path).st_mtime, path))
    return max(found, default=None)


def _disk(disk: Disk) -> dict[str, float]:
    with contextlib.suppress(OSError):
        return disk.poll()
    return {}


class OfflineRun:
    """A run, or the current run of a launch; `over` says how it ended, or is "" before that."""

    over, exit_code = "", 0

    def __init__(self, path: Path):
        self._path, self._source = path, RunSource(path, reads="end")
        self.of: tuple[Path, int] | None = None
        """The run and the attempt of the last readings."""
        self.watch, self.settings = Watch(), setting_values({})
        self.state: RunState | None = None
        """The state at the last poll."""
        self._settled = False

    def _open(self, run: Path, attempt: int) -> None:
        """Prepares to read another run or attempt."""
        self.of, self._settled = (run, attempt), False
        self._old = legacy.is_legacy(run)
        record = rundir.read_json(run / rundir.RUN) or {}
        self.settings = setting_values(record)
        self.watch = legacy.WATCH if self._old else _watch_of(record)
        self._disk, self._csv = Disk(run), NewestRow(run)
        self._env = Environment(run, attempt)

    def poll(self) -> Readings | None:
        """Polls the run; returns its readings, or None while the launch has no run."""
        state, run = self._source.poll(), self._source.run_path
        if status_text.is_over(state):
            state = poll_confirmed(RunSource(self._path))
            self.over = f"{state.id} is {state.state}" + (f": {state.why}" if state.why else "")
            self.exit_code = status_text.exit_code(state, self._source.is_launch)
        self.state = state
        if run is None:
            return None
        if self.of != (run, state.attempt):
            self._open(run, state.attempt)
        return self._readings(run, state)

    def _readings(self, run: Path, state: RunState) -> Readings:
        heads = self._source.reducer.heads(state.attempt)
        pulsed = tuple(
            seen for rank in state.ranks
            if (seen := _pulsed(rank, heads.get(rank.rank, NO_RECORDS), state.attempt))
        )  # fmt: skip
        if all(seen.doubt for seen in pulsed):
            pulsed = ()  # no pulse can be trusted, so only the records are used
        if pulsed:
            known = {seen.rank for seen in pulsed}
            pulsed += tuple(
                RankEvidence(rank.rank, rank.pid, "?", 0, "", 0.0, doubt="lost")
                for rank in state.ranks
                if rank.rank not in known and not rank.exit
            )  # fmt: skip
        idle = state.state in ENDING or self.over
        here = not self._old and state.host in ("", rundir.host_name())
        rss_mib = {r.rank: r.rss_mib for r in state.ranks if r.rss_mib is not None}
        if not (self._settled or state.behind_bytes):
            self._settled = True
            self._source.reducer.mark_old()
        doubt = why_unconfirmed(pulsed, self.watch) if pulsed else stall_doubt(run)
        return readings(
            heads, () if idle else pulsed or _recorded(heads, self.watch), rss_mib,
            state.gpus, _disk(self._disk), here, not pulsed, self._csv.poll(), doubt,
            self._env.poll(),
        )  # fmt: skip


def _pulsed(rank: Rank, head: LatestRecords, attempt: int) -> RankEvidence | None:
    """Returns the evidence about a rank from its pulse, or None if the pulse is old or missing."""
    last = rank.pulse
    if last is None or last.since_s is None:
        return None
    if not (last.live or last.age_s < liveness.SILENT_S):
        return None
    here = last.live and rank.host in ("", rundir.host_name())
    letter = process.state(rank.pid) if here else rank.state or "?"
    collectives = last.collectives or 0
    seen = RankEvidence(
        rank.rank, rank.pid, letter, last.step, last.phase, last.since_s, collectives
    )  # fmt: skip
    return with_records(seen, head, attempt, lagging=not last.live)


def _recorded(heads: Mapping[int, LatestRecords], watch: Watch) -> tuple[RankEvidence, ...]:
    """Returns evidence from the records of the ranks that record steps, or else of all ranks."""
    stepping = {rank: head for rank, head in heads.items() if head.last.record["step"]}
    return tuple(by_records(rank, head, watch) for rank, head in (stepping or heads).items())


def _watch_of(record: Mapping[str, Any]) -> Watch:
    """Returns the limits in run.json, or the defaults if run.json has no valid limits."""
    try:
        return plan.section(Watch, jsonl.mapping(record, "watch"), rundir.RUN)
    except UsageError:
        return Watch()
