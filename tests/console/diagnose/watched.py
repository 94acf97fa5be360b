"""A watchdog that tests update with one moment after the other."""

from __future__ import annotations

from typing import Any

from console.diagnose.readings import Readings
from console.diagnose.watchdog import Change, Watchdog
from console.model import Gpu
from console.plan import Watch
from console.sources.pace import Progress

GPU = Gpu(0, "A100", "ok", mem_used_mib=100.0, mem_total_mib=1000.0, ecc_uncorrected=3)


class Watched:
    """Updates a watchdog and returns the changes; with `rule`, only those of this rule."""

    def __init__(self, watch: Watch | None = None, rule: str = "", action: str = "warn", **more):
        self.dog = Watchdog(watch or Watch(), {rule: action} if rule else {}, **more)
        self.rule, self.mono = rule, 0.0
        self.newest: dict[int, Progress] = {}

    def poll(self, *fresh: Progress, after_s: float = 1.0, **readings: Any) -> list[Change]:
        """Updates the watchdog `after_s` later; returns the changes."""
        self.mono += after_s
        self.newest |= {each.rank: each for each in fresh}
        given = {"ts": 1e9 + self.mono, "fresh": fresh, "progress": dict(self.newest)} | readings
        changes = self.dog.update(Readings(mono=self.mono, **given))
        return [each for each in changes if self.rule in ("", each.rule.name)]

    def texts(self, *fresh: Progress, **readings: Any) -> list[tuple[str, str]]:
        """Returns the kind and the text of each change of an update."""
        return [(each.kind, each.text) for each in self.poll(*fresh, **readings)]
