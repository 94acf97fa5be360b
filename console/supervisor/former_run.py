"""Reads the run state that a dead child or a dead supervisor left, so that the run can continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources import json_documents, process
from console.sources.record_files import Line, Place
from console.sources.reducer import Events
from console.sources.summary import Summary
from console.supervisor import cross_check, former_documents
from console.supervisor.launch_spec import FlagValue, LaunchSpec
from console.supervisor.link import Link
from console.supervisor.restart import AttemptEnd
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

MAX_ENDED = 10_000


@dataclass(frozen=True, slots=True)
class FormerRun:
    """The documents of a run, and the attempt with which the run continues."""

    record: dict[str, Any]
    """run.json."""
    state: dict[str, Any]
    """supervisor.json, or {} if none was written."""
    is_stored: bool
    """True: the documents come from the owner. False: they were read from disk and checked."""
    warnings: Sequence[str]
    """Sentences on entries of the documents that an operator must know."""
    flags: Mapping[str, FlagValue]
    number: int
    """The newest attempt."""
    ended: list[AttemptEnd]
    """The attempts that have ended. While a restart is due, the newest attempt is one of them."""
    is_last: bool
    """True if the end of the plan was requested."""

    @property
    def is_final(self) -> bool:
        """Returns whether the state, or a requested action, rules out a further attempt."""
        return (
            self.is_last
            or jsonl.text(self.state, "state") in former_documents.FINAL
            or jsonl.text(self.state, "asked") in former_documents.STOPS
        )

    @property
    def home(self) -> str:
        return former_documents.home(self.record)

    @property
    def token(self) -> str:
        return former_documents.token(self.record)


def read(link: Link, run: Path, spec: LaunchSpec, index: int, is_last: bool) -> FormerRun:
    """Returns a run from the documents that the owner stored, or else from those on disk.

    `is_last` says that the end of the plan was requested. Raises RefusedError or UsageError if the
    run cannot be adopted.
    """
    stored, warnings = link.stored(run / rundir.RUN), []
    if stored is not None:
        record, state = stored, link.stored(run / rundir.SUPERVISOR) or {}
    else:
        record, state, warnings = cross_check.check_run(run, spec, index)
    flags = former_documents.flags(jsonl.mapping(record, "flags"), "origin")
    living, ended = newest_living_attempt(record, state), ended_attempts(state)
    written = min(jsonl.integer(state, "attempt") or 1, len(ended) + 1)
    number = living or max(1, written)
    if living or jsonl.text(state, "state") != "restarting":
        del ended[number - 1 :]
    return FormerRun(record, state, stored is not None, warnings, flags, number, ended, is_last)


def newest_living_attempt(record: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """Returns the newest attempt that a living process of the run names, or 0 if none does.

    Raises RefusedError if run.json has no valid token, or the token of another run. In the second
    case, processes with the token have another run directory, or supervisor.json has the live
    directory of another token.
    """
    token, mine = former_documents.token(record), former_documents.home(record)
    environments = [process.environment(pid) for pid in process.with_token(token)]
    others = [home for each in environments if (home := each.get(environ.RUN_DIR, mine)) != mine]
    live = jsonl.text(state, "live_dir")
    if others or (live and not live.endswith(f"-{token}")):
        other = f", {others[0]}" if others else ""
        raise RefusedError(
            f"{rundir.RUN} of {mine} holds the token of another run{other}; "
            f"{former_documents.NOT_ADOPTED}"
        )
    numbers = [each.get(environ.ATTEMPT, "") for each in environments if environ.RUN_DIR in each]
    return max((int(n) for n in numbers if n.isdecimal() and len(n) < 6), default=0)


def ended_attempts(state: Mapping[str, Any]) -> list[AttemptEnd]:
    """Returns how the attempts ended, according to supervisor.json."""
    entries = jsonl.entries(state, "ended")[-MAX_ENDED:]
    return [each for entry in entries if (each := json_documents.read(AttemptEnd, entry)).state]


def summary(state: Mapping[str, Any], run: Path | None, world: int, attempt: int) -> Summary:
    """Returns a summary without records: the counts of attempts and stalls, and the last pulses.

    A count that supervisor.json lacks stays unknown. A known number of stalls is at least the
    number in the newest events of `run`, unless `run` is None.
    """
    stalls = jsonl.integer(state, "stalls")
    events = Events()
    for record in () if run is None else former_documents.events(run, run):
        events.add(Line(Place(0, 0), 0, record))
    if stalls is not None:
        stalls = max(stalls, events.stalls or 0)
    has_attempt = jsonl.integer(state, "attempt") is not None
    found = Summary(world, attempt if has_attempt else None, stalls)
    found.stalled_ts = events.stalled_ts
    found.take_document(state)
    return found
