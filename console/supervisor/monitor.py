"""Monitors one attempt once a second: its verdict, its alerts and the actions that are due."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from console.diagnose.rank_evidence import (
    ENDING_PHASES,
    RankEvidence,
    of_foreign,
    unfinished,
    unusable_pulses,
    unwatched,
    why_unconfirmed,
)
from console.diagnose.verdict import COLLECTING, diagnose
from console.diagnose.watchdog import STALL, Change, Watchdog
from console.model import Verdict
from console.plans import gates
from console.sources import verdicts
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.status_text import gate_line, rank_names
from console.stop_cost import completed, stop_cost
from console.supervisor.context import AttemptOwner, RunContext
from console.supervisor.evidence import Collector
from console.supervisor.sampling import Sampler, readings
from trainers.contract import VERSION, jsonl, rundir

HALT_PENDING = "halt-pending"
STEP_AGAIN, RUN_AGAIN = "the ranks step again", "its process runs again, or its limit is longer"
_CHANGING = re.compile(r"\d\d:\d\d:\d\d|\d+% of a core|running|sleeping")
"""Parts of a sentence that change while the stall itself does not change."""
MAX_DOCUMENTS = 20
"""At most this many verdicts of one stall get a file. Later verdicts are only shown. At the end of
the stall, the newest verdict overwrites the last file."""
PULSE, DOUBTFUL_POLLS = "pulse", 3
"""The alert on doubtful pulses is raised after this number of polls in a row with such a pulse."""
UNJOINED = "not-joined"
UNWRITTEN, UNWRITTEN_S = "records", 30.0
"""This alert is raised if a record that a rank queued is not read within this time."""


class Monitor:
    """Owns the verdict on one attempt and the due actions; raises and clears alerts.

    A `late` monitor starts while the ranks already run. A pulse may then be a copy, which never
    changes. Therefore no strong action on a stall is due until every pulse has changed.
    """

    def __init__(
        self, context: RunContext, run: AttemptOwner,
        heads: Callable[[], Mapping[int, LatestRecords]], late: bool = False,
    ):  # fmt: skip
        self.verdict: Verdict | None = None
        self.unjoined = False
        """True if all ranks of a foreign program run and none has called `join`."""
        self._context, self._run, self._heads = context, run, heads
        self._watch, self._alerts = context.watch, context.observers.alerts
        self._watchdog = Watchdog(context.watch, context.actions, settings=run.settings)
        self._watchdog.restore(self._alerts.open())
        self._ending = ""
        self._moved_at = 0.0
        """Time of the last progress before the present stall (monotonic s)."""
        self._documents = 0
        """Number of verdicts of the present stall that were written."""
        self._sampled_ts = 0.0
        """Time of the newest evidence that agrees with the verdict, 0 without evidence."""
        self._changed: tuple[tuple[object, ...], float] | None = None
        """Parts of a newer verdict that differs from `verdict`, and the time of its evidence."""
        self._doubtful_polls = 0
        self._queued: dict[int, tuple[int, float]] = {}
        """The number of a queued record of each rank, and when this record was first seen."""
        self._late = late
        self._first_positions: dict[int, tuple[int, int, int]] = {}
        """The position of each pulse when it was first seen."""
        self._changing: set[int] = set()
        """The ranks whose pulse has changed since it was first seen."""
        self._actions: list[Change] = []
        self._evaluated: set[str] = set()
        """The names of the gates with an `at` step that were already reported."""
        self._evidence = Collector(
            context.path, lambda: context.services.nvml.rows(),
            lambda: context.services.directory.check_run(context.path),
            save=lambda path, text: context.services.directory.reported_job(
                lambda: rundir.write_atomic(path, text), partial(self._report_unsaved, path), path
            ),
        )  # fmt: skip

    def _report_unsaved(self, path: Path, why: str) -> None:
        if why:
            self._run.event("note", f"cannot write {path.name}: {why}", "warn")

    def halt_answer(self) -> str:
        """Returns the answer to a halt for which `.HALT` is written."""
        if self.verdict:
            saves = self.verdict.may_save(bool(self._run.settings))
            return ".HALT is written; the run is stalled, so it halts only when " + (
                "the save ends; stop loses the checkpoint that is being saved" if saves
                else "all ranks make progress again; stop ends it now")  # fmt: skip
        if self._run.settings:
            return ".HALT is written; all ranks stop at the same step and save a checkpoint"
        if len(self._heads()) == self._context.phase.nproc:
            return (".HALT is written; all ranks stop at the same step; the program saves a "
                    "checkpoint only if it does so by itself")  # fmt: skip
        return (".HALT is written; a program that does not call join ignores it, and only the "
                "trainers of this project save a checkpoint; stop ends it")  # fmt: skip

    def on_stall(self) -> tuple[str, str]:
        """Returns two values: the action on a stall, and the policy on a stall in words."""
        return self._watchdog.stall_action, self._watchdog.stall_policy()

    def poll(
        self, now: Sampler, seen: Sequence[RankEvidence], ending: str, halting: bool, unread: str,
        has_read: bool = True,
    ) -> bool:  # fmt: skip
        """Applies the watch rules to the last sample; the result True says that this was done.

        `seen` is empty until a rank is found, and while a new child reads the records so far.
        `ending` says why the ranks end or have ended, or is "". With `ending`, `seen` is empty and
        no action is due. `unread` says why the records cannot confirm the pulses, or is "". If
        `has_read` is False, an override may not have been read yet, so no gate is evaluated.
        """
        seen = seen if self._run.settings else of_foreign(seen, self._watch)
        self._ending, unchanged = ending, self._unchanged(seen)
        if seen or ending:
            self._diagnose(seen, halting)
        self._check_records(() if unread else seen)
        if has_read:
            self._context.observers.run("gates", self._evaluate_gates, None)
        found = readings(
            self._heads(), seen, now.rss_mib, now.gpus, now.disk, csv=now.csv,
            stall_doubt=unread or unchanged or why_unconfirmed(seen, self._watch), env=now.env,
        )  # fmt: skip
        for change in self._watchdog.update(found):
            if change.kind == "act":
                if not ending:
                    self._add_action(change)
            else:
                self._update_alerts(change)
        return True

    def reset(self) -> None:
        """Closes the verdict, and clears the alerts on a pending halt, pulses, join and records."""
        why = "the watch rules are not evaluated"
        self.close(why)
        self._evidence.clear()
        for alert in (HALT_PENDING, PULSE, UNJOINED, UNWRITTEN):
            self._alerts.clear(alert, why)

    def is_raised(self, rule: str) -> bool:
        """Returns whether a rule is raised at present."""
        return rule in self._watchdog.raised()

    def pop_actions(self) -> list[Change]:
        """Returns the actions that have become due since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def pop_dump_wanted(self) -> frozenset[int]:
        """Returns the ranks whose stacks have become necessary since the last call."""
        wanted, self._evidence.wants_dump = self._evidence.wants_dump, frozenset()
        return wanted

    def _evaluate_gates(self) -> None:
        """Reports once each gate whose result at a step in `at`, or failure, is final.

        Clears the alert on a gate that does not block, for example because of an override.
        """
        summary = self._context.reducer.summary
        for gate in gates.reached(summary, self._context.phase.gates):
            if not gate.blocks:
                self._alerts.clear(f"{gates.GATE_ALERT}{gate.name}", "the gate needs no override")
            if gate.name not in self._evaluated:
                self._evaluated.add(gate.name)
                at_step = "@" in gate.name
                how = "gate evaluated at its step" if at_step else "this gate needs an override"
                text, level = f"{how}: {gate_line(gate).strip()}", "crit" if at_step else "warn"
                if gate.blocks:
                    self._alerts.raise_(f"{gates.GATE_ALERT}{gate.name}", text, level, "2")
                else:
                    self._run.event("note", text)

    # --- the verdict ---------------------------------------------------------------------------

    def _diagnose(self, seen: Sequence[RankEvidence], halting: bool) -> None:
        self._check_pulses([each for each in seen if each.doubt not in ("", "unjoined")])
        self._check_joined(seen)
        found = diagnose(seen, self._watch, time.time(), COLLECTING)
        if found is not None and self.verdict is None:
            still_s = min(each.unchanged_s for each in unfinished(seen))
            self._moved_at = time.monotonic() - still_s
        found = self._explained(seen, found)
        if found is not None and found.phase != "exit":
            heads = self._heads().values()
            saved = max((max(head.saved, head.first_step - 1) for head in heads), default=0)
            done = completed(found.step or 0, found.phase)
            cost = stop_cost(done, saved, bool(self._run.settings), found.phase)
            found = replace(found, action="; ".join(filter(None, (found.action, cost))))
        self._set_verdict(found, seen)
        if halting and self.verdict and self.verdict.phase not in ENDING_PHASES:
            text = (
                "a halt is pending, and this run is stalled: it halts when the cause of the stall "
                "is removed; if that is not possible, stop it"
            )
            self._alerts.raise_(HALT_PENDING, text, "warn", "K")
        else:
            self._alerts.clear(HALT_PENDING, "the ranks step again, or are being ended")

    def _explained(self, seen: Sequence[RankEvidence], found: Verdict | None) -> Verdict | None:
        """Returns `found`, or a verdict from the evidence once the evidence is complete."""
        if found is None:
            self._evidence.clear()
            return None
        self._context.observers.run("evidence", lambda: self._evidence.poll(seen), None)
        evidence = self._evidence.complete
        if evidence is None:
            return found
        return self._context.observers.run(
            "diagnosis", lambda: diagnose(seen, self._watch, time.time(), evidence), found
        )

    def _check_pulses(self, doubtful: Sequence[RankEvidence]) -> None:
        """Raises an alert after `DOUBTFUL_POLLS` polls in a row with a doubtful pulse.

        A poll without a doubtful pulse clears the alert.
        """
        self._doubtful_polls = self._doubtful_polls + 1 if doubtful else 0
        if self._doubtful_polls >= DOUBTFUL_POLLS:
            unusable = unusable_pulses(doubtful)
            then = "no watch rule halts, stops or restarts the run on a stall"
            text = f"{unusable}: no stall of these ranks is detected, and {then}"
            self._alerts.raise_(PULSE, text, "crit")
        elif not doubtful:
            self._alerts.clear(PULSE, "no pulse is in doubt")

    def _check_joined(self, seen: Sequence[RankEvidence]) -> None:
        """Raises an alert if ranks are `unwatched`; sets `unjoined`."""
        is_whole = len(seen) == self._context.phase.nproc and not self._run.settings
        has_joined = bool(self._heads()) or any(each.phase for each in seen)
        self.unjoined = is_whole and not has_joined
        if all(each.phase for each in seen):
            self._alerts.clear(UNJOINED, "no running rank is without join")
        elif late := unwatched(seen, self._watch):
            then = "their steps are not known, and no stall of them is detected; see docs/extend.md"
            self._alerts.raise_(UNJOINED, f"{unusable_pulses(late)}: {then}")

    def _check_records(self, seen: Sequence[RankEvidence]) -> None:
        """Raises an alert if a rank queues records that are not read for `UNWRITTEN_S`.

        `seen` is empty while the records cannot confirm the pulses (`unread` in `poll`).
        """
        now, heads, late, are_read = time.monotonic(), self._heads(), dict[int, str](), bool(seen)
        before, self._queued = self._queued, {}
        for rank, newest in ((each.rank, each.records) for each in seen):
            read = jsonl.integer(heads.get(rank, NO_RECORDS).last, "n") or 0
            queued, since = before.get(rank, (newest, now))
            are_read = are_read and rank in before and queued <= read
            self._queued[rank] = (newest, now) if queued <= read else (queued, since)
            if read < queued < newest and now - since >= UNWRITTEN_S:
                late[rank] = f"newest record read {read}, newest queued {newest}"
        if late:
            (rank, numbers), check = next(iter(late.items())), "the disk, its quota and ulimit -f"
            text = f"records of {rank_names(late)} are lost or delayed (rank {rank}: {numbers})"
            self._alerts.raise_(UNWRITTEN, f"{text}: gates may be unknown; check {check}")
        elif are_read:
            self._alerts.clear(UNWRITTEN, "the newest records of all ranks are read again")

    def _unchanged(self, seen: Sequence[RankEvidence]) -> str:
        """Returns a sentence on a rank whose pulse has not changed so far, or "".

        The result is "" unless this monitor is `late`.
        """
        for each in seen:
            first = self._first_positions
            if each.phase and first.setdefault(each.rank, each.position) != each.position:
                self._changing.add(each.rank)
        for each in seen if self._late else ():
            if each.phase != "exit" and each.rank not in self._changing:
                return f"the pulse of rank {each.rank} has not changed since the supervisor started"
        return ""

    def _set_verdict(self, verdict: Verdict | None, seen: Sequence[RankEvidence]) -> None:
        if verdict is None:
            self.close(self._ending or self._why_over(seen))
            return
        before = self.verdict
        same = before is not None and _says(verdict) == _says(before)
        if before is not None and not same and not self._lasts(_says(verdict)):
            return
        self.verdict, self._changed = verdict, None
        self._sampled_ts = self._evidence.complete.ts if self._evidence.complete else 0.0
        if before is not None and (same or self._documents >= MAX_DOCUMENTS):
            self.verdict = replace(verdict, ts=before.ts)
            return
        self._documents += 1
        if before is not None:
            self._write(before, end=verdicts.REPLACED, end_ts=verdict.ts)
        self._write(verdict)
        self._run.event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        if verdict.phase != "exit":  # no rank steps any more, so the gates count no stall
            since_ts = time.time() - self._stalled_s()
            if self._alerts.raise_(STALL, verdict.sentence, "crit", "3", since_ts=since_ts):
                self._context.reducer.summary.count_stall(since_ts)
            else:
                self._alerts.update(STALL, verdict.sentence)
        self._run.publish()

    def _lasts(self, says: tuple[object, ...]) -> bool:
        """Returns whether a changed verdict is accepted.

        A rank that waits in a loop may show another cause in each sample. If a newer sample changes
        the verdict, the next sample must therefore agree. Other changes are accepted at once.
        """
        evidence = self._evidence.complete
        if evidence is None or self._sampled_ts in (0.0, evidence.ts):
            return True
        if self._changed is None or self._changed[0] != says:
            self._changed = says, evidence.ts
        return self._changed[1] != evidence.ts

    def _why_over(self, seen: Sequence[RankEvidence]) -> str:
        """Returns why the stall has ended, although the ranks are not being ended."""
        running = [each for each in seen if each.phase != "exit" and not each.doubt]
        if any(each.unchanged_s < self._stalled_s() - 1 for each in running):
            return STEP_AGAIN
        return RUN_AGAIN if running else "the ranks exit, or their pulses cannot be trusted"

    def _stalled_s(self) -> float:
        """Returns the duration of the present stall; a changed wall clock does not change it."""
        return time.monotonic() - self._moved_at

    def close(self, why: str) -> None:
        """Closes the verdict, if there is one, and clears the alert on the stall."""
        verdict, self.verdict = self.verdict, None
        self._documents, self._sampled_ts, self._changed = 0, 0.0, None
        if verdict is not None:
            if why in (STEP_AGAIN, RUN_AGAIN):
                why = f"{_pause(verdict, self._stalled_s())}; {why}"
            self._write(verdict, end=why, end_ts=time.time())
            more = {"rank": verdict.rank, "cause": verdict.cause}
            self._run.event("verdict", f"ended: {why}", "info", **more)
        self._alerts.clear(STALL, why)

    def _write(self, verdict: Verdict, **end: Any) -> None:
        path = self._context.path / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._context.services.directory.document(path, {"v": VERSION} | asdict(verdict) | end)

    # --- the watch rules -----------------------------------------------------------------------

    def _add_action(self, change: Change) -> None:
        rule = change.rule
        text = f"{change.action}, by the watch rule {rule.name}: {change.text}"
        self._run.event("watch", text, "crit", rule=rule.name, action=change.action)
        self._alerts.clear(_withheld(rule.name), "the second source agrees")
        self._actions.append(change)

    def _update_alerts(self, change: Change) -> None:
        """Raises or clears a rule's alerts, except the alert `stall`, which follows the verdict."""
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
    """Returns the parts of a verdict whose change makes a new verdict.

    Texts that match `_CHANGING` are removed from its sentence.
    """
    place = verdict.rank, verdict.phase, verdict.step
    sentence = _CHANGING.sub("", verdict.sentence)
    return verdict.cause, verdict.sure, verdict.action, sentence, *place


def _pause(verdict: Verdict, seconds: float) -> str:
    """Returns a sentence on a stall that ended by itself."""
    who = "all ranks" if verdict.rank is None else f"rank {verdict.rank}"
    how = verdict.cause if verdict.cause in ("stopped", "traced", "frozen") else "slow"
    return f"{seconds:.0f} s in {verdict.phase or 'start-up'} on {who} ({how})"


def _withheld(rule: str) -> str:
    return f"{rule}-withheld"
