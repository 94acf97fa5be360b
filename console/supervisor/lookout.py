"""Polls a launch for files that others write: requests, and the records of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from console.supervisor import requests
from console.supervisor.attempt import Attempt
from console.supervisor.child_state import FILES
from console.supervisor.link import Link
from console.supervisor.requests import Request
from console.supervisor.run_files import Files, News
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir

FILES_NAME = "files"
"""The name of the observer that reads the files of a run."""
SETTLED_S = 2.0
"""For so long after a change mailboxes are read at each look: another one may have come in the same
tick of the directory's clock."""


class Lookout:
    """Owns the looks, never two at once; each runs on the directory's thread.

    One is due once a second, then at heartbeats too, and at once when a file that is watched, or a
    mailbox, has another stamp; without that no mailbox is read that was empty. `take` gets the
    requests that one found; `halt` is called while a `.HALT` is in the launch directory itself.
    """

    def __init__(
        self, directory: Directory, launch: Path, take: Callable[[list[Request]], object],
        halt: Callable[[], object], link: Link,
    ):  # fmt: skip
        self._directory, self._link = directory, link
        self._launch, self._take, self._halt = launch, take, halt
        self._watched: list[Path] = []
        self._stamps: list[object] = []
        self.under_way = False
        self._looked = self._beat = self._changed_at = 0.0
        directory.glance = self._glance

    def begin(self, runs: Sequence[Path], attempt: Attempt | None, every_s: float) -> bool:
        """Begins a look if one is due, or the last is so long ago; says whether it did.

        `runs` are those that there have been, `attempt` the present one.
        """
        now, changed = time.monotonic(), self._directory.changed
        second = int(now) != int(self._beat)
        due = second or changed or now - self._looked >= every_s
        if self.under_way or not due:
            return False
        self._looked, self._directory.changed = now, False
        heartbeats = second or (attempt is not None and attempt.behind)
        self._beat = now if heartbeats else self._beat
        folders = (self._launch, *runs)
        files = attempt.files.watched if attempt is not None else ()
        halt = self._launch / rundir.HALT
        self._watched = [*(folder / rundir.REQUESTS for folder in folders), halt, *files]
        at = attempt if attempt is not None and attempt.stage in ("run", "over") else None

        def look() -> tuple[list[Request], News | None, bool]:
            self._glance()
            found: list[Request] = []
            settled = time.monotonic() - self._changed_at > SETTLED_S
            for folder in () if settled else folders:
                with suppress(OSError):
                    self._directory.check_run(folder)
                    found += requests.scan(folder, "launch" if folder == self._launch else "run")
            self._changed_at = time.monotonic() if found else self._changed_at
            halts, news = os.path.lexists(halt), None
            # What is asked is taken also where the run directory is gone, or cannot be understood.
            try:
                if at is not None:
                    self._directory.check_run(at.path)
                    news = self._look_at(at.files, heartbeats)
            except OSError:
                pass
            except Exception as mistake:
                self._directory.mistakes.append(mistake)
            return found, news, halts

        def take(found: tuple[list[Request], News | None, bool] | None, _: object) -> None:
            self.under_way = False
            asked, news, halts = found or ([], None, False)
            if at is not None and news is not None:
                at.take(news)
            if halts:
                self._halt()
            self._take(asked)

        self.under_way = True
        self._directory.job(look, take)
        return True

    def _look_at(self, files: Files, heartbeats: bool) -> News | None:
        """Looks at a run's files; the owner knows where this process does not come back from it."""
        if FILES_NAME in self._link.observers_off():
            return None
        self._link.state.activity.write(FILES, FILES_NAME)
        try:
            return files.look(heartbeats)
        finally:
            self._link.state.activity.write(FILES, "")

    def _glance(self) -> bool:
        """Says whether something has changed since the last time; on the directory's thread."""
        stamps: list[object] = [rundir.stamp(path) for path in self._watched]
        if stamps == self._stamps:
            return False
        self._stamps, self._changed_at = stamps, time.monotonic()
        return True
