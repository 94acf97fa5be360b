"""GO for a run: what the supervisor wrote of its gates, and what the records say to this reader.

Both have to say that each gate passed: `gates.json` alone is one document of one writer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import plain
from console.model import NO_GO, Alert, Gate, RunState
from console.plans import gates
from console.sources import documents, presence
from console.sources.run import RunSource
from console.sources.summary import MAX_RANKS
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError, UsageError


def confirmed(source: RunSource, former: bool = True) -> RunState:
    """Returns the state of a run, with an alert where its records do not confirm that it passed.

    With `former` that holds for all phases of a launch that is over, and for records that were not
    read to their end. Of a run that has not completed nothing more is read than `source` does.
    """
    state = source.poll()
    over = source.whole and plain.is_over(state)
    if (state.state != "completed" and not over) or plain.exit_code(state, source.whole):
        return state
    if not source.is_whole:
        state = source.read_whole()
    if state.behind_bytes and not former:
        return state
    found = list(_doubts(source, state))
    if former and over:
        found += _doubts_of_former(source, state)
    if not found:
        return state
    alert = Alert(NO_GO, time.time(), "crit", "no go: " + "; ".join(found), observed=True)
    return replace(state, alerts=(alert, *state.alerts))


def check_former(launch: Path, plan: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raises RefusedError where a phase has not passed that plan_state.json says is behind."""
    names = [jsonl.text(entry, "name") for entry in documents.entries(plan, "phases")]
    behind = (jsonl.integer(held, "phase") or 0) + (held.get("state") == "waiting")
    for index, name in enumerate(names[: max(0, behind)]):
        source = RunSource(launch / f"{index}-{name}")
        if found := list(_doubts(source, source.poll())):
            raise RefusedError(
                f"{rundir.PLAN_STATE} says that {name} has passed, which nothing confirms: "
                f"{'; '.join(found)}; nothing is taken over"
            )


def _doubts_of_former(source: RunSource, state: RunState) -> Iterator[str]:
    """Yields the same for the phases before the last one."""
    for phase in state.launch.phases if state.launch else ():
        if source.launch_path is None or not phase.dir:
            yield f"{phase.name}: its run directory is not known"
            continue
        path = source.launch_path / phase.dir
        if path != source.run_path:
            before = RunSource(path)
            yield from (f"{phase.name}: {doubt}" for doubt in _doubts(before, before.poll()))


def _doubts(source: RunSource, state: RunState) -> Iterator[str]:
    """Yields why a run that completed is no go, one sentence a gate."""
    run, summary = source.run_path, source.summary
    if run is None or summary is None:
        return
    born = rundir.read_json(run / rundir.RUN, below=run)
    if born is None and source.launch_path is not None:
        yield f"{rundir.RUN} cannot be read"
        return
    born, document = born or {}, rundir.read_json(run / rundir.SUPERVISOR, below=run)
    if document is None and source.launch_path is not None:
        yield f"{rundir.SUPERVISOR} cannot be read"
        return
    yield from _bad_ends(document or {})
    bounds, told = jsonl.mapping(born, "gates"), {gate.name: gate for gate in state.gates}
    if not bounds and not told:
        return
    if state.behind_bytes:
        yield "its records are not read to the end"
        return
    world = jsonl.integer(born, "world") or 0
    if not 1 <= world <= MAX_RANKS:
        yield f"{rundir.RUN} does not say how many ranks there are"
        return
    summary.limit(world)
    summary.take_document(document or {})
    try:
        gates.check(bounds, rundir.RUN)
    except UsageError as error:
        yield str(error)
        return
    mine = {gate.name: gate for gate in gates.evaluate(summary, bounds)}
    for name in sorted(told.keys() | mine.keys()):
        if why := _disagreement(told.get(name), mine.get(name)):
            yield f"gate {name} {why}"


def _bad_ends(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields what supervisor.json says against a good end: its state, or the exit of a rank."""
    if document and jsonl.text(document, "state") != "completed":
        yield f"{rundir.SUPERVISOR} says {jsonl.text(document, 'state') or 'nothing'}"
    for worker in documents.entries(document, "workers"):
        end, rank = jsonl.mapping(worker, "exit"), jsonl.integer(worker, "rank")
        if end.get("signal") or jsonl.integer(end, "code"):
            yield f"rank {rank} ended with {presence.exit_words(worker, {})}"


def _disagreement(told: Gate | None, mine: Gate | None) -> str:
    """Says why a gate is not passed by both: gates.json, and the records."""
    if told is None or mine is None:
        return f"is not in {rundir.GATES if told is None else rundir.RUN}"
    if told.result != "pass":
        return f"is {told.result} in {rundir.GATES}"
    if mine.result != "pass":
        by = f"{mine.result} by the records ({plain.gate_value(mine)}, bound {mine.bound})"
        return f"passes in {rundir.GATES} and is {by}" + f": {mine.why}" * bool(mine.why)
    if told.bound != mine.bound:
        return f"has the bound {told.bound} in {rundir.GATES} and {mine.bound} in {rundir.RUN}"
    return ""
