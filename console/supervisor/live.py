"""The memory-backed directory of one attempt, and the supervisor's sign of life in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.contract import jsonl, rundir


def create(token: str) -> Path | None:
    """Creates the live directory of an attempt; None where there is no shared memory."""
    path = rundir.SHARED_MEMORY / f"{rundir.LIVE_PREFIX}{os.geteuid()}-{token}"
    try:
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def remove(path: Path | None) -> None:
    """Removes the live directory; what is already gone is fine."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)


def write_status(path: Path | None, record: Mapping[str, Any]) -> None:
    """Replaces the supervisor's sign of life; shared memory that is full costs only this."""
    if path is None:
        return
    temporary = path / f".{rundir.LIVE_STATUS}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, jsonl.encode(record))
        finally:
            os.close(fd)
        temporary.replace(path / rundir.LIVE_STATUS)
    except OSError:
        return
