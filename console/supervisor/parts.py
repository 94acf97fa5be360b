"""Bounds the growing files of an attempt: rotates logs, and splits samples into compressed parts.

`samples_H.jsonl` is always the newest part; `samples_H.jsonl.0001.gz` is the oldest.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from console.supervisor.rotation import Rotation
from console.supervisor.rundir_io import Directory
from trainers.contract import jsonl, rundir

PART_BYTES = 16 << 20
CHUNK_BYTES, LEVEL = 1 << 18, 6
POLL_EVERY_S = 5.0


class Parts:
    """Owns the parts of one file of records; `poll` runs on the directory's thread.

    One part at a time is compressed in a separate thread, so that a hung disk blocks only that. The
    next poll repeats a compression that was interrupted.
    """

    def __init__(self, directory: Directory, path: Path, part_bytes: int = PART_BYTES):
        self._directory, self._path, self._part_bytes = directory, path, part_bytes
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        """Starts a new part when the current one is long enough. Raises OSError."""
        if jsonl.size_bytes(self._path) >= self._part_bytes:
            numbers = [number for number, _ in rundir.parts(self._path)]
            part = rundir.part(self._path, max(numbers, default=0) + 1)
            self._directory.set_aside(self._path, part)
        if self._thread is not None and self._thread.is_alive():
            return
        plain = [path for _, path in rundir.parts(self._path) if path.suffix != rundir.GZIP]
        if plain:
            self._thread = threading.Thread(
                target=self._compress, args=(plain[0],), name="parts", daemon=True
            )
            self._thread.start()

    def _compress(self, part: Path) -> None:
        """Replaces the plain part by a compressed one; on a full disk the plain part stays."""
        whole = part.with_name(part.name + rundir.GZIP)
        half = part.with_name(f".{whole.name}.tmp")
        try:
            with part.open("rb") as plain, half.open("wb") as out:
                with gzip.GzipFile("", "wb", LEVEL, out) as packed:
                    shutil.copyfileobj(plain, packed, CHUNK_BYTES)
                out.flush()
                os.fsync(out.fileno())
            half.replace(whole)
            part.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)


class Upkeep:
    """Bounds the logs and samples of one attempt, on the directory's thread."""

    def __init__(self, directory: Directory, run: Path, attempt: int, samples: Path):
        self._directory, self._run, self._due_at = directory, run, 0.0
        self._rotation, self._parts = Rotation(rundir.logs(run, attempt)), Parts(directory, samples)

    def poll(self, event: Callable[..., object]) -> None:
        """Starts a job if it is due, one at a time; calls `event` with each sentence to report."""
        if time.monotonic() >= self._due_at:
            self._due_at = math.inf
            self._directory.job(self._run_job, partial(self._report, event), self._run)

    def _run_job(self) -> Sequence[str]:
        self._parts.poll()
        return self._rotation.poll()

    def _report(
        self, event: Callable[..., object], found: Sequence[str] | None, _: object
    ) -> None:  # fmt: skip
        self._due_at = time.monotonic() + POLL_EVERY_S
        for sentence in found or ():
            event("note", sentence, "warn")
