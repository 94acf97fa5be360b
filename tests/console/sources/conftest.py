"""Fixtures of the readers: a launch as a supervisor writes it, and its shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.sources import directory


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    path = directory.launch(tmp_path)
    directory.run(path / "0-first")
    return path


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A live directory, as a supervisor makes one."""
    live = Path(f"/dev/shm/nsa-console-test-{os.getpid()}")
    live.mkdir(mode=0o700, exist_ok=True)
    yield live
    shutil.rmtree(live)
