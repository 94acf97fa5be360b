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
from trainers.contract import jsonl, rundir


def _prefix() -> str:
    return f"{rundir.LIVE_PREFIX}{os.geteuid()}-"


class Live:
    """Owns the live directory of an attempt; `path` is None where there is no shared memory.

    A lock that ends with this process says that the directory has an owner. `adopt` takes over the
    directory of a supervisor that is gone; where there is none, the ranks have none either.
    """

    def __init__(self, token: str, adopt: bool = False):
        self._lock = -1
        self.path: Path | None = rundir.SHARED_MEMORY / f"{_prefix()}{token}"
        unready = self.path if adopt else self.path.with_name(f".{self.path.name}")
        try:
            if not adopt:
                unready.mkdir(mode=0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(unready, flags)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unready.rename(self.path)
        except OSError:
            self.remove()

    def clear(self) -> None:
        """Removes what the ranks of an attempt left, before the next begins."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir() if self.path is not None else ():
                if path.name != rundir.LIVE_STATUS:
                    path.unlink()

    def remove(self) -> None:
        """Removes the directory; what is already gone is fine."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_status(self, record: Mapping[str, Any]) -> None:
        """Replaces the supervisor's sign of life; shared memory that is full costs only this."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                rundir.write_atomic(self.path / rundir.LIVE_STATUS, jsonl.encode(record))


def sweep() -> None:
    """Removes what killed supervisors of ours left behind, unless a rank of theirs still runs."""
    for path in rundir.SHARED_MEMORY.glob(f"{_prefix()}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not process.with_token(path.name.removeprefix(_prefix())):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(fd)
