"""Diagnoses the present state of a run, for `nsa-console diagnose`, even without a supervisor.

While a supervisor decides the state of a stalled run, its newest verdict is used. Otherwise this
process collects the evidence itself, with the functions of the supervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from console.diagnose.causes import explain
from console.diagnose.evidence import Evidence
from console.diagnose.readings import Readings
from console.diagnose.stall import RankEvidence, names, unusable_pulses, with_records
from console.diagnose.verdict import LOOK_AT_STACKS, NAMED_AFTER_S, case_of, diagnose
from console.model import RunState, Verdict
from console.sources import liveness, process, verdicts
from console.sources.nvml import Nvml
from console.sources.reducer import NO_RECORDS
from console.supervisor.dump import Dumps
from console.supervisor.evidence import MAX_RANKS, Collector
from console.supervisor.inbox import Outcome, Request
from console.supervisor.rundir_io import Directory
from console.supervisor.watchdog_readings import ENDING, OfflineRun
from trainers.contract import jsonl, pulse, rundir
from trainers.contract.plan import Watch

Outlook = Literal["stalled", "slow", "no stall", "unknown", "ending", "ended"]
"""Ranks of a "slow" run have not moved for some seconds and are within their stall limits."""
SLOW_S = 5.0
POLL_S = 0.1
EXPLAINED_S = 8.0
"""A supervisor has explained its verdict after this time, or has no more evidence."""
SLACK_S = 5.0
"""A verdict may be older than the state "stalled" by this time."""
MAX_DESCRIPTORS = 4096
SILENT_ALERTS = frozenset(
    (liveness.SUPERVISOR_STOPPED, liveness.WORK_STOPPED, "supervisor-silent")
)  # fmt: skip
DUMPED_S = 10.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result for one run at one moment; `why` is a sentence if there is no verdict.

    `source` says where the verdict comes from; `missing` says which evidence is not available.
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
    """Returns whether a living supervisor decides the state of the run."""
    silent = any(alert.id in SILENT_ALERTS for alert in state.alerts)
    return state.state not in ("unsupervised", "lost", "queued") and not silent


class Diagnoser:
    """Reads one run; `diagnose` may be called several times."""

    def __init__(self, path: Path):
        self._source = OfflineRun(path)
        self.dumped: Outcome | None = None
        """The outcome of the dump that `diagnose` made."""

    def _poll(self) -> tuple[RunState, Path | None, Readings | None]:
        now, state = self._source.poll(), self._source.state
        assert state is not None
        return state, self._source.of[0] if self._source.of else None, now

    def diagnose(self, dump: bool = False) -> Diagnosis:
        """Returns the verdict on the run now; takes about 4 s if it collects the evidence itself.

        With `dump` it signals the ranks that have the handler, if the run has no supervisor.
        """
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
            return self._of_supervisor(state, run)
        ranks = self._ranks(state, run, now)
        if dump:
            self.dumped = _dump(run, ranks)
        return self._own(state, run, ranks)

    def _of_ended(self, state: RunState, run: Path | None) -> Diagnosis:
        last = (verdicts.newest(run) if run else None) or state.verdict
        why = "" if last else "no verdict was given while it ran"
        return Diagnosis(
            "ended", state, f"{self._source.over}{'; ' if why else ''}{why}", last,
            "last verdict of the run", exit_code=self._source.exit_code, run=run,
        )  # fmt: skip

    def _of_supervisor(self, state: RunState, run: Path) -> Diagnosis:
        """Returns the newest verdict of this stall; waits up to `EXPLAINED_S` for its cause."""
        until = time.monotonic() + EXPLAINED_S
        while True:
            found = state.verdict or verdicts.newest(run, is_open=True)
            if found is not None and found.ts < (state.since_ts or 0.0) - SLACK_S:
                found = state.verdict
            is_new = found is not None and time.time() - found.ts < EXPLAINED_S
            waits = found is None or (is_new and LOOK_AT_STACKS in found.sentence)
            if not waits or state.state != "stalled" or time.monotonic() >= until:
                break
            time.sleep(POLL_S)
            state, _, _ = self._poll()
        if state.state != "stalled":
            return Diagnosis("no stall", state, "the ranks step again", run=run)
        why = "" if found else "the supervisor has not written a verdict yet"
        return Diagnosis("stalled", state, why, found, "supervisor", exit_code=1, run=run)

    def _own(self, state: RunState, run: Path, ranks: tuple[RankEvidence, ...]) -> Diagnosis:
        """Returns the verdict, from evidence that this process collects now."""
        watch = self._source.watch
        early = replace(watch, stall_floor_s=min(SLOW_S, watch.stall_floor_s))
        if diagnose(ranks, early, time.time()) is None:
            return self._without_verdict(state, run, ranks)
        evidence = collect(run, ranks)
        state, _, now = self._poll()
        after = self._ranks(state, run, now) if now else ()
        if self._source.over:
            return self._of_ended(state, run)
        found = diagnose(after, early, time.time())
        if found is None:
            return self._without_verdict(state, run, after)
        case = case_of(after, watch, time.time())
        if case is not None and not any(each.doubt for each in after):
            base = replace(found, evidence=case.verdict(None, "", "low").evidence)
            found = explain(base, case, evidence)
        contrary = tuple(line for line in found.against if line not in evidence.gaps)
        found = replace(found, against=contrary)
        why, is_stalled = "", diagnose(after, watch, time.time()) is not None
        if not is_stalled:
            why = "within its stall limit; so far the evidence says:"
            found = replace(found, sure="medium" if found.sure == "high" else found.sure)
        if not (evidence.after or evidence.stacks or evidence.flights):
            found = replace(found, sure="low")  # one source: pulses or records
        doubt = now.stall_doubt if now else ""
        missing = (*evidence.gaps, *filter(None, (doubt,)), *_elsewhere(state))
        return Diagnosis(
            "stalled" if is_stalled else "slow", state, why, found, "evidence collected now",
            after, missing, int(is_stalled), run, watch,
        )  # fmt: skip

    def _without_verdict(
        self, state: RunState, run: Path, ranks: tuple[RankEvidence, ...]
    ) -> Diagnosis:
        """Returns "no stall" if every rank shows its position, or else "unknown"."""
        silent = [each for each in ranks if not each.phase]
        why, missing = "", _elsewhere(state)
        if not ranks:
            why = "no rank has a pulse or a record yet"
        elif doubtful := unusable_pulses([each for each in ranks if each.doubt]):
            why = doubtful
        elif silent:
            why = f"{names(silent)}: no pulse and no record shows progress"
        watch, age_s = self._source.watch, liveness.age(state.since_ts)
        starts = state.state in ("queued", "preflight", "starting")
        if why and not (starts and age_s is not None and age_s <= watch.startup_s):
            text = f"whether the run progresses is not known: {why}"
            return Diagnosis("unknown", state, text, None, "", ranks, missing, 1, run, watch)
        calm = f"the run is starting: {why}" if why else "every rank is within its stall limit"
        return Diagnosis("no stall", state, calm, None, "", ranks, missing, 0, run, watch)

    # --- the ranks -----------------------------------------------------------------------------

    def _ranks(self, state: RunState, run: Path, now: Readings) -> tuple[RankEvidence, ...]:
        """Returns the ranks of the last poll, each with its process.

        A rank that only records show gets its pulse from the run directory, into which a program
        without a supervisor copies it. Pid 0 stands for a process that is not proved to be the
        rank.
        """
        document = rundir.read_json(run / rundir.SUPERVISOR, below=run) or {}
        here = {key: document.get(key) for key in ("boot_id", "host")}
        workers = {jsonl.integer(w, "rank"): here | w for w in jsonl.entries(document, "workers")}
        silent_s = min(liveness.age(state.since_ts) or 0.0, NAMED_AFTER_S + 1)
        ranks = now.ranks or [
            RankEvidence(each.rank, each.pid, "?", 0, "", silent_s)
            for each in state.ranks if each.pid and not each.exit
        ]  # fmt: skip
        return tuple(
            self._with_process(each, run, workers.get(each.rank), now.records_only)
            for each in ranks
        )

    def _with_process(
        self, rank: RankEvidence, run: Path, worker: Mapping[str, Any] | None, by_records: bool
    ) -> RankEvidence:
        if rank.phase == "exit":
            return rank
        named = worker is not None and jsonl.integer(worker, "pid") == rank.pid
        ticks = rundir.start_ticks(rank.pid) if rank.pid > 0 else None
        if worker is not None and named:
            ended = process.state(rank.pid) in ("Z", "X")
            ours = rundir.is_alive(worker) or (ended and worker.get("boot_id") == rundir.boot_id())
        else:
            ours = ticks is not None and writes(rank.pid, run, rank.rank)
        if not ours:
            local = rank.pid > 0 and worker is not None and worker.get("host") == rundir.host_name()
            is_gone = local and process.state(rank.pid) == process.GONE
            return replace(rank, pid=rank.pid if is_gone else 0,
                           state=process.GONE if is_gone else rank.state)  # fmt: skip
        found = replace(rank, state=process.state(rank.pid), start_ticks=ticks)
        copied = pulse.read(rundir.pulse(run, rank.rank)) if by_records else None
        if copied is None or copied.pid != rank.pid:
            return found
        seen = replace(
            found, step=copied.step, phase=copied.phase, collectives=copied.collectives,
            unchanged_s=max(0.0, time.monotonic() - max(copied.since, copied.beat)),
        )  # fmt: skip
        head = self._source.heads.get(rank.rank, NO_RECORDS)
        return with_records(seen, head, self._source.of[1] if self._source.of else 1, lagging=True)


def writes(pid: int, run: Path, rank: int) -> bool:
    """Returns whether a process of this user has the stack file or the heartbeat of a rank open.

    Only a rank that has installed the handler of SIGUSR1 opens its stack file.
    """
    beats = str(rundir.heartbeat(run.resolve(), rank))
    return bool(_open_files(pid) & {beats, *_stack_files(run, rank, None)})


def _stack_files(run: Path, rank: int, live: Path | None) -> set[str]:
    found = {str(rundir.stackdump(run.resolve(), rank))}
    return found | {str(rundir.live_stack(live, rank))} if live else found


def _open_files(pid: int) -> set[str]:
    """Returns the paths that a process has open; reads only the links, never the files."""
    found = set[str]()
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd")[:MAX_DESCRIPTORS]:
            with suppress(OSError):
                found.add(str(Path(f"/proc/{pid}/fd/{number}").readlink()))
    return found


def _elsewhere(state: RunState) -> tuple[str, ...]:
    if state.host in ("", rundir.host_name()):
        return ()
    return (f"no process evidence: the ranks run on {state.host}; run diagnose there",)


def collect(run: Path, ranks: Sequence[RankEvidence]) -> Evidence:
    """Returns two samples of each process, and the dumps made since no rank has moved."""
    running = [each for each in ranks if each.phase != "exit"]
    still_s = min((each.unchanged_s for each in running), default=0.0)
    directory, nvml = Directory(), Nvml()
    nvml.start()
    collector = Collector(directory, run, nvml.rows, time.time() - still_s)
    try:
        while collector.complete is None:
            collector.poll(ranks)
            directory.deliver()
            time.sleep(POLL_S)
    finally:
        directory.close(0)
        nvml.stop()
    return collector.complete


def _dump(run: Path, ranks: Sequence[RankEvidence]) -> Outcome:
    """Dumps the ranks that have the handler of the contract, without a supervisor.

    Raises RefusedError if the run directory belongs to another user.
    """
    rundir.check_ours(run)
    live = liveness.live_directory(rundir.read_json(run / rundir.SUPERVISOR, below=run) or {})
    handles: dict[int, process.Handle] = {}
    for each in ranks[:MAX_RANKS]:
        files = _stack_files(run, each.rank, live)
        if each.pid > 0 and _open_files(each.pid) & files:
            handle = process.open_named(rundir.identity(each.pid), run, None)
            if handle and _open_files(each.pid) & files:
                handles[each.rank] = handle
    if not handles:
        return False, "no rank has the dump handler of the run contract; none was signalled", []
    directory, outcomes = Directory(), list[Outcome]()
    dumps = Dumps(directory)
    try:
        dumps.request(run, live, handles, Request(run, "", "dump", {}, "diagnose"))
        until = time.monotonic() + DUMPED_S
        while not outcomes and time.monotonic() < until:
            dumps.poll(lambda _, outcome: outcomes.append(outcome))
            directory.deliver()
            time.sleep(POLL_S)
        if not outcomes:
            dumps.abandon(lambda _, outcome: outcomes.append(outcome))
    finally:
        directory.close(1)
        for handle in handles.values():
            handle.close()
    return outcomes[0]
