"""The JSON documents of a run directory as model data; whatever they hold, nothing raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from console.model import (
    LEVELS,
    RESULTS,
    Figure,
    Gate,
    Gpu,
    LaunchState,
    Level,
    PendingFlag,
    PhaseState,
    Result,
    State,
    Sure,
    Verdict,
)
from console.sources.liveness import CLOCK_S, supervisor_lives
from console.sources.sanitize import clean
from trainers.contract import VERSION, flags, jsonl, rundir
from trainers.contract.jsonl import entries

T = TypeVar("T")
MAX_PHASES, MAX_GPUS = 1000, 1024
CHARTED = ("loss", "toks_per_s", "grad_norm", "gate_entropy_mean", "bytes_right")
FIGURES: Mapping[str, tuple[str, str]] = {
    "toks_per_s": ("tok/s", "steps"), "toks_per_s_rank": ("tok/s", "steps"),
    "loss": ("nats/token", "step"), "lr": ("", "step"), "grad_norm": ("", "step"),
    "mfu": ("share", "steps"), "tokens_total": ("tokens", "run"), "bytes_right": ("share", "steps"),
    "dt_fetch_s": ("s", "step"), "dt_forward_s": ("s", "step"), "dt_backward_s": ("s", "step"),
    "dt_optimizer_s": ("s", "step"), "fetch_p95_ms": ("ms", "steps"),
    "gate_entropy_mean": ("nats", "step"), "gate_entropy_min": ("nats", "step"),
    "gate_max_gate": ("", "step"), "gate_collapse_frac": ("share", "step"),
    "gpu_mem_alloc": ("MiB", "step"), "gpu_mem_reserved": ("MiB", "step"),
    "skipped_steps": ("steps", "run"), "dropped_records": ("records", "run"),
}  # fmt: skip


class Document:
    """One JSON file, read again only when it was replaced. `trouble` says why it is not shown."""

    def __init__(self, path: Path):
        self.path = path
        self.trouble = ""
        self._stamp: tuple[int, int, int] | None = None
        self.record: dict[str, Any] = {}
        """The last good one that was read."""

    def read(self) -> dict[str, Any]:
        """Returns the object; the last good one while the file cannot be read."""
        stamp = rundir.stamp(self.path)
        if stamp is None or stamp == self._stamp:
            return self.record
        self._stamp = stamp
        record = rundir.read_json(self.path)
        if record is None:
            self.trouble = f"{self.path.name} cannot be read as a JSON object"
        elif record.get("v", VERSION) != VERSION:
            version = clean(str(record["v"]), 20)
            self.trouble = f"{self.path.name} is of version {version}; this console reads {VERSION}"
        else:
            self.record, self.trouble = record, ""
            if (jsonl.number(record, "updated_ts") or 0.0) > time.time() + CLOCK_S:
                # The clock of its writer is ahead, and its file system has one of its own.
                self.record["updated_ts"] = stamp[2] / 1e9
        return self.record


def line(record: Mapping[str, Any], key: str, default: str) -> str:
    """Returns a text field made harmless."""
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
"""How a field of the model is read from a JSON object, by its type."""
_types = cache(get_type_hints)


def read(kind: Callable[..., T], record: Mapping[str, Any], **given: Any) -> T:
    """Returns one record of the model from a JSON object, field by field; `given` are known."""
    types = _types(kind)
    names = (each.name for each in fields(cast(Any, kind)) if each.name not in given)
    return kind(**{name: READERS[types[name]](record, name) for name in names}, **given)


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


def bounds(born: Mapping[str, Any]) -> dict[str, str]:
    """Returns the gates that a phase was born with, with their bounds as text."""
    held = list(jsonl.mapping(born, "gates").items())[:64]
    return {clean(str(name))[:80]: clean(str(bound))[:80] for name, bound in held}


def gates(record: Mapping[str, Any]) -> tuple[Gate, ...]:
    return tuple(read(Gate, {"name": "?"} | entry) for entry in entries(record, "gates"))


def run_directory(phase: Mapping[str, Any]) -> str:
    """Returns the name of a phase's directory in its launch, "" for anything else."""
    name = jsonl.text(phase, "dir")
    return name if rundir.RUN_NAME.fullmatch(name) else ""


