"""Saves copied text or a traceback in a file of the user's state directory.

A copy is also saved in a file, because a terminal does not confirm OSC 52.
"""

from __future__ import annotations

from pathlib import Path

from trainers.contract import environ, rundir


def save(name: str, text: str) -> Path:
    """Writes a file into the user's state directory; returns its path. Raises OSError."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(state) / "nsa-console"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / name
    rundir.write_atomic(path, text + "\n")
    return path
