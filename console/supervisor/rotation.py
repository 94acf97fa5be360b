"""Rotates the logs of an attempt while ranks write to them: copies a long log, then truncates it.

Ranks and torchrun append (O_APPEND), so they write at the beginning after the log is truncated. One
former part is stored as `.1`. Bytes written between the copy and the truncation are lost.
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
"""Free space that a copy leaves on the disk, for a checkpoint."""
MAX_FILES = 4096
CHUNK_BYTES = 1 << 20
LONGEST = 2
"""Of a log that is longer than this many limits, only the end is copied."""
MIB = 1 << 20


class Rotation:
    """Rotates the logs of one folder (`rundir.logs`) that are longer than `limit_bytes`."""

    def __init__(
        self, folder: Path, limit_bytes: int = LOG_LIMIT, reserve_bytes: int = RESERVE_BYTES
    ):
        self._folder, self._limit, self._reserve = folder, limit_bytes, reserve_bytes
        self._longest = LONGEST * limit_bytes
        self._failed: set[str] = set()

    def poll(self) -> list[str]:
        """Rotates at most one long log; returns a sentence to report, or [].

        Only one a poll, because the directory's thread also has to read requests and records.
        """
        at = jsonl.open_inside(self._folder, self._folder.parents[1])
        if at is None:
            return []
        try:
            names = [name for name in os.listdir(at)[:MAX_FILES] if name.endswith(".log")]
            found = (self._try(at, name) for name in sorted(names))
            return list(itertools.islice(filter(None, found), 1))
        except OSError:
            return []
        finally:
            os.close(at)

    def _try(self, at: int, name: str) -> str:
        """Rotates one log if it is too long; returns a sentence to report, or ""."""
        try:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size <= self._limit:
                return ""
            text = self._rotate(at, name)
        except OSError as error:
            if name in self._failed:
                return ""
            self._failed.add(name)
            return f"{name} is too long and cannot be rotated ({error.strerror}); it keeps growing"
        self._failed.discard(name)
        return text

    def _rotate(self, at: int, name: str) -> str:
        """Copies and truncates one log. Raises OSError; the log is unchanged then."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=at)
        try:
            status, space = os.fstat(fd), os.fstatvfs(at)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EMLINK, "it has a second hard link")
            start = max(0, status.st_size - self._longest)
            if space.f_bavail * space.f_frsize < status.st_size - start + self._reserve:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._copy_and_truncate(at, name, fd, start)
        finally:
            os.close(fd)
        without = f" without the first {start / MIB:.1f} MiB" if start else ""
        return f"{name} was rotated: its content is in {name}.1{without}"

    def _copy_and_truncate(self, at: int, name: str, fd: int, start: int) -> None:
        """Moves the content of an open log to `.1`.

        The copy gets its name before the log is truncated, and then the bytes written meanwhile.
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
    """Copies bytes from `start` to the end of the file, at most to `end`; returns its end."""
    while start < end and (sent := os.sendfile(out, fd, start, CHUNK_BYTES)):
        start += sent
    return start
