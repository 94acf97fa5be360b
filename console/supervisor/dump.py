"""Dumps rank stacks: signals the instrumented ranks, then copies the written stacks."""

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
from console.supervisor.inbox import Outcome, Request
from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, pulse, rundir
from trainers.contract.dumps import END_MARK, LAST_RESORT

WAIT_S = 2.0
"""A rank has this time to write its stack."""
COPY_S = 2.0
"""After `WAIT_S`, the disk has this time to write the copy."""
LAST_RESORT_AFTER_S = 1.0
MAX_DUMP_BYTES = 4 << 20
Answer = Callable[[Request, Outcome], None]


@dataclass(slots=True)
class _RankDump:
    """The state of the dump of one rank."""

    rank: int
    handle: process.Handle
    source: Path
    offset: int
    """The size of the rank's file before the rank was signalled."""
    position: tuple[int, str] | None
    """Step and phase in the rank's pulse before the signal; None if there is no pulse."""
    result: str = ""
    """The result in words, or "" until there is a result."""
    data: bytes = b""
    used_last_resort: bool | None = None
    """True if the signal `LAST_RESORT` was sent, False if not, None before the decision."""
    copy: str = ""
    """The path of the copy in the run directory, or "" before the copy begins."""


def why_not(pid: int) -> str:
    """Returns why a process cannot dump its stack, or "" if no reason is known."""
    state = process.state(pid)
    if state in ("Z", "X", process.GONE):
        return "has exited"
    if state in "Tt":
        return f"is stopped (SIGSTOP or a debugger) and cannot dump; kill -CONT {pid} resumes it"
    # A program may use SIGUSR1 itself, for example to save and exit; then it does not catch both.
    if not all(process.catches(pid, number) for number in (signal.SIGUSR1, LAST_RESORT)):
        why = "still starting, or not instrumented"
        return f"does not catch the dump signals ({why}) and was not signalled"
    return ""


