"""Overrides by request: an operator accepts, with a reason, a gate that did not pass.

The event `override` of the run is the record; every reader evaluates the gates with it. The
supervisor writes it while the phase runs, and `apply_to_ended` in a launch that has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import status_text
from console.model import Gate
from console.plans import gates
from console.sources.run import RunSource
from console.sources.summary import Summary
from console.supervisor import former_documents
from console.supervisor.alerts import GATE_ALERT
from console.supervisor.launcher import Claim
from console.supervisor.rundir_io import event_record
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError, did_you_mean

if TYPE_CHECKING:  # a command does not load the supervisor
    from console.supervisor.inbox import Outcome
    from console.supervisor.run import Run

NOTHING = "nothing is overridden"
FREE_S, POLL_S = 25.0, 0.05
"""A supervisor that has ended its plan holds the lock until it has written the report."""


def named(phases: Iterable[str], phase: str) -> int:
    """Returns the index of a phase. Raises RefusedError."""
    names = list(phases)
    if phase not in names:
        hint = did_you_mean(phase, names)
        raise RefusedError(f"there is no phase {phase!r} in this launch{hint}; {NOTHING}")
    return names.index(phase)


def check(found: Iterable[Gate], gate: str) -> None:
    """Raises RefusedError unless a gate of this name has failed or is unknown."""
    by_name = {each.name: each for each in found}
    if gate not in by_name:
        hint = did_you_mean(gate, by_name) if by_name else ": the phase has no gates"
        raise RefusedError(f"there is no gate {gate!r} in this phase{hint}; {NOTHING}")
    its = by_name[gate]
    if not its.blocks:
        why = f"is overridden already: {its.override}" if its.override else "passed"
        raise RefusedError(f"the gate {gate} {why}; {NOTHING}")


def apply(
    run: Run | None, phases: Sequence[str], index: int, args: Mapping[str, Any], by: str
) -> Outcome:
    """Overrides a gate of the running phase `index` that has a result, and returns the outcome."""
    try:
        if named(phases, args["phase"]) != index or run is None:
            state = "has not started" if named(phases, args["phase"]) > index else "has ended"
            raise RefusedError(f"{args['phase']} {state}, and no gate of it stops the plan")
        summary, bounds, gate = run.summary, run.phase.gates, args["gate"]
        reached = {each.name: each for each in gates.reached(summary, bounds)}
        found = {each.name: each for each in gates.so_far(summary, bounds)} | reached
        if gate in found and gate not in reached and found[gate].result == "unknown":
            raise RefusedError(f"the gate {gate} has no result yet; {NOTHING}")
        check(found.values(), gate)
    except RefusedError as error:
        return False, str(error), []
    text, keys = facts(args)
    summary.add_event(run.event("override", text, by=by, **keys))
    run.alerts.clear(f"{GATE_ALERT}{gate}", text)
    return True, text, []


def facts(args: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the text and the keys of the event `override`."""
    gate, reason = args["gate"], " ".join(args["reason"].split())
    return f"the gate {gate} is overridden: {reason}", {"gate": gate, "reason": reason}


def apply_to_ended(launch: Path, args: Mapping[str, Any], by: str) -> str:
    """Overrides a gate of a phase that completed in an ended launch; returns the request's id.

    Raises RefusedError.
    """
    claim = Claim(launch, adopt=True)
    until = time.monotonic() + FREE_S
    while not claim.is_free() and time.monotonic() < until:
        time.sleep(POLL_S)
    claim.take()
    try:
        return _apply(launch, args, by)
    except OSError as error:
        raise RefusedError(f"cannot write into {launch}: {error.strerror}; send it again") from None
    finally:
        claim.release()


def _apply(launch: Path, args: Mapping[str, Any], by: str) -> str:
    plan_state = former_documents.document(launch, rundir.PLAN_STATE, NOTHING)
    entries = jsonl.entries(plan_state, "phases")
    index = named((jsonl.text(each, "name") for each in entries), args["phase"])
    entry, run = entries[index], launch / f"{index}-{args['phase']}"
    if entry.get("state") != "completed":
        raise RefusedError(
            f"{args['phase']} is {jsonl.text(entry, 'state')} and not completed, and an override "
            f"accepts only its gates; {NOTHING}"
        )
    for folder in (launch, run):
        rundir.check_ours(folder)
    document = former_documents.document(run, rundir.GATES, NOTHING)
    state = RunSource(run).poll()
    check(state.gates, args["gate"])
    text, keys = facts(args)
    event = event_record(state.attempt, "override", text, by=by, **keys)
    _append(run, event)
    summary = Summary()
    summary.add_event(event)
    now = tuple(replace(each, override=summary.overrides.get(each.name, each.override))
                for each in state.gates)  # fmt: skip
    result = gates.overall(now)
    changed = {"result": result, "gates": [asdict(each) for each in now]}
    rundir.write_json(run / rundir.GATES, document | changed)
    entry["result"], plan_state["why"] = result, f"{jsonl.text(plan_state, 'why')}; {text}"
    rundir.write_json(launch / rundir.PLAN_STATE, plan_state)
    name = f"{time.time_ns() // 1_000_000}-{os.urandom(4).hex()}"
    left = status_text.not_passed(now)
    answer = f"{text}; {left or 'the phase has passed, and resume starts the next one'}"
    _append(launch, event_record(1, "answer", answer, request=name, action="override", ok=True,
                                 detail=[], asked_by=by))  # fmt: skip
    return name


def _append(folder: Path, event: Mapping[str, Any]) -> None:
    """Appends an event to a launch or run that no supervisor writes. Raises OSError."""
    fd = rundir.open_append(folder / rundir.EVENTS)
    try:
        os.write(fd, jsonl.encode(event))
    finally:
        os.close(fd)
