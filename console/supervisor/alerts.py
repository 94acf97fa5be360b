"""The open alerts of a run or launch. An alert that is open is not raised again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from console.model import OWN_DIRECTORY
from console.plans.gates import GATE_ALERT
from console.supervisor.rundir_io import Directory
from trainers.contract.recorder import REPLACED

DROPPED, HALT_FAILED = "dropped", "halt-failed"
CHECKPOINT_ALERT = "checkpoint-"
"""Prefix of the alerts on the save, the load and the back-up of checkpoints."""
SETTLED_S = 10.0
"""The alert on failed writes is cleared after this time without a failed write."""


class Alerts:
    """Owns the open alerts; `event` writes an event for each alert that is raised or cleared."""

    def __init__(self, event: Callable[..., dict[str, Any]], directory: Directory):
        self._event, self._directory = event, directory
        self._open: dict[str, dict[str, Any]] = {}
        self._dropped_at = time.monotonic()

    def restore(
        self, former: Mapping[str, dict[str, Any]], has_ended: Callable[[str], bool]
    ) -> None:  # fmt: skip
        """Opens former alerts again; clears those for which `has_ended` is true."""
        self._open |= former
        for name in filter(has_ended, former):
            self.clear(name, "it concerned a working process that was replaced")

    def raise_(
        self, name: str, text: str, level: str = "warn", key: str = "", **more: Any
    ) -> bool:  # fmt: skip
        """Opens an alert; returns False if the alert is already open."""
        if name in self._open:
            return False
        self._open[name] = self._event("alert", text, level, alert=name, key=key, **more)
        return True

    def update(self, name: str, text: str) -> None:
        """Replaces the text of an open alert, without another event."""
        self._open[name] = self._open[name] | {"text": text}

    def clear(self, name: str, text: str) -> None:
        """Closes an alert if it is open; otherwise does nothing."""
        if self._open.pop(name, None) is not None:
            self._event("clear", text, alert=name)

    def clear_all(self, text: str) -> None:
        """Closes all alerts except those that remain true after an attempt.

        These are the alerts on checkpoints, and on gates that can no longer pass. A restart can
        repeat the step of a gate at a step.
        """
        for name in list(self._open):
            if "@" in name or not name.startswith((CHECKPOINT_ALERT, GATE_ALERT)):
                self.clear(name, text)

    def clear_gates(self, text: str) -> None:
        """Closes the alerts on gates."""
        for name in [each for each in self._open if each.startswith(GATE_ALERT)]:
            self.clear(name, text)

    def open(self) -> dict[str, dict[str, Any]]:
        """Returns the event of each open alert, with its newest text, by name of the alert."""
        return dict(self._open)

    def check_directory(self) -> None:
        """Updates the alerts on failed writes and a lost directory; reports replaced files."""
        while self._directory.replaced:
            path = self._directory.replaced.popleft()
            self._event("note", f"{path.parent.name}/{path.name} {REPLACED}", "warn")
        lost = self._directory.lost or self._directory.replaced_run
        if lost:
            self.raise_(OWN_DIRECTORY, lost, "crit")
        else:
            self.clear(OWN_DIRECTORY, "the directory is back at its path")
        now, dropped = time.monotonic(), self._directory.dropped
        if dropped > self._directory.reported:
            self._directory.reported, self._dropped_at = dropped, now
            reason = self._directory.trouble or "the disk is too slow"
            text = f"writes to the run directory fail ({reason})"
            self.raise_(DROPPED, f"{text}: figures and gates may be incomplete")
        elif now - self._dropped_at >= SETTLED_S:
            self.clear(DROPPED, f"no write has failed for {SETTLED_S:g} s")
