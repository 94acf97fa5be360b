"""Reads the records of one run into a reducer; returns samples, alerts and figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from console.model import LEVELS, Alert, Figure, Gpu
from console.sources import json_documents, liveness, snapshot
from console.sources.record_files import GZIP, MAX_RANKS, RecordFiles
from console.sources.reducer import UNITS, LatestRecords, Reducer, alert_of
from console.sources.series import Series
from console.sources.summary import Summary
from console.status_text import counted
from trainers.contract import heartbeat, jsonl, rundir

RECENT_BYTES = 256 << 10
"""Bytes at the end of a heartbeat or sample file that are read if only the end is read."""
MAX_TAIL_BYTES = 64 * RECENT_BYTES
"""If more bytes of heartbeat records follow a snapshot, `recent` ignores the snapshot."""
SHORT_BYTES = 4 << 20
"""The largest size of a short run (`_is_short`), whose charts use every record."""
FRESH_SAMPLE_S = 5.0
"""A sample older than this does not show the present use of a process or GPU."""
Reads = Literal["all", "recent", "charts", "end"]
"""The records to read.

- `all`: every record.
- `end`: all events, and the ends of the other files. The pace of each rank is measured.
- `recent`: the records after the snapshot. Without a valid snapshot: the same records as `end`.
- `charts`: the records after the snapshot, and the series before it. Without a valid snapshot, or
  for a short run: every record.

