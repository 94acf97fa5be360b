"""The state of a run and why, decided here and nowhere else: for its supervisor and every reader.

torchrun returns 1 for everything, so the truth about an end comes from the ranks: how each ended,
in which order, and what it wrote last. A rank that lost its peer is blamed where no other failed.
A reader believes the supervisor's newest word as long as the processes do not speak against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from console.ending import NAMED_CODES, End
from console.error_patterns import OomEvidence
from console.model import EXIT_CODES, State

LAST_STEP = "done"
"""The reason that a rank gives which took all its steps."""
AT_ONCE_S = 0.5
"""Ranks killed within this time were killed together: torchrun gives those that are left longer."""


@dataclass(frozen=True, slots=True)
class View:
    """A reader's view of a run beside its records: the supervisor's word, and living processes."""

    state: State | None = None
    """In the newest word of the supervisor, None where no document tells of it."""
    why: str = ""
    lives: bool = False
    """The supervisor lives."""
    gone: str = "the supervisor is gone"
    living: str = ""
    """The ranks or processes of the run that live, in words, "" for none."""
    next_attempt: int = 2
    newest: str = ""
    """The age of the newest record, in words, "" without a record."""
    goes_on: bool = False
    """It is on another host, and its newest record is young."""
    behind: bool = False
    """Records are still being read."""
    trouble: str = ""
    """The document of the supervisor is there and cannot be shown, for this reason."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the state of a run depends on.

    The supervisor knows the processes; a reader has the records and its `view`.
    """

    spawned: bool = False
    over: bool = False
    asked: str = ""
    by: str = ""
    halt_file: bool = False
    halting_ranks: int = 0
    step: int = 0
    verdict: str = ""
    agent_code: int | None = None
    agent_gone: bool = False
    ends: Sequence[End] = ()
    order: Sequence[int] = ()
    halt_steps: Mapping[int, int] = field(default_factory=dict)
    reason: str = ""
    """The reason that the ranks give for their end."""
    told: bool = True
    """Every rank's exit record was read, or they write none: no record was lost."""
    agent_signal: str = ""
    """The signal that torchrun's log names at its end, "" for none: a claim, see `told_to_end`."""
    ending: str = ""
    """Which rank failed, as soon as its exit was seen while others still run."""
    world: int = 1
    failure: str = ""
    """The reason for which the run could not be started, or its directory not be read."""
    oom: OomEvidence | None = None
    """The kernel's kills for memory while the ranks ran, None where nobody looked."""
    collecting: bool = False
    """All processes have ended, and their records are still being read."""
    before: str | None = None
    """The reason of the last end, while the run waits for its next attempt: nothing else counts."""
    again: str = ""
    """The time and the checkpoint at which that one begins."""
    view: View = View()
    is_reader: bool = False

    @property
    def halt_wanted(self) -> bool:
        """A halt was asked for, by a request or a `.HALT`."""
        return self.asked == "halt" or self.halt_file

    @property
    def said(self) -> str:
        """The reason of the ranks, as their word and not as ours."""
        return f'the ranks say "{self.reason}"' if self.reason else ""

    @property
    def clean(self) -> bool:
        """All ranks ended with 0, whatever became of torchrun; a bad exit speaks against its 0."""
        if any(end.signal or end.code not in (0, None) for end in self.ends):
            return False
        all_zero = bool(self.ends) and all(end.code == 0 for end in self.ends)
        return self.agent_code == 0 or (all_zero and len(self.ends) == self.world)

    @property
    def told_to_end(self) -> bool:
        """torchrun's log names a signal, torchrun failed, and no rank failed by itself.

        Anybody can print into that log, so the exits have to agree.
        """
        failed = self.agent_code not in (0, None)
        by_itself = any(
            end.bad and not end.secondary and end.signal != self.agent_signal for end in self.ends
        )
        return bool(self.agent_signal) and failed and not by_itself

    @property
    def halted(self) -> bool:
        """All ranks ended well, before their last step.

        A halt that was asked for counts as obeyed if a full disk took their records.
        """
        return self.clean and (bool(self.halt_steps) or (self.halt_wanted and not self.told))

    @property
    def unsure(self) -> bool:
        """All ranks ended well, and whether they were done stood in records that are lost.

        A program may well leave without a last record: then nothing else speaks against its end.
        """
        against = bool(self.failure) or self.agent_code not in (0, None)
        return self.clean and not self.told and against

    @property
    def unseen(self) -> bool:
        """The processes are gone, and nobody saw which ranks there were, or how torchrun ended."""
        return self.spawned and not self.ends and self.agent_code is None and not self.failure

    @property
    def doubted(self) -> End | None:
        """Returns a rank whose good end is doubted, where no rank has ended badly."""
        if any(end.bad for end in self.ends):
            return None
        return next((end for end in self.ends if end.doubt), None)

    @property
    def killed_at_once(self) -> bool:
        """All ranks of a run got SIGKILL in the same moment, and not from here."""
        killed = (end for end in self.ends if end.signal == "SIGKILL" and not end.culled)
        times = [end.ts for end in killed if end.ts is not None]
        return len(times) == self.world > 1 and max(times) - min(times) <= AT_ONCE_S

    def left_early(self) -> End | None:
        """Returns the rank that ended well while the others needed it, None if there is none."""
        bad = [end for end in self.ends if end.bad or end.unknown]
        if not bad or not all(end.lost_peer for end in bad):
            return None
        first = min((self.turn(end) for end in bad), default=0)
        early = [end for end in self.ends if end.code == 0 and self.turn(end) < first]
        return min(early, key=self.turn, default=None)

    def culprit(self) -> End | None:
        """Returns the rank to blame: the first that ended badly and not because of another.

        One whose end nobody knows is blamed before one that was told to end or lost its peer.
        """
        bad = [end for end in self.ends if end.bad or (self.over and end.unknown)]
        return self.left_early() or min(
            bad, key=lambda e: (e.secondary, e.unknown, self.turn(e), e.rank), default=None
        )

    def turn(self, end: End) -> int:
        """Returns its place in the order of the ends, those that are not in it last."""
        return self.order.index(end.rank) if end.rank in self.order else len(self.order)


