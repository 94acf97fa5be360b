"""Observers of a run: an exception in one is an alert that names it, never the end of the ranks.

The ranks do not depend on an observer. One that fails is left out, tried again later, and switched
off when it goes on failing. The code that owns processes (the tree of an attempt, the order of
phases) does not run here.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from console.sources.sanitize import clean
from console.supervisor.alerts import Alerts
from console.supervisor.child_state import MAIN
from console.supervisor.link import Link
from trainers.contract import rundir

T = TypeVar("T")
ALERT = "observer-"
"""The alert on an observer is named so, and then as the observer."""
WAITS_S = (2.0, 10.0, math.inf)
"""Rest of an observer after its first, second and third failure in a row, in seconds."""
SETTLED_S = 60.0
"""One that has worked for so long after a failure has had none."""


@dataclass(slots=True)
class _Health:
    failures: int = 0
    failed_at: float = 0.0
    again_at: float = 0.0
    """It rests until then; infinity: it is switched off."""
    told_at: float = -math.inf


class Observers:
    """Owns which observers of a run have failed; `alerts` says so."""

    def __init__(
        self, alerts: Alerts, link: Link, waits_s: tuple[float, ...] = WAITS_S,
        settled_s: float = SETTLED_S,
    ):  # fmt: skip
        self.alerts, self._link = alerts, link
        self._waits_s, self._settled_s = waits_s, settled_s
        self._held: dict[str, _Health] = {}

    def run(self, name: str, look: Callable[[], T], otherwise: T) -> T:
        """Returns what `look` returns; `otherwise` where it raises, rests or is switched off."""
        health = self._held.setdefault(name, _Health())
        now = time.monotonic()
        if now < health.again_at:
            return otherwise
        try:
            result = self._look(name, look)
        except Exception as mistake:
            rest_s = self._waits_s[min(health.failures, len(self._waits_s) - 1)]
            health.failures += 1
            health.failed_at, health.again_at = now, now + rest_s
            off = "it is switched off, " if rest_s == math.inf else ""
            self.failed(name, mistake, off or f"tried again in {rest_s:g} s, ")
            return otherwise
        if health.failures and now - health.failed_at >= self._settled_s:
            health.failures = 0
            self.alerts.clear(_alert(name), f"{name}: the observer works again")
        return result

    def once(self, name: str, look: Callable[[], T], otherwise: T) -> T:
        """Returns the same for what cannot rest: an answer that somebody waits for, an end.

        What former processes ended in is left out once.
        """
        health = self._held.get(name)
        if health is not None and health.again_at == math.inf:
            health.again_at = 0.0
            return otherwise
        try:
            return self._look(name, look)
        except Exception as mistake:
            self.failed(name, mistake)
            return otherwise

    def _look(self, name: str, look: Callable[[], T]) -> T:
        """Looks; the owner knows in what this process was where it does not come back."""
        before = self._link.state.activity.read(MAIN)
        self._link.state.activity.write(MAIN, name)
        try:
            return look()
        finally:
            self._link.state.activity.write(MAIN, before)

    def leave_out(self, name: str) -> None:
        """Switches off an observer that former processes ended in."""
        self._held[name] = _Health(again_at=math.inf)
        text = f"{name}: the supervisor's working process ended in it again and again; it is"
        self.alerts.raise_(_alert(name), f"{text} switched off", "crit")

    def failed(self, name: str, mistake: Exception, then: str = "") -> None:
        """Says that an observer failed; its traceback goes into the supervisor's log.

        One that fails again and again writes there at most once in `settled_s`.
        """
        health, now = self._held.setdefault(name, _Health()), time.monotonic()
        if then or now - health.told_at >= self._settled_s:
            health.told_at = now
            with contextlib.suppress(OSError):  # the log may lie on a disk that is full
                traceback.print_exception(mistake)
        words = clean(f"{type(mistake).__name__}: {mistake}", 200)
        text = f"{name}: the observer failed ({words}); {then}see {rundir.SUPERVISOR_LOG}"
        if not self.alerts.raise_(_alert(name), text, "crit"):
            self.alerts.retell(_alert(name), text)


def _alert(name: str) -> str:
    return f"{ALERT}{name.replace(' ', '-')}"
