"""Finds the living processes of a run, and the facts from which a reader decides the run's state.

The supervisor decides the state of a run. If the supervisor is dead, a reader decides by the first
of these that exists: living processes (the run is `unsupervised`), a recorded end, the exit records
of all ranks. If there is none, the run is usually `lost`. A reader on another host or in another
container cannot know which processes are alive. There the run is `unsupervised`, not `lost`.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from console import access
from console.model import CLOCK_S, EXIT_CODES, Alert, State
from console.rank_end import NO_CODE, RankEnd
from console.run_state import Facts, ReaderView
from console.sources import json_documents, process
from console.sources.reducer import LatestRecords
from console.sources.sanitize import clean
from console.status_text import NO_AGE, rank_names
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError

STATES: frozenset[str] = frozenset(get_args(State))
ENDED: frozenset[str] = frozenset(EXIT_CODES)
SILENT_S = 10.0
"""A supervisor heartbeat or a sample that is older than this does not show the present."""
WRITTEN_S = 3.0
"""The document of a supervisor that is alive may lack an end for this time."""
ELSEWHERE_SILENT_S = 60.0
"""A supervisor of another host is treated as alive for this time after it wrote its state.

It writes its state every 5 s, but the cache of an NFS client may show a change up to 60 s late.
"""
SUPERVISOR_SILENT_S = 20.0
"""A supervisor is silent if it writes nothing for this time; it usually writes every second."""
SUPERVISOR_STOPPED, WORK_STOPPED = "supervisor-stopped", "working-process-stopped"
MAY_HAVE_ENDED = "the supervisor {} may have ended"
"""The sentence on a supervisor `elsewhere` that wrote no state for `ELSEWHERE_SILENT_S`."""
ROLES: Mapping[str, tuple[str, str]] = {
    "supervisor": ("", "no attempt can start, and a failed working process is not replaced"),
    "working process": ("child", "no samples are taken and no request is answered"),
    "torchrun": ("torchrun", "a rank that fails does not end the others"),
}
"""Processes that are not ranks: key in supervisor.json, and effect of a stopped process."""
Record = Mapping[str, Any]


def age(ts: float | None) -> float | None:
    """Returns the seconds since `ts`, or None if they are not available.

    A time more than `CLOCK_S` in the future has no age: a clock was set back, or two hosts' clocks
    differ.
    """
    age_s = -math.inf if ts is None else time.time() - ts
    return max(0.0, age_s) if -CLOCK_S <= age_s < math.inf else None


def is_recent(status: Record) -> bool:
    """Returns whether the supervisor heartbeat `status` shows the present."""
    age_s = age(jsonl.number(status, "ts"))
    return age_s is not None and age_s < SILENT_S


def live_directory(supervisor: Record) -> Path | None:
    """Returns the live directory of a run, or None if there is none that can be trusted.

    A directory of another host, PID namespace or user, or from before the last boot, is not used.
    """
    path = Path(jsonl.text(supervisor, "live_dir"))
    if path.parent != rundir.SHARED_MEMORY or not path.name.startswith(rundir.LIVE_PREFIX):
        return None
    if not rundir.is_here(supervisor):
        return None
    try:
        access.check_ours(path)
    except (RefusedError, ValueError):
        return None
    return path


# --- the last state of the supervisor ----------------------------------------------------------


def elsewhere(document: Record) -> str:
    """Returns where the processes in a document are, if this reader cannot see them, or else ""."""
    host = json_documents.line(document, "host", "")
    if rundir.other_host(document):
        return f"on {host}"
    return f"in another container of {host}" if rundir.is_hidden(document) else ""


def can_see(document: Record) -> bool:
    """Returns whether this reader can see the processes that a document names."""
    return bool(document.get("host")) and not elsewhere(document)


def is_supervised(supervisor: Record) -> bool:
    """Returns whether the supervisor named in a document is alive.

    A supervisor that this reader cannot see is treated as alive if it wrote the document recently.
    """
    if can_see(supervisor):
        return rundir.is_alive(supervisor)
    silent_s = age(jsonl.number(supervisor, "updated_ts"))
    return silent_s is not None and silent_s < ELSEWHERE_SILENT_S


def with_newest_state(supervisor: Record, *others: Record | None) -> dict[str, Any]:
    """Returns the document `supervisor` with the newest state that it or one of `others` has.

    The verdict is the one that came with this state, or None if none came with it.

    If a disk is full or does not answer, the document is late. The last `state` event or the
    supervisor heartbeat is then newer. An end in the document is final. A state in `others` is
    ignored if its time is more than `CLOCK_S` in the future. An end in `others` is used only if
    `_may_have_ended`.
    """
    if jsonl.text(supervisor, "state") in ENDED:
        return dict(supervisor)
    newest, newest_ts = supervisor, jsonl.number(supervisor, "updated_ts") or 0.0
    latest_ts = time.time() + CLOCK_S
    for other in filter(None, others):
        ts, state = jsonl.number(other, "ts"), jsonl.text(other, "state")
        if ts is None or not newest_ts < ts <= latest_ts or state not in STATES:
            continue
        if state not in ENDED or _may_have_ended(supervisor):
            is_same = other.get("since_ts") == supervisor.get("since_ts")
            verdict = supervisor.get("verdict") if is_same else None
            newest, newest_ts = {"since_ts": ts, "verdict": verdict} | dict(other), ts
    fields = ("state", "why", "since_ts", "verdict")
    return dict(supervisor) | {key: newest[key] for key in fields if key in newest}


def _may_have_ended(supervisor: Record) -> bool:
    """Returns whether no rank is alive; if none can be seen, whether the supervisor may be dead."""
    if elsewhere(supervisor):
        return not is_supervised(supervisor)
    return not living_ranks(supervisor)


def is_written_soon(supervisor: Record, other: Record | None) -> bool:
    """Returns whether the supervisor is alive and about to write the end that `other` has."""
    ts = jsonl.number(other or {}, "ts")
    is_recent = ts is not None and time.time() - ts <= WRITTEN_S
    return is_recent and jsonl.text(other or {}, "state") in ENDED and is_supervised(supervisor)


def since_ts(supervisor: Record, state: State, heads: Mapping[int, LatestRecords]) -> float | None:
    """Returns when a run entered its state, or None if that is not available.

    If `supervisor` has another state, returns the newest time of `supervisor` and the records.
    """
    if jsonl.text(supervisor, "state") == state:
        return jsonl.number(supervisor, "since_ts")
    return _newest_ts(heads, jsonl.number(supervisor, "updated_ts"))


def _newest_ts(heads: Mapping[int, LatestRecords], other: float | None = None) -> float | None:
    times = [other, *(jsonl.number(head.last, "ts") for head in heads.values())]
    return max((ts for ts in times if ts is not None and math.isfinite(ts)), default=None)


def _age_words(ts: float | None) -> str:
    return NO_AGE if (seconds := age(ts)) is None else f"{seconds:.0f} s old"


# --- the facts of a reader ---------------------------------------------------------------------


def facts(
    supervisor: Record, run: Record, heads: Mapping[int, LatestRecords], is_ours: bool,
    behind: bool = False, trouble: str = "", moved: str = "",
) -> Facts:  # fmt: skip
    """Returns the facts that a reader can observe about a run.

    `supervisor` is supervisor.json with its newest state. Without such a document it is the entry
    of the run in plan_state.json, or {}; `trouble` may then say why. `run` is run.json. `is_ours`
    is False for a foreign program. `behind` says that some records have not been read. `moved` is a
    sentence if the directory is a copy or was moved. Processes in the documents of such a directory
    do not count as alive.
    """
    records = [head.last for head in heads.values()]
    has_exited = all(record.get("msg") == "exit" for record in records)
    over = bool(heads) and len(heads) >= (jsonl.integer(run, "world") or 0) and has_exited
    ends = _ends(supervisor, heads, is_ours) if over else []
    return Facts(
        is_reader=True, view=_view(supervisor, run, heads, behind, trouble, moved), spawned=True,
        over=over and jsonl.text(supervisor, "state") != "restarting", ends=ends,
        halt_steps={rank: head.halt for rank, head in heads.items() if head.halt is not None},
        world=len(ends), step=max((end.step for end in ends), default=0),
        reasons={rank: clean(head.reason, 80) for rank, head in heads.items() if head.reason},
    )  # fmt: skip


def _view(
    supervisor: Record, run: Record, heads: Mapping[int, LatestRecords], behind: bool, trouble: str,
    moved: str,
) -> ReaderView:  # fmt: skip
    named, is_alive = jsonl.text(supervisor, "state"), not moved and is_supervised(supervisor)
    state = cast(State, named) if named in STATES else None
    decides = is_alive and state is not None
    living = "" if decides or moved else living_ranks(supervisor)
    if not (decides or moved or living or state in ENDED):
        living = living_processes(run, supervisor)
    missing = f"the supervisor (pid {jsonl.integer(supervisor, 'pid')}) is not running"
    if where := elsewhere(supervisor if "host" in supervisor else run):
        state_age = _age_words(jsonl.number(supervisor, "updated_ts"))
        missing = f"{MAY_HAVE_ENDED.format(where)}; newest state: {state_age}"
    return ReaderView(
        state, clean(jsonl.text(supervisor, "why"), 400), is_alive, missing, living,
        next_attempt=(jsonl.integer(supervisor, "attempt") or 1) + 1,
        newest_record=f"newest record: {_age_words(_newest_ts(heads))}" if heads else "",
        is_elsewhere=bool(where), behind=behind, trouble="" if supervisor else trouble, moved=moved,
    )  # fmt: skip


def _ends(supervisor: Record, heads: Mapping[int, LatestRecords], is_ours: bool) -> list[RankEnd]:
    """Returns the ends of ranks.

    A signal, or a code other than 0, that the supervisor observed overrides the exit record. An
    observed code 0 is used only if the record has no code.
    """
    attempt = jsonl.integer(supervisor, "attempt")
    exits = {(jsonl.integer(worker, "rank"), attempt): jsonl.mapping(worker, "exit")
             for worker in jsonl.entries(supervisor, "workers")}  # fmt: skip
    ends = []
    for rank, head in heads.items():
        record, code = head.last, head.code
        error = clean(jsonl.text(record, "reason"), 400) if code else ""
        observed = exits.get((rank, record.get("attempt")), {})
        signal = clean(jsonl.text(observed, "signal"), 16) or None
        seen = jsonl.integer(observed, "code")
        known = None if signal else seen or (seen if code is None else code)
        doubt = "" if signal or known is not None else NO_CODE
        step = record["step"]
        end = RankEnd(rank, known, signal, step, error, late=True, doubt=doubt, is_ours=is_ours)
        ends.append(end)
    return ends


# --- living processes --------------------------------------------------------------------------


def _workers_without_exit(supervisor: Record) -> list[tuple[dict[str, Any], bool]]:
    """Returns the entry of each rank without a recorded exit, and whether the rank is alive."""
    workers = jsonl.entries(supervisor, "workers")
    found = [process.identity_in(supervisor, each) for each in workers if each.get("exit") is None]
    return [(worker, rundir.is_alive(worker)) for worker in found]


def living_ranks(supervisor: Record) -> str:
    """Returns a sentence on the ranks in supervisor.json that are alive on this host, or ""."""
    workers = [worker for worker, is_alive in _workers_without_exit(supervisor) if is_alive]
    ranks = [rank for worker in workers if (rank := jsonl.integer(worker, "rank")) is not None]
    named = rank_names(ranks, "still runs", "still run") if ranks else "a rank still runs"
    return named if workers else ""


def living_processes(run: Record, supervisor: Record) -> str:
    """Returns a sentence on the processes on this host that have a run's token, or ""."""
    named = jsonl.text(supervisor, "live_dir").rpartition("-")[2]
    token = rundir.token(run) or named
    pids = process.with_token(token) if token else []
    names = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    one = f"process {names} still runs" if pids else ""
    return f"processes {names} still run" if len(pids) > 1 else one


