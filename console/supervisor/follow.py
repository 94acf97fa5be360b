"""What a run's own files say: heartbeats, `.HALT`, torchrun's log."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.ending import End, error_of
from console.plans.gates import Summary
from console.sources import lastwords, process
from console.sources.lastwords import LastWords
from console.sources.sanitize import clean
from console.supervisor.tree import Worker
from trainers.contract import heartbeat, jsonl, rundir

WARM_UP_STEPS = 2
KEPT_STEPS = 256
MAX_POLLS = 8
LOG_TAIL_BYTES = 256 << 10
CLOSING = b"closing signal SIG"
DEATH = re.compile(rb"Received (\d{1,2}) death signal")
OVERLAP_BYTES = 64
"""Longer than what is searched for: a write may end in the middle of it."""


@dataclass(slots=True)
class News:
    """What one look found."""

    records: list[dict[str, Any]] = field(default_factory=list)
    halt_file: bool = False
    ending: bool = False
    """torchrun says that it ends the ranks."""
    agent_signal: str = ""
    """The signal that torchrun says it got."""
    disk: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rest:
    """What is read when all processes have ended; `last` are the last words of each rank."""

    news: News = field(default_factory=News)
    log: bytes = b""
    metrics: Mapping[str, Any] | None = None
    last: Mapping[int, LastWords] = field(default_factory=dict)


class Files:
    """Follows the files of one attempt; `look` and `rest` run on the directory's thread."""

    def __init__(self, run: Path, attempt: int, world: int):
        self._run, self._attempt = run, attempt
        self._log = rundir.logs(run, attempt) / rundir.TORCHRUN_LOG
        self._log_offset = 0
        self._tails = [heartbeat.tail(rundir.heartbeat(run, rank)) for rank in range(world)]

    def look(self, heartbeats: bool) -> News:
        """Returns what is new; `heartbeats` False looks only for `.HALT` and at torchrun's log.

        What may raise comes first: a record that was read is never lost.
        """
        news = self._news()
        if heartbeats:
            space = os.statvfs(self._run)
            gib = space.f_frsize / (1 << 30)
            news.disk = {
                "free_gib": round(space.f_bavail * gib, 2),
                "total_gib": round(space.f_blocks * gib, 2),
            }
            for tail in self._tails:
                news.records += self._read(tail, MAX_POLLS)
        return news

    def rest(self) -> Rest:
        """Returns everything that is left to read after the ranks have ended."""
        news = self._news()
        for tail in self._tails:
            news.records += self._read(tail, 1 << 20)
        log = self._end_of(self._log)
        last = {}
        for rank in range(len(self._tails)):
            path = rundir.rank_log(self._run, self._attempt, rank)
            own = lastwords.read(self._end_of(path))
            last[rank] = own if own != LastWords() else lastwords.read(log, rank)
        return Rest(news, log, rundir.read_json(self._run / rundir.METRICS), last)

    def _news(self) -> News:
        """Looks for `.HALT`, and for what torchrun's log tells of signals since the last look."""
        data = b""
        if jsonl.size_bytes(self._log, self._run) < self._log_offset:
            kept = rundir.kept_log(self._log)
            data = jsonl.read_bytes(kept, LOG_TAIL_BYTES, self._log_offset, self._run)
            self._log_offset = 0
        fresh = jsonl.read_bytes(self._log, LOG_TAIL_BYTES, self._log_offset, self._run)
        self._log_offset += max(0, len(fresh) - OVERLAP_BYTES)
        data += fresh
        death = DEATH.search(data)
        return News(
            halt_file=os.path.lexists(self._run / rundir.HALT),
            ending=CLOSING in data,
            agent_signal=process.signal_name(int(death[1])) if death else "",
        )

    def _end_of(self, log: Path) -> bytes:
        """Returns the last bytes of a log, from before its rotation too where it is short."""
        data = jsonl.read_bytes(log, LOG_TAIL_BYTES, below=self._run)
        left = LOG_TAIL_BYTES - len(data)
        before = jsonl.read_bytes(rundir.kept_log(log), left, below=self._run) if left else b""
        return before + data

    def _read(self, tail: jsonl.Tail, polls: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _ in range(polls):
            found += [r for r in tail.poll() if r["attempt"] == self._attempt]
            if tail.offset >= tail.size_bytes:
                break
        return found


class Story:
    """What the records told so far: for gates, stall limits and the end of the run."""

    def __init__(self) -> None:
        self.summary = Summary()
        self.steps: dict[int, int] = {}
        self.halts: dict[int, int] = {}
        self.reason = ""
        self.checkpoint = 0
        """The step of the newest checkpoint that was written, 0 before there is one."""
        self.errors: dict[int, str] = {}
        self.codes: dict[int, int] = {}
        """Exit codes that ranks announced in their last record; an exit without one is orderly."""
        self.said: dict[int, str] = {}
        """What each rank wrote last."""
        self._durations: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._p99: dict[int, float] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in one heartbeat."""
        self.summary.take(record)
        rank, step = record["rank"], record["step"]
        self.steps[rank] = max(step, self.steps.get(rank, 0))
        if record["msg"] == "checkpoint":
            self.checkpoint = max(step, self.checkpoint)
        if record["msg"] == "halt":
            self.halts[rank] = step
        if record["msg"] in ("halt", "exit"):
            self.reason = self.reason or jsonl.text(record, "reason")[:80]
        said = jsonl.text(record, "reason")
        self.said[rank] = clean(f"{record['msg']}: {said}" if said else str(record["msg"]), 200)
        error = clean(error_of(record), 400)
        if error:
            self.errors.setdefault(rank, error)
        code = jsonl.integer(record, "exit_code")
        if code is not None or record["msg"] == "exit":
            self.codes[rank] = code or 0
        held = self._durations.setdefault(rank, deque(maxlen=KEPT_STEPS))
        for duration in jsonl.numbers(record, "steps_dt_s"):
            if not 0 <= duration < 1e6:
                continue
            self._seen[rank] = self._seen.get(rank, 0) + 1
            if self._seen[rank] > WARM_UP_STEPS:
                held.append(duration)
            self._p99.pop(rank, None)

    def p99_s(self, rank: int) -> float | None:
        """Returns the 99th percentile of a rank's last step times, None before there are any."""
        held = self._durations.get(rank)
        if not held:
            return None
        if rank not in self._p99:
            ordered = sorted(held)
            self._p99[rank] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return self._p99[rank]


def end_of(worker: Worker, story: Story, words: LastWords | None = None, step: int = 0) -> End:
    """Returns how a rank ended: what the kernel says, its records, and its log once it was read.

    Where nobody saw its exit code, the one it announced in its last record counts. `step` is that
    of its pulse: a crash takes the records with it that were not yet written.
    """
    rank, code = worker.rank, worker.code
    if code is None and worker.signal is None:
        code = story.codes.get(rank)
    last = words or LastWords()
    return End(
        rank, code, worker.signal, max(step, story.steps.get(rank, 0)), story.errors.get(rank, ""),
        last.error, worker.culled, at=last.at, fatal=last.fatal, fatal_at=last.fatal_at,
        said=story.said.get(rank, ""), ts=worker.over_ts,
    )  # fmt: skip