def _halt_words(facts: Facts) -> str:
    steps = sorted(set(facts.halt_steps.values()))
    by = f", asked by {facts.by}" if facts.by and facts.asked == "halt" else ""
    cause = f"{facts.agent_signal} to torchrun" if facts.told_to_end else facts.said
    by = by or (f" ({cause})" if cause else "")
    if len(steps) == 1:
        who = f"all {len(facts.halt_steps)} ranks" if len(facts.halt_steps) > 1 else "rank 0"
        return f"{who} halted at step {steps[0]}{by}"
    return f"ranks halted at steps {', '.join(map(str, steps))}{by}" if steps else f"halted{by}"


def _done_words(facts: Facts) -> str:
    """A run that needed fewer steps than planned says why."""
    early = f"; {facts.said}" if facts.reason not in ("", LAST_STEP) else ""
    return f"all ranks done after step {facts.step}{early}"


def _unsure_words(facts: Facts) -> str:
    lost = facts.failure or "their last records are not there"
    return (f"all ranks ended with exit 0 after step {facts.step}, but nobody knows whether they "
            f"were done or were halted: {lost}; see their checkpoints and logs")  # fmt: skip


def _doubted_words(facts: Facts) -> str:
    end = facts.doubted
    return f"nobody knows how rank {end.rank} ended: {end.doubt}" if end else ""


