"""The append-only files of one run: what its ranks and its supervisor recorded so far."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from console.history import History
from console.model import LEVELS, Alert, Figure, Gpu
from console.sources import ancestor, documents, presence
from console.sources.summary import MAX_RANKS, Summary
from trainers.contract import heartbeat, jsonl, rundir

MAX_ATTEMPT = 100_000
"""No run has more; a record of a later one is not believed."""
MAX_EARLY = 1024
Taken = Callable[[Path, dict[str, Any]], object]


class Records:
    """Follows heartbeats, samples and events of one run; `history` gets what is charted.

    `summary` adds up all attempts, `taken` gets each heartbeat of the present attempt. Which one
    that is, the supervisor's document says; without one two records have to agree. Records of the
    next attempt wait until then. With `recent_bytes` only the end of each heartbeat and sample file
    is read, which tells how a run is, and not how it was: then there is no sum over all attempts.
    """

    def __init__(
        self, run: Path, history: History, taken: Taken, recent_bytes: int | None = None
    ):  # fmt: skip
        self._recent_bytes = recent_bytes
        self.run, self.history, self._taken = run, history, taken
        self.summary = Summary()
        self.attempt = 1
        self.last: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, dict[str, Any]] = {}
        self.sample: dict[str, dict[str, Any]] = {}
        self.gpus: tuple[Gpu, ...] = ()
        self._told: int | None = None
        """The attempt in the supervisor's document."""
        self._world = MAX_RANKS
        self.legacy = False
        """The ancestor wrote it."""
        self._early: deque[dict[str, Any]] = deque(maxlen=MAX_EARLY)
        """Heartbeats of attempts that nothing else has told of yet."""
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
    def is_whole(self) -> bool:
        """Says whether every file is read from its begin."""
        return not any(tail.left_out_bytes for tail in self._tails.values())

    @property
    def behind_bytes(self) -> int:
        """How much is there to read that was not read yet."""
        tails = (self._events, *self._tails.values())
        return sum(max(0, tail.size_bytes - tail.offset) for tail in tails)

    @property
    def last_step(self) -> int | None:
        """The newest step in the last record of any rank, None before there is one."""
        return max((record["step"] for record in self.last.values()), default=None)

    def poll(self, attempt: int | None, world: int | None, limit_bytes: int) -> None:
        """Reads what is new, about `limit_bytes` of it.

        `attempt` is that of the supervisor's document, `world` that of run.json.
        """
        self._told = attempt if attempt is not None and 0 < attempt <= MAX_ATTEMPT else None
        self._world = min(world or MAX_RANKS, MAX_RANKS)
        if self._told is not None and self._told != self.attempt:
            self._begin_attempt(self._told)
        self._discover()
        left = self._follow(self._events, self._take_event, limit_bytes)
        for name, tail in self._tails.items():
            take = self._take_sample
            if name.startswith("heartbeat_"):
                take = partial(self._take_heartbeat, _rank_of(name))
            left = self._follow(tail, take, left)

    def _follow(self, tail: jsonl.Tail, take: Callable[[dict[str, Any]], None], left: int) -> int:
        """Takes in the records of one file; returns how many bytes may still be read."""
        while True:
            before = tail.taken_bytes
            for record in tail.poll(max(0, left)):
                take(record)
            left -= tail.taken_bytes - before
            if left <= 0 or tail.taken_bytes == before:
                return left

    def _begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.last.clear()
        self.progress.clear()
        self.sample.clear()
        self.halts.clear()
        waiting, self._early = self._early, deque(maxlen=MAX_EARLY)
        for record in waiting:
            self._take_heartbeat(record["rank"], record)

    def _is_present(self, record: dict[str, Any]) -> bool:
        """Says whether a record is of the present attempt; one of the next waits for its turn."""
        attempt = record["attempt"]
        if attempt <= self.attempt or attempt > MAX_ATTEMPT:
            return attempt == self.attempt
        if self._told is None and any(each["attempt"] == attempt for each in self._early):
            self._begin_attempt(attempt)
            return True
        if self._told is None or attempt == self._told + 1:
            self._early.append(record)
        return False

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
                self._tails |= self._samples(self.run / name)

    def _samples(self, path: Path) -> dict[str, jsonl.Tail]:
        """Returns how a file of samples is read: its older parts first, unless its end will do."""
        found: dict[str, jsonl.Tail] = {}
        with suppress(OSError):
            for _, part in rundir.parts(path) if self._recent_bytes is None else ():
                kind = jsonl.Packed if part.suffix == rundir.GZIP else jsonl.Tail
                found[part.name] = kind(part, lambda record: record)
        return found | {path.name: jsonl.Tail(path, lambda record: record, self._recent_bytes)}

    def _heartbeats(self, name: str) -> jsonl.Tail:
        rank = _rank_of(name)
        if rank is not None and ancestor.is_one(self.run):
            self.legacy = True
            return ancestor.Heartbeats(self.run, rank).tail
        return heartbeat.tail(self.run / name, self._recent_bytes)

    def _take_heartbeat(self, rank: int | None, record: dict[str, Any]) -> None:
        """Takes a record of the rank whose file it is in; a file speaks for no other rank."""
        if rank is None or record["rank"] != rank or rank >= self._world:
            return
        self.summary.take(record)
        if not self._is_present(record):
            return
        self._taken(self.run, record)
        at = jsonl.number(record, "ts") or 0.0
        self.last[rank] = record
        if record["msg"] == "halt":
            self.halts[rank] = record["step"]
        elif record["msg"] == "progress":
            self.halts.pop(rank, None)
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

    def alerts(self, status: Mapping[str, Any], more: Sequence[Alert]) -> tuple[Alert, ...]:
        """Returns the open alerts, worst first, and those of this reader.

        `status` is the supervisor's sign of life, {} without one. It lists what is open: while
        it is young, a line in the events raises or clears nothing that is older. Of an event
        that the disk did not take it tells as well.
        """
        found, said_ts = dict(self._alerts), jsonl.number(status, "ts")
        told = {name: _raised(name, record) for record in documents.entries(status, "alerts")
                if (name := documents.line(record, "alert", ""))}  # fmt: skip
        newer = {name for name, alert in told.items() if alert.ts <= self._alert_ts.get(name, 0.0)}
        if said_ts is not None and time.time() - said_ts < presence.SILENT_S:
            latest = time.time() + presence.CLOCK_S
            newer = {name for name, ts in self._alert_ts.items() if said_ts < ts <= latest}
            found = {name: found[name] for name in newer & found.keys()}
        for name in told.keys() - newer:
            held = self._alerts.get(name)
            noted = held is not None and held.acknowledged and held.ts >= told[name].ts
            found[name] = replace(told[name], acknowledged=noted)

        def rank(alert: Alert) -> tuple[bool, int, float]:
            return alert.acknowledged, LEVELS.index(alert.level), -alert.ts

        return tuple(sorted([*found.values(), *more], key=rank))

    def figures(self, ours: bool) -> Mapping[str, Figure]:
        """Returns the newest figures of rank 0 and of the samples; `ours` as `progress_figures`."""
        figures = documents.progress_figures(self.progress, ours)
        percentiles = self.history.step_percentiles_s()
        if percentiles and 0 in self.progress:
            p50, p99, count = percentiles
            at = jsonl.number(self.progress[0], "ts") or 0.0
            window = f"last {count} steps"
            figures["step_p50_s"] = Figure(p50, "s", window, at)
            figures["step_p99_s"] = Figure(p99, "s", window, at)
        figures |= documents.sample_figures(self.sample)
        return figures


def _rank_of(name: str) -> int | None:
    """Returns the rank whose heartbeat file has this name, None for another file."""
    rank = name.removeprefix("heartbeat_rank").removesuffix(".jsonl")
    return int(rank) if rank.isdecimal() and len(rank) <= len(str(MAX_RANKS)) else None


def _raised(name: str, record: dict[str, Any]) -> Alert:
    """Returns an alert that the supervisor raised."""
    return documents.read(Alert, record, id=name, acknowledged=False, observed=False)
