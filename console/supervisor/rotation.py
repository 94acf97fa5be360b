"""Bounds the logs of an attempt: each is copied aside and cut while its writer goes on.

Ranks and torchrun append (O_APPEND), so after the cut they write at the beginning. Only what they
write between the last byte copied and the cut is lost. `look` runs on the directory's thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import stat
import time
from pathlib import Path

from trainers.contract import jsonl

LOG_LIMIT = 64 << 20
KEPT = 2
"""How many former parts of a log are kept, `.1` the newest."""
RESERVE_BYTES = 64 << 20
"""What a copy leaves free on the disk: a checkpoint needs it more."""
MAX_CATCH_UP = 8
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
            if name in self._refused:
                return ""
            self._refused.add(name)
            return (
                f"{name} has grown too long and cannot be rotated ({error.strerror}); it grows on"
            )
        self._refused.discard(name)
        return text

    def _rotate(self, at: int, name: str) -> str:
        """Copies and cuts one log. Raises OSError, and then the log is as it was."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=at)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EMLINK, "it has a second name, a hard link")
            removed = self._make_room(at, name, min(status.st_size, self._longest))
            cut = self._copy_and_cut(at, name, fd)
        finally:
            os.close(fd)
        return f"{name} was cut; {name}.1 has what was in it: {cut}{removed}"

    def _make_room(self, at: int, name: str, size_bytes: int) -> str:
        """Removes the oldest kept part if the copy does not fit, once; says so.

        Raises OSError when there is no room for the copy and the reserve.
        """
        if _free_bytes(at) >= size_bytes + self._reserve:
            return ""
        oldest = next(
            (f"{name}.{age}" for age in range(KEPT, 0, -1) if _is_there(at, name, age)), ""
        )
        removed = ""
        if oldest and name not in self._refused:
            os.unlink(oldest, dir_fd=at)
            removed = f"; the older {oldest} was removed to make room"
        if _free_bytes(at) < size_bytes + self._reserve:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}{removed}")
        return removed

    def _copy_and_cut(self, at: int, name: str, fd: int) -> str:
        """Moves the content of an open log to `.1`, the former parts one further; says how much.

        The copy has its name before the cut, and then takes what came meanwhile.
        """
        temporary = f".{name}.copy"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(temporary, flags, 0o600, dir_fd=at)
        try:
            begun = looked = time.perf_counter()
            size = os.fstat(fd).st_size
            start = max(0, size - self._longest)
            copied = _copy(fd, out, start, size)
            for age in range(KEPT, 1, -1):
                if _is_there(at, name, age - 1):
                    os.rename(f"{name}.{age - 1}", f"{name}.{age}", src_dir_fd=at, dst_dir_fd=at)
            os.rename(temporary, f"{name}.1", src_dir_fd=at, dst_dir_fd=at)
            for _ in range(MAX_CATCH_UP):
                looked = time.perf_counter()
                end = os.fstat(fd).st_size
                if end <= copied:
                    break
                copied = _copy(fd, out, copied, end)
            missed = max(0, os.fstat(fd).st_size - copied)
            os.ftruncate(fd, 0)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=at)
            raise
        finally:
            os.close(out)
        rate = (copied - size) / max(looked - begun, 1e-6)
        lost = missed + math.ceil(rate * (time.perf_counter() - looked))
        text = f"{(copied - start) / MIB:.1f} MiB"
        text += f" without the first {start / MIB:.1f} MiB" if start else ""
        return text + (f", about {lost} bytes may be lost" if lost else ", no loss seen")


def _copy(fd: int, out: int, start: int, end: int) -> int:
    """Copies bytes from `start` to `end`; returns how far it came. Raises OSError."""
    while start < end:
        sent = os.sendfile(out, fd, start, min(CHUNK_BYTES, end - start))
        if sent == 0:
            break
        start += sent
    return start


def _is_there(at: int, name: str, age: int) -> bool:
    """Says whether a former part is there, whatever it is."""
    try:
        os.stat(f"{name}.{age}", dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _free_bytes(at: int) -> int:
    space = os.fstatvfs(at)
    return space.f_bavail * space.f_frsize
