"""A new supervisor believes no document of a former one alone.

An act that one document asks for needs a second one that says the same: an event, a file, another
document. What only one says is left out, and a sentence says so; where two that should be equal
differ, nothing is taken over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from console.sources import launches, process
from console.supervisor import recovery
from console.supervisor.attempt import ENDINGS
from console.supervisor.launch_spec import LOG_DIR, LaunchSpec, argv
from console.supervisor.next_flags import set_words
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

NOT_BEFORE = "nothing is taken over before they agree"
GROWING = ("watch", "restart")
"""Copies in which a former version may lack a key: what is there is compared."""


class Witness:
    """The newest events of a launch and its runs, and the files beside them."""

    def __init__(self, launch: Path, runs: Sequence[Path]):
        self._launch = launch
        self._events = {
            folder: recovery.events(folder, launch) for folder in (launch, *runs)
        }  # fmt: skip

    def answered(self) -> dict[str, Path]:
        """Returns the ids of the requests that were answered, with their mailboxes."""
        return {
            jsonl.text(record, "request"): folder / rundir.REQUESTS
            for folder, records in self._events.items()
            for record in records if record.get("kind") == "answer"
        }  # fmt: skip

    def asks(self, action: str, run: Path) -> bool:
        """Says whether a request, a watch rule or a `.HALT` asked for the end of a run."""
        folders = (self._launch, run)
        if action == "halt" and any(os.path.lexists(each / rundir.HALT) for each in folders):
            return True
        records = [each for folder in folders for each in self._events.get(folder, ())]
        refused = {each.get("request") for each in records if each.get("ok") is False}
        newest = max((jsonl.integer(each, "attempt") or 0 for each in records), default=0)
        asked = (each for each in records if each.get("action") == action)
        return any(
            (each.get("kind") == "request" and each.get("request") not in refused)
            or (each.get("kind") == "watch" and each.get("attempt") == newest)
            for each in asked
        )

    def sets(self, name: str, value: str, phase: str) -> bool:
        """Says whether an operator set a flag for a phase, and did not take that back."""
        records = self._events[self._launch]
        asked = {each.get("request") for each in records if each.get("kind") == "request"}
        answer = ("answer", "set-flag", True)
        done = [jsonl.text(each, "text") for each in records if each.get("request") in asked
                and (each.get("kind"), each.get("action"), each.get("ok")) == answer]  # fmt: skip
        about, ends = (f"{name}=", f"{name} "), (f" for {phase}", f" for {phase} only")
        last = [text for text in done if text.startswith(about) and text.endswith(ends)][-1:]
        return last == [set_words(name, value, phase)]

    def became(self, state: str, run: Path) -> bool:
        """Says whether the last event on the state of a run, or its gates.json, says the same."""
        told = [jsonl.text(each, "state") for each in self._events[run]
                if each.get("kind") == "state" and each.get("state")]  # fmt: skip
        ended = state in recovery.FINAL and (run / rundir.GATES).exists()
        return ended or told[-1:] == [state]


def of_launch(
    held: Mapping[str, Any], given: LaunchSpec, index: int, runs: Sequence[Path], witness: Witness
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Returns what of plan_state.json is believed, and a sentence on each thing that is not.

    Raises RefusedError where plan.json, or the runs, say otherwise.
    """
    run = runs[index]
    check_plan(held, given)
    for former in range(index):
        check_copies(recovery.document(runs[former], rundir.RUN), given, former)
    recovery.check_phase(index, runs, held.get("state") == "waiting")
    doubts, ended_by = [], jsonl.text(held, "ended_by")
    action = ended_by.partition(" ")[0]
    document = rundir.read_json(run / rundir.SUPERVISOR, below=run) or {}
    if ended_by and not (witness.asks(action, run) or document.get("asked") == action):
        doubts.append(_alone(rundir.PLAN_STATE, ended_by[:200]))
        ended_by = ""
    begun = (run / rundir.RUN).exists()
    following = given.plan.phases[index + begun :]
    flags = {}
    for name, entry in recovery.next_flags(held).items():
        if following and witness.sets(name, entry["value"], following[0].name):
            flags[name] = entry
        else:
            told = f"{name}={entry['value']} for the next phase"
            doubts.append(_alone(rundir.PLAN_STATE, told))
    return {**held, "ended_by": ended_by, "next_flags": flags}, doubts


