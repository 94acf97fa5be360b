"""The cases of `make drills` (fault, world, rank, phases), with the right answers."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from benchmarks.drill_faults import FAULTS, Fault

FAULT_STEP = 6
"""The step of the faults outside start-up. The program also saves in this step."""
BOOT = ("early", "late")
"""Places before the first step: at the start, and between the calls of init and join."""
BOOT_PHASES = frozenset(("", "boot", "load"))
OTHER_PHASES = {
    "skip-log": frozenset(("log",)),
    "nosync-backward": frozenset(("backward", "log")),
    "extra-optimizer": frozenset(("optimizer",)),
    "empty-log": frozenset(("log", "backward", "save")),
    "unused-backward": frozenset(("backward", "log")),
    "small-forward": frozenset(("backward",)),
}
"""The right phases of some faults. For other faults in a step, the phase of the fault is right."""
EITHER = frozenset((
    "collect", "average", "check", "lengths", "turns", "small", "worn", "nearby", "share",
))  # fmt: skip
"""Mechanisms that affect both of two ranks alike, so a verdict may name either rank or none."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run; if `rank` is None, all ranks have the fault."""

    fault: str
    world: int
    rank: int | None
    phases: bool

    @property
    def name(self) -> str:
        rank = "all" if self.rank is None else self.rank
        return f"{self.fault} {rank}/{self.world} {'phases' if self.phases else 'lines'}"

    @property
    def in_boot(self) -> bool:
        return BY_NAME[self.fault].phase in BOOT

    @property
    def author(self) -> int:
        return BY_NAME[self.fault].author

    @property
    def words(self) -> str:
        """Returns the text of the file `fault`, which the program reads."""
        step = 0 if self.in_boot else FAULT_STEP
        return f"{self.fault}@{step}:{'all' if self.rank is None else self.rank}"


@dataclass(frozen=True, slots=True)
class Truth:
    """The right answers. `phases` is empty if the program reports no phases."""

    ranks: frozenset[int | None]
    phases: frozenset[str]
    cause: str


BY_NAME = {fault.name: fault for fault in FAULTS}


def _cases(fault: Fault) -> list[Case]:
    found = []
    for word in fault.placed.split():
        world, _, rank = word.rstrip("-").partition(":")
        number = None if rank == "all" else int(rank)
        found.append(Case(fault.name, int(world), number, not word.endswith("-")))
    return found


CASES = tuple(case for fault in FAULTS for case in _cases(fault))


def truth(case: Case) -> Truth:
    """Returns the right ranks, phases and cause of a case."""
    fault = BY_NAME[case.fault]
    ranks = {case.rank}
    if fault.cause == "transport":  # a connection has two ends, so a verdict may name no rank
        ranks |= {None}
    if fault.mechanism in EITHER and case.world == 2:
        ranks |= {None, 0, 1}
    phases = BOOT_PHASES if case.in_boot else frozenset((fault.phase,))
    phases = OTHER_PHASES.get(fault.name, phases)
    return Truth(frozenset(ranks), phases if case.phases else frozenset(), fault.cause)


def chosen(only: str, sample: int, seed: int, author: int | None = None) -> list[Case]:
    """Returns `sample` of the cases whose name matches the pattern `only`, drawn by `seed`.

    If `sample` is 0 or too large, returns all these cases. `author` selects the cases of one
    author. The sample has as many different causes as possible.
    """
    found = [case for case in CASES if re.search(only, case.name) and author in (None, case.author)]
    if not 0 < sample < len(found):
        return found
    rng = random.Random(seed)
    rng.shuffle(found)
    seen: dict[str, int] = {}
    turns = []
    for case in found:
        cause = BY_NAME[case.fault].cause
        turns.append(seen.get(cause, 0))
        seen[cause] = turns[-1] + 1
    order = sorted(range(len(found)), key=lambda place: turns[place])
    return [found[place] for place in sorted(order[:sample])]
