"""Drills: the faults that a trainer can produce for practice, and the grammar of a drill.

A drill is `KIND@STEP[:RANK[:SECONDS]][!]`; commas separate several drills. RANK is a number or
`all`; the default is 0. A drill without `!` happens in the first attempt only. This module needs
no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainers.contract.errors import UsageError, did_you_mean

Place = Literal["forward", "logits", "loader"]
FOREVER_S = 3600.0
ALL = "all"
GRAMMAR = "KIND@STEP[:RANK[:SECONDS]][!], separated by commas (RANK: a number or all)"
_WORD = re.compile(
    r"(?P<kind>\w+)@(?P<step>[1-9]\d{0,11})"
    r"(:(?P<rank>\d{1,5}|all)(:(?P<amount>\d{1,5}(\.\d{1,3})?))?)?(?P<every>!?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Truth:
    """The right verdict on a fault in a run of two ranks, and the right reactions of an operator.

    A fault shows in one of three ways: a verdict has this `cause` and `phase`, the run ends in the
    state `ends`, or the alert `alert` is raised. `right` has the right actions. "resume" means that
    the ranks step again after a stall; an empty `right` means that no reaction is needed.
    """

    cause: str = ""
    phase: str = "forward"
    ends: str = ""
    alert: str = ""
    right: tuple[str, ...] = ()
    ranked: bool = True
    """False if no record shows the rank of the fault, because all ranks record a common sum."""
    after_s: float = 0.0
    """Additional seconds that `nsa-console drill` waits for the alert, and then for the action."""


STALLS = ("stop", "kill")
"""Right reactions to a rank that does not end its step; a halt would wait until the step ends."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. `amount` is the default of SECONDS; None if the kind accepts none."""

    about: str
    truth: Truth
    amount: float | None = None
    place: Place = "forward"
    lasts: bool = False
    """True if the fault happens in its step and in every later step."""
    least_ranks: int = 1
    """The least number of ranks with which the console can show the fault."""


KINDS: dict[str, Kind] = {
    "raise": Kind("a ValueError in the forward pass", Truth(ends="failed")),
    "exit": Kind("the process exits with code 7 and writes no error record", Truth(ends="crashed")),
    "oom": Kind("the exception of a CUDA device that is out of memory", Truth(ends="failed")),
    "kill": Kind("SIGKILL to itself", Truth(ends="crashed")),
    "segv": Kind("a segmentation fault in native code", Truth(ends="crashed")),
    "stop": Kind("SIGSTOP to itself; SIGCONT resumes it",
                 Truth("stopped", right=("resume", *STALLS))),
    "sleep": Kind("sleeps in the forward pass", Truth("sleep", right=STALLS), FOREVER_S),
    "spin": Kind("a busy Python loop in the forward pass", Truth("busy", right=STALLS), FOREVER_S),
    "gil": Kind("waits in native code and holds the GIL", Truth("native", right=STALLS), FOREVER_S),
    "backward": Kind("sleeps in a hook of the backward pass",
                     Truth("sleep", "backward", right=STALLS), FOREVER_S, "logits"),
    "loader": Kind("the loader's thread sleeps in the read for that step",
                   Truth("loader", "fetch", right=STALLS), FOREVER_S, "loader"),
    "nan": Kind("the loss is NaN", Truth(alert="non_finite", ranked=False), place="logits"),
    "inf_grad": Kind("one gradient is Inf, the loss is finite",
                     Truth(alert="non_finite", ranked=False), place="logits"),
    "slow": Kind("each step from then on takes SECONDS longer in the forward pass",
                 Truth(alert="imbalance", right=("halt",)), 1.0, lasts=True, least_ranks=2),
    "leak": Kind("the process grows by SECONDS MiB in each step from then on",
                 Truth(alert="memory_growth", right=("halt",), after_s=400.0), 2.0, lasts=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drill:
    """One fault that begins at a step; `rank` None means all ranks. `parse` reads `str(drill)`."""

    kind: str
    step: int
    rank: int | None = 0
    amount: float | None = None
    """Seconds, or MiB per step; None if the kind accepts no amount."""
    every_attempt: bool = False

    def __str__(self) -> str:
        rank = ALL if self.rank is None else self.rank
        amount = "" if self.amount is None else f":{self.amount:.3f}".rstrip("0").rstrip(".")
        return f"{self.kind}@{self.step}:{rank}{amount}{'!' if self.every_attempt else ''}"


def parse(text: str, named: str) -> tuple[Drill, ...]:
    """Returns the drills in `text`. Raises UsageError; its message begins with `named`."""
    return tuple(_one(word.strip(), named) for word in text.split(",")) if text else ()


def _one(word: str, named: str) -> Drill:
    name = word.partition("@")[0]
    kind, found = KINDS.get(name), _WORD.fullmatch(word)
    if kind is None:
        raise UsageError(f"{named}: there is no drill {name!r}{did_you_mean(name, KINDS)}")
    if found is None:
        raise UsageError(f"{named}: the drill {word!r} is not {GRAMMAR}")
    amount = float(found["amount"]) if found["amount"] else kind.amount
    if found["amount"] and kind.amount is None:
        raise UsageError(f"{named}: the drill {word!r} is rejected: {name} accepts no SECONDS")
    rank = None if found["rank"] == ALL else int(found["rank"] or 0)
    return Drill(name, int(found["step"]), rank, amount, bool(found["every"]))
