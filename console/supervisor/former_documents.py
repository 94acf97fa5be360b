"""Reads the documents and events that a dead child or a dead supervisor left.

Documents on disk are not trusted: `console.supervisor.cross_check` compares them with other
sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from console.model import PhaseState, State
from console.run_state import ReaderView
from console.sources import json_documents, liveness
from console.sources.reducer import Events
from console.sources.sanitize import clean
from console.sources.summary import Summary
from console.sources.tail import is_missing
from console.supervisor.launch_spec import FlagValue
from console.supervisor.restart import AttemptEnd
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract import flags as registry
from trainers.contract.errors import RefusedError

FINAL = liveness.ENDED - {"lost"}
"""States after which no further attempt begins."""
ENDINGS = ("halt", "restart", "stop", "kill")
"""The actions that end an attempt, each stronger than the one before."""
STOPS = ("halt", "stop", "kill")
"""The actions after which no further attempt begins."""
TOKEN = re.compile(r"[0-9a-f]{16}")
PHASE_KEYS = ("state", "why", "result", "steps", "started_ts", "ended_ts")
EVENTS_BYTES, MAX_ENDED = 1 << 20, 10_000
NOT_ADOPTED = "the launch is not adopted"


def document(folder: Path, name: str, consequence: str = NOT_ADOPTED) -> dict[str, Any]:
    """Returns a document, or {} if there is none.

    Raises RefusedError, with `consequence` in its text, if the document cannot be read or has
    another version.
    """
    path = folder / name
    record = rundir.read_json(path, below=folder)
    if record is None and not is_missing(path):
        raise RefusedError(f"{path} cannot be read as a JSON document, so {consequence}")
    if record is not None and record.get("v") != VERSION:
        raise RefusedError(f"{path} is of another version, so {consequence}")
    return record or {}


def token(record: Mapping[str, Any]) -> str:
    """Returns the token in run.json. Raises RefusedError if there is no valid token."""
    found = rundir.token(record)
    if not TOKEN.fullmatch(found):
        raise RefusedError(
            f"{rundir.RUN} contains no token, so its processes cannot be found and {NOT_ADOPTED}"
        )
    return found


def home(record: Mapping[str, Any]) -> str:
    """Returns the run directory that run.json names for the run's processes, or ""."""
    return jsonl.text(jsonl.mapping(record, "environment"), environ.RUN_DIR)


def flags(entries: Mapping[str, Any], origin: str) -> dict[str, FlagValue]:
    """Returns the flags in a document; `origin` is the key under which an entry has its origin.

    Raises UsageError for a flag or value that the registry does not accept.
    """
    found = {}
    for name, entry in entries.items():
        if isinstance(entry, dict):
            value = registry.format_value(registry.parse(name, jsonl.text(entry, "value")))
            found[name] = FlagValue(value, jsonl.text(entry, origin, "?")[:200])
    return found


def phases(plan_state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the progress of each phase, without the name and the directory of the phase."""
    entries = jsonl.entries(plan_state, "phases")
    found = (json_documents.read(PhaseState, each, index=0) for each in entries)
    return [{key: getattr(each, key) for key in PHASE_KEYS} for each in found]


def events(folder: Path, below: Path) -> list[dict[str, Any]]:
    """Returns the newest events of a launch or run; lines that are no records are left out."""
    data = jsonl.read_bytes(folder / rundir.EVENTS, EVENTS_BYTES, below=below)
    return [record for record in map(jsonl.decode, data.splitlines()) if record is not None]


# --- the former run ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormerRun:
    """The documents of a run, and the attempt with which the run continues."""

    record: dict[str, Any]
    """run.json."""
    state: dict[str, Any]
    """supervisor.json, or {} if none was written."""
    is_stored: bool
    """True: the documents come from the owner. False: they were read from disk and checked."""
    is_unstarted: bool
    """True: the newest attempt began, and torchrun was not started."""
    warnings: Sequence[str]
    """Sentences for the operator on entries of the documents."""
    flags: Mapping[str, FlagValue]
    number: int
    """The newest attempt."""
    ended: list[AttemptEnd]
    """The attempts that have ended. While a restart is due, the newest attempt is one of them."""
    is_last: bool
    """True if the end of the plan was requested."""
    end: ReaderView
    """What `recorded_end` returns; without a state if a process is alive."""

    @property
    def is_final(self) -> bool:
        """Returns whether the state, or a requested action, rules out a further attempt."""
        is_over = jsonl.text(self.state, "state") in FINAL
        return self.is_last or is_over or jsonl.text(self.state, "asked") in STOPS


def recorded_end(state: Mapping[str, Any]) -> ReaderView:
    """Returns the end in supervisor.json, or a view without a state if it has no end with a reason.

    A recorded success is left out, because a program could forge a success to start the next phase.
    The exit codes and the records of the ranks decide whether the run succeeded.
    """
    name, why = jsonl.text(state, "state"), clean(jsonl.text(state, "why"), 400)
    is_kept = name in FINAL and name != "completed" and why
    return ReaderView(cast(State, name), why) if is_kept else ReaderView()


def alerts(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the event of each alert that is open according to supervisor.json, by name."""
    entries = jsonl.mapping(state, "alerts").items()
    return {k: each for k, each in entries if isinstance(each, dict) and each.get("alert") == k}


def ended_attempts(state: Mapping[str, Any]) -> list[AttemptEnd]:
    """Returns how the attempts ended, according to supervisor.json."""
    entries = jsonl.entries(state, "ended")[-MAX_ENDED:]
    return [each for entry in entries if (each := json_documents.read(AttemptEnd, entry)).state]


def summary(state: Mapping[str, Any], run: Path | None, world: int, attempt: int) -> Summary:
    """Returns a summary without records: the counts of attempts and stalls, and the last pulses.

    A count that supervisor.json lacks stays unknown. If the newest events of `run` have more stalls
    than supervisor.json, their number is used.
    """
    stalls = jsonl.integer(state, "stalls")
    newest = Events()
    for record in () if run is None else events(run, run):
        newest.add(record)
    if stalls is not None:
        stalls = max(stalls, newest.stalls or 0)
    has_attempt = jsonl.integer(state, "attempt") is not None
    found = Summary(world, attempt if has_attempt else None, stalls)
    found.stalled_ts = newest.stalled_ts
    found.take_document(state)
    return found