def _error_words(facts: Facts) -> str:
    end = facts.culprit()
    if end is None or (end.unknown and facts.failure):
        return facts.failure or "the ranks ended without a word; see torchrun.log"
    if facts.killed_at_once:
        return _at_once_words(facts)
    if end == facts.left_early():
        at = f" at step {end.step}" if end.step else ""
        sentence = f"rank {end.rank} ended first, with exit 0{at}, while the others went on"
    else:
        sentence = _memory_words(facts, end)
    others = [e for e in facts.ends if e.rank != end.rank and e.bad and e.secondary]
    before = [e for e in others if e.lost_peer and facts.turn(e) < facts.turn(end)]
    because = [e for e in others if e not in before]
    told = [f"; {_ranks(before)} exited earlier, with the error of a lost peer"] * bool(before)
    told += [f"; {_ranks(because)} ended because of it"] * bool(because)
    return f"{sentence}{''.join(told)}"


def _ranks(ends: Sequence[End]) -> str:
    """Returns "ranks 0, 2"."""
    return f"rank{'s' * (len(ends) > 1)} {', '.join(str(end.rank) for end in ends[:8])}"


def _at_once_words(facts: Facts) -> str:
    step = f" at step {facts.step}" if facts.step else ""
    who = f"all {facts.world} ranks were killed"
    if facts.oom is not None and facts.oom.here:
        return f"{who} by the kernel at once{step}: out of host memory ({facts.oom.words()})"
    by = "probably from outside, by a scheduler or who ends the container"
    return f"{who} by SIGKILL at once{step}: {by}"


def _memory_words(facts: Facts, end: End) -> str:
    """The sentence on the rank to blame, with what the kernel counted while it ran."""
    oom, sentence = facts.oom, end.sentence()
    if oom is None:
        return sentence
    killed = end.signal == "SIGKILL"
    if oom.here and killed:
        at = f" at step {end.step}" if end.step else ""
        return f"rank {end.rank} was killed by the kernel{at}: out of host memory ({oom.words()})"
    if oom.here:
        return f"{sentence}; the kernel killed a process for host memory ({oom.words()})"
    if oom.perhaps and killed:
        return f"{sentence}, probably by the kernel: the host ran out of memory ({oom.words()})"
    if oom.elsewhere and killed:
        return f"{sentence} (the kernel killed for memory, but not in this cgroup: {oom.words()})"
    return sentence


def _trainer_named_it(facts: Facts) -> bool:
    end = facts.culprit()
    return end is not None and not end.signal and (bool(end.error) or end.code in NAMED_CODES)


def _between_words(facts: Facts) -> str:
    return f"{facts.asked} asked by {facts.by} before the next attempt; before: {facts.before}"


Rule = tuple[State | None, Callable[[Facts], bool], Callable[[Facts], str]]
"""A state, when it holds, and its sentence; None stands for what the supervisor said."""

TOLD: tuple[Rule, ...] = (
    (None, lambda f: f.view.lives and f.view.state is not None, lambda f: f.view.why),
    ("unsupervised", lambda f: f.view.state in EXIT_CODES and bool(f.view.living),
     lambda f: f"its documents say that the run is {f.view.state}, but {f.view.living}; "
               f"{f.view.gone}"),
    (None, lambda f: f.view.state in EXIT_CODES, lambda f: f.view.why),
    ("unsupervised", lambda f: bool(f.view.living),
     lambda f: f"{f.view.gone if f.view.state else 'no document tells of it'}; {f.view.living}"),
    ("lost", lambda f: f.view.state == "restarting" and not f.view.behind,
     lambda f: f"{f.view.gone}, attempt {f.view.next_attempt} does not begin without one; adopt "
               f"it: {f.view.why.partition(': ')[2]}"),
)  # fmt: skip
"""Definitions for a reader: what the supervisor said, unless processes speak against it."""

UNTOLD: tuple[Rule, ...] = (
    ("queued", lambda f: f.view.state is None and not f.view.newest, lambda f: "no record yet"),
    ("unsupervised", lambda f: f.view.state is None, lambda f: f"no supervisor; {f.view.newest}"),
    ("unsupervised", lambda f: f.view.goes_on, lambda f: f"{f.view.gone}; {f.view.newest}"),
    ("unsupervised", lambda f: f.view.behind,
     lambda f: "the supervisor is gone; the records are still being read"),
    ("lost", lambda f: True, lambda f: f"{f.view.gone} and so are all ranks; they left no reason"),
)  # fmt: skip
"""Definitions for a reader where neither the supervisor nor the ranks told of an end."""

