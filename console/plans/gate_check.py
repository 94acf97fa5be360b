"""Compares the gates in gates.json with the gates evaluated from the records of the run.

One source is not enough: gates.json and the records must both show that a gate passed. In a launch,
run.json and plan.json must have the same bounds, and plan_state.json must not contradict the
result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import status_text
from console.model import NO_GO, Alert, Gate, LaunchState, RunState, loss_unit
from console.plans import gates, measures
from console.sources import gate_files, liveness
from console.sources.record_files import MAX_RANKS
from console.sources.run import RunSource
from console.sources.summary import Summary
from console.status_text import RESULT_WORDS
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError, UsageError

RESUME, FROM_STEP = "checkpoint.resume", "checkpoint.from_step"
FULL = "run nsa-console check RUN --full"


def poll_confirmed(source: RunSource, former: bool = True) -> RunState:
    """Polls a run; returns its state, with an alert if the files do not confirm that it is go.

    Only a state that would be go is checked. With `former`, the function also checks the other
    phases of a launch that is over. Without `former`, it does not check a run until all records
    have been read.
    """
    state = source.poll()
    over = source.is_launch and status_text.is_over(state)
    if (state.state != "completed" and not over) or status_text.exit_code(state, source.is_launch):
        return state
    if state.behind_bytes and not former:
        return state
    own = source.run_path.name if source.run_path else ""
    found = [(own, doubt) for doubt in _doubts(source, state)]
    if former and over:
        found += _doubts_of_former(source, state)
    if not found:
        return state
    text = "no go: " + "; ".join(doubt for _, doubt in found)
    alert = Alert(NO_GO, time.time(), "crit", text, observed=True)
    launch = state.launch and state.launch.unconfirmed({name for name, _ in found})
    return replace(state, alerts=(alert, *state.alerts), launch=launch)


def check_former(launch: Path, plan: Mapping[str, Any], plan_state: Mapping[str, Any]) -> None:
    """Raises RefusedError if the records do not confirm a phase that passed in plan_state.json."""
    names = [jsonl.text(entry, "name") for entry in jsonl.entries(plan, "phases")]
    passed = (jsonl.integer(plan_state, "phase") or 0) + (plan_state.get("state") == "waiting")
    for index, name in enumerate(names[: max(0, passed)]):
        source, state = _read_whole(launch / f"{index}-{name}")
        if found := list(_doubts(source, state)):
            raise RefusedError(
                f"{rundir.PLAN_STATE} reports {name} as passed, and its records do "
                f"not confirm it: {'; '.join(found)}"
            )


def _read_whole(run: Path) -> tuple[RunSource, RunState]:
    """Returns the source and the state of a run, with the totals of all its records."""
    source = RunSource(run)
    state = source.poll()
    if not source.has_all_records:
        source = RunSource(run, reads="all")
        state = source.read_all()
    return source, state


def _doubts_of_former(source: RunSource, state: RunState) -> Iterator[tuple[str, str]]:
    """Yields the directory and a reason for each doubt about the other phases of the launch."""
    for phase in state.launch.phases if state.launch else ():
        if source.launch_path is None or not phase.dir:
            yield phase.dir, f"{phase.name}: its run directory is not available"
        elif (path := source.launch_path / phase.dir) != source.run_path:
            before = source.of_phase(path)
            for doubt in _doubts(before, before.read_all()):
                yield phase.dir, f"{phase.name}: {doubt}"


def _doubts(source: RunSource, state: RunState) -> Iterator[str]:
    """Yields the reasons why a completed run is no go."""
    run, launch = source.run_path, source.launch_path
    if run is None or source.summary is None:
        return
    run_json, document = _documents(run)
    by_hand = launch is None and run_json is None and document is None
    if not by_hand and (run_json is None or document is None):
        yield f"{rundir.RUN if run_json is None else rundir.SUPERVISOR} cannot be read"
        return
    run_json, document = run_json or {}, document or {}
    yield from _bad_ends(document)
    bounds = jsonl.mapping(run_json, "gates")
    if launch is not None and state.launch is not None:
        yield from _contradictions(launch, state.launch, run.name, bounds)
    if bounds or state.gates:
        yield from _unconfirmed(source, state, run_json, document)


def _documents(run: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Returns run.json and supervisor.json, each of them None if it cannot be read."""
    run_json, document = (
        rundir.read_json(run / n, below=run) for n in (rundir.RUN, rundir.SUPERVISOR)
    )
    return run_json, document


