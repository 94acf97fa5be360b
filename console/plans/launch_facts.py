"""Facts about a launch before its start: parameters, tokens, device, checkpoint size, time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from console.sources import launch_documents, launches
from console.status_text import age, size
from nsa.config import ModelConfig, NSAConfig, parameter_count
from trainers.contract import jsonl, rundir

STATE_VALUES = 3
"""Values per parameter in a checkpoint: the weight and the two moments of AdamW."""
EARLIER = 20
"""Number of newest launches of the plan that are searched for a run with the same settings."""
FOREIGN = "not available (a foreign program)"


def facts(root: Path, phases: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Returns the label and text of each fact; `phases` has a preview of each run.json.

    The time is the sum over all phases. All other facts are those of the first phase.
    """
    settings, world = values(phases[0]), phases[0]["world"]
    if not settings:
        return (("settings", FOREIGN), ("time", _time(root, phases)))
    found = figures(phases[0]["settings"], world)
    return (
        ("parameters", f"{found.parameters:,}"), ("sequence", f"{found.seq_len:,} tokens"),
        ("tokens per step", f"{found.tokens_per_step:,}"),
        ("device", f"{settings['train.device']} ×{world}"),
        ("checkpoint", size(found.checkpoint_bytes)), ("time", _time(root, phases)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that follow from the settings and the number of ranks of a phase."""

    parameters: int
    seq_len: int
    tokens_per_step: int
    checkpoint_bytes: int


def figures(settings: Mapping[str, Any], world: int) -> Figures:
    """Returns the figures of a phase from its resolved settings and its number of ranks."""
    values = {key: entry["value"] for key, entry in settings.items()}
    parameters, sequence = parameter_count(_model(values)), values["data.seq_len"]
    tokens = values["train.batch_size"] * values["train.accumulate"] * sequence * world
    value_bytes = 8 if values["train.precision"] == "fp64" else 4
    return Figures(parameters, sequence, tokens, parameters * value_bytes * STATE_VALUES)


def values(phase: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each setting in run.json."""
    settings = jsonl.mapping(phase, "settings")
    return {key: jsonl.mapping(settings, key).get("value") for key in settings}


def _model(values: Mapping[str, Any]) -> ModelConfig:
    held = {each.name: values[f"model.{each.name}"]
            for each in fields(ModelConfig) if each.name != "nsa"}  # fmt: skip
    nsa = {each.name: values[f"model.nsa.{each.name}"] for each in fields(NSAConfig)}
    return ModelConfig(**held, nsa=NSAConfig(**nsa))


def _time(root: Path, phases: Sequence[Mapping[str, Any]]) -> str:
    """Returns the expected time of a launch as text: the sum of the times of earlier runs.

    The time of a phase is that of the run that `_took_s` finds. If a phase has no such run in the
    newest `EARLIER` launches of the plan, the time is not known.
    """
    of_plan = (x for x in launches.launches(root) if x.parent.name == phases[0]["plan"])
    earlier = [
        (launch / launch_documents.run_directory(entry), entry)
        for launch in itertools.islice(of_plan, EARLIER)
        for entry in jsonl.entries(rundir.read_json(launch / rundir.PLAN_STATE) or {}, "phases")
    ]
    total_s = 0.0
    for phase in phases:
        took_s = _took_s(earlier, phase)
        if took_s is None:
            name = phase["phase"]
            return f"not known: no recent run of phase {name} with these settings has completed"
        total_s += took_s
    return f"about {age(total_s)}, as in the newest runs"


def _took_s(
    earlier: Sequence[tuple[Path, Mapping[str, Any]]], phase: Mapping[str, Any]
) -> float | None:
    """Returns how long the newest completed run of the same kind lasted, or None.

    Its phase, settings, host and number of ranks must be those of `phase`. `earlier` has the
    directory and the entry in plan_state.json of each earlier run, the newest launch first.
    """
    for folder, entry in earlier:
        begun, ended = jsonl.number(entry, "started_ts"), jsonl.number(entry, "ended_ts")
        if (entry.get("name"), entry.get("state")) != (phase["phase"], "completed"):
            continue
        run = rundir.read_json(folder / rundir.RUN) or {}
        is_same = (run.get("host"), run.get("world")) == (phase["host"], phase["world"])
        if begun and ended and is_same and values(run) == values(phase):
            return ended - begun
    return None
