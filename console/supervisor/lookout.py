"""What others write into a launch, looked for in time: requests, and the files of its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from console.supervisor import requests
from console.supervisor.attempt import Attempt
from console.supervisor.directory import Directory, Job
from console.supervisor.requests import Request
from trainers.contract import rundir

SETTLED_S = 2.0
"""For so long after a change mailboxes are read at each look: another one may have come in the same
tick of the directory's clock."""


class Lookout:
    """Owns the looks, never two at once; each runs on the directory's thread.

    One is due once a second, then at heartbeats too, and at once when a file that is watched, or a
    mailbox, has another stamp; without that no mailbox is read that was empty.
    """

    def __init__(self, directory: Directory, launch: Path):
        self._directory, self._launch = directory, launch
        self._watched: list[Path] = []
        self._stamps: list[object] = []
        self._look: Job[list[Request]] | None = None
        self._looked = self._beat = self._changed_at = 0.0
        directory.watch(self._glance)

    @property
    def under_way(self) -> bool:
        return self._look is not None

    def take(self) -> list[Request] | None:
        """Returns the requests that the last look found, None before it is done."""
        if self._look is None or not self._look.done:
            return None
        ended, self._look = self._look, None
        return [] if isinstance(ended.error, OSError) else ended.value

    def begin(self, runs: Sequence[Path], attempt: Attempt | None, every_s: float) -> bool:
        """Begins a look if one is due, or the last is so long ago; says whether it did.

        `runs` are those that there have been, `attempt` the present one.
        """
        now, changed = time.monotonic(), self._directory.changed
        second = int(now) != int(self._beat)
        due = second or changed or now - self._looked >= every_s
        if self._look is not None or not due:
            return False
        self._looked, self._directory.changed = now, False
        heartbeats = second or (attempt is not None and attempt.behind)
        self._beat = now if heartbeats else self._beat
        folders = (self._launch, *runs)
        files = attempt.files.watched if attempt is not None else ()
        self._watched = [*(folder / rundir.REQUESTS for folder in folders), *files]
        at = attempt if attempt is not None and attempt.stage in ("run", "over") else None

        def look() -> list[Request]:
            self._directory.looked()
            self._glance()
            found: list[Request] = []
            settled = time.monotonic() - self._changed_at > SETTLED_S
            for folder in () if settled else folders:
                found += requests.scan(folder, "launch" if folder == self._launch else "run")
            self._changed_at = time.monotonic() if found else self._changed_at
            if at is not None:
                at.look(heartbeats)
            return found

        self._look = self._directory.job(look)
        return True

    def _glance(self) -> bool:
        """Says whether something has changed since the last time; on the directory's thread."""
        stamps: list[object] = [rundir.stamp(path) for path in self._watched]
        if stamps == self._stamps:
            return False
        self._stamps, self._changed_at = stamps, time.monotonic()
        return True
