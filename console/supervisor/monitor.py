"""The watchdog over one attempt: its sample, pulses and records, once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from console.diagnose.readings import Readings
from console.diagnose.stall import SAVING_PHASES, RankEvidence, unusable_pulses, why_unconfirmed
from console.diagnose.verdict import diagnose
from console.diagnose.watch import STALL, Change, Watchdog
from console.model import Gpu, Verdict
from console.sources import process
from console.sources.pace import Progress
from console.sources.reducer import Head
from console.supervisor.sampling import Sampler
from console.supervisor.services import AttemptOwner, RunContext
from trainers.contract import VERSION, jsonl, rundir

LONGEST_STILL_S = 1e9
HALT_PENDING = "halt-pending"
PULSE, UNSEEN_LOOKS = "pulse", 3
"""The alert on pulses that say nothing, and how many looks in a row they have to."""


class Watching:
    """Owns the verdict on one attempt, and what its rules want done; raises and clears alerts.

    One that comes `late`, to ranks that run already, acts on no stall before it has seen each pulse
    change: what it finds may be a copy.
    """

    def __init__(
        self, context: RunContext, run: AttemptOwner, heads: Callable[[], Mapping[int, Head]],
        late: bool = False,
    ):  # fmt: skip
        self.verdict: Verdict | None = None
        self._context, self._run, self._heads = context, run, heads
        self._watch, self._alerts = context.watch, context.observers.alerts
        self._dog = Watchdog(context.watch, context.actions, settings=run.settings)
        self._dog.restore(self._alerts.open())
        self._ending = False
        self._unseen_looks = 0
        self._late = late
        self._found: dict[int, tuple[int, int, int]] = {}
        """Where each pulse was first seen."""
        self._changing: set[int] = set()
        """The ranks whose pulse has changed since."""
        self._acts: list[Change] = []

    def on_stall(self) -> tuple[str, str]:
        """Returns what a stall is answered with, and the sentence that also says when."""
        return self._dog.stall_action, self._dog.stall_policy()

    def look(
        self, now: Sampler, seen: Sequence[RankEvidence], ending: bool, halting: bool, unread: str
    ) -> bool:
        """Takes the last sample; `seen` is empty while no rank is known or to be waited for.

        Nothing more is done to ranks that are being ended. `unread` says why the records are not
        up to date, "" when they are.
        """
        self._ending, unchanged = ending, self._unchanged(seen)
        if seen or ending:
            self._judge(seen, halting)
        found = readings(
            self._heads(), seen, now.rss_mib, now.gpus, now.disk, csv=now.csv,
            stall_doubt=unread or unchanged or why_unconfirmed(seen, self._watch),
        )  # fmt: skip
        for change in self._dog.update(found):
            if change.kind != "act" or not ending:
                self._take(change)
        return True

    def _judge(self, seen: Sequence[RankEvidence], halting: bool) -> None:
        """Takes the verdict on the ranks; of none that were seen nothing is known."""
        self._watch_pulses(seen)
        self._take_verdict(diagnose(seen, self._watch, time.time()))
        if halting and self.verdict and self.verdict.phase not in SAVING_PHASES:
            text = "a halt was asked for; ranks stop at the end of a step, and this run is stalled"
            self._alerts.raise_(HALT_PENDING, text, "crit", "K")
        else:
            self._alerts.clear(HALT_PENDING, "the ranks step again, or are being ended")

    def forget(self) -> None:
        """Takes the verdict back: nobody has looked."""
        self.verdict = None
        for alert in (STALL, HALT_PENDING, PULSE):
            self._alerts.clear(alert, "the watch rules do not look")

    def _watch_pulses(self, seen: Sequence[RankEvidence]) -> None:
        """Raises an alert while the pulse of a rank says nothing: no stall of it can be seen."""
        unseen = [each for each in seen if each.doubt]
        self._unseen_looks = self._unseen_looks + 1 if unseen else 0
        if self._unseen_looks >= UNSEEN_LOOKS:
            text = f"{unusable_pulses(unseen)}: no stall can be seen there, and none is acted upon"
            self._alerts.raise_(PULSE, text, "crit")
        elif not unseen:
            self._alerts.clear(PULSE, "every rank has a pulse that fits its records")

    def _unchanged(self, seen: Sequence[RankEvidence]) -> str:
        """Says which pulse has not changed since a supervisor came that came late."""
        for each in seen:
            if each.phase and self._found.setdefault(each.rank, each.position) != each.position:
                self._changing.add(each.rank)
        for each in seen if self._late else ():
            if each.phase != "exit" and each.rank not in self._changing:
                return f"the pulse of rank {each.rank} has not changed since this supervisor came"
        return ""

    def is_raised(self, rule: str) -> bool:
        """Says whether a rule is raised at this moment: its cause may have gone since it acted."""
        return rule in self._dog.raised()

    def take_acts(self) -> list[Change]:
        """Returns what the rules want done since the last call."""
        acts, self._acts = self._acts, []
        return acts

    def _take(self, change: Change) -> None:
        """Takes what a rule says; a stall has its alert from the verdict."""
        rule = change.rule
        if change.kind == "act":
            text = f"{change.action}, by the watch rule {rule.name}: {change.text}"
            self._run.event("watch", text, "crit", rule=rule.name, action=change.action)
            self._alerts.clear(f"{rule.name}-withheld", "the second source agrees")
            self._acts.append(change)
        elif change.kind == "withhold":
            self._alerts.raise_(f"{rule.name}-withheld", change.text, "crit")
        elif change.kind == "clear" and rule.name == STALL:
            self._alerts.clear(f"{STALL}-withheld", change.text)
        elif rule.name == STALL:
            return
        elif change.kind == "raise":
            self._alerts.raise_(rule.name, change.text, change.level)
        else:
            self._alerts.clear(rule.name, change.text)
            self._alerts.clear(f"{rule.name}-withheld", change.text)

    def _take_verdict(self, verdict: Verdict | None) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict is None:
            why = "the ranks are being ended" if self._ending else "the ranks step again"
            self._alerts.clear(STALL, why)
            return
        place = (verdict.cause, verdict.rank, verdict.phase, verdict.step)
        if before is not None and place == (before.cause, before.rank, before.phase, before.step):
            self.verdict = replace(verdict, ts=before.ts)
            return
        path = self._context.path / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._context.services.directory.document(path, {"v": VERSION} | asdict(verdict))
        self._run.event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        if self._alerts.raise_(STALL, verdict.sentence, "crit", "3"):
            self._context.reducer.summary.count_stall()
        else:
            self._alerts.retell(STALL, verdict.sentence)
        self._run.publish()


def readings(
    heads: Mapping[int, Head], seen: Sequence[RankEvidence], rss_mib: Mapping[int, float],
    gpus: tuple[Gpu, ...], disk: Mapping[str, float], here: bool = True, records_only: bool = False,
    csv: Progress | None = None, stall_doubt: str = "",
) -> Readings:  # fmt: skip
    """Returns one moment from samples and records; `here` says that the ranks are on this host.

    `csv` and `stall_doubt` are what the second sources say, as in `Readings`.
    """
    total_mib, free_mib = process.host_memory_mib() if here else (None, None)
    told_ts = [jsonl.number(head.last.record, "ts") or 0.0 for head in heads.values()]
    return Readings(
        mono=time.monotonic(), ts=time.time(),
        ranks=tuple(each for each in seen if 0 <= each.unchanged_s < LONGEST_STILL_S),
        records_only=records_only,
        fresh=[each for head in heads.values() for each in head.pace.take_fresh()],
        progress={r: p for r, head in heads.items() if (p := head.pace.progress)},
        newest_ts=max(told_ts, default=None), csv=csv, stall_doubt=stall_doubt,
        rss_mib=rss_mib, host_total_mib=total_mib, host_free_mib=free_mib, gpus=gpus,
        disk_free_gib=disk.get("free_gib"), checkpoint_gib=disk.get("checkpoint_gib"),
    )  # fmt: skip