BETWEEN: tuple[Rule, ...] = (
    ("killed", lambda f: f.asked == "kill", _between_words),
    ("stopped", lambda f: f.asked == "stop", _between_words),
    ("crashed", lambda f: f.asked == "restart", _between_words),
    ("halted", lambda f: f.asked == "halt", _between_words),
    ("halted", lambda f: f.halt_file, lambda f: f".HALT is there; before: {f.before}"),
    ("restarting", lambda f: True, lambda f: f"{f.again}: {f.before}"),
)  # fmt: skip
"""Definitions while no rank runs and a further attempt would begin."""

ENDED: tuple[Rule, ...] = (
    ("crashed", lambda f: f.asked == "restart", lambda f: f"ended for a restart by {f.by}"),
    ("killed", lambda f: f.asked == "kill", lambda f: f"killed, asked by {f.by}"),
    ("stopped", lambda f: f.asked == "stop" and not (f.clean and f.told and not f.halt_steps),
     lambda f: f"stopped, asked by {f.by}"),
    ("halted", lambda f: f.halted or (f.asked == "halt" and not f.spawned), _halt_words),
    ("stopped", lambda f: f.told_to_end and not (f.clean and f.told),
     lambda f: f"stopped by {f.agent_signal} to torchrun"),
    ("lost", lambda f: f.unsure, _unsure_words),
    ("lost", lambda f: f.unseen,
     lambda f: "nobody saw how torchrun and its ranks ended; see torchrun.log"),
    ("lost", lambda f: f.doubted is not None, _doubted_words),
    ("completed", lambda f: f.clean, _done_words),
    ("failed", _trainer_named_it, _error_words),
    ("crashed", lambda f: True, _error_words),
)  # fmt: skip
"""Definitions of the ends."""

LIVE: tuple[Rule, ...] = (
    ("stopping", lambda f: f.collecting,
     lambda f: "all ranks have ended; their records are still being read"),
    ("stopping", lambda f: f.asked in ("restart", "stop", "kill"),
     lambda f: f"{f.asked}, asked by {f.by}"),
    ("stopping", lambda f: bool(f.ending), lambda f: f.ending),
    ("stalled", lambda f: bool(f.verdict),
     lambda f: f.verdict + "; a halt is pending" * (f.halt_wanted and not f.halting_ranks)),
    ("halting", lambda f: f.halt_wanted or f.halting_ranks > 0,
     lambda f: f"halt, asked by {f.by}" if f.by else "a .HALT file or a signal asks for it"),
    ("running", lambda f: f.step > 0,
     lambda f: "torchrun is gone, the ranks go on without it" if f.agent_gone else ""),
    ("starting", lambda f: True,
     lambda f: "torchrun starts the ranks" if f.spawned else "preparing the run directory"),
)  # fmt: skip
"""Definitions of the states while processes may live."""


CHAPTERS: tuple[tuple[Callable[[Facts], bool], tuple[Rule, ...]], ...] = (
    (lambda f: f.is_reader, TOLD),
    (lambda f: f.before is not None, BETWEEN),
    (lambda f: f.over, ENDED),
    (lambda f: f.is_reader, UNTOLD),
    (lambda f: True, LIVE),
)
"""All definitions in their order: of those that apply, the first that holds is the state."""


def decide(facts: Facts) -> tuple[State, str]:
    """Returns the state of a run and the reason for it."""
    rules = (rule for applies, chapter in CHAPTERS if applies(facts) for rule in chapter)
    state, _, words = next(rule for rule in rules if rule[1](facts))
    trouble, why = facts.view.trouble, words(facts)
    return state or facts.view.state or "lost", f"{trouble}; {why}" if trouble else why
