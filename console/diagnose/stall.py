"""Who holds a run up: pulses and process states in, a verdict or None out. Nothing is read here.

A run stalls when the rank that is furthest behind has not changed its pulse for longer than its
limit: max(floor, 5 × p99 of that phase), with budgets of their own for start-up, evaluation and
saving. A rank that the kernel shows as stopped or gone is named after `NAMED_AT_ONCE_S`; one that
is stopped while another one further behind holds the run up is named beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from console.model import Sure, Verdict
from console.sources.pace import RECORDS_LATE_S, SAFETY
from console.sources.reducer import NO_RECORDS, Head
from trainers.contract import jsonl
from trainers.contract.plan import Watch
from trainers.contract.pulse import CODES

NAMED_AT_ONCE_S = 3.0
STARTING_PHASES = frozenset(("boot", "load"))
SAVING_PHASES = frozenset(("save", "halt"))
STOPPED = "stopped"
STOPPED_STATES, ENDED_STATES = ("T", "t"), ("Z", "X", "gone")
FIRST_STEP = 1
Doubt = Literal["", "lost", "ahead"]
DOUBTS: Mapping[Doubt, str] = {
    "lost": "has no pulse that can be read", "ahead": "records later steps than its pulse shows",
}  # fmt: skip
OVERDUE = 2.0
"""A record is overdue after so many times the longest of the last gaps."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Evidence about one rank at one moment. `phase` is "" for a rank without a pulse.

    `still_s` is for how long its pulse has not changed (without one: since the attempt began),
    `state` the kernel's letter or "gone", `p99_s` of the times of its phase, or of its steps where
    that phase has none.
    """

    rank: int
    pid: int
    state: str
    step: int
    phase: str
    still_s: float
    collectives: int = 0
    p99_s: float | None = None
    first_step: int = FIRST_STEP
    """The first step of this attempt: up to it a rank may compile and allocate."""
    code: int | None = None
    """The exit code of a rank that has left, where it is known."""
    records_s: float | None = None
    """Time since its records showed a new step, None without a record."""
    records_gap_s: float = 0.0
    """Longest of the last times between two such records, 0 before it is known."""
    doubt: Doubt = ""
    """The reason to ignore its pulse: it cannot be read, or its records are ahead of it."""
    nonfinite_steps: int = -1
    """Steps with a non-finite loss, as its pulse counts them; -1 where it does not."""

    @property
    def position(self) -> tuple[int, int, int]:
        return self.step, CODES.get(self.phase, -1), self.collectives

    def where(self) -> str:
        """Returns the place in words: "forward of step 41"."""
        if not self.phase:
            return "start-up, without a pulse"
        return self.phase if self.phase in STARTING_PHASES else f"{self.phase} of step {self.step}"


def with_records(seen: Seen, head: Head, attempt: int, lagging: bool = False) -> Seen:
    """Returns a rank as its pulse shows it with the limits and doubts of its records.

    A pulse that is `lagging` comes from a sample: its records may be ahead of it.
    """
    # A pulse disproves a first step that is later; a program that went on without a record of it
    # may take its first step anywhere.
    first_step = head.first_step if head.first_step <= seen.step + 1 else FIRST_STEP
    ahead = head.progress is not None and head.progress.record["step"] > seen.step and not lagging
    return replace(
        seen, p99_s=head.pace.p99_s(seen.phase),
        first_step=seen.step if attempt > 1 and not head.step else first_step,
        code=head.code if seen.code is None else seen.code,
        records_s=None if head is NO_RECORDS else head.pace.still_s(time.monotonic()),
        records_gap_s=head.pace.gap_s(), doubt="ahead" if ahead else "",
    )  # fmt: skip


def by_records(rank: int, head: Head, watch: Watch) -> Seen:
    """Returns a rank without a pulse by its newest record and the times between its records."""
    record, now = head.last.record, time.monotonic()
    step, pid = record["step"], jsonl.integer(record, "pid") or 0
    phase = "exit" if record["msg"] == "exit" else "log" if step else min(STARTING_PHASES)
    usual_s = head.pace.usual_gap_s(watch.startup_s / SAFETY)
    still_s = head.pace.age_s(now)
    return Seen(rank, pid, "?", max(step, 2) if step else 0, phase, still_s, 0, usual_s)


def limit_s(seen: Seen, watch: Watch) -> float:
    """Returns for how long this rank's pulse may stay as it is."""
    if not seen.phase or seen.phase in STARTING_PHASES or seen.step <= seen.first_step:
        return watch.startup_s
    usual = max(watch.stall_floor_s, SAFETY * (seen.p99_s or 0.0))
    if seen.phase == "eval":
        return max(usual, watch.eval_s or watch.startup_s)
    if seen.phase in SAVING_PHASES:
        return max(usual, watch.save_s or watch.startup_s)
    return usual


@dataclass(frozen=True, slots=True)
class _Case:
    """All ranks that still run, those furthest behind, the others, and those that have left."""

    ranks: tuple[Seen, ...]
    behind: tuple[Seen, ...]
    others: tuple[Seen, ...]
    left: tuple[Seen, ...]
    watch: Watch
    ts: float

    @property
    def overdue(self) -> bool:
        return all(seen.still_s > limit_s(seen, self.watch) for seen in self.behind)


