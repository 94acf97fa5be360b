"""Reads the records of a supervisor that is gone, for a new one; they may hold anything."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from console.model import STALL, PhaseState
from console.sources import documents, liveness, process
from console.sources.summary import Summary
from console.supervisor.launch_spec import FlagValue
from console.supervisor.restart import Ended
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract import flags as registry
from trainers.contract.errors import RefusedError

FINAL = liveness.ENDED - {"lost"}
"""States after which no further attempt begins."""
TOKEN = re.compile(r"[0-9a-f]{16}")
MAX_ENDED = 10_000
PHASE_KEYS = ("state", "why", "result", "steps", "started_ts", "ended_ts")
EVENTS_BYTES = 1 << 20


def document(folder: Path, name: str, so: str = "nothing is taken over") -> dict[str, Any]:
    """Returns a document, {} where there is none.

    Raises RefusedError for one not to believe; `so` says what follows from that.
    """
    path = folder / name
    record = rundir.read_json(path, below=folder)
    if record is None and os.path.lexists(path):
        raise RefusedError(f"{path} cannot be read as a JSON document, so {so}")
    if record is not None and record.get("v") != VERSION:
        raise RefusedError(f"{path} is of another version, so {so}")
    return record or {}


def token(record: Mapping[str, Any]) -> str:
    """Returns the token in run.json. Raises RefusedError for what none of ours can be."""
    found = jsonl.text(jsonl.mapping(record, "environment"), environ.TOKEN)
    if not TOKEN.fullmatch(found):
        raise RefusedError("run.json holds no token, so its processes cannot be known")
    return found


def checked(named: Mapping[str, Any], origin: str) -> dict[str, FlagValue]:
    """Returns flags from a document in which each has a value, and says under `origin` whose.

    Raises UsageError for one that the registry refuses.
    """
    found = {}
    for name, entry in named.items():
        if isinstance(entry, dict):
            value = registry.format_value(registry.parse(name, jsonl.text(entry, "value")))
            found[name] = FlagValue(value, jsonl.text(entry, origin, "?")[:200])
    return found


def home(record: Mapping[str, Any]) -> str:
    """Returns the run directory that run.json names in the environment of its processes."""
    return jsonl.text(jsonl.mapping(record, "environment"), environ.RUN_DIR)


def check_processes(record: Mapping[str, Any], held: Mapping[str, Any]) -> int:
    """Returns the newest attempt that has processes, 0 without any.

    Raises RefusedError where the token in run.json is that of another run: processes with it name
    another run directory, or supervisor.json names the shared memory of another token.
    """
    named, mine = token(record), home(record)
    born = [process.environment(pid) for pid in process.with_token(named)]
    others = [found for each in born if (found := each.get(environ.RUN_DIR, mine)) != mine]
    live = jsonl.text(held, "live_dir")
    if others or (live and not live.endswith(f"-{named}")):
        whose = f", {others[0]}" if others else ""
        raise RefusedError(
            f"{rundir.RUN} of {mine} holds the token of another run{whose}; nothing is taken over"
        )
    numbers = [each.get(environ.ATTEMPT, "") for each in born if environ.RUN_DIR in each]
    return max((int(n) for n in numbers if n.isdecimal() and len(n) < 6), default=0)


def ended(held: Mapping[str, Any]) -> list[Ended]:
    """Returns how the attempts before ended, as supervisor.json tells it."""
    told = jsonl.entries(held, "ended")[-MAX_ENDED:]
    return [each for entry in told if (each := documents.read(Ended, entry)).state]


def summary(held: Mapping[str, Any], run: Path | None, world: int, attempt: int) -> Summary:
    """Returns what the records and counts of former attempts add up to; records are read again.

    A count that supervisor.json lacks stays unknown. Without `run` its count of stalls is believed.
    """
    counted = jsonl.integer(held, "attempt") is not None
    stalls = jsonl.integer(held, "stalls")
    if stalls is not None and run is not None:
        told = [(each.get("kind"), each.get("alert")) for each in events(run, run)]
        stalls = max(stalls, told.count(("alert", STALL)))  # the events are a second source
    found = Summary(world, attempt if counted else None, stalls)
    found.take_document(held)
    return found


def events(folder: Path, below: Path) -> list[dict[str, Any]]:
    """Returns the newest events beside a mailbox; what is no record is left out."""
    data = jsonl.read_bytes(folder / rundir.EVENTS, EVENTS_BYTES, below=below)
    return [record for record in map(jsonl.decode, data.splitlines()) if record is not None]


def phases(held: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what plan_state.json tells of each phase; names and directories are the plan's."""
    told = (documents.read(PhaseState, each, index=0) for each in jsonl.entries(held, "phases"))
    return [{key: getattr(each, key) for key in PHASE_KEYS} for each in told]


def next_flags(held: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the flags that wait for the next phase. Raises UsageError as `checked` does."""
    return {
        name: {"value": flag.value, "by": flag.origin, "ts": time.time()}
        for name, flag in checked(jsonl.mapping(held, "next_flags"), "by").items()
    }


def check_phase(index: int, runs: Iterable[Path], waiting: bool) -> None:
    """Raises RefusedError for a phase in plan_state.json that the runs speak against.

    Those are processes of another phase that live, and a later phase that has begun.
    """
    for number, run in enumerate(runs):
        if number > index and (run / rundir.RUN).exists():
            raise RefusedError(
                f"{rundir.PLAN_STATE} says that phase {index + 1} was the last, but {run.name} has "
                "begun; mend the document"
            )
        if (number != index or waiting) and (living := liveness.living_in(run)):
            now = "none runs" if waiting else f"phase {index + 1} runs"
            raise RefusedError(
                f"{rundir.PLAN_STATE} says that {now}, but of {run.name} {living}; end it, or mend "
                "the document"
            )
