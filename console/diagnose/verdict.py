"""The verdict on a run that makes no progress: its cause, the rank to blame, and a sentence.

A rank that the kernel shows as stopped or exited is named after `NAMED_AFTER_S`; for every other
cause the slowest ranks must exceed their stall limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from console.diagnose.stall import (
    SAVING_PHASES,
    UNREPORTED,
    RankEvidence,
    limit_s,
    names,
    slowest,
    unusable_pulses,
    why_unconfirmed,
)
from console.model import Sure, Verdict
from trainers.contract.plan import Watch

NAMED_AFTER_S = 3.0
STOPPED_STATES, ENDED_STATES = ("T", "t"), ("Z", "X", "gone")
TRACED = "t"
EVIDENCE_LINES = 64
LOOK_AT_STACKS = "dump the stacks to see the cause"


@dataclass(frozen=True, slots=True)
class Case:
    """All ranks that still run, the slowest of them, and those that have exited."""

    running: tuple[RankEvidence, ...]
    slowest: tuple[RankEvidence, ...]
    exited: tuple[RankEvidence, ...]
    watch: Watch
    ts: float

    @property
    def stalled(self) -> bool:
        return all(each.unchanged_s > limit_s(each, self.watch) for each in self.slowest)

    def in_state(self, states: Sequence[str]) -> list[RankEvidence]:
        """Returns the ranks in one of these process states, the slowest first."""
        found = (r for r in self.running if r.state in states and r.unchanged_s > NAMED_AFTER_S)
        return sorted(found, key=lambda each: each.position)

    def since(self, rank: RankEvidence) -> str:
        """Returns the time of a rank's last change (an age would become wrong in an alert)."""
        return time.strftime("%H:%M:%S", time.localtime(self.ts - rank.unchanged_s))

    def verdict(
        self, rank: RankEvidence | None, cause: str, sure: Sure, *parts: str
    ) -> Verdict:  # fmt: skip
        """Returns a verdict on `rank`, or on all ranks for None; `parts` become the sentence."""
        place, sentence = rank or self.slowest[0], "; ".join(filter(None, parts))
        number = rank.rank if rank else None
        evidence = self._evidence(rank)
        return Verdict(self.ts, sentence, cause, number, place.phase, place.step, sure, evidence)

    def _evidence(self, first: RankEvidence | None) -> tuple[str, ...]:
        """Returns one line per rank; the rank of the verdict comes first."""
        ranks = sorted((*self.running, *self.exited), key=lambda each: each is not first)
        counted = any(each.collectives for each in ranks)
        return tuple(
            f"rank {each.rank}: process state {each.state}, {each.place}, unchanged for "
            f"{each.unchanged_s:.0f} s, limit {limit_s(each, self.watch):.0f} s"
            + (f", {each.collectives} collectives" if counted else "")
            for each in ranks[:EVIDENCE_LINES]
        )


def _stopped(case: Case) -> Verdict | None:
    """Names stopped ranks, unless the run stalls because of another rank that is slower."""
    found = case.in_state(STOPPED_STATES)
    if not found:
        return None
    first = found[0]
    slower = case.slowest[0].position < first.position
    if slower and case.stalled:
        return None
    traced = first.state == TRACED
    found = [each for each in found if (each.state == TRACED) == traced]
    how = "traced by a debugger" if traced else "stopped (SIGSTOP)"
    everyone = len(found) == len(case.running) > 1
    return case.verdict(
        None if everyone else first,
        "traced" if traced else "stopped", "medium" if slower else "high",
        f"{_verb(found, 'is', 'are')} {how} in {first.place}, last progress at {case.since(first)}",
        "detach the debugger; kill -CONT has no effect" if traced else resume(found),
        others(case, found),
    )  # fmt: skip


def _exited(case: Case) -> Verdict | None:
    """Names ranks whose process ended without the phase `exit`, unless all ranks ended so."""
    found = case.in_state(ENDED_STATES)
    if not found or (len(found) == len(case.running) and not case.exited):
        return None
    first = found[0]
    zombie = " but its parent has not reaped it (the parent is not running)"
    zombie = zombie if first.state == "Z" else ""
    return case.verdict(
        first, "exited", "high",
        f"{names(found)} exited in {first.place}{zombie}, last progress at {case.since(first)}",
        others(case, found), exits(case.exited),
    )  # fmt: skip


def _uninterruptible(case: Case) -> Verdict | None:
    """Names the slowest rank that is in uninterruptible sleep beyond its stall limit."""
    found = [
        each for each in case.running
        if each.state == "D" and each.unchanged_s > limit_s(each, case.watch)
    ]  # fmt: skip
    if not case.stalled or not found:
        return None
    first = min(found, key=lambda each: each.position)
    return case.verdict(
        first, "disk", "medium",
        f"{stalled(case, [first])} in uninterruptible sleep",
        "check the disk, the network file system and the driver", others(case, [first]),
    )  # fmt: skip


def _exited_early(case: Case) -> Verdict | None:
    """Names ranks that exited before the others were done, unless the slowest rank saves.

    A rank that saves needs no other rank.
    """
    slow = case.slowest[0]
    early = [each for each in case.exited if each.step <= slow.step]
    if not case.stalled or not early or slow.phase in SAVING_PHASES:
        return None
    first = min(early, key=lambda each: (each.step, each.rank))
    certain = first.step < slow.step and first.state in ENDED_STATES
    return case.verdict(
        first, "exited-early", "high" if certain else "medium",
        f"{exits(early)} at step {first.step} before the other ranks",
        f"no progress since {case.since(slow)}", others(case, [first]),
    )  # fmt: skip


