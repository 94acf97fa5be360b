"""The open alerts of a run: each is raised once until it is cleared, whatever attempt it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from console.supervisor.rundir_io import Directory
from trainers.contract.recorder import REPLACED

DROPPED, MOVED = "dropped", "own-directory"
SETTLED_S = 10.0
"""After so long without a lost record the directory is believed to take them again."""


class Alerts:
    """Owns what is open; `event` writes it down."""

    def __init__(self, event: Callable[..., dict[str, Any]], directory: Directory):
        self._event, self._directory = event, directory
        self._open: dict[str, dict[str, Any]] = {}
        self._dropped, self._dropped_at = directory.dropped, 0.0

    def restore(self, held: Mapping[str, dict[str, Any]], gone: Callable[[str], bool]) -> None:
        """Opens the alerts of a former process again; those that are `gone` with it are cleared."""
        self._open |= held
        for name in filter(gone, held):
            self.clear(name, "it was of a working process that was replaced")

    def raise_(self, name: str, text: str, level: str = "warn", key: str = "") -> bool:
        """Opens an alert; False when it is open."""
        if name in self._open:
            return False
        self._open[name] = self._event("alert", text, level, alert=name, key=key)
        return True

    def retell(self, name: str, text: str) -> None:
        """Gives an open alert another text; it was raised once, and its event stays as it is."""
        self._open[name] = self._open[name] | {"text": text}

    def clear(self, name: str, text: str) -> None:
        """Closes an alert, if it is open."""
        if self._open.pop(name, None) is not None:
            self._event("clear", text, alert=name)

    def clear_all(self, text: str) -> None:
        for name in list(self._open):
            self.clear(name, text)

    def open(self) -> dict[str, dict[str, Any]]:
        """Returns the events of the open alerts by name."""
        return dict(self._open)

    def watch_writes(self) -> None:
        """Raises an alert while the run directory does not take records; notes files replaced."""
        while self._directory.replaced:
            path = self._directory.replaced.popleft()
            self._event("note", f"{path.parent.name}/{path.name} {REPLACED}", "warn")
        lost = self._directory.lost or self._directory.replaced_run
        if lost:
            self.raise_(MOVED, lost, "crit")
        else:
            self.clear(MOVED, "the launch directory is at its place again")
        now, dropped = time.monotonic(), self._directory.dropped
        if dropped > self._dropped:
            self._dropped, self._dropped_at = dropped, now
            reason = self._directory.trouble or "it is too slow"
            self.raise_(DROPPED, f"the run directory does not take all records ({reason}): "
                        "figures and gates may lack some")  # fmt: skip
        elif now - self._dropped_at >= SETTLED_S:
            self.clear(DROPPED, "the run directory takes records again")
