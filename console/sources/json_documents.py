"""Reads the JSON documents of a run directory into model data; invalid content raises no error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from console.model import CLOCK_S, LEVELS, RESULTS, Gate, Gpu, Level, Result, State, Sure, Verdict
from console.sources.sanitize import clean
from trainers import manifest
from trainers.contract import VERSION, flags, jsonl, rundir
from trainers.contract.jsonl import entries

T = TypeVar("T")
MAX_GPUS, STEPS = 1024, "train.steps"
MAX_NAMES, MAX_TRIED = 10_000, 16
"""Limits of the search for a checkpoint: entries of the directory, and checkpoints tried."""


class Document:
    """One JSON file, which is read again if it has changed or if the last read failed.

    `trouble` says why the newest content cannot be shown, or is "".
    """

    def __init__(self, path: Path):
        self.path = path
        self.trouble = ""
        self._stamp: tuple[int, int, int] | None = None
        self.record: dict[str, Any] = {}
        """The last valid object that was read, or {} if there was none."""

    def read(self) -> dict[str, Any]:
        """Returns the object in the file, or else the last valid object, or else {}."""
        stamp = rundir.stamp(self.path)
        if stamp is None or stamp == self._stamp:
            return self.record
        record = rundir.read_json(self.path)
        self._stamp = None if record is None else stamp
        if record is None:
            self.trouble = f"{self.path.name} cannot be read as a JSON object"
        elif record.get("v", VERSION) != VERSION:
            version = clean(str(record["v"]), 20)
            self.trouble = f"{self.path.name} is of version {version}; this console reads {VERSION}"
        else:
            is_change, self.record, self.trouble = bool(self.record), record, ""
            if (jsonl.number(record, "updated_ts") or 0.0) > time.time() + CLOCK_S:
                # The writer's clock is ahead. A change after the first read is new; otherwise the
                # time of the file system is used.
                self.record["updated_ts"] = time.time() if is_change else stamp[2] / 1e9
        return self.record


def line(record: Mapping[str, Any], key: str, default: str) -> str:
    """Returns a text field, safe for a terminal, or `default` if it is empty or not a text."""
    value = record.get(key)
    return clean(value, 400) if isinstance(value, str) and value else default


def words(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = record.get(key)
    return tuple(clean(str(word), 400) for word in value) if isinstance(value, list) else ()


def _one_of(words: tuple[str, ...], default: str) -> Callable[[Mapping[str, Any], str], str]:
    def read_word(record: Mapping[str, Any], key: str) -> str:
        word = jsonl.text(record, key)
        return word if word in words else default

    return read_word


READERS: Mapping[Any, Callable[[Mapping[str, Any], str], Any]] = {
    str: lambda record, key: line(record, key, ""),
    float: lambda record, key: jsonl.number(record, key) or 0.0,
    float | None: jsonl.number,
    bool: lambda record, key: record.get(key) is True,
    int: lambda record, key: jsonl.integer(record, key) or 0,
    int | None: jsonl.integer,
    tuple[str, ...]: words,
    tuple[int, ...]: lambda record, key: tuple(jsonl.integers(record, key)[:64]),
    Level: _one_of(LEVELS, "warn"),
    Result: _one_of(RESULTS, "unknown"),
    Sure: _one_of(("high", "medium"), "low"),
    State: _one_of(get_args(State), ""),
}
"""The function that reads a field, by the field's type; it gets a JSON object and a key."""


@cache
def _readers(kind: Any) -> dict[str, Any]:
    """Returns for each field of a dataclass the function in `READERS`, or None if there is none."""
    types = get_type_hints(kind)
    return {each.name: READERS.get(types[each.name]) for each in fields(kind)}


def read(kind: Callable[..., T], record: Mapping[str, Any], **known: Any) -> T:
    """Returns an object of the dataclass `kind`; its fields come from `record` or from `known`.

    A field whose type is not in `READERS` must be in `known`.
    """
    readers = _readers(kind).items()
    return kind(**{name: get(record, name) for name, get in readers if name not in known}, **known)