def _slowest_rank(case: Case) -> Verdict | None:
    """Names the slowest ranks. Only the pulses show them, so the confidence is never high."""
    if not case.stalled or len(case.slowest) == len(case.running):
        return None
    return case.verdict(
        case.slowest[0], "slowest-rank", "medium",
        stalled(case, case.slowest), others(case, case.slowest), exits(case.exited),
        LOOK_AT_STACKS,
    )  # fmt: skip


def _all_ranks(case: Case) -> Verdict | None:
    """Names all ranks, because all stall at the same place or the run has only one rank."""
    if not case.stalled:
        return None
    alone = len(case.running) == 1
    certain = alone and not why_unconfirmed(case.running, case.watch)
    return case.verdict(
        case.running[0] if alone else None, "all-ranks", "medium" if certain else "low",
        stalled(case, case.running), exits(case.exited),
        "" if alone else "the pulses show no rank behind another", LOOK_AT_STACKS,
    )  # fmt: skip


KERNEL_CAUSES = ("stopped", "traced", "exited")
"""Causes that the kernel confirms."""
CAUSES: tuple[Callable[[Case], Verdict | None], ...] = (
    _stopped, _exited, _uninterruptible, _exited_early, _slowest_rank, _all_ranks,
)  # fmt: skip
"""The first function that returns a verdict decides."""


def case_of(ranks: Sequence[RankEvidence], watch: Watch, ts: float) -> Case | None:
    """Returns the case of the ranks with a usable pulse, or None if none of them still runs."""
    usable = [each for each in ranks if not each.doubt]
    running = tuple(each for each in usable if each.phase != "exit")
    exited = tuple(each for each in usable if each.phase == "exit")
    return Case(running, slowest(running), exited, watch, ts) if running else None


def diagnose(ranks: Sequence[RankEvidence], watch: Watch, ts: float) -> Verdict | None:
    """Returns why the run makes no progress, or None while it makes progress.

    `ts` is the unix time of the evidence. A rank without a usable pulse is never named. If there is
    such a rank, a verdict has the confidence "low" unless its cause is one of `KERNEL_CAUSES`.
    """
    case = case_of(ranks, watch, ts)
    if case is None:
        return None
    found = next((verdict for cause in CAUSES if (verdict := cause(case))), None)
    if found is None or not any(each.doubt for each in ranks) or found.cause in KERNEL_CAUSES:
        return found
    return replace(found, sure="low", sentence=f"{found.sentence}; {unusable_pulses(ranks)}")


def _verb(ranks: Sequence[RankEvidence], one: str, many: str) -> str:
    """Returns the ranks with their verb: "rank 3 is", "ranks 0-2 are"."""
    return f"{names(ranks)} {one if len(ranks) == 1 else many}"


def stalled(case: Case, ranks: Sequence[RankEvidence]) -> str:
    who, first = _verb(ranks, "has", "have"), ranks[0]
    return f"{who} been stalled in {first.place} since {case.since(first)}"


def exits(ranks: Sequence[RankEvidence]) -> str:
    """Returns a text such as "rank 0 exited (code 0)", or "" without ranks."""
    if not ranks:
        return ""
    if any(each.state not in ENDED_STATES for each in ranks):
        return f"{_verb(ranks, 'is', 'are')} exiting"
    codes = sorted({each.code for each in ranks if each.code is not None})
    return f"{names(ranks)} exited" + (f" (code {', '.join(map(str, codes))})" if codes else "")


def resume(ranks: Sequence[RankEvidence]) -> str:
    """Returns the command that resumes stopped ranks."""
    pids = " ".join(str(each.pid) for each in sorted(ranks, key=lambda each: each.rank))
    return f"kill -CONT {pids} resumes {'it' if len(ranks) == 1 else 'them'}"


def others(case: Case, named: Sequence[RankEvidence]) -> str:
    """Returns what the other running ranks do; ranks that do the same thing are grouped."""
    first = named[0]
    groups: dict[tuple[str, str], list[RankEvidence]] = {}
    for each in case.running:
        if each not in named:
            place = each.phase if each.phase and each.step == first.step else each.place
            groups.setdefault((_doing(each, first), place), []).append(each)
    return "; ".join(_group(ranks, doing, place) for (doing, place), ranks in groups.items())


def _doing(rank: RankEvidence, named: RankEvidence) -> str:
    if rank.state in STOPPED_STATES:
        return "traced" if rank.state == TRACED else "stopped"
    unordered = rank.step == named.step and UNREPORTED in (rank.phase, named.phase)
    slower = named.phase != "exit" and not unordered and rank.position < named.position
    return "slower" if slower else "waits"


def _group(ranks: Sequence[RankEvidence], doing: str, place: str) -> str:
    if doing == "stopped":
        return f"{_verb(ranks, 'is', 'are')} stopped in {place} ({resume(ranks)})"
    if doing == "traced":
        return f"{_verb(ranks, 'is', 'are')} traced by a debugger in {place}"
    if doing == "slower":
        return f"{_verb(ranks, 'is', 'are')} slower, in {place}"
    return f"{_verb(ranks, 'waits', 'wait')} in {place}"
