"""Decides the state of a run and the reason for it, for its supervisor and for every reader.

torchrun returns 1 whichever rank failed. The cause therefore comes from the ranks: how they ended,
in which order, and their last records. A rank that lost its connection to another rank fails in a
collective. It is blamed only if no rank failed by itself. A reader accepts the state of a
supervisor that is alive. If the supervisor is dead, a reader accepts the end that it recorded, but
not while processes of the run are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from console.model import EXIT_CODES, State
from console.rank_end import NAMED_CODES, OomEvidence, RankEnd
from console.status_text import rank_names

LAST_STEP = "done"
"""The reason of a rank that completed all its steps."""
AGREED = "agreed"
"""The reason of a rank that halts only because another rank does."""
TOGETHER_S = 0.5
"""Ends within this time count as simultaneous. torchrun waits longer before KILL."""


@dataclass(frozen=True, slots=True)
class ReaderView:
    """Facts of a reader, for example the supervisor's last state and the living processes.

    A supervisor uses at most `state` and `why`: the recorded end of an attempt that it adopted.
    """

    state: State | None = None
    """The last state that the supervisor wrote, or None if no valid state is known."""
    why: str = ""
    has_supervisor: bool = False
    """True if the supervisor is alive."""
    no_supervisor: str = "the supervisor is not running"
    living: str = ""
    """A sentence on the ranks or processes of the run that are alive, or "" if none was found."""
    next_attempt: int = 2
    newest_record: str = ""
    """A sentence on the age of the newest record, or "" if there is no record."""
    is_elsewhere: bool = False
    """True if the run is on another host, whose processes this reader cannot see."""
    behind: bool = False
    """True if some records have not been read yet."""
    trouble: str = ""
    """Why supervisor.json cannot be read.

    It is "" if the file does not exist. It is also "" if the state is known from an earlier read,
    or from the entry of the run in plan_state.json.
    """
    moved: str = ""
    """A sentence if the directory is a copy or was moved, or ""."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts that determine the state of a run.

    The supervisor observes the processes; a reader has the documents, the records and its `view`.
    """

    spawned: bool = False
    over: bool = False
    requested: str = ""
    """The requested action that ends the attempt, or "" if there is none. `by` is the sender."""
    by: str = ""
    halt_file: bool = False
    halting_ranks: int = 0
    step: int = 0
    verdict: str = ""
    torchrun_code: int | None = None
    """Exit status of torchrun, or None if it is not known or torchrun is alive."""
    torchrun_gone: bool = False
    ends: Sequence[RankEnd] = ()
    order: Sequence[int] = ()
    """Ranks in the order of their ends."""
    halt_steps: Mapping[int, int] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    """The reason in the halt or exit records of each rank that recorded one."""
    has_exit_records: bool = True
    """True if no exit record was lost: each was read, or the program writes no exit records."""
    torchrun_signal: str = ""
    """The signal in the last lines of torchrun's log; it may be wrong (see `ended_by_signal`)."""
    rank_failure: str = ""
    """A sentence on the failed ranks while other ranks are alive, or "" if no rank failed."""
    world: int = 1
    failure: str = ""
    """Why the run could not start, or why its directory cannot be read; "" if neither happened."""
    oom: OomEvidence | None = None
    """The kernel's out-of-memory kills while the ranks ran, or None if the kills are not known."""
    collecting: bool = False
    """True if all processes have ended and their records are still being read."""
    previous_end: str | None = None
    """The end of the last attempt if the run now waits for its next attempt, else None."""
    next_attempt: str = ""
    """When, and from which checkpoint, the next attempt starts."""
    view: ReaderView = ReaderView()
    unjoined: bool = False
    """True if all ranks of a foreign program run and none has called `join`."""
    is_reader: bool = False

    @property
    def halt_wanted(self) -> bool:
        """True if a request or a `.HALT` file asks for a halt."""
        return self.requested == "halt" or self.halt_file

    @property
    def reason(self) -> str:
        """The first reason of a rank, if possible not `AGREED`, or "" if no rank recorded one."""
        return min(self.reasons.values(), key=AGREED.__eq__, default="")

    @property
    def ranks_reason(self) -> str:
        """The quoted `reason`, or ""; with the ranks that have it, if other ranks differ."""
        own = [rank for rank, reason in self.reasons.items() if reason == self.reason]
        where = f" at {rank_names(own)}" if len(own) < len(self.reasons) else ""
        return f'reason: "{self.reason}"{where}' if self.reason else ""

    @property
    def succeeded(self) -> bool:
        """True if all ranks exited with code 0, according to their exits or torchrun's exit."""
        if any(end.signal or end.code not in (0, None) for end in self.ends):
            return False
        all_zero = bool(self.ends) and all(end.code == 0 for end in self.ends)
        return self.torchrun_code == 0 or (all_zero and len(self.ends) == self.world)

    @property
    def ended_by_signal(self) -> bool:
        """True if torchrun's log names a signal, torchrun failed, and no rank failed otherwise.

        Other programs can print into that log, so the exits must agree with the signal.
        """
        failed = self.torchrun_code not in (0, None)
        by_itself = any(
            end.failed and not end.secondary and end.signal != self.torchrun_signal
            for end in self.ends
        )
        return bool(self.torchrun_signal) and failed and not by_itself

    @property
    def halted(self) -> bool:
        """True if all ranks exited with code 0 and at least one rank recorded its halt.

        If exit records are missing, for example after a full disk, a requested halt is assumed to
        have happened.
        """
        lost = self.halt_wanted and not self.has_exit_records
        return self.succeeded and (bool(self.halt_steps) or lost)

    @property
    def doubt(self) -> str:
        """Why the end of the run is unknown, or "" if it is known.

        If exit records are missing, a success is accepted unless `failure` or torchrun's exit code
        contradicts it. A foreign program, for example, may write no exit records.
        """
        contradicted = bool(self.failure) or self.torchrun_code not in (0, None)
        if self.succeeded and not self.has_exit_records and contradicted:
            lost = self.failure or "their exit records are missing"
            return (
                f"all ranks exited with code 0 after step {self.step}; it is unknown whether they "
                f"completed or halted: {lost}; see their checkpoints and logs"
            )
        if self.spawned and not self.ends and self.torchrun_code is None and not self.failure:
            return "the end of torchrun and its ranks was not observed; see torchrun.log"
        doubtful = next((end for end in self.ends if end.doubt), None)
        if doubtful is None or any(end.failed for end in self.ends):
            return ""
        return f"the end of rank {doubtful.rank} is unknown: {doubtful.doubt}"

    @property
    def killed_together(self) -> bool:
        """True if all of several ranks got SIGKILL within `TOGETHER_S`, and not after a failure."""
        killed = [e for e in self.ends if e.signal == "SIGKILL" and not e.killed_after_failure]
        times = [end.ts for end in killed if end.ts is not None]
        return len(times) == self.world > 1 and max(times) - min(times) <= TOGETHER_S

    def exited_early(self) -> RankEnd | None:
        """Returns the rank that exited with code 0 while the others needed it, or None."""
        failed = [end for end in self.ends if end.failed or end.unknown]
        lost_peer = [end for end in failed if end.lost_peer]
        if not lost_peer or not all(end.secondary for end in failed):
            return None
        first, ts = min(self.position(end) for end in failed), min(e.ts or 0.0 for e in failed)
        early = [end for end in self.ends if end.code == 0 and (
            self.position(end) < first or (end.ts and abs(end.ts - ts) < TOGETHER_S))]  # fmt: skip
        return min(early, key=self.position, default=None)

    def culprit(self) -> RankEnd | None:
        """Returns the rank to blame, or None if no rank failed.

        The order is: 1. the rank that exited early, 2. the first rank that failed by itself, 3. a
        rank with an unknown end, but only after all processes have ended, 4. the first rank whose
        end was `secondary`.
        """
        failed = [end for end in self.ends if end.failed or (self.over and end.unknown)]
        return self.exited_early() or min(
            failed, key=lambda e: (e.secondary, e.unknown, self.position(e), e.rank), default=None
        )

    def position(self, end: RankEnd) -> int:
        """Returns the place of an end in `order`; an end that is not in `order` comes last."""
        return self.order.index(end.rank) if end.rank in self.order else len(self.order)


