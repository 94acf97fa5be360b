"""Bounds the logs of an attempt: each is copied aside and cut while its writer goes on.

Ranks and torchrun append (O_APPEND), so after the cut they write at the beginning. One former part
is kept, `.1`. What they write between the last byte copied and the cut is lost. `look` runs on the
directory's thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from pathlib import Path

from trainers.contract import jsonl

LOG_LIMIT = 64 << 20
RESERVE_BYTES = 64 << 20
"""A copy leaves this much free on the disk, for a checkpoint."""
MAX_FILES = 4096
CHUNK_BYTES = 1 << 20
LONGEST = 2
"""A log that grew beyond so many limits between two looks loses its beginning."""
MIB = 1 << 20


class Rotation:
    """Rotates the logs in one folder (`rundir.logs`) that are longer than `limit_bytes`."""

    def __init__(
        self, folder: Path, limit_bytes: int = LOG_LIMIT, reserve_bytes: int = RESERVE_BYTES
    ):
        self._folder, self._limit, self._reserve = folder, limit_bytes, reserve_bytes
        self._longest = LONGEST * limit_bytes
        self._refused: set[str] = set()

    def look(self) -> list[str]:
        """Rotates one log that has grown too long; returns a sentence for what is to be told.

        One a look: the thread that copies has requests and records to take as well.
        """
        at = jsonl.open_inside(self._folder, self._folder.parents[1])
        if at is None:
            return []
        try:
            names = [name for name in os.listdir(at)[:MAX_FILES] if name.endswith(".log")]
            found = (self._look_at(at, name) for name in sorted(names))
            return list(itertools.islice(filter(None, found), 1))
        except OSError:
            return []
        finally:
            os.close(at)

    def _look_at(self, at: int, name: str) -> str:
        """Rotates one file if it must be; "" when there is nothing to tell."""
        try:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size <= self._limit:
                return ""
            text = self._rotate(at, name)
        except OSError as error:
            text = (
                f"{name} has grown too long and cannot be rotated ({error.strerror}); it grows on"
            )
            text = "" if name in self._refused else text
            self._refused.add(name)
        else:
            self._refused.discard(name)
        return text

    def _rotate(self, at: int, name: str) -> str:
        """Copies and cuts one log. Raises OSError, and then the log is as it was."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=at)
        try:
            status, space = os.fstat(fd), os.fstatvfs(at)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EMLINK, "it has a second name, a hard link")
            start = max(0, status.st_size - self._longest)
            if space.f_bavail * space.f_frsize < status.st_size - start + self._reserve:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._copy_and_cut(at, name, fd, start)
        finally:
            os.close(fd)
        without = f" without the first {start / MIB:.1f} MiB" if start else ""
        return f"{name} was cut; {name}.1 has what was in it{without}"

    def _copy_and_cut(self, at: int, name: str, fd: int, start: int) -> None:
        """Moves the content of an open log to `.1`.

        The copy has its name before the cut, and then takes what came meanwhile.
        """
        temporary = f".{name}.copy"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(temporary, flags, 0o600, dir_fd=at)
        try:
            end = _copy(fd, out, start, start + 2 * self._longest)
            os.rename(temporary, f"{name}.1", src_dir_fd=at, dst_dir_fd=at)
            _copy(fd, out, end, start + 2 * self._longest)
            os.ftruncate(fd, 0)
        finally:
            os.close(out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=at)


def _copy(fd: int, out: int, start: int, end: int) -> int:
    """Copies what is there and what comes meanwhile, not beyond `end`; returns how far it came."""
    while start < end and (sent := os.sendfile(out, fd, start, CHUNK_BYTES)):
        start += sent
    return start
