"""Collects the inputs of a verdict from a stalled run, stores them as JSON, and explains them.

This process collects the inputs with the functions of `nsa-console diagnose`, after the wait for
the supervisor's verdict.
"""

from __future__ import annotations

import json
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import RankEvidence, moment_of
from console.diagnose.verdict import diagnose
from console.model import Verdict
from console.plan import Watch
from console.supervisor.offline import OfflineRun, collect, ranks_of
from trainers.contract import rundir


@dataclass(frozen=True)
class Inputs:
    """The inputs of `explained`."""

    ranks: tuple[RankEvidence, ...]
    watch: Watch
    ts: float
    evidence: Evidence


def collected(path: Path) -> Inputs | None:
    """Returns the inputs from a launch, or None if it has ended or no rank has usable evidence."""
    source = OfflineRun(path)
    ranks = _ranks(source)
    if not ranks:
        return None
    evidence = collect(source.run, ranks)
    found = Inputs(_ranks(source), source.watch, time.time(), evidence)
    return found if moment_of(found.ranks, found.watch, found.ts) else None


def _ranks(source: OfflineRun) -> tuple[RankEvidence, ...]:
    """Returns the ranks of a live run, or ().

    A rank without a phase counts as unchanged since run.json was written.
    """
    now = source.poll()
    if now is None or source.over:
        return ()
    since_s = time.time() - (source.run / rundir.RUN).stat().st_mtime
    return tuple(
        each if each.phase else replace(each, unchanged_s=since_s, doubt="")
        for each in ranks_of(source.state, source.run, now)
    )


def explained(inputs: Inputs) -> Verdict | None:
    """Returns the verdict that follows from these inputs, or None without a stall."""
    return diagnose(inputs.ranks, inputs.watch, inputs.ts, inputs.evidence)


def write(path: Path, inputs: Inputs, **more: Any) -> None:
    """Writes the inputs, and more facts about the same case, to a file."""
    rundir.write_atomic(path, json.dumps(more | {"inputs": asdict(inputs)}))


def read(path: Path) -> tuple[dict[str, Any], Inputs]:
    """Returns two values from a file of `write`: the facts `more`, and the inputs."""
    document = json.loads(path.read_text())
    return document, decoded(Inputs, document.pop("inputs"))


def decoded(kind: Any, value: Any) -> Any:
    """Returns a value of the type `kind` from JSON data.

    A field that an older file lacks has its default.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        types_ = get_type_hints(kind)
        names = (each.name for each in fields(kind) if each.init and each.name in value)
        return kind(**{name: decoded(types_[name], value[name]) for name in names})  # pyright: ignore
    if origin in (Union, types.UnionType):
        known = next(each for each in inner if each is not types.NoneType)
        return None if value is None else decoded(known, value)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(decoded(of, each) for of, each in zip(inner, value, strict=True))
    if origin in (tuple, Sequence):
        return tuple(decoded(inner[0], each) for each in value)
    if origin is Mapping:
        return {decoded(inner[0], k): decoded(inner[1], v) for k, v in value.items()}
    return int(value) if kind is int else value