def _halt_words(facts: Facts) -> str:
    steps = sorted(set(facts.halt_steps.values()))
    cause = f"{facts.torchrun_signal} to torchrun" if facts.ended_by_signal else facts.ranks_reason
    by = f" ({cause})" if cause else ""
    if facts.by and facts.requested == "halt":
        by = f", requested by {facts.by}"
    if len(steps) == 1:
        is_all = len(facts.halt_steps) == facts.world > 1
        who = f"all {facts.world} ranks" if is_all else rank_names(facts.halt_steps)
        return f"{who} halted at step {steps[0]}{by}"
    return f"ranks halted at steps {', '.join(map(str, steps))}{by}" if steps else f"halted{by}"


def _completed_words(facts: Facts) -> str:
    early = f"; {facts.ranks_reason}" if facts.reason not in ("", LAST_STEP) else ""
    source = ", according to their exit records" * facts.is_reader
    step = f" after step {facts.step}" if facts.step else ""
    return f"all ranks done{step}{source}{early}"


def _failure_words(facts: Facts) -> str:
    end = facts.culprit()
    if end is None or (end.unknown and facts.failure):
        return facts.failure or "the ranks exited without an error record; see torchrun.log"
    if facts.killed_together:
        return _killed_together_words(facts)
    if end == facts.exited_early():
        first = "" if end.late else " first"
        sentence = f"rank {end.rank} exited{first} (code 0){end.at}, while the others continued"
    else:
        sentence = _culprit_words(facts, end)
    others = [e for e in facts.ends if e.rank != end.rank and e.failed and e.secondary]
    unordered = [e for e in others if e.lost_peer and e.late and end.late]
    lost = [e for e in others if e.lost_peer and e not in unordered]
    earlier = [e for e in lost if facts.position(e) < facts.position(end)]
    groups = {
        "exited earlier, in a failed collective": earlier,
        "also exited, in a failed collective": unordered,
        "ended because of it": [e for e in others if e not in (*earlier, *unordered)],
    }
    for words, ends in groups.items():
        if ends:
            sentence += f"; {rank_names(each.rank for each in ends)} {words}"
    return sentence


