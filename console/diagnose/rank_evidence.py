"""The evidence about the ranks at one moment: positions, stall limits, and which ranks are slowest.

The stall limit of a rank in a step is max(floor, 5 × p99 of its phase). Start-up with the steps
before a step time is known, evaluation, saving and the exit have their own limits. No file is read
here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from console.plan import Watch
from console.sources.pace import RECORDS_LATE_S, SAFETY
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.status_text import rank_names
from trainers.contract import jsonl
from trainers.contract.pulse import ORDER

STARTING_PHASES = frozenset(("boot", "load"))
SAVING_PHASES = frozenset(("save", "halt"))
PAUSES = SAVING_PHASES | {"eval"}
"""In these phases a run does no training step."""
ENDING_PHASES = SAVING_PHASES | {"exit"}
"""In these phases a rank waits for no rank that has exited, and a halt may be in progress."""
STOPPED_STATES, ENDED_STATES = ("T", "t"), ("Z", "X", "gone")
LASTING_STATES = (*STOPPED_STATES, *ENDED_STATES)
NAMED_AFTER_S = 3.0
"""After this time without a change of the pulse, a stopped or ended rank counts as stalled."""
UNREPORTED = "step"
"""The value of `phase` within a step if the program has not reported a phase."""
FIRST_STEP = 1
Doubt = Literal["", "lost", "ahead", "future", "unjoined"]
DOUBTS: Mapping[Doubt, str] = {
    "lost": "has no readable pulse", "ahead": "records later steps than its pulse shows",
    "future": "recorded a time in the future", "unjoined": "did not call join",
}  # fmt: skip
OVERDUE = 2.0
"""A record is overdue after this many times the longest recent gap, both without the pauses."""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """Evidence about one rank at one time, from its pulse, or else from `by_records`.

    Without either, `phase` is "". `unchanged_s` is the time since the pulse changed, or an estimate
    if there is no pulse. `state` is the kernel's letter, "gone", or "?" if it is not known. `p99_s`
    is the 99th percentile of the times in the rank's phase, or of the step times if the phase has
    none, or None while no step time is known. `by_records` uses the gaps between records instead.
    """

    rank: int
    pid: int
    state: str
    step: int
    phase: str
    unchanged_s: float
    collectives: int = 0
    p99_s: float | None = 0.0
    first_step: int = FIRST_STEP
    """The first step of this attempt. During this step a rank may still compile and allocate."""
    code: int | None = None
    """The exit code of a rank that has exited, if it is known."""
    records_s: float | None = None
    """Time since a new step was read in the rank's records, infinite if no step was new.

    None for a rank without a pulse or without records.
    """
    paused_s: float = 0.0
    """Time of the pauses in `records_s`, 0 for a rank in a pause, because it may hang there."""
    records_gap_s: float = 0.0
    """Longest recent gap between records with a new step, without the pauses, 0 if not known."""
    doubt: Doubt = ""
    """Why the pulse or the records are ignored, as a key of `DOUBTS`, or "" if they are used."""
    nonfinite_steps: int = -1
    """Number of steps with a non-finite loss according to the pulse, or -1 if not known."""
    records: int = 0
    """Number of the newest record that the rank queued according to the pulse, 0 without one."""
    idle_s: float = 0.0
    """Time since the process used the CPU, for a rank without a pulse; 0 if it is not known.

    A process with child processes is not idle.
    """
    start_ticks: int | None = None
    """The start time of the process (clock ticks), which shows whether the pid was reused."""
    is_foreign: bool = False
    """True for a rank of a foreign program, which may evaluate and save anywhere in a step."""

    @property
    def position(self) -> tuple[int, int, int]:
        """The progress of the rank as a sortable position: step, phase of the step, collectives."""
        return self.step, ORDER.get(self.phase, -1), self.collectives

    @property
    def is_unordered(self) -> bool:
        """True if the phase may be before or after other phases of the same step."""
        return self.phase == UNREPORTED or (self.is_foreign and self.phase in ("eval", "save"))

    @property
    def position_text(self) -> str:
        """The position of the rank as text: "forward of step 41"."""
        if not self.phase:
            return "start-up (no pulse)"
        if self.phase == UNREPORTED:
            return f"step {self.step} (phase not reported)"
        return self.phase if self.phase in STARTING_PHASES else f"{self.phase} of step {self.step}"


def with_records(
    rank: RankEvidence, head: LatestRecords, lagging: bool = False
) -> RankEvidence:  # fmt: skip
    """Returns a rank with figures from its records: p99, first step, exit code, times and doubt.

    `lagging` says that the pulse is an older sample, so the records may be ahead of it. The pace of
    the rank learns whether the rank is in a pause.
    """
    now = time.monotonic()
    head.pace.note_pause(now, rank.phase in PAUSES)
    # A recorded first step more than one step ahead of the pulse is wrong. Until a step is
    # recorded, the present step is the first one: a foreign program does not record a resume.
    first_step = head.first_step if head.first_step <= rank.step + 1 else FIRST_STEP
    progress = head.progress or {"step": 0}
    # Steps may begin anew in each epoch. A record is not ahead if the pulse shows its number.
    is_known = 0 < (jsonl.integer(progress, "n") or 0) <= rank.records
    ahead = progress["step"] > rank.step and not is_known and not lagging
    return replace(
        rank, p99_s=head.pace.p99_s(rank.phase),
        first_step=first_step if head.step else rank.step,
        code=head.code if rank.code is None else rank.code,
        records_s=None if head is NO_RECORDS else head.pace.without_step_s(now),
        paused_s=0.0 if rank.phase in PAUSES else head.pace.paused_s,
        records_gap_s=head.pace.gap_s(), doubt="ahead" if ahead else "",
    )  # fmt: skip


def of_foreign(ranks: Sequence[RankEvidence], watch: Watch) -> tuple[RankEvidence, ...]:
    """Returns ranks as those of a foreign program: a rank that did not call `join` gets a doubt.

    No rank gets the doubt while it may be the cause of a stall in start-up: while a rank that has
    joined waits there or in its first step, or, if none has joined, while a rank uses no CPU since
    its start-up.
    """
    ranks = tuple(replace(each, is_foreign=True) for each in ranks)
    joined = [each for each in ranks if each.phase]
    if any(each.step <= each.first_step for each in joined):
        return ranks
    idle = [each for each in unfinished(ranks) if each.idle_s > watch.startup_s]
    if not joined and any(may_hang(each, watch) for each in idle):
        return ranks
    return tuple(
        each if each.phase or each.doubt else replace(each, doubt="unjoined") for each in ranks
    )


def unwatched(ranks: Sequence[RankEvidence], watch: Watch) -> tuple[RankEvidence, ...]:
    """Returns the ranks that did not call `join` within `startup_s`, except those that may hang."""
    late = [
        each for each in ranks if each.doubt == "unjoined" and each.unchanged_s > watch.startup_s
    ]
    has_joined = len(late) < len(ranks)
    return tuple(late) if has_joined or not all(may_hang(each, watch) for each in late) else ()


def may_hang(rank: RankEvidence, watch: Watch) -> bool:
    """Returns whether a rank that did not call `join` has used no CPU since its start-up."""
    return rank.unchanged_s - rank.idle_s <= watch.startup_s


def by_records(rank: int, head: LatestRecords, watch: Watch) -> RankEvidence:
    """Returns the evidence about a rank without a pulse, derived from the times of its records."""
    record, now = head.last, time.monotonic()
    step, pid = head.step or record["step"], jsonl.integer(record, "pid") or 0
    phase = "exit" if record["msg"] == "exit" else "log" if step else min(STARTING_PHASES)
    usual_s = head.pace.usual_gap_s(watch.startup_s / SAFETY)
    # The clock of the rank's host may be behind, so a step that has just been read counts too.
    age_s = min(head.pace.age_s(now), head.pace.without_step_s(now))
    # With `first_step` 0, the limit of a rank at step 1 follows from the gaps between records.
    found = RankEvidence(rank, pid, "?", step, phase, age_s, p99_s=usual_s, first_step=0)
    is_unknown = head.pace.from_future and age_s <= limit_s(found, watch)
    return replace(found, doubt="future") if is_unknown else found


def limit_s(rank: RankEvidence, watch: Watch) -> float:
    """Returns the stall limit of a rank in its present phase and step."""
    if rank.phase == "exit":
        return watch.stall_floor_s
    usual = watch.startup_s
    if not rank.phase or rank.phase in STARTING_PHASES:
        return usual
    if rank.p99_s is not None:
        usual = max(watch.stall_floor_s, SAFETY * rank.p99_s)
    if rank.phase == "eval":
        return max(usual, watch.eval_s or watch.startup_s)
    if rank.phase in SAVING_PHASES:
        return max(usual, watch.save_s or watch.startup_s)
    return usual


def slowest(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Returns the ranks with the lowest position; ranks that exit or have a `doubt` do not count.

    If the phase of a rank at the lowest step is unordered, all ranks at that step are returned.
    """
    running = [each for each in ranks if each.phase != "exit" and not each.doubt]
    first = min((each.step for each in running), default=0)
    if any(each.step == first and each.is_unordered for each in running):
        return tuple(each for each in running if each.step == first)
    lowest = min((each.position for each in running), default=None)
    return tuple(each for each in running if each.position == lowest)


