"""The watchdog over one attempt: its sample, pulses and records, once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from console.diagnose.readings import Readings
from console.diagnose.stall import Seen, diagnose
from console.diagnose.watch import STALL, Change, Watchdog
from console.model import Gpu, Verdict
from console.sources import process
from console.sources.summary import Summary
from console.supervisor.alerts import Alerts
from console.supervisor.follow import Story
from console.supervisor.sampling import Sampler
from trainers.contract import VERSION, rundir
from trainers.contract.plan import Watch

LONGEST_STILL_S = 1e9


class Watching:
    """Owns the verdict on one attempt, and what its rules want done; raises and clears alerts.

    `event` writes into the run's events, `document` replaces a file, and `changed` is called when
    there is another verdict.
    """

    def __init__(
        self, watch: Watch, actions: Mapping[str, str], run: Path, alerts: Alerts, story: Story,
        summary: Summary, event: Callable[..., object],
        document: Callable[[Path, Mapping[str, Any]], None], changed: Callable[[], None],
    ):  # fmt: skip
        self.verdict: Verdict | None = None
        self._watch, self._run, self._alerts, self._story = watch, run, alerts, story
        self._summary = summary
        self._event, self._document, self._changed = event, document, changed
        self._dog = Watchdog(watch, actions)
        self._acts: list[Change] = []

    def on_stall(self) -> tuple[str, str]:
        """Returns what a stall is answered with, and the sentence that also says when."""
        return self._dog.stall_action, self._dog.stall_words()

    def look(self, now: Sampler, seen: Sequence[Seen], ending: bool) -> None:
        """Takes the last sample; `seen` is empty while nobody is to be waited for.

        Nothing more is done to ranks that are being ended.
        """
        self._take_verdict(diagnose(seen, self._watch, time.time()))
        found = readings(self._story, seen, now.rss_mib, now.gpus, now.disk)
        for change in self._dog.look(found):
            if change.kind != "act" or not ending:
                self._take(change)

    def take_acts(self) -> list[Change]:
        """Returns what the rules want done since the last call."""
        acts, self._acts = self._acts, []
        return acts

    def _take(self, change: Change) -> None:
        """Takes what a rule says; a stall has its alert from the verdict."""
        rule = change.rule
        if change.kind == "act":
            text = f"{change.action}, by the watch rule {rule.name}: {change.text}"
            self._event("watch", text, "crit", rule=rule.name, action=change.action)
            self._acts.append(change)
        elif rule.name == STALL:
            return
        elif change.kind == "raise":
            self._alerts.raise_(rule.name, change.text, change.level)
        else:
            self._alerts.clear(rule.name, change.text)

    def _take_verdict(self, verdict: Verdict | None) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict is None:
            if before is not None:
                self._alerts.clear(STALL, f"the pulses move again: {before.cause} is over")
            return
        place = (verdict.cause, verdict.rank, verdict.phase, verdict.step)
        if before is not None and place == (before.cause, before.rank, before.phase, before.step):
            self.verdict = replace(verdict, ts=before.ts)
            return
        path = self._run / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._document(path, {"v": VERSION} | asdict(verdict))
        self._event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        if self._alerts.raise_(STALL, verdict.sentence, "crit", "3"):
            self._summary.count_stall()
        self._changed()


def readings(
    story: Story, seen: Sequence[Seen], rss_mib: Mapping[int, float], gpus: tuple[Gpu, ...],
    disk: Mapping[str, float], here: bool = True, records_only: bool = False,
) -> Readings:  # fmt: skip
    """Returns one moment from samples and records; `here` says that the ranks are on this host."""
    total_mib, free_mib = process.host_memory_mib() if here else (None, None)
    return Readings(
        mono=time.monotonic(),
        ts=time.time(),
        seen=tuple(each for each in seen if 0 <= each.still_s < LONGEST_STILL_S),
        records_only=records_only,
        fresh=story.take_fresh(),
        progress=story.progress,
        rss_mib=rss_mib,
        host_total_mib=total_mib,
        host_free_mib=free_mib,
        gpus=gpus,
        disk_free_gib=disk.get("free_gib"),
        checkpoint_gib=disk.get("checkpoint_gib"),
        newest_ts=story.newest_ts,
    )