def of_run(
    run: Path, given: LaunchSpec, index: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns run.json, what of supervisor.json is believed, and a sentence on what is not.

    Raises RefusedError where plan.json, or the processes that live, say otherwise.
    """
    held, record = (recovery.document(run, name) for name in (rundir.SUPERVISOR, rundir.RUN))
    launches.check_in_place(run)
    witness = Witness(run.parent, [run])
    check_copies(record, given, index)
    check_flags(record, given, index, witness)
    doubts, asked, state = [], jsonl.text(held, "asked"), jsonl.text(held, "state")
    plan = rundir.read_json(run.parent / rundir.PLAN_STATE) or {}
    by_plan = jsonl.text(plan, "ended_by").startswith(f"{asked} asked by ")
    if asked in ENDINGS and not (by_plan or witness.asks(asked, run)):
        doubts.append(_alone(rundir.SUPERVISOR, f"{asked} was asked"))
        held |= {"asked": "", "asked_by": ""}
    final = state in recovery.FINAL or state == "restarting"
    if final and not witness.became(state, run):
        doubts.append(_alone(rundir.SUPERVISOR, f"the run is {state}"))
        held |= {"state": ""}
    return record, held, doubts


def _alone(name: str, told: str) -> str:
    return f"{name} says: {told}; no second record says so, so it is not believed"


def check_plan(held: Mapping[str, Any], given: LaunchSpec) -> None:
    """Raises RefusedError where plan_state.json repeats plan.json otherwise."""
    mine = [phase.name for phase in given.plan.phases]
    theirs = [jsonl.text(entry, "name") for entry in jsonl.entries(held, "phases")]
    differ = ["phases"] * (bool(theirs) and mine != theirs)
    differ += ["between"] * (held.get("between", given.plan.between) != given.plan.between)
    _refuse(differ, rundir.PLAN_STATE)


def check_copies(record: Mapping[str, Any], given: LaunchSpec, index: int) -> None:
    """Raises RefusedError where run.json repeats plan.json otherwise; what it lacks is no copy."""
    phase = given.plan.phases[index]
    command = {"argv": argv(phase, given.plan.watch.grace_s, Path())}
    copies = jsonl.decode(jsonl.encode({**given.copies(index), **command})) or {}
    _refuse([name for name, mine in copies.items()
             if name in record and not _same(name, mine, record[name])], rundir.RUN)  # fmt: skip


def _same(name: str, mine: Any, theirs: Any) -> bool:
    if name == "argv":
        return not (words := program(theirs)) or words == program(mine)
    if name in GROWING and isinstance(theirs, dict):
        return {**mine, **theirs} == mine
    return mine == theirs


def program(words: Any) -> list[str]:
    """Returns the program and its arguments from a command of torchrun, [] for any other.

    Options of torchrun may be of another version; a config is named without its folder, which
    depends on the working directory.
    """
    if not isinstance(words, list) or LOG_DIR not in words:
        return []
    found = [str(word) for word in words[words.index(LOG_DIR) + 2 :]]
    before = ["", *found]
    return [Path(word).name if before[i] == "--config" else word for i, word in enumerate(found)]


def _refuse(differ: Sequence[str], name: str) -> None:
    if differ:
        named = ", ".join(differ)
        raise RefusedError(f"{rundir.PLAN} and {name} differ in {named}; {NOT_BEFORE}")


def check_flags(record: Mapping[str, Any], given: LaunchSpec, index: int, witness: Witness) -> None:
    """Raises RefusedError for a flag in run.json that the plan or the living processes deny.

    An operator's flag is in no plan: the answer to the request, or a living process, confirms it.
    """
    planned, phase = given.flags(index, {}), given.plan.phases[index].name
    held, born = jsonl.mapping(record, "flags"), list(_born(record))
    for name in sorted({*planned, *held}):
        entry = jsonl.mapping(held, name)
        value = jsonl.text(entry, "value") if name in held else None
        meant = planned[name].value if name in planned else None
        living = [environment.get(name) for environment in born]
        by_operator = jsonl.text(entry, "origin").startswith("operator ") and value in living
        agreed = value == meant or by_operator
        agreed = agreed or (value is not None and witness.sets(name, value, phase))
        others = f"{rundir.PLAN} says {_said(name, meant)}" if not agreed else ""
        if agreed and living and value not in living:
            others = f"the processes of the run were born with {_said(name, living[0])}"
        if others:
            raise RefusedError(f"{rundir.RUN} says {_said(name, value)}, {others}; {NOT_BEFORE}")


def _said(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name}={value}"


def _born(record: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the environments that the living processes of a run were born with."""
    for pid in process.with_token(recovery.token(record)):
        found = process.environment(pid)
        if found.get(environ.RUN_DIR) == recovery.home(record):
            yield found
