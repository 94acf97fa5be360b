"""Rotates the logs of an attempt, and splits its samples into compressed parts.

Ranks and torchrun open logs with O_APPEND. They therefore write at the beginning of a log after the
log was copied to `.1` and truncated. Bytes written between the end of the copy and the truncation
are lost.

`samples_H.jsonl` of host H is the newest part; `samples_H.jsonl.0001.gz` is the oldest part.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import math
import os
import shutil
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from console.sources import record_files
from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, rundir

LOG_LIMIT = 64 << 20
RESERVE_BYTES = 64 << 20
"""Free space that a copy leaves on the disk, for a checkpoint."""
MAX_FILES = 4096
CHUNK_BYTES = 1 << 20
LONGEST = 2
"""If a log is longer than this many times the limit, only its end is copied."""
MIB = 1 << 20
PART_BYTES, GZIP_LEVEL = 16 << 20, 6
POLL_EVERY_S = 5.0


class Rotation:
    """Rotates the logs of one folder (`rundir.logs`) that are longer than `limit_bytes`."""

    def __init__(
        self, folder: Path, limit_bytes: int = LOG_LIMIT, reserve_bytes: int = RESERVE_BYTES
    ):
        self._folder, self._limit, self._reserve = folder, limit_bytes, reserve_bytes
        self._longest = LONGEST * limit_bytes
        self._failed: set[str] = set()

    def poll(self) -> str:
        """Rotates at most one long log; returns a sentence to report, or "".

        A poll rotates only one log, because the thread also has to read requests and records.
        """
        at = jsonl.open_inside(self._folder, self._folder.parents[1])
        if at is None:
            return ""
        try:
            names = [name for name in os.listdir(at)[:MAX_FILES] if name.endswith(".log")]
            return next(filter(None, (self._try(at, name) for name in sorted(names))), "")
        except OSError:
            return ""
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
        """Copies and truncates one log. Raises OSError; in that case the log is unchanged."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=at)
        try:
            status, space = os.fstat(fd), os.fstatvfs(at)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EMLINK, "it is not a regular file with one hard link")
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

        The log is copied, and the copy is renamed. Bytes written during the copying are added.
        Then the log is truncated.
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
    """Copies the bytes from `start` to about `end`; returns the offset where it stopped."""
    while start < end and (sent := os.sendfile(out, fd, start, CHUNK_BYTES)):
        start += sent
    return start


def divide(directory: Directory, path: Path, part_bytes: int = PART_BYTES) -> None:
    """Starts a new part of a file of records if the current part is long enough.

    Also compresses at most one older part. Runs on the thread of the run directory. Raises OSError.
    """
    if jsonl.size_bytes(path) >= part_bytes:
        numbers = [number for number, _ in record_files.parts(path)]
        directory.set_aside(path, record_files.part(path, max(numbers, default=0) + 1))
    plain = (path for _, path in record_files.parts(path) if path.suffix != record_files.GZIP)
    if part := next(filter(jsonl.size_bytes, plain), None):
        _compress(part)


def _compress(part: Path) -> None:
    """Replaces a plain part by a compressed part; if that fails, the plain part remains."""
    whole = part.with_name(part.name + record_files.GZIP)
    half = part.with_name(f".{whole.name}.tmp")
    try:
        half.unlink(missing_ok=True)
        with (
            jsonl.opened(part) as fd,
            open(fd, "rb", closefd=False) as plain,
            half.open("xb") as out,
        ):
            with gzip.GzipFile("", "wb", GZIP_LEVEL, out) as packed:
                shutil.copyfileobj(plain, packed, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        half.replace(whole)
        part.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


class Upkeep:
    """Rotates the logs and splits the samples of one attempt, on the thread of the directory."""

    def __init__(self, directory: Directory, run: Path, attempt: int, samples: Path):
        self._directory, self._run, self._due_at = directory, run, 0.0
        self._rotation, self._samples = Rotation(rundir.logs(run, attempt)), samples

    def poll(self, event: Callable[..., object]) -> None:
        """Starts the job if it is due and not running; reports its result by calling `event`."""
        if time.monotonic() >= self._due_at:
            self._due_at = math.inf
            self._directory.job(self._run_job, partial(self._report, event), self._run)

    def _run_job(self) -> str:
        divide(self._directory, self._samples)
        return self._rotation.poll()

    def _report(self, event: Callable[..., object], text: str | None, _: object) -> None:
        self._due_at = time.monotonic() + POLL_EVERY_S
        if text:
            event("note", text, "warn")
