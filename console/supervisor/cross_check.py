"""Checks the documents of a former supervisor against each other, the events and the processes.

If the checks find a contradiction, the launch is not adopted. A due restart or a flag for later
phases is ignored, with a warning, if no event confirms it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from console.run_state import ReaderView
from console.sources import launches, liveness, process
from console.sources.tail import is_missing
from console.supervisor import former_documents
from console.supervisor.former_documents import NOT_ADOPTED, FormerRun
from console.supervisor.launch_spec import LOG_DIR, LaunchSpec, argv
from console.supervisor.link import Link
from console.supervisor.next_flags import MAY_IGNORE, OPERATOR, set_words
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

GROWING = ("watch", "restart")
"""Mappings that may have fewer keys in an older document. Missing keys are not compared."""


class Evidence:
    """The newest events of a launch and of `runs`."""

    def __init__(self, launch: Path, runs: Sequence[Path]):
        self._launch = launch
        self._events = {
            folder: former_documents.events(folder, launch) for folder in (launch, *runs)
        }

    def answered_requests(self) -> set[str]:
        """Returns the ids of the answered requests."""
        return {
            jsonl.text(record, "request")
            for records in self._events.values()
            for record in records if record.get("kind") == "answer"
        }  # fmt: skip

    def confirms_flag(
        self, name: str, value: str, phases: Sequence[str], only_all: bool = False
    ) -> bool:
        """Returns whether an answered request set a flag to this value.

        The request must be for one of `phases` and all later phases. Without `only_all`, a request
        for the last of `phases` alone also confirms the flag.
        """
        texts = {set_words(name, value, phase, "all") for phase in phases}
        if not only_all:
            texts.add(set_words(name, value, phases[-1], "next"))
        return any(
            each.get("kind") == "answer"
            and each.get("ok") is True
            and jsonl.text(each, "text").removesuffix(MAY_IGNORE) in texts
            for each in self._events[self._launch]
        )

    def last_state(self, run: Path) -> Mapping[str, Any]:
        """Returns the last event with a state of a run, or {}."""
        events = (each for each in reversed(self._events[run]) if each.get("kind") == "state")
        return next((each for each in events if each.get("state")), {})


def read_launch(
    link: Link, launch: Path, plan_state: Mapping[str, Any], spec: LaunchSpec, index: int,
    runs: Sequence[Path],
) -> tuple[Mapping[str, Any], list[str]]:  # fmt: skip
    """Returns flags and warnings as `check_launch` does; a stored plan_state.json is not checked.

    Raises the same errors.
    """
    if link.stored(launch / rundir.PLAN_STATE) is not None:
        return jsonl.mapping(plan_state, "next_flags"), []
    return check_launch(plan_state, spec, index, runs, Evidence(launch, runs))


def check_launch(
    plan_state: Mapping[str, Any], spec: LaunchSpec, index: int, runs: Sequence[Path],
    evidence: Evidence,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Returns two values: confirmed flags for later phases, and warnings about other entries.

    Raises RefusedError or UsageError, for example if plan.json or a run contradicts
    plan_state.json.
    """
    check_plan(plan_state, spec)
    for former in range(index):
        check_copies(former_documents.document(runs[former], rundir.RUN), spec, former)
    check_phase(index, runs, plan_state.get("state") in ("waiting", "ended"))
    has_begun = not is_missing(runs[index] / rundir.RUN)
    names = [phase.name for phase in spec.plan.phases[: index + has_begun + 1]]
    flags, unconfirmed = confirmed_flags(plan_state, names, evidence)
    warnings = [
        f"{rundir.PLAN_STATE} sets {claim} for later phases; no answer to a request confirms it, "
        "so it is ignored"
        for claim in unconfirmed
    ]
    if ended_by := jsonl.text(plan_state, "ended_by"):
        warnings.append(
            f"{ended_by[:400]}, according to {rundir.PLAN_STATE}; "
            "no further attempt or phase starts"
        )
    return flags, warnings


def confirmed_flags(
    plan_state: Mapping[str, Any], phases: Sequence[str], evidence: Evidence
) -> tuple[dict[str, Any], list[str]]:
    """Returns two values: the confirmed part of `next_flags`, and the other flags as NAME=VALUE.

    `phases` has the names of all phases up to and including the next phase. Raises UsageError for a
    flag or value that the registry does not accept.
    """
    kept: dict[str, Any] = {}
    unconfirmed: list[str] = []
    entries = jsonl.mapping(plan_state, "next_flags")
    for name, flag in former_documents.flags(entries, "by").items():
        for_all = entries[name].get("phases") == "all"
        if evidence.confirms_flag(name, flag.value, phases, for_all):
            kept[name] = {"value": flag.value, "by": flag.origin, "ts": time.time(),
                          "phases": "all" if for_all else "next"}  # fmt: skip
        else:
            unconfirmed.append(f"{name}={flag.value}")
    return kept, unconfirmed