def gpus(sample: Mapping[str, Any]) -> tuple[Gpu, ...]:
    known = {"name": "GPU", "state": "error"}
    return tuple(
        read(Gpu, known | entry)
        for entry in entries(sample, "gpus")[:MAX_GPUS]
        if jsonl.integer(entry, "index") is not None
    )


def verdict(supervisor: Mapping[str, Any]) -> Verdict | None:
    record = jsonl.mapping(supervisor, "verdict")
    return read(Verdict, record) if record else None


def run_record(run: Path) -> dict[str, Any]:
    """Returns run.json, or {}, with the commit of the newest attempt if supervisor.json has it.

    run.json has the commit of the launch; the code may have changed before the run started.
    """
    record, supervisor = (
        rundir.read_json(run / name, below=run) or {} for name in (rundir.RUN, rundir.SUPERVISOR)
    )
    return record | {"git": supervisor.get("git", record.get("git"))}


def bounds(run: Mapping[str, Any]) -> dict[str, str]:
    """Returns the bounds of at most 64 gates in run.json as text. The key is the gate's name."""
    gates = list(jsonl.mapping(run, "gates").items())[:64]
    plain = ((n, b.get("bound") if isinstance(b, Mapping) else b) for n, b in gates)
    return {clean(str(name))[:80]: clean(str(bound))[:80] for name, bound in plain}


def gates(record: Mapping[str, Any]) -> tuple[Gate, ...]:
    return tuple(read(Gate, {"name": "?"} | entry) for entry in entries(record, "gates"))


def planned_steps(record: Mapping[str, Any]) -> int | None:
    """Returns `train.steps` of run.json, env.json or a phase; None without an integer."""
    for name in ("settings", "set"):
        settings = jsonl.mapping(record, name)
        setting = jsonl.mapping(settings, STEPS) or {"value": settings.get(STEPS)}
        value = jsonl.integer(setting, "value")
        if value is not None:
            return value
    return None


def flag_field(run: Mapping[str, Any], field: str) -> dict[str, str]:
    """Returns one field (value or origin) of each flag in run.json. The key is the flag's name."""
    return {
        clean(str(name), 80): clean(str(flag.get(field, "")), 200)
        for name, flag in jsonl.mapping(run, "flags").items()
        if isinstance(flag, dict)
    }


def flag_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scalar settings that have a flag, as text. The key is the flag's name."""
    found = {}
    for flag in flags.FLAGS.values():
        value = jsonl.mapping(settings, flag.setting).get("value")
        if isinstance(value, bool | int | float | str):
            found[flag.name] = clean(flags.format_value(value), 200)
    return found


def backend(env: Mapping[str, Any]) -> str:
    """Returns the routes of the attention as text, or "" if env.json does not have them."""
    backend = env.get("backend")
    if isinstance(backend, dict):
        routes = list(backend.items())[:8]
        return ", ".join(f"{clean(str(k), 40)} {clean(str(v), 200)}" for k, v in routes)
    return clean(backend, 200) if isinstance(backend, str) else ""


def latest_checkpoint(run: Path, has_ended: bool = False) -> str | None:
    """Returns the name of the newest complete checkpoint; "" without one, None if not known.

    In a run that has not ended, the file `latest` suffices if the checkpoint that it names is
    complete. Otherwise the directory is listed, as the trainer does for a resume. A checkpoint
    without a manifest, for example of a foreign program, counts only if `latest` names it.
    """
    folder, found = run / rundir.CHECKPOINTS, None
    data = jsonl.read_bytes(folder / rundir.LATEST, 200, below=run)
    name = data.decode("ascii", "replace").strip()
    named = name if name.startswith("step_") and name.replace("_", "").isalnum() else ""
    if named and not has_ended and jsonl.size_bytes(folder / named / manifest.MANIFEST):
        return named
    with contextlib.suppress(manifest.CheckpointError):
        found = manifest.newest_first(run, MAX_NAMES)
    for path in (found or [])[:MAX_TRIED]:
        if jsonl.size_bytes(path / manifest.MANIFEST):
            return manifest.name_of(manifest.step_of(path) or 0)
    with contextlib.suppress(OSError):
        if named and (folder / named).is_dir():
            return named
    return "" if found == [] else None
