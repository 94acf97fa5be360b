"""The append-only files of one run: what its ranks and its supervisor recorded so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from console.history import History
from console.model import LEVELS, Alert, Figure, Gpu
from console.sources import ancestor, documents
from console.sources.summary import Summary
from trainers.contract import heartbeat, jsonl, rundir

MAX_RANKS = 4096
Taken = Callable[[Path, dict[str, Any]], object]


class Records:
    """Follows heartbeats, samples and events of one run; `history` gets what is charted.

    `summary` adds up all attempts, `taken` gets each heartbeat of the newest attempt.
    """

    def __init__(self, run: Path, history: History, taken: Taken):
        self.run, self.history, self._taken = run, history, taken
        self.summary = Summary()
        self.attempt = 1
        self.last: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, dict[str, Any]] = {}
        self.sample: dict[str, dict[str, Any]] = {}
        self.gpus: tuple[Gpu, ...] = ()
        self.last_step = 0
        self._tails: dict[str, jsonl.Tail] = {}
        self.halts: dict[int, int] = {}
        self.state_event: dict[str, Any] | None = None
        self._alerts: dict[str, Alert] = {}
        self._alert_ts: dict[str, float] = {}
        self._events = jsonl.Tail(run / rundir.EVENTS, lambda record: record)

    @property
    def skipped(self) -> int:
        return self._events.skipped + sum(tail.skipped for tail in self._tails.values())

    @property
    def behind_bytes(self) -> int:
        """How much is there to read that was not read yet."""
        tails = (self._events, *self._tails.values())
        return sum(max(0, tail.size_bytes - tail.offset) for tail in tails)

    def poll(self, attempt: int | None, limit_bytes: int) -> None:
        """Reads what is new, about `limit_bytes` of it."""
        if attempt is not None and attempt > self.attempt:
            self._begin_attempt(attempt)
        self._discover()
        left = self._follow(self._events, self._take_event, limit_bytes)
        for name, tail in self._tails.items():
            take = self._take_sample if name.startswith("samples_") else self._take_heartbeat
            left = self._follow(tail, take, left)

    def _follow(self, tail: jsonl.Tail, take: Callable[[dict[str, Any]], None], left: int) -> int:
        """Takes in the records of one file; returns how many bytes may still be read."""
        while True:
            before = tail.offset
            for record in tail.poll(max(0, left)):
                take(record)
            left -= max(0, tail.offset - before)
            if left <= 0 or tail.offset <= before:
                return left

    def _begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.last.clear()
        self.progress.clear()
        self.sample.clear()
        self.halts.clear()
        self.last_step = 0

    def _discover(self) -> None:
        try:
            names = os.listdir(self.run)
        except OSError:
            return
        for name in names:
            if name in self._tails or not name.endswith(".jsonl") or len(self._tails) > MAX_RANKS:
                continue
            if name.startswith("heartbeat_rank"):
                self._tails[name] = self._heartbeats(name)
            elif name.startswith("samples_"):
                self._tails[name] = jsonl.Tail(self.run / name, lambda record: record)

    def _heartbeats(self, name: str) -> jsonl.Tail:
        rank = name.removeprefix("heartbeat_rank").removesuffix(".jsonl")
        if rank.isdecimal() and ancestor.is_one(self.run):
            return ancestor.Heartbeats(self.run, int(rank)).tail
        return heartbeat.tail(self.run / name)

    def _take_heartbeat(self, record: dict[str, Any]) -> None:
        self.summary.take(record)
        if record["attempt"] > self.attempt:
            self._begin_attempt(record["attempt"])
        if record["attempt"] != self.attempt or record["rank"] >= MAX_RANKS:
            return
        self._taken(self.run, record)
        rank, at = record["rank"], jsonl.number(record, "ts") or 0.0
        self.last[rank] = record
        self.last_step = max(self.last_step, record["step"])
        if record["msg"] == "halt":
            self.halts[rank] = record["step"]
        if record["msg"] != "progress":
            return
        self.progress[rank] = record
        if rank != 0:
            return
        self.history.add_steps(at, record["step"], jsonl.numbers(record, "steps_dt_s"))
        for name in documents.CHARTED:
            self.history.add(name, at, jsonl.number(record, name))

    def _take_sample(self, record: dict[str, Any]) -> None:
        at = jsonl.number(record, "ts")
        if at is None:
            return
        attempt = jsonl.integer(record, "attempt")
        if attempt is not None and attempt < self.attempt:
            return
        host = documents.line(record, "host", "?")
        self.sample[host] = record
        self.gpus = tuple(gpu for s in self.sample.values() for gpu in documents.gpus(s))
        for gpu in documents.gpus(record):
            self.history.add(f"gpu_mem_mib:{gpu.index}", at, gpu.mem_used_mib)
        for entry in documents.entries(record, "ranks"):
            rank = jsonl.integer(entry, "rank")
            self.history.add(f"rss_mib:{rank}", at, jsonl.number(entry, "rss_mib"))

    def _take_event(self, record: dict[str, Any]) -> None:
        self.summary.take_event(record)
        kind = jsonl.text(record, "kind")
        if kind == "state":
            self.state_event = record
        name = documents.line(record, "alert", "")
        if not name or kind not in ("alert", "clear", "ack"):
            return
        self._alert_ts[name] = jsonl.number(record, "ts") or 0.0
        if kind == "alert":
            self._alerts[name] = _raised(name, record)
        elif kind == "clear":
            self._alerts.pop(name, None)
        elif name in self._alerts:
            self._alerts[name] = replace(self._alerts[name], acknowledged=True)

    def alerts(
        self, standing: Sequence[dict[str, Any]], more: Sequence[Alert]
    ) -> tuple[Alert, ...]:
        """Returns the open alerts, worst first, and those of this reader.

        `standing` are those of the sign of life: an event that the disk did not take is there.
        """
        found = dict(self._alerts)
        for record in standing:
            name, ts = documents.line(record, "alert", ""), jsonl.number(record, "ts") or 0.0
            if name and ts > self._alert_ts.get(name, 0.0):
                found[name] = _raised(name, record)

        def rank(alert: Alert) -> tuple[bool, int, float]:
            return alert.acknowledged, LEVELS.index(alert.level), -alert.ts

        return tuple(sorted([*found.values(), *more], key=rank))

    def figures(self) -> Mapping[str, Figure]:
        """Returns the newest figures of rank 0 and of the samples."""
        figures = documents.progress_figures(self.progress)
        percentiles = self.history.step_percentiles_s()
        if percentiles and 0 in self.progress:
            p50, p99, count = percentiles
            at = jsonl.number(self.progress[0], "ts") or 0.0
            window = f"last {count} steps"
            figures["step_p50_s"] = Figure(p50, "s", window, at)
            figures["step_p99_s"] = Figure(p99, "s", window, at)
        figures |= documents.sample_figures(self.sample)
        return figures


def _raised(name: str, record: dict[str, Any]) -> Alert:
    """Returns an alert that the supervisor raised."""
    return documents.read(Alert, record, id=name, acknowledged=False, observed=False)