def _unconfirmed(
    source: RunSource, state: RunState, run_json: Mapping[str, Any], document: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a text for each gate for which `_disagreement` returns a reason.

    If the gates cannot be evaluated, yields only the reason.
    """
    summary = _complete(source, state, run_json, document)
    if isinstance(summary, str):
        yield summary
        return
    summary.former = summary.former or continued(run_json, summary.resumed_at_end)
    written = {gate.name: gate for gate in state.gates}
    found = gates.evaluate(summary, jsonl.mapping(run_json, "gates"))
    own = {gate.name: gate for gate in found}
    for name in sorted(written.keys() | own.keys()):
        if why := _disagreement(written.get(name), own.get(name)):
            yield f"gate {name} {why}"


def _complete(
    source: RunSource, state: RunState, run_json: Mapping[str, Any], document: Mapping[str, Any]
) -> Summary | str:
    """Returns the summary with all that the gates need, or why the gates cannot be evaluated.

    The last pulses come from supervisor.json. Logs may be large, so logs and checkpoints are read
    once per `source`, and only if a gate needs files other than records.
    """
    summary, bounds = source.summary, jsonl.mapping(run_json, "gates")
    world = jsonl.integer(run_json, "world") or 0
    if summary is None or not source.has_all_records:
        return f"{rundir.SNAPSHOT} is not usable, so only the newest records were read; {FULL}"
    if state.behind_bytes:
        return "not all records of the run have been read yet"
    if not 1 <= world <= MAX_RANKS:
        return f"{rundir.RUN} has no valid number of ranks"
    try:
        gates.check(bounds, rundir.RUN)
    except UsageError as error:
        return str(error)
    summary.world = world
    summary.loss_unit = loss_unit(run_json.get("settings"))
    summary.take_document(document)
    reads = not all(gates.RULES[name].source.endswith(".jsonl") for name in bounds)
    if reads and summary.files is None:
        summary.files = gate_files.read(source.run_path or Path(), summary.attempts or 1, world)
    return summary


def continued(own: Mapping[str, Any], step: int) -> Summary | None:
    """Returns the totals of the earlier run that a resumed run continues, or None if none fits.

    `own` is the run.json of the resumed run, and `step` its `Summary.resumed_at_end`. The records
    or the last pulses of the earlier run must show that `step` is its last step. The pulses
    suffice, because the loaded checkpoint confirms them. Both runs must have the same phase, number
    of ranks, gates and settings, except `RESUME` and `FROM_STEP`.
    """
    path = Path(str(jsonl.mapping(jsonl.mapping(own, "settings"), RESUME).get("value") or ""))
    if not (step and path.is_absolute()):
        return None
    before = rundir.read_json(path / rundir.RUN, below=path) or {}
    if _training(before) != _training(own):
        return None
    source, state = _read_whole(path)
    document = rundir.read_json(path / rundir.SUPERVISOR, below=path) or {}
    found, world = _complete(source, state, own, document), jsonl.integer(own, "world") or 0
    if isinstance(found, str):
        return None
    if all(_last_step(found, rank) == step for rank in range(world)):
        found.loaded_step = step
    found.name = f"in the records of {state.id}, which this run continues without a further step"
    return found if measures.steps_reached(found).value == step else None


def _last_step(summary: Summary, rank: int) -> int:
    """Returns the step of a rank's last pulse, or else of its exit record, or else 0."""
    newest = summary.of_rank(rank).newest
    end, part = summary.ends.get((newest, rank)), summary.of_attempt(rank, newest)
    return end.step if end else part.exit[0] if part and part.exit else 0


def _training(run_json: Mapping[str, Any]) -> list[object]:
    """Returns the values that must be equal in two runs if one continues the other."""
    settings = jsonl.mapping(run_json, "settings")
    trained = settings.keys() - {RESUME, FROM_STEP}
    values = {key: jsonl.mapping(settings, key).get("value") for key in trained}
    return [run_json.get("phase"), run_json.get("world"), run_json.get("gates"), values]


def so_far(source: RunSource, state: RunState) -> tuple[Gate, ...]:
    """Returns the gates of a run that has not ended; unknown if they cannot be evaluated yet."""
    run = source.run_path
    if run is None or source.summary is None:
        return ()
    run_json, document = (found or {} for found in _documents(run))
    summary, bounds = _complete(source, state, run_json, document), jsonl.mapping(run_json, "gates")
    if not isinstance(summary, str):
        return gates.evaluate(summary, bounds, is_live=True)
    known = {name: bound for name, bound in bounds.items() if name in gates.RULES}
    return gates.unknown(known, summary)


def _contradictions(
    path: Path, launch: LaunchState, run: str, bounds: Mapping[str, Any]
) -> Iterator[str]:  # fmt: skip
    """Yields how plan.json and plan_state.json contradict each other or a run's gates."""
    if launch.doubt:
        yield launch.doubt
        return
    planned = jsonl.entries(rundir.read_json(path / rundir.PLAN, below=path) or {}, "phases")
    for phase, entry in zip(launch.phases, planned, strict=False):
        if phase.dir != run:
            continue
        if jsonl.mapping(entry, "gates") != bounds:
            yield f"{rundir.RUN} has other gates than its phase in {rundir.PLAN}"
        if phase.result not in ("", "pass"):
            word = RESULT_WORDS.get(phase.result, phase.result)
            yield f"its gates are {word} in {rundir.PLAN_STATE}"


def _bad_ends(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields each state or exit in supervisor.json that contradicts a completed run."""
    if document and jsonl.text(document, "state") != "completed":
        yield f"its state is {jsonl.text(document, 'state') or 'missing'} in {rundir.SUPERVISOR}"
    for worker in jsonl.entries(document, "workers"):
        end, rank = jsonl.mapping(worker, "exit"), jsonl.integer(worker, "rank")
        if end.get("signal") or jsonl.integer(end, "code"):
            yield f"rank {'?' if rank is None else rank}: {liveness.exit_words(worker, {})}"


def _disagreement(written: Gate | None, own: Gate | None) -> str:
    """Returns why gates.json and the records do not both confirm a gate, or "" if they do.

    A gate with an override needs only the same override in gates.json.
    """
    if written is None:
        return f"is not in {rundir.GATES}"
    if own is None:
        return f"does not follow from {rundir.RUN} and the records"
    if own.override:
        has = f"has {'another' if written.override else 'no'} override in {rundir.GATES}"
        return "" if written.override == own.override else has
    if written.result != "pass":
        return f"is {RESULT_WORDS[written.result]} in {rundir.GATES}"
    if own.result != "pass":
        found = f"{status_text.gate_value(own)}, bound {own.bound}"
        why = f": {own.why}" if own.why else ""
        word = RESULT_WORDS[own.result]
        return f"is passed in {rundir.GATES} and {word} by the records ({found}){why}"
    if written.bound != own.bound:
        return f"has the bound {written.bound} in {rundir.GATES} and {own.bound} by the records"
    return ""