def _killed_together_words(facts: Facts) -> str:
    step = f" at step {facts.step}" if facts.step else ""
    who = f"all {facts.world} ranks were killed"
    if facts.oom is not None and facts.oom.here:
        return (
            f"{who} by the kernel at the same time{step}: out of host memory ({facts.oom.words()})"
        )
    by = "probably from outside, by a scheduler or the container runtime"
    return f"{who} by SIGKILL at the same time{step}: {by}"


def _culprit_words(facts: Facts, end: RankEnd) -> str:
    """Returns the sentence on the rank to blame, and on out-of-memory kills while it ran."""
    oom, sentence = facts.oom, end.sentence()
    if oom is None:
        return sentence
    killed = end.signal == "SIGKILL"
    if oom.here and killed:
        return (
            f"rank {end.rank} was killed by the kernel{end.at}: out of host memory ({oom.words()})"
        )
    if oom.here:
        return (
            f"{sentence}; the kernel killed a process because host memory ran out ({oom.words()})"
        )
    if oom.perhaps and killed:
        return f"{sentence}, probably by the kernel: the host ran out of memory ({oom.words()})"
    return sentence


def _has_named_error(facts: Facts) -> bool:
    end = facts.culprit()
    return end is not None and not end.signal and (bool(end.error) or end.known_code in NAMED_CODES)


def _between_words(facts: Facts) -> str:
    request = f"{facts.requested} requested by {facts.by} before the next attempt"
    return f"{request}; previous end: {facts.previous_end}"


StateRule = tuple[State | None, Callable[[Facts], bool], Callable[[Facts], str]]
"""A state, its condition and its sentence. The state None means the supervisor's last state."""

SAID_BY_SUPERVISOR: tuple[StateRule, ...] = (
    (None, lambda f: f.view.has_supervisor and f.view.state is not None, lambda f: f.view.why),
    ("unsupervised", lambda f: f.view.state in EXIT_CODES and bool(f.view.living),
     lambda f: f"its documents say that the run is {f.view.state}, but {f.view.living}; "
               f"{f.view.no_supervisor}"),
    (None, lambda f: f.view.state in EXIT_CODES, lambda f: f.view.why),
    ("lost", lambda f: bool(f.view.moved) and not f.over, lambda f: f.view.moved),
    ("unsupervised", lambda f: bool(f.view.living),
     lambda f: f"{f.view.no_supervisor if f.view.state else 'no document has a state'}; "
               f"{f.view.living}"),
    ("lost",
     lambda f: f.view.state == "restarting" and not (f.view.behind or f.view.is_elsewhere),
     lambda f: f"{f.view.no_supervisor}, so attempt {f.view.next_attempt} does not start until you "
               f"adopt the run; previous end: {f.view.why.partition(': ')[2]}"),
)  # fmt: skip
"""A reader's first rules, for example on the state of a living supervisor or a recorded end."""