def living_in(run: Path) -> str:
    """Returns a sentence on the processes of a run that are alive on this host, or ""."""
    supervisor, document = (
        rundir.read_json(run / name, below=run) or {} for name in (rundir.SUPERVISOR, rundir.RUN)
    )
    return living_ranks(supervisor) or living_processes(document, supervisor)


def is_locked(launch: Path) -> bool:
    """Returns whether a process holds the lock of a launch directory.

    Returns False if no lock file can be opened. If flock fails for any reason, returns True.
    """
    fd = jsonl.open_regular(launch / rundir.LOCK)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def why_foreign(run: Path, token: str) -> str:
    """Returns why a process with this token does not belong to this run of this user, or ""."""
    if not token:
        return "no supervisor started it, or it belongs to another user"
    try:
        for folder in (run, run.parent):
            access.check_ours(folder)
    except (RefusedError, ValueError) as error:
        return str(error)
    record = rundir.read_json(run / rundir.RUN, below=run.parent) or {}
    is_its_token = rundir.token(record) == token
    return "" if is_its_token else f"its token is not that of {run / rundir.RUN}"


def is_adopted(run: Path, token: str) -> bool:
    """Returns whether a process with this token belongs to this run, and the launch is locked."""
    return not why_foreign(run, token) and is_locked(run.parent)


