"""Creates, reads and removes the live directory of an attempt, which is in shared memory.

The directory has the pulses, the stacks, the halt board and the supervisor heartbeat. `sweep`
removes the live directories of dead supervisors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from console import access
from console.sources import process
from console.supervisor.alerts import Alerts
from trainers.contract import halt_board, jsonl, pulse, rundir
from trainers.contract.errors import RefusedError

SWEPT_AFTER_S, NO_MEMORY = 86_400.0, "live-directory"
NO_ACTION = "no watch rule halts, stops or restarts the run on a stall"


def _prefix() -> str:
    return f"{rundir.LIVE_PREFIX}{os.geteuid()}-"


class Live:
    """Owns the live directory of an attempt; `path` is None while no directory is in use.

    A lock marks the directory as owned until this process ends. The files of all ranks are created
    before the ranks start, so that either all ranks have files or none has. With `adopt`, the
    directory of a former process is opened.

    Pulses are read through open descriptors. logind with `RemoveIPC=yes` removes the names at
    logout, but the ranks still write to the files.
    """

    def __init__(self, token: str, nproc: int, attempt: int, run: Path, adopt: bool = False):
        self._name, self._nproc, self._run = f"{_prefix()}{token}", nproc, run
        self._home: rundir.OpenDirectory | None = None
        """The locked directory."""
        self._pulses: dict[int, int] = {}
        """The descriptor of each rank's pulse."""
        self.path: Path | None = None
        self.why = ""
        """Why the directory could not be created or opened, or ""."""
        self._open(attempt, adopt)

    def missing_words(self) -> str:
        """Returns why there is no shared memory, and what follows from it."""
        return (f"cannot write to {rundir.SHARED_MEMORY} ({self.why}): the ranks write their "
                f"pulses to the run directory, four times a second, and {NO_ACTION}; free shared "
                "memory (in a container: larger --shm-size)")  # fmt: skip

    def _open(self, attempt: int, adopt: bool) -> None:
        self.why, path = "", rundir.SHARED_MEMORY / self._name
        unready = path if adopt else path.with_name(f".{self._name}")
        try:
            if adopt:
                access.check_ours(path)
            else:
                rundir.remove_tree(unready)  # of a process that was killed here
                unready.mkdir(mode=0o700)
            self._home = rundir.OpenDirectory(unready)
            # With `adopt`, only `sweep` can have the lock, because the former process is dead.
            fcntl.flock(self._home.fd, fcntl.LOCK_EX | (0 if adopt else fcntl.LOCK_NB))
            if not adopt:
                self._create_files(unready, attempt)
            self._open_pulses(unready)
            self.path = self._home.path = unready.rename(path)
        except (OSError, RefusedError) as error:
            self.why = getattr(error, "strerror", None) or str(error)
            self._unlock()
            if not adopt:
                rundir.remove_tree(unready)

    def _create_files(self, folder: Path, attempt: int) -> None:
        """Creates the ranks' files and the halt board. Raises OSError, also if memory is full."""
        board = rundir.halt_board(folder, attempt)
        pulse.mapped(board, halt_board.size_bytes(self._nproc)).close()
        for rank in range(self._nproc):
            pulse.mapped(rundir.pulse(folder, rank), pulse.SIZE_BYTES).close()
            os.close(rundir.open_append(rundir.live_stack(folder, rank)))

    def _open_pulses(self, folder: Path) -> None:
        for rank in range(self._nproc):
            fd = jsonl.open_regular(rundir.pulse(folder, rank))
            if fd is not None:
                self._pulses[rank] = fd

    def pulse(self, rank: int) -> pulse.Pulse | None:
        """Returns the pulse of a rank, or None if the pulse is not available."""
        if self.is_copy(rank):
            return pulse.read(rundir.pulse(self._run, rank))
        fd = self._pulses.get(rank)
        return None if fd is None else pulse.read_open(fd)

    def is_copy(self, rank: int) -> bool:
        """Returns whether the pulse of a rank is a copy in the run directory, which may be late.

        The reason is that there is no shared memory, or that it was removed before the rank opened
        its file.
        """
        return self.path is None or (self._has_blank(rank) and self.is_removed())

    def is_blank(self, rank: int) -> bool:
        """Returns whether a rank could use its file for the pulse but never wrote a pulse."""
        return self._has_blank(rank) and not self.is_removed()

    def _has_blank(self, rank: int) -> bool:
        fd = self._pulses.get(rank)
        return fd is not None and pulse.is_blank(fd)

    def is_removed(self) -> bool:
        """Returns whether the directory in use was removed or replaced."""
        return self._home is not None and not self._home.is_there()

    def watch(self, alerts: Alerts) -> None:
        """Raises an alert if the directory was removed; clears it if there is a directory."""
        if self.is_removed():
            then = f", and {NO_ACTION}" if any(map(self.is_copy, self._pulses)) else ""
            alerts.raise_(
                NO_MEMORY, f"shared memory {self.path} was removed during the run "
                "(RemoveIPC=yes at a logout?): stack dumps are not available until the next "
                f"attempt{then}; run loginctl enable-linger", "warn",
            )  # fmt: skip
        elif self.path is not None:
            alerts.clear(NO_MEMORY, "the run has shared memory again")

    def _unlock(self) -> None:
        for fd in self._pulses.values():
            os.close(fd)
        self._pulses.clear()
        if self._home is not None:
            self._home.close()
            self._home = None

    def renew(self, attempt: int) -> None:
        """Replaces the directory with a new directory, for the next attempt."""
        self.remove()
        self._open(attempt, adopt=False)

    def remove(self) -> None:
        """Removes the directory, unless another directory is at its path."""
        if self.path is not None:
            if not self.is_removed():
                rundir.remove_tree(self.path)
            self.path = None
        self._unlock()

    def write_status(self, record: Mapping[str, Any]) -> None:
        """Replaces the supervisor heartbeat if the directory exists; ignores a failed write."""
        if self.path is not None and not self.is_removed():
            with contextlib.suppress(OSError):
                rundir.write_atomic(self.path / rundir.LIVE_STATUS, jsonl.encode(record))