def unfinished(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Returns the ranks that have not reported their exit; if all have, the ranks that are alive.

    A rank that has reported its exit counts as alive only if its process is identified.
    """
    running = tuple(each for each in ranks if each.phase != "exit")
    return running or tuple(
        each for each in ranks
        if each.start_ticks is not None and each.state not in (*ENDED_STATES, "?")
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """The ranks that are `unfinished`, the slowest of them, and the other ranks that exited."""

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

        The pulse of such a rank has been unchanged for `NAMED_AFTER_S`, and its process is stopped,
        or has ended without reporting its exit. If all ranks have ended and none reported its exit,
        only the stall limits count.
        """
        if all(each.unchanged_s > limit_s(each, self.watch) for each in self.slowest):
            return True
        ended = [each.state in ENDED_STATES for each in self.running]
        if all(ended) and not self.exited:
            return False
        return any(
            each.state in LASTING_STATES and each.unchanged_s > NAMED_AFTER_S
            for each in self.running
        )


def moment_of(ranks: Sequence[RankEvidence], watch: Watch, ts: float) -> Moment | None:
    """Returns the moment, or None if each rank that is `unfinished` has a `doubt`."""
    doubtful = tuple(each for each in ranks if each.doubt)
    running = tuple(each for each in unfinished(ranks) if not each.doubt)
    others = {each.rank for each in (*running, *doubtful)}
    exited = tuple(each for each in ranks if each.rank not in others)
    first = slowest(running) or running
    return Moment(running, first, exited, doubtful, watch, ts) if running else None


def names(ranks: Sequence[RankEvidence], one: str = "", many: str = "") -> str:
    """Returns the names of ranks, with a verb if it is given, as `rank_names` does."""
    return rank_names((each.rank for each in ranks), one, many)


def unusable_pulses(ranks: Sequence[RankEvidence]) -> str:
    """Returns a text that says which ranks have no usable pulse, and why."""
    return "; ".join(
        f"{names(found)} {words}" for doubt, words in DOUBTS.items()
        if (found := [each for each in ranks if each.doubt == doubt])
    )  # fmt: skip


def why_unconfirmed(ranks: Sequence[RankEvidence], watch: Watch) -> str:
    """Returns why the records do not confirm that these ranks stall, or "" if they confirm it.

    Ranks in the phase "exit" need no confirmation. A record contradicts the stall if it has a new
    step, is younger than the stall limit, and came more than `RECORDS_LATE_S` after the last change
    of the pulse. The records of a rank confirm a stall only when its next record is overdue.
    """
    for each in ranks:
        name = f"rank {each.rank}"
        if each.phase == "exit":
            continue
        if each.doubt:
            return f"{name} {DOUBTS[each.doubt]}"
        if not each.phase:
            return f"{name} has no pulse"
        if each.records_s is None:
            return f"{name} has no record that confirms the stall"
        if each.records_s < min(limit_s(each, watch), each.unchanged_s - RECORDS_LATE_S):
            return f"the records of {name} show a new step {each.records_s:.0f} s ago"
        if each.records_s - each.paused_s < OVERDUE * each.records_gap_s:
            return (
                f"{name} writes a record only every {each.records_gap_s:.0f} s, and the next "
                "record is not overdue"
            )
    return ""