def spans(numbers: Iterable[int], dash: str = "-") -> list[str]:
    """Returns ["0-2", "4"]: numbers as short as they can be written."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(a) if a == b else f"{a}{dash}{b}" for a, b in found]


def _named(ranks: Sequence[Seen]) -> str:
    """Returns "rank 3" or "ranks 0-2, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans(seen.rank for seen in ranks))}"


def _waiting(others: Sequence[Seen], than: Seen) -> str:
    """Says what the other ranks do, grouped: who is stopped, who is further behind, who waits."""
    groups: dict[tuple[str, str], list[Seen]] = {}
    for seen in others:
        same_step = seen.phase and seen.step == than.step
        place = seen.phase if same_step else seen.where()
        groups.setdefault((_does(seen, than), place), []).append(seen)
    return "".join(
        f"; {_are(group) if does else _named(group)} "
        f"{does or ('waits' if len(group) == 1 else 'wait')} in {place}"
        + (f" ({_go_on(group)})" if does == STOPPED else "")
        for (does, place), group in groups.items()
    )


def _does(seen: Seen, than: Seen) -> str:
    """Says what a rank is that does not just wait, "" for one that does."""
    if seen.state in STOPPED_STATES:
        return STOPPED
    behind = than.phase != "exit" and seen.position < than.position
    return "further behind" if behind else ""


def _go_on(ranks: Sequence[Seen]) -> str:
    """Says what lets stopped ranks go on: a signal to each of them."""
    pids = " ".join(str(seen.pid) for seen in sorted(ranks, key=lambda seen: seen.rank))
    return f"kill -CONT {pids} lets {'it' if len(ranks) == 1 else 'them'} go on"


def _changed(case: _Case, seen: Seen) -> str:
    """Returns the time of day of its last change: true for as long as the sentence stands."""
    return time.strftime("%H:%M:%S", time.localtime(case.ts - seen.still_s))


def _evidence(case: _Case, who: Seen | None) -> tuple[str, ...]:
    """Returns a line a rank, the one to blame first; no collectives where nobody counts them."""
    ranks = sorted((*case.ranks, *case.left), key=lambda s: s is not who)
    counted = any(s.collectives for s in ranks)
    return tuple(
        f"rank {s.rank}: process state {s.state}, {s.where()}, unchanged for {s.still_s:.0f} s, "
        f"limit {limit_s(s, case.watch):.0f} s"
        + (f", {s.collectives} collectives" if counted else "")
        for s in ranks[:64]
    )


def _verdict(case: _Case, who: Seen | None, cause: str, sure: Sure, sentence: str) -> Verdict:
    place = who or case.behind[0]
    rank = who.rank if who else None
    return Verdict(
        case.ts, sentence, cause, rank, place.phase, place.step, sure, _evidence(case, who)
    )


def _in_state(case: _Case, states: Sequence[str]) -> tuple[list[Seen], str]:
    """Returns the ranks in a state, the furthest behind first, and what the others do."""
    found = [s for s in case.ranks if s.state in states and s.still_s > NAMED_AT_ONCE_S]
    found.sort(key=lambda s: s.position)
    others = [s for s in case.ranks if s not in found]
    return found, _waiting(others, found[0]) if found else ""


def _are(ranks: Sequence[Seen]) -> str:
    return f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _stopped(case: _Case) -> Verdict | None:
    """Names stopped ranks, unless another one holds the run up that is further behind."""
    found, waiting = _in_state(case, STOPPED_STATES)
    first = found[0] if found else None
    further = first is not None and case.behind[0].position < first.position
    if first is None or (further and case.overdue):
        return None
    sentence = (
        f"{_are(found)} stopped (SIGSTOP or a debugger): in {first.where()} "
        f"since {_changed(case, first)}; {_go_on(found)}{waiting}"
    )
    return _verdict(case, first, "stopped", "medium" if further else "high", sentence)


def _gone(case: _Case) -> Verdict | None:
    found, waiting = _in_state(case, ENDED_STATES)
    if not found or len(found) == len(case.ranks):
        return None
    first = found[0]
    last = f"last seen in {first.where()} at {_changed(case, first)}"
    how = "dead (unreaped: its parent does not run)" if first.state == "Z" else "gone"
    return _verdict(case, first, "gone", "high", f"{_are(found)} {how}, {last}{waiting}")


def _uninterruptible(case: _Case) -> Verdict | None:
    first = case.behind[0]
    if not case.overdue or first.state != "D":
        return None
    sentence = (
        f"rank {first.rank} is in uninterruptible sleep (disk, network file system or driver): in "
        f"{first.where()} since {_changed(case, first)}{_waiting(case.others, first)}"
    )
    return _verdict(case, first, "uninterruptible", "medium", sentence)