class LastPulses:
    """Reads the pulse of each rank that has ended, because the rank's last records may be lost.

    Calls `add` at most once for each rank. `add` gets the pulse, or None if the rank wrote none. It
    does not get a late copy of a killed rank's pulse, because the rank may have later records.
    """

    def __init__(self, live: Live, add: Callable[[int, pulse.Pulse | None], object]):
        self._live, self._add = live, add
        self._found: dict[int, pulse.Pulse | None] = {}

    def step(self, rank: int, pid: int) -> int:
        """Returns the last step of an ended rank, or 0 if there is no pulse of that process."""
        if rank not in self._found:
            found = self._live.pulse(rank)
            self._found[rank] = found = found if found is not None and found.pid == pid else None
            if found is not None and (found.phase == "exit" or not self._live.is_copy(rank)):
                self._add(rank, found)
        last = self._found[rank]
        return last.step if last is not None else 0

    def phase(self, rank: int, step: int) -> str:
        """Returns the phase in which a rank ended, or "" if no pulse of `step` shows it."""
        last = self._found.get(rank)
        if last is None or last.step != step or last.phase in ("step", "exit"):
            return ""
        return last.phase

    @property
    def newest(self) -> int:
        """The highest last step of the ended ranks, or 0 if there is no pulse."""
        return max((last.step for last in self._found.values() if last is not None), default=0)

    def read_all(self, pids: Mapping[int, int], world: int) -> None:
        """Reads the pulses of the ranks in `pids`; finds the ranks that wrote no pulse.

        Such a rank wrote no record. `add` gets None, so that no record of it counts as missing.
        """
        for rank, pid in pids.items():
            self.step(rank, pid)
        for rank in range(world):
            if self._found.get(rank) is None and self._live.is_blank(rank):
                self._add(rank, None)


def _is_used(path: Path) -> bool:
    """Returns whether a process that has a pulse here is alive.

    `process.with_token` does not find a process that has overwritten its environment.
    """
    pulses = map(pulse.read, path.glob("pulse_rank*"))
    return any(each and process.state(each.pid) not in (process.GONE, "Z") for each in pulses)


def sweep(after_s: float = SWEPT_AFTER_S) -> None:
    """Removes the live directories of dead supervisors of this user if their ranks have ended.

    A directory remains for `after_s` after its last change. Until then, its pulses are a second
    source on how the ranks ended.
    """
    for path in rundir.SHARED_MEMORY.glob(f"*{_prefix()}*"):  # with a "." while it is made
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if abs(time.time() - os.fstat(fd).st_mtime) < after_s:
                continue
            if not (process.with_token(path.name.rpartition("-")[2]) or _is_used(path)):
                rundir.remove_tree(path)
        except OSError:
            continue
        finally:
            os.close(fd)
