"""The state of a run and why, decided here and nowhere else.

torchrun returns 1 for everything, so the truth about an end comes from the ranks: how each ended,
in which order, and what it wrote last. A rank that lost its peer is never the one to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from console.model import State
from trainers.contract import jsonl

NAMED_CODES: Mapping[int, str] = {
    10: "non-finite loss or gradients", 11: "out of memory", 12: "data", 13: "configuration",
    14: "a collective failed", 15: "checkpoint",
}  # fmt: skip
COLLECTIVE = 14
LAST_STEP = "done"
"""The reason that a rank gives which took all its steps."""
PEER_SIGNS = (
    "onnection closed by peer", "onnection reset by peer", "another rank is gone",
)  # fmt: skip
NATIVE = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended, and the error it named ("" for none)."""

    rank: int
    code: int | None
    signal: str | None
    step: int
    error: str = ""
    log: str = ""
    """The last exception in its log, for a rank that named no error."""
    culled: bool = False
    """Killed by the supervisor because it outlived another rank's failure."""

    @property
    def bad(self) -> bool:
        return bool(self.signal) or self.code not in (0, None) or bool(self.error)

    @property
    def secondary(self) -> bool:
        """Ended because another rank did: told to by torchrun, or its peer was gone."""
        words = f"{self.error} {self.log}"
        lost_peer = self.code == COLLECTIVE or any(sign in words for sign in PEER_SIGNS)
        told = self.culled or self.signal == "SIGTERM"
        return told or (lost_peer and self.signal is None)

    def sentence(self) -> str:
        at = f" at step {self.step}" if self.step else ""
        if self.signal in NATIVE:
            return f"rank {self.rank} crashed in native code ({self.signal}){at}"
        if self.signal:
            return f"rank {self.rank} was killed by {self.signal}{at}"
        named = NAMED_CODES.get(self.code or 0, "")
        reason = self.error or self.log or named or f"no reason given, see logs of rank {self.rank}"
        code = f" (exit {self.code})" if self.code else ""
        return f"rank {self.rank}: {reason}{at}{code}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the state of a run depends on."""

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
    """What the ranks say that they ended for."""
    told: bool = False
    """Every rank's exit record was read, or they write none: no record was lost."""
    agent_signal: str = ""
    """The signal that torchrun got, "" for none; it then ends the ranks."""
    ending: str = ""
    """Which rank is gone, as soon as torchrun ends the others because of it."""
    world: int = 1
    failure: str = ""
    """Why the run could not even be started, or what broke the supervisor."""
    broken: bool = False
    """The supervisor failed and stopped the ranks itself."""

    @property
    def clean(self) -> bool:
        """All ranks ended with 0, whatever became of torchrun."""
        all_zero = bool(self.ends) and all(end.code == 0 for end in self.ends)
        return self.agent_code == 0 or (all_zero and len(self.ends) == self.world)

    @property
    def halted(self) -> bool:
        """All ranks ended well, before their last step.

        Where a full disk took their records, a halt that was asked for counts as obeyed.
        """
        wanted = self.asked == "halt" or self.halt_file
        return self.clean and (bool(self.halt_steps) or (wanted and not self.told))

    def culprit(self) -> End | None:
        """Returns the rank to blame: the first that ended badly and not because of another."""
        places = {rank: place for place, rank in enumerate(self.order)}
        bad = [end for end in self.ends if end.bad]
        return min(
            bad, key=lambda e: (e.secondary, places.get(e.rank, len(places)), e.rank), default=None
        )


def _halt_words(facts: Facts) -> str:
    steps = sorted(set(facts.halt_steps.values()))
    by = f", asked by {facts.by}" if facts.by and facts.asked == "halt" else ""
    cause = f"{facts.agent_signal} to torchrun" if facts.agent_signal else facts.reason
    by = by or (f" ({cause})" if cause else "")
    if len(steps) == 1:
        who = f"all {len(facts.halt_steps)} ranks" if len(facts.halt_steps) > 1 else "rank 0"
        return f"{who} halted at step {steps[0]}{by}"
    return f"ranks halted at steps {', '.join(map(str, steps))}{by}" if steps else f"halted{by}"


