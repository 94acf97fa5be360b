"""Turns progress records, step durations and samples into displayed figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.model import Figure
from console.sources.series import Series
from trainers.contract import jsonl

UNITS: Mapping[str, tuple[str, str]] = {
    "toks_per_s": ("tok/s", "steps"), "toks_per_s_rank": ("tok/s", "steps"),
    "loss": ("nats/token", "step"), "lr": ("", "step"), "grad_norm": ("", "step"),
    "mfu": ("share", "steps"), "mfu_exact": ("share", "steps"),
    "tokens_total": ("tokens", "run"), "bytes_right": ("share", "steps"),
    "dt_fetch_s": ("s", "step"), "dt_forward_s": ("s", "step"), "dt_backward_s": ("s", "step"),
    "dt_optimizer_s": ("s", "step"), "fetch_p95_ms": ("ms", "steps"),
    "gate_entropy_mean": ("nats", "step"), "gate_entropy_min": ("nats", "step"),
    "gate_max_gate": ("", "step"), "gate_collapse_frac": ("share", "step"),
    "sel_entropy": ("nats", "step"), "sel_forced_share": ("share", "step"),
    "sel_distance_mean": ("tokens", "step"), "sel_overlap": ("share", "step"),
    "gpu_mem_alloc": ("MiB", "step"), "gpu_mem_reserved": ("MiB", "step"),
    "skipped_steps": ("steps", "run"), "dropped_records": ("records", "run"),
}  # fmt: skip
"""Unit and window of each figure in a progress record."""
Records = Mapping[int, Mapping[str, Any]]
"""The newest progress record of each rank."""


def progress_figures(progress: Records, has_settings: bool = True) -> dict[str, Figure]:
    """Returns the figures of rank 0's newest progress record, and the largest memory of any rank.

    The loss of a foreign program, which has no settings, has no unit.
    """
    record = progress.get(0)
    if record is None:
        return {}
    at = jsonl.number(record, "ts") or 0.0
    step, count = record.get("step"), len(jsonl.numbers(record, "steps_dt_s")) or 1
    windows = {"step": f"step {step}", "steps": f"last {count} steps", "run": "this run"}
    figures = {}
    for name, (unit, window) in UNITS.items():
        value = jsonl.number(record, name)
        if value is not None:
            known = has_settings or name != "loss"
            figures[name] = Figure(value, unit if known else "", windows[window], at)
    for name in ("gpu_mem_reserved", "gpu_mem_alloc"):
        values = [v for r in progress.values() if (v := jsonl.number(r, name)) is not None]
        if values:
            figures[name] = Figure(max(values), "MiB", "largest of all ranks", at)
    shares = jsonl.numbers(record, "gate_branch_shares")
    if len(shares) == 3:
        for branch, share in zip(("cmp", "sel", "win"), shares, strict=True):
            figures[f"gate_share_{branch}"] = Figure(share, "share", windows["step"], at)
    return figures


def step_figures(progress: Records, series: Series) -> dict[str, Figure]:
    """Returns p50 and p99 of the durations of the last steps."""
    percentiles = series.step_percentiles_s()
    if percentiles is None or 0 not in progress:
        return {}
    p50, p99, count = percentiles
    at, window = jsonl.number(progress[0], "ts") or 0.0, f"last {count} steps"
    return {
        "step_p50_s": Figure(p50, "s", window, at), "step_p99_s": Figure(p99, "s", window, at),
    }  # fmt: skip


def sample_figures(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns disk, load and memory from the newest sample of each host."""
    figures = {}
    for sample in samples.values():
        at = jsonl.number(sample, "ts") or 0.0
        free = jsonl.number(jsonl.mapping(sample, "disk"), "free_gib")
        if free is not None:
            figures["disk_free_gib"] = Figure(free, "GiB", "now", at)
        load = jsonl.number(sample, "load1")
        if load is not None:
            figures["load1"] = Figure(load, "", "1 min", at)
        sizes = [jsonl.number(entry, "rss_mib") for entry in jsonl.entries(sample, "ranks")]
        largest = max((size for size in sizes if size is not None), default=None)
        if largest is not None:
            figures["rss_mib"] = Figure(largest, "MiB", "largest of all ranks", at)
    return figures
