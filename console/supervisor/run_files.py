"""Reads the files of an attempt: polls records, documents and `.HALT`; reads logs at the end."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.plans import gate_check
from console.sources import crash_log, gate_files, json_documents, legacy, process
from console.sources.crash_log import Crash
from console.sources.gate_files import GateFiles
from console.sources.pace import Progress, progress_of
from console.sources.record_files import SAMPLES, Batch, RecordFiles, read_end
from console.sources.summary import Summary
from trainers.contract import jsonl, rundir

LOOK_BYTES = 512 << 10
"""One `poll` reads about this many bytes of records at most, so a backlog needs little memory."""
LOG_TAIL_BYTES = 256 << 10
ROW_BYTES = 4096
DEATH = re.compile(rb"Received (1|2|3|15) death signal")


@dataclass(slots=True)
class Poll:
    """The result of one poll; `batches` are the new records of each file."""

    batches: list[Batch] = field(default_factory=list)
    halt_file: bool = False
    disk: Mapping[str, float] = field(default_factory=dict)
    csv: Progress | None = None
    """The newest row of training.csv, or None if its last line is not a complete row."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """env.json of this attempt, or {} if it is not available."""
    behind: bool = False
    """True if the poll stopped at its limit, so more records may wait."""
    behind_ranks: bool = False
    """True if these records are not only samples."""
    unread: str = ""
    """Why the directory or a heartbeat file cannot be read, or ""."""


@dataclass(frozen=True, slots=True)
class FinalRead:
    """The data read after all processes have ended; `last` is the last error of each rank."""

    log: bytes = b""
    last: Mapping[int, Crash] = field(default_factory=dict)
    checkpoint: int | None = None
    """The result of `newest_checkpoint`."""
    torchrun_signal: str = ""
    """The signal that torchrun's log says it received, or "".

    The exits of the ranks must confirm this signal.
    """
    files: GateFiles | None = None
    former: Summary | None = None
    """If this run resumed another run and did no further step: the totals of that run, or None."""


def newest_checkpoint(run: Path) -> int | None:
    """Returns the newest complete checkpoint's step; 0 if there is none, None if not known."""
    name = json_documents.latest_checkpoint(run)
    step = "0" if name == "" else (name or "").removeprefix("step_")
    return int(step) if step.isdecimal() else None


class Disk:
    """The space on the disk of a run, and the size of the run's newest checkpoint."""

    def __init__(self, run: Path):
        self._run = run
        self._latest, self._latest_gib = "", 0.0

    def poll(self) -> dict[str, float]:
        """Returns `free_gib`, `total_gib` and, if there is a checkpoint, `checkpoint_gib`.

        Raises OSError, also if the directory exists but cannot be entered.
        """
        space = os.statvfs(f"{self._run}/.")
        gib = space.f_frsize / (1 << 30)
        found = {
            "free_gib": round(space.f_bavail * gib, 2), "total_gib": round(space.f_blocks * gib, 2),
        }  # fmt: skip
        name = json_documents.latest_checkpoint(self._run) or ""
        if name and name != self._latest:
            self._latest, self._latest_gib = name, 0.0
            folder = self._run / rundir.CHECKPOINTS / name
            with contextlib.suppress(OSError):
                sizes = [os.lstat(folder / each).st_size for each in os.listdir(folder)]
                self._latest_gib = round(sum(sizes) / (1 << 30), 3)
        return found | ({"checkpoint_gib": self._latest_gib} if name else {})


class NewestRow:
    """The last row of training.csv, a second source for the figures of rank 0."""

    def __init__(self, run: Path):
        self._run, self._path = run, run / rundir.TRAINING_CSV

    def poll(self) -> Progress | None:
        """Returns the row, or None if the last line is not a complete row."""
        first = jsonl.read_bytes(self._path, ROW_BYTES, 0, self._run).partition(b"\n")[0]
        *_, last = b"", *jsonl.read_bytes(self._path, ROW_BYTES, below=self._run).splitlines(True)
        names = first.decode("ascii", "replace").strip().split(",")
        if not names[0].isidentifier():
            names = list(legacy.CSV_COLUMNS)  # the legacy system writes no header
        cells = last.decode("ascii", "replace").strip().split(",")
        if not last.endswith(b"\n") or not cells[0].isdecimal() or len(cells) > len(names):
            return None
        row: dict[str, object] = {"step": int(cells[0][:18])}
        for name, cell in zip(names[1:], cells[1:], strict=False):
            with contextlib.suppress(ValueError):
                row[name] = float(cell)
        return progress_of(row)


class Environment:
    """The env.json of an attempt; rank 0 writes this document at its start."""

    def __init__(self, run: Path, attempt: int):
        self._document, self._attempt = json_documents.Document(run / rundir.ENV), attempt

    def poll(self) -> Mapping[str, Any]:
        """Returns the document of this attempt, or {} if none of this attempt could be read."""
        record = self._document.read()
        return record if jsonl.integer(record, "attempt") == self._attempt else {}


class Files:
    """Reads the files of one attempt; `poll` and `read_final` run on the run directory's thread.

    All attempts of a run share one `reading`, which continues where the former attempt ended.
    """

    def __init__(self, run: Path, attempt: int, world: int, reading: RecordFiles):
        self._run, self._attempt = run, attempt
        self._log = rundir.logs(run, attempt) / rundir.TORCHRUN_LOG
        self.watched = (run / rundir.HALT,)
        """Files whose change makes a `poll` due."""
        self._disk, self._csv = Disk(run), NewestRow(run)
        self._env = Environment(run, attempt)
        self._world, self._reading = world, reading

    def poll(self, heartbeats: bool) -> Poll:
        """Returns new records and other present data.

        If `heartbeats` is False, returns only whether there is a `.HALT`. Records are read last: if
        another read fails, no record is lost. Raises OSError.
        """
        news = Poll(halt_file=os.path.lexists(self._run / rundir.HALT))
        if heartbeats:
            news.disk, news.csv = self._disk.poll(), self._csv.poll()
            news.env = self._env.poll()
            news.batches += self._reading.poll(LOOK_BYTES, self._world)
            behind = self._reading.behind
            news.behind = bool(behind)
            news.behind_ranks = not all(name.startswith(SAMPLES) for name in behind)
            news.unread = self._reading.unread
        return news

    def read_final(self, resumed_at_end: int) -> FinalRead:
        """Returns the data that are read only after all processes have ended.

        `resumed_at_end` comes from the run's summary. The data for the gates are read last. If they
        cannot be read, the gates that need them are unknown.
        """
        log = read_end(self._log, LOG_TAIL_BYTES, self._run)
        last = {}
        for rank in range(self._world):
            path = rundir.rank_log(self._run, self._attempt, rank)
            own = crash_log.read(read_end(path, LOG_TAIL_BYTES, self._run))
            last[rank] = own if own != Crash() else crash_log.read(log, rank)
        death = DEATH.search(log)
        signal = process.signal_name(int(death[1])) if death else ""
        checkpoint, files, former = newest_checkpoint(self._run), None, None
        with contextlib.suppress(OSError, ValueError):
            files = gate_files.read(self._run, self._attempt, self._world)
            born = rundir.read_json(self._run / rundir.RUN, below=self._run) or {}
            former = gate_check.continued(born, resumed_at_end)
        return FinalRead(log, last, checkpoint, signal, files, former)
