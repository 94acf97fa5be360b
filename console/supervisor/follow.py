"""Reads the files of a run: heartbeats and `.HALT`, and the logs after its end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.diagnose.readings import LONGEST_STEP_S, Progress, progress_of
from console.diagnose.stall import FIRST_STEP, RECORDS_LATE_S, SAFETY, Seen
from console.ending import End, error_of
from console.sources import ancestor, documents, lastwords, process
from console.sources.fold import OF_THE_PAST
from console.sources.lastwords import LastWords
from console.sources.reading import Batch, Cursor, Reading, rank_of, read_end
from console.sources.sanitize import clean
from console.supervisor.tree import Worker
from trainers.contract import jsonl, rundir

WARM_UP_STEPS = 2
KEPT_STEPS = 256
KEPT_RECORDS = 4096
KEPT_GAPS = 8
TIMED_PHASES = ("fetch", "forward", "backward", "optimizer")
LOOK_BYTES = 512 << 10
"""Of records in one look: a backlog is read in parts, and memory stays flat."""
LOG_TAIL_BYTES = WARM_UP_BYTES = 256 << 10
ROW_BYTES = 4096
DEATH = re.compile(rb"Received (1|2|3|15) death signal")


@dataclass(slots=True)
class News:
    """The result of one look; `batches` are the new records of each file, of all attempts."""

    batches: list[Batch] = field(default_factory=list)
    halt_file: bool = False
    disk: Mapping[str, float] = field(default_factory=dict)
    csv: Progress | None = None
    """The newest row of training.csv."""
    behind: bool = False
    """There are more records than one look reads."""
    unread: str = ""
    """Which heartbeat is there and cannot be read, "" for none."""

    def heartbeats(self) -> Iterator[dict[str, Any]]:
        """Yields the records that ranks wrote into their own files."""
        for batch in self.batches:
            rank = rank_of(batch.name)
            if rank is not None:
                yield from (line.record for line in batch.lines if line.record["rank"] == rank)


@dataclass(frozen=True, slots=True)
class Rest:
    """What is read when all processes have ended; `last` are the last words of each rank."""

    log: bytes = b""
    last: Mapping[int, LastWords] = field(default_factory=dict)
    checkpoint: int | None = None
    """The step of the newest whole checkpoint, 0 without one, None where nobody can tell."""
    agent_signal: str = ""
    """The signal that torchrun's log names: a claim that the exits have to confirm."""


def newest_checkpoint(run: Path) -> int | None:
    """Returns the step of the newest whole checkpoint: 0 without one, None if it is unreadable."""
    try:
        os.lstat(run / rundir.CHECKPOINTS / rundir.LATEST)
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    name = documents.latest_checkpoint(run)
    step = name.removeprefix("step_")
    there = step.isdecimal() and (run / rundir.CHECKPOINTS / name).is_dir()
    return int(step) if there else None


class Disk:
    """The space below a run, and what of it its newest checkpoint takes."""

    def __init__(self, run: Path):
        self._run = run
        self._latest, self._latest_gib = "", 0.0

    def look(self) -> dict[str, float]:
        """Returns `free_gib`, `total_gib` and, with a checkpoint, `checkpoint_gib`.

        Raises OSError also where the directory is there and nothing in it can be read.
        """
        space = os.statvfs(f"{self._run}/.")
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


class NewestRow:
    """The last whole row of training.csv: rank 0's figures by another way than its heartbeat."""

    def __init__(self, run: Path):
        self._run, self._path = run, run / rundir.TRAINING_CSV
        self._stamp: object = None
        self._row: Progress | None = None

    def look(self) -> Progress | None:
        """Returns the row, None without one; the file is read when it has changed."""
        stamp = rundir.stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._row = self._read()
        return self._row

    def _read(self) -> Progress | None:
        first = jsonl.read_bytes(self._path, ROW_BYTES, 0, self._run).partition(b"\n")[0]
        *_, last = b"", *jsonl.read_bytes(self._path, ROW_BYTES, below=self._run).splitlines(True)
        names = first.decode("ascii", "replace").strip().split(",")
        if not names[0].isidentifier():
            names = list(ancestor.CSV_COLUMNS)  # it writes no header
        cells = last.decode("ascii", "replace").strip().split(",")
        if not last.endswith(b"\n") or not cells[0].isdecimal() or len(cells) > len(names):
            return None
        row: dict[str, object] = {"step": int(cells[0][:18])}
        for name, cell in zip(names[1:], cells[1:], strict=False):
            with contextlib.suppress(ValueError):
                row[name] = float(cell)
        return progress_of(row)


