"""Builds the model data of a launch from plan.json, plan_state.json and its run directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from console.model import LaunchState, PendingFlag, PhaseState, State
from console.sources import launches
from console.sources.json_documents import line, planned_steps, read
from console.sources.liveness import MAY_HAVE_ENDED, elsewhere, is_supervised
from console.sources.sanitize import clean
from trainers.contract import jsonl, rundir
from trainers.contract.jsonl import entries

MAX_PHASES, MAX_FORMER = 1000, 8
Record = Mapping[str, Any]


def run_directory(phase: Record) -> str:
    """Returns the name of a phase's directory in its launch, or "" if the name is not valid."""
    name = jsonl.text(phase, "dir")
    return name if rundir.RUN_NAME.fullmatch(name) else ""


def launch_state(
    path: Path, name: str, plan: Record, state: Record, troubles: Sequence[str] = ("", ""),
    existing: Sequence[str] = (),
) -> LaunchState:  # fmt: skip
    """Returns the launch: its phases from plan.json, their progress from plan_state.json.

    `troubles` says why plan.json and why plan_state.json cannot be read; each of the two texts may
    be "". `existing` has the names of the existing run directories, in the order of their phases.
    """
    phases, wrong_directory = _phases(plan, state)
    doubt = wrong_directory or troubles[0] or _contradiction(plan, state, phases, existing)
    named, why = jsonl.text(state, "state"), line(state, "why", "")
    owner = jsonl.mapping(state, "supervisor")
    if wrong_directory or named not in ("running", "waiting", "ended"):
        no_state = f"{rundir.PLAN_STATE} has no state of the launch"
        named, why = "unknown", wrong_directory or troubles[1] or no_state
        doubt = doubt or why
    elif named != "ended" and owner:
        runs = [path / each for each in existing] or launches.run_directories(path)
        moved = launches.why_not_in_place(runs[-1]) if runs else ""
        if moved or not is_supervised(owner | {"updated_ts": state.get("updated_ts")}):
            named, where = "unsupervised", elsewhere(owner)
            missing = "no supervisor is running; no further phase starts"
            why = moved or (MAY_HAVE_ENDED.format(where) if where else missing)
    current = jsonl.integer(state, "phase")
    current = _last_index(existing) if current is None else current
    former = jsonl.mapping(plan, "continues").values()
    launch = LaunchState(
        id=name, path=str(path), plan=line(plan, "name", line(state, "plan", path.parent.name)),
        state=cast(Any, named), why=why, phase=max(0, min(current, len(phases) - 1)),
        phases=phases, doubt=doubt, between=line(state, "between", "go"),
        next_flags=_pending_flags(jsonl.mapping(state, "next_flags")),
        ended_by=line(state, "ended_by", ""),
        continues=tuple(clean(str(each), 200) for each in former)[:MAX_FORMER],
    )  # fmt: skip
    return launch.unconfirmed({phase.dir for phase in phases}) if doubt else launch


def _phases(plan: Record, state: Record) -> tuple[tuple[PhaseState, ...], str]:
    """Returns two values: the phases of the two documents, and an error in a directory's name.

    The error is "" if every name is valid.
    """
    planned, reached = entries(plan, "phases"), entries(state, "phases")
    phases: list[PhaseState] = []
    wrong = ""
    for index in range(min(MAX_PHASES, max(len(planned), len(reached)))):
        entry, now = (each[index] if index < len(each) else {} for each in (planned, reached))
        phase = {"name": f"phase {index}", "state": "later"} | entry | now
        folder = run_directory({"dir": f"{index}-{jsonl.text(phase, 'name')}"} | phase)
        if not folder and phase.get("dir"):
            wrong = f"the directory of phase {index} is not named <n>-<phase>"
        phases.append(read(
            PhaseState, phase, index=index, steps_planned=planned_steps(entry), dir=folder,
            has_gates=bool(jsonl.mapping(entry, "gates")),
        ))  # fmt: skip
    return tuple(phases), wrong


def _contradiction(
    plan: Record, state: Record, phases: Sequence[PhaseState], existing: Sequence[str]
) -> str:
    """Returns why documents and run directories do not agree, or "" if no reason is found."""
    planned, reached = (
        [line(entry, "name", "?") for entry in entries(each, "phases")] for each in (plan, state)
    )
    if plan and not planned:
        return f"{rundir.PLAN} names no phase"
    if plan and state and planned != reached:
        shown = [", ".join(names[:8]) or "none" for names in (planned, reached)]
        return f"{rundir.PLAN} has the phases {shown[0]}, and {rundir.PLAN_STATE} has {shown[1]}"
    known = {phase.dir for phase in phases}
    other = next((each for each in existing if each not in known), "")
    if other and phases:
        return f"{rundir.PLAN} has no phase with the directory {clean(other, 80)}"
    current = jsonl.integer(state, "phase")
    if current is not None and _last_index(existing) > current:
        return (
            f"{rundir.PLAN_STATE} says that phase {current} was started last, "
            f"but {clean(existing[-1], 80)} exists"
        )
    return ""


def _last_index(existing: Sequence[str]) -> int:
    """Returns the index in the name of the last run directory, or 0 without a valid index."""
    index = existing[-1].partition("-")[0] if existing else ""
    return int(index) if index.isdecimal() and len(index) <= 4 else 0


def with_run_state(launch: LaunchState, run: str, state: State, why: str) -> LaunchState:
    """Returns the launch, changed according to the state of the run with the directory `run`.

    If the launch is unsupervised, or its state is unknown, the phase of this run gets `state` and
    `why`. If plan_state.json says that the launch has ended, but the run is unsupervised, the
    launch gets the state `unsupervised` too.
    """
    if launch.state == "ended" and state == "unsupervised":
        both = f"{rundir.PLAN_STATE} says that the launch has ended, but {why}"
        launch = replace(launch, state="unsupervised", why=both)
    if launch.state not in ("unsupervised", "unknown"):
        return launch
    phases = (
        replace(phase, state=state, why=why) if phase.dir == run else phase
        for phase in launch.phases
    )
    return replace(launch, phases=tuple(phases))


def _pending_flags(flags: Record) -> tuple[PendingFlag, ...]:
    return tuple(
        read(PendingFlag, {"by": "?", "phases": "next"} | entry, name=clean(str(name), 80))
        for name, entry in flags.items()
        if isinstance(entry, dict)
    )