def has_lost_rank(supervisor: Record) -> bool:
    """Returns whether a rank has ended, according to supervisor.json or this host's kernel."""
    left = _workers_without_exit(supervisor)
    return len(left) < len(jsonl.entries(supervisor, "workers")) or any(
        can_see(supervisor) and not alive for _, alive in left
    )


# --- the processes of the supervisor -----------------------------------------------------------


def supervisor_alerts(supervisor: Record, status: Record) -> list[Alert]:
    """Returns alerts on stopped processes of `ROLES`, or else on a silent supervisor that is alive.

    `status` is the supervisor heartbeat, or {} if there is none. The heartbeat is on this host,
    so its age comes from the monotonic clock.
    """
    texts, mono = _stopped_processes(supervisor), jsonl.number(status, "mono")
    ages = age(jsonl.number(supervisor, "updated_ts")), mono and max(0.0, time.monotonic() - mono)
    silent_s = min((each for each in ages if each is not None), default=0.0)
    if not texts and silent_s > SUPERVISOR_SILENT_S and rundir.is_alive(supervisor):
        pid, child = jsonl.integer(supervisor, "pid"), jsonl.mapping(supervisor, "child")
        why = "its run directory does not accept writes (check df and dmesg)"
        if child and not rundir.is_alive(process.identity_in(supervisor, child)):
            why = (
                f"its working process (pid {jsonl.integer(child, 'pid')}) has ended, see "
                f"{rundir.SUPERVISOR_LOG}; a file {rundir.HALT} in the run directory halts the "
                f"ranks, kill -TERM {pid} stops them"
            )
        texts["supervisor-silent"] = (
            f"the supervisor (pid {pid}) is alive but has written nothing for {silent_s:.0f} s, so "
            f"this display may be old: {why}"
        )
    return [Alert(name, time.time(), "crit", text, observed=True) for name, text in texts.items()]