class Files:
    """Follows the files of one attempt; `look` and `rest` run on the directory's thread.

    With those of the `former` attempt it goes on in the records where that one ended; without, it
    begins `WARM_UP_BYTES` before `cursors`: a new reader has to learn what is usual.
    """

    def __init__(
        self, run: Path, attempt: int, world: int, former: Files | None = None,
        cursors: Mapping[str, Cursor] | None = None,
    ):  # fmt: skip
        self._run, self._attempt = run, attempt
        self._log = rundir.logs(run, attempt) / rundir.TORCHRUN_LOG
        self.watched = (run / rundir.HALT,)
        """A change of one of these calls for a `look` at once."""
        self._disk, self._csv = Disk(run), NewestRow(run)
        self._world = world
        self._reading = former._reading if former is not None else Reading(
            run, cursors=cursors, warm_up_bytes=WARM_UP_BYTES
        )  # fmt: skip

    def look(self, heartbeats: bool) -> News:
        """Returns what is new; `heartbeats` False looks only for `.HALT`.

        What may raise comes first: a record that was read is never lost.
        """
        news = News(halt_file=os.path.lexists(self._run / rundir.HALT))
        if heartbeats:
            news.disk, news.csv = self._disk.look(), self._csv.look()
            news.batches += self._reading.poll(LOOK_BYTES, self._world)
            news.behind = self._reading.has_more
            news.unread = self._reading.unread
        return news

    def rest(self) -> Rest:
        """Returns what is read once, when all processes have ended."""
        log = read_end(self._log, LOG_TAIL_BYTES, self._run)
        last = {}
        for rank in range(self._world):
            path = rundir.rank_log(self._run, self._attempt, rank)
            own = lastwords.read(read_end(path, LOG_TAIL_BYTES, self._run))
            last[rank] = own if own != LastWords() else lastwords.read(log, rank)
        death = DEATH.search(log)
        signal = process.signal_name(int(death[1])) if death else ""
        return Rest(log, last, newest_checkpoint(self._run), signal)


class Story:
    """State from the records of one attempt: for stall limits and the end of the run.

    `live`: its reader was there from the begin of the attempt; else since `settle`.
    """

    def __init__(self, live: bool = False) -> None:
        self.steps: dict[int, int] = {}
        self.halts: dict[int, int] = {}
        self.reason = ""
        self.saved = 0
        """The step of the newest checkpoint that a record names."""
        self.first_step = FIRST_STEP
        """Of this attempt: behind the checkpoint that it went on from."""
        self.errors: dict[int, str] = {}
        self.last: dict[int, Mapping[str, Any]] = {}
        """The newest record of each rank."""
        self.progress: dict[int, Progress] = {}
        """The newest progress record of each rank."""
        self.newest_ts: float | None = None
        self._rose: dict[int, float] = {}
        """When each rank's newest step was read, in monotonic seconds."""
        self._gaps: dict[int, deque[float]] = {}
        self._fresh: deque[Progress] = deque(maxlen=KEPT_RECORDS)
        self._durations: dict[tuple[int, str], tuple[deque[float], list[float]]] = {}
        """The last times of each rank in each phase, in the order they came and by length."""
        self._seen: dict[int, int] = {}
        self._live_since = time.monotonic() if live else math.inf
        self._told_s: dict[int, float] = {}
        """The step time that each rank's records told of since then, behind the first of them."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in one heartbeat."""
        rank, step = record["rank"], record["step"]
        if rank not in self.last or step > self.steps.get(rank, 0):
            self._take_rise(rank)
        self.last[rank] = record
        if record["msg"] not in OF_THE_PAST:
            self.steps[rank] = step
        elif record["msg"] == "checkpoint":
            self.saved = step
        if record["msg"] == "resume" and rank not in self.progress:
            self.first_step = max(step + 1, FIRST_STEP)
        self.newest_ts = jsonl.number(record, "ts")
        if record["msg"] == "progress":
            # A rank that records further steps was neither halted nor ended by an error before.
            self.halts.pop(rank, None)
            self.errors.pop(rank, None)
            self.progress[rank] = progress_of(record)
            self._fresh.append(self.progress[rank])
        if record["msg"] == "halt":
            self.halts[rank] = step
        if record["msg"] in ("halt", "exit"):
            self.reason = self.reason or jsonl.text(record, "reason")[:80]
        error = clean(error_of(record), 400)
        if error:
            self.errors.setdefault(rank, error)
        steps_s = [d for d in jsonl.numbers(record, "steps_dt_s") if 0 <= d < LONGEST_STEP_S]
        if steps_s := self._that_passed(rank, steps_s):
            self._take_durations(record, rank, steps_s)

    def code(self, rank: int) -> int | None:
        """Returns the exit code that a rank's last record announces; an exit without is orderly."""
        last = self.last.get(rank, {})
        code = jsonl.integer(last, "exit_code")
        return 0 if code is None and last.get("msg") == "exit" else code

    def seen(
        self, rank: int, pid: int, state: str, *, attempt: int, step: int, phase: str,
        still_s: float, collectives: int, code: int | None = None, nonfinite_steps: int = -1,
        lagging: bool = False,
    ) -> Seen:  # fmt: skip
        """Returns a rank where its pulse shows it, with the limits and doubts of its records.

        A pulse that is `lagging` comes from a sample: its records may be ahead of it.
        """
        recorded = self.progress.get(rank)
        return Seen(
            rank, pid, state, step, phase, still_s, collectives, self.p99_s(rank, phase),
            self._first_step_of(rank, attempt, step),
            self.code(rank) if code is None else code,
            self.still_s(rank, time.monotonic()), self.gap_s(rank),
            "ahead" if recorded and recorded.step > step and not lagging else "", nonfinite_steps,
        )  # fmt: skip

    def _first_step_of(self, rank: int, attempt: int, step: int) -> int:
        """Returns the first step of the attempt; a pulse before it disproves its record."""
        if attempt > 1 and not self.steps.get(rank):
            return step  # a program that went on without a word may take its first step anywhere
        return self.first_step if self.first_step <= step + 1 else FIRST_STEP

    def still_s(self, rank: int, mono: float) -> float | None:
        """Returns the time since a new step of a rank was read, None without a record.

        It is infinite while no new step was read since `settle`.
        """
        rose = self._rose.get(rank)
        return None if rose is None else max(0.0, mono - rose)

    def gap_s(self, rank: int) -> float:
        """Returns the longest of the last times between two records with a new step, 0 at first."""
        return max(self._gaps.get(rank, ()), default=0.0)

    def _take_rise(self, rank: int) -> None:
        """Takes that a new step of a rank was read; gaps count behind the first steps."""
        now, before = time.monotonic(), self._rose.get(rank, -math.inf)
        stepped = rank in self.progress or self.steps.get(rank, 0) >= self.first_step
        if stepped and before > -math.inf:
            self._gaps.setdefault(rank, deque(maxlen=KEPT_GAPS)).append(now - before)
        self._rose[rank] = now

    def settle(self) -> None:
        """Takes what was read so far for what was there before this reader came."""
        self._rose = dict.fromkeys(self._rose, -math.inf)
        self._live_since = time.monotonic()

    def take_fresh(self) -> tuple[Progress, ...]:
        """Returns the progress records since the last call; whoever watches asks for them."""
        fresh = tuple(self._fresh)
        self._fresh.clear()
        return fresh

    def _that_passed(self, rank: int, steps_s: list[float]) -> list[float]:
        """Returns the step times that can be true: no more has passed since the reader came.

        The steps in a rank's first record may have begun before; each is cut to that time.
        """
        most_s = time.monotonic() - self._live_since + RECORDS_LATE_S
        if self._live_since == math.inf:
            return steps_s
        if rank not in self._told_s:
            self._told_s[rank] = 0.0
            return [min(step_s, most_s) for step_s in steps_s]
        told_s = self._told_s[rank] + math.fsum(steps_s)
        if told_s > most_s:
            return []
        self._told_s[rank] = told_s
        return steps_s

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
        """Keeps durations; one that was a stall counts as the limit that it broke, no more."""
        held, ordered = self._durations.setdefault((rank, phase), (deque(), []))
        most_s = (SAFETY * _p99(ordered) if ordered else 0.0) or LONGEST_STEP_S
        for duration_s in durations_s:
            held.append(min(duration_s, most_s))
            insort(ordered, held[-1])
            if len(held) > KEPT_STEPS:
                del ordered[bisect_left(ordered, held.popleft())]

    def p99_s(self, rank: int, phase: str = "") -> float | None:
        """Returns the 99th percentile of a rank's last times in a phase, None before there are any.

        Where the phase has none, and for "": that of its steps.
        """
        found = self._durations.get((rank, phase)) or self._durations.get((rank, ""))
        return None if found is None else _p99(found[1])


