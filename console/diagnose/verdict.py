"""The verdict on a stall: ranks to blame, cause, confidence, evidence and the next step.

The evidence names the ranks to blame. The first row of `CAUSES` that applies to the first of these
ranks gives the cause. Such a cause has the confidence "high" only if two independent sources name
this rank, and no source names only other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from console.diagnose import gpu_signs
from console.diagnose.causes import (
    CAUSES,
    OF_LIBRARY,
    SEEN_BY_ONE,
    Cause,
    Suspect,
    device,
)
from console.diagnose.evidence import Evidence, Stall
from console.diagnose.rank_evidence import (
    ENDED_STATES,
    ENDING_PHASES,
    LASTING_STATES,
    NAMED_AFTER_S,
    STOPPED_STATES,
    UNREPORTED,
    Moment,
    RankEvidence,
    limit_s,
    moment_of,
    names,
    unusable_pulses,
    why_unconfirmed,
)
from console.model import Sure, Verdict
from console.plan import Watch
from console.sources.stacks import Frame
from console.status_text import clock

NO_EVIDENCE = Evidence()
KERNEL_CAUSES = ("stopped", "traced", "exited")
"""Causes for which the process state is enough evidence."""
COLLECTING = Evidence()
"""Stands for evidence that this process collects at present."""
LOOK_AT_STACKS = "dump the stacks to see the cause"
BEING_READ = "stacks and processes are being read to find the cause"
EVIDENCE_LINES = 64


def diagnose(
    ranks: Sequence[RankEvidence], watch: Watch, ts: float, evidence: Evidence = NO_EVIDENCE
) -> Verdict | None:
    """Returns the verdict at unix time `ts`, or None if the ranks do not stall."""
    moment = moment_of(ranks, watch, ts)
    return explain(moment, evidence) if moment and moment.is_stalled else None


def explain(moment: Moment, evidence: Evidence) -> Verdict:
    """Returns the verdict on a stall: its cause, the evidence for and against it, the next step.

    A rank whose pulse is ignored (`doubt`) is never blamed. If there is such a rank, the evidence
    is not used; the confidence is then "low". But a cause in `KERNEL_CAUSES` stays if the evidence
    gives the same cause, and then has the confidence that this evidence allows.
    """
    full = _explain(moment, evidence)
    if not moment.doubtful:
        return full
    found = _explain(moment, NO_EVIDENCE)
    if found.cause in KERNEL_CAUSES and found.cause == full.cause:
        return full
    sentence = f"{found.sentence}; {unusable_pulses(moment.doubtful)}"
    return replace(found, sure="low", sentence=sentence)


def _explain(moment: Moment, evidence: Evidence) -> Verdict:
    stall, slow = Stall(moment, evidence), moment.slowest[0]
    early = [each for each in moment.exited if each.step <= slow.step]
    # A rank that saves or exits does not wait for a rank that exited.
    if slow.phase in ENDING_PHASES or any(each.cannot_run for each in stall.suspects):
        early = []
    # The positions name a running rank even if it waits for the rank that exited.
    contrary = sum(bool(each.ranks) and each.source != "positions" for each in stall.signs)
    if early and contrary < 2:
        return _exited_early(stall, early, contrary > 0)
    culprits = _culprits(stall)
    if not culprits:
        return _alike(stall)
    of = culprits[0]
    cause = next((each for each in CAUSES if each.explain(of)), None)
    if cause is not None:  # keep the ranks with the same cause
        culprits = [each for each in culprits if cause.explain(each)]
    ranks, alone = [each.rank for each in culprits], len(moment.running) == 1
    sure = _sure(culprits, cause, stall)
    if alone and cause is None and why_unconfirmed(moment.running, moment.watch):
        sure = "low"
    if early and sure == "high":
        sure = "medium"
    everyone = len(culprits) == len(moment.running) > 1
    calls = stall.difference.text if stall.difference.kind in ("behind", "mismatch") else ""
    native = of.where.kind == "native" and of.main.kind == "futex"
    frame = None if native else of.where.own or of.where.frame
    at, who = f" ({frame.short})" if frame else "", "it" if len(culprits) == 1 else "each"
    action = _action(cause, ranks, frame) if cause else ""
    verdict = _verdict(
        moment, None if everyone else of.rank,
        cause.name if cause else "all-ranks" if alone else "slowest-rank", sure,
        _stalled(moment, ranks) + (f": {who} {cause.explain(of)}" if cause else "") + at,
        action if of.state == "T" else "", calls,
        _others(moment, ranks), _exits(moment.exited), _advice(cause, evidence),
    )  # fmt: skip
    if of.where.own and not native:
        verdict = replace(verdict, place=of.where.own.place)
    return _with_signs(verdict, stall, {each.rank for each in ranks}, action)


def _advice(cause: Cause | None, evidence: Evidence) -> str:
    if cause or evidence.stacks:
        return ""
    return BEING_READ if evidence is COLLECTING else LOOK_AT_STACKS


def _exited_early(stall: Stall, early: Sequence[RankEvidence], is_disputed: bool) -> Verdict:
    """Returns the verdict on ranks that exited before the others were done.

    `is_disputed` says that a source names a rank that still runs.
    """
    moment = stall.moment
    slow, first = moment.slowest[0], min(early, key=lambda each: (each.step, each.rank))
    certain = first.step < slow.step and first.state in ENDED_STATES and not is_disputed
    verdict = _verdict(
        moment, first, "exited-early", "high" if certain else "medium",
        f"{_exits(early)} at step {first.step} before the other ranks",
        f"no progress since {_since(moment, slow)}", _others(moment, [first]),
    )  # fmt: skip
    return _with_signs(verdict, stall, set())


def _culprits(stall: Stall) -> list[Suspect]:
    """Returns the ranks to blame: ranks that cannot run, or else those that the most sources name.

    Ranks that cannot run are not the cause if at least two sources name only ranks that can run. If
    all ranks can run and no source names a rank, returns the only rank, or [] if there are several.
    """
    found, blocked = stall.signs, [each for each in stall.suspects if each.cannot_run]
    numbers = {each.number for each in blocked}
    contrary = [sign for sign in found if sign.ranks and not numbers & set(sign.ranks)]
    if blocked and len(contrary) < 2:
        votes = Counter(rank for sign in found for rank in sign.ranks)
        return sorted(blocked, key=lambda each: (-votes[each.number], each.rank.position))
    named = [set(sign.ranks) for sign in (contrary if blocked else found) if sign.ranks]
    if not named:
        return stall.suspects if len(stall.suspects) == 1 else []
    best = max(named, key=lambda ranks: sum(bool(ranks & other) for other in named))
    for other in named:  # keep the ranks that all agreeing sources name
        best = best & other or best
    return [each for each in stall.suspects if each.number in best]


def _sure(culprits: Sequence[Suspect], cause: Cause | None, stall: Stall) -> Sure:
    """Returns the confidence: "high" needs two sources, none against them, and a certain cause."""
    of, difference = culprits[0], stall.difference
    first, numbers = of.number, {each.number for each in culprits}
    contrary = [sign for sign in stall.signs if sign.ranks and first not in sign.ranks]
    # Incomplete flight records that show ranks that differ are no sign. But they contradict a
    # verdict on a rank that is not one of these.
    disagree = max(len(contrary), bool(difference.ranks) and first not in difference.ranks)
    agree = sum(first in sign.ranks for sign in stall.signs)
    everyone = len(culprits) == len(stall.suspects) > 1
    # The unchanged pulse of a rank that is stopped, has ended or exits is one more source. So are
    # the pulses of all ranks if none of them can run.
    is_fixed = of.state in LASTING_STATES or of.rank.phase == "exit"
    agree += is_fixed or (everyone and all(s.cannot_run for s in culprits))
    agree += difference.confirmed and stall.calls_differ(numbers)
    if of.where.kind == "device" and not gpu_signs.is_running(of.gpu):
        return "low"
    if agree >= 2 and not disagree:
        # A rank whose peer never joins has the same evidence as this peer. So if several ranks are
        # named, some of them may not be the cause.
        some_wait = cause is not None and cause.name == "startup" and len(culprits) > 1
        unsure = cause is None or some_wait or _is_unsure(of, cause, stall.evidence)
        return "medium" if unsure else "high"
    return "medium" if agree > disagree else "low"


def _is_unsure(of: Suspect, cause: Cause, evidence: Evidence) -> bool:
    """Returns whether the verdict may be wrong although two sources name its rank."""
    kind = of.where.kind
    waits = ["queue", "thread"] + ["lock", "process"] * (of.main.kind in ("futex", "none"))
    # A stack can stand for different objects, and a library may have made the system call. So
    # both the stack and the process are needed.
    by_process = of.main.kind != "none" or of.uses_a_core
    is_seen = of.has_stack and (by_process or (of.after is not None and kind in OF_LIBRARY))
    return (
        # A process that cannot run writes no stack, so a stack contradicts its state.
        (of.cannot_run and of.has_stack)
        or (cause.name not in SEEN_BY_ONE and not is_seen)
        or (cause.name not in SEEN_BY_ONE and of.in_futex and of.main_share is None)
        # The program's own data loader may also wait for a queue, a thread, a lock or a pool.
        or (kind in waits and of.rank.phase == UNREPORTED and not of.loader[1])
        or (cause.name == "busy" and not of.runs_python)
        # With two ranks there is no majority: either may have called the wrong collective.
        or (cause.name == "mismatch" and len(evidence.flights) == 2)
        # The cause "device" was tested on one GPU only.
        or cause.name == "device"
        or of.main.unsure
        or (cause.name == "disk" and of.after is None)  # a frozen process is in state D too
    )


def _alike(stall: Stall) -> Verdict:
    """Returns the verdict for a stall in which no source names a rank."""
    moment, why, lost = stall.moment, "", ""
    kinds = {each.where.kind for each in stall.suspects}
    name, sure, last = "all-ranks", "low", "no rank is seen behind another"
    if stall.difference.kind == "mismatch":
        name, sure = "mismatch", "medium"
    elif stall.is_together:
        lost = ", ".join(
            f"packets between rank {a} and rank {b} ({link.here}, {link.peer}) are not acknowledged"
            for (a, b), link in sorted(stall.lost().items())[:4]
        )  # fmt: skip
        name, sure = "transport", "high" if lost else "medium"
    elif kinds == {"store"}:
        name, sure, why = "startup", "medium", ": each waits for its peers to join"
    elif kinds == {"device"}:
        words = {device(each) for each in stall.suspects}
        text = words.pop() if len(words) == 1 else "waits for its GPU"
        name, sure, why = "device", "medium", f": each {text}"
    rule = next((each for each in CAUSES if each.name == name), None)
    verdict = _verdict(
        moment, None, name, sure, _stalled(moment, moment.running) + why, lost,
        _exits(moment.exited), stall.difference.text if rule else last,
        _advice(rule, stall.evidence),
    )  # fmt: skip
    action = _action(rule, moment.running, None) if rule else ""
    return _with_signs(verdict, stall, set(), action)


def _with_signs(verdict: Verdict, stall: Stall, named: set[int], action: str = "") -> Verdict:
    """Returns the verdict with the evidence for and against it, and with the next step."""
    lines, against, evidence = list[str](), list[str](), stall.evidence
    for sign in filter(lambda each: each.text, stall.signs):
        other = sign.ranks and not named & set(sign.ranks)
        line = f"{sign.source}{evidence.as_of(sign.source)}: {sign.text}"
        (against if other else lines).append(line)
    return replace(
        verdict, evidence=(*lines, *verdict.evidence), against=tuple(against),
        missing=evidence.gaps, action=action,
    )  # fmt: skip


def _action(cause: Cause, ranks: Sequence[RankEvidence], frame: Frame | None) -> str:
    place = f"{frame.file}:{frame.line}" if frame else "the stack of the rank"
    return cause.action.format(pid=_pid(ranks[0]), place=place, resume=_resume(ranks))


# --- sentences -----------------------------------------------------------------------------------


def _verdict(
    moment: Moment, rank: RankEvidence | None, cause: str, sure: Sure, *parts: str
) -> Verdict:  # fmt: skip
    """Returns a verdict on `rank`, or on all ranks if it is None; `parts` form the sentence."""
    of, sentence = rank or moment.slowest[0], "; ".join(filter(None, parts))
    number = rank.rank if rank else None
    evidence = _positions(moment, rank)
    return Verdict(moment.ts, sentence, cause, number, of.phase, of.step, sure, evidence)


def _positions(moment: Moment, first: RankEvidence | None) -> tuple[str, ...]:
    """Returns one line per rank without `doubt`, at most `EVIDENCE_LINES`; `first` is first."""
    ranks = sorted((*moment.running, *moment.exited), key=lambda each: each is not first)
    counted = any(each.collectives for each in ranks)
    return tuple(
        f"rank {each.rank}: process state {each.state}, {each.position_text}, unchanged for "
        f"{each.unchanged_s:.0f} s, limit {_limit_s(each, moment.watch):.0f} s"
        + (f", {each.collectives} collectives by its own count" if counted else "")
        for each in ranks[:EVIDENCE_LINES]
    )


def _limit_s(rank: RankEvidence, watch: Watch) -> float:
    """Returns the stall limit, or the shorter limit of a rank that cannot continue."""
    limit = limit_s(rank, watch)
    return min(limit, NAMED_AFTER_S) if rank.state in LASTING_STATES else limit


def _since(moment: Moment, rank: RankEvidence) -> str:
    """Returns the time of a rank's last change. An age would soon be wrong in an alert."""
    return clock(moment.ts - rank.unchanged_s)


