"""Files that are left in a run directory for the ranks to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from console.supervisor.directory import Directory, Job
from trainers.contract import rundir

Done = Callable[[str], object]
"""Takes why the file could not be written, "" when it was."""


class Asks:
    """Owns what is being written; `poll` tells who waits for it."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self._open: list[tuple[Job[None], str, Done]] = []

    def leave(self, run: Path, name: str, by: str, done: Done) -> None:
        """Leaves a file, `.HALT` or one of `rundir.ASKS`, and tells `done` when it is there."""
        job = self._directory.job(lambda: rundir.ask(run, name, by))
        self._open.append((job, name, done))

    def poll(self) -> None:
        """Tells of what has been written, or could not be."""
        ready = [each for each in self._open if each[0].done]
        self._open = [each for each in self._open if not each[0].done]
        for job, name, done in ready:
            reason = getattr(job.error, "strerror", None) or job.error
            done(f"cannot write {name}: {reason}; the ranks go on" if reason else "")
