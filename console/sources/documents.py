"""The JSON documents of a run directory as model data; whatever they hold, nothing raises."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from console.model import (
    Alert,
    Figure,
    Gate,
    Gpu,
    LaunchState,
    Level,
    PendingFlag,
    PhaseState,
    Result,
    State,
    Verdict,
)
from console.sources.presence import supervisor_lives
from console.sources.sanitize import clean
from trainers.contract import VERSION, jsonl, rundir

LEVELS: tuple[str, ...] = get_args(Level)
RESULTS: tuple[str, ...] = get_args(Result)
CHARTED = (
    "loss", "toks_per_s", "grad_norm", "lr", "mfu", "gate_entropy_mean", "gate_entropy_min",
    "bytes_right", "gpu_mem_alloc", "gpu_mem_reserved",
)  # fmt: skip
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
        self._record: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Returns the object; the last good one while the file cannot be read."""
        try:
            status = os.lstat(self.path)
        except OSError:
            return self._record
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._stamp:
            return self._record
        self._stamp = stamp
        record = rundir.read_json(self.path)
        if record is None:
            self.trouble = f"{self.path.name} cannot be read as a JSON object"
        elif record.get("v", VERSION) != VERSION:
            version = clean(str(record["v"]), 20)
            self.trouble = f"{self.path.name} is of version {version}; this console reads {VERSION}"
        else:
            self._record, self.trouble = record, ""
        return self._record


def line(record: Mapping[str, Any], key: str, default: str) -> str:
    """Returns a text field made harmless."""
    value = record.get(key)
    return clean(value, 400) if isinstance(value, str) and value else default


