"""The faults of `make drills` with their true cause, and the cases: fault, world, rank, phases."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

CAUSES = (
    "stopped", "traced", "frozen", "exited", "disk", "loader", "child", "lock", "pipe", "network",
    "busy", "native", "mismatch", "sleep", "transport", "startup",
)  # fmt: skip
FAULT_STEP = 6
"""A step after the first, in which all phases occur."""
BOOT = ("early", "late")
"""Places before the first step: before anything else, and before the second of init and join."""
BOOT_PHASES = frozenset(("", "boot", "load"))
OTHER_PHASES = {
    "skip-log": frozenset(("log",)),
    "nosync-backward": frozenset(("backward", "log")),
    "extra-optimizer": frozenset(("optimizer",)),
    "empty-log": frozenset(("log", "backward", "save")),
}
"""Right phases where the culprit waits in another phase than the one of its fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One mechanism in one phase. `placed` is a word per case: `2:0` is rank 0 of 2.

    A trailing `-` means that the program joins with three lines and reports no phases.
    """

    name: str
    cause: str
    placed: str

    @property
    def phase(self) -> str:
        return self.name.rpartition("-")[2]


@dataclass(frozen=True, slots=True)
class Case:
    """One run; `rank` None stands for all ranks."""

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
    def words(self) -> str:
        """Returns the value of `FAULT` for the program."""
        step = 0 if self.in_boot else FAULT_STEP
        return f"{self.fault}@{step}:{'all' if self.rank is None else self.rank}"


@dataclass(frozen=True, slots=True)
class Truth:
    """The right answers. `phases` is empty where the program reports none."""

    ranks: frozenset[int | None]
    phases: frozenset[str]
    cause: str


FAULTS = (
    Fault("sleep-fetch", "sleep", "2:0 4:3 2:1-"),
    Fault("sleep-forward", "sleep", "2:1 4:0 2:0-"),
    Fault("sleep-backward", "sleep", "2:1 4:3-"),
    Fault("sleep-optimizer", "sleep", "2:0 4:3"),
    Fault("sleep-log", "sleep", "2:0 2:1-"),
    Fault("sleep-save", "sleep", "2:0 4:3"),
    Fault("poll-save", "sleep", "2:1"),
    Fault("poll-fetch", "sleep", "4:0-"),
    Fault("count-forward", "busy", "2:1 2:0-"),
    Fault("count-backward", "busy", "4:3"),
    Fault("count-log", "busy", "2:0"),
    Fault("iterate-optimizer", "busy", "2:1 2:1-"),
    Fault("mutex-forward", "native", "2:0 4:3-"),
    Fault("power-backward", "native", "2:1"),
    Fault("mutex-optimizer", "native", "2:1-"),
    Fault("regex-fetch", "native", "2:1"),
    Fault("skip-log", "mismatch", "2:1 4:0 2:0-"),
    Fault("extra-optimizer", "mismatch", "2:0 4:3 2:1-"),
    Fault("swap-log", "mismatch", "2:1 4:3 4:0-"),
    Fault("nosync-backward", "mismatch", "2:0 4:3 2:1-"),
    Fault("empty-log", "mismatch", "2:1 4:0-"),
    Fault("lock-forward", "lock", "2:0 4:3-"),
    Fault("deadlock-save", "lock", "2:1"),
    Fault("event-optimizer", "lock", "2:0 2:1-"),
    Fault("future-log", "lock", "4:3"),
    Fault("flock-save", "lock", "2:0 2:1-"),
    Fault("fcntl-log", "lock", "2:1"),
    Fault("worker_stopped-fetch", "loader", "2:0 4:3-"),
    Fault("worker_asleep-fetch", "loader", "2:1 2:0-"),
    Fault("worker_busy-fetch", "loader", "4:0"),
    Fault("pool-fetch", "loader", "2:1"),
    Fault("thread_asleep-fetch", "loader", "2:0 2:1-"),
    Fault("thread_died-fetch", "loader", "2:1"),
    Fault("child-log", "child", "2:0 4:3-"),
    Fault("output-save", "child", "2:1"),
    Fault("paused-save", "child", "2:0 2:1-"),
    Fault("fifo-log", "pipe", "2:1 2:0-"),
    Fault("mute-fetch", "pipe", "4:3"),
    Fault("full-log", "pipe", "2:0 2:1-"),
    Fault("recv-fetch", "network", "2:1 2:0-"),
    Fault("http-log", "network", "2:0"),
    Fault("send-save", "network", "4:3-"),
    Fault("stop-forward", "stopped", "2:1 4:0 2:0-"),
    Fault("stop-backward", "stopped", "4:3"),
    Fault("trace-forward", "traced", "2:0 2:1-"),
    Fault("freeze-optimizer", "frozen", "2:1 4:0 2:0-"),
    Fault("exit-fetch", "exited", "2:1 4:0-"),
    Fault("kill-forward", "exited", "2:0 4:3 2:1-"),
    Fault("segv-optimizer", "exited", "2:1"),
    Fault("sleep-early", "startup", "2:1 2:0-"),
    Fault("sleep-late", "startup", "2:0 4:3-"),
    Fault("filter-backward", "transport", "2:all 4:all 2:all-"),
    Fault("filter-log", "transport", "2:1"),
    Fault("disk-save", "disk", "2:0 2:1-"),
    Fault("disk-log", "disk", "2:1"),
    Fault("fuse-forward", "disk", "2:1 2:0-"),
)
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
    """Returns the right rank, phase and cause of a case."""
    fault = BY_NAME[case.fault]
    ranks = {case.rank}
    if fault.cause == "transport":  # a connection has two ends
        ranks |= {None}
    phases = BOOT_PHASES if case.in_boot else frozenset((fault.phase,))
    phases = OTHER_PHASES.get(fault.name, phases)
    return Truth(frozenset(ranks), phases if case.phases else frozenset(), fault.cause)


def chosen(only: str, sample: int, seed: int) -> list[Case]:
    """Returns the cases in whose name `only` is found; of them `sample` (0: all), by `seed`.

    A sample takes as many causes as it can before it takes a second case of one.
    """
    found = [case for case in CASES if re.search(only, case.name)]
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
