"""Calls the observing functions of a run or launch; their exceptions raise alerts.

Such an exception ends neither this process nor a rank. `Observers.run` skips an observer that has
failed, tries it again later, and switches it off after repeated failures. Code that starts or ends
processes (`Run.tick`, `Attempt.tick`) or chooses the next phase is not an observer.
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
from console.supervisor.link import MAIN, Link
from trainers.contract import rundir

T = TypeVar("T")
ALERT = "observer-"
"""The prefix of the name of an alert on an observer; the name of the observer follows."""
WAITS_S = (2.0, 10.0, math.inf)
"""Seconds for which an observer is skipped after its first, second and third failure."""
SETTLED_S = 60.0
"""A success resets the count of failures only if the last failure is at least this long ago."""


@dataclass(slots=True)
class _Health:
    failures: int = 0
    failed_at: float = 0.0
    again_at: float = 0.0
    """The observer is skipped until this time. Infinity means that the observer is switched off."""
    traced_at: float = -math.inf
    """Time at which a traceback of the observer was last written."""


class Observers:
    """Owns the failures of observers, and raises an alert on each observer that fails."""

    def __init__(self, alerts: Alerts, link: Link):
        self.alerts, self._link = alerts, link
        self._health = {name: _Health(again_at=math.inf) for name in link.observers_off()}

    def run(self, name: str, look: Callable[[], T], otherwise: T) -> T:
        """Returns the result of `look`, or `otherwise` if `look` raises an error or is skipped."""
        health = self._health.setdefault(name, _Health())
        now = time.monotonic()
        if now < health.again_at:
            return otherwise
        try:
            result = self._look(name, look)
        except Exception as mistake:
            wait_s = WAITS_S[min(health.failures, len(WAITS_S) - 1)]
            health.failures += 1
            health.failed_at, health.again_at = now, now + wait_s
            is_off = wait_s == math.inf
            then = "it is switched off" if is_off else f"it is tried again in {wait_s:g} s"
            self.failed(name, mistake, f"{then}, ")
            return otherwise
        if health.failures and now - health.failed_at >= SETTLED_S:
            health.failures = 0
            self.alerts.clear(_alert(name), f"the observer of {name} works again")
        return result

    def call(self, name: str, look: Callable[[], T], otherwise: T) -> T:
        """Returns the result of `look`, or `otherwise` after an error; the next call tries again.

        An observer that is switched off is skipped once.
        """
        health = self._health.get(name)
        if health is not None and health.again_at == math.inf:
            health.again_at = 0.0
            return otherwise
        try:
            return self._look(name, look)
        except Exception as mistake:
            self.failed(name, mistake)
            return otherwise

    def _look(self, name: str, look: Callable[[], T]) -> T:
        """Runs an observer; first writes its name for the owner, in case this process dies."""
        before = self._link.state.activity.read(MAIN)
        self._link.state.activity.write(MAIN, name)
        try:
            return look()
        finally:
            self._link.state.activity.write(MAIN, before)

    def report_switched_off(self) -> None:
        """Raises an alert on each observer that is off: it failed, or children died in it.

        An observer stays off in later attempts. The directory of the run must exist, or its
        creation must be queued.
        """
        deaths = self._link.observers_off()
        for name in [each for each, health in self._health.items() if health.again_at == math.inf]:
            died = "the supervisor's working process died repeatedly in this observer"
            why = died if name in deaths else "this observer failed repeatedly"
            self.alerts.raise_(_alert(name), f"{name}: {why}; it is switched off", "crit")

    def failed(self, name: str, mistake: Exception, then: str = "") -> None:
        """Raises the alert on an observer; writes the traceback of `mistake` into supervisor.log.

        Without `then`, the traceback is written at most once in `SETTLED_S`.
        """
        health, now = self._health.setdefault(name, _Health()), time.monotonic()
        if then or now - health.traced_at >= SETTLED_S:
            health.traced_at = now
            with contextlib.suppress(OSError):  # the disk of the log may be full
                traceback.print_exception(mistake)
        words = clean(f"{type(mistake).__name__}: {mistake}", 200)
        text = f"the observer of {name} failed ({words}); {then}see {rundir.SUPERVISOR_LOG}"
        if not self.alerts.raise_(_alert(name), text, "crit"):
            self.alerts.update(_alert(name), text)


def _alert(name: str) -> str:
    return f"{ALERT}{name.replace(' ', '-')}"
