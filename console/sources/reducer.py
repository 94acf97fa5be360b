"""Reduces the records of a run to its state: first each file separately, then all together.

The order in which the heartbeat files are read does not matter. A reader can continue from a
snapshot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from console.model import STALL, Alert
from console.rank_end import error_of
from console.sources import json_documents
from console.sources.pace import UNTIMED, Pace
from console.sources.rank_totals import OF_EARLIER_STEPS, AttemptTotals, Record
from console.sources.record_files import MAX_RANKS, Batch, Cursor, rank_of
from console.sources.sanitize import clean
from console.sources.series import Series, mean_step_s
from console.sources.summary import Summary
from trainers.contract import heartbeat, jsonl, rundir

MAX_ATTEMPT = 100_000
"""An attempt with a higher number has no head, and is never the present attempt."""
KEPT_HEADS = 4
STARTED_RECORDS = 2
"""If supervisor.json names no attempt, an attempt with this many read records has started."""
MAX_ALERTS, MAX_LAYERS = 256, 128
CHARTED = ("loss", "toks_per_s", "grad_norm", "gate_entropy_mean", "bytes_right")
UNITS: Mapping[str, tuple[str, str]] = {
    "toks_per_s": ("tok/s", "steps"), "toks_per_s_rank": ("tok/s", "steps"),
    "loss": ("", "step"), "lr": ("", "step"), "grad_norm": ("", "step"),
    "mfu": ("share", "steps"), "mfu_exact": ("share", "steps"),
    "tokens_total": ("tokens", "run"), "bytes_right": ("share", "steps"),
    "dt_fetch_s": ("s", "steps"), "dt_forward_s": ("s", "steps"), "dt_backward_s": ("s", "steps"),
    "dt_optimizer_s": ("s", "steps"), "fetch_p95_ms": ("ms", "fetches"),
    "gate_entropy_mean": ("nats", "step"), "gate_entropy_min": ("nats", "step"),
    "gate_max_gate": ("", "step"), "gate_collapse_frac": ("share", "step"),
    "sel_entropy": ("nats", "step"), "sel_forced_share": ("share", "step"),
    "sel_distance_mean": ("tokens", "step"), "sel_overlap": ("share", "step"),
    "gpu_mem_alloc": ("MiB", "step"), "gpu_mem_reserved": ("MiB", "step"),
    "skipped_steps": ("steps", "run"), "dropped_records": ("records", "run"),
}  # fmt: skip
"""Unit and window of figures in a progress record; `model.loss_unit` returns the loss's unit."""


@dataclass(slots=True)
class LatestRecords:
    """The newest records of one rank in one attempt, and the totals of this attempt."""

    totals: AttemptTotals = field(default_factory=AttemptTotals)
    last: Record = field(default_factory=dict)
    progress: Record | None = None
    figures: Record | None = None
    """The newest `progress` record with at least one of the figures in `UNITS`, or None."""
    error_words: str = ""
    """The start of the first error text since the last progress, or "" if there is none."""
    save: Record | None = field(default=None, compare=False)
    """The newest record of a save that succeeded or failed, or None if no such record was read."""
    step: int = 0
    halt: int | None = None
    """The step of the newest `halt` record, or None if there is none since the last progress."""
    records: int = field(default=0, compare=False)
    """The number of records that were added to this object."""
    pace: Pace = field(default=UNTIMED, compare=False)

    def add(self, record: Record) -> None:
        msg = record["msg"]
        self.last, self.records = record, self.records + 1
        if msg not in OF_EARLIER_STEPS:
            self.step = record["step"]
        if msg == "progress":
            self.progress, self.halt, self.error_words = record, None, ""
            if any(record.get(name) is not None for name in UNITS):
                self.figures = record
        elif msg in ("checkpoint", "checkpoint_failed"):
            self.save = record
        elif msg == "halt":
            self.halt = record["step"]
        elif msg == "error":
            self.error_words = self.error_words or clean(error_of(record), 400)
        if msg in ("halt", "exit"):
            self.totals.reason = self.totals.reason or jsonl.text(record, "reason")[:80]

    def has(self, record: Record) -> bool:
        """Returns whether a record was added before, as in `AttemptTotals.has`."""
        number, newest = (jsonl.integer(each, "n") or 0 for each in (record, self.last))
        is_later = any(
            (jsonl.number(record, name) or 0.0) > (jsonl.number(self.last, name) or 0.0)
            for name in ("mono", "ts")
        )
        return 1 <= number <= newest and not is_later

    @property
    def first_step(self) -> int:
        """The first step of this attempt: one after the step of its `resume` record, or else 1."""
        return self.totals.resumed + 1

    @property
    def saved(self) -> int:
        """The step of the newest `checkpoint` record, or 0."""
        return self.totals.saved

    @property
    def reason(self) -> str:
        """The start of the first recorded reason for a halt or exit, or "" if there is none."""
        return self.totals.reason

    @property
    def code(self) -> int | None:
        """The exit code in the last record, or None; an exit record without the key means code 0.

        In an exit record, null means that the exit code is not known.
        """
        default = {"exit_code": 0} if self.last.get("msg") == "exit" else {}
        return jsonl.integer({**default, **self.last}, "exit_code")

    @property
    def has_end(self) -> bool:
        """True if the last record is an exit record or has an exit code."""
        return self.last.get("msg") == "exit" or self.code is not None


