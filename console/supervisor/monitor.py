"""Monitors one attempt once a second: its verdict, its alerts and the actions that are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from console.diagnose.causes import explain
from console.diagnose.readings import Readings
from console.diagnose.stall import SAVING_PHASES, RankEvidence, unusable_pulses, why_unconfirmed
from console.diagnose.verdict import case_of, diagnose
from console.diagnose.watch import STALL, Change, Watchdog
from console.model import Gpu, Verdict
from console.sources import process
from console.sources.pace import Progress
from console.sources.reducer import Head
from console.supervisor.evidence import Collector
from console.supervisor.sampling import Sampler
from console.supervisor.services import AttemptOwner, RunContext
from trainers.contract import VERSION, jsonl, rundir

LONGEST_STILL_S = 1e9
HALT_PENDING = "halt-pending"
PULSE, DOUBTFUL_POLLS = "pulse", 3
"""The alert on pulses that cannot be trusted, and the polls in a row after which it is raised."""


class Monitor:
    """Owns the verdict on one attempt and the actions that are due; raises and clears alerts.

    A `late` monitor starts while the ranks already run. It acts on no stall until it has seen each
    pulse change, because what it reads may be a copy.
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
        self._doubtful_polls = 0
        self._late = late
        self._first_positions: dict[int, tuple[int, int, int]] = {}
        """The position of each pulse at the first poll."""
        self._changing: set[int] = set()
        """The ranks whose pulse has changed since."""
        self._actions: list[Change] = []
        self._evidence = Collector(context.services.directory, context.path)

    def on_stall(self) -> tuple[str, str]:
        """Returns the action on a stall, and the sentence that also says when it is due."""
        return self._dog.stall_action, self._dog.stall_policy()

    def poll(
        self, now: Sampler, seen: Sequence[RankEvidence], ending: bool, halting: bool, unread: str
    ) -> bool:
        """Applies the watch rules to the last sample; returns True.

        `seen` is empty while no rank runs or its records are not read yet. No action is due on
        ranks that are `ending`. `unread` says why the records are not up to date, "" when they are.
        """
        self._ending, unchanged = ending, self._unchanged(seen)
        if seen or ending:
            self._diagnose(seen, halting)
        found = readings(
            self._heads(), seen, now.rss_mib, now.gpus, now.disk, csv=now.csv,
            stall_doubt=unread or unchanged or why_unconfirmed(seen, self._watch), env=now.env,
        )  # fmt: skip
        for change in self._dog.update(found):
            if change.kind == "act":
                if not ending:
                    self._add_action(change)
            else:
                self._update_alerts(change)
        return True

    def reset(self) -> None:
        """Drops the verdict and its alerts, because no sample was taken."""
        self.verdict = None
        self._evidence.clear()
        for alert in (STALL, HALT_PENDING, PULSE):
            self._alerts.clear(alert, "the watch rules are not evaluated")

    def is_raised(self, rule: str) -> bool:
        """Returns whether a rule is raised now; it may have been cleared since it acted."""
        return rule in self._dog.raised()

    def pop_actions(self) -> list[Change]:
        """Returns the actions that became due since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def pop_dump_wanted(self) -> frozenset[int]:
        """Returns the ranks whose stacks became needed as evidence since the last call."""
        wanted, self._evidence.wants_dump = self._evidence.wants_dump, frozenset()
        return wanted

    # --- the verdict ---------------------------------------------------------------------------

    def _diagnose(self, seen: Sequence[RankEvidence], halting: bool) -> None:
        self._check_pulses(seen)
        self._set_verdict(self._explained(seen, diagnose(seen, self._watch, time.time())))
        if halting and self.verdict and self.verdict.phase not in SAVING_PHASES:
            text = "a halt is pending: ranks halt at the end of a step, and this run is stalled"
            self._alerts.raise_(HALT_PENDING, text, "crit", "K")
        else:
            self._alerts.clear(HALT_PENDING, "the ranks step again, or are being ended")

    def _explained(self, seen: Sequence[RankEvidence], found: Verdict | None) -> Verdict | None:
        """Returns the verdict with its cause, once the evidence about the stall is complete."""
        if found is None:
            self._evidence.clear()
            return None
        self._context.observers.run("evidence", lambda: self._evidence.poll(seen), None)
        case, evidence = case_of(seen, self._watch, time.time()), self._evidence.complete
        if case is None or evidence is None or any(each.doubt for each in seen):
            return found
        return self._context.observers.run(
            "diagnosis", lambda: explain(found, case, evidence), found
        )

    def _check_pulses(self, seen: Sequence[RankEvidence]) -> None:
        """Raises an alert while a stall cannot be detected because a pulse cannot be trusted."""
        doubtful = [each for each in seen if each.doubt]
        self._doubtful_polls = self._doubtful_polls + 1 if doubtful else 0
        if self._doubtful_polls >= DOUBTFUL_POLLS:
            unusable = unusable_pulses(doubtful)
            text = f"{unusable}: no stall of these ranks is detected, and no action is taken"
            self._alerts.raise_(PULSE, text, "crit")
        elif not doubtful:
            self._alerts.clear(PULSE, "the pulse of every rank agrees with its records")

    def _unchanged(self, seen: Sequence[RankEvidence]) -> str:
        """Says which pulse has not changed since a late supervisor started, "" when all have."""
        for each in seen:
            first = self._first_positions
            if each.phase and first.setdefault(each.rank, each.position) != each.position:
                self._changing.add(each.rank)
        for each in seen if self._late else ():
            if each.phase != "exit" and each.rank not in self._changing:
                return f"the pulse of rank {each.rank} has not changed since the supervisor started"
        return ""

    def _set_verdict(self, verdict: Verdict | None) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict is None:
            why = "the ranks are being ended" if self._ending else "the ranks step again"
            self._alerts.clear(STALL, why)
            return
        if before is not None and _says(verdict) == _says(before):
            self.verdict = replace(verdict, ts=before.ts)
            return
        path = self._context.path / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._context.services.directory.document(path, {"v": VERSION} | asdict(verdict))
        self._run.event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        if self._alerts.raise_(STALL, verdict.sentence, "crit", "3"):
            self._context.reducer.summary.count_stall()
        else:
            self._alerts.update(STALL, verdict.sentence)
        self._run.publish()

    # --- the watch rules -----------------------------------------------------------------------

    def _add_action(self, change: Change) -> None:
        rule = change.rule
        text = f"{change.action}, by the watch rule {rule.name}: {change.text}"
        self._run.event("watch", text, "crit", rule=rule.name, action=change.action)
        self._alerts.clear(_withheld(rule.name), "the second source agrees")
        self._actions.append(change)

    def _update_alerts(self, change: Change) -> None:
        """Raises or clears the alerts of a rule; the verdict does so for the stall itself."""
        name = change.rule.name
        if change.kind == "withhold":
            self._alerts.raise_(_withheld(name), change.text, "crit")
        elif change.kind == "clear":
            self._alerts.clear(_withheld(name), change.text)
            if name != STALL:
                self._alerts.clear(name, change.text)
        elif name != STALL:
            self._alerts.raise_(name, change.text, change.level)


def _says(verdict: Verdict) -> tuple[object, ...]:
    """Returns the parts of a verdict whose change makes it a new one; times change always."""
    place = verdict.rank, verdict.phase, verdict.step
    return verdict.cause, verdict.sure, verdict.action, *place


def _withheld(rule: str) -> str:
    return f"{rule}-withheld"


def readings(
    heads: Mapping[int, Head], seen: Sequence[RankEvidence], rss_mib: Mapping[int, float],
    gpus: tuple[Gpu, ...], disk: Mapping[str, float], here: bool = True, records_only: bool = False,
    csv: Progress | None = None, stall_doubt: str = "", env: Mapping[str, Any] | None = None,
) -> Readings:  # fmt: skip
    """Returns the readings of one moment from samples and records.

    `here` says that the ranks are on this host. `csv` and `stall_doubt` come from the second
    sources, as in `Readings`.
    """
    total_mib, free_mib = process.host_memory_mib() if here else (None, None)
    record_ts = [jsonl.number(head.last.record, "ts") or 0.0 for head in heads.values()]
    return Readings(
        mono=time.monotonic(), ts=time.time(),
        ranks=tuple(each for each in seen if 0 <= each.unchanged_s < LONGEST_STILL_S),
        records_only=records_only,
        fresh=[each for head in heads.values() for each in head.pace.take_fresh()],
        progress={r: p for r, head in heads.items() if (p := head.pace.progress)},
        newest_ts=max(record_ts, default=None), csv=csv, stall_doubt=stall_doubt, env=env or {},
        rss_mib=rss_mib, host_total_mib=total_mib, host_free_mib=free_mib, gpus=gpus,
        disk_free_gib=disk.get("free_gib"), checkpoint_gib=disk.get("checkpoint_gib"),
    )  # fmt: skip
