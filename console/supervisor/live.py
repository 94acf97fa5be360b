"""The memory-backed directory of one attempt, and the supervisor's sign of life in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.sources import process
from trainers.contract import jsonl, pulse, rundir
from trainers.contract.errors import RefusedError


def _prefix() -> str:
    return f"{rundir.LIVE_PREFIX}{os.geteuid()}-"


class Live:
    """Owns the live directory of an attempt; `path` is None where there is no shared memory.

    A lock that ends with this process says that the directory has an owner. `adopt` takes over the
    directory of a supervisor that is gone; where there is none, the ranks have none either.
    """

    def __init__(self, token: str, adopt: bool = False):
        self._token, self._lock = token, -1
        self.path: Path | None = None
        self._open(adopt)

    def _open(self, adopt: bool) -> None:
        token = self._token
        try:
            self._take(rundir.SHARED_MEMORY / f"{_prefix()}{token}", adopt)
        except (OSError, RefusedError):
            self._unlock()

    def _take(self, path: Path, adopt: bool) -> None:
        """Makes the directory, or takes that of a supervisor that is gone; and locks it."""
        unready = path if adopt else path.with_name(f".{path.name}")
        if adopt:
            rundir.check_ours(path)
        else:
            unready.mkdir(mode=0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(unready, flags)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unready.rename(path)
        self.path = path

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def renew(self) -> None:
        """Empties the directory before the next attempt; makes it where somebody removed it."""
        self._clear()
        if self.path is None or not self.path.is_dir():
            self._unlock()
            self._open(adopt=False)

    def _clear(self) -> None:
        with contextlib.suppress(OSError):
            for path in self.path.iterdir() if self.path is not None else ():
                if path.name != rundir.LIVE_STATUS:
                    path.unlink()

    def remove(self) -> None:
        """Removes the directory; what is already gone is fine."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
        self._unlock()

    def write_status(self, record: Mapping[str, Any]) -> None:
        """Replaces the supervisor's sign of life; shared memory that is full costs only this."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                rundir.write_atomic(self.path / rundir.LIVE_STATUS, jsonl.encode(record))


def _beats(path: Path) -> bool:
    """Says whether a process of the pulses there lives: its token may be overwritten."""
    pulses = map(pulse.read, path.glob("pulse_rank*"))
    return any(each and process.state(each.pid) not in (process.GONE, "Z") for each in pulses)


def sweep() -> None:
    """Removes what killed supervisors of ours left behind, unless a rank of theirs still runs."""
    for path in rundir.SHARED_MEMORY.glob(f"{_prefix()}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (process.with_token(path.name.removeprefix(_prefix())) or _beats(path)):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(fd)