class Dumps:
    """Owns the dump in progress, at most one, and the requests that wait for its end.

    Call `poll` while `busy` is true.
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._requests: list[Request] = []
        self._ranks: list[_RankDump] = []
        self._run = Path()
        self._live: Path | None = None
        self._unix_ms, self._began = 0, 0.0

    @property
    def busy(self) -> bool:
        return bool(self._ranks)

    def request(
        self, run: Path, live: Path | None, alive: Mapping[int, process.Handle], request: Request
    ) -> Outcome | None:
        """Starts a dump or joins the dump in progress. Returns an outcome only for a rejection."""
        rank = request.args.get("rank")
        wanted = sorted(alive) if rank is None else [rank]
        if rank is not None and rank not in alive:
            return False, f"rank {rank} is not running", []
        if self._ranks and not {each.rank for each in self._ranks} >= set(wanted):
            return False, "another dump is in progress; send the request again in 2 s", []
        self._requests.append(request)
        self.start(run, live, {each: alive[each] for each in wanted})
        return None

    def start(self, run: Path, live: Path | None, alive: Mapping[int, process.Handle]) -> None:
        """Signals the ranks that can dump, unless a dump is in progress."""
        if self._ranks:
            return
        self._run, self._live = run, live
        self._unix_ms, self._began = time.time_ns() // 1_000_000, time.monotonic()
        self._ranks = [self._signal(rank, handle) for rank, handle in sorted(alive.items())]

    def _signal(self, rank: int, handle: process.Handle) -> _RankDump:
        run, live = self._run, self._live
        source = rundir.live_stack(live, rank) if live else rundir.stackdump(run, rank)
        try:
            size, reason = _size(source), why_not(handle.pid)
        except OSError as error:
            size, reason = 0, f"has a stack file that cannot be read: {error.strerror}"
        found = _RankDump(rank, handle, source, size, _position(live, rank), reason)
        if not reason and not handle.send(signal.SIGUSR1):
            found.result = "has exited"
        return found

    def poll(self, answer: Answer) -> None:
        """Reads the ranks' stacks; answers the requests when each rank has a result."""
        waited_s = time.monotonic() - self._began
        for each in self._ranks:
            if not each.result:
                self._poll_rank(each, waited_s)
        if self._ranks and all(each.result for each in self._ranks):
            self._finish(answer)

    def abandon(self, answer: Answer) -> None:
        """Answers the requests that still wait, after the ranks have ended."""
        for each in self._ranks:
            late = _late(each) if each.copy else "exited before it wrote its stack"
            each.result = each.result or late
        self._finish(answer)

    def _poll_rank(self, each: _RankDump, waited_s: float) -> None:
        if each.copy:
            if waited_s > WAIT_S + COPY_S:
                each.result = _late(each)
            return
        each.data = jsonl.read_bytes(each.source, MAX_DUMP_BYTES, each.offset)
        is_whole = END_MARK.encode() in each.data and each.data.endswith(b"\n")
        if is_whole or waited_s > WAIT_S:
            self._copy(each, is_whole)
        elif waited_s > LAST_RESORT_AFTER_S and each.used_last_resort is None and not each.data:
            self._send_last_resort(each)

    def _send_last_resort(self, each: _RankDump) -> None:
        """Sends `LAST_RESORT`, whose handler needs no GIL, if the rank has not moved since SIGUSR1.

        The handler must not read frames while they change. The pulse must therefore be available
        and unchanged. The process must be in state R or S.
        """
        pid, position = each.handle.pid, _position(self._live, each.rank)
        is_still = position is not None and position == each.position
        can_dump = is_still and process.state(pid) in "RS" and not why_not(pid)
        each.used_last_resort = can_dump and each.handle.send(LAST_RESORT)

    def _copy(self, each: _RankDump, is_whole: bool) -> None:
        if not each.data:
            each.result = f"wrote no stack within {WAIT_S:g} s"
            return
        path = self._run / f"stackdump_rank{each.rank}_{self._unix_ms}.txt"
        each.copy = str(path)
        result = f"dumped: {each.copy}"
        if each.used_last_resort and b"=== rank" not in each.data:
            each.data = b"=== rank %d pid %d\n%b" % (each.rank, each.handle.pid, each.data)
            result += " (native code holds the GIL: only the main thread could be read)"
        elif not is_whole:
            result += f" (incomplete: the rest was not written within {WAIT_S:g} s)"
        data = each.data
        self._directory.reported_job(
            lambda: rundir.write_atomic(path, data), partial(_set_result, each, result), path
        )

    def _finish(self, answer: Answer) -> None:
        outcome = self._outcome()
        requests, self._requests, self._ranks = self._requests, [], []
        for request in requests:
            answer(request, outcome)

    def _outcome(self) -> Outcome:
        """Returns the outcome of the dump: success, a sentence, and the result of each rank."""
        detail = [f"rank {each.rank} {each.result}" for each in self._ranks]
        failed = [line for line in detail if " dumped: " not in line]
        dumped = len(detail) - len(failed)
        if not dumped:
            return False, f"no stack: {'; '.join(failed)}", detail
        return True, "; ".join([f"stacks of {counted(dumped, 'rank')} dumped", *failed]), detail


def _position(live: Path | None, rank: int) -> tuple[int, str] | None:
    found = pulse.read(rundir.pulse(live, rank)) if live else None
    return (found.step, found.phase) if found else None


def _late(each: _RankDump) -> str:
    return f"dumped: {each.copy} (not written to disk yet)"


def _set_result(each: _RankDump, result: str, reason: str) -> None:
    """Sets the result of a rank that has none; `reason` says why the copy failed, or is ""."""
    if not each.result:
        failure = f"was dumped, but {each.copy} cannot be written: {reason}"
        each.result = failure if reason else result


def _size(path: Path) -> int:
    """Returns the size of a file in bytes, or 0 if the file does not exist. Raises OSError."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
