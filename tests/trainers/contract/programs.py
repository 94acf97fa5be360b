"""Programs that join a run by hand: their environment and their records."""

from __future__ import annotations

import time
from pathlib import Path

from tests.trainers.runs import ROOT, heartbeats
from trainers.contract import environ


def environment(run: Path, live: Path | None = None) -> dict[str, str]:
    named = {
        environ.RUN_DIR: str(run), environ.RUN_ID: "test/0-x", environ.ATTEMPT: "1", "RANK": "0",
        "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    return named | ({environ.LIVE_DIR: str(live)} if live else {})


def wait_for(condition, seconds: float = 150.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"the condition was not true within {seconds:g} s")


def beats(run: Path) -> list[dict]:
    return heartbeats(run, 0)
