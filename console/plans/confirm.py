"""GO for a run: what the supervisor wrote of its gates, and what the records say to this reader.

Both have to say that each gate passed: `gates.json` alone is one document of one writer. The gates
are those of plan.json, and plan_state.json says nothing else of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import status_text
from console.model import NO_GO, Alert, Gate, LaunchState, RunState
from console.plans import gates
from console.sources import liveness
from console.sources.record_files import MAX_RANKS
from console.sources.run import RunSource
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError, UsageError

FULL = "nsa-console check --full reads all of them"


def confirmed(source: RunSource, former: bool = True) -> RunState:
    """Returns the state of a run, with an alert where its records do not confirm that it passed.

    With `former` that holds for all phases of a launch that is over, and for records that were not
    read to their end.
    """
    state = source.poll()
    over = source.whole and status_text.is_over(state)
    if (state.state != "completed" and not over) or status_text.exit_code(state, source.whole):
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


def check_former(launch: Path, plan: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raises RefusedError where a phase has not passed that plan_state.json says is behind."""
    names = [jsonl.text(entry, "name") for entry in jsonl.entries(plan, "phases")]
    behind = (jsonl.integer(held, "phase") or 0) + (held.get("state") == "waiting")
    for index, name in enumerate(names[: max(0, behind)]):
        run = launch / f"{index}-{name}"
        source = RunSource(run)
        state = source.poll()
        if not source.is_whole:
            source = RunSource(run, reads="all")
            state = source.read_all()
        if found := list(_doubts(source, state)):
            raise RefusedError(
                f"{rundir.PLAN_STATE} says that {name} has passed, which nothing confirms: "
                f"{'; '.join(found)}; nothing is taken over"
            )


def _doubts_of_former(source: RunSource, state: RunState) -> Iterator[tuple[str, str]]:
    """Yields directory and doubt of the phases before the last one."""
    for phase in state.launch.phases if state.launch else ():
        if source.launch_path is None or not phase.dir:
            yield phase.dir, f"{phase.name}: its run directory is not known"
        elif (path := source.launch_path / phase.dir) != source.run_path:
            before = source.of_phase(path)
            for doubt in _doubts(before, before.read_all()):
                yield phase.dir, f"{phase.name}: {doubt}"


def _doubts(source: RunSource, state: RunState) -> Iterator[str]:
    """Yields why a run that completed is no go, one sentence a gate."""
    run, summary = source.run_path, source.summary
    if run is None or summary is None:
        return
    held = {
        name: rundir.read_json(run / name, below=run) for name in (rundir.RUN, rundir.SUPERVISOR)
    }
    unread = [name for name, record in held.items() if record is None]
    if unread and source.launch_path is not None:
        yield f"{unread[0]} cannot be read"
        return
    born, document = (record or {} for record in held.values())
    yield from _bad_ends(document)
    bounds, told = jsonl.mapping(born, "gates"), {gate.name: gate for gate in state.gates}
    if source.launch_path is not None and state.launch is not None:
        yield from _unlike_launch(source.launch_path, state.launch, run.name, bounds)
    if not bounds and not told:
        return
    if not source.is_whole:
        without = f"there is no usable {rundir.SNAPSHOT} of its records"
        yield f"{without}, of which only the end was read; {FULL}"
        return
    if state.behind_bytes:
        yield "its records are not read to the end"
        return
    world = jsonl.integer(born, "world") or 0
    if not 1 <= world <= MAX_RANKS:
        yield f"{rundir.RUN} does not say how many ranks there are"
        return
    summary.limit(world)
    summary.take_document(document)
    try:
        gates.check(bounds, rundir.RUN)
    except UsageError as error:
        yield str(error)
        return
    mine = {gate.name: gate for gate in gates.evaluate(summary, bounds)}
    for name in sorted(told.keys() | mine.keys()):
        if why := _disagreement(told.get(name), mine.get(name)):
            yield f"gate {name} {why}"


def _unlike_launch(
    path: Path, launch: LaunchState, run: str, bounds: Mapping[str, Any]
) -> Iterator[str]:  # fmt: skip
    """Yields what plan.json and plan_state.json say against the gates of a run that passed."""
    if launch.doubt:
        yield launch.doubt
        return
    planned = jsonl.entries(rundir.read_json(path / rundir.PLAN, below=path) or {}, "phases")
    for phase, entry in zip(launch.phases, planned, strict=False):
        if phase.dir != run:
            continue
        if jsonl.mapping(entry, "gates") != bounds:
            yield f"the gates in {rundir.RUN} are not those of the phase in {rundir.PLAN}"
        if phase.result not in ("", "pass"):
            yield f"{rundir.PLAN_STATE} says {phase.result} of its gates"


def _bad_ends(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields what supervisor.json says against a good end: its state, or the exit of a rank."""
    if document and jsonl.text(document, "state") != "completed":
        yield f"{rundir.SUPERVISOR} says {jsonl.text(document, 'state') or 'nothing'}"
    for worker in jsonl.entries(document, "workers"):
        end, rank = jsonl.mapping(worker, "exit"), jsonl.integer(worker, "rank")
        if end.get("signal") or jsonl.integer(end, "code"):
            yield f"rank {rank}: {liveness.exit_words(worker, {})}"


def _disagreement(told: Gate | None, mine: Gate | None) -> str:
    """Says why a gate is not passed by both: gates.json, and the records."""
    if told is None or mine is None:
        return f"is not in {rundir.GATES if told is None else rundir.RUN}"
    if told.result != "pass":
        return f"is {told.result} in {rundir.GATES}"
    if mine.result != "pass":
        by = f"{mine.result} by the records ({status_text.gate_value(mine)}, bound {mine.bound})"
        return f"passes in {rundir.GATES} and is {by}" + f": {mine.why}" * bool(mine.why)
    if told.bound != mine.bound:
        return f"has the bound {told.bound} in {rundir.GATES} and {mine.bound} in {rundir.RUN}"
    return ""
