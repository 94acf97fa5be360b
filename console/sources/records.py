"""The records of one run as far as they were read: a reducer, and what it is fed from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from console.model import LEVELS, Alert, Figure, Gpu
from console.sources import documents, liveness, snapshot
from console.sources.reading import MAX_RANKS, Reading
from console.sources.reducer import Reducer, raised
from console.sources.series import Series
from console.sources.summary import Summary
from trainers.contract import jsonl, rundir

RECENT_BYTES = 256 << 10
"""A reader that wants to know how a run is now reads so much of each file of records."""
MAX_TAIL_BYTES = 64 * RECENT_BYTES
"""It reads no more behind a snapshot: nobody has written one for long."""
Reads = Literal["all", "recent", "charts", "end"]
"""`all` reads every record. `recent` starts at the snapshot, without one at the end of the files.
`charts` starts at the snapshot too, with all that is drawn of the time before; else as `all`.
`end` reads the end of the files, for who learns from records what is usual."""


class Records:
    """Follows heartbeats, samples and events of one run.

    `reads` selects the records; the supervisor's document names the attempt of the figures.
    """

    def __init__(self, run: Path, reads: Reads = "all"):
        self.run, self.reducer = run, Reducer(Series(), timed=reads == "end")
        held = (
            None if reads in ("all", "end") else rundir.read_json(run / rundir.SNAPSHOT, below=run)
        )
        most = MAX_TAIL_BYTES if reads == "recent" else None
        self.has_snapshot = snapshot.load(run, held, self.reducer, most)
        self.snapshot_ts = jsonl.number(held or {}, "ts") if self.has_snapshot else None
        if self.has_snapshot and reads == "charts":
            snapshot.draw(run, self.reducer)
        is_recent = reads == "end" or (reads == "recent" and not self.has_snapshot)
        recent = RECENT_BYTES if is_recent else None
        self.reading = Reading(run, recent, self.reducer.cursors)
        self.attempt = 1
        self.last: dict[int, dict[str, Any]] = {}
        """The newest record of each rank in the present attempt, in `progress` that of a step."""
        self.progress: dict[int, dict[str, Any]] = {}
        self.halts: dict[int, int] = {}
        self.sample: dict[str, dict[str, Any]] = {}
        self.gpus: tuple[Gpu, ...] = ()

    @property
    def summary(self) -> Summary:
        """The sums over all attempts, with the counts of the events."""
        summary, events = self.reducer.summary, self.reducer.events
        summary.take_counts(events.attempts, events.stalls)
        return summary

    @property
    def state_event(self) -> dict[str, Any] | None:
        held = self.reducer.events.state
        return held.record if held is not None else None

    def poll(self, attempt: int | None, world: int | None, limit_bytes: int) -> None:
        """Reads what is new, about `limit_bytes` of it.

        `attempt` is that of the supervisor's document, `world` that of run.json.
        """
        ranks = min(world or MAX_RANKS, MAX_RANKS)
        for batch in self.reading.poll(limit_bytes, ranks):
            self.reducer.take(batch, ranks, attempt)
        self.attempt = self.reducer.attempt(attempt)
        heads = self.reducer.heads(self.attempt)
        self.last = {rank: head.last.record for rank, head in heads.items()}
        self.progress = {
            rank: head.progress.record for rank, head in heads.items() if head.progress
        }  # fmt: skip
        self.halts = {rank: head.halt for rank, head in heads.items() if head.halt is not None}
        self.sample = self.reducer.samples(self.attempt)
        self.gpus = tuple(gpu for each in self.sample.values() for gpu in documents.gpus(each))

    def alerts(self, status: Mapping[str, Any], more: Sequence[Alert]) -> tuple[Alert, ...]:
        """Returns the open alerts, worst first, and those of this reader.

        `status` is the supervisor's sign of life, {} without one. It lists what is open: while
        it is young, a line in the events raises or clears nothing that is older. Of an event
        that the disk did not take it tells as well.
        """
        found = by_events = self.reducer.events.open()
        said_ts = jsonl.number(status, "ts")
        told_ts = self.reducer.events.told_ts
        told = {name: raised(name, record) for record in jsonl.entries(status, "alerts")
                if (name := documents.line(record, "alert", ""))}  # fmt: skip
        newer = {name for name, alert in told.items() if alert.ts <= told_ts.get(name, 0.0)}
        if said_ts is not None and time.time() - said_ts < liveness.SILENT_S:
            latest = time.time() + liveness.CLOCK_S
            newer = {name for name, ts in told_ts.items() if said_ts < ts <= latest}
            found = {name: found[name] for name in newer & found.keys()}
        for name in told.keys() - newer:
            held = by_events.get(name)
            noted = held is not None and held.acknowledged and held.ts >= told[name].ts
            found[name] = replace(told[name], acknowledged=noted)

        def rank(alert: Alert) -> tuple[bool, int, float]:
            return alert.acknowledged, LEVELS.index(alert.level), -alert.ts

        return tuple(sorted([*found.values(), *more], key=rank))

    def figures(self, ours: bool) -> Mapping[str, Figure]:
        """Returns the newest figures of rank 0 and of the samples; `ours` as `progress_figures`."""
        figures = documents.progress_figures(self.progress, ours)
        percentiles = self.reducer.series.step_percentiles_s()
        if percentiles and 0 in self.progress:
            p50, p99, count = percentiles
            at = jsonl.number(self.progress[0], "ts") or 0.0
            window = f"last {count} steps"
            figures["step_p50_s"] = Figure(p50, "s", window, at)
            figures["step_p99_s"] = Figure(p99, "s", window, at)
        figures |= documents.sample_figures(self.sample)
        return figures