NO_END_RECORDED: tuple[StateRule, ...] = (
    ("queued", lambda f: f.view.state is None and not f.view.newest_record,
     lambda f: "no record yet"),
    ("unsupervised", lambda f: f.view.state is None,
     lambda f: f"no supervisor; {f.view.newest_record}"),
    ("unsupervised", lambda f: f.view.behind,
     lambda f: f"{f.view.no_supervisor}; the records are still being read"),
    ("unsupervised", lambda f: f.view.is_elsewhere,
     lambda f: "; ".join(filter(None, (f.view.no_supervisor, f.view.newest_record)))),
    ("lost", lambda f: True,
     lambda f: f"{f.view.no_supervisor}, no rank is alive, and no exit record gives a reason"),
)  # fmt: skip
"""The rules of a reader if neither the supervisor nor the ranks recorded an end."""

BETWEEN_ATTEMPTS: tuple[StateRule, ...] = (
    ("killed", lambda f: f.requested == "kill", _between_words),
    ("stopped", lambda f: f.requested == "stop", _between_words),
    ("crashed", lambda f: f.requested == "restart", _between_words),
    ("halted", lambda f: f.requested == "halt", _between_words),
    ("halted", lambda f: f.halt_file,
     lambda f: f"a .HALT file exists; previous end: {f.previous_end}"),
    ("restarting", lambda f: True, lambda f: f"{f.next_attempt}: {f.previous_end}"),
)  # fmt: skip
"""The rules for the time between two attempts, in which no rank runs."""

ENDED: tuple[StateRule, ...] = (
    (None, lambda f: f.view.state in EXIT_CODES, lambda f: f.view.why),
    ("crashed", lambda f: f.requested == "restart",
     lambda f: f"ended for a restart, requested by {f.by}"),
    ("killed", lambda f: f.requested == "kill", lambda f: f"killed, requested by {f.by}"),
    ("stopped",
     lambda f: f.requested == "stop"
     and not (f.succeeded and f.has_exit_records and not f.halt_steps),
     lambda f: f"stopped, requested by {f.by}"),
    ("halted", lambda f: f.halted or (f.requested == "halt" and not f.spawned), _halt_words),
    ("stopped", lambda f: f.ended_by_signal and not (f.succeeded and f.has_exit_records),
     lambda f: f"stopped by {f.torchrun_signal} to torchrun"),
    ("lost", lambda f: bool(f.doubt), lambda f: f.doubt),
    ("completed", lambda f: f.succeeded, _completed_words),
    ("failed", _has_named_error, _failure_words),
    ("crashed", lambda f: True, _failure_words),
)  # fmt: skip
"""The rules for a run whose processes have all ended. A recorded end does not change."""

LIVE: tuple[StateRule, ...] = (
    ("stopping", lambda f: f.collecting,
     lambda f: "all ranks have ended; their records are still being read"),
    ("stopping", lambda f: f.requested in ("restart", "stop", "kill"),
     lambda f: f"{f.requested}, requested by {f.by}"),
    ("stopping", lambda f: bool(f.rank_failure), lambda f: f.rank_failure),
    ("stalled", lambda f: bool(f.verdict),
     lambda f: f.verdict + "; a halt is pending" * (f.halt_wanted and not f.halting_ranks)),
    ("halting", lambda f: f.halt_wanted or f.halting_ranks > 0,
     lambda f: f"halt, requested by {f.by or 'a .HALT file or a signal'}"
     + "; it has no effect until the ranks call join; stop ends the run now" * f.unjoined),
    ("running", lambda f: f.step > 0,
     lambda f: "torchrun is not running; the ranks continue without it"
     if f.torchrun_gone and len(f.ends) < f.world else ""),
    ("starting", lambda f: f.unjoined,
     lambda f: "no rank has called join yet: their steps are not known, and a halt has no effect "
               "until then"),
    ("starting", lambda f: True,
     lambda f: "torchrun starts the ranks" if f.spawned else "preparing the run directory"),
)  # fmt: skip
"""The rules of a supervisor for a run that has not ended."""


TABLES: tuple[tuple[Callable[[Facts], bool], tuple[StateRule, ...]], ...] = (
    (lambda f: f.is_reader, SAID_BY_SUPERVISOR),
    (lambda f: f.previous_end is not None, BETWEEN_ATTEMPTS),
    (lambda f: f.over, ENDED),
    (lambda f: f.is_reader, NO_END_RECORDED),
    (lambda f: True, LIVE),
)
"""Tables of rules, each with a condition. In the tables that apply, the first true rule decides."""


def decide(facts: Facts) -> tuple[State, str]:
    """Returns two values: the state of a run, and the reason for this state."""
    rules = (rule for applies, table in TABLES if applies(facts) for rule in table)
    state, _, words = next(rule for rule in rules if rule[1](facts))
    trouble, why = facts.view.trouble, words(facts)
    return state or facts.view.state or "lost", f"{trouble}; {why}" if trouble else why