def _done_words(facts: Facts) -> str:
    """A run that needed fewer steps than planned says why."""
    early = f": {facts.reason}" if facts.reason not in ("", LAST_STEP) else ""
    return f"all ranks done after step {facts.step}{early}"


def _error_words(facts: Facts) -> str:
    end = facts.culprit()
    if end is None:
        return facts.failure or "the ranks ended without a word; see torchrun.log"
    others = [e for e in facts.ends if e.rank != end.rank and e.bad and e.secondary]
    if not others:
        return end.sentence()
    ranks = ", ".join(str(e.rank) for e in others[:8])
    plural = "ranks" if len(others) > 1 else "rank"
    return f"{end.sentence()}; {plural} {ranks} ended because of it"


def _trainer_named_it(facts: Facts) -> bool:
    end = facts.culprit()
    return end is not None and not end.signal and (bool(end.error) or end.code in NAMED_CODES)


def _starting_words(facts: Facts) -> str:
    return "torchrun starts the ranks" if facts.spawned else "preparing the run directory"


Rule = tuple[State, Callable[[Facts], bool], Callable[[Facts], str]]

ENDED: tuple[Rule, ...] = (
    ("crashed", lambda f: f.broken, lambda f: f.failure),
    ("crashed", lambda f: f.asked == "restart", lambda f: f"stalled, and ended by {f.by}"),
    ("killed", lambda f: f.asked == "kill", lambda f: f"killed, asked by {f.by}"),
    ("stopped", lambda f: f.asked == "stop" and (not f.clean or bool(f.halt_steps)),
     lambda f: f"stopped, asked by {f.by}"),
    ("halted", lambda f: f.halted or (f.asked == "halt" and not f.spawned), _halt_words),
    ("completed", lambda f: f.clean, _done_words),
    ("stopped", lambda f: bool(f.agent_signal),
     lambda f: f"stopped by {f.agent_signal} to torchrun"),
    ("failed", _trainer_named_it, _error_words),
    ("crashed", lambda f: True, _error_words),
)  # fmt: skip
"""Definitions of the ends; the first that holds is the state."""

LIVE: tuple[Rule, ...] = (
    ("stopping", lambda f: f.asked in ("restart", "stop", "kill"),
     lambda f: f"{f.asked}, asked by {f.by}"),
    ("stopping", lambda f: bool(f.agent_signal),
     lambda f: f"torchrun got {f.agent_signal} and ends the ranks"),
    ("stopping", lambda f: bool(f.ending), lambda f: f.ending),
    ("stalled", lambda f: bool(f.verdict), lambda f: f.verdict),
    ("halting", lambda f: f.asked == "halt" or f.halt_file or f.halting_ranks > 0,
     lambda f: f"halt, asked by {f.by}" if f.by else "a .HALT file or a signal asks for it"),
    ("running", lambda f: f.step > 0,
     lambda f: "torchrun is gone, the ranks go on without it" if f.agent_gone else ""),
    ("starting", lambda f: True, _starting_words),
)  # fmt: skip
"""Definitions of the states while processes may live; the first that holds is the state."""


def decide(facts: Facts) -> tuple[State, str]:
    """Returns the state of a run and the reason for it."""
    for state, holds, why in ENDED if facts.over else LIVE:
        if holds(facts):
            return state, why(facts)
    raise AssertionError("the last rule always holds")


def error_of(record: Mapping[str, Any]) -> str:
    """Returns what a heartbeat of `error` says, "" for other records."""
    if record.get("msg") != "error":
        return ""
    for key in ("error", "reason", "why", "text"):
        text = jsonl.text(record, key)
        if text:
            return text[:400]
    return "an error without words"


def signature(facts: Facts) -> str:
    return ""


def deterministic(facts: Facts) -> bool:
    return False
