"""Reads and diagnoses a run outside its supervisor, for `watchdog` and `diagnose`.

Legacy run directories can be read. The evidence about a rank comes from its pulse, or from a
recent sample of the supervisor. If no pulse can be used, the evidence comes from the records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from console import plan, status_text
from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import (
    ENDED_STATES,
    NAMED_AFTER_S,
    RankEvidence,
    by_records,
    moment_of,
    names,
    unfinished,
    unusable_pulses,
    why_unconfirmed,
    with_records,
)
from console.diagnose.readings import Readings, setting_values
from console.diagnose.verdict import diagnose, explain
from console.model import Rank, RunState, Verdict
from console.plan import Watch
from console.plans.gate_check import poll_confirmed
from console.sources import legacy, liveness, process, verdicts
from console.sources.nvml import Nvml
from console.sources.pace import RECORDS_LATE_S
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.sources.run import RunSource
from console.supervisor.evidence import Collector
from console.supervisor.run_files import Disk, Environment, NewestRow
from console.supervisor.sampling import readings
from trainers.contract import jsonl, rundir
from trainers.contract.errors import UsageError

WRITTEN = ("*.csv", "*.log", "logs/attempt*/rank*.log", "checkpoints/*", "checkpoint_*", "tb/*")
"""Files that a training writes besides its records, in new and in legacy run directories."""
ENDING = frozenset(("halting", "stopping", "restarting"))
"""In these states, ranks without progress are not stalled: they end or have ended."""
Outlook = Literal["stalled", "slow", "no stall", "unknown", "ending", "ended"]
"""In a "slow" run, ranks have not moved for some seconds, but are within their stall limits."""
SLOW_S = 5.0
POLL_S = 0.1
SILENT_ALERTS = frozenset(
    (liveness.SUPERVISOR_STOPPED, liveness.WORK_STOPPED, "supervisor-silent")
)  # fmt: skip


def stall_doubt(run: Path) -> str:
    """Returns why the other files of a run do not confirm a stall, or "" if they confirm it.

    If the newest file of `WRITTEN` is newer than the newest record by more than `RECORDS_LATE_S`,
    it contradicts a stall for that time: a log written 90 s after the newest record contradicts a
    stall for 90 s. A stall is also not confirmed if one of the two files does not exist, or if the
    newest record is in the future (a clock was set back).
    """
    try:
        records = _newest(run.glob("heartbeat_rank*.jsonl"))
        others = _newest(path for pattern in WRITTEN for path in run.glob(pattern))
    except OSError as error:
        return f"its files cannot be read ({error.strerror})"
    if others is None or records is None:
        return "only its records show whether the run makes progress"
    late_s, since_s = others[0] - records[0], time.time() - others[0]
    if late_s > RECORDS_LATE_S and since_s < late_s:
        return f"{others[1].name} was written {late_s:.0f} s after the newest record"
    return "" if liveness.age(records[0]) is not None else "the newest record is in the future"


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
    """A run, or the current run of a launch; `over` says how the run ended, or is ""."""

    state: RunState
    """The state at the last poll."""

    def __init__(self, path: Path):
        self._path, self._source = path, RunSource(path, reads="end")
        self.of: tuple[Path, int] | None = None
        """The run and the attempt of the last readings."""
        self.watch, self.settings = Watch(), setting_values({})
        self.over, self.exit_code = "", 0
        self._settled = False

    @property
    def run(self) -> Path:
        """The run of the last readings; without readings, the path of the launch or run."""
        return self.of[0] if self.of else self._path

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
        """Polls the run; returns its readings, or None while there is no run or it cannot be read.

        After the first readings of an attempt, the run has readings even if it cannot be read.
        """
        state, run = self._source.poll(), self._source.run_path
        if status_text.is_over(state, self._source.is_launch):
            state = poll_confirmed(RunSource(self._path))
            self.over = _end_words(state)
        self.exit_code = status_text.exit_code(state, self._source.is_launch)
        self.state = state
        if run is None or (self.of != (run, state.attempt) and rundir.names(run) is None):
            return None
        if self.of != (run, state.attempt):
            self._open(run, state.attempt)
        return self._readings(run, state)

    def _readings(self, run: Path, state: RunState) -> Readings:
        heads = self._source.heads
        pulsed = tuple(
            seen for rank in state.ranks
            if (seen := _pulsed(rank, heads.get(rank.rank, NO_RECORDS), not self.settings))
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
        idle = state.state in ENDING | liveness.ENDED or self.over
        here = not (self._old or _elsewhere(run))
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


def _end_words(state: RunState) -> str:
    return f"{state.id} is {state.state}" + (f": {state.why}" if state.why else "")


def _pulsed(rank: Rank, head: LatestRecords, is_foreign: bool) -> RankEvidence | None:
    """Returns the evidence about a rank from its pulse, or None if the pulse is old or missing."""
    last = rank.pulse
    if last is None or last.since_s is None or last.age_s is None:
        return None
    if not (last.live or last.age_s < liveness.SILENT_S):
        return None
    letter = process.state(rank.pid) if last.live else rank.state or "?"
    collectives = last.collectives or 0
    seen = RankEvidence(
        rank.rank, rank.pid, letter, last.step, last.phase, last.since_s, collectives,
        is_foreign=is_foreign,
    )  # fmt: skip
    return with_records(seen, head, lagging=not last.live)


def _recorded(heads: Mapping[int, LatestRecords], watch: Watch) -> tuple[RankEvidence, ...]:
    """Returns evidence from the records of the ranks that record steps, or else of all ranks."""
    stepping = {rank: head for rank, head in heads.items() if head.last["step"]}
    return tuple(by_records(rank, head, watch) for rank, head in (stepping or heads).items())


def _watch_of(record: Mapping[str, Any]) -> Watch:
    """Returns the limits in run.json, or the defaults if run.json has no valid limits."""
    try:
        return plan.section(Watch, jsonl.mapping(record, "watch"), rundir.RUN)
    except UsageError:
        return Watch()


# --- the diagnosis -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result for one run; `why` explains the outlook, or is "" if the verdict explains it.

    `source` says where the verdict comes from. `missing` lists missing evidence, in addition to
    that in the verdict.
    """

    outlook: Outlook
    state: RunState
    why: str = ""
    verdict: Verdict | None = None
    source: str = ""
    ranks: tuple[RankEvidence, ...] = ()
    missing: tuple[str, ...] = ()
    exit_code: int = 0
    run: Path | None = None
    watch: Watch = field(default_factory=Watch)
    """The stall limits of the run."""