def launch_state(
    path: Path, name: str, plan: Mapping[str, Any], state: Mapping[str, Any],
    troubles: Sequence[str] = ("", ""), there: Sequence[str] = (),
) -> LaunchState:  # fmt: skip
    """Returns the launch; phases come from the plan, what happened to them from the state.

    `troubles` says why plan.json and plan_state.json could not be read; `there` names the run
    directories that exist.
    """
    phases, wrong = _phases(plan, state)
    owner = jsonl.mapping(state, "supervisor")
    named = jsonl.text(state, "state")
    why, phase = line(state, "why", ""), jsonl.integer(state, "phase")
    doubt = wrong or troubles[0] or _doubt(plan, state, phases, there)
    if wrong or named not in ("running", "waiting", "ended"):
        why = wrong or troubles[1] or f"{rundir.PLAN_STATE} does not say how the launch is"
        named, doubt = "unknown", doubt or why
    elif (
        named != "ended"
        and owner
        and not supervisor_lives(owner | {"updated_ts": state.get("updated_ts")})
    ):
        named, why = "unsupervised", "the supervisor is gone; nothing sequences the phases"
    launch = LaunchState(
        id=name,
        path=str(path),
        plan=line(plan, "name", line(state, "plan", path.parent.name)),
        state=cast(Any, named),
        why=why,
        phase=max(0, min(_last_of(there) if phase is None else phase, len(phases) - 1)),
        phases=tuple(phases),
        doubt=doubt,
        between=line(state, "between", "go"),
        next_flags=_pending(jsonl.mapping(state, "next_flags")),
    )
    return launch.unconfirmed({phase.dir for phase in phases}) if doubt else launch


