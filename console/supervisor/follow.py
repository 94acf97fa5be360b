"""What a run's own files say: heartbeats, `.HALT`, torchrun's log."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.diagnose.readings import Progress, progress_of
from console.ending import error_of
from console.plans.gates import Summary
from console.sources import documents, process
from trainers.contract import heartbeat, jsonl, rundir

WARM_UP_STEPS = 2
KEPT_STEPS = 256
KEPT_RECORDS = 4096
LONGEST_STEP_S = 1e6
TIMED_PHASES = ("fetch", "forward", "backward", "optimizer")
MAX_POLLS = 8
LOG_TAIL_BYTES = 256 << 10
EXCEPTION = re.compile(
    rb"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception): .*)$", re.MULTILINE
)
TORCHRUN_WORDS = b"ChildFailedError"
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
    """What is read when all processes have ended; `words` are last exceptions by rank."""

    news: News = field(default_factory=News)
    log: bytes = b""
    metrics: Mapping[str, Any] | None = None
    words: Mapping[int, str] = field(default_factory=dict)


class Disk:
    """The space below a run, and what of it its newest checkpoint takes."""

    def __init__(self, run: Path):
        self._run = run
        self._latest, self._latest_gib = "", 0.0

    def look(self) -> dict[str, float]:
        """Returns `free_gib`, `total_gib` and, with a checkpoint, `checkpoint_gib`; or OSError."""
        space = os.statvfs(self._run)
        gib = space.f_frsize / (1 << 30)
        found = {
            "free_gib": round(space.f_bavail * gib, 2), "total_gib": round(space.f_blocks * gib, 2),
        }  # fmt: skip
        name = documents.latest_checkpoint(self._run)
        if name and name != self._latest:
            self._latest, self._latest_gib = name, 0.0
            folder = self._run / rundir.CHECKPOINTS / name
            with contextlib.suppress(OSError):
                sizes = [os.lstat(folder / each).st_size for each in os.listdir(folder)]
                self._latest_gib = round(sum(sizes) / (1 << 30), 3)
        return found | ({"checkpoint_gib": self._latest_gib} if name else {})


class Files:
    """Follows the files of one attempt; `look` and `rest` run on the directory's thread."""

    def __init__(self, run: Path, attempt: int, world: int):
        self._run, self._attempt = run, attempt
        self._log = rundir.logs(run, attempt) / rundir.TORCHRUN_LOG
        self._log_offset = 0
        self._disk = Disk(run)
        self._tails = [heartbeat.tail(rundir.heartbeat(run, rank)) for rank in range(world)]

    def look(self, heartbeats: bool) -> News:
        """Returns what is new; `heartbeats` False looks only for `.HALT` and at torchrun's log.

        What may raise comes first: a record that was read is never lost.
        """
        news = self._news()
        if heartbeats:
            news.disk = self._disk.look()
            for tail in self._tails:
                news.records += self._read(tail, MAX_POLLS)
        return news

    def rest(self) -> Rest:
        """Returns everything that is left to read after the ranks have ended."""
        news = self._news()
        for tail in self._tails:
            news.records += self._read(tail, 1 << 20)
        log = jsonl.read_bytes(self._log, LOG_TAIL_BYTES, below=self._run)
        words = {}
        for rank in range(len(self._tails)):
            path = rundir.rank_log(self._run, self._attempt, rank)
            own = jsonl.read_bytes(path, LOG_TAIL_BYTES, below=self._run)
            words[rank] = last_exception(own) or last_exception(log)
        return Rest(news, log, rundir.read_json(self._run / rundir.METRICS), words)

    def _news(self) -> News:
        """Looks for `.HALT`, and for what torchrun's log tells of signals since the last look."""
        data = jsonl.read_bytes(self._log, LOG_TAIL_BYTES, self._log_offset, self._run)
        self._log_offset += max(0, len(data) - OVERLAP_BYTES)
        death = DEATH.search(data)
        return News(
            halt_file=os.path.lexists(self._run / rundir.HALT),
            ending=CLOSING in data,
            agent_signal=process.signal_name(int(death[1])) if death else "",
        )

    def _read(self, tail: jsonl.Tail, polls: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _ in range(polls):
            found += [r for r in tail.poll() if r["attempt"] == self._attempt]
            if tail.offset >= tail.size_bytes:
                break
        return found


def last_exception(log: bytes) -> str:
    """Returns the last exception line in a log, for an end that no record explains."""
    lines = [m.group(1) for m in EXCEPTION.finditer(log) if TORCHRUN_WORDS not in m.group(1)]
    return lines[-1][:300].decode("utf-8", "replace").strip() if lines else ""


class Story:
    """What the records told so far: for gates, stall limits and the end of the run."""

    def __init__(self) -> None:
        self.summary = Summary()
        self.steps: dict[int, int] = {}
        self.halts: dict[int, int] = {}
        self.reason = ""
        self.errors: dict[int, str] = {}
        self.codes: dict[int, int] = {}
        """Exit codes that ranks announced in their last record; an exit without one is orderly."""
        self.progress: dict[int, Progress] = {}
        """The newest progress record of each rank."""
        self.newest_ts: float | None = None
        self._fresh: deque[Progress] = deque(maxlen=KEPT_RECORDS)
        self._durations: dict[tuple[int, str], deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._p99: dict[tuple[int, str], float] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in one heartbeat."""
        self.summary.take(record)
        rank, step = record["rank"], record["step"]
        self.steps[rank] = max(step, self.steps.get(rank, 0))
        self.newest_ts = jsonl.number(record, "ts")
        if record["msg"] == "progress":
            self.progress[rank] = progress_of(record)
            self._fresh.append(self.progress[rank])
        if record["msg"] == "halt":
            self.halts[rank] = step
        if record["msg"] in ("halt", "exit"):
            self.reason = self.reason or jsonl.text(record, "reason")[:80]
        error = error_of(record)
        if error:
            self.errors.setdefault(rank, error)
        code = jsonl.integer(record, "exit_code")
        if code is not None or record["msg"] == "exit":
            self.codes[rank] = code or 0
        steps_s = [d for d in jsonl.numbers(record, "steps_dt_s") if 0 <= d < LONGEST_STEP_S]
        if steps_s:
            self._take_durations(record, rank, steps_s)

    def take_fresh(self) -> tuple[Progress, ...]:
        """Returns the progress records since the last call; whoever watches asks for them."""
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return fresh

    def _take_durations(self, record: Mapping[str, Any], rank: int, steps_s: list[float]) -> None:
        """Takes step times, and the longest that each phase can have lasted in these steps.

        A record tells a phase's mean: in one of n steps it lasted at most n means, and no longer
        than the longest step. Phases that a GPU was timed in say nothing about the host's.
        """
        warm = steps_s[max(0, WARM_UP_STEPS - self._seen.get(rank, 0)) :]
        self._seen[rank] = self._seen.get(rank, 0) + len(steps_s)
        if not warm:
            return
        self._keep(rank, "", warm)
        phases = ("fetch",) if "gpu_mem_reserved" in record else TIMED_PHASES
        for phase in phases:
            mean_s = jsonl.number(record, f"dt_{phase}_s")
            if mean_s is not None and 0 <= mean_s < LONGEST_STEP_S:
                self._keep(rank, phase, [min(mean_s * len(steps_s), max(steps_s))])

    def _keep(self, rank: int, phase: str, durations_s: list[float]) -> None:
        held = self._durations.setdefault((rank, phase), deque(maxlen=KEPT_STEPS))
        held.extend(durations_s)
        self._p99.pop((rank, phase), None)

    def p99_s(self, rank: int, phase: str = "") -> float | None:
        """Returns the 99th percentile of a rank's last times in a phase, None before there are any.

        Where the phase has none, and for "": that of its steps.
        """
        key = (rank, phase) if (rank, phase) in self._durations else (rank, "")
        held = self._durations.get(key)
        if not held:
            return None
        if key not in self._p99:
            ordered = sorted(held)
            self._p99[key] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return self._p99[key]
