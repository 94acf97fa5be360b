"""The facts of a reader: the newest word of the supervisor, and which processes are really there.

The supervisor decides the state; when it is gone it can decide nothing any more. What is left is
`unsupervised` (processes of the run live), the end that its ranks wrote themselves, or `lost`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from console.ending import End
from console.model import EXIT_CODES, Alert, State
from console.run_state import Facts, View
from console.sources import process
from console.sources.sanitize import clean
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

STATES: frozenset[str] = frozenset(get_args(State))
ENDED: frozenset[str] = frozenset(EXIT_CODES)
SILENT_S = 10.0
"""A process of another host that has been silent for so long is not believed to live."""
CLOCK_S = 2.0
"""The clock of a writer may be ahead of this one by so much."""
SUPERVISOR_SILENT_S = 20.0
"""It says something every second in shared memory, every 5 s in its document."""
STOPPED = "T t"
SUPERVISOR_STOPPED, WORK_STOPPED = "supervisor-stopped", "working-process-stopped"
ROLES: Mapping[str, tuple[str, str]] = {
    "supervisor": ("", "no attempt begins, and its working process is not replaced"),
    "working process": ("child", "nothing is sampled and no request is answered"),
    "torchrun": ("torchrun", "a rank that fails does not end the others"),
}
"""The processes beside the ranks: the key in supervisor.json, and the harm while it is stopped."""
Record = Mapping[str, Any]


def age(ts: float | None) -> float | None:
    """Returns seconds since `ts`, None for what is not a time; never negative."""
    if ts is None or not math.isfinite(ts):
        return None
    return max(0.0, time.time() - ts)


def live_directory(supervisor: Record) -> Path | None:
    """Returns the shared-memory directory of a run on this host and boot."""
    path = Path(jsonl.text(supervisor, "live_dir"))
    if path.parent != rundir.SHARED_MEMORY or not path.name.startswith(rundir.LIVE_PREFIX):
        return None
    if supervisor.get("host") != rundir.host_name() or supervisor.get("boot_id") != (
        rundir.boot_id()
    ):
        return None
    try:
        rundir.check_ours(path)
    except (RefusedError, ValueError):
        return None
    return path


def supervisor_lives(supervisor: Record) -> bool:
    """Says whether the supervisor that a document names still runs."""
    if supervisor.get("host") == rundir.host_name():
        return rundir.is_alive(supervisor)
    silent = age(jsonl.number(supervisor, "updated_ts"))
    return silent is not None and silent < SILENT_S


def newest(supervisor: Record, *others: Record | None) -> dict[str, Any]:
    """Returns supervisor.json with the state that the newest of its stand-ins tells.

    A disk that is full or does not answer keeps the document back; the last `state` event, or the
    sign of life in shared memory, then tells more. An end in the document is final, and a time in
    the future is none. An end that a stand-in tells is believed when no worker lives.
    """
    told, at = supervisor, jsonl.number(supervisor, "updated_ts") or 0.0
    if jsonl.text(supervisor, "state") in ENDED:
        return dict(supervisor)
    latest = time.time() + CLOCK_S
    for other in others:
        ts = jsonl.number(other, "ts") if other else None
        named = jsonl.text(other or {}, "state")
        if not other or ts is None or named not in STATES:
            continue
        if at < ts <= latest and (named not in ENDED or _may_have_ended(supervisor)):
            told, at = {"since_ts": ts} | dict(other), ts
    return dict(supervisor) | {
        key: told[key] for key in ("state", "why", "since_ts") if key in told
    }


def facts(
    supervisor: Record, born: Record, last: Mapping[int, Record], halts: Mapping[int, int],
    behind: bool = False, trouble: str = "",
) -> Facts:  # fmt: skip
    """Returns everything that the state depends on which a reader sees.

    `supervisor` is the newest word of the supervisor ({}: no document tells of one, `trouble` may
    say why), `born` run.json, `last` the newest record of each rank and `halts` the steps at which
    ranks say that they halted. `behind`: there are more records to read.
    """
    named, lives = jsonl.text(supervisor, "state"), supervisor_lives(supervisor)
    state = cast(State, named) if named in STATES else None
    living = "" if lives and state else living_ranks(supervisor)
    if not (living or (lives and state) or state in ENDED):
        living = living_processes(born, supervisor)
    times = [ts for r in last.values() if (ts := jsonl.number(r, "ts")) and math.isfinite(ts)]
    young_s = time.time() - max(times, default=-math.inf)
    elsewhere = supervisor.get("host") != rundir.host_name()
    view = View(
        state, clean(jsonl.text(supervisor, "why"), 400), lives,
        f"the supervisor (pid {jsonl.integer(supervisor, 'pid')}) is gone", living,
        (jsonl.integer(supervisor, "attempt") or 1) + 1, _old(young_s) if last else "",
        elsewhere and young_s < SILENT_S, behind, "" if supervisor else trouble,
    )  # fmt: skip
    world = jsonl.integer(born, "world") or 0
    over = bool(last) and len(last) >= world and all(r.get("msg") == "exit" for r in last.values())
    ends = _ends(supervisor, last) if over else []
    reason = next((jsonl.text(record, "reason") for record in last.values()), "")
    return Facts(
        is_reader=True, view=view, spawned=True, over=over and named != "restarting", ends=ends,
        halt_steps=halts, world=len(ends), reason=clean(reason, 80),
        step=max((end.step for end in ends), default=0),
    )  # fmt: skip


def _old(young: float) -> str:
    if young < -CLOCK_S:
        return "its newest record has a time in the future, so its age is not known"
    known = f"newest record {max(0.0, young):.0f} s old"
    return known if math.isfinite(young) else "its records have no time"


def since_ts(supervisor: Record, state: State, last: Mapping[int, Record]) -> float | None:
    """Returns when a run came into its state, as far as that is known.

    A state that no document holds begins at the last sign of the supervisor or of a rank.
    """
    if jsonl.text(supervisor, "state") == state:
        return jsonl.number(supervisor, "since_ts")
    signs = [jsonl.number(each, "ts") for each in last.values()]
    signs.append(jsonl.number(supervisor, "updated_ts"))
    return max((ts for ts in signs if ts is not None and math.isfinite(ts)), default=None)


def _ends(supervisor: Record, last: Mapping[int, Record]) -> list[End]:
    """Returns how ranks ended by their last records; what the supervisor saw of one counts more."""
    attempt = jsonl.integer(supervisor, "attempt")
    seen = {(jsonl.integer(worker, "rank"), attempt): jsonl.mapping(worker, "exit")
            for worker in jsonl.entries(supervisor, "workers")}  # fmt: skip
    ends = []
    for rank, record in last.items():
        code = jsonl.integer(record, "exit_code") or 0
        error = clean(jsonl.text(record, "reason"), 400) if code else ""
        found = seen.get((rank, record.get("attempt")), {})
        signal = clean(jsonl.text(found, "signal"), 16) or None
        code = None if signal else jsonl.integer(found, "code") or code
        ends.append(End(rank, code, signal, jsonl.integer(record, "step") or 0, error))
    return ends


def _left(supervisor: Record) -> list[tuple[dict[str, Any], bool]]:
    """Returns the workers of supervisor.json without an exit, and whether each lives here."""
    here = {"boot_id": supervisor.get("boot_id"), "host": supervisor.get("host")}
    left = [each for each in jsonl.entries(supervisor, "workers") if each.get("exit") is None]
    return [(worker, rundir.is_alive(here | worker)) for worker in left]


def still_run(thing: str, names: Sequence[object]) -> str:
    """Says that ranks or processes still run, "" for none; of many it names the first eight."""
    first = ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
    plural = "es" if thing.endswith("s") else "s"
    one = f"{thing} {first} still runs" if names else ""
    return f"{thing}{plural} {first} still run" if len(names) > 1 else one


def living_ranks(supervisor: Record) -> str:
    """Says which ranks of supervisor.json live on this host, "" for none."""
    ranks = [str(worker.get("rank")) for worker, lives in _left(supervisor) if lives]
    return still_run("rank", [clean(rank, 12) for rank in ranks])


def living_processes(born: Record, supervisor: Record) -> str:
    """Says which processes with the token of a run live on this host, "" for none."""
    named = jsonl.text(supervisor, "live_dir").rpartition("-")[2]
    token = jsonl.text(jsonl.mapping(born, "environment"), environ.TOKEN) or named
    left = process.with_token(token) if token else []
    return still_run("process", left)


def living_in(run: Path) -> str:
    """Says which processes of a run directory live on this host, "" for none."""
    told, born = (
        rundir.read_json(run / name, below=run) or {} for name in (rundir.SUPERVISOR, rundir.RUN)
    )
    return living_ranks(told) or living_processes(born, told)


def _may_have_ended(supervisor: Record) -> bool:
    """Says whether nothing speaks against an end: no worker lives, as far as this host can see."""
    if supervisor.get("host") not in (None, rundir.host_name()):
        return not supervisor_lives(supervisor)
    return not living_ranks(supervisor)


def has_lost_rank(supervisor: Record) -> bool:
    """Says whether supervisor.json, or the kernel of this host, shows a worker that has ended."""
    left, is_here = _left(supervisor), supervisor.get("host") == rundir.host_name()
    return len(left) < len(jsonl.entries(supervisor, "workers")) or any(
        is_here and not lives for _, lives in left
    )


def unwell(supervisor: Record, status: Record) -> list[Alert]:
    """Returns the alerts of this host's reader on the processes of a supervisor.

    Each that a signal has stopped, else a supervisor that lives and has said nothing for long.
    `status` is its sign of life in shared memory, {} without one.
    """
    here = {"boot_id": supervisor.get("boot_id"), "host": supervisor.get("host")}
    texts = {}
    for name, (key, harm) in ROLES.items():
        named = here | (jsonl.mapping(supervisor, key) if key else dict(supervisor))
        pid = jsonl.integer(named, "pid") or 0
        if rundir.is_alive(named) and process.state(pid) in STOPPED.split():
            texts[f"{name.replace(' ', '-')}-stopped"] = (
                f"{name} (pid {pid}) is stopped (SIGSTOP or a debugger): {harm}; "
                f"kill -CONT {pid} lets it go on"
            )
    times = (jsonl.number(supervisor, "updated_ts"), jsonl.number(status, "ts"))
    old_s = min((s for ts in times if (s := age(ts)) is not None), default=0.0)
    if not texts and old_s > SUPERVISOR_SILENT_S and rundir.is_alive(supervisor):
        texts["supervisor-silent"] = (
            f"the supervisor (pid {jsonl.integer(supervisor, 'pid')}) lives, but has written "
            f"nothing for {old_s:.0f} s: what is shown may be old; its directory takes no writes "
            "(look at df and dmesg), or its working process is not there"
        )
    return [Alert(name, time.time(), "crit", text, observed=True) for name, text in texts.items()]


def exit_words(worker: Record, beat: Record) -> str:
    """Says how a worker ended, "" while it lives; its last record counts where nobody saw it."""
    ended = worker.get("exit")
    if not isinstance(ended, dict):
        said = beat.get("msg") == "exit"
        return f"exit {jsonl.integer(beat, 'exit_code') or 0}" if said else ""
    signal_name, code = ended.get("signal"), jsonl.integer(ended, "code")
    if isinstance(signal_name, str) and signal_name:
        words = f"killed by {clean(signal_name, 16)}"
    else:
        words = "gone" if code is None else f"exit {code}"
    if ended.get("unreaped") is True:
        words = f"dead (unreaped), {words}"
    return f"{words}, because of another" if ended.get("secondary") is True else words
