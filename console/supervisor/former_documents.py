"""Reads and validates the documents that a former supervisor wrote.

The content of the documents is not trusted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.model import PhaseState
from console.sources import json_documents, liveness
from console.supervisor.launch_spec import FlagValue
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
EVENTS_BYTES = 1 << 20
NOT_ADOPTED = "the launch is not adopted"


def document(folder: Path, name: str, consequence: str = NOT_ADOPTED) -> dict[str, Any]:
    """Returns a document, or {} if there is none.

    Raises RefusedError, with `consequence` in its text, if the document cannot be read or has
    another version.
    """
    path = folder / name
    record = rundir.read_json(path, below=folder)
    if record is None and os.path.lexists(path):
        raise RefusedError(f"{path} cannot be read as a JSON document, so {consequence}")
    if record is not None and record.get("v") != VERSION:
        raise RefusedError(f"{path} is of another version, so {consequence}")
    return record or {}


def token(record: Mapping[str, Any]) -> str:
    """Returns the token in run.json. Raises RefusedError if there is no valid token."""
    found = rundir.token(record)
    if not TOKEN.fullmatch(found):
        raise RefusedError(
            f"{rundir.RUN} holds no token, so its processes cannot be found and {NOT_ADOPTED}"
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
    """Returns the newest events of a launch or run, without lines that are not records."""
    data = jsonl.read_bytes(folder / rundir.EVENTS, EVENTS_BYTES, below=below)
    return [record for record in map(jsonl.decode, data.splitlines()) if record is not None]
