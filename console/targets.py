"""Finds the target of an operator's action: the run, and the supervisor that gets the request.

The section Targets of docs/decisions.md names the sources that must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.action_table import Action, Mailbox
from console.model import State
from console.sources import launch_documents, launches, liveness, process
from console.sources.run import RunSource
from console.sources.sanitize import clean
from console.supervisor import former_documents, lock
from trainers.contract import jsonl, rundir
from trainers.contract.errors import NotFoundError, RefusedError

UNSUPERVISED_STATES: frozenset[State] = frozenset(("unsupervised", "lost"))
"""States of a run that a new supervisor may adopt: ranks may be alive, or an attempt may be due."""
NOT_SENT = "request not sent"


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The supervisor named in a document, with the token of its lock."""

    identity: Mapping[str, Any]
    token: str

    @property
    def pid(self) -> int:
        return jsonl.integer(self.identity, "pid") or 0

    @property
    def host(self) -> str:
        """The supervisor's host, or "" if it is this host or not recorded."""
        return rundir.other_host(self.identity)


def current_run(launch: Path) -> Path:
    """Returns the run of a launch's current phase.

    Raises NotFoundError if the run does not exist yet. Raises RefusedError if plan_state.json
    cannot be read, or if the name of the directory in it is not `<n>-<phase>`.
    """
    state = _document(launch, rundir.PLAN_STATE)
    index, phases = jsonl.integer(state, "phase"), jsonl.entries(state, "phases")
    if index is not None and 0 <= index < len(phases):
        name = launch_documents.run_directory(phases[index])
        if not name and phases[index].get("dir"):
            raise RefusedError(
                f"the directory of phase {index} in {launch / rundir.PLAN_STATE} is not named "
                f"<n>-<phase>; {NOT_SENT}"
            )
        if name and (launch / name).is_dir():
            return launch / name
    raise NotFoundError(f"the launch {launches.launch_id(launch)} has no run yet")


def run_to_halt(path: Path) -> Path | None:
    """Returns the run that `halt` concerns, or None if a launch has no run yet.

    For a launch, returns the newest run with ranks but no supervisor, or else the current run.
    Raises RefusedError as `current_run` does.
    """
    if not launches.is_launch(path):
        return path
    for run in reversed(launches.run_directories(path)):
        if _has_only_ranks(run):
            return run
    try:
        return current_run(path)
    except NotFoundError:
        return None


def _has_only_ranks(run: Path) -> bool:
    """Returns whether a run has processes on this host, but no supervisor that may be alive.

    This host cannot check a supervisor on another host, so such a supervisor may be alive.
    """
    top = launches.launch_of(run)
    owners = [rundir.read_json(run / rundir.SUPERVISOR, below=run) or {}]
    if top is not None:
        owners.append(rundir.read_json(top / rundir.LOCK, below=top) or {})
        state = rundir.read_json(top / rundir.PLAN_STATE, below=top) or {}
        owners.append(jsonl.mapping(state, "supervisor"))
    elsewhere = any(map(rundir.other_host, owners))
    is_supervised = elsewhere or any(_is_alive(each, top) for each in owners)
    return not is_supervised and bool(liveness.living_in(run))


def _is_alive(owner: Mapping[str, Any], launch: Path | None) -> bool:
    """Returns whether a supervisor is alive on this host.

    In another PID namespace, a supervisor is alive if the lock of its launch is held.
    """
    is_held = launch is not None and rundir.is_hidden(owner) and liveness.is_locked(launch)
    return is_held or rundir.is_alive(owner)


def mailbox(path: Path, action: Action) -> tuple[Path, Mailbox]:
    """Returns the directory that receives the requests of an action, and the kind of mailbox.

    Raises NotFoundError or RefusedError, for example if there is no such directory.
    """
    top = launches.launch_of(path)
    here: Mailbox = "launch" if top == path else "run"
    if here in action.mailboxes:
        return path, here
    if here == "launch":
        return current_run(path), "run"
    if top is None:
        raise RefusedError(f"{path} does not belong to a launch, which {action.name} needs")
    return top, "launch"


def is_unsupervised(run: Path, folder: Path, box: Mailbox) -> bool:
    """Returns whether a run has no supervisor, but processes on this host or no recorded end.

    A supervisor on another host is assumed to be alive, because this host cannot check it. May
    raise RefusedError if the document that names the supervisor cannot be read.
    """
    if _has_only_ranks(run):
        return True
    owner, ended = _named(folder, box)
    return not (ended or owner.host) and RunSource(run).poll().state in UNSUPERVISED_STATES


def has_ended(launch: Path) -> bool:
    """Returns whether plan_state.json says that a launch has ended. Raises RefusedError."""
    return _document(launch, rundir.PLAN_STATE).get("state") == "ended"


def supervisor(folder: Path, box: Mailbox) -> Supervisor:
    """Returns the supervisor that reads a directory's requests, or raises RefusedError."""
    owner, ended = _named(folder, box)
    name = launches.launch_id(folder) if box == "launch" else folder.name
    if ended:
        raise RefusedError(f"{name} has ended ({ended}); {NOT_SENT}")
    top = launches.launch_of(folder)
    if not owner.host and not _is_alive(owner.identity, top):
        raise RefusedError(_without_supervisor(name, folder, box, owner))
    is_held = top is not None and (bool(owner.host) or liveness.is_locked(top))
    if top is None or not is_held or not owner.token or owner.token != lock.token_of(top):
        where = f" on {owner.host}" if owner.host else ""
        found = "that of another supervisor" if is_held else "not held"
        raise RefusedError(
            f"{top or folder} is not used by its supervisor (pid {owner.pid}{where}): the lock "
            f"in it is {found}, so it is a copy, or the launch was moved; {NOT_SENT}"
        )
    return owner


def _named(folder: Path, box: Mailbox) -> tuple[Supervisor, str]:
    """Returns two values: the supervisor that a directory's document names, and a text.

    The text says how the run or launch ended, or is "" before its end. Raises RefusedError if the
    document cannot be read.
    """
    top = launches.launch_of(folder)
    record = _document(folder, rundir.PLAN_STATE if box == "launch" else rundir.SUPERVISOR)
    state = jsonl.text(record, "state")
    over = state == "ended" if box == "launch" else state in liveness.ENDED
    ended = clean(jsonl.text(record, "why") or state, 400) if over else ""
    if box == "run" and (record or top is None):
        return Supervisor(record, jsonl.text(record, "lock_token")), ended
    # A run that is starting has no supervisor.json yet, but plan_state.json has its supervisor.
    plan_state = record if box == "launch" or top is None else _document(top, rundir.PLAN_STATE)
    owner = jsonl.mapping(plan_state, "supervisor")
    return Supervisor(owner, jsonl.text(owner, "token")), ended


def _document(folder: Path, name: str) -> dict[str, Any]:
    return former_documents.document(folder, name, NOT_SENT)


def _without_supervisor(name: str, folder: Path, box: Mailbox, owner: Supervisor) -> str:
    """Returns why no supervisor reads the requests in `folder`, and what to do."""
    state, top = RunSource(folder).poll(), launches.launch_of(folder)
    if box == "run" and state.state in liveness.ENDED - UNSUPERVISED_STATES:
        return f"{name} has ended ({state.why or state.state}); {NOT_SENT}"
    why = f"the supervisor of {name} is not running" if owner.pid else f"{name} has no supervisor"
    advice = f"; {process.command('adopt', top)} starts a new supervisor" if top else ""
    return f"{why}; {NOT_SENT}{advice}"