def is_supervised(state: RunState) -> bool:
    """Returns whether a working supervisor decides the state of a run that has not ended."""
    silent = any(alert.id in SILENT_ALERTS for alert in state.alerts)
    return state.state not in ("unsupervised", "lost", "queued") and not silent


def diagnosis(path: Path) -> Diagnosis:
    """Diagnoses a launch or run; takes some seconds if this process collects the evidence itself.

    For a run that has ended, the last verdict is used. If a working supervisor has detected a
    stall, its newest verdict is used. If there is none and ranks make no progress, this process
    collects the evidence itself, with the code of the supervisor. It does not do so while the ranks
    are being ended.
    """
    source = OfflineRun(path)
    before = _poll(source)
    if isinstance(before, Diagnosis):
        return before
    of, watch = source.of, source.watch
    early = replace(watch, stall_floor_s=min(SLOW_S, watch.stall_floor_s))
    if diagnose(before.ranks, early, time.time()) is None:
        return _without_verdict(source, before.ranks)
    evidence = collect(source.run, before.ranks)
    after = _poll(source)
    if isinstance(after, Diagnosis):
        return after
    ranks, state = after.ranks, source.state
    moment = moment_of(ranks, watch, time.time())
    if source.of != of or moment is None or diagnose(ranks, early, time.time()) is None:
        return _without_verdict(source, ranks)
    found, why = explain(moment, evidence), ""
    if not moment.is_stalled:
        why = "within its stall limit; so far the evidence says:"
        found = replace(found, sure="medium" if found.sure == "high" else found.sure)
    if not (evidence.after or evidence.stacks or evidence.flights):
        found = replace(found, sure="low")  # the only source is pulses or records
    missing = (*filter(None, (after.stall_doubt,)), *_without_processes(Path(state.path)))
    return Diagnosis(
        "slow" if why else "stalled", state, why, found, "evidence collected now",
        ranks, missing, int(not why), source.run, watch,
    )  # fmt: skip


def _poll(source: OfflineRun) -> Diagnosis | Readings:
    """Polls a run; returns a diagnosis that needs no new evidence, or else the readings.

    The ranks in these readings come from `ranks_of`.
    """
    now, state = source.poll(), source.state
    run = source.of[0] if source.of else None
    if state.launch and state.launch.state == "waiting" and is_supervised(state):
        return Diagnosis("no stall", state, f"the launch waits: {state.launch.why}", run=run)
    if source.over or state.state in liveness.ENDED:  # the launch of an ended run may continue
        over = source.over or _end_words(state)
        last = (verdicts.newest(run) if run else None) or state.verdict
        last = last and last.of_past()
        why = over if last else f"{over}; no verdict is recorded"
        code = source.exit_code
        return Diagnosis("ended", state, why, last, "last verdict of the run", (), (), code, run)
    if run is None or now is None:
        return Diagnosis("unknown", state, f"no run can be read yet: {state.why}", exit_code=1)
    if state.state in ENDING:
        return Diagnosis("ending", state, f"the ranks are being ended: {state.why}", run=run)
    if is_supervised(state) and state.state == "stalled" and state.verdict:
        return Diagnosis("stalled", state, "", state.verdict, "supervisor", exit_code=1, run=run)
    return replace(now, ranks=ranks_of(state, run, now))