def _departed(ranks: Sequence[Seen]) -> str:
    """Returns "rank 0 has left (exit 0)"."""
    leaving = any(seen.state not in ENDED_STATES for seen in ranks)
    if leaving:
        return f"{_are(ranks)} leaving"
    codes = sorted({seen.code for seen in ranks if seen.code is not None})
    told = f" (exit {', '.join(map(str, codes))})" if codes else ""
    return f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'} left{told}"


def _left(case: _Case) -> Verdict | None:
    """Names ranks that left before the others were done; who only saves needs nobody."""
    first = case.behind[0]
    early = [s for s in case.left if s.step <= first.step]
    if not case.overdue or not early or first.phase in SAVING_PHASES:
        return None
    who = min(early, key=lambda s: (s.step, s.rank))
    sentence = (
        f"{_departed(early)} at step {who.step} while the others wait, since "
        f"{_changed(case, first)}{_waiting(case.ranks, who)}"
    )
    certain = who.step < first.step and who.state in ENDED_STATES
    return _verdict(case, who, "left", "high" if certain else "medium", sentence)


def _behind(case: _Case) -> Verdict | None:
    """Names who is furthest behind; one pulse alone says so, which is never sure."""
    if not case.overdue or not case.others:
        return None
    first = case.behind[0]
    left = f"; {_departed(case.left)}" if case.left else ""
    sentence = (
        f"{_are(case.behind)} behind: in {first.where()} since {_changed(case, first)}"
        f"{_waiting(case.others, first)}{left}"
    )
    return _verdict(case, first, "behind", "medium", sentence)


def _level(case: _Case) -> Verdict | None:
    if not case.overdue:
        return None
    first, alone = case.behind[0], len(case.ranks) == 1
    stands = f"{_named(case.ranks)} stand{'s' if alone else ''} still in {first.where()}"
    hint = "" if alone else "; no rank is behind the others, so their stacks must tell"
    left = f"; {_departed(case.left)}" if case.left else ""
    sentence = f"{stands} since {_changed(case, first)}{left}{hint}"
    certain = alone and not disagreement(case.ranks, case.watch)
    return _verdict(case, first if alone else None, "level", "high" if certain else "low", sentence)


FACTS = ("stopped", "gone")
"""Causes that the kernel confirms."""
RULES: tuple[Callable[[_Case], Verdict | None], ...] = (
    _stopped, _gone, _uninterruptible, _left, _behind, _level,
)  # fmt: skip
"""The first rule that finds something gives the verdict."""


def furthest_behind(ranks: Sequence[Seen]) -> tuple[Seen, ...]:
    """Returns the ranks at the lowest position of those that have not left and can be judged."""
    running = [(s.position, s) for s in ranks if s.phase != "exit" and not s.doubt]
    if not running:
        return ()
    lowest = min(position for position, _ in running)
    return tuple(seen for position, seen in running if position == lowest)


def diagnose(ranks: Sequence[Seen], watch: Watch, ts: float) -> Verdict | None:
    """Returns who holds the run up, None while it moves. `ts` is the unix time of the evidence.

    A rank whose pulse says nothing is not judged, and its like makes every verdict unsure.
    """
    unseen = tuple(seen for seen in ranks if seen.doubt)
    ranks = [seen for seen in ranks if not seen.doubt]
    behind = furthest_behind(ranks)
    if not behind:
        return None
    running = tuple(seen for seen in ranks if seen.phase != "exit")
    left = tuple(seen for seen in ranks if seen.phase == "exit")
    lowest = behind[0].position
    others = tuple(seen for seen in running if seen.position != lowest)
    case = _Case(running, behind, others, left, watch, ts)
    found = next((verdict for rule in RULES if (verdict := rule(case))), None)
    if found is None or not unseen or found.cause in FACTS:
        return found
    return replace(found, sure="low", sentence=f"{found.sentence}; {doubted(unseen)}")


def doubted(ranks: Sequence[Seen]) -> str:
    """Says which ranks have a pulse that says nothing, and why."""
    return "; ".join(
        f"{_named(found)} {words}" for doubt, words in DOUBTS.items()
        if (found := [seen for seen in ranks if seen.doubt == doubt])
    )  # fmt: skip


def disagreement(ranks: Sequence[Seen], watch: Watch) -> str:
    """Says why the records do not confirm that these ranks stand still, "" when they do.

    A new step that was read late, but longer ago than the rank's limit, is no progress any more. A
    rank that records rarely confirms nothing before its next record is overdue.
    """
    for seen in ranks:
        who = f"rank {seen.rank}"
        if seen.phase == "exit":
            continue
        if seen.doubt:
            return f"{who} {DOUBTS[seen.doubt]}"
        if not seen.phase:
            return f"{who} has no pulse"
        if seen.records_s is None:
            return f"{who} has no record that could confirm it"
        if seen.records_s < min(limit_s(seen, watch), seen.still_s - RECORDS_LATE_S):
            return f"the records of {who} show a new step {seen.records_s:.0f} s ago"
        if seen.records_s < OVERDUE * seen.records_gap_s:
            return f"{who} records only every {seen.records_gap_s:.0f} s, the next is not overdue"
    return ""
