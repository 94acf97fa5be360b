"""The lock file of a launch. It contains the owner of the launch and a token of the ownership.

The flock shows whether the owner is alive; the token shows which owner it is. A copy of the
directory has the token but no flock, and another launch at the same path has another token.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from trainers.contract import jsonl, rundir

MAX_BYTES = 1 << 16


def token_of(launch: Path) -> str:
    """Returns the token in the lock file of a launch directory, or "" if there is none."""
    return jsonl.text(rundir.read_json(launch / rundir.LOCK, below=launch) or {}, "token")


def read(fd: int) -> dict[str, Any]:
    """Returns the owner in the lock file, or {} if the content is not valid. Raises OSError."""
    return jsonl.decode(os.pread(fd, MAX_BYTES, 0)) or {}


def claim(fd: int, launch: str, user: str) -> None:
    """Writes this process into the lock as its owner, with a new token. Raises OSError."""
    owner = {"user": user, "since_ts": time.time(), "launch": launch, "token": secrets.token_hex(8)}
    _write(fd, rundir.identity() | owner)


def _write(fd: int, record: dict[str, Any]) -> None:
    """Replaces the content in place, because the flock belongs to the file.

    One write replaces the whole content, so that readers do not see half of it.
    """
    data = jsonl.encode(record)
    old = min(os.fstat(fd).st_size, MAX_BYTES)
    # The write comes first: on a full disk, blocks freed by a truncation might be used by others.
    os.pwrite(fd, data.ljust(old), 0)
    os.ftruncate(fd, len(data))


class LaunchLock:
    """The lock of a launch that this process owns: its file, and the token in the file.

    The constructor writes this process into the file in place of the launcher. Raises OSError.
    """

    def __init__(self, launch: Path, fd: int):
        self._path, self._pid = launch / rundir.LOCK, os.getpid()
        owner = read(fd)
        _write(fd, owner | rundir.identity())
        self._file, self.token, self._lost = os.fstat(fd), jsonl.text(owner, "token"), ""
        self.since_ns = self._file.st_ctime_ns
        """The time at which this process took the lock, by the clock of the file system."""

    def lost(self) -> str:
        """Returns why the directory at the path no longer belongs to this launch, or ""."""
        try:
            same = os.path.samestat(os.stat(self._path), self._file)
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:  # the path cannot be read now, so the last result stays
            return self._lost
        if same:
            try:
                with jsonl.opened(self._path) as fd:
                    same = jsonl.text(read(fd), "token") == self.token
            except OSError:
                return self._lost
        self._lost = "" if same else (
            f"stop the run with kill -TERM {self._pid}, or move {self._path.parent} back: the "
            "directory was moved, replaced or removed (its lock is not this launch's), so the "
            "supervisor ignores requests and .HALT there and writes nothing there; .HALT in the "
            "run directory halts the ranks while the run directory is at its path"
        )  # fmt: skip
        return self._lost
