"""Decides whether a run that ended badly is started again, from the ends of its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from console import error_patterns
from console.model import State
from console.run_state import Facts, decide
from trainers.contract import plan as plans
from trainers.contract.plan import Restart

AGAIN: frozenset[State] = frozenset(("crashed", "failed"))
"""States after which a restart may help; an end that a person asked for is final."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one attempt ended. `checkpoint` is the step of the newest one there was then, 0: none.

    `signature` is what failed without what varies ("" where nothing failed by itself, as when a
    signal from outside killed it); `hopeless` says that it will fail again, whatever happens.
    """

    state: State
    why: str
    checkpoint: int = 0
    signature: str = ""
    hopeless: bool = False
    sha: str = ""
    """The commit of the code that it ran."""


@dataclass(frozen=True, slots=True)
class Again:
    """Start once more after `wait_s`; `origin` says in words from where."""

    wait_s: float
    origin: str


def left(ended: Sequence[Ended], policy: Restart, saved: int = 0) -> int:
    """Returns how often a run may be started again if this attempt crashed now.

    `saved` is the step of the newest checkpoint of this attempt, 0 without one.
    """
    former = ended[-1].checkpoint if ended else 0
    now = Ended("crashed", "", max(saved, former))
    return max(0, policy.attempts - _fruitless([*ended, now]))


def after(ended: Sequence[Ended], policy: Restart) -> Again | str:
    """Returns when to start again, or why not ("" where no policy wants it).

    The budget is counted in attempts that brought no new checkpoint, and so is the back-off, which
    doubles each time. The same error twice without a new checkpoint between is not tried again.
    """
    last = ended[-1]
    if policy.when == "never" or last.state not in AGAIN:
        return ""
    if last.hopeless:
        return "not restarted: it would fail in the same way"
    if _same_again(ended):
        return "not restarted: the same error twice without a new checkpoint between"
    fruitless = _fruitless(ended)
    if fruitless >= policy.attempts:
        plural = "s" if fruitless > 1 else ""
        return f"not restarted: {fruitless} attempt{plural} without a new checkpoint"
    wait_s = min(plans.LONGEST_BACKOFF_S, policy.backoff_s * 2 ** max(0, fruitless - 1))
    origin = f"the checkpoint of step {last.checkpoint}" if last.checkpoint else "step 1"
    return Again(wait_s, origin)


def _same_again(ended: Sequence[Ended]) -> bool:
    """Says whether the last attempt failed as the one before, and brought no new checkpoint."""
    if len(ended) < 2 or not ended[-1].signature:
        return False
    last, former = ended[-1], ended[-2]
    return last.signature == former.signature and last.checkpoint <= former.checkpoint


def _fruitless(ended: Sequence[Ended]) -> int:
    """Returns how many of the last attempts in a row brought no new checkpoint."""
    steps = (0, *(each.checkpoint for each in ended))
    brought = [step > before for before, step in pairwise(steps)]
    return [*reversed(brought), True].index(True)


def signature(facts: Facts) -> str:
    """Returns why a run ended badly, the same text whenever it ends so again.

    "" for an end from which nothing follows for the next attempt: a good one, one that was asked
    for, a signal from outside, a lost peer, an end that nobody saw. Steps, pids, ranks, addresses
    and sizes are not in it. Two attempts in a row with the same one, and no checkpoint between
    them, ended of an error that a restart does not cure.
    """
    if not facts.over or decide(facts)[0] not in ("failed", "crashed"):
        return ""
    end = facts.culprit()
    if end is None:
        return f"start:{error_patterns.without_numbers(facts.failure)}" if facts.failure else ""
    if (
        end.signal == "SIGKILL"
        and facts.oom is not None
        and facts.oom.here
        and not end.killed_after_failure
    ):
        return "signal:SIGKILL:out of host memory"
    return "exit:0:left early" if end == facts.exited_early() else end.signature()


def deterministic(facts: Facts) -> bool:
    """Says whether a run ended of an error that comes again at once: settings, usage, imports.

    Such an error refuses the first restart. It therefore needs an exit that the kernel reported and
    an error record of the rank; an error that only a log shows is tried once more.
    """
    end = facts.culprit() if signature(facts) else None
    if end is None or end.signal or not end.error:
        return False
    return end.code in error_patterns.PERMANENT_CODES or error_patterns.is_permanent(end.error)