def _stalled(moment: Moment, ranks: Sequence[RankEvidence]) -> str:
    who, first = names(ranks, "has", "have"), ranks[0]
    return f"{who} been stalled in {first.position_text} since {_since(moment, first)}"


def _exits(ranks: Sequence[RankEvidence]) -> str:
    """Returns a text such as "rank 0 exited (code 0)", or "" if there are no ranks."""
    if not ranks:
        return ""
    if any(each.state not in ENDED_STATES for each in ranks):
        return f"{names(ranks, 'is', 'are')} exiting"
    codes = sorted({each.code for each in ranks if each.code is not None})
    return f"{names(ranks)} exited" + (f" (code {', '.join(map(str, codes))})" if codes else "")


def _resume(ranks: Sequence[RankEvidence]) -> str:
    """Returns a sentence with the command that resumes stopped ranks."""
    pids = " ".join(map(_pid, sorted(ranks, key=lambda each: each.rank)))
    return f"kill -CONT {pids} resumes {'it' if len(ranks) == 1 else 'them'}"


def _pid(rank: RankEvidence) -> str:
    """Returns the pid of a rank, or words in its place: `kill -CONT 0` would signal the shell."""
    return str(rank.pid) if rank.pid > 0 else f"PID-OF-RANK-{rank.rank}"


def _others(moment: Moment, named: Sequence[RankEvidence]) -> str:
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
    unordered = rank.step == named.step and (rank.is_unordered or named.is_unordered)
    if named.phase != "exit" and not unordered and rank.position < named.position:
        return "is slower,", "are slower,"
    return "waits", "wait"
