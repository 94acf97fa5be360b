"""Fixtures of the readers: a launch and its shared memory, and processes to read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.console.sources import directory


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    path = directory.launch(tmp_path)
    directory.run(path / "0-first")
    return path


@pytest.fixture
def run(launch: Path) -> Path:
    """Returns the first run of the launch."""
    return launch / "0-first"


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A live directory, as a supervisor makes one."""
    live = Path(f"/dev/shm/nsa-console-test-{os.getpid()}")
    live.mkdir(mode=0o700, exist_ok=True)
    yield live
    shutil.rmtree(live)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python programs; after the test, kills the process groups of those that remain."""
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(child)
        return child

    yield run
    for child in reversed(started):  # a tracer ends before the process that it traces
        os.killpg(child.pid, signal.SIGKILL) if child.returncode is None else None
        child.wait()
        child.stdout.close()
