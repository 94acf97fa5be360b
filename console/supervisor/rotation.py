"""Bounds the growing files of an attempt: rotates logs, splits samples into compressed parts.

Ranks and torchrun open logs with O_APPEND. After a log was copied to `.1` and truncated, they write
at its beginning. Bytes written between the copy and the truncation are lost.

`samples_H.jsonl` is always the newest part; `samples_H.jsonl.0001.gz` is the oldest.
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

from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, rundir

LOG_LIMIT = 64 << 20
MAX_FILES = 4096
CHUNK_BYTES = 1 << 20
LONGEST = 2
"""If a log is longer than this many times the limit, only its end is copied."""
MIB = 1 << 20
PART_BYTES, GZIP_LEVEL = 16 << 20, 6
POLL_EVERY_S = 5.0


class Rotation:
    """Rotates the logs of one folder (`rundir.logs`) that are longer than `limit_bytes`."""

    def __init__(self, folder: Path, limit_bytes: int = LOG_LIMIT):
        self._folder, self._limit = folder, limit_bytes
        self._failed: set[str] = set()

    def poll(self) -> str:
        """Rotates at most one long log; returns a sentence to report, or "".

        A poll rotates only one log, because its thread also has to read requests and records.
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
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise OSError(errno.EMLINK, "it has a second hard link")
            start = max(0, status.st_size - LONGEST * self._limit)
            _copy_and_truncate(at, name, fd, start, status.st_size)
        finally:
            os.close(fd)
        without = f" without the first {start / MIB:.1f} MiB" if start else ""
        return f"{name} was rotated: its content is in {name}.1{without}"


def _copy_and_truncate(at: int, name: str, fd: int, start: int, end: int) -> None:
    """Copies an open log from `start` on to `.1`, then truncates the log. Raises OSError."""
    temporary = f".{name}.copy"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=at)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(temporary, flags, 0o600, dir_fd=at)
    try:
        while start < end and (sent := os.sendfile(out, fd, start, CHUNK_BYTES)):
            start += sent
        os.rename(temporary, f"{name}.1", src_dir_fd=at, dst_dir_fd=at)
        os.ftruncate(fd, 0)
    finally:
        os.close(out)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=at)


def split(directory: Directory, path: Path, part_bytes: int = PART_BYTES) -> None:
    """Starts a new part of a file of records that is long enough, and compresses one older part.

    Runs on the thread of the run directory. If a compression was interrupted, the next call repeats
    it. Raises OSError.
    """
    parts = rundir.parts(path)
    if jsonl.size_bytes(path) >= part_bytes:
        number = max((number for number, _ in parts), default=0) + 1
        parts.append((number, rundir.part(path, number)))
        directory.set_aside(path, parts[-1][1])
    plain = [path for _, path in parts if path.suffix != rundir.GZIP]
    if plain:
        _compress(plain[0])


def _compress(part: Path) -> None:
    """Replaces a plain part by a compressed one; if that fails, the plain part remains."""
    whole = part.with_name(part.name + rundir.GZIP)
    half = part.with_name(f".{whole.name}.tmp")
    try:
        with part.open("rb") as plain, half.open("wb") as out:
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
    """Bounds the logs and samples of one attempt, on the thread of the run directory."""

    def __init__(self, directory: Directory, run: Path, attempt: int, samples: Path):
        self._directory, self._run, self._samples = directory, run, samples
        self._rotation, self._due_at = Rotation(rundir.logs(run, attempt)), 0.0

    def poll(self, event: Callable[..., object]) -> None:
        """Starts the job if it is due and not running; reports its result by calling `event`."""
        if time.monotonic() >= self._due_at:
            self._due_at = math.inf
            self._directory.job(self._run_job, partial(self._report, event), self._run)

    def _run_job(self) -> str:
        split(self._directory, self._samples)
        return self._rotation.poll()

    def _report(self, event: Callable[..., object], text: str | None, _: object) -> None:
        self._due_at = time.monotonic() + POLL_EVERY_S
        if text:
            event("note", text, "warn")