def _without_verdict(source: OfflineRun, ranks: tuple[RankEvidence, ...]) -> Diagnosis:
    """Returns "no stall" if all ranks show progress, or else "unknown".

    A run that starts also has "no stall" during its first `startup_s`. Once a rank has ended
    without reporting its exit, it has "unknown".
    """
    state, run, watch = source.state, source.run, source.watch
    silent = [each for each in ranks if not each.phase]
    gone = [each for each in ranks if each.state in ENDED_STATES and each.phase != "exit"]
    why, missing = "", _without_processes(Path(state.path))
    if not ranks:
        why = "no rank has a pulse or a record yet"
    elif doubtful := unusable_pulses([each for each in ranks if each.doubt]):
        why = doubtful
    elif gone:
        why = status_text.rank_names((each.rank for each in gone), "has ended", "have ended")
    elif silent:
        why = f"{names(silent)}: no pulse and no record shows progress"
    age_s, starts = liveness.age(state.since_ts), state.state in ("queued", "starting")
    if why and (gone or not starts or age_s is None or age_s > watch.startup_s):
        text = f"whether the run progresses is not known: {why}"
        return Diagnosis("unknown", state, text, None, "", ranks, missing, 1, run, watch)
    calm = f"the run is starting: {why}" if why else "every rank is within its stall limit"
    return Diagnosis("no stall", state, calm, None, "", ranks, missing, 0, run, watch)


def ranks_of(state: RunState, run: Path, now: Readings) -> tuple[RankEvidence, ...]:
    """Returns the ranks of the last poll, each as `_with_process` returns it."""
    document = rundir.read_json(run / rundir.SUPERVISOR, below=run) or {}
    workers = {jsonl.integer(entry, "rank"): process.identity_in(document, entry)
               for entry in jsonl.entries(document, "workers")}  # fmt: skip
    silent_s = min(liveness.age(state.since_ts) or 0.0, NAMED_AFTER_S + 1)
    ranks = now.ranks or [
        RankEvidence(each.rank, each.pid, "?", 0, "", silent_s)
        for each in state.ranks if each.pid and not each.exit
    ]  # fmt: skip
    return tuple(_with_process(each, workers.get(each.rank, {})) for each in ranks)


def _with_process(rank: RankEvidence, worker: Mapping[str, Any]) -> RankEvidence:
    """Returns a rank with the state of its process, which `worker` of supervisor.json identifies.

    If `worker` does not identify it, a rank in the phase `exit` is returned unchanged. A rank of
    this host whose pid no longer exists gets the state `GONE`. Any other rank gets pid 0.
    """
    state, pid = process.state(rank.pid) if rank.pid > 0 else "?", jsonl.integer(worker, "pid")
    has_ended = state in ("Z", "X") and worker.get("boot_id") == rundir.boot_id()
    if pid == rank.pid and (rundir.is_alive(worker) or has_ended):
        return replace(rank, state=state, start_ticks=rundir.start_ticks(rank.pid))
    if rank.phase == "exit":
        return rank
    if state == process.GONE and liveness.can_see(worker):
        return replace(rank, state=state)
    return replace(rank, pid=0)


def _elsewhere(run: Path) -> str:
    """Returns where the ranks of a run are, if this reader cannot see them, or ""."""
    documents = (
        rundir.read_json(run / name, below=run) for name in (rundir.SUPERVISOR, rundir.RUN)
    )
    return liveness.elsewhere(next(filter(None, documents), {}))


def _without_processes(run: Path) -> tuple[str, ...]:
    where = _elsewhere(run)
    return (f"no process evidence, because the ranks run {where}; run diagnose there",) * bool(
        where
    )


def collect(run: Path, ranks: Sequence[RankEvidence]) -> Evidence:
    """Returns the evidence about `ranks`; it has only dumps made since a rank last moved."""
    still_s = min((each.unchanged_s for each in unfinished(ranks)), default=0.0)
    nvml = Nvml()
    nvml.start()
    collector = Collector(run, nvml.rows, lambda: None, time.time() - still_s)
    try:
        while collector.complete is None:
            collector.poll(ranks)
            time.sleep(POLL_S)
    finally:
        nvml.stop()
    return collector.complete
