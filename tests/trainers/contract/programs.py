"""Programs that join a run by hand: their environment and their records."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.runs import ROOT, heartbeats
from trainers.contract import environ


def environment(run: Path, live: Path | None = None) -> dict[str, str]:
    named = {
        environ.RUN_DIR: str(run), environ.RUN_ID: "test/0-x", environ.ATTEMPT: "1", "RANK": "0",
        "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    return named | ({environ.LIVE_DIR: str(live)} if live else {})


def beats(run: Path) -> list[dict]:
    return heartbeats(run, 0)
