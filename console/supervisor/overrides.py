"""Executes the request `override`: an operator accepts, with a reason, a gate that did not pass.

The override is stored as an event `override` of the run. The supervisor writes the event while the
phase runs; `apply_to_ended` writes it after the launch has ended.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import access, status_text
from console.model import Gate, RunState
from console.plans import gates
from console.sources import launch_documents
from console.sources.run import RunSource
from console.sources.summary import Summary
from console.supervisor import former_documents
from console.supervisor.launcher import Claim
from console.supervisor.rundir_io import event_record
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError, did_you_mean

if TYPE_CHECKING:  # a command does not load the supervisor
    from console.supervisor.inbox import Outcome
    from console.supervisor.run import Run

NOTHING = "nothing is overridden"
FREE_S, POLL_S = 10.0, 0.05
"""The longest wait for the lock, and the time between two tries.

After the end of its plan, a supervisor has the lock until the report is written and its hooks have
ended. By default, the command override waits longer, so that it gets the reason.
"""


def _index(names: Sequence[str], name: str, what: str) -> int:
    """Returns the index of a name. Raises RefusedError if `names` does not contain it."""
    if name not in names:
        raise RefusedError(f"there is no {what} {name!r}{did_you_mean(name, names)}; {NOTHING}")
    return names.index(name)


def _check(found: Sequence[Gate], name: str, planned: Sequence[Gate] = ()) -> None:
    """Raises RefusedError unless a gate failed or is unknown, and has no override yet."""
    if name in {each.name for each in planned} - {each.name for each in found}:
        raise RefusedError(f"the gate {name} has no result yet; {NOTHING}")
    gate = found[_index([each.name for each in found], name, "result of a gate")]
    if not gate.blocks:
        why = f"is overridden already: {gate.override}" if gate.override else "passed"
        raise RefusedError(f"the gate {name} {why}; {NOTHING}")


def apply(
    run: Run | None, phases: Sequence[str], index: int, args: Mapping[str, Any], by: str
) -> Outcome:
    """Overrides a gate that has a result, in the running phase `index`; returns the outcome.

    A gate with an `at` step has a result after this step. Any other gate has a result once it has
    failed and can no longer pass.
    """
    try:
        if run is None or _index(phases, args["phase"], "phase") != index:
            raise RefusedError(f"{args['phase']} is not the phase that runs; {NOTHING}")
        so_far = gates.evaluate(run.summary, run.phase.gates, is_live=True)
        _check(gates.reached(run.summary, run.phase.gates), args["gate"], so_far)
    except RefusedError as error:
        return False, str(error), []
    text, keys = _facts(args)
    run.summary.add_event(run.event("override", text, by=by, **keys))
    run.alerts.clear(f"{gates.GATE_ALERT}{args['gate']}", text)
    return True, text, []


def _facts(args: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the text and the keys of the event `override`."""
    gate, reason = args["gate"], " ".join(args["reason"].split())
    return f"the gate {gate} is overridden: {reason}", {"gate": gate, "reason": reason}


def apply_to_ended(launch: Path, args: Mapping[str, Any], by: str) -> str:
    """Overrides a gate of a phase that completed in an ended launch; returns the request's id.

    Raises RefusedError.
    """
    _target(launch, args)  # a rejected request leaves no file
    claim = Claim(launch, adopt=True)
    until = time.monotonic() + FREE_S
    while not claim.is_free():
        if time.monotonic() >= until:
            why = f"the supervisor of {launch} still writes the report or runs a hook"
            raise RefusedError(f"{why}; {NOTHING}; send it again when the supervisor has ended")
        time.sleep(POLL_S)
    claim.take()
    try:
        return _apply(launch, args, by)
    except OSError as error:
        raise RefusedError(f"cannot write into {launch}: {error.strerror}; send it again") from None
    finally:
        claim.release()


def _target(
    launch: Path, args: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], Path, RunState]:
    """Returns plan_state.json, its entry of the phase, the run directory and the run's state.

    Raises RefusedError.
    """
    plan_state = former_documents.document(launch, rundir.PLAN_STATE, NOTHING)
    entries = jsonl.entries(plan_state, "phases")
    names = [jsonl.text(each, "name") for each in entries]
    entry = entries[_index(names, args["phase"], "phase")]
    run = launch / launch_documents.run_directory(entry)
    if entry.get("state") != "completed" or run == launch:
        raise RefusedError(f"{args['phase']} has not completed, so resume it; {NOTHING}")
    access.check_ours(run)
    state = RunSource(run).poll()
    _check(state.gates, args["gate"])
    return plan_state, entry, run, state


def _apply(launch: Path, args: Mapping[str, Any], by: str) -> str:
    plan_state, entry, run, state = _target(launch, args)
    document = former_documents.document(run, rundir.GATES, NOTHING)
    text, keys = _facts(args)
    event = event_record(state.attempt, "override", text, by=by, **keys)
    _append(run, event)
    summary = Summary()
    summary.add_event(event)
    now = tuple(replace(each, override=summary.overrides.get(each.name, each.override))
                for each in state.gates)  # fmt: skip
    entry["result"], plan_state["why"] = gates.overall(now), f"{plan_state.get('why')}; {text}"
    changed = {"result": entry["result"], "gates": [asdict(each) for each in now]}
    # gates.json is written last, so that a request that failed halfway can be repeated.
    rundir.write_json(launch / rundir.PLAN_STATE, plan_state)
    rundir.write_json(run / rundir.GATES, document | changed)
    name = f"{time.time_ns() // 1_000_000}-{os.urandom(4).hex()}"
    left = status_text.not_passed(now) or "the phase has passed"
    if entry["result"] == "pass" and entry is not jsonl.entries(plan_state, "phases")[-1]:
        left += ", and resume starts the next one"
    answer = f"{text}; {left}"
    _append(launch, event_record(1, "answer", answer, request=name, action="override", ok=True,
                                 detail=[], asked_by=by))  # fmt: skip
    return name


def _append(folder: Path, event: Mapping[str, Any]) -> None:
    """Appends an event to a launch or run that no supervisor writes. Raises OSError.

    After a full disk, the last line may be incomplete. The event then begins a new line.
    """
    path, line = folder / rundir.EVENTS, jsonl.encode(event)
    line = line if jsonl.read_bytes(path, 1) in (b"", b"\n") else b"\n" + line
    fd = rundir.open_append(path)
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)
