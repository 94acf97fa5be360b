"""The ranks at one moment (`Moment`: running, slowest, exited), and the phrases of verdicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from console.diagnose.rank_evidence import (
    UNREPORTED,
    RankEvidence,
    limit_s,
    names,
    slowest,
)
from console.model import Sure, Verdict
from console.plan import Watch

NAMED_AFTER_S = 3.0
STOPPED_STATES, ENDED_STATES = ("T", "t"), ("Z", "X", "gone")
EVIDENCE_LINES = 64


@dataclass(frozen=True, slots=True)
class Moment:
    """The running ranks, the slowest of them, and the ranks in the phase "exit"."""

    running: tuple[RankEvidence, ...]
    slowest: tuple[RankEvidence, ...]
    exited: tuple[RankEvidence, ...]
    doubtful: tuple[RankEvidence, ...]
    """The ranks with a `doubt`. No other field contains them."""
    watch: Watch
    ts: float

    @property
    def is_stalled(self) -> bool:
        """True if each of the slowest ranks exceeds its stall limit, or if a rank cannot continue.

        A rank cannot continue if it is stopped or has ended without reporting its exit, and its
        pulse has been unchanged for `NAMED_AFTER_S`. If all ranks have ended and none reported its
        exit, only the stall limits count.
        """
        if all(each.unchanged_s > limit_s(each, self.watch) for each in self.slowest):
            return True
        ended = [each.state in ENDED_STATES for each in self.running]
        if all(ended) and not self.exited:
            return False
        return any(each.state in (*STOPPED_STATES, *ENDED_STATES)
                   and each.unchanged_s > NAMED_AFTER_S for each in self.running)  # fmt: skip

    def since(self, rank: RankEvidence) -> str:
        """Returns the time of a rank's last change. An age would soon be wrong in an alert."""
        return time.strftime("%H:%M:%S", time.localtime(self.ts - rank.unchanged_s))

    def verdict(
        self, rank: RankEvidence | None, cause: str, sure: Sure, *parts: str
    ) -> Verdict:  # fmt: skip
        """Returns a verdict on `rank`, or on all ranks if it is None; `parts` form the sentence."""
        of, sentence = rank or self.slowest[0], "; ".join(filter(None, parts))
        number = rank.rank if rank else None
        evidence = self._evidence(rank)
        return Verdict(self.ts, sentence, cause, number, of.phase, of.step, sure, evidence)

    def _evidence(self, first: RankEvidence | None) -> tuple[str, ...]:
        """Returns one line per rank without `doubt`, at most `EVIDENCE_LINES`; `first` is first."""
        ranks = sorted((*self.running, *self.exited), key=lambda each: each is not first)
        counted = any(each.collectives for each in ranks)
        return tuple(
            f"rank {each.rank}: process state {each.state}, {each.position_text}, unchanged for "
            f"{each.unchanged_s:.0f} s, limit {limit_s(each, self.watch):.0f} s"
            + (f", {each.collectives} collectives" if counted else "")
            for each in ranks[:EVIDENCE_LINES]
        )


def moment_of(ranks: Sequence[RankEvidence], watch: Watch, ts: float) -> Moment | None:
    """Returns the moment, or None if each rank has a `doubt` or is in the phase "exit"."""
    usable = [each for each in ranks if not each.doubt]
    doubtful = tuple(each for each in ranks if each.doubt)
    running = tuple(each for each in usable if each.phase != "exit")
    exited = tuple(each for each in usable if each.phase == "exit")
    return Moment(running, slowest(running), exited, doubtful, watch, ts) if running else None


def stalled(moment: Moment, ranks: Sequence[RankEvidence]) -> str:
    who, first = names(ranks, "has", "have"), ranks[0]
    return f"{who} been stalled in {first.position_text} since {moment.since(first)}"


def exits(ranks: Sequence[RankEvidence]) -> str:
    """Returns a text such as "rank 0 exited (code 0)", or "" if there are no ranks."""
    if not ranks:
        return ""
    if any(each.state not in ENDED_STATES for each in ranks):
        return f"{names(ranks, 'is', 'are')} exiting"
    codes = sorted({each.code for each in ranks if each.code is not None})
    return f"{names(ranks)} exited" + (f" (code {', '.join(map(str, codes))})" if codes else "")


def resume(ranks: Sequence[RankEvidence]) -> str:
    """Returns a sentence with the command that resumes stopped ranks."""
    pids = " ".join(str(each.pid) for each in sorted(ranks, key=lambda each: each.rank))
    return f"kill -CONT {pids} resumes {'it' if len(ranks) == 1 else 'them'}"


def others(moment: Moment, named: Sequence[RankEvidence]) -> str:
    """Returns what the running ranks outside `named` do, grouped by what they do and where."""
    first = named[0]
    groups: dict[tuple[str, str, str], list[RankEvidence]] = {}
    for each in moment.running:
        if each not in named:
            where = each.phase if each.phase and each.step == first.step else each.position_text
            groups.setdefault((*_doing(each, first), where), []).append(each)
    return "; ".join(f"{names(ranks, one, many)} in {where}"
                     for (one, many, where), ranks in groups.items())  # fmt: skip


def _doing(rank: RankEvidence, named: RankEvidence) -> tuple[str, str]:
    """Returns what a rank does, in words for one rank and for several ranks."""
    if rank.state in STOPPED_STATES:
        how = "traced by a debugger" if rank.state == "t" else "stopped"
        return f"is {how}", f"are {how}"
    unordered = rank.step == named.step and UNREPORTED in (rank.phase, named.phase)
    if named.phase != "exit" and not unordered and rank.position < named.position:
        return "is slower,", "are slower,"
    return "waits", "wait"
