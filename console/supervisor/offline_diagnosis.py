"""Diagnoses the present state of a run, for `nsa-console diagnose`, even without a supervisor.

If a supervisor works and has detected a stall, its newest verdict is used. For a run that has
ended, the last verdict is used. In other runs, if ranks that are not being ended make no progress,
this process collects the evidence itself, with the code of the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import (
    NAMED_AFTER_S,
    RankEvidence,
    moment_of,
    names,
    unusable_pulses,
)
from console.diagnose.readings import Readings
from console.diagnose.verdict import diagnose, explain
from console.model import RunState, Verdict
from console.plan import Watch
from console.sources import liveness, process, verdicts
from console.sources.nvml import Nvml
from console.supervisor.evidence import Collector
from console.supervisor.offline_run import ENDING, OfflineRun
from trainers.contract import jsonl, rundir

Outlook = Literal["stalled", "slow", "no stall", "unknown", "ending", "ended"]
"""In a "slow" run, ranks have not moved for some seconds, but are within their stall limits."""
SLOW_S = 5.0
POLL_S = 0.1
SILENT_ALERTS = frozenset(
    (liveness.SUPERVISOR_STOPPED, liveness.WORK_STOPPED, "supervisor-silent")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result for one run; `why` explains the outlook, or is "" if the verdict explains it.

    `source` says where the verdict comes from; `missing` adds to the missing evidence of the
    verdict.
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
    """Returns whether a supervisor that is alive decides the state of the run."""
    silent = any(alert.id in SILENT_ALERTS for alert in state.alerts)
    return state.state not in ("unsupervised", "lost", "queued") and not silent


class Diagnoser:
    """Reads one run; `diagnose` may be called several times."""

    def __init__(self, path: Path):
        self._source = OfflineRun(path)

    def _poll(self) -> tuple[RunState, Path | None, Readings | None]:
        now, state = self._source.poll(), self._source.state
        assert state is not None
        return state, self._source.of[0] if self._source.of else None, now

    def diagnose(self) -> Diagnosis:
        """Diagnoses the run; takes some seconds if this process collects the evidence itself."""
        state, run, now = self._poll()
        if self._source.over:
            return self._of_ended(state, run)
        if state.launch and state.launch.state == "waiting" and is_supervised(state):
            return Diagnosis("no stall", state, f"the plan waits: {state.launch.why}", run=run)
        if run is None or now is None:
            return Diagnosis("unknown", state, f"there is no run yet: {state.why}", exit_code=1)
        if state.state in ENDING:
            return Diagnosis("ending", state, f"the ranks are being ended: {state.why}", run=run)
        if is_supervised(state) and state.state == "stalled":
            why = "" if state.verdict else "the supervisor has not written a verdict yet"
            return Diagnosis(
                "stalled", state, why, state.verdict, "supervisor", exit_code=1, run=run
            )
        return self._own(state, run, self._ranks(state, run, now))

    def _of_ended(self, state: RunState, run: Path | None) -> Diagnosis:
        last = (verdicts.newest(run) if run else None) or state.verdict
        why = "" if last else "no verdict was given while it ran"
        return Diagnosis(
            "ended", state, f"{self._source.over}{'; ' if why else ''}{why}", last,
            "last verdict of the run", exit_code=self._source.exit_code, run=run,
        )  # fmt: skip

    def _own(self, state: RunState, run: Path, ranks: tuple[RankEvidence, ...]) -> Diagnosis:
        """Diagnoses the run with evidence that this process collects now."""
        watch = self._source.watch
        early = replace(watch, stall_floor_s=min(SLOW_S, watch.stall_floor_s))
        if diagnose(ranks, early, time.time()) is None:
            return self._without_verdict(state, run, ranks)
        evidence = collect(run, ranks)
        state, _, now = self._poll()
        after = self._ranks(state, run, now) if now else ()
        if self._source.over:
            return self._of_ended(state, run)
        moment = moment_of(after, watch, time.time())
        if moment is None or diagnose(after, early, time.time()) is None:
            return self._without_verdict(state, run, after)
        found, why = explain(moment, evidence), ""
        if not moment.is_stalled:
            why = "within its stall limit; so far the evidence says:"
            found = replace(found, sure="medium" if found.sure == "high" else found.sure)
        if not (evidence.after or evidence.stacks or evidence.flights):
            found = replace(found, sure="low")  # the only source is pulses or records
        doubt = now.stall_doubt if now else ""
        missing = (*filter(None, (doubt,)), *_elsewhere(state))
        return Diagnosis(
            "slow" if why else "stalled", state, why, found, "evidence collected now",
            after, missing, int(not why), run, watch,
        )  # fmt: skip

    def _without_verdict(
        self, state: RunState, run: Path, ranks: tuple[RankEvidence, ...]
    ) -> Diagnosis:
        """Returns "no stall" if the run is starting or all ranks show progress, else "unknown"."""
        silent = [each for each in ranks if not each.phase]
        why, missing = "", _elsewhere(state)
        if not ranks:
            why = "no rank has a pulse or a record yet"
        elif doubtful := unusable_pulses([each for each in ranks if each.doubt]):
            why = doubtful
        elif silent:
            why = f"{names(silent)}: no pulse and no record shows progress"
        watch, age_s = self._source.watch, liveness.age(state.since_ts)
        starts = state.state in ("queued", "starting")
        if why and not (starts and age_s is not None and age_s <= watch.startup_s):
            text = f"whether the run progresses is not known: {why}"
            return Diagnosis("unknown", state, text, None, "", ranks, missing, 1, run, watch)
        calm = f"the run is starting: {why}" if why else "every rank is within its stall limit"
        return Diagnosis("no stall", state, calm, None, "", ranks, missing, 0, run, watch)

    # --- the ranks -----------------------------------------------------------------------------

    def _ranks(self, state: RunState, run: Path, now: Readings) -> tuple[RankEvidence, ...]:
        """Returns the ranks of the last poll, each with its process.

        The pid of a rank that has not ended is 0 if supervisor.json does not prove that the process
        is the rank.
        """
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
    """Returns a rank with the state of its process, or pid 0 if `worker` does not identify it.

    A rank in the phase `exit` is returned unchanged.
    """
    if rank.phase == "exit":
        return rank
    state, pid = process.state(rank.pid) if rank.pid > 0 else "?", jsonl.integer(worker, "pid")
    has_ended = state in ("Z", "X") and worker.get("boot_id") == rundir.boot_id()
    if pid == rank.pid and (rundir.is_alive(worker) or has_ended):
        return replace(rank, state=state, start_ticks=rundir.start_ticks(rank.pid))
    if state == process.GONE and worker.get("host") == rundir.host_name():
        return replace(rank, state=state)
    return replace(rank, pid=0)


def _elsewhere(state: RunState) -> tuple[str, ...]:
    if state.host in ("", rundir.host_name()):
        return ()
    return (f"no process evidence, because the ranks run on {state.host}; run diagnose there",)


def collect(run: Path, ranks: Sequence[RankEvidence]) -> Evidence:
    """Returns the evidence about `ranks`; it has only dumps made since a rank last moved."""
    running = [each for each in ranks if each.phase != "exit"]
    still_s = min((each.unchanged_s for each in running), default=0.0)
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
