"""Whether a run that ended badly is started again: a pure function over how its attempts ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console.model import State
from trainers.contract.plan import Restart

LONGEST_BACKOFF_S = 600.0
AGAIN: frozenset[State] = frozenset(("crashed", "failed"))
"""What can be helped by starting again; an end that a person asked for is final."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one attempt ended. `checkpoint` is the step of the newest one there was then, 0: none.

    `signature` is what failed without what varies ("" where nothing failed by itself, as when a
    signal from outside killed it); `hopeless` says that it will fail again, whatever happens.
    """

    state: State
    why: str
    step: int = 0
    checkpoint: int = 0
    signature: str = ""
    hopeless: bool = False
    stalled: bool = False
    """It was ended because it stalled."""


@dataclass(frozen=True, slots=True)
class Again:
    """Start once more after `wait_s`."""

    wait_s: float
    text: str


def left(ended: Sequence[Ended], policy: Restart) -> int:
    """Returns how many attempts without a new checkpoint may still come."""
    return max(0, policy.attempts - _fruitless(ended))


def after(ended: Sequence[Ended], policy: Restart) -> Again | str:
    """Returns when to start again, or why not ("" where no policy wants it).

    The budget is counted in attempts that brought no new checkpoint, and so is the back-off, which
    doubles each time. The same error twice, and the second time no later, is not tried again.
    """
    last = ended[-1]
    if policy.on == "never" or last.state not in AGAIN or (last.stalled and policy.on != "stall"):
        return ""
    if last.hopeless:
        return "not restarted: it would fail in the same way"
    if _same_again(ended):
        return f"not restarted: the same error twice, the second time at step {last.step}"
    fruitless = _fruitless(ended)
    if fruitless >= policy.attempts:
        plural = "s" if fruitless > 1 else ""
        return f"not restarted: {fruitless} attempt{plural} without a new checkpoint"
    wait_s = min(LONGEST_BACKOFF_S, policy.backoff_s * 2 ** max(0, fruitless - 1))
    origin = f"the checkpoint of step {last.checkpoint}" if last.checkpoint else "step 1"
    return Again(wait_s, f"attempt {len(ended) + 1} begins in {wait_s:g} s from {origin}")


def _same_again(ended: Sequence[Ended]) -> bool:
    """Says whether the last attempt failed as the one before, and came no further."""
    if len(ended) < 2 or not ended[-1].signature:
        return False
    return ended[-1].signature == ended[-2].signature and ended[-1].step <= ended[-2].step


def _fruitless(ended: Sequence[Ended]) -> int:
    """Returns how many of the last attempts in a row brought no new checkpoint."""
    count = 0
    for place in range(len(ended) - 1, -1, -1):
        before = ended[place - 1].checkpoint if place else 0
        if ended[place].checkpoint > before:
            break
        count += 1
    return count
