"""Stack dumps on request: signal the ranks that can dump, then keep each rank's new bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from console.sources import process
from console.status_text import counted
from console.supervisor.mailbox import Outcome
from console.supervisor.requests import Request
from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, pulse, rundir
from trainers.contract.dumps import END_MARK, LAST_RESORT

WAIT_S, KEEP_S = 2.0, 2.0
"""For so long a rank has time to write its stack, and then the disk to take the copy of it."""
LAST_RESORT_AFTER_S = 1.0
MAX_DUMP_BYTES = 4 << 20


@dataclass(slots=True)
class _Part:
    """One rank's dump: where its bytes begin, and what became of it ("" while it is open)."""

    rank: int
    handle: process.Handle
    source: Path
    offset: int
    at: tuple[int, str] | None
    """The step and phase in which it was asked, None for not known."""
    result: str = ""
    data: bytes = b""
    pressed: bool | None = None
    """True if the last resort was possible, False if not, None before it was tried."""
    kept_as: str = ""
    """The file that the directory's thread is writing, "" before that."""


def refusal(pid: int) -> str:
    """Says why a rank cannot be asked for its stack, "" when it can."""
    state = process.state(pid)
    if state in ("Z", "X", process.GONE):
        return "is gone"
    if state in "Tt":
        return "is stopped (SIGSTOP or a debugger) and cannot dump; kill -CONT lets it go on"
    if not process.catches(pid, signal.SIGUSR1):
        return "does not catch SIGUSR1 (still starting, or no member), so it was not signalled"
    return ""


class Dumps:
    """The one dump that may be under way, and who waits for it.

    `poll` until it is done; nothing here waits.
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._asked: list[Request] = []
        self._parts: list[_Part] = []
        self._run = Path()
        self._live: Path | None = None
        self._unix_ms, self._began = 0, 0.0

    @property
    def busy(self) -> bool:
        return bool(self._parts)

    def ask(
        self, run: Path, live: Path | None, alive: Mapping[int, process.Handle], request: Request
    ) -> Outcome | None:
        """Signals the ranks that a request names; None: the answer follows, see `poll`."""
        rank = request.args.get("rank")
        wanted = sorted(alive) if rank is None else [rank]
        if not alive:
            return False, "no rank is running, so there is no stack", []
        if rank is not None and rank not in alive:
            return False, f"rank {rank} is not running", []
        if self._parts and not {part.rank for part in self._parts} >= set(wanted):
            return False, "another dump is under way; ask again in two seconds", []
        self._asked.append(request)
        self.begin(run, live, {each: alive[each] for each in wanted})
        return None

    def begin(self, run: Path, live: Path | None, alive: Mapping[int, process.Handle]) -> None:
        """Signals those of these ranks that would survive it, unless a dump is under way."""
        if self._parts:
            return
        self._run, self._live = run, live
        self._unix_ms, self._began = time.time_ns() // 1_000_000, time.monotonic()
        for rank, handle in sorted(alive.items()):
            source = rundir.live_stack(live, rank) if live else rundir.stackdump(run, rank)
            try:
                size, why_not = _size(source), refusal(handle.pid)
            except OSError as error:
                size, why_not = 0, f"has no stack that can be read here: {error.strerror}"
            part = _Part(rank, handle, source, size, self._where(rank), why_not)
            if not part.result and not handle.send(signal.SIGUSR1):
                part.result = "is gone"
            self._parts.append(part)

    def poll(self, answer: Callable[[Request, Outcome], None]) -> None:
        """Takes what the ranks wrote, and answers when each has an end."""
        waited_s = time.monotonic() - self._began
        for part in self._parts:
            if part.result:
                continue
            if part.kept_as:
                if waited_s > WAIT_S + KEEP_S:
                    part.result = _late(part)
                continue
            part.data = jsonl.read_bytes(part.source, MAX_DUMP_BYTES, part.offset)
            whole = END_MARK.encode() in part.data and part.data.endswith(b"\n")
            if whole or waited_s > WAIT_S:
                self._finish(part, whole)
            elif waited_s > LAST_RESORT_AFTER_S and part.pressed is None and not part.data:
                self._press(part)
        if self._parts and all(part.result for part in self._parts):
            self._end(self._outcome(), answer)

    def abandon(self, answer: Callable[[Request, Outcome], None]) -> None:
        """Answers who still waits: the ranks are gone."""
        for part in self._parts:
            if not part.result:
                part.result = _late(part) if part.kept_as else "ended before it answered"
        self._end(self._outcome(), answer)

    def _end(self, outcome: Outcome, answer: Callable[[Request, Outcome], None]) -> None:
        asked, self._asked, self._parts = self._asked, [], []
        for request in asked:
            answer(request, outcome)

    def _where(self, rank: int) -> tuple[int, str] | None:
        found = pulse.read(rundir.pulse(self._live, rank)) if self._live else None
        return (found.step, found.phase) if found else None

    def _press(self, part: _Part) -> None:
        """Asks for what needs no GIL, of a rank that has stood still since it was asked.

        Silent it may also be because it is slow or was stopped; its frames could be in motion.
        """
        pid, where = part.handle.pid, self._where(part.rank)
        still = where is not None and where == part.at
        can = still and process.state(pid) in "RS" and not refusal(pid)
        part.pressed = can and process.catches(pid, LAST_RESORT) and part.handle.send(LAST_RESORT)

    def _finish(self, part: _Part, whole: bool) -> None:
        if not part.data:
            part.result = f"did not answer within {WAIT_S:g} s"
            return
        part.kept_as = name = f"stackdump_rank{part.rank}_{self._unix_ms}.txt"
        told = f"dumped: {name}"
        if part.pressed and b"=== rank" not in part.data:
            told += " (native code holds the GIL: the main thread alone could be read)"
        elif not whole:
            told += f" (what came within {WAIT_S:g} s: its end is missing)"
        path, data = self._run / name, part.data
        self._directory.told(
            lambda: rundir.write_atomic(path, data), partial(_take_kept, part, told), path
        )

    def _outcome(self) -> Outcome:
        """Returns whether any stack came, a sentence, and each rank's result."""
        detail = [f"rank {part.rank} {part.result}" for part in self._parts]
        rest = [line for line in detail if " dumped: " not in line]
        dumped = len(detail) - len(rest)
        if not dumped:
            return False, f"no stack: {'; '.join(rest)}", detail
        return True, "; ".join([f"stacks of {counted(dumped, 'rank')} dumped", *rest]), detail


def _late(part: _Part) -> str:
    return f"dumped: {part.kept_as} (the disk has not taken it yet)"


def _take_kept(part: _Part, told: str, why_not: str) -> None:
    """Takes that the copy of a stack was written, or why it was not."""
    if not part.result:
        lost = f"was dumped, but {part.kept_as} cannot be written: {why_not}"
        part.result = lost if why_not else told


def _size(path: Path) -> int:
    """Returns the size of a file, 0 where there is none. Raises OSError."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