If a snapshot is used, the newest heartbeat records before the snapshot are read too.
"""
Records = Mapping[int, Mapping[str, Any]]
"""For each rank, the newest progress record with a figure, or else its newest progress record."""


class RunRecords:
    """Follows heartbeats, samples and events of one run; `reads` selects the records.

    If `only` has names, the series have only these quantities.
    """

    def __init__(self, run: Path, reads: Reads = "all", only: Collection[str] = ()):
        self.run, self.reducer = run, Reducer(Series(only=only), timed=reads == "end")
        saved = None
        if reads == "recent" or (reads == "charts" and not _is_short(run)):
            saved = rundir.read_json(run / rundir.SNAPSHOT, below=run)
        most = MAX_TAIL_BYTES if reads == "recent" else None
        self.has_snapshot = snapshot.load(run, saved, self.reducer, most)
        self.snapshot_ts = jsonl.number(saved or {}, "ts") if self.has_snapshot else None
        if self.has_snapshot and reads == "charts":
            snapshot.load_series(run, self.reducer)
        only_ends = reads == "end" or (reads == "recent" and not self.has_snapshot)
        self.files = RecordFiles(run, RECENT_BYTES if only_ends else None, self.reducer.cursors)
        self.attempt = 1
        """The present attempt; `heads` has the records of this attempt.

        In a run by hand, each start of a program with `join` is attempt 1. `heads` then has only
        ranks of the newest start.
        """
        self.heads: Mapping[int, LatestRecords] = {}
        self.samples: Mapping[str, dict[str, Any]] = {}
        """The newest samples by host, without those of an earlier attempt."""
        self.gpus: tuple[Gpu, ...] = ()
        """The GPUs in `samples`; those in an old sample have no present values."""

    @property
    def summary(self) -> Summary:
        """The totals of all attempts, and the numbers of attempts and stalls in the events."""
        summary, events = self.reducer.summary, self.reducer.events
        summary.set_counts(events.attempts, events.stalls)
        return summary

    @property
    def state_event(self) -> dict[str, Any] | None:
        """The newest `state` event, or None if there is none."""
        return self.reducer.events.state

    def poll(self, attempt: int | None, world: int | None, limit_bytes: int) -> None:
        """Reads at most about `limit_bytes` of new records.

        `attempt` comes from supervisor.json, `world` from run.json.
        """
        ranks = min(world or MAX_RANKS, MAX_RANKS)
        for batch in self.files.poll(limit_bytes, ranks):
            self.reducer.add(batch, ranks, attempt)
        self.attempt = self.reducer.attempt(attempt)
        heads = self.reducer.heads(self.attempt)
        self.heads = heads if world else _of_newest_start(heads)
        self.samples = self.reducer.samples(self.attempt)
        each = self.samples.values()
        self.gpus = tuple(gpu for sample in each for gpu in _gpus(sample))

    def alerts(self, status: Mapping[str, Any], more: Sequence[Alert]) -> tuple[Alert, ...]:
        """Returns the open alerts of the run and those in `more`, the worst first.

        Acknowledged alerts follow after all others. `status` is the supervisor heartbeat, or {} if
        there is none. While `status` is recent, its alerts replace those of the events, because the
        newest events may be missing on a full disk.
        """
        by_events = self.reducer.events.open()
        found = list(by_events.values())
        if liveness.is_recent(status):
            by_status = {name: alert_of(name, record) for record in jsonl.entries(status, "alerts")
                         if (name := json_documents.line(record, "alert", ""))}  # fmt: skip
            found = []
            for name, alert in by_status.items():
                event = by_events.get(name)
                noted = event is not None and event.acknowledged and event.ts >= alert.ts
                found.append(replace(alert, acknowledged=noted))
        return tuple(sorted([*found, *more], key=_urgency))

    def figures(self, loss_unit: str) -> Mapping[str, Figure]:
        """Returns the newest figures of rank 0 and of the samples, the memory, and the stalls.

        A run without a stall has no figure `stalls`. Its time is the newest time of the other
        figures.
        """
        progress = {
            rank: record for rank, head in self.heads.items()
            if (record := head.figures or head.progress)
        }  # fmt: skip
        found = (
            progress_figures(progress, loss_unit)
            | step_figures(progress, self.reducer.series)
            | sample_figures(self.samples)
        )
        events = self.reducer.events
        if events.stalls:
            at = max((figure.at for figure in found.values()), default=0.0)
            found["stalls"] = Figure(float(events.stalls), "", "all attempts", at)
        return found


def _of_newest_start(heads: Mapping[int, LatestRecords]) -> Mapping[int, LatestRecords]:
    """Returns the ranks whose last record has as many ranks (`world`) as the newest record."""
    newest = max((head.last for head in heads.values()), key=lambda each: each["ts"], default={})
    world = newest.get("world")
    return {rank: head for rank, head in heads.items() if head.last.get("world") == world}


def _gpus(sample: Mapping[str, Any]) -> Iterator[Gpu]:
    sampled_s = liveness.age(jsonl.number(sample, "ts"))
    is_fresh = sampled_s is not None and sampled_s <= FRESH_SAMPLE_S
    none = dict.fromkeys(("util_pct", "power_w", "mem_used_mib", "temp_c", "sm_mhz"))
    for gpu in json_documents.gpus(sample):
        yield gpu if is_fresh else replace(gpu, **none)


def _is_short(run: Path) -> bool:
    """Returns whether a run has at most `SHORT_BYTES` of records, and no compressed records."""
    there = rundir.names(run)
    if there is None:
        return False
    names = [name for name in there if ".jsonl" in name]
    has_parts = any(name.endswith(GZIP) for name in names)
    return not has_parts and sum(jsonl.size_bytes(run / name) for name in names) <= SHORT_BYTES


def _urgency(alert: Alert) -> tuple[bool, int, float]:
    return alert.acknowledged, LEVELS.index(alert.level), -alert.ts


def progress_figures(progress: Records, loss_unit: str) -> dict[str, Figure]:
    """Returns rank 0's figures and the largest memory of any rank; {} if rank 0 has no record."""
    record = progress.get(0)
    if record is None:
        return {}
    at = jsonl.number(record, "ts") or 0.0
    step, count = record.get("step"), len(jsonl.numbers(record, "steps_dt_s"))
    windows = {
        "step": f"step {step}",
        "steps": f"last {counted(count, 'step')}",
        "fetches": "newest 200 fetches",
        "run": f"up to step {step}",
    }
    if not count or jsonl.text(record, "cut") in heartbeat.TRIMMABLE:  # not all durations are known
        windows["steps"] = "steps since the record before"
    figures = {}
    for name, (unit, window) in UNITS.items():
        value = jsonl.number(record, name)
        if value is not None:
            unit = loss_unit if name == "loss" else unit
            figures[name] = Figure(value, unit, windows[window], at)
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
    """Returns p50 and p99 of the durations of the last steps of rank 0, or {}."""
    percentiles = series.step_percentiles_s()
    if percentiles is None or 0 not in progress:
        return {}
    p50, p99, count = percentiles
    at, window = jsonl.number(progress[0], "ts") or 0.0, f"last {counted(count, 'step')}"
    return {"step_p50_s": Figure(p50, "s", window, at), "step_p99_s": Figure(p99, "s", window, at)}


def sample_figures(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Returns free disk space, load and memory, each from the last of `samples` that has it."""
    figures = {}
    for sample in samples.values():
        at = jsonl.number(sample, "ts") or 0.0
        free = jsonl.number(jsonl.mapping(sample, "disk"), "free_gib")
        if free is not None:
            figures["disk_free_gib"] = Figure(free, "GiB", "newest sample", at)
        load = jsonl.number(sample, "load1")
        if load is not None:
            figures["load1"] = Figure(load, "", "1 min", at)
        sizes = [jsonl.number(entry, "rss_mib") for entry in jsonl.entries(sample, "ranks")]
        largest = max((size for size in sizes if size is not None), default=None)
        if largest is not None:
            figures["rss_mib"] = Figure(largest, "MiB", "largest of all ranks", at)
    return figures