def check_run(
    run: Path, spec: LaunchSpec, index: int
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns three values: run.json, supervisor.json, and warnings about their entries.

    supervisor.json may lack the end of the run, for example after a full disk. If no rank is alive,
    the end then comes from the supervisor heartbeat or the last state in the events. No further
    attempt starts after such an end, or if the former supervisor accepted a halt, stop or kill.
    Raises RefusedError, for example if plan.json or a process that is alive contradicts run.json.
    """
    document, record = (
        former_documents.document(run, name) for name in (rundir.SUPERVISOR, rundir.RUN)
    )
    launches.check_in_place(run)
    evidence = Evidence(run.parent, [run])
    check_copies(record, spec, index)
    check_flags(record, spec, index, evidence)
    warnings = []
    if (asked := jsonl.text(document, "asked")) in former_documents.STOPS:
        # The ranks still read the `.HALT`. TERM and KILL are not sent again.
        again = "" if asked == "halt" else " and is not continued: request it again"
        warnings.append(
            f"{asked} was requested from the former supervisor{again}; no further attempt starts"
        )
    if program(words := record.get("argv") or []) and words[0] != sys.executable:
        warnings.append(
            f"later attempts and phases start with {sys.executable}, not with {words[0]!s:.400} as "
            "this run did"
        )
    last, live = evidence.last_state(run), liveness.live_directory(document)
    status = rundir.read_json(live / rundir.LIVE_STATUS) if live else None
    newest = liveness.with_newest_state(document, last, status)
    if newest.get("state") in former_documents.FINAL:
        document = newest
    elif document.get("state") == "restarting" and last.get("state") != "restarting":
        warnings.append(f"only {rundir.SUPERVISOR} says that a restart is due, so none is started")
        document |= {"state": "crashed", "why": ""}
    return record, document, warnings


def read_run(link: Link, run: Path, spec: LaunchSpec, index: int, is_last: bool) -> FormerRun:
    """Returns a run from the documents that the owner stored, or else from those on disk.

    `is_last` says that the end of the plan was requested. Raises RefusedError or UsageError if the
    run cannot be adopted.
    """
    stored, warnings = link.stored(run / rundir.RUN), []
    if stored is not None:
        record, state = stored, link.stored(run / rundir.SUPERVISOR) or {}
    else:
        record, state, warnings = check_run(run, spec, index)
    flags = former_documents.flags(jsonl.mapping(record, "flags"), "origin")
    living, ended = newest_living_attempt(record, state), former_documents.ended_attempts(state)
    written = min(jsonl.integer(state, "attempt") or 1, len(ended) + 1)
    number = living or max(1, written)
    if living or jsonl.text(state, "state") != "restarting":
        del ended[number - 1 :]
    end = ReaderView() if living else former_documents.recorded_end(state)
    if is_stored := stored is not None:
        is_unstarted = not link.owns(former_documents.home(record), number)
    else:
        is_unstarted = not (living or is_last) and never_started(run, state, number)
    return FormerRun(
        record, state, is_stored, is_unstarted, warnings, flags, number, ended, is_last, end
    )


def never_started(run: Path, state: Mapping[str, Any], number: int) -> bool:
    """Returns whether a dead supervisor began an attempt and did not start its torchrun.

    Each of these shows a start: the attempt's log directory, which is made just before the start;
    an event `phase`, which is written after it; torchrun in supervisor.json. For the first attempt,
    a heartbeat of rank 0 and checkpoints also show a start. The result is also False after a
    request to end the attempt, and after a `.HALT` for the first attempt (`Run.prepare` checks
    `.HALT` for later attempts).
    """
    of_first = [run / rundir.HALT, rundir.heartbeat(run, 0), run / rundir.CHECKPOINTS]
    paths = [rundir.logs(run, number), *of_first * (number == 1)]
    known = jsonl.mapping(state, "torchrun") or jsonl.text(state, "asked")
    begun = [e for e in former_documents.events(run, run)
             if e.get("kind") == "phase" and e.get("attempt") == number]  # fmt: skip
    is_starting = jsonl.text(state, "state", "starting") == "starting"
    return is_starting and not (known or begun) and all(map(is_missing, paths))


def newest_living_attempt(record: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Returns the newest attempt that a living process of the run names, or 0 if none does.

    Raises RefusedError if run.json has no valid token, or the token of another run. The token is of
    another run if a process with it has another run directory, or if supervisor.json names the live
    directory of another token.
    """
    token, mine = former_documents.token(record), former_documents.home(record)
    environments = [process.environment(pid) for pid in process.with_token(token)]
    others = [home for each in environments if (home := each.get(environ.RUN_DIR, mine)) != mine]
    live = jsonl.text(state, "live_dir")
    if others or (live and not live.endswith(f"-{token}")):
        other = f", {others[0]}" if others else ""
        raise RefusedError(
            f"{rundir.RUN} of {mine} contains the token of another run{other}; {NOT_ADOPTED}"
        )
    numbers = [each.get(environ.ATTEMPT, "") for each in environments if environ.RUN_DIR in each]
    return max((int(n) for n in numbers if n.isdecimal() and len(n) < 6), default=0)


def check_phase(index: int, runs: Sequence[Path], idle: bool) -> None:
    """Raises RefusedError if the runs contradict the phase or the state in plan_state.json.

    `index` is the phase that was started last. No later phase may have begun. Only this phase may
    have living processes, and only if its run.json exists and the launch is not `idle`. An idle
    launch waits or has ended.
    """
    for number, run in enumerate(runs):
        has_begun = not is_missing(run / rundir.RUN)
        if number > index and has_begun:
            raise RefusedError(
                f"{rundir.PLAN_STATE} says that phase {index} was started last, but {run.name} "
                "has started; correct the document"
            )
        claim = f"{rundir.PLAN_STATE} says that {'no phase' if idle else f'phase {index}'} runs"
        if number == index and not idle:
            claim = "" if has_begun else f"{rundir.RUN} does not exist"
        if claim and (living := liveness.living_in(run)):
            raise RefusedError(
                f"{claim}, but in {run.name} {living}; kill them, or correct the document"
            )


def check_plan(plan_state: Mapping[str, Any], spec: LaunchSpec) -> None:
    """Raises RefusedError if plan_state.json and plan.json differ in phase names or `between`."""
    mine = [phase.name for phase in spec.plan.phases]
    theirs = [jsonl.text(entry, "name") for entry in jsonl.entries(plan_state, "phases")]
    differ = ["phases"] * (bool(theirs) and mine != theirs)
    differ += ["between"] * (plan_state.get("between", spec.plan.between) != spec.plan.between)
    _check_none(differ, rundir.PLAN_STATE)


def check_copies(record: Mapping[str, Any], spec: LaunchSpec, index: int) -> None:
    """Raises RefusedError if run.json repeats a value of plan.json and the two values differ."""
    phase = spec.plan.phases[index]
    command = {"argv": argv(phase, spec.plan.watch.grace_s, Path())}
    copies = jsonl.decode(jsonl.encode({**spec.copies(index), **command})) or {}
    common = copies.keys() & record.keys()
    differ = sorted(name for name in common if not _same(name, copies[name], record[name]))
    _check_none(differ, rundir.RUN)


def _same(name: str, mine: Any, theirs: Any) -> bool:
    if name == "argv":
        return not (words := program(theirs)) or words == program(mine)
    if name in GROWING and isinstance(theirs, dict):
        return {**mine, **theirs} == mine
    return mine == theirs


def program(words: Any) -> list[str]:
    """Returns the program and its arguments from a torchrun command, or [] for any other command.

    The options of torchrun are left out, because another version may have other options.
    """
    is_torchrun = isinstance(words, list) and LOG_DIR in words
    return words[words.index(LOG_DIR) + 2 :] if is_torchrun else []


def _check_none(differ: Sequence[str], name: str) -> None:
    if differ:
        named = ", ".join(differ)
        raise RefusedError(f"{rundir.PLAN} and {name} differ in {named}; {NOT_ADOPTED}")


def check_flags(
    record: Mapping[str, Any], spec: LaunchSpec, index: int, evidence: Evidence
) -> None:  # fmt: skip
    """Raises RefusedError if the plan or the running processes contradict the flags in run.json.

    The plan does not contain the flags that an operator set during the launch. For each such flag,
    the answer to the request or a running process must have the same value.
    """
    planned = spec.flags(index, {})
    names = [phase.name for phase in spec.plan.phases[: index + 1]]
    recorded = jsonl.mapping(record, "flags")
    environments = [
        process.environment(pid)
        for pid in process.with_token(former_documents.token(record), former_documents.home(record))
    ]
    for name in sorted({*planned, *recorded}):
        entry = jsonl.mapping(recorded, name)
        value = jsonl.text(entry, "value") if name in recorded else None
        in_plan = planned[name].value if name in planned else None
        living = [environment.get(name) for environment in environments]
        by_operator = jsonl.text(entry, "origin").startswith(OPERATOR) and value in living
        answered = value is not None and evidence.confirms_flag(name, value, names)
        confirmed = value == in_plan or by_operator or answered
        other = "" if confirmed else f"{rundir.PLAN} says {_flag_words(name, in_plan)}"
        if confirmed and living and value not in living:
            other = f"the processes of the run have {_flag_words(name, living[0])}"
        if other:
            raise RefusedError(
                f"{rundir.RUN} says {_flag_words(name, value)}, {other}; {NOT_ADOPTED}"
            )


def _flag_words(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name}={value}"