def _p99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def end_of(worker: Worker, story: Story, words: LastWords | None = None, step: int = 0) -> End:
    """Returns how a rank ended: what the kernel says, its records, and its log once it was read.

    Where nobody saw its exit code, the one it announced in its last record counts; a good one needs
    a second source. `step` is that of its pulse: a crash takes the records with it that were not
    yet written.
    """
    rank, code, signal = worker.rank, worker.code, worker.signal
    doubt = "" if worker.seen or worker.vouched else _doubt(worker, story, step)
    if doubt:
        code = signal = None
    elif not worker.seen and not code:
        code = story.code(rank)  # nobody saw a good end: the rank itself has to say so
    last, record = words or LastWords(), story.last.get(rank, {})
    said = ": ".join(filter(None, (jsonl.text(record, "msg"), jsonl.text(record, "reason"))))
    return End(
        rank, code, signal, max(step, story.steps.get(rank, 0)), story.errors.get(rank, ""),
        last.error, worker.culled, at=last.at, fatal_at=last.fatal_at,
        said=clean(said, 200), ts=None if worker.late else worker.over_ts, seen=worker.seen,
        doubt=doubt,
    )  # fmt: skip


def _doubt(worker: Worker, story: Story, step: int) -> str:
    """Says why a good end that a rank announces, and nobody saw, is not believed."""
    recorded = story.steps.get(worker.rank, 0)
    claimed = worker.signal or (f"exit {worker.code}" if worker.code else "")
    if story.code(worker.rank) != 0 or (step == recorded and not claimed):
        return ""
    if claimed:
        return f"its last record says exit 0, and a log or a document alone says {claimed}"
    pulse = f"its pulse is of step {step}" if step else "it has no pulse"
    return f"its last record says exit 0 at step {recorded}, nobody saw that, and {pulse}"