NO_RECORDS = LatestRecords()
"""The `LatestRecords` of a rank that has no records."""


@dataclass(slots=True)
class Events:
    """The supervisor's events so far: last state, alerts, and the counts of attempts and stalls."""

    state: dict[str, Any] | None = None
    alerts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The events of open alerts, at most `MAX_ALERTS`; the key is the alert's name."""
    acknowledged: set[str] = field(default_factory=set)
    attempts: int | None = None
    stalls: int | None = None
    """`stalls` is None before the first event, `attempts` before the first with an attempt."""

    def add(self, event: dict[str, Any]) -> None:
        kind = jsonl.text(event, "kind")
        attempt = jsonl.integer(event, "attempt")
        if attempt is not None:
            self.attempts = max(attempt, self.attempts or 0)
        is_stall = kind == "alert" and event.get("alert") == STALL
        since_ts = jsonl.number(event, "since_ts")
        is_new = is_stall and (since_ts is None or since_ts > self.stalled_ts)
        self.stalls = (self.stalls or 0) + is_new
        if kind == "state":
            self.state = event
        name = json_documents.line(event, "alert", "")
        if not name or kind not in ("alert", "clear", "ack"):
            return
        if kind == "ack":
            self.acknowledged |= {name} & self.alerts.keys()
            return
        self.acknowledged.discard(name)
        self.alerts.pop(name, None)
        if kind == "alert":
            if len(self.alerts) >= MAX_ALERTS:
                oldest = next(iter(self.alerts))
                del self.alerts[oldest]
                self.acknowledged.discard(oldest)
            self.alerts[name] = event

    @property
    def stalled_ts(self) -> float:
        """The time of the event of the open alert on a stall, or 0 if none is open.

        A time in the future becomes the present time. A later supervisor raises the alert again. If
        the `since_ts` of the later alert is not after this time, both alerts are one stall.
        """
        event = self.alerts.get(STALL)
        return min(time.time(), jsonl.number(event, "ts") or 0.0) if event else 0.0

    def forget_events(self) -> None:
        """Drops the events of a file that was replaced; their counts remain."""
        self.state = None
        self.alerts.clear()
        self.acknowledged.clear()

    def open(self) -> dict[str, Alert]:
        """Returns the open alerts by name."""
        return {
            name: replace(alert_of(name, event), acknowledged=name in self.acknowledged)
            for name, event in self.alerts.items()
        }