def _stopped_processes(supervisor: Record) -> dict[str, str]:
    """Returns the name and text of an alert for each process of `ROLES` that is stopped."""
    texts = {}
    for role, (key, effect) in ROLES.items():
        entry = jsonl.mapping(supervisor, key) if key else supervisor
        if process.is_stopped(process.identity_in(supervisor, entry)):
            pid = entry["pid"]
            texts[f"{role.replace(' ', '-')}-stopped"] = (
                f"{role} (pid {pid}) is stopped (SIGSTOP or a debugger): {effect}; "
                f"kill -CONT {pid} resumes it"
            )
    return texts


def exit_words(worker: Record, record: Record) -> str:
    """Returns how a rank ended, from the observed exit or else from the exit record, or ""."""
    observed = worker.get("exit")
    if not isinstance(observed, dict):
        if record.get("msg") != "exit":
            return ""
        observed = {"code": record.get("exit_code", 0)}
    signal, code = observed.get("signal"), jsonl.integer(observed, "code")
    if isinstance(signal, str) and signal:
        words = f"killed ({clean(signal, 16)})"
    else:
        words = "exit code not available" if code is None else f"exited (code {code})"
    if observed.get("unreaped") is True:
        words += ", unreaped"
    return f"{words}, because of another rank" if observed.get("secondary") is True else words