def _phases(
    plan: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[list[PhaseState], str]:  # fmt: skip
    """Returns all phases that one of the documents has, and what is wrong with a directory."""
    planned, happened = entries(plan, "phases"), entries(state, "phases")
    phases: list[PhaseState] = []
    wrong = ""
    for index in range(min(MAX_PHASES, max(len(planned), len(happened)))):
        entry, now = (each[index] if index < len(each) else {} for each in (planned, happened))
        phase = {"name": f"phase {index}", "state": "later"} | entry | now
        steps = setting_int(entry, "train.steps")
        folder = run_directory({"dir": f"{index}-{jsonl.text(phase, 'name')}"} | phase)
        if not folder and phase.get("dir"):
            wrong = f"the directory of phase {index} is not named <n>-<phase>"
        phases.append(read(PhaseState, phase, index=index, steps_planned=steps, dir=folder))
    return phases, wrong


def _doubt(
    plan: Mapping[str, Any], state: Mapping[str, Any], phases: Sequence[PhaseState],
    there: Sequence[str],
) -> str:  # fmt: skip
    """Says which of plan.json, plan_state.json and the directories tell of other phases."""
    named = [tuple(line(entry, "name", "?") for entry in entries(each, "phases"))
             for each in (plan, state)]  # fmt: skip
    if plan and not named[0]:
        return f"{rundir.PLAN} names no phase"
    if plan and state and named[0] != named[1]:
        shown = [", ".join(names[:8]) or "none" for names in named]
        return f"{rundir.PLAN} has the phases {shown[0]}, and {rundir.PLAN_STATE} has {shown[1]}"
    known = {phase.dir for phase in phases}
    strange = next((each for each in there if each not in known), "")
    if strange and phases:
        return f"{rundir.PLAN} has no phase with the directory {clean(strange, 80)}"
    phase, last = jsonl.integer(state, "phase"), _last_of(there)
    if phase is not None and last > phase:
        return (
            f"{rundir.PLAN_STATE} says that phase {phase + 1} is the last that began, "
            f"and {clean(there[-1], 80)} is there"
        )
    return ""


def _last_of(there: Sequence[str]) -> int:
    """Returns the index of the last phase that has a run directory, 0 without one."""
    index = there[-1].partition("-")[0] if there else ""
    return int(index) if index.isdecimal() and len(index) <= 4 else 0


def sequenced(launch: LaunchState, run: str, state: State, why: str) -> LaunchState:
    """Returns the launch with its phase `run` as it is, when nobody is left to write it down.

    One that has ended by its document, while processes of its run live, has not.
    """
    if launch.state == "ended" and state == "unsupervised":
        told = f"{rundir.PLAN_STATE} says that the launch has ended, but {why}"
        launch = replace(launch, state="unsupervised", why=told)
    if launch.state not in ("unsupervised", "unknown"):
        return launch
    return replace(
        launch,
        phases=tuple(
            replace(phase, state=state, why=why) if phase.dir == run else phase
            for phase in launch.phases
        ),
    )


def _pending(raw: Mapping[str, Any]) -> tuple[PendingFlag, ...]:
    return tuple(
        read(PendingFlag, {"by": "?"} | entry, name=clean(str(name), 80))
        for name, entry in raw.items()
        if isinstance(entry, dict)
    )


def setting_int(record: Mapping[str, Any], key: str) -> int | None:
    """Returns a resolved setting of run.json (or a plan's phase) as an integer."""
    for holder in ("settings", "set"):
        held = jsonl.mapping(record, holder)
        value = jsonl.integer(jsonl.mapping(held, key) or {"value": held.get(key)}, "value")
        if value is not None:
            return value
    return None


def flag_field(run: Mapping[str, Any], field: str) -> dict[str, str]:
    """Returns the value or the origin of each flag in run.json."""
    return {
        clean(str(name), 80): clean(str(flag.get(field, "")), 200)
        for name, flag in jsonl.mapping(run, "flags").items()
        if isinstance(flag, dict)
    }


def decided(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the resolved settings hold for each flag that has a setting."""
    found = {}
    for flag in flags.TABLE:
        value = jsonl.mapping(settings, flag.setting).get("value")
        if isinstance(value, bool | int | float | str):
            found[flag.name] = clean(flags.format_value(value), 200)
    return found


def backend(env: Mapping[str, Any]) -> str:
    """Returns the effective backend in words, "" before rank 0 has written it."""
    held = env.get("backend")
    if isinstance(held, dict):
        routes = list(held.items())[:8]
        return ", ".join(f"{clean(str(k), 40)} {clean(str(v), 200)}" for k, v in routes)
    return clean(held, 200) if isinstance(held, str) else ""


def latest_checkpoint(run: Path) -> str:
    """Returns the name of the newest whole checkpoint, "" without one."""
    held = jsonl.read_bytes(run / rundir.CHECKPOINTS / rundir.LATEST, 200, below=run)
    name = held.decode("ascii", "replace").strip()
    return name if name.startswith("step_") and name.replace("_", "").isalnum() else ""


def progress_figures(
    progress: Mapping[int, Mapping[str, Any]], ours: bool = True
) -> dict[str, Figure]:
    """Returns the figures of rank 0's newest progress record, memory as the largest rank's.

    Unless it is `ours`, a program may mean anything by its loss: that has no unit.
    """
    record = progress.get(0)
    if record is None:
        return {}
    at = jsonl.number(record, "ts") or 0.0
    step, count = record.get("step"), len(jsonl.numbers(record, "steps_dt_s")) or 1
    windows = {"step": f"step {step}", "steps": f"last {count} steps", "run": "this run"}
    figures = {}
    for name, (unit, window) in FIGURES.items():
        value = jsonl.number(record, name)
        if value is not None:
            known = ours or name != "loss"
            figures[name] = Figure(value, unit if known else "", windows[window], at)
    for name in ("gpu_mem_reserved", "gpu_mem_alloc"):
        values = [v for r in progress.values() if (v := jsonl.number(r, name)) is not None]
        if values:
            figures[name] = Figure(max(values), "MiB", "largest rank", at)
    shares = jsonl.numbers(record, "gate_branch_shares")
    if len(shares) == 3:
        for branch, share in zip(("cmp", "sel", "win"), shares, strict=True):
            figures[f"gate_share_{branch}"] = Figure(share, "share", windows["step"], at)
    return figures


def sample_figures(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns disk, load and memory of the newest samples."""
    figures = {}
    for sample in samples.values():
        at = jsonl.number(sample, "ts") or 0.0
        free = jsonl.number(jsonl.mapping(sample, "disk"), "free_gib")
        if free is not None:
            figures["disk_free_gib"] = Figure(free, "GiB", "now", at)
        load = jsonl.number(sample, "load1")
        if load is not None:
            figures["load1"] = Figure(load, "", "1 min", at)
        sizes = [jsonl.number(entry, "rss_mib") for entry in entries(sample, "ranks")]
        largest = max((size for size in sizes if size is not None), default=None)
        if largest is not None:
            figures["rss_mib"] = Figure(largest, "MiB", "largest rank", at)
    return figures