def words(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = record.get(key)
    return tuple(clean(str(word), 400) for word in value) if isinstance(value, list) else ()


def entries(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the objects in a list field."""
    value = record.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def as_float(value: Any) -> float | None:
    return jsonl.number({"value": value}, "value")


def gpus(sample: Mapping[str, Any]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=jsonl.integer(entry, "index") or 0,
            name=line(entry, "name", "GPU"),
            state=line(entry, "state", "error"),
            util_pct=jsonl.number(entry, "util_pct"),
            power_w=jsonl.number(entry, "power_w"),
            power_limit_w=jsonl.number(entry, "power_limit_w"),
            mem_used_mib=jsonl.number(entry, "mem_used_mib"),
            mem_total_mib=jsonl.number(entry, "mem_total_mib"),
            temp_c=jsonl.number(entry, "temp_c"),
            sm_mhz=jsonl.number(entry, "sm_mhz"),
            why=line(entry, "why", ""),
        )
        for entry in entries(sample, "gpus")[:1024]
    )


def alert(record: Mapping[str, Any], name: str) -> Alert:
    level = jsonl.text(record, "level")
    return Alert(
        id=name,
        ts=jsonl.number(record, "ts") or 0.0,
        level=cast(Level, level if level in LEVELS else "warn"),
        text=line(record, "text", ""),
        key=line(record, "key", ""),
    )


def acknowledged(held: Alert) -> Alert:
    return dataclasses.replace(held, acknowledged=True)


def verdict(supervisor: Mapping[str, Any]) -> Verdict | None:
    record = supervisor.get("verdict")
    if not isinstance(record, dict):
        return None
    sure = jsonl.text(record, "sure")
    return Verdict(
        ts=jsonl.number(record, "ts") or 0.0,
        sentence=line(record, "sentence", ""),
        cause=line(record, "cause", ""),
        rank=jsonl.integer(record, "rank"),
        phase=line(record, "phase", ""),
        step=jsonl.integer(record, "step"),
        sure=cast(Any, sure if sure in ("high", "medium", "low") else "low"),
        evidence=words(record, "evidence"),
    )


def bounds(born: Mapping[str, Any]) -> dict[str, str]:
    """Returns the gates that a phase was born with, with their bounds as text."""
    given = born.get("gates")
    held = list(given.items())[:64] if isinstance(given, dict) else []
    return {clean(str(name))[:80]: clean(str(bound))[:80] for name, bound in held}


def gates(record: Mapping[str, Any]) -> tuple[Gate, ...]:
    found = []
    for entry in entries(record, "gates"):
        result = jsonl.text(entry, "result")
        found.append(
            Gate(
                name=line(entry, "name", "?"),
                value=jsonl.number(entry, "value"),
                unit=line(entry, "unit", ""),
                window=line(entry, "window", ""),
                source=line(entry, "source", ""),
                bound=line(entry, "bound", ""),
                result=cast(Result, result if result in RESULTS else "unknown"),
                why=line(entry, "why", ""),
            )
        )
    return tuple(found)


def launch_state(
    path: Path, name: str, plan: Mapping[str, Any], state: Mapping[str, Any], trouble: str = ""
) -> LaunchState:
    """Returns the launch; phases come from the plan, what happened to them from the state.

    `trouble` says why plan_state.json could not be read.
    """
    happened = entries(state, "phases")
    planned = entries(plan, "phases")
    phases = []
    for index, entry in enumerate(planned):
        now = happened[index] if index < len(happened) else {}
        phases.append(
            PhaseState(
                index=index,
                name=line(entry, "name", f"phase {index}"),
                proves=line(entry, "proves", ""),
                state=line(now, "state", "later"),
                why=line(now, "why", ""),
                result=line(now, "result", ""),
                steps=jsonl.integer(now, "steps"),
                steps_planned=setting_int(entry, "train.steps"),
                started_ts=jsonl.number(now, "started_ts"),
                ended_ts=jsonl.number(now, "ended_ts"),
                dir=line(now, "dir", line(entry, "dir", "")),
            )
        )
    pending = state.get("next_flags")
    owner = state.get("supervisor")
    named = jsonl.text(state, "state")
    why = line(state, "why", "")
    if named not in ("running", "waiting", "ended"):
        named, why = "unknown", trouble or f"{rundir.PLAN_STATE} does not say how the launch is"
    elif named != "ended" and isinstance(owner, dict) and not supervisor_lives(owner | _at(state)):
        named, why = "unsupervised", "the supervisor is gone; nothing sequences the phases"
    return LaunchState(
        id=name,
        path=str(path),
        plan=line(plan, "name", line(state, "plan", path.parent.name)),
        state=cast(Any, named),
        why=why,
        phase=max(0, min(jsonl.integer(state, "phase") or 0, max(0, len(phases) - 1))),
        phases=tuple(phases),
        between=line(state, "between", "go"),
        next_flags=_pending(pending) if isinstance(pending, dict) else (),
    )


def sequenced(launch: LaunchState, run: str, state: State, why: str) -> LaunchState:
    """Returns the launch with its phase `run` as it is, when nobody is left to write it down."""
    if launch.state not in ("unsupervised", "unknown"):
        return launch
    return dataclasses.replace(
        launch,
        phases=tuple(
            dataclasses.replace(phase, state=state, why=why) if phase.dir == run else phase
            for phase in launch.phases
        ),
    )


def _at(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"updated_ts": state.get("updated_ts")}


def _pending(raw: Mapping[str, Any]) -> tuple[PendingFlag, ...]:
    return tuple(
        PendingFlag(
            clean(str(name), 80),
            line(entry, "value", ""),
            line(entry, "by", "?"),
            jsonl.number(entry, "ts") or 0.0,
        )
        for name, entry in raw.items()
        if isinstance(entry, dict)
    )


def setting_int(record: Mapping[str, Any], key: str) -> int | None:
    """Returns a resolved setting of run.json (or a plan's phase) as an integer."""
    for holder in ("settings", "set"):
        held = record.get(holder)
        value = held.get(key) if isinstance(held, dict) else None
        if isinstance(value, dict):
            value = value.get("value")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _flag_entries(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    held = run.get("flags")
    if not isinstance(held, dict):
        return {}
    return {clean(str(k), 80): v for k, v in held.items() if isinstance(v, dict)}


def flag_values(run: Mapping[str, Any]) -> dict[str, str]:
    return {name: clean(str(e.get("value", "")), 200) for name, e in _flag_entries(run).items()}


def flag_origins(run: Mapping[str, Any]) -> dict[str, str]:
    return {name: clean(str(e.get("origin", "")), 200) for name, e in _flag_entries(run).items()}


def backend(env: Mapping[str, Any]) -> str:
    """Returns the effective backend in words, "" before rank 0 has written it."""
    held = env.get("backend")
    if isinstance(held, dict):
        return ", ".join(f"{clean(str(k), 40)} {clean(str(v), 80)}" for k, v in held.items())
    return clean(held, 200) if isinstance(held, str) else ""


def latest_checkpoint(run: Path) -> str:
    """Returns the name of the newest whole checkpoint, "" without one."""
    held = jsonl.read_bytes(run / rundir.CHECKPOINTS / rundir.LATEST, 200, below=run)
    name = held.decode("ascii", "replace").strip()
    return name if name.startswith("step_") and name.replace("_", "").isalnum() else ""


def progress_figures(progress: Mapping[int, Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns the figures of rank 0's newest progress record, memory as the largest rank's."""
    record = progress.get(0)
    if record is None:
        return {}
    at = jsonl.number(record, "ts") or 0.0
    durations = record.get("steps_dt_s")
    count = len(durations) if isinstance(durations, list) else 1
    step = record.get("step")
    windows = {"step": f"step {step}", "steps": f"last {count} steps", "run": "this run"}
    figures = {}
    for name, (unit, window) in FIGURES.items():
        value = jsonl.number(record, name)
        if value is not None:
            figures[name] = Figure(value, unit, windows[window], at)
    for name in ("gpu_mem_reserved", "gpu_mem_alloc"):
        values = [v for r in progress.values() if (v := jsonl.number(r, name)) is not None]
        if values:
            figures[name] = Figure(max(values), "MiB", "largest rank", at)
    shares = record.get("gate_branch_shares")
    if isinstance(shares, list) and len(shares) == 3:
        for branch, share in zip(("cmp", "sel", "win"), shares, strict=True):
            value = as_float(share)
            if value is not None:
                figures[f"gate_share_{branch}"] = Figure(value, "share", windows["step"], at)
    return figures


def sample_figures(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns disk, load and memory of the newest samples."""
    figures = {}
    for sample in samples.values():
        at = jsonl.number(sample, "ts") or 0.0
        disk = sample.get("disk")
        free = jsonl.number(disk, "free_gib") if isinstance(disk, dict) else None
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
