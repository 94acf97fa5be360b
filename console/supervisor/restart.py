"""Decides by the restart policy whether a run gets another attempt, and says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from console import plan as plans
from console import rank_end
from console.diagnose.watchdog import STRONG
from console.model import State
from console.plan import Restart
from console.run_state import Facts, decide

RESTARTABLE: frozenset[State] = frozenset(("crashed", "failed"))
"""States after which a restart may help; an end that an operator requested is final."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of one attempt.

    `checkpoint` is the step of the newest checkpoint at that time, or 0 if there was none.
    `signature` is the result of the function `signature`: the error without its variable parts.
    `hopeless` says that a further attempt probably has the same error.
    """

    state: State
    why: str
    checkpoint: int = 0
    signature: str = ""
    hopeless: bool = False
    sha: str = ""
    """The commit of the code that the attempt ran."""


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The next attempt. It begins after `wait_s`, from `origin` (a checkpoint, or step 1)."""

    wait_s: float
    origin: str

    def sentence(self, number: int, is_ours: bool) -> str:
        """Returns when and how attempt `number` starts; a foreign program may ignore `origin`."""
        how = f"from {self.origin}" if is_ours else "with the same command"
        return f"attempt {number} starts in {self.wait_s:g} s {how}"


def armed(
    action: str, text: str, has_memory: bool, ended: Sequence[AttemptEnd], policy: Restart,
    saved: int, is_final: bool,
) -> dict[str, str]:  # fmt: skip
    """Returns the policy on a stall and on a crash, as a sentence and in a few words.

    `action` and `text` are those of the watch rule `stall`. With `is_final`, the end of the run was
    requested, so no further attempt begins.
    """
    if not has_memory and action in STRONG:
        action, text = "warn", "on stall: alert only, there is no shared memory"
    if is_final and action == "restart":
        action, text = "warn", "on stall: alert only"
    short = "alert" if action == "warn" else action
    if policy.when != "never":
        left = 0 if is_final else restarts_left(ended, policy, saved)
        crash = f"restart, {left} left" if left else "no restart left"
        crash = "no restart, because the end of the run was requested" if is_final else crash
        text = f"{text}; on crash: {crash}"
        short = f"{short} ↻{left}"
    return {"armed": text, "armed_short": short}


def restarts_left(ended: Sequence[AttemptEnd], policy: Restart, saved: int = 0) -> int:
    """Returns how many restarts would be left if the present attempt crashed now.

    `saved` is the step of the newest checkpoint of this attempt, or 0 if there is none.
    """
    former = ended[-1].checkpoint if ended else 0
    now = AttemptEnd("crashed", "", max(saved, former))
    return max(0, policy.attempts - _without_checkpoint([*ended, now]))


def next_attempt(ended: Sequence[AttemptEnd], policy: Restart) -> NextAttempt | str:
    """Returns the next attempt, or why there is none.

    The reason is "" if the policy is "never", or if the last attempt neither failed nor crashed.
    No attempt follows a `hopeless` one, or two attempts with the same error and no new checkpoint
    between them. Only the attempts since the last new checkpoint use up the restarts. Each of these
    attempts after the first doubles the back-off, up to `LONGEST_BACKOFF_S`.
    """
    last = ended[-1]
    if policy.when == "never" or last.state not in RESTARTABLE:
        return ""
    if last.hopeless:
        return "not restarted: the same error would occur again"
    if _same_error(ended):
        return "not restarted: two attempts with the same error, no new checkpoint between them"
    count = _without_checkpoint(ended)
    if count >= policy.attempts:
        plural = "s" if count > 1 else ""
        return f"not restarted: {count} attempt{plural} without a new checkpoint"
    wait_s = min(plans.LONGEST_BACKOFF_S, policy.backoff_s * 2 ** max(0, count - 1))
    origin = (
        f"the checkpoint of step {last.checkpoint}" if last.checkpoint else "the start of the run"
    )
    return NextAttempt(wait_s, origin)


def _same_error(ended: Sequence[AttemptEnd]) -> bool:
    """Returns whether the last two attempts had the same error, without a new checkpoint."""
    if len(ended) < 2 or not ended[-1].signature:
        return False
    last, former = ended[-1], ended[-2]
    return last.signature == former.signature and last.checkpoint <= former.checkpoint


def _without_checkpoint(ended: Sequence[AttemptEnd]) -> int:
    """Returns the number of attempts since the last attempt that wrote a new checkpoint."""
    steps = (0, *(each.checkpoint for each in ended))
    new = [step > before for before, step in pairwise(steps)]
    return [*reversed(new), True].index(True)


def signature(facts: Facts) -> str:
    """Returns the error that ended an attempt, without steps, pids, ranks, addresses and sizes.

    The result is "" if the end predicts nothing about the next attempt. Examples are a success, a
    request, a signal from outside, a lost peer and an unknown exit.
    """
    if not facts.over or decide(facts)[0] not in ("failed", "crashed"):
        return ""
    end = facts.culprit()
    if end is None:
        return f"start:{rank_end.without_numbers(facts.failure)}" if facts.failure else ""
    out_of_memory = facts.oom is not None and facts.oom.here
    if end.signal == "SIGKILL" and out_of_memory and not end.killed_after_failure:
        return "signal:SIGKILL:out of host memory"
    return "exit:0:left early" if end == facts.exited_early() else end.signature()


def is_permanent(facts: Facts) -> bool:
    """Returns whether an attempt ended with an error that a restart probably cannot fix.

    After such an error, not even a first restart follows. Therefore the kernel must have reported
    the exit, and the rank must have written an error record. After an error that only a log shows,
    one restart may follow.
    """
    end = facts.culprit() if signature(facts) else None
    if end is None or end.signal or not end.error:
        return False
    return end.known_code == rank_end.CONFIGURATION or rank_end.is_permanent(end.error)
