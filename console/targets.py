"""The target of an operator's action: the run, and the supervisor that takes the request.

Two sources have to agree on each, see the rows of kind `target` in docs/decisions.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.model import State
from console.request_schema import Action, Mailbox
from console.sources import documents, launches, liveness, process
from console.sources.run import RunSource
from console.sources.sanitize import clean
from console.supervisor import lock, recovery
from trainers.contract import jsonl, rundir
from trainers.contract.errors import NotFoundError, RefusedError

UNSERVED_STATES: frozenset[State] = frozenset(("unsupervised", "lost"))
"""In these no supervisor answers; ranks may live, also where this host cannot see them."""
NOT_SENT = "the request was not sent"


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The supervisor that a document names; `token` is that of its lock."""

    identity: Mapping[str, Any]
    token: str

    @property
    def pid(self) -> int:
        return jsonl.integer(self.identity, "pid") or 0

    @property
    def host(self) -> str:
        """The name of its host if that is another one, else ""."""
        host = jsonl.text(self.identity, "host")
        return "" if host == rundir.host_name() else host


def current_run(launch: Path) -> Path:
    """Returns the run of a launch's current phase.

    Raises NotFoundError before there is one, RefusedError where no document tells which it is.
    """
    state = _document(launch, rundir.PLAN_STATE)
    index, phases = jsonl.integer(state, "phase"), jsonl.entries(state, "phases")
    if index is not None and 0 <= index < len(phases):
        name = documents.run_directory(phases[index])
        if not name and phases[index].get("dir"):
            raise RefusedError(
                f"{launch / rundir.PLAN_STATE} names a directory of its phase that is no "
                f"<n>-<phase>, so it is not followed; {NOT_SENT}"
            )
        if name and (launch / name).is_dir():
            return launch / name
    raise NotFoundError(f"the launch {launches.launch_id(launch)} has no run yet")


def run_to_halt(path: Path) -> Path | None:
    """Returns the run whose ranks a halt stops, None before a launch has one."""
    if not launches.is_launch(path):
        return path
    for run in reversed(launches.run_directories(path)):
        if _is_alone(run):
            return run
    try:
        return current_run(path)
    except NotFoundError:
        return None


def _is_alone(run: Path) -> bool:
    """Says whether processes of a run live here without a supervisor, whatever a state says."""
    top = launches.launch_of(run)
    held = [rundir.read_json(run / rundir.SUPERVISOR, below=run) or {}]
    if top is not None:
        held.append(rundir.read_json(top / rundir.LOCK, below=top) or {})
        state = rundir.read_json(top / rundir.PLAN_STATE, below=top) or {}
        held.append(jsonl.mapping(state, "supervisor"))
    elsewhere = any(each.get("host") not in (None, rundir.host_name()) for each in held)
    lives = elsewhere or any(map(rundir.is_alive, held))
    return not lives and bool(liveness.living_in(run))


def mailbox(path: Path, action: Action) -> tuple[Path, Mailbox]:
    """Returns the folder whose mailbox takes the action, and which kind it is."""
    top = launches.launch_of(path)
    here: Mailbox = "launch" if top == path else "run"
    if here in action.mailboxes:
        return path, here
    if here == "launch":
        return current_run(path), "run"
    if top is None:
        raise RefusedError(f"{path} belongs to no launch, so it takes no {action.name}")
    return top, "launch"


def is_unserved(run: Path, folder: Path, box: Mailbox) -> bool:
    """Says whether no supervisor looks into the mailbox of a run that has not ended.

    A supervisor on another host shows only by its answer that it lives. Raises RefusedError where
    the document that names it cannot be read, and no process of the run shows itself here.
    """
    if _is_alone(run):
        return True
    owner, ended = _named(folder, box)
    if ended or owner.host:
        return False
    return RunSource(run).poll().state in UNSERVED_STATES


def supervisor(folder: Path, box: Mailbox) -> Supervisor:
    """Returns the supervisor that looks into a mailbox. Raises RefusedError without one."""
    owner, ended = _named(folder, box)
    name = launches.launch_id(folder) if box == "launch" else folder.name
    if ended:
        raise RefusedError(f"{name} has ended ({ended}); {NOT_SENT}")
    if not owner.host and not rundir.is_alive(owner.identity):
        raise RefusedError(_without_supervisor(name, folder, box, owner))
    top = launches.launch_of(folder)
    held = top is not None and (bool(owner.host) or lock.is_held(top))
    if top is None or not held or not owner.token or owner.token != rundir.lock_token(top):
        where = f" on {owner.host}" if owner.host else ""
        found = "that of another supervisor" if held else "not held"
        raise RefusedError(
            f"{top or folder} is not the directory of its supervisor (pid {owner.pid}{where}): its "
            f"lock is {found}, as in a copy or where a launch was moved away; {NOT_SENT}"
        )
    return owner


def host_and_stopped(path: Path, action: Action) -> tuple[str, list[int]]:
    """Returns the other host whose supervisor takes the action, "" for this one, and its processes
    here that are stopped."""
    owner, _ = _named(*mailbox(path, action))
    named = (owner.identity, jsonl.mapping(owner.identity, "child"))
    pids = [jsonl.integer(each, "pid") or 0 for each in named
            if not owner.host and rundir.is_alive(each)]  # fmt: skip
    stopped = liveness.STOPPED.split()
    return owner.host, [pid for pid in pids if process.state(pid) in stopped]


def _named(folder: Path, box: Mailbox) -> tuple[Supervisor, str]:
    """Returns the supervisor that a mailbox's document names, and how the run or launch ended.

    Raises RefusedError when the document cannot be read.
    """
    top = launches.launch_of(folder)
    record = _document(folder, rundir.PLAN_STATE if box == "launch" else rundir.SUPERVISOR)
    state = jsonl.text(record, "state")
    over = state == "ended" if box == "launch" else state in liveness.ENDED
    ended = clean(jsonl.text(record, "why") or state, 400) if over else ""
    if box == "run" and (record or top is None):
        return Supervisor(record, jsonl.text(record, "lock_token")), ended
    # A run that begins has no document of its own yet: that of its launch names the supervisor.
    held = record if box == "launch" or top is None else _document(top, rundir.PLAN_STATE)
    owner = jsonl.mapping(held, "supervisor")
    return Supervisor(owner, jsonl.text(owner, "token")), ended


def _document(folder: Path, name: str) -> dict[str, Any]:
    return recovery.document(folder, name, NOT_SENT)


def _without_supervisor(name: str, folder: Path, box: Mailbox, owner: Supervisor) -> str:
    """Says why nothing takes a request there, and what to do."""
    state, top = RunSource(folder).poll(), launches.launch_of(folder)
    if box == "run" and state.state in liveness.ENDED - UNSERVED_STATES:
        return f"{name} has ended ({state.why or state.state}); {NOT_SENT}"
    why = f"the supervisor of {name} is gone" if owner.pid else f"{name} has no supervisor"
    advice = f"; nsa-console adopt {shlex.quote(str(top))} gives it a new one" if top else ""
    return f"{why}; {NOT_SENT}{advice}"
