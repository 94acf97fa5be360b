"""Rotates the logs of an attempt; splits the samples of a run, and compresses the older parts.

The logs of ranks and torchrun are opened with O_APPEND. A log that was copied to `.1` and truncated
is therefore continued at its beginning. Bytes that were not copied before the truncation are lost.

`samples_H.jsonl` of host H is the newest part. `samples_H.jsonl.0001` is the oldest part; its name
ends with `.gz` when it is compressed.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import math
import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path

from console.sources import record_files
from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, rundir

LOG_LIMIT = 64 << 20
RESERVE_BYTES = 64 << 20
"""A log is copied only if this much space stays free on the disk afterwards, for a checkpoint."""
CHUNK_BYTES = 1 << 20
LONGEST = 2
"""If a log is longer than this many times the limit, only its end is copied."""
MIB = 1 << 20
PART_BYTES, GZIP_LEVEL = 16 << 20, 6
POLL_EVERY_S = 5.0


class Rotation:
    """Rotates logs in one folder (`rundir.logs`) that are longer than `limit_bytes`."""

    def __init__(
        self, folder: Path, limit_bytes: int = LOG_LIMIT, reserve_bytes: int = RESERVE_BYTES
    ):
        self._folder, self._limit, self._reserve = folder, limit_bytes, reserve_bytes
        self._longest = LONGEST * limit_bytes
        self._last = folder
        """The log that was rotated last."""
        self._failed: set[Path] = set()

    def poll(self) -> str:
        """Rotates at most one long log; returns a sentence to report, or "".

        A poll rotates only one log, because the thread also has to read requests and records. The
        long logs take turns, in the order of their names.
        """
        if self._folder.is_symlink():
            return ""
        logs = sorted(self._folder.glob("*.log"))
        turn = bisect_right(logs, self._last)
        long = (path for path in logs[turn:] + logs[:turn] if jsonl.size_bytes(path) > self._limit)
        return next(filter(None, map(self._try, long)), "")

    def _try(self, path: Path) -> str:
        """Rotates one log; returns a sentence to report, or ""."""
        try:
            start = self._rotate(path)
        except OSError as error:
            if path in self._failed:
                return ""
            self._failed.add(path)
            why = f"cannot be rotated ({error.strerror}); it keeps growing"
            return f"{path.name} is too long and {why}"
        self._failed.discard(path)
        self._last = path
        without = f" without the first {start / MIB:.1f} MiB" if start else ""
        return f"{path.name} was rotated: its content is in {path.name}.1{without}"

    def _rotate(self, path: Path) -> int:
        """Moves a log to `.1`; returns the offset where the copy begins (0, or more if it is long).

        The log is copied, and the copy is renamed to `.1`. Bytes written during the copying are
        added to the copy, up to a limit. Then the log is truncated. Raises OSError; the log is
        then unchanged.
        """
        copy = path.with_name(f".{path.name}.copy")
        copy.unlink(missing_ok=True)
        try:
            with path.open("r+b") as log, open(copy, "xb", opener=_private) as out:
                size = os.fstat(log.fileno()).st_size
                start = max(0, size - self._longest)
                most = start + 2 * self._longest
                if shutil.disk_usage(self._folder).free < size - start + self._reserve:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                end = _copy(log.fileno(), out.fileno(), start, most)
                copy.rename(record_files.rotated_log(path))
                _copy(log.fileno(), out.fileno(), end, most)
                os.ftruncate(log.fileno(), 0)
        finally:
            copy.unlink(missing_ok=True)
        return start


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
    half.unlink(missing_ok=True)
    try:
        with part.open("rb") as plain, half.open("xb") as out:
            with gzip.GzipFile("", "wb", GZIP_LEVEL, out) as packed:
                shutil.copyfileobj(plain, packed, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
        half.replace(whole)
    finally:
        half.unlink(missing_ok=True)
    part.unlink()


class Upkeep:
    """Rotates an attempt's logs and splits the run's samples, on the thread of the directory."""

    def __init__(self, directory: Directory, run: Path, attempt: int, samples: Path):
        self._directory, self._run, self._due_at = directory, run, 0.0
        self._rotation, self._samples = Rotation(rundir.logs(run, attempt)), samples

    def poll(self, event: Callable[..., object]) -> None:
        """Queues the job if it is due and not in progress; a report then goes to `event`."""
        if time.monotonic() >= self._due_at:
            self._due_at = math.inf
            self._directory.job(self._run_job, partial(self._report, event), self._run)

    def _run_job(self) -> str:
        with contextlib.suppress(OSError):  # for example, the disk is full
            divide(self._directory, self._samples)
        return self._rotation.poll()

    def _report(self, event: Callable[..., object], text: str | None, _: object) -> None:
        self._due_at = time.monotonic() + POLL_EVERY_S
        if text:
            event("note", text, "warn")