class Reducer:
    """The state of a run from its records: totals in `summary`, newest records in `all_heads`.

    `series` receives the charted values. A head is the `LatestRecords` of a rank in an attempt.
    With `timed` the heads have a pace, for the stall detection.
    """

    def __init__(self, series: Series, summary: Summary | None = None, timed: bool = False):
        self.series, self.summary = series, summary or Summary()
        self.timed, self._live_since = timed, math.inf
        self.all_heads: dict[int, dict[int, LatestRecords]] = {}
        self.newest_samples: dict[str, dict[str, Any]] = {}
        """The newest sample of each file."""
        self.events = Events()
        self.cursors: dict[str, Cursor] = {}
        self._replaced: dict[str, int] = {}
        self.counted = 0
        """Number of added heartbeat records that are new in the totals and have a valid attempt."""

    # --- adding records ------------------------------------------------------------------------

    def add(self, batch: Batch, world: int = MAX_RANKS, present: int | None = None) -> None:
        """Adds new records of one file; the run has `world` ranks and is in attempt `present`."""
        rank = rank_of(batch.name)
        if batch.replaced > self._replaced.get(batch.name, 0):
            self._replaced[batch.name] = batch.replaced
            self.all_heads.pop(-1 if rank is None else rank, None)
            if batch.name == rundir.EVENTS:
                self.events.forget_events()
        self.cursors[batch.name] = batch.cursor
        for record in batch.records:
            if rank is not None:
                if record["rank"] == rank < world:
                    self._take_heartbeat(batch.name, record, present)
            elif batch.name == rundir.EVENTS:
                self.events.add(record)
                self.summary.add_event(record)
            else:
                self._take_sample(batch.name, record)

    def _take_heartbeat(self, name: str, record: Record, present: int | None) -> None:
        """Adds a record; a record that the totals already include is added at most to its head."""
        rank, attempt = record["rank"], record["attempt"]
        is_new = self.summary.add(record)
        if not 0 < attempt <= MAX_ATTEMPT:
            return
        heads = self.all_heads.setdefault(rank, {})
        if attempt not in heads:
            heads[attempt] = LatestRecords(
                self.summary.of_attempt(rank, attempt) or AttemptTotals()
            )
            if len(heads) > KEPT_HEADS:
                del heads[min(heads.keys() - {present})]
        head = heads.get(attempt)
        if head is not None and (is_new or not head.has(record)):
            if self.timed and (head.pace is UNTIMED or record["msg"] == "boot"):
                # Each start by hand of a program with `join` is attempt 1.
                head.pace = Pace(self._live_since)
            if self.timed:
                head.pace.add(record, head.first_step, time.monotonic(), time.time())
            head.add(record)
        if not is_new:
            return
        self.counted += 1
        self._chart(name, record)
        if record["msg"] == "progress" and rank == 0:
            at = jsonl.number(record, "ts") or 0.0
            self.series.add_steps(at, record["step"], jsonl.numbers(record, "steps_dt_s"))

    def mark_old(self) -> None:
        """Marks all records so far as old, as in `Pace.mark_old`."""
        self._live_since = time.monotonic()
        for heads in self.all_heads.values():
            for head in heads.values():
                head.pace.mark_old(self._live_since)

    def _take_sample(self, name: str, sample: dict[str, Any]) -> None:
        if jsonl.number(sample, "ts") is not None:
            self.newest_samples[name] = sample
            self.summary.gpus.add(sample)
            self._chart(name, sample)

    def _chart(self, name: str, record: Mapping[str, Any]) -> None:
        at, values = jsonl.number(record, "ts"), _charted(name, record)
        if at is not None and values is not None:
            self.series.add(name, at, values)

    # --- all files together --------------------------------------------------------------------

    def attempt(self, named: int | None) -> int:
        """Returns the attempt in supervisor.json, or else the newest started attempt, or else 1."""
        if named is not None and 0 < named <= MAX_ATTEMPT:
            return named
        records: dict[int, int] = {}
        for heads in self.all_heads.values():
            for number, head in heads.items():
                records[number] = records.get(number, 0) + head.records
        started = (each for each, count in records.items() if count >= STARTED_RECORDS)
        return max(started, default=1)

    def heads(self, attempt: int) -> dict[int, LatestRecords]:
        """Returns the stored heads of an attempt by rank; at most `KEPT_HEADS` of a rank exist."""
        heads = sorted(self.all_heads.items())
        return {rank: by_attempt[attempt] for rank, by_attempt in heads if attempt in by_attempt}

    def samples(self, attempt: int) -> dict[str, dict[str, Any]]:
        """Returns the newest samples by host, without those of an earlier attempt."""
        found = {}
        for sample in self.newest_samples.values():
            of = jsonl.integer(sample, "attempt")
            if of is None or of >= attempt:
                found[json_documents.line(sample, "host", "?")] = sample
        return found


def _charted(name: str, record: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Returns the charted values of a record or sample, or None if it is not charted."""
    rank = rank_of(name)
    if rank is None:
        return _charted_sample(record)
    if rank or record["msg"] != "progress":
        return None
    found = {name: jsonl.number(record, name) for name in CHARTED}
    found["step_s"] = mean_step_s(jsonl.numbers(record, "steps_dt_s"))
    return found | _entropies(record)


def _entropies(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the attention gate's entropy per layer (nats), and the lowest entropy with its layer.

    Layers from `MAX_LAYERS` on are left out. Returns {} for a record that has no layers, or whose
    lists were shortened (`cut`).
    """
    layers = jsonl.numbers(record, "gate_entropy_layers")[:MAX_LAYERS]
    if not layers or jsonl.text(record, "cut") in heartbeat.TRIMMABLE:
        return {}
    found: dict[str, float | None] = {f"gate_entropy:{i}": each for i, each in enumerate(layers)}
    lowest = min(layers)
    return found | {
        "gate_entropy_lowest": lowest, "gate_entropy_lowest_layer": float(layers.index(lowest)),
    }  # fmt: skip


def _charted_sample(sample: Mapping[str, Any]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for entry in jsonl.entries(sample, "gpus")[: json_documents.MAX_GPUS]:
        if (index := jsonl.integer(entry, "index")) is not None:
            values[f"gpu_mem_mib:{index}"] = jsonl.number(entry, "mem_used_mib")
            values[f"gpu_util_pct:{index}"] = jsonl.number(entry, "util_pct")
    has_gpus = bool(values)
    for entry in jsonl.entries(sample, "ranks"):
        if (rank := jsonl.integer(entry, "rank")) is not None:
            values[f"rss_mib:{rank}"] = jsonl.number(entry, "rss_mib")
            if not has_gpus:
                values[f"cpu_pct:{rank}"] = jsonl.number(entry, "cpu_pct")
    return values


def alert_of(name: str, record: Mapping[str, Any]) -> Alert:
    """Returns the alert in an event, or in an entry of the supervisor heartbeat."""
    return json_documents.read(Alert, record, id=name, acknowledged=False, observed=False)
